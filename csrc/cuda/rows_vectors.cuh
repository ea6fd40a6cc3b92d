// A row in vectors: read at any alignment into registers, written at any alignment out of them. rows_common.cuh tells
// how.
#pragma once

#include <type_traits>

#include "../plan/rows_plan.h"
#include "ampkernels/params.h"
#include "rows_ptx.cuh"

namespace ampkernels::cuda {

// The plan's constants as device code may name them.
template <typename T>
inline constexpr int kVector = rows_vector(dtype_of<T>::value);

__device__ __forceinline__ int element_size(DType dtype) {
  return dtype == DType::kBool ? 1 : dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat64 ? 8 : 2;
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

// A run-time dtype D next to rows of T: `f` is compiled for the dtypes that occur together (T itself, fp32 next to
// 16-bit rows, bf16 next to fp32 rows), `other` handles the rest element by element. Uniform branches, placed around
// the loop over a lane's vectors.
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

// The first `bytes` of a unit of 16 and zeros, by words and a half.
__device__ __forceinline__ void load_part(uint32_t (&w)[4], const char* unit, int bytes) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = bytes >= 4 * i + 4   ? *reinterpret_cast<const uint32_t*>(unit + 4 * i)
           : bytes >= 4 * i + 2 ? *reinterpret_cast<const uint16_t*>(unit + 4 * i)
                                : 0;
}

// Calls f.template operator()<S>() with the whole words S in `bytes`, S <= kMost, which is 3 or 4.
template <int kMost, typename F>
__device__ __forceinline__ void with_words(int bytes, F&& f) {
  if constexpr (kMost == 4)
    if (bytes >= 16) return f.template operator()<4>();
  if (bytes < 8)
    bytes < 4 ? f.template operator()<0>() : f.template operator()<1>();
  else
    bytes < 12 ? f.template operator()<2>() : f.template operator()<3>();
}
// The 16 bytes that begin S words, and half a word where `half`, into low and high. As funnel, in a third of the
// instructions where a branch has told S apart.
template <int S>
__device__ __forceinline__ void cut(uint32_t (&out)[4], const uint32_t (&low)[4], const uint32_t (&high)[4],
                                    bool half) {
  const auto word = [&](int i) { return i < 4 ? low[i] : i < 8 ? high[i - 4] : 0; };
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(word(i + S), word(i + S + 1), half ? 16 : 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = words[i];
}

// K vectors of a row, as stored.
template <typename D, int V, int K>
struct Vectors {
  using P = Pack<D, V>;
  static constexpr int B = P::kBytes, U = P::kUnit, kUnits = B / U;
  P pack[K];

  // Vectors first, first + step, ... of the row at `row`, of which `limit` elements exist (0 past them).
  // keep: bit k clear skips vector k.
  __device__ __forceinline__ void load(const void* row, int64_t stride, int first, int step, int limit,
                                       uint32_t keep = ~0u) {
    const char* p = static_cast<const char*>(row);
    if constexpr (B == 16)
      if (stride == 1) return load_cut(p, first, step, limit, keep);
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
          for (int u = 0; u < kUnits; ++u) load_unit<U>(pack[k].w + u * (U / 4), at + k * hop + u * U);
    }
    if constexpr (B >= 4) {
      if (shift) shift_in(at + B, hop, first, step, whole, keep, shift);
    }
    if (whole * V < limit) load_ends(p, stride, first, step, whole, limit, keep);
  }

  // The same for a unit-stride row that begins on 16 bytes and is a whole number of vectors long.
  __device__ __forceinline__ void load_aligned(const void* row, int first, int step, int vectors) {
    const char* at = static_cast<const char*>(row) + int64_t(first) * B;
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) pack[k].w[i] = 0;
      if (first + k * step < vectors)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) load_unit<U>(pack[k].w + u * (U / 4), at + k * step * B + u * U);
    }
  }

  // The same element by element, all of it in flight at once: where the lanes of a warp read adjacent rows.
  __device__ __forceinline__ void load_apart(const void* row, int64_t stride, int first, int step, int limit,
                                             uint32_t keep = ~0u) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int begin = (first + k * step) * V, count = keep >> k & 1 ? limit - begin : 0;
      const D* q = static_cast<const D*>(row) + begin * stride;
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) pack[k].w[i] = 0;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        D v{};
        if (e < count) v = *q;
        pack[k].set(e, v);
        q += stride;
      }
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ void load_unit_stride(const void* row, int first, int step, int limit) {
    if constexpr (kAligned)
      load_aligned(row, first, step, (limit + V - 1) / V);
    else
      load(row, 1, first, step, limit);
  }

  // Makes what was widened from the words before be widened again rather than kept, which would take twice the
  // registers: no compiler knows that `zero` is 0.
  __device__ __forceinline__ void forget(uint32_t zero) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) pack[k].w[i] ^= zero;
  }

  template <typename C>
  __device__ __forceinline__ void get(int k, C (&v)[V]) const {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = to_compute<C>(pack[k].element(e));
  }

 private:
  // Vectors of 16 bytes of a unit-stride row: no branch between the loads, but for the unit in which a row ends, of
  // which one or two lanes have need: it is read in words. The units after the vectors are other lanes': in L1 by now,
  // or soon.
  __device__ __forceinline__ void load_cut(const char* row, int first, int step, int limit, uint32_t keep) {
    const int shift = int(misalignment(row, 16)), bytes = limit > 0 ? shift + limit * int(sizeof(D)) : 0;
    const int whole = bytes / 16, rest = bytes % 16;  // units that do not pass the end
    const char* const at = row - shift;
    uint32_t next[K][4];
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) pack[k].w[i] = next[k][i] = 0;
    if (whole > 0) {
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (keep >> k & 1) load_unit<16>(pack[k].w, at + uint32_t(min(first + k * step, whole - 1)) * 16u);
      if (shift)
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (keep >> k & 1) load_unit<16>(next[k], at + uint32_t(min(first + k * step + 1, whole - 1)) * 16u);
    }
    bool end = false;
