// What the row kernels share: how a row is dealt to lanes, how its vectors are read and written at any alignment, and how
// the lanes of a row agree on a sum.
//
// Layout. A row is a sequence of vectors of V elements, V = 16 bytes of the row's dtype, counted from the row's first
// element wherever that lies in memory. Lane t of the L lanes of a row holds vectors t, L + t, 2L + t, ... (in a cluster,
// offset by the CTA's share). Sums run over the elements a lane holds, then over lanes by butterfly, then over warps and
// CTAs in a fixed order. None of it depends on addresses, so a row has the same bits at every alignment.
//
// Alignment. Memory is always accessed in aligned units (16 bytes, or less where a vector is less). A vector that starts
// off a unit is cut out of two neighbouring units with funnel shifts; on the way out, lanes pass the bytes that belong to
// a neighbour's unit by shuffle, and only the ends of a warp's stretch are written element by element. The units that
// straddle a row's end are read element by element, so nothing past the end of a tensor is touched.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "../plan/rows_plan.h"
#include "ampkernels/convert.h"
#include "ampkernels/params.h"
#include "launch.h"

namespace ampkernels::cuda {

// The plan's constants as device code may name them.
template <RowsOp kOp, typename T>
inline constexpr int kVectorsPerThread = rows_vectors_per_thread(kOp, dtype_of<T>::value);
template <typename T>
inline constexpr int kVector = rows_vector(dtype_of<T>::value);

__device__ __forceinline__ int element_size(DType dtype) {
  return dtype == DType::kBool ? 1 : dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat64 ? 8 : 2;
}

// ----------------------------------------------------------------------------------------------------------- PTX wrappers

// Programmatic dependent launch: nothing is read or written before `wait`; `launch_dependents` lets the next kernel's CTAs
// take their places while this grid drains.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
#else
  return 0;
#endif
}
__device__ __forceinline__ int64_t row_group_index(int cluster) {  // of the CTA, or of its cluster
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    uint32_t id;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
  }
#endif
  return blockIdx.x;
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier) {  // one arrival per phase
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}
// `bytes` (a multiple of 16) into shared memory, counted on `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
// Writes `value` to the address `local` has in CTA `rank` of the cluster, and counts its bytes on that CTA's `barrier`: no
// fence, where a release on the cluster barrier would wait for every global store in flight.
template <typename C>
__device__ __forceinline__ void store_remote_shared(C* local, uint64_t* barrier, int rank, C value) {
#if __CUDA_ARCH__ >= 900
  uint32_t to, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(local)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));
  if constexpr (sizeof(C) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(bit_cast<uint32_t>(value)), "r"(remote_barrier)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(bit_cast<uint64_t>(value)), "r"(remote_barrier)
                 : "memory");
#endif
}

// An aligned unit of U bytes. Rows are read once: they do not displace the weights and masks in L1 (kStream).
enum class Cache { kStream, kKeep };

template <int U, Cache kCache>
__device__ __forceinline__ void load_unit(uint32_t* w, const char* p) {
  if constexpr (U == 16) {
    if constexpr (kCache == Cache::kStream)
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "l"(p));
    else
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "l"(p));
  } else if constexpr (U == 8) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
  } else {
    static_assert(U == 4);
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
  }
}
template <int U>
__device__ __forceinline__ void store_unit(char* p, const uint32_t* w) {
  if constexpr (U == 16)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  else if constexpr (U == 8)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
  else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory");
}

// ------------------------------------------------------------------------------------------------------------- arithmetic

// 2^t, at most 2 units in the last place of fp32 off. kFlush: subnormal results become 0, two instructions less.
template <bool kFlush>
__device__ __forceinline__ float exp2_fp32(float t) {
  float e;
  if constexpr (kFlush)
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
  else
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(t));
  return e;
}

// e^(d + rest), d <= 0, rest what d's own rounding left. That rounding and the one of d * log2(e) would each cost |d| 2^-24
// of the result; both are taken back to first order.
__device__ __forceinline__ float exp_of(float d, float rest = 0) {
  const float t = d * 1.44269504f;
  const float lost = fmaf(d, 1.92596299e-8f, fmaf(rest, 1.44269504f, fmaf(d, 1.44269504f, -t)));
  const float e = exp2_fp32<false>(t);
  return d < -110.0f ? e : fmaf(e * lost, 0.693147181f, e);  // past the range: e is 0, and `lost` may be inf
}
__device__ __forceinline__ double exp_of(double d, double rest = 0) {
  const double e = exp(d);
  return d < -800.0 ? e : fma(e, rest, e);
}

