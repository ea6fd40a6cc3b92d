// The activations and their derivatives, in the compute type (fp32, or fp64 for fp64), branch-free so that loops over
// them vectorise. Names and formulas are torch's.
#pragma once

#include <cmath>
#include <type_traits>

#include "ampkernels/activation16.h"
#include "ampkernels/math.h"
#include "ampkernels/types.h"

namespace ampkernels {

namespace detail {

template <typename C>
AK_HOST_DEVICE C relu(C x) {
  const C y = x > C(0) ? x : C(0);
  return x != x ? x : y;
}

constexpr float kGeluTanh1 = 1.59576912160573071176f;              // 2 sqrt(2 / pi)
constexpr float kGeluTanh3 = 1.59576912160573071176f * 0.044715f;  // 0.5 (1 + tanh u) is sigmoid(2 u)

// From here on every sigmoid(-a) here is exactly 0; the bound in place of |x| keeps inf * 0 out of |x| * sigmoid.
constexpr float kSigmoidZero = 88.0f;

// fp32: csrc/include/ampkernels/math.h, the same bits on host and device. The gated forms x s(x), s(-x) = 1 - s(x), are
// max(x, 0) - |x| s(-|x|): what is subtracted is small, so that its error hardly counts.
template <Activation A, typename F>
AK_HOST_DEVICE F activation_fp32(const F& x) {
  if constexpr (A == Activation::kGelu) {
    const F a = at_most(abs_fp32(x), 14.0f);
    return fma_fp32(-a, normal_tail(a), at_least(x, 0.0f));
  } else if constexpr (A == Activation::kSigmoid) {
    return sigmoid_fp32(x);
  } else if constexpr (A == Activation::kTanh) {
    return tanh_fp32(x);
  } else {
    const F a = at_most(abs_fp32(x), kSigmoidZero);
    F z = a;
    if constexpr (A == Activation::kGeluTanh) z = a * fma_fp32(kGeluTanh3, a * a, kGeluTanh1);
    if constexpr (A == Activation::kQuickGelu) z = 1.702f * a;
    return fma_fp32(-a, sigmoid_pair(z).lower, at_least(x, 0.0f));
  }
}

AK_HOST_DEVICE float tanh_slope(float lower, float upper, float h) {
  const bool small = h < 0.375f;
  return 4.0f * fma_fp32(small ? -h : lower, small ? h : upper, small ? 0.25f : 0.0f);
}
template <int N>
AK_HOST_DEVICE Lanes<N> tanh_slope(const Lanes<N>& lower, const Lanes<N>& upper, const Lanes<N>& h) {
  return map_lanes<N>([](float a, float b, float c) { return tanh_slope(a, b, c); }, lower, upper, h);
}

// For f(x) = x s(x) with s(-x) = 1 - s(x), f'(x) = 1 - f'(-x): the derivative at -|x|, where nothing cancels but at its
// one zero, serves both signs.
template <Activation A, typename F>
AK_HOST_DEVICE F activation_grad_fp32(const F& x) {
  if constexpr (A == Activation::kGelu) {
    const F a = at_most(abs_fp32(x), 14.0f);
    const F y = x * (x * -0.72134752044448170368f);  // log2 of exp(-x^2 / 2)
    const F density = exp2_nonpositive(at_least(y, -127.0f));
    const F lower = fma_fp32(a * -0.39894228040143267794f, density, normal_tail(a));
    return lower_or_complement(x, lower);
  } else if constexpr (A == Activation::kGeluTanh) {
    const F a = at_most(abs_fp32(x), 12.0f);
    const F a2 = a * a;
    const SigmoidPair<F> s = sigmoid_pair(a * fma_fp32(kGeluTanh3, a2, kGeluTanh1));
    const F dz = a * fma_fp32(3.0f * kGeluTanh3, a2, kGeluTanh1);
    const F lower = s.lower * fma_fp32(-dz, s.upper, 1.0f);
    return lower_or_complement(x, lower);
  } else if constexpr (A == Activation::kSilu || A == Activation::kQuickGelu) {
    const F z = A == Activation::kSilu ? x : 1.702f * x;
    const SigmoidPair<F> s = sigmoid_pair(z);
    const F lower = s.lower * fma_fp32(-at_most(abs_fp32(z), kSigmoidZero), s.upper, 1.0f);
    return lower_or_complement(x, lower);
  } else if constexpr (A == Activation::kSigmoid) {
    const SigmoidPair<F> s = sigmoid_pair(x);
    return s.lower * s.upper;
  } else {
    static_assert(A == Activation::kTanh);
    // 4 (1/4 - (tanh / 2)^2) while tanh is small, then 4 sigmoid(2x) sigmoid(-2x), which does not cancel. One fma
    // serves both.
    const SigmoidPair<F> s = sigmoid_pair(2.0f * x);
    return tanh_slope(s.lower, s.upper, 0.5f * (s.upper - s.lower));
  }
}

// fp64: the standard library's functions, with the limits put in.
template <Activation A>
AK_HOST_DEVICE double activation_fp64(double x) {
  if constexpr (A == Activation::kGelu) {
    return x == -INFINITY ? 0.0 : 0.5 * x * std::erfc(x * -0.70710678118654752440);
  } else if constexpr (A == Activation::kGeluTanh) {
    const double z = 1.59576912160573071176 * (x + 0.044715 * x * x * x);
    return x == -INFINITY ? 0.0 : x / (1.0 + std::exp(-z));
  } else if constexpr (A == Activation::kSilu) {
    return x == -INFINITY ? 0.0 : x / (1.0 + std::exp(-x));
  } else if constexpr (A == Activation::kSigmoid) {
    return 1.0 / (1.0 + std::exp(-x));
  } else if constexpr (A == Activation::kTanh) {
    return std::tanh(x);
  } else {
    static_assert(A == Activation::kQuickGelu);
    return x == -INFINITY ? 0.0 : x / (1.0 + std::exp(-1.702 * x));
  }
}

template <Activation A>
AK_HOST_DEVICE double activation_grad_fp64(double x) {
  if constexpr (A == Activation::kGelu) {
    const double xpdf = std::fabs(x) > 40.0 ? 0.0 : x * 0.39894228040143267794 * std::exp(-0.5 * x * x);
    return 0.5 * std::erfc(x * -0.70710678118654752440) + xpdf;
  } else if constexpr (A == Activation::kGeluTanh) {
    const double x2 = x * x;
    const double s = 1.0 / (1.0 + std::exp(-1.59576912160573071176 * x * (1.0 + 0.044715 * x2)));
    const double dz = 1.59576912160573071176 * x * (1.0 + 3 * 0.044715 * x2);
    return std::fabs(x) > 40.0 ? s : s * (1.0 + dz * (1.0 - s));
  } else if constexpr (A == Activation::kSilu || A == Activation::kQuickGelu) {
    const double z = A == Activation::kSilu ? x : 1.702 * x;
    const double s = 1.0 / (1.0 + std::exp(-z));
    return std::fabs(z) > 1000.0 ? s : s * (1.0 + z * (1.0 - s));
  } else if constexpr (A == Activation::kSigmoid) {
    const double s = 1.0 / (1.0 + std::exp(-x));
    return s * (1.0 - s);
  } else {
    static_assert(A == Activation::kTanh);
    const double t = std::tanh(x);
    return 1.0 - t * t;
  }
}

}  // namespace detail

template <typename C>
AK_HOST_DEVICE C sigmoid(C x) {
  if constexpr (sizeof(C) == 8)
    return detail::activation_fp64<Activation::kSigmoid>(x);
  else
    return sigmoid_fp32(x);
}

// What becomes of an activation's value, or of a product with its derivative: if fp16 or bf16, the shorter forms of
// activation16.h serve.
enum class Result { kAny, k16Bit };
constexpr Result result_of(DType dtype) {
  return dtype_size(dtype) == 2 ? Result::k16Bit : Result::kAny;
}
template <Activation A>
constexpr bool kHas16BitForm = A != Activation::kNone && A != Activation::kRelu && A != Activation::kRelu2;

// act(x). NaN propagates; act(+-inf) is the limit. In fp32 the error against the exact value is at most
// 2^-23 max(|x|, 1) for each of them (measured: docs/numerics.md), and the bits are the same on host and device.
template <Activation A, Result R = Result::kAny, typename C>
AK_HOST_DEVICE C activation(C x) {
  static_assert(std::is_same_v<C, float> || std::is_same_v<C, double>);
  if constexpr (A == Activation::kNone)
    return x;
  else if constexpr (A == Activation::kRelu)
    return detail::relu(x);
  else if constexpr (A == Activation::kRelu2)
    return detail::relu(x) * detail::relu(x);
  else if constexpr (sizeof(C) == 8)
    return detail::activation_fp64<A>(x);
  else if constexpr (R == Result::k16Bit)
    return detail16::activation<A>(x);
  else
    return detail::activation_fp32<A>(x);
}

// d act(x) / dx. Finite at +-inf wherever the limit is (a pre-activation that overflowed fp16 still has a gradient).
template <Activation A, Result R = Result::kAny, typename C>
AK_HOST_DEVICE C activation_grad(C x) {
  static_assert(std::is_same_v<C, float> || std::is_same_v<C, double>);
  if constexpr (A == Activation::kNone)
    return C(1);
  else if constexpr (A == Activation::kRelu)
    return x != x ? x : (x > C(0) ? C(1) : C(0));
  else if constexpr (A == Activation::kRelu2)
    return detail::relu(x) + detail::relu(x);
  else if constexpr (sizeof(C) == 8)
    return detail::activation_grad_fp64<A>(x);
  else if constexpr (R == Result::k16Bit)
    return detail16::activation_grad<A>(x);
  else
    return detail::activation_grad_fp32<A>(x);
}

// Several at once, operation by operation (math.h, Lanes): the same bits.
template <Activation A, Result R = Result::kAny, int N>
AK_HOST_DEVICE Lanes<N> activation(const Lanes<N>& x) {
  if constexpr (!kHas16BitForm<A>) {
    return map_lanes<N>([](float a) { return activation<A>(a); }, x);
  } else if constexpr (R == Result::k16Bit) {
    return detail16::activation<A>(x);
  } else {
    return detail::activation_fp32<A>(x);
  }
}
template <Activation A, Result R = Result::kAny, int N>
AK_HOST_DEVICE Lanes<N> activation_grad(const Lanes<N>& x) {
  if constexpr (!kHas16BitForm<A>) {
    return map_lanes<N>([](float a) { return activation_grad<A>(a); }, x);
  } else if constexpr (R == Result::k16Bit) {
    return detail16::activation_grad<A>(x);
  } else {
    return detail::activation_grad_fp32<A>(x);
  }
}

// The same from y = act(x), for the activations whose derivative needs no more (relu: y > 0 exactly where x > 0, but
// for an x that rounds to zero).
template <Activation A, typename C>
AK_HOST_DEVICE C activation_grad_from_output(C y) {
  static_assert(A == Activation::kRelu || A == Activation::kNone);
  return activation_grad<A>(y);
}

// Calls f.template operator()<A>() with the run-time activation as a compile-time one. The branch is uniform, so
// kernels place it around the loop over a fragment, not around one element, and need no instantiation per activation.
template <typename F>
AK_HOST_DEVICE void with_activation(Activation a, F&& f) {
  switch (a) {
    case Activation::kNone:
      return f.template operator()<Activation::kNone>();
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
    case Activation::kGelu:
      return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kSigmoid:
      return f.template operator()<Activation::kSigmoid>();
    case Activation::kTanh:
      return f.template operator()<Activation::kTanh>();
    case Activation::kQuickGelu:
      return f.template operator()<Activation::kQuickGelu>();
    case Activation::kRelu2:
      return f.template operator()<Activation::kRelu2>();
  }
}

// The same with the form that the result asks for: f.template operator()<A, R>(). A struct and not a lambda, so that it
// is inlined into functions that are built for several targets.
namespace detail {
template <typename F>
struct ForResult {
  Result result;
  F& f;
  template <Activation A>
  AK_HOST_DEVICE void operator()() const {
    if constexpr (kHas16BitForm<A>) {
      if (result == Result::k16Bit) return f.template operator()<A, Result::k16Bit>();
    }
    f.template operator()<A, Result::kAny>();
  }
};
}  // namespace detail

template <typename F>
AK_HOST_DEVICE void with_activation(Activation a, Result r, F&& f) {
  with_activation(a, detail::ForResult<std::remove_reference_t<F>>{r, f});
}

}  // namespace ampkernels
