// fp32 functions for kernels and their CPU counterparts: the same bits on host and device.
//
// Every function is a fixed sequence of IEEE-754 operations (add, multiply, fma, compare, integer shift), each rounded
// to nearest, so that any two compilers agree on every bit as long as neither contracts on its own: nvcc -fmad=false,
// g++ -ffp-contract=off, subnormals kept on both (no -ftz, no -ffast-math). A NaN stays a NaN; its payload is nobody's
// promise. No branches and no calls: loops vectorise on the host, and an epilogue costs no divergence and none of the
// device's special function units, whose approximations a CPU cannot repeat. No division either: the one reciprocal
// that is needed is of 1 + e with e in [0, 1], where a cubic seed and one third-order step are 6 FMA and an add.
//
// On a host without FMA instructions __builtin_fmaf is a call of libm's fmaf: the same bits, slowly. Build for such
// hosts with several targets (as csrc/cpu does) and choose at run time.
//
// Coefficients: tools/fit_math.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "ampkernels/convert.h"
#include "ampkernels/types.h"

namespace ampkernels {

AK_HOST_DEVICE float fma_fp32(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// N numbers that go through the functions below together, operation by operation. One Horner chain waits four cycles
// for each step; a GPU compiler left with one call after another interleaves two of them, and a warp alone on its
// scheduler then idles half of the time. F is float or Lanes; the operations on each number, and so its bits, are the
// same.
template <int N>
struct Lanes {
  float v[N];
};

namespace detail {
template <int N>
AK_HOST_DEVICE float lane(const Lanes<N>& x, int i) {
  return x.v[i];
}
AK_HOST_DEVICE float lane(float x, int) {
  return x;
}
}  // namespace detail

// f of each lane; a float argument is the same for all of them.
template <int N, typename F, typename... Args>
AK_HOST_DEVICE Lanes<N> map_lanes(F&& f, Args... args) {
  Lanes<N> y;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < N; ++i) y.v[i] = f(detail::lane(args, i)...);
  return y;
}

#define AK_LANES_OPERATOR(op)                                                 \
  template <int N>                                                            \
  AK_HOST_DEVICE Lanes<N> operator op(const Lanes<N>& a, const Lanes<N>& b) { \
    return map_lanes<N>([](float x, float y) { return x op y; }, a, b);       \
  }                                                                           \
  template <int N>                                                            \
  AK_HOST_DEVICE Lanes<N> operator op(const Lanes<N>& a, float b) {           \
    return map_lanes<N>([](float x, float y) { return x op y; }, a, b);       \
  }                                                                           \
  template <int N>                                                            \
  AK_HOST_DEVICE Lanes<N> operator op(float a, const Lanes<N>& b) {           \
    return map_lanes<N>([](float x, float y) { return x op y; }, a, b);       \
  }
AK_LANES_OPERATOR(+)
AK_LANES_OPERATOR(-)
AK_LANES_OPERATOR(*)
#undef AK_LANES_OPERATOR
template <int N>
AK_HOST_DEVICE Lanes<N> operator-(const Lanes<N>& a) {
  return map_lanes<N>([](float x) { return -x; }, a);
}
template <int N, typename B, typename C>
AK_HOST_DEVICE Lanes<N> fma_fp32(const Lanes<N>& a, B b, C c) {
  return map_lanes<N>([](float x, float y, float z) { return fma_fp32(x, y, z); }, a, b, c);
}
template <int N, typename C>
AK_HOST_DEVICE Lanes<N> fma_fp32(float a, const Lanes<N>& b, C c) {
  return map_lanes<N>([](float x, float y, float z) { return fma_fp32(x, y, z); }, a, b, c);
}

// c[0] + x * (c[1] + x * (...)), Horner.
template <int N, typename F>
AK_HOST_DEVICE F polynomial(const float (&c)[N], const F& x) {
  F p = fma_fp32(x, c[N - 1], c[N - 2]);
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 16
#endif
  for (int i = N - 3; i >= 0; --i) p = fma_fp32(p, x, c[i]);
  return p;
}

// The larger or the smaller of x and a bound that is a number; NaN if x is NaN. A zero x of the bound's value but the
// other sign gives the bound.
AK_HOST_DEVICE float at_least(float x, float bound) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(bound));
  return y;
#else
  const float y = x > bound ? x : bound;
  return x != x ? x : y;
#endif
}
AK_HOST_DEVICE float at_most(float x, float bound) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(bound));
  return y;
#else
  const float y = x < bound ? x : bound;
  return x != x ? x : y;
#endif
}

// lower where x < 0, else 1 - lower. Written so that a compiler that must not speculate a floating-point operation can
// still turn it into selects.
AK_HOST_DEVICE float lower_or_complement(float x, float lower) {
  return fma_fp32(x < 0.0f ? 1.0f : -1.0f, lower, x < 0.0f ? 0.0f : 1.0f);
}