// e^(s - max) over a row. Results of 16 bits take one fma: 2^(s log2(e) - max log2(e)), where the rounding of max log2(e)
// is common to the row and cancels in the quotient; a max so large that this rounding is no small factor takes one more step.
template <typename C>
struct RowExp {
  C max, offset;
  bool huge;
  __device__ __forceinline__ explicit RowExp(C largest) : max(largest), offset(-largest * C(1.44269504)) {
    huge = fabs(largest) > C(65536) && fabs(largest) < C(INFINITY);
  }
  __device__ __forceinline__ C precise(C s) const {
    const C d = s - max, back = d - s;  // d + rest = s - max, exactly
    return exp_of(d, (s - (d - back)) - (max + back));
  }
  __device__ __forceinline__ C coarse(C s) const { return exp2_fp32<true>(fmaf(s, 1.44269504f, offset)); }
  __device__ __forceinline__ C coarse_huge(C s) const { return exp2_fp32<true>((s - max) * 1.44269504f); }
};

// Replaces the scores of a row by their exponentials.
template <int K, int V>
__device__ __forceinline__ void exponentials(const RowExp<float>& row, bool precise, float (&s)[K][V]) {
  if (precise) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = row.precise(s[k][e]);
  } else if (row.huge) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = row.coarse_huge(s[k][e]);
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = row.coarse(s[k][e]);
  }
}

struct Max {
  template <typename C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return fmax(a, b);  // drops NaN: the sum of the exponentials brings it back
  }
};
struct Sum {
  template <typename C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return a + b;
  }
};

// The sum (maximum) of V values as a tree: shorter chains, smaller error.
template <int V, typename C, typename Op>
__device__ __forceinline__ C tree(const C (&v)[V], Op op) {
  C t[V];
#pragma unroll
  for (int e = 0; e < V; ++e) t[e] = v[e];
#pragma unroll
  for (int width = V / 2; width > 0; width /= 2)
#pragma unroll
    for (int e = 0; e < width; ++e) t[e] = op(t[e], t[e + width]);
  return t[0];
}

// Compute type C from a stored element; exact but for fp64 parameters of an fp32 computation.
template <typename C, typename D>
__device__ __forceinline__ C to_compute(D v) {
  if constexpr (sizeof(D) == 1)
    return C(v);
  else if constexpr (sizeof(D) == 8)
    return round_to<C>(v);
  else
    return C(to_float(v));
}

// Two values rounded into one word by one instruction: the bits of convert.h's round_to, twice.
template <typename O>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  if constexpr (dtype_of<O>::value == DType::kBFloat16)
    return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
  else
    return bit_cast<uint32_t>(__floats2half2_rn(low, high));
}

// A run-time dtype D next to rows of T: `f` is compiled for the dtypes that occur together (T itself, fp32 next to 16-bit
// rows, bf16 next to fp32 rows), `other` handles the rest element by element. Uniform branches, placed around the loop
// over a lane's vectors.
template <typename T>
using Paired = std::conditional_t<sizeof(T) == 4, bfloat16_t, float>;
static_assert(rows_paired_dtype(DType::kBFloat16) == dtype_of<Paired<bfloat16_t>>::value);
static_assert(rows_paired_dtype(DType::kFloat32) == dtype_of<Paired<float>>::value);

template <typename T, typename F, typename G>
__device__ __forceinline__ void with_dtype(DType dtype, F&& f, G&& other) {
  if (dtype == dtype_of<T>::value)
    f.template operator()<T>();
  else if (dtype == dtype_of<Paired<T>>::value)
    f.template operator()<Paired<T>>();
  else
    other();
}

// --------------------------------------------------------------------------------------------------------------- vectors

// V elements of type D as words.
template <typename D, int V>
struct Pack {
  static constexpr int kBytes = V * int(sizeof(D));
  static constexpr int kUnit = kBytes < 16 ? kBytes : 16;
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t w[kWords];

