// Thirty-two lanes of fp32 or fp64, whatever the machine has: two AVX-512 registers, four AVX2 ones, eight of the
// baseline's (and twice as many for fp64). Every kernel is written in these lanes, every fma is explicit and every
// reduction is a fixed tree over them, so all builds return the same bits. (Which NaN comes out of fp32
// arithmetic is the one exception; a NaN rounded to 16 bits is 0x7fff everywhere.)
//
// Thirty-two, because that is how many bf16 fill one AVX-512 register: widened as its even elements (a shift) and its
// odd ones (a mask) they cost one instruction for each sixteen, and narrowed likewise, where element order costs two
// and three. So the lanes of a bf16 row are in "row order": elements 0 2 4 ... 30, then 1 3 ... 31. For every other
// type row order is element order. Buffers of the compute type that belong to a row are in its row order, and whole
// steps long.
//
// Included by kernels_<isa>.cpp only, after the standard headers and the target pragma, with AMPKERNELS_ISA defined:
// everything lives in the ISA's own namespace, so that the linker cannot hand one build's inline function to another.
#pragma once

#define AK_NOINLINE __attribute__((noinline))
#if AMPKERNELS_ISA_LEVEL > 128
#define AK_SIMD inline __attribute__((always_inline))
#define AK_LAMBDA __attribute__((always_inline))
#else
#define AK_SIMD inline  // thirty-two calls of fmaf where AVX-512 has two instructions: better called than inlined
#define AK_LAMBDA
#endif