AK_HOST_DEVICE float abs_fp32(float x) {
  return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu);
}

// The magnitude of y with the sign of x.
AK_HOST_DEVICE float with_sign_of(float x, float y) {
  return bit_cast<float>((bit_cast<uint32_t>(y) & 0x7fffffffu) | (bit_cast<uint32_t>(x) & 0x80000000u));
}

template <int N>
AK_HOST_DEVICE Lanes<N> at_least(const Lanes<N>& x, float bound) {
  return map_lanes<N>([](float a, float b) { return at_least(a, b); }, x, bound);
}
template <int N>
AK_HOST_DEVICE Lanes<N> at_most(const Lanes<N>& x, float bound) {
  return map_lanes<N>([](float a, float b) { return at_most(a, b); }, x, bound);
}
template <int N>
AK_HOST_DEVICE Lanes<N> lower_or_complement(const Lanes<N>& x, const Lanes<N>& lower) {
  return map_lanes<N>([](float a, float b) { return lower_or_complement(a, b); }, x, lower);
}
template <int N>
AK_HOST_DEVICE Lanes<N> abs_fp32(const Lanes<N>& x) {
  return map_lanes<N>([](float a) { return abs_fp32(a); }, x);
}
template <int N>
AK_HOST_DEVICE Lanes<N> with_sign_of(const Lanes<N>& x, const Lanes<N>& y) {
  return map_lanes<N>([](float a, float b) { return with_sign_of(a, b); }, x, y);
}

namespace detail {

// Added to a number below 2^22 in magnitude, it leaves the number rounded to an integer n in the low bits of the sum.
constexpr float kRound = 0x1.8p23f;
constexpr uint32_t kRoundBits = 0x4b400000u;
// The same with n + 127 in the low bits, so that a shift by 23 makes the float 2^n of them.
constexpr float kRoundBiased = 0x1.8p23f + 127.0f;
constexpr float kLog2e = 0x1.715476p0f;
constexpr float kLog2eLow = 0x1.4ae0cp-26f;

// 2^n for the sum t = n + kRoundBiased.
AK_HOST_DEVICE float power_of_two(float t) {
  return bit_cast<float>(bit_cast<uint32_t>(t) << 23);
}
// p 2^n for the sum t = n + kRound, by adding to the exponent.
AK_HOST_DEVICE float add_to_exponent(float p, float t) {
  return bit_cast<float>(bit_cast<uint32_t>(p) + (bit_cast<uint32_t>(t) << 23));
}
template <int N>
AK_HOST_DEVICE Lanes<N> power_of_two(const Lanes<N>& t) {
  return map_lanes<N>([](float a) { return power_of_two(a); }, t);
}
template <int N>
AK_HOST_DEVICE Lanes<N> add_to_exponent(const Lanes<N>& p, const Lanes<N>& t) {
  return map_lanes<N>([](float a, float b) { return add_to_exponent(a, b); }, p, t);
}

// 2^r for r in [-1/2, 1/2]: relative error 3e-9 before rounding, and p(0) = 1.
template <typename F>
AK_HOST_DEVICE F exp2_fraction(const F& r) {
  constexpr float c[] = {1.0f,          0x1.62e43p-1f,   0x1.ebfbdcp-3f, 0x1.c6af7cp-5f,
                         0x1.3b2dep-7f, 0x1.5f082ep-10f, 0x1.416b52p-13f};
  return polynomial(c, r);
}

// 2^y for y in [-127, 0]: within 1 ulp down to 2^-126, from there to exactly 0 at y = -127 (p(0) = 1 makes the sum of
// the bit patterns 0).
template <typename F>
AK_HOST_DEVICE F exp2_nonpositive(const F& y) {
  const F t = y + kRound;
  const F p = exp2_fraction(y - (t - kRound));
  return add_to_exponent(p, t);
}

// e^-a for a >= 0, within 1 ulp; 0 from a = 87.7 on (e^-a < 2^-126.5).
template <typename F>
AK_HOST_DEVICE F exp_negative(F a) {
  a = at_most(a, 88.0f);
  const F t = fma_fp32(a, -kLog2e, kRoundBiased);
  const F n = t - kRoundBiased;
  const F r = fma_fp32(a, -kLog2eLow, fma_fp32(a, -kLog2e, -n));
  return exp2_fraction(r) * power_of_two(t);
}

// About 1 / (1 + e) for e in [0, 1]: relative error 1.7e-3.
template <typename F>
AK_HOST_DEVICE F reciprocal_seed(const F& e) {
  constexpr float c[] = {0x1.ff1cd6p-1f, -0x1.e2b7ap-1f, 0x1.54bdbap-1f, -0x1.c65206p-3f};
  return polynomial(c, e);
}
// The seed's error cubed (5e-9), with residual = 1 - d s.
template <typename F>
AK_HOST_DEVICE F reciprocal_step(const F& s, const F& residual) {
  return fma_fp32(s, fma_fp32(residual, residual, residual), s);
}

// The two halves of a sigmoid, neither with cancellation: upper = sigmoid(|z|) and lower = sigmoid(-|z|).
template <typename F>
struct SigmoidPair {
  F lower;
  F upper;
};
template <typename F>
AK_HOST_DEVICE SigmoidPair<F> sigmoid_pair(const F& z) {
  const F e = exp_negative(abs_fp32(z));
  // 1 / (1 + e) without rounding 1 + e: the residual is (1 - s) - e s, and 1 - s is exact for s in [1/2, 2].
  const F s = reciprocal_seed(e);
  const F upper = reciprocal_step(s, fma_fp32(-e, s, 1.0f - s));
  return {e * upper, upper};
}

}  // namespace detail