  __device__ __forceinline__ D element(int e) const {
    if constexpr (sizeof(D) == 8)
      return bit_cast<D>(uint64_t(w[2 * e]) | uint64_t(w[2 * e + 1]) << 32);
    else if constexpr (sizeof(D) == 4)
      return bit_cast<D>(w[e]);
    else if constexpr (sizeof(D) == 2)
      return bit_cast<D>(uint16_t(w[e / 2] >> (16 * (e & 1))));
    else
      return bit_cast<D>(uint8_t(w[e / 4] >> (8 * (e & 3))));
  }
  __device__ __forceinline__ void set(int e, D v) {  // onto zeroed words
    if constexpr (sizeof(D) == 8) {
      w[2 * e] = uint32_t(bit_cast<uint64_t>(v));
      w[2 * e + 1] = uint32_t(bit_cast<uint64_t>(v) >> 32);
    } else if constexpr (sizeof(D) == 4) {
      w[e] = bit_cast<uint32_t>(v);
    } else if constexpr (sizeof(D) == 2) {
      w[e / 2] |= uint32_t(bit_cast<uint16_t>(v)) << (16 * (e & 1));
    } else {
      w[e / 4] |= uint32_t(bit_cast<uint8_t>(v)) << (8 * (e & 3));
    }
  }
  template <typename C>
  __device__ __forceinline__ void round_from(const C (&v)[V]) {
    if constexpr (sizeof(D) == 2 && sizeof(C) == 4) {
#pragma unroll
      for (int e = 0; e < V; e += 2) w[e / 2] = round_pair<D>(v[e], v[e + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = 0;
#pragma unroll
      for (int e = 0; e < V; ++e) set(e, round_to<D>(v[e]));
    }
  }
};

// Drops the first kStep words of a[N] if `take`.
template <int kStep, int N>
__device__ __forceinline__ void drop_words(uint32_t (&a)[N], bool take) {
#pragma unroll
  for (int i = 0; i + kStep < N; ++i) a[i] = take ? a[i + kStep] : a[i];
}

// The W words that start `shift` bytes into the 2W words (low, high), 0 <= shift <= 4W.
template <int W>
__device__ __forceinline__ void funnel(uint32_t* out, const uint32_t* low, const uint32_t* high, uint32_t shift) {
  uint32_t a[2 * W + 1];
#pragma unroll
  for (int i = 0; i < W; ++i) {
    a[i] = low[i];
    a[W + i] = high[i];
  }
  a[2 * W] = 0;
  if constexpr (W >= 4) drop_words<4>(a, shift & 16);
  if constexpr (W >= 2) drop_words<2>(a, shift & 8);
  drop_words<1>(a, shift & 4);
#pragma unroll
  for (int i = 0; i < W; ++i) out[i] = __funnelshift_r(a[i], a[i + 1], 8 * (shift & 3));
}

__device__ __forceinline__ uint32_t misalignment(const void* p, int unit) {
  return uint32_t(reinterpret_cast<uintptr_t>(p)) & uint32_t(unit - 1);
}

// K vectors of a row, as stored.
template <typename D, int V, int K>
struct Vectors {
  using P = Pack<D, V>;
  static constexpr int B = P::kBytes, U = P::kUnit, kUnits = B / U;
  P pack[K];

  // Vectors first, first + step, ... of the row at `row`, of which `limit` elements exist (0 past them).
  // keep: bit k clear skips vector k.
  template <Cache kCache = Cache::kStream>
  __device__ __forceinline__ void load(const void* row, int64_t stride, int first, int step, int limit,
                                       uint32_t keep = ~0u) {
    const char* p = static_cast<const char*>(row);
    uint32_t shift = 0;
    int whole = 0;  // vectors [0, whole) can be read in units that do not pass the end
    if constexpr (B >= 4) {
      if (stride == 1) {
        shift = misalignment(p, U);
        whole = shift ? max(limit * int(sizeof(D)) - (U - int(shift)), 0) / B : limit / V;
      }
    }
    const char* at = p - shift + int64_t(first) * B;
    const int64_t hop = int64_t(step) * B;
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) pack[k].w[i] = 0;
      if constexpr (B >= 4)
        if (first + k * step < whole && (keep >> k & 1))
#pragma unroll
          for (int u = 0; u < kUnits; ++u) load_unit<U, kCache>(pack[k].w + u * (U / 4), at + k * hop + u * U);
    }
    if constexpr (B >= 4) {
      if (shift) shift_in(at + B, hop, first, step, whole, keep, shift);
    }
    if (whole * V < limit) load_ends(p, stride, first, step, whole, limit, keep);
  }