namespace ampkernels::cpu::AMPKERNELS_ISA {

constexpr int kLanes = 32;
constexpr int64_t whole_steps(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// ----------------------------------------------------------------------------------------- one register of the machine

#if AMPKERNELS_ISA_LEVEL == 512
constexpr int kRegisterBytes = 64;
#elif AMPKERNELS_ISA_LEVEL == 256
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
typedef float f32r __attribute__((vector_size(kRegisterBytes)));
typedef double f64r __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t u32r __attribute__((vector_size(kRegisterBytes)));
constexpr int kRegisterFloats = kRegisterBytes / 4;
constexpr int kRegisterDoubles = kRegisterBytes / 8;

// Two of V side by side: how a wider vector is made of registers.
template <typename V>
struct Pair {
  V lo, hi;
};

#if AMPKERNELS_ISA_LEVEL == 512
#include "registers_avx512.h"
#elif AMPKERNELS_ISA_LEVEL == 256
#include "registers_avx2.h"
#else
#include "registers_baseline.h"
#endif

// p * 2^n with t = n + kRound, by adding to the exponent's bits: for normal p and results, or exact powers of two.
AK_SIMD f32r add_exponents(f32r p, f32r t) {
  return (f32r)((u32r)p + ((u32r)t << 23));
}
AK_SIMD f32r select_greater(f32r a, f32r b, f32r yes, f32r no) {
  return a > b ? yes : no;
}
AK_SIMD f64r select_greater(f64r a, f64r b, f64r yes, f64r no) {
  return a > b ? yes : no;
}

// ------------------------------------------------------------------------------------------------------ wider than one

template <typename V>
AK_SIMD Pair<V> operator+(Pair<V> a, Pair<V> b) {
  return {a.lo + b.lo, a.hi + b.hi};
}
template <typename V>
AK_SIMD Pair<V> operator-(Pair<V> a, Pair<V> b) {
  return {a.lo - b.lo, a.hi - b.hi};
}
template <typename V>
AK_SIMD Pair<V> operator*(Pair<V> a, Pair<V> b) {
  return {a.lo * b.lo, a.hi * b.hi};
}
template <typename V>
AK_SIMD Pair<V> fma(Pair<V> a, Pair<V> b, Pair<V> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <typename V>
AK_SIMD Pair<V> vmax(Pair<V> a, Pair<V> b) {
  return {vmax(a.lo, b.lo), vmax(a.hi, b.hi)};
}
template <typename V>
AK_SIMD Pair<V> add_exponents(Pair<V> p, Pair<V> t) {
  return {add_exponents(p.lo, t.lo), add_exponents(p.hi, t.hi)};
}
template <typename V>
AK_SIMD Pair<V> select_greater(Pair<V> a, Pair<V> b, Pair<V> yes, Pair<V> no) {
  return {select_greater(a.lo, b.lo, yes.lo, no.lo), select_greater(a.hi, b.hi, yes.hi, no.hi)};
}
template <typename V>
AK_SIMD auto widen(Pair<V> v) {
  using W = decltype(widen(v.lo));
  return Pair<W>{widen(v.lo), widen(v.hi)};
}
template <typename V>
AK_SIMD auto narrow(Pair<Pair<V>> v) {
  using N = decltype(narrow(v.lo));
  return Pair<N>{narrow(v.lo), narrow(v.hi)};
}

template <typename V>
struct LanesOf;
template <>
struct LanesOf<f32r> {
  static constexpr int value = kRegisterFloats;
};
template <>
struct LanesOf<f64r> {
  static constexpr int value = kRegisterDoubles;
};
template <typename V>
struct LanesOf<Pair<V>> {
  static constexpr int value = 2 * LanesOf<V>::value;
};

template <typename S>
AK_SIMD void splat_into(f32r& v, S s) {
  v = splat_register(s);
}
template <typename S>
AK_SIMD void splat_into(f64r& v, S s) {
  v = splat_register(s);
}
template <typename V, typename S>
AK_SIMD void splat_into(Pair<V>& v, S s) {
  splat_into(v.lo, s);
  splat_into(v.hi, s);
}
template <typename T>
AK_SIMD void load_into(f32r& v, const T* p) {
  v = load_register(p);
}
AK_SIMD void load_into(f64r& v, const double* p) {
  v = load_register(p);
}
template <typename V, typename T>
AK_SIMD void load_into(Pair<V>& v, const T* p) {
  load_into(v.lo, p);
  load_into(v.hi, p + LanesOf<V>::value);
}
template <typename T>
AK_SIMD void store_from(T* p, f32r v) {
  store_register(p, v);
}
AK_SIMD void store_from(double* p, f64r v) {
  store_register(p, v);
}
template <typename V, typename T>
AK_SIMD void store_from(T* p, Pair<V> v) {
  store_from(p, v.lo);
  store_from(p + LanesOf<V>::value, v.hi);
}

// ------------------------------------------------------------------------------- the lanes of the compute type C

template <typename C>
struct VecOf;
template <>
struct VecOf<float> {
  using type = f32x32;
};
template <>
struct VecOf<double> {
  using type = f64x32;
};
template <typename C>
using Vec = typename VecOf<C>::type;

template <typename C>
AK_SIMD Vec<C> splat(C s) {
  Vec<C> v;
  splat_into(v, s);
  return v;
}

// How many of the lanes a step over rows of T has: all of them, or the first n elements of the row's last step.
struct All {};
template <typename T>
struct Some {
  int64_t n;
};

template <typename T>
constexpr bool kEvenOdd = std::is_same_v<T, bfloat16_t>;

template <typename V>
AK_SIMD void load_even_odd(Pair<V>& even, Pair<V>& odd, const bfloat16_t* p) {
  load_even_odd(even.lo, odd.lo, p);
  load_even_odd(even.hi, odd.hi, p + 2 * LanesOf<V>::value);
}
template <typename V>
AK_SIMD void store_even_odd(bfloat16_t* p, Pair<V> even, Pair<V> odd) {
  store_even_odd(p, even.lo, odd.lo);
  store_even_odd(p + 2 * LanesOf<V>::value, even.hi, odd.hi);
}

// Asks for the cache line `ahead` elements from p, which may lie past the end of anything. The kernels ask for the next
// row in the last pass over this one: what the hardware prefetches ends with a page, every few rows.
template <typename T>
AK_SIMD void prefetch_read(const T* p, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(p) + uintptr_t(ahead) * sizeof(T)), 0);
}
template <typename T>
AK_SIMD void prefetch_write(const T* p, int64_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(p) + uintptr_t(ahead) * sizeof(T)), 1);
}