#pragma unroll
    for (int k = 0; k < K; ++k) end |= (keep >> k & 1) && uint32_t(whole - first - k * step) < 2u;
    if (end && rest) {
      uint32_t part[4];
      load_part(part, at + whole * 16, rest);
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool here = keep >> k & 1;
          pack[k].w[i] = here && first + k * step == whole ? part[i] : pack[k].w[i];
          next[k][i] = here && first + k * step + 1 == whole ? part[i] : next[k][i];
        }
    }
    if (shift)
      with_words<3>(shift, [&]<int S>() {
#pragma unroll
        for (int k = 0; k < K; ++k) cut<S>(pack[k].w, pack[k].w, next[k], shift & 2);
      });
    if ((first + (K - 1) * step + 1) * V > limit)  // what follows the row in its units
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int here = limit * int(sizeof(D)) - (first + k * step) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pack[k].w[i] = here >= 4 * i + 4 ? pack[k].w[i] : here == 4 * i + 2 ? pack[k].w[i] & 0xffffu : 0;
      }
  }

  // The unit after each vector is another lane's: in L1 by now, or soon.
  __device__ __forceinline__ void shift_in(const char* after, int64_t hop, int first, int step, int whole,
                                           uint32_t keep, uint32_t shift) {
    constexpr int W = U / 4, kBatch = K < 4 ? K : 4;
#pragma unroll
    for (int k0 = 0; k0 < K; k0 += kBatch) {
      uint32_t next[kBatch][W];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int w = 0; w < W; ++w) next[i][w] = 0;
        if (first + (k0 + i) * step < whole && (keep >> (k0 + i) & 1)) load_unit<U>(next[i], after + (k0 + i) * hop);
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

  // Element by element: the one or two vectors at the end of a row, and all of a row that is not unit-stride. The loop
  // is rolled: few lanes have anything to do in it.
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

// Rounds vector j of a row once and writes it; `limit` elements of the row exist. `lane` is the lane's place among
// those of the row, `lanes` of them: lane - 1 holds vector j - 1. All lanes of the warp call it together; `shifted` is
// the same for all of them: whether any of their rows starts off a unit. Lane 0 of 1: no neighbour holds the rest of a
// unit.
template <typename O, int V, typename C>
__device__ __forceinline__ void store_vector(char* row, int64_t stride, int j, int limit, int lane, int lanes,
                                             bool shifted, const C (&v)[V]) {
  using P = Pack<O, V>;
  constexpr int B = P::kBytes, U = P::kUnit, W = U / 4, kUnits = B / U;
  P own;
  own.round_from(v);
  const int count = limit - j * V;                              // elements of this vector that exist, if positive
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

// K vectors of 16 bytes of a unit-stride row, as stored; otherwise as store_vector. Units are cut out of this lane's
// vector and the one of the lane before.
template <typename O, int K>
__device__ __forceinline__ void store_cut(char* row, int first, int step, int limit, int lane, int lanes,
                                          const Pack<O, 16 / int(sizeof(O))> (&v)[K]) {
  const auto here = [&](int k) { return limit * int(sizeof(O)) - (first + k * step) * 16; };  // bytes from vector k on
  const auto store = [](char* to, auto value) { *reinterpret_cast<decltype(value)*>(to) = value; };
  const int shift = int(misalignment(row, 16)), hop = step * 16;
  char* const at = row - shift + int64_t(first) * 16;
  if (!__any_sync(0xffffffffu, shift != 0)) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (here(k) >= 16) store_unit<16>(at + k * hop, v[k].w);
  } else {
    uint32_t before[K][4];
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) before[k][i] = __shfl_up_sync(0xffffffffu, v[k].w[i], 1);
    // Whether the vector before, or after, is another warp's, or none's.
    const bool begins = (lane & 31) == 0, ends = (lane & 31) == 31 || lane + 1 == lanes, half = shift & 2;
    with_words<4>(16 - shift, [&]<int S>() {  // of a vector, in the unit in which it begins
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (here(k) < 16) continue;
        char* const unit = at + k * hop;
        uint32_t out[4];
        cut<S>(out, before[k], v[k].w, half);
        if (S == 4 || !begins) {
          store_unit<16>(unit, out);
        } else {
          if (half) store(unit + (3 - S) * 4 + 2, uint16_t(out[3 - S] >> 16));
#pragma unroll
          for (int i = 4 - S; i < 4; ++i) store(unit + i * 4, out[i]);
        }
        if (S < 4 && (ends || here(k) < 32)) {
          const uint32_t none[4] = {};
          cut<S>(out, v[k].w, none, half);
#pragma unroll
          for (int i = 0; i < 3 - S; ++i) store(unit + 16 + i * 4, out[i]);
          if (half)
            store(unit + 16 + (3 - S) * 4, uint16_t(out[3 - S]));
          else
            store(unit + 16 + (3 - S) * 4, out[3 - S]);
        }
      }
    });
  }