  // The same for a unit-stride row that begins on 16 bytes and is a whole number of vectors long.
  template <Cache kCache = Cache::kStream>
  __device__ __forceinline__ void load_aligned(const void* row, int first, int step, int vectors) {
    const char* at = static_cast<const char*>(row) + int64_t(first) * B;
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) pack[k].w[i] = 0;
      if (first + k * step < vectors)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) load_unit<U, kCache>(pack[k].w + u * (U / 4), at + k * step * B + u * U);
    }
  }

  template <bool kAligned, Cache kCache = Cache::kStream>
  __device__ __forceinline__ void load_unit_stride(const void* row, int first, int step, int limit) {
    if constexpr (kAligned)
      load_aligned<kCache>(row, first, step, (limit + V - 1) / V);
    else
      load<kCache>(row, 1, first, step, limit);
  }

  // Keeps the compiler from holding on to widened copies: the stored form takes half the registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) asm volatile("" : "+r"(pack[k].w[i]));
  }

  template <typename C>
  __device__ __forceinline__ void get(int k, C (&v)[V]) const {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = to_compute<C>(pack[k].element(e));
  }

 private:
  // The unit after each vector is another lane's: in L1 by now, or soon.
  __device__ __forceinline__ void shift_in(const char* after, int64_t hop, int first, int step, int whole, uint32_t keep,
                                           uint32_t shift) {
    constexpr int W = U / 4, kBatch = K < 4 ? K : 4;
#pragma unroll
    for (int k0 = 0; k0 < K; k0 += kBatch) {
      uint32_t next[kBatch][W];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int w = 0; w < W; ++w) next[i][w] = 0;
        if (first + (k0 + i) * step < whole && (keep >> (k0 + i) & 1))
          load_unit<U, Cache::kKeep>(next[i], after + (k0 + i) * hop);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          uint32_t* w = pack[k0 + i].w + u * W;
          funnel<W>(w, w, u + 1 < kUnits ? w + W : next[i], shift);
        }
    }
  }

  // Element by element: the one or two vectors at the end of a row, and all of a row that is not unit-stride. The loop is
  // rolled: few lanes have anything to do in it.
  __device__ __forceinline__ void load_ends(const char* p, int64_t stride, int first, int step, int whole, int limit,
                                            uint32_t keep) {
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int j = first + k * step;
      if (j < whole || int64_t(j) * V >= limit || !(keep >> k & 1)) continue;
      P end;
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) end.w[i] = 0;
      const char* q = p + int64_t(j) * V * stride * int64_t(sizeof(D));
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if (j * V + e < limit) end.set(e, *reinterpret_cast<const D*>(q));
        q += stride * int64_t(sizeof(D));
      }
#pragma unroll
      for (int i = 0; i < K; ++i)
        if (i == k) pack[i] = end;
    }
  }
};

// The same in the compute type, from any dtype, element by element.
template <int V, int K, typename C>
__device__ __forceinline__ void load_other(const void* row, DType dtype, int64_t stride, int first, int step, int limit,
                                           C (&v)[K][V]) {
#pragma unroll 1
  for (int i = 0; i < K * V; ++i) {
    const int64_t c = int64_t(first + i / V * step) * V + i % V;
    const C value = c < limit ? load_as<C>(row, dtype, c * stride) : C(0);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) v[k][e] = i == k * V + e ? value : v[k][e];
  }
}