// Elements p[0..31] in element order, exactly widened to C (fp64 to fp32 rounds: only where a caller mixes them).
template <typename C, typename T>
AK_SIMD Vec<C> load_elements(const T* p) {
  if constexpr (sizeof(C) == 8 && sizeof(T) != 8) {
    f32x32 v;
    load_into(v, p);
    return widen(v);
  } else if constexpr (sizeof(C) == 4 && sizeof(T) == 8) {
    f64x32 v;
    load_into(v, p);
    return narrow(v);
  } else {
    Vec<C> v;
    load_into(v, p);
    return v;
  }
}
// Rounds each lane once to T.
template <typename T>
AK_SIMD void store_elements(T* p, f32x32 v) {
  if constexpr (sizeof(T) == 8) {
    store_from(p, widen(v));
  } else {
    store_from(p, v);
  }
}
template <typename T>
AK_SIMD void store_elements(T* p, f64x32 v) {
  if constexpr (sizeof(T) == 8) {
    store_from(p, v);
  } else if constexpr (sizeof(T) == 4) {
    store_from(p, narrow(v));
  } else {
    double lanes[kLanes];
    store_from(lanes, v);
    for (int i = 0; i < kLanes; ++i) p[i] = round_to<T>(lanes[i]);
  }
}

// One step of a row of T in row order. The lanes past the end of the row are 0, and nothing past it is read or written.
template <typename C, typename T>
AK_SIMD Vec<C> load(const T* p, All) {
  if constexpr (kEvenOdd<T>) {
    static_assert(sizeof(C) == 4);
    f32x32 v;
    load_even_odd(v.lo, v.hi, p);
    return v;
  } else {
    return load_elements<C>(p);
  }
}
template <typename C, typename T>
AK_SIMD Vec<C> load(const T* p, Some<T> some) {
  T padded[kLanes] = {};
  for (int64_t i = 0; i < some.n; ++i) padded[i] = p[i];
  return load<C>(padded, All{});
}
template <typename T, typename V>
AK_SIMD void store(T* p, V v, All) {
  if constexpr (kEvenOdd<T>) {
    store_even_odd(p, v.lo, v.hi);
  } else {
    store_elements(p, v);
  }
}
template <typename T, typename V>
AK_SIMD void store(T* p, V v, Some<T> some) {
  T padded[kLanes];
  store(padded, v, All{});
  for (int64_t i = 0; i < some.n; ++i) p[i] = padded[i];
}

#if AMPKERNELS_ISA_LEVEL == 512
template <typename T>
AK_SIMD __mmask32 first_lanes(Some<T> some) {
  return __mmask32((uint64_t(1) << some.n) - 1);
}
template <>
AK_SIMD f32x32 load<float, float>(const float* p, Some<float> some) {
  const __mmask32 k = first_lanes(some);
  return {_mm512_maskz_loadu_ps(__mmask16(k), p), _mm512_maskz_loadu_ps(__mmask16(k >> 16), p + 16)};
}
template <>
AK_SIMD f32x32 load<float, half_t>(const half_t* p, Some<half_t> some) {
  const __m512i bits = _mm512_maskz_loadu_epi16(first_lanes(some), p);
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
}
template <>
AK_SIMD f32x32 load<float, bfloat16_t>(const bfloat16_t* p, Some<bfloat16_t> some) {
  const __m512i bits = _mm512_maskz_loadu_epi16(first_lanes(some), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int32_t(0xffff0000u))))};
}
AK_SIMD void store(float* p, f32x32 v, Some<float> some) {
  const __mmask32 k = first_lanes(some);
  _mm512_mask_storeu_ps(p, __mmask16(k), v.lo);
  _mm512_mask_storeu_ps(p + 16, __mmask16(k >> 16), v.hi);
}
AK_SIMD void store(half_t* p, f32x32 v, Some<half_t> some) {
  const __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(half_bits(v.lo)), half_bits(v.hi), 1);
  _mm512_mask_storeu_epi16(p, first_lanes(some), bits);
}
AK_SIMD void store(bfloat16_t* p, f32x32 v, Some<bfloat16_t> some) {
  _mm512_mask_storeu_epi16(p, first_lanes(some), even_odd_bits(v.lo, v.hi));
}
#endif

