// The activations and their derivatives for a result that is rounded to fp16 or bf16 next: two thirds of the
// instructions of activation.h's fp32 forms, since a GEMM's epilogue has few to spare.
//
// Relative error at most 2^-14.2 forward (fp16's unit round-off is 2^-11), and of a derivative at most 2^-14.7 times
// the larger of its magnitude and 0.1: what cancels at its one zero is not recovered. Where a result is below 1e-10 the
// error may grow, to 2 % where gelu leaves fp32's range (tests/test_math.py). Same rules as in math.h: one sequence of
// IEEE operations, no branch, no division, the same bits on host and device.
//
// Bounds in place of |x| keep 2^y at y >= -127; at the bound a tail is below 1e-41, which either format rounds to 0.
//
// Coefficients: tools/fit_math.py.
#pragma once

#include "ampkernels/math.h"
#include "ampkernels/types.h"

namespace ampkernels::detail16 {

using detail::add_to_exponent;
using detail::kLog2e;
using detail::kRound;
using detail::kRoundBiased;
using detail::power_of_two;

// The last a where that holds: of normal_tail16, of exp(-a^2 / 2), of exp(-a), and of gelu_tanh's sigmoid.
constexpr float kTailBound = 0x1.a01c68p+3f;      // 13.003468
constexpr float kDensityBound = 0x1.a8997ep+3f;   // 13.268737
constexpr float kSigmoidBound = 0x1.601e66p+6f;   // 88.02969
constexpr float kQuickBound = 0x1.9dc544p+5f;     // 51.72132
constexpr float kGeluTanhBound = 0x1.40feaep+3f;  // 10.031089

// 2^r for r in [-1/2, 1/2]: relative error 3e-6, and p(0) = 1.
template <typename F>
AK_HOST_DEVICE F exp2_fraction16(const F& r) {
  constexpr float c[] = {1.0f, 0x1.62e12cp-1f, 0x1.ec036ep-3f, 0x1.c9fc74p-5f, 0x1.3a057cp-7f};
  return polynomial(c, r);
}
// 2^(a b + kPlus), the product not rounded, in [-127, 0]. Of a NaN some number: the caller's other factor is NaN then.
template <int kPlus = 0, typename F, typename G>
AK_HOST_DEVICE F exp2_product(const F& a, const G& b) {
  constexpr float round = kRound + kPlus;
  const F t = fma_fp32(a, b, round);
  return add_to_exponent(exp2_fraction16(fma_fp32(a, b, round - t)), t);
}
// The same without kPlus; NaN of a NaN, for one instruction more.
template <typename F>
AK_HOST_DEVICE F exp2_product_or_nan(const F& a, float b) {
  const F t = fma_fp32(a, b, kRoundBiased);
  return exp2_fraction16(fma_fp32(a, b, kRoundBiased - t)) * power_of_two(t);
}

// 1 / (1 + e) for e in [0, 1]: relative error 9e-6.
template <typename F>
AK_HOST_DEVICE F reciprocal(const F& e) {
  constexpr float c[] = {0x1.fffedap-1f, -0x1.ff8e56p-1f, 0x1.f88682p-1f, -0x1.ce599p-1f,
                         0x1.55de2p-1f,  -0x1.4a5edap-2f, 0x1.25a34cp-4f};
  return polynomial(c, e);
}

// The normal distribution's upper tail Q(a), a in [0, kTailBound].
template <typename F>
AK_HOST_DEVICE F normal_tail16(const F& a) {
  constexpr float c[] = {-0x1.26abd6p+0f,  -0x1.d5e404p-2f, -0x1.b7cc1ep-5f,  0x1.1532e4p-7f,
                         -0x1.f00548p-11f, 0x1.21f332p-14f, -0x1.87484cp-19f, 0x1.c98422p-25f};
  return exp2_product<-1>(a, polynomial(c, a));
}

// Q(a) exp(a^2 / 2) (Mills' ratio / sqrt(2 pi)) for a in [0, 6].
template <typename F>
AK_HOST_DEVICE F scaled_normal_tail(const F& a) {
  constexpr float c[] = {0x1.fffbccp-2f,  -0x1.97fd4p-2f, 0x1.f961ep-3f,    -0x1.fcedbp-4f,  0x1.96816ep-5f,
                         -0x1.e5f0d2p-7f, 0x1.967074p-9f, -0x1.b88346p-12f, 0x1.12c37ap-15f, -0x1.2993fcp-20f};
  return polynomial(c, a);
}

// exp(-z) of the sigmoid in A(x) = x sigmoid(z(x)), of sigmoid itself and of tanh's derivative; a = bounded |x|.
template <Activation A, typename F>
AK_HOST_DEVICE F exp_negative_z(const F& a) {
  constexpr float kGeluTanh1 = 1.59576912160573071176f * kLog2e, kGeluTanh3 = kGeluTanh1 * 0.044715f;
  if constexpr (A == Activation::kGeluTanh) return exp2_product(a, fma_fp32(-kGeluTanh3, a * a, -kGeluTanh1));
  if constexpr (A == Activation::kSigmoid) return exp2_product_or_nan(a, -kLog2e);
  if constexpr (A == Activation::kTanh) return exp2_product_or_nan(a, -2 * kLog2e);
  return exp2_product(a, A == Activation::kQuickGelu ? -1.702f * kLog2e : -kLog2e);
}
template <Activation A, typename F>
AK_HOST_DEVICE F bounded_magnitude(const F& x) {
  constexpr float bound = A == Activation::kGelu        ? kTailBound
                          : A == Activation::kGeluTanh  ? kGeluTanhBound
                          : A == Activation::kQuickGelu ? kQuickBound
                          : A == Activation::kTanh      ? kSigmoidBound / 2
                                                        : kSigmoidBound;
  return at_most(abs_fp32(x), bound);
}

template <Activation A, typename F>
AK_HOST_DEVICE F activation(const F& x) {
  const F a = bounded_magnitude<A>(x);
  if constexpr (A == Activation::kTanh) {
    // m = exp(-2 a) - 1 without cancellation, then -m / (2 + m).
    constexpr float c[] = {0x1.62e2d6p-1f, 0x1.ebff08p-3f, 0x1.c96b22p-5f, 0x1.3b2a4cp-7f};  // (2^r - 1) / r
    constexpr float d[] = {0x1.000092p-1f, -0x1.ff20aap-3f, 0x1.0d9ae4p-3f, -0x1.943456p-6f,
                           0x1.0a19d8p-3f, 0x1.b871f6p-4f,  0x1.25ac56p-4f};  // 1 / (2 + m)
    const F t = fma_fp32(a, -2 * kLog2e, kRoundBiased);
    const F r = fma_fp32(a, -2 * kLog2e, kRoundBiased - t);
    const F scale = power_of_two(t);
    const F m = fma_fp32(scale, r * polynomial(c, r), scale - 1.0f);
    return with_sign_of(x, m * polynomial(d, m));
  } else if constexpr (A == Activation::kSigmoid) {
    const F e = exp_negative_z<A>(a);
    return lower_or_complement(x, e * reciprocal(e));
  } else if constexpr (A == Activation::kGelu) {
    return fma_fp32(-a, normal_tail16(a), at_least(x, 0.0f));
  } else {
    const F e = exp_negative_z<A>(a);
    return fma_fp32(-a, e * reciprocal(e), at_least(x, 0.0f));
  }
}

// As in activation.h: the derivative at -|x|, where nothing cancels but at its one zero, serves both signs.
template <Activation A, typename F>
AK_HOST_DEVICE F activation_grad(const F& x) {
  if constexpr (A == Activation::kGelu) {
    // Q(a) - a density(a), both as multiples of exp(-a^2 / 2).
    const F a = at_most(abs_fp32(x), kDensityBound);
    const F density = exp2_product(a, a * (-0.5f * kLog2e));
    return lower_or_complement(x,
                               density * fma_fp32(a, -0.39894228040143267794f, scaled_normal_tail(at_most(a, 6.0f))));
  } else {
    const F a = bounded_magnitude<A>(x);
    const F e = exp_negative_z<A>(a);
    const F upper = reciprocal(e), lower = e * upper;
    if constexpr (A == Activation::kSigmoid) {
      return lower * upper;
    } else if constexpr (A == Activation::kTanh) {
      return 4.0f * lower * upper;
    } else {
      constexpr float kGeluTanh1 = 1.59576912160573071176f, kGeluTanh3 = 3 * kGeluTanh1 * 0.044715f;
      F dz = a;  // a times z'
      if constexpr (A == Activation::kGeluTanh) dz = a * fma_fp32(kGeluTanh3, a * a, kGeluTanh1);
      if constexpr (A == Activation::kQuickGelu) dz = 1.702f * a;
      return lower_or_complement(x, lower * fma_fp32(-dz, upper, 1.0f));
    }
  }
}

}  // namespace ampkernels::detail16