// Rounds vector j of a row once and writes it; `limit` elements of the row exist. `lane` is the lane's place among those
// of the row, `lanes` of them: lane - 1 holds vector j - 1. All lanes of the warp call it together; `shifted` is the
// same for all of them: whether any of their rows starts off a unit.
template <typename O, int V, typename C>
__device__ __forceinline__ void store_vector(char* row, int64_t stride, int j, int limit, int lane, int lanes, bool shifted,
                                             const C (&v)[V]) {
  using P = Pack<O, V>;
  constexpr int B = P::kBytes, U = P::kUnit, W = U / 4, kUnits = B / U;
  P own;
  own.round_from(v);
  const int count = limit - j * V;  // elements of this vector that exist, if positive
  uint32_t single = count > 0 ? (1u << min(count, V)) - 1 : 0;  // elements written one by one
  const uint32_t shift = misalignment(row, U);
  if (stride == 1 && count >= V) single = 0;
  char* at = row + int64_t(j) * B - shift;
  if (!shifted) {
    if (stride == 1 && count >= V)
#pragma unroll
      for (int u = 0; u < kUnits; ++u) store_unit<U>(at + u * U, own.w + u * W);
  } else {
    // Unit u of this lane begins `shift` bytes before its vector's unit u; the first holds bytes of the lane before.
    uint32_t before[W];
#pragma unroll
    for (int i = 0; i < W; ++i) before[i] = __shfl_up_sync(0xffffffffu, own.w[(kUnits - 1) * W + i], 1);
    if (stride == 1 && count >= V) {
      const bool joined = shift == 0 || (lane & 31) != 0;
      const bool joined_after = shift == 0 || ((lane & 31) != 31 && lane + 1 < lanes && count >= 2 * V);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint32_t out[W];
        funnel<W>(out, u == 0 ? before : own.w + (u - 1) * W, own.w + u * W, U - shift);
        if (u > 0 || joined) store_unit<U>(at + u * U, out);
      }
      if (!joined) single = (1u << ((U - shift) / sizeof(O))) - 1;
      if (!joined_after) single |= ((1u << V) - 1) & ~((1u << ((B - shift) / sizeof(O))) - 1);
    }
  }
  if (single) {
    char* q = row + int64_t(j) * V * stride * int64_t(sizeof(O));
#pragma unroll
    for (int e = 0; e < V; ++e) {
      if (single >> e & 1) *reinterpret_cast<O*>(q) = own.element(e);
      q += stride * int64_t(sizeof(O));
    }
  }
}

// Rounds K vectors of a row once, to `dtype`, and writes them: compute(k, v) makes each when its turn comes. All lanes of a
// warp call it together.
template <typename T, int V, int K, typename Compute>
__device__ __forceinline__ void store_computed(char* row, DType dtype, int64_t stride, int first, int step, int limit,
                                               int lane, int lanes, Compute&& compute) {
  using C = compute_t<T>;
  with_dtype<T>(
      dtype,
      [&]<typename O>() {
        const bool shifted = __any_sync(0xffffffffu, stride == 1 && misalignment(row, Pack<O, V>::kUnit) != 0);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          C v[V];
          compute(k, v);
          store_vector<O, V>(row, stride, first + k * step, limit, lane, lanes, shifted, v);
        }
      },
      [&] {
        C v[K][V];
#pragma unroll
        for (int k = 0; k < K; ++k) compute(k, v[k]);
#pragma unroll 1
        for (int i = 0; i < K * V; ++i) {
          C value = v[0][0];
#pragma unroll
          for (int k = 0; k < K; ++k)
#pragma unroll
            for (int e = 0; e < V; ++e) value = i == k * V + e ? v[k][e] : value;
          const int64_t c = int64_t(first + i / V * step) * V + i % V;
          if (c < limit) store_as(row, dtype, c * stride, value);
        }
      });
}

// The same for unit-stride rows of dtype O. kAligned: as load_aligned reads them.
template <bool kAligned, typename O, int V, int K, typename C, typename Compute>
__device__ __forceinline__ void store_unit_stride(char* row, int first, int step, int limit, int lane, Compute&& compute) {
  using P = Pack<O, V>;
  constexpr int B = P::kBytes, U = P::kUnit;
  const bool shifted = kAligned ? false : __any_sync(0xffffffffu, misalignment(row, U) != 0);
  char* at = row + int64_t(first) * B;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C v[V];
    compute(k, v);
    if constexpr (kAligned) {
      P own;
      own.round_from(v);
      if ((first + k * step) * V < limit)
#pragma unroll
        for (int u = 0; u < B / U; ++u) store_unit<U>(at + k * step * B + u * U, own.w + u * (U / 4));
    } else {
      store_vector<O, V>(row, 1, first + k * step, limit, lane, step, shifted, v);
    }
  }
}

