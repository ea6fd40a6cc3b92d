// What the persistent kernels of norm backward share: the shape of their shared memory, rows into it and vectors out of
// it, and the way of the column sums out of the registers.
#pragma once

#include "rows_common.cuh"

namespace ampkernels::cuda {
namespace {

struct BwdShape {
  TeamShape team;
  int groups;  // CTAs (clusters) that add rows
  int step;    // the slots of all of them
  int stages;
  int s_bytes;  // of one slot and stage
  int dy_bytes;
  int weight_at;  // offsets into shared memory
  int scratch_at;
  int barriers_at;
  int out_at;  // these two norm_bwd_shifted's
  int statistics_at;
};

// cp_async_16 without its L2 hint, which has not been timed here. Zeroes the rest of 16 bytes.
__device__ __forceinline__ void copy_unit(uint32_t to, const char* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// 4 bytes into shared memory.
__device__ __forceinline__ void copy_word(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// `count` elements of a row into shared memory: unit-stride rows as they lie, beginning at the 16-byte unit that holds
// the first element; others element by element, each lane its own vectors.
template <int V, int K>
__device__ __forceinline__ void copy_row(char* to, const char* row, int64_t stride, DType dtype, int count, int lane,
                                         int lanes) {
  const int size = element_size(dtype);
  if (stride == 1) {
    const int shift = int(misalignment(row, 16)), bytes = shift + count * size;
    const char* from = row - shift + lane * 16;
    uint32_t at = uint32_t(__cvta_generic_to_shared(to)) + lane * 16;
#pragma unroll 4
    for (int b = lane * 16; b < bytes; b += lanes * 16) {
      copy_unit(at, from, min(bytes - b, 16));
      at += lanes * 16;
      from += lanes * 16;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < K * V; ++i) {
      const int c = (lane + i / V * lanes) * V + i % V;
      if (c >= count) continue;
      const char* from = row + int64_t(c) * stride * size;
      if (size == 2)
        *reinterpret_cast<uint16_t*>(to + c * 2) = *reinterpret_cast<const uint16_t*>(from);
      else if (size == 4)
        *reinterpret_cast<uint32_t*>(to + c * 4) = *reinterpret_cast<const uint32_t*>(from);
      else
        *reinterpret_cast<uint64_t*>(to + c * 8) = *reinterpret_cast<const uint64_t*>(from);
    }
  }
}

template <int U>
__device__ __forceinline__ void read_unit(uint32_t* w, const char* p) {
  if constexpr (U == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else if constexpr (U == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    w[0] = v.x, w[1] = v.y;
  } else {
    w[0] = *reinterpret_cast<const uint32_t*>(p);
  }
}

// Vector j of a row that copy_row put at `from`, the first element `shift` bytes in.
template <typename D, int V, typename C>
__device__ __forceinline__ void read_vector(const char* from, int shift, int j, C (&v)[V]) {
  using P = Pack<D, V>;
  constexpr int B = P::kBytes, U = P::kUnit, W = U / 4, kUnits = B / U;
  P pack;
  const int off = shift & (U - 1);
  const char* p = from + (shift - off) + j * B;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) read_unit<U>(pack.w + u * W, p + u * U);
  if (off) {
    uint32_t next[W];
    read_unit<U>(next, p + B);
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      funnel<W>(pack.w + u * W, pack.w + u * W, u + 1 < kUnits ? pack.w + (u + 1) * W : next, off);
  }
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] = to_compute<C>(pack.element(e));
}

// One vector as it lies in shared memory at `at`, its 16-byte units `hop` bytes apart.
template <typename D, int V>
__device__ __forceinline__ Pack<D, V> read_shared(uint32_t at, int hop) {
  Pack<D, V> pack;
#pragma unroll
  for (int u = 0; u < Pack<D, V>::kBytes / 16; ++u)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.w[u * 4]), "=r"(pack.w[u * 4 + 1]), "=r"(pack.w[u * 4 + 2]), "=r"(pack.w[u * 4 + 3])
                 : "r"(at + u * hop)
                 : "memory");
  return pack;
}
// Keeps a value from being computed ahead of its use, for which there are no registers.
template <typename I>
[[maybe_unused]] __device__ __forceinline__ void here(I& v) {
  asm volatile("" : "+r"(v));
}

// v += vector j of a row of any dtype and stride.
template <typename T, int V, typename C>
__device__ __forceinline__ void add_vector(const RowsIn& m, const char* row, int j, int limit, C (&v)[V]) {
  const auto add = [&]<typename D>() {
    Vectors<D, V, 1> r;
    r.load(row, m.col_stride, j, 1, limit);
    C a[V];
    r.get(0, a);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] += a[e];
  };
  with_dtype<T>(m.dtype, add, [&] {
    C a[1][V];
    load_other(row, m.dtype, m.col_stride, j, 1, limit, a);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] += a[0][e];
  });
}

// The weights of this CTA's columns, with `offset`, into shared memory: in fp32, 16-byte unit u of vector j at
// u * (vectors of the segment) + j; or, where W is T, as stored, without it. All lanes of a row call it.
template <typename T, typename W>
__device__ __forceinline__ void place_weights(const NormBwdParams& p, const BwdShape& shape, int64_t begin, int limit,
                                              float offset, int lane, int lanes) {
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  char* const weight = rows_shared + shape.weight_at;
  const auto place = [&]<typename P>() {
    Vectors<P, V, K> w;
    w.load(static_cast<const P*>(p.weight.data) + begin, 1, lane, lanes, limit);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = lane + k * lanes;
      if constexpr (sizeof(W) == 2) {
        *reinterpret_cast<uint4*>(weight + j * 16) = *reinterpret_cast<const uint4*>(w.pack[k].w);
      } else {
        C v[V];
        w.get(k, v);
#pragma unroll
        for (int e = 0; e < V; ++e) reinterpret_cast<C*>(weight + (e / 4 * lanes * K + j) * 16)[e % 4] = v[e] + offset;
      }
    }
  };
  if constexpr (sizeof(W) == 2) {
    place.template operator()<W>();
  } else if (p.weight.data && p.weight.stride == 1 && p.weight.dtype == dtype_of<T>::value) {
    place.template operator()<T>();
  } else if (p.weight.data && p.weight.stride == 1 && p.weight.dtype == dtype_of<Paired<T>>::value) {
    place.template operator()<Paired<T>>();
  } else {
    for (int c = lane; c < lanes * K * V; c += lanes) {
      C w = c < limit ? C(1) : C(0);
      if (p.weight.data && c < limit)
        w = load_as<C>(p.weight.data, p.weight.dtype, (begin + c) * p.weight.stride) + offset;
      reinterpret_cast<C*>(weight + (c % V / 4 * lanes * K + c / V) * 16)[c % 4] = w;
    }
  }
}

// Adds the slots' sums of this CTA's columns, in order, into the group's place in the workspace.
template <int K, int V, typename C>
__device__ __forceinline__ void publish(C* partial, const C (&v)[K][V], int slot, int slots, int lane, int lanes,
                                        int limit) {
  C* const all = reinterpret_cast<C*>(rows_shared);
  const int segment = lanes * K * V;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) all[slot * segment + (lane + k * lanes) * V + e] = v[k][e];
  __syncthreads();
  for (int c = int(threadIdx.x); c < limit; c += int(blockDim.x)) {
    C sum = 0;
#pragma unroll 8
    for (int i = 0; i < slots; ++i) sum += all[i * segment + c];
    partial[c] = sum;
  }
}

}  // namespace
}  // namespace ampkernels::cuda