#pragma unroll
  for (int k = 0; k < K; ++k)
    if (here(k) > 0 && here(k) < 16)
#pragma unroll
      for (int e = 0; e < 16 / int(sizeof(O)); ++e)
        if (e * int(sizeof(O)) < here(k)) store(at + shift + k * hop + e * int(sizeof(O)), v[k].element(e));
}

// Rounds K vectors of a row once, to O, and writes them: compute(k, v) makes each when its turn comes. All lanes of a
// warp call it together.
template <typename O, int V, int K, typename C, typename Compute>
__device__ __forceinline__ void store_rounded(char* row, int64_t stride, int first, int step, int limit, int lane,
                                              int lanes, Compute&& compute) {
  using P = Pack<O, V>;
  if constexpr (P::kBytes == 16)
    if (stride == 1 && lanes > 1) {
      P all[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C v[V];
        compute(k, v);
        all[k].round_from(v);
      }
      return store_cut<O, K>(row, first, step, limit, lane, lanes, all);
    }
  const bool shifted = __any_sync(0xffffffffu, stride == 1 && misalignment(row, P::kUnit) != 0);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C v[V];
    compute(k, v);
    store_vector<O, V>(row, stride, first + k * step, limit, lane, lanes, shifted, v);
  }
}

// The same to a run-time dtype.
template <typename T, int V, int K, typename Compute>
__device__ __forceinline__ void store_computed(char* row, DType dtype, int64_t stride, int first, int step, int limit,
                                               int lane, int lanes, Compute&& compute) {
  using C = compute_t<T>;
  with_dtype<T>(
      dtype, [&]<typename O>() { store_rounded<O, V, K, C>(row, stride, first, step, limit, lane, lanes, compute); },
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
__device__ __forceinline__ void store_unit_stride(char* row, int first, int step, int limit, int lane,
                                                  Compute&& compute) {
  using P = Pack<O, V>;
  constexpr int B = P::kBytes, U = P::kUnit;
  if constexpr (!kAligned) return store_rounded<O, V, K, C>(row, 1, first, step, limit, lane, step, compute);
  char* at = row + int64_t(first) * B;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C v[V];
    compute(k, v);
    P own;
    own.round_from(v);
    if ((first + k * step) * V < limit)
#pragma unroll
      for (int u = 0; u < B / U; ++u) store_unit<U>(at + k * step * B + u * U, own.w + u * (U / 4));
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

}  // namespace ampkernels::cuda