template <typename T, int V, int K, typename C>
__device__ __forceinline__ void store_vectors(char* row, DType dtype, int64_t stride, int first, int step, int limit,
                                              int lane, int lanes, const C (&v)[K][V]) {
  store_computed<T, V, K>(row, dtype, stride, first, step, limit, lane, lanes, [&](int k, C(&out)[V]) {
#pragma unroll
    for (int e = 0; e < V; ++e) out[e] = v[k][e];
  });
}

template <typename Row>
__device__ __forceinline__ auto aligned_row(const Row& m, int64_t row, int size) {
  using Char = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(m.data)>>, const char, char>;
  return static_cast<Char*>(m.data) + row * m.rows.stride[0] * size;
}
template <typename Row>
__device__ __forceinline__ auto row_pointer(const Row& m, int64_t row, int64_t col = 0) {
  using Char = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(m.data)>>, const char, char>;
  return static_cast<Char*>(m.data) + (row_offset(m.rows, row) + col * m.col_stride) * element_size(m.dtype);
}

// ----------------------------------------------------------------------------------------------------------------- lanes

struct TeamShape {
  int lanes;         // per CTA and row
  int rows_per_cta;
  int cluster;
  double inverse;  // 1 / cols
};
inline TeamShape team_shape(const RowsPlan& plan, int64_t cols) {
  return {plan.lanes, plan.rows_per_cta, plan.cluster, 1.0 / double(cols)};
}

// Shared memory of the reductions of a CTA: two mbarriers (clusters), then [phase][value][warp of the row's cluster].
// Phases alternate (ping-pong): a lane that still reads one result cannot be overtaken by the writes of the next.
inline constexpr int kTeamBarrierBytes = 16;
inline int team_scratch_bytes(const TeamShape& shape, int64_t compute_size) {
  const int warps = shape.lanes > 32 ? shape.lanes / 32 * shape.rows_per_cta * shape.cluster : 0;
  return kTeamBarrierBytes + int(4 * warps * compute_size);
}

// The lanes that share a row, and their reductions: one barrier each. kSlots: a CTA has several rows of more than a warp,
// which takes named barriers; a kernel whose barrier ids are not constants reserves all 16, and 4 CTAs fill an SM.
template <typename C, bool kSlots = false>
struct Team {
  int lanes, lane, slot, cluster, rank;
  int warps;   // of the row, over the cluster
  int stride;  // of all rows of the CTA
  int round = 0;
  uint64_t* barriers;
  C* values;

  __device__ __forceinline__ Team(const TeamShape& shape, char* scratch)
      : lanes(shape.lanes),
        cluster(shape.cluster),
        barriers(reinterpret_cast<uint64_t*>(scratch)),
        values(reinterpret_cast<C*>(scratch + kTeamBarrierBytes)) {
    if (lanes <= 32) {  // a power of two
      slot = int(threadIdx.x) >> (31 - __clz(lanes));
      lane = int(threadIdx.x) & (lanes - 1);
      warps = 1;
    } else {
      slot = kSlots ? int(threadIdx.x) / lanes : 0;
      lane = int(threadIdx.x) - slot * lanes;
      warps = (lanes >> 5) * cluster;
    }
    stride = kSlots ? warps * shape.rows_per_cta : warps;
    rank = 0;
    if (cluster > 1) {
      rank = cluster_rank();
      if (threadIdx.x == 0) {
        mbarrier_init(&barriers[0]);
        mbarrier_init(&barriers[1]);
      }
      __syncthreads();
      cluster_arrive_relaxed();  // waited for before the first remote write
    }
  }

  __device__ __forceinline__ void sync() const {
    if (lanes <= 32)
      __syncwarp();
    else if constexpr (kSlots)
      named_barrier(slot + 1, lanes);
    else
      __syncthreads();
  }