// The same, past the caches if `stream`, for which p must lie on a cache line and fence_streams() must follow in the
// end.
template <typename T, typename V>
AK_SIMD void store(T* p, V v, All, bool stream) {
#if AMPKERNELS_ISA_LEVEL == 512
  if (stream) {
    alignas(64) T line[kLanes];  // stays in registers: it is loaded by the pieces that are stored
    store(line, v, All{});
    if constexpr (sizeof(T) == 2 && !kEvenOdd<T>) {
      for (int i = 0; i < 2; ++i) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p) + i, reinterpret_cast<const __m256i*>(line)[i]);
      }
    } else {
      for (size_t i = 0; i < sizeof(line) / 64; ++i) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p) + i, reinterpret_cast<const __m512i*>(line)[i]);
      }
    }
    return;
  }
#endif
  store(p, v, All{});
}
template <typename T, typename V>
AK_SIMD void store(T* p, V v, Some<T> some, bool) {
  store(p, v, some);
}
constexpr bool kStreams = AMPKERNELS_ISA_LEVEL == 512;
AK_SIMD void fence_streams() {
#if AMPKERNELS_ISA_LEVEL == 512
  _mm_sfence();
#endif
}

// A step of a bool mask over a row of T: v where it is true, other elsewhere.
template <typename V>
AK_SIMD void keep_where(Pair<V>& v, const uint8_t* bytes, Pair<V> other) {
  keep_where(v.lo, bytes, other.lo);
  keep_where(v.hi, bytes + LanesOf<V>::value, other.hi);
}
template <typename V>
AK_SIMD void keep_where_even_odd(Pair<V>& even, Pair<V>& odd, const uint8_t* bytes, Pair<V> other) {
  keep_where_even_odd(even.lo, odd.lo, bytes, other.lo);
  keep_where_even_odd(even.hi, odd.hi, bytes + 2 * LanesOf<V>::value, other.hi);
}
template <typename T, typename V>
AK_SIMD V select_kept(const uint8_t* mask, V v, V other, All) {
  if constexpr (kEvenOdd<T>) {
    keep_where_even_odd(v.lo, v.hi, mask, other.lo);
  } else {
    keep_where(v, mask, other);
  }
  return v;
}
template <typename T, typename V>
AK_SIMD V select_kept(const uint8_t* mask, V v, V other, Some<T> some) {
  uint8_t padded[kLanes] = {};
  for (int64_t i = 0; i < some.n; ++i) padded[i] = mask[i];
  return select_kept<T>(padded, v, other, All{});
}

// A step of a buffer, whole even where the row ends: buffers are whole steps long.
template <typename C>
AK_SIMD Vec<C> load_buffer(const C* p) {
  return load_elements<C>(p);
}
template <typename C, typename V>
AK_SIMD void store_buffer(C* p, V v) {
  store_elements(p, v);
}

// The lanes past the end of the row replaced by `other`.
template <typename V>
AK_SIMD V keep(V v, All, V) {
  return v;
}
template <typename V, typename T>
AK_SIMD V keep(V v, Some<T> some, V other) {
  using C = std::conditional_t<sizeof(V) == 8 * kLanes, double, float>;
  alignas(64) C element[kLanes];
  for (int i = 0; i < kLanes; ++i) element[i] = C(!kEvenOdd<T> ? i : i < kLanes / 2 ? 2 * i : 2 * i - kLanes + 1);
  return select_greater(splat(C(some.n)), load_elements<C>(element), v, other);
}