// e^x, within 1 ulp over the whole range, gradual underflow included: 0 below -104, inf above 88.7228.
AK_HOST_DEVICE float exp_fp32(float x) {
  using namespace detail;
  x = at_least(at_most(x, 89.0f), -104.0f);
  const float t = fma_fp32(x, kLog2e, kRound);
  const float n = t - kRound;
  const float r = fma_fp32(x, kLog2eLow, fma_fp32(x, kLog2e, -n));
  // n is in [-151, 129]: two factors, of which only the second multiplication can round.
  const int32_t i = int32_t(bit_cast<uint32_t>(t) - kRoundBits);
  const int32_t half = i >> 1;
  const float s0 = bit_cast<float>(uint32_t(half + 127) << 23);
  const float s1 = bit_cast<float>(uint32_t(i - half + 127) << 23);
  return exp2_fraction(r) * s0 * s1;
}

// 1 / (1 + e^-x), within 2 ulp; 0 below -87.7.
template <typename F>
AK_HOST_DEVICE F sigmoid_fp32(const F& x) {
  return lower_or_complement(x, detail::sigmoid_pair(x).lower);
}

// tanh(x), within 4 ulp, small x included.
template <typename F>
AK_HOST_DEVICE F tanh_fp32(const F& x) {
  using namespace detail;
  // (1 - e) / (1 + e) with e = exp(-2 |x|), through m = e - 1 = 2^n * (2^r - 1) + (2^n - 1), which does not cancel.
  constexpr float c[] = {0x1.62e43p-1f,  0x1.ebfbdep-3f,  0x1.c6afa4p-5f,
                         0x1.3b2c3ep-7f, 0x1.5ef136p-10f, 0x1.4295f2p-13f};  // (2^r - 1) / r
  const F a = at_most(abs_fp32(x), 10.0f);
  const F t = fma_fp32(a, -2.0f * kLog2e, kRoundBiased);
  const F n = t - kRoundBiased;
  const F r = fma_fp32(a, -2.0f * kLog2e, -n);
  const F scale = power_of_two(t);
  const F m = fma_fp32(scale, r * polynomial(c, r), scale - 1.0f);
  // 1 / (2 + m), again without rounding 2 + m: 1 - 2 s is exact.
  const F s = reciprocal_seed(1.0f + m);
  const F y = -m * reciprocal_step(s, fma_fp32(-m, s, fma_fp32(-2.0f, s, 1.0f)));
  return with_sign_of(x, y);
}

// The upper tail of the normal distribution, Q(a) = erfc(a / sqrt 2) / 2, for a in [0, 14]: relative error 1.3e-5 up to
// a = 4, growing to 6e-4 where Q underflows (a = 13); exactly 1/2 at 0, exactly 0 at 14. Its logarithm is nearly a
// parabola: one polynomial and one exp2 serve the whole range, where erf needs two pieces.
template <typename F>
AK_HOST_DEVICE F normal_tail(const F& a) {
  constexpr float c[] = {-0x1.26aef6p+0f,  -0x1.d635a8p-2f,  -0x1.ae7d12p-5f, 0x1.d26fbcp-8f,
                         -0x1.27e73cp-13f, -0x1.c18e24p-13f, 0x1.f4a378p-15f, -0x1.2907dp-17f,
                         0x1.b5c09ep-21f,  -0x1.8ec674p-25f, 0x1.9b52fp-30f,  -0x1.6f616ep-36f};
  const F y = fma_fp32(polynomial(c, a), a, -1.0f);
  return detail::exp2_nonpositive(at_least(y, -127.0f));
}

}  // namespace ampkernels