  template <int N, typename Op>
  __device__ __forceinline__ void reduce(C (&v)[N], Op op, C identity) {
    static_assert(N <= 2);
    if (lanes >= 32) {
      butterfly<16>(v, op);
    } else {
#pragma unroll 1
      for (int o = lanes >> 1; o > 0; o >>= 1)
#pragma unroll
        for (int n = 0; n < N; ++n) v[n] = op(v[n], __shfl_xor_sync(0xffffffffu, v[n], o));
    }
    if (lanes <= 32) return;
    const int l = lane & 31;
    C* const base = values + (round & 1) * 2 * stride + slot * (lanes >> 5);  // value n at base[n * stride]
    C* const mine = base + rank * (lanes >> 5) + (lane >> 5);
    if (cluster == 1) {
      if (l == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) mine[n * stride] = v[n];
      sync();
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = (l & 15) < warps ? base[n * stride + (l & 15)] : identity;
      butterfly<8>(v, op);
    } else {
      if (round == 0) cluster_wait();
      uint64_t* const barrier = &barriers[round & 1];
      if (lane == 0) mbarrier_expect(barrier, warps * N * int(sizeof(C)));
      if (l < cluster)
#pragma unroll
        for (int n = 0; n < N; ++n) store_remote_shared(&mine[n * stride], barrier, l, v[n]);
      mbarrier_wait(barrier, round >> 1 & 1);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        v[n] = identity;
#pragma unroll 1
        for (int i = l; i < warps; i += 32) v[n] = op(v[n], base[n * stride + i]);
      }
      butterfly<16>(v, op);
    }
    ++round;
  }

  template <int kFirst, int N, typename Op>
  static __device__ __forceinline__ void butterfly(C (&v)[N], Op op) {
#pragma unroll
    for (int o = kFirst; o > 0; o /= 2)
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = op(v[n], __shfl_xor_sync(0xffffffffu, v[n], o));
  }

  // The first vector and the step of this lane, with K vectors per lane.
  __device__ __forceinline__ int first(int vectors_per_lane) const { return rank * vectors_per_lane * lanes + lane; }
};

// ---------------------------------------------------------------------------------------------------------------- launch

struct Device {
  int arch = 0;  // 80, 90, ...
};
inline const Device* current_device(Status* status) {
  static Device devices[64];
  int index = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess && (index < 0 || index >= 64)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess && __atomic_load_n(&devices[index].arch, __ATOMIC_RELAXED) == 0) {
    int major = 0, minor = 0;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    if (error == cudaSuccess) __atomic_store_n(&devices[index].arch, 10 * major + minor, __ATOMIC_RELAXED);
  }
  if (error != cudaSuccess) {
    *status = Status{"cannot query the current device", int(error)};
    return nullptr;
  }
  return &devices[index];
}

// Launches with the attributes the kernel needs: dependent launch and clusters from 9.0 on, and large shared memory.
template <typename... Parameters, typename... Args>
Status launch_rows(void (*kernel)(Parameters...), int arch, int64_t ctas, int threads, int cluster, size_t shared,
                   cudaStream_t stream, Args... args) {
  if (ctas == 0) return {};
  if (ctas * cluster > 0x7fffffffLL) return Status{"too many rows for one launch", 0};
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) return Status{"cannot get the shared memory", int(error)};
  }
  if (cluster > 8) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return Status{"cannot get clusters of 16", int(error)};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(ctas * cluster));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  config.numAttrs = 0;
  if (arch >= 90) {
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& size = attributes[config.numAttrs++];
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = unsigned(cluster);
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(args)...);
  return error == cudaSuccess ? Status{} : Status{"launch failed", int(error)};
}

// Calls f.template operator()<T>() on the host for the dtype of a row.
template <typename F>
Status dispatch_row_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f.template operator()<half_t>();
    case DType::kBFloat16:
      return f.template operator()<bfloat16_t>();
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    default:
      return Status{"rows must be floating point", 0};
  }
}

// Rows as load_aligned reads them: one row stride, everything on 16 bytes. (cols is checked once, by the caller.)
template <typename Row>
bool aligned_rows(const Row& m) {
  return m.col_stride == 1 && m.rows.ndim == 1 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
         m.rows.stride[0] * dtype_size(m.dtype) % 16 == 0;
}
template <typename Row>
bool unit_stride_rows(const Row& m) {
  return m.col_stride == 1 && m.rows.ndim == 1;
}

inline RowsLayout layout_of(int64_t cols, const RowsIn& x) {
  if (x.col_stride == 1 || cols == 1) return RowsLayout::kUnit;
  return x.rows.stride[x.rows.ndim - 1] == 1 ? RowsLayout::kColumns : RowsLayout::kGather;
}

}  // namespace ampkernels::cuda