// Sum of a step: lane i + 16 onto i, then, in fp64, i + 8, 4, 2, 1. Always this tree.
AK_SIMD double sum_lanes(f64r v) {
#if AMPKERNELS_ISA_LEVEL == 512
  const __m256d quarter = _mm512_castpd512_pd256(v) + _mm512_extractf64x4_pd(v, 1);
  const __m128d pair = _mm256_castpd256_pd128(quarter) + _mm256_extractf128_pd(quarter, 1);
  return pair[0] + pair[1];
#elif AMPKERNELS_ISA_LEVEL == 256
  const __m128d pair = _mm256_castpd256_pd128(v) + _mm256_extractf128_pd(v, 1);
  return pair[0] + pair[1];
#else
  return v[0] + v[1];
#endif
}
template <typename V>
AK_SIMD double sum_lanes(Pair<V> v) {
  return sum_lanes(v.lo + v.hi);
}
AK_SIMD double sum_step(f64x32 v) {
  return sum_lanes(v);
}
AK_SIMD double sum_step(f32x32 v) {
  return sum_lanes(widen(v.lo + v.hi));
}

// The largest lane; none is NaN.
AK_SIMD float max_lanes(f32r v) {
#if AMPKERNELS_ISA_LEVEL == 512
  return _mm512_reduce_max_ps(v);
#elif AMPKERNELS_ISA_LEVEL == 256
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  float m = v[0];
  for (int i = 1; i < kRegisterFloats; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}
AK_SIMD double max_lanes(f64r v) {
  double m = v[0];
  for (int i = 1; i < kRegisterDoubles; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
template <typename V>
AK_SIMD auto max_lanes(Pair<V> v) {
  return max_lanes(vmax(v.lo, v.hi));
}

// detail::exp2_fraction of math.h in all lanes: 2^r for r in [-1/2, 1/2].
AK_SIMD f32x32 exp2_fraction_lanes(f32x32 r) {
  f32x32 p = fma(splat(0x1.416b52p-13f), r, splat(0x1.5f082ep-10f));
  p = fma(p, r, splat(0x1.3b2dep-7f));
  p = fma(p, r, splat(0x1.c6af7cp-5f));
  p = fma(p, r, splat(0x1.ebfbdcp-3f));
  p = fma(p, r, splat(0x1.62e43p-1f));
  return fma(p, r, splat(1.0f));
}
// math.h's exp_fp32 for x <= 0 in all lanes, the same operations and the same bits down to e^-87.33 (2^-126), 0 below.
// A subnormal result would cost x86 an assist, thirty times the rest, for what vanishes beside the row's largest.
AK_SIMD f32x32 exp_nonpositive(f32x32 x) {
  const f32x32 lowest = splat(-87.33f);
  const f32x32 a = vmax(lowest, x);  // NaN, a second argument, stays
  const f32x32 t = fma(a, splat(detail::kLog2e), splat(detail::kRound));
  const f32x32 n = t - splat(detail::kRound);
  const f32x32 r = fma(a, splat(detail::kLog2eLow), fma(a, splat(detail::kLog2e), splat(0.0f) - n));
  const f32x32 y = exp2_fraction_lanes(r) * add_exponents(splat(1.0f), t);
  return select_greater(lowest, x, splat(0.0f), y);
}
AK_SIMD f64x32 exp_nonpositive(f64x32 x) {
  double lanes[kLanes];
  store_from(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = __builtin_exp(lanes[i]);
  return load_elements<double>(lanes);
}
// detail::exp2_nonpositive of math.h: 2^y for y <= 0 down to 2^-126, then to exactly 0 at y = -127. NaN stays if the
// last nine bits of its payload are 0.
AK_SIMD f32x32 exp2_nonpositive(f32x32 y) {
  y = vmax(splat(-127.0f), y);
  const f32x32 t = y + splat(detail::kRound);
  return add_exponents(exp2_fraction_lanes(y - (t - splat(detail::kRound))), t);
}

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
