// The activations and their derivatives, in the compute type (fp32, or fp64 for fp64), branch-free so that loops over
// them vectorise. Names and formulas are torch's.
#pragma once

#include <cmath>

#include "ampkernels/types.h"

namespace ampkernels {

template <typename C>
AK_HOST_DEVICE C sigmoid(C x) {
  return C(1) / (C(1) + std::exp(-x));
}

// act(x). NaN propagates; act(+-inf) is the limit.
template <Activation A, typename C>
AK_HOST_DEVICE C activation(C x) {
  if constexpr (A == Activation::kRelu) return x > C(0) || x != x ? x : C(0);
  else if constexpr (A == Activation::kGelu) return x == -INFINITY ? C(0) : C(0.5) * x * (C(1) + std::erf(x * C(0.70710678118654752440)));
  else if constexpr (A == Activation::kGeluTanh) return x == -INFINITY ? C(0) : C(0.5) * x * (C(1) + std::tanh(C(0.79788456080286535588) * (x + C(0.044715) * x * x * x)));
  else if constexpr (A == Activation::kSilu) return x == -INFINITY ? C(0) : x * sigmoid(x);
  else if constexpr (A == Activation::kSigmoid) return sigmoid(x);
  else if constexpr (A == Activation::kTanh) return std::tanh(x);
  else if constexpr (A == Activation::kQuickGelu) return x == -INFINITY ? C(0) : x * sigmoid(C(1.702) * x);
  else if constexpr (A == Activation::kRelu2) return x > C(0) || x != x ? x * x : C(0);
  else return x;
}

// d act(x) / dx. Finite at +-inf wherever the limit is (a pre-activation that overflowed fp16 still has a gradient).
template <Activation A, typename C>
AK_HOST_DEVICE C activation_grad(C x) {
  if constexpr (A == Activation::kRelu) return x != x ? x : (x > C(0) ? C(1) : C(0));
  else if constexpr (A == Activation::kGelu) {
    const C cdf = C(0.5) * (C(1) + std::erf(x * C(0.70710678118654752440)));
    const C xpdf = std::fabs(x) > C(40) ? C(0) : x * C(0.39894228040143267794) * std::exp(C(-0.5) * x * x);
    return cdf + xpdf;
  } else if constexpr (A == Activation::kGeluTanh) {
    const C z = std::fabs(x) > C(40) ? (x > C(0) ? C(40) : C(-40)) : x;
    const C t = std::tanh(C(0.79788456080286535588) * (z + C(0.044715) * z * z * z));
    const C dt = C(0.79788456080286535588) * (C(1) + C(3 * 0.044715) * z * z);
    return (x != x ? x : C(0.5) * (C(1) + t) + C(0.5) * z * (C(1) - t * t) * dt);
  } else if constexpr (A == Activation::kSilu) {
    const C s = sigmoid(x);
    return std::fabs(x) > C(200) ? s : s * (C(1) + x * (C(1) - s));
  } else if constexpr (A == Activation::kSigmoid) {
    const C s = sigmoid(x);
    return s * (C(1) - s);
  } else if constexpr (A == Activation::kTanh) {
    const C t = std::tanh(x);
    return C(1) - t * t;
  } else if constexpr (A == Activation::kQuickGelu) {
    const C s = sigmoid(C(1.702) * x);
    return std::fabs(x) > C(200) ? s : s * (C(1) + C(1.702) * x * (C(1) - s));
  } else if constexpr (A == Activation::kRelu2) return x != x ? x : (x > C(0) ? C(2) * x : C(0));
  else return C(1);
}

// The same from y = act(x), for the activations whose derivative needs no more (relu: y > 0 exactly where x > 0, but for
// an x that rounds to zero).
template <Activation A, typename C>
AK_HOST_DEVICE C activation_grad_from_output(C y) {
  static_assert(A == Activation::kRelu || A == Activation::kNone);
  return activation_grad<A>(y);
}

// Calls f.template operator()<A>() with the run-time activation as a compile-time one. The branch is uniform, so kernels
// place it around the loop over a fragment, not around one element, and need no instantiation per activation.
template <typename F>
AK_HOST_DEVICE void with_activation(Activation a, F&& f) {
  switch (a) {
    case Activation::kNone: return f.template operator()<Activation::kNone>();
    case Activation::kRelu: return f.template operator()<Activation::kRelu>();
    case Activation::kGelu: return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh: return f.template operator()<Activation::kGeluTanh>();
    case Activation::kSilu: return f.template operator()<Activation::kSilu>();
    case Activation::kSigmoid: return f.template operator()<Activation::kSigmoid>();
    case Activation::kTanh: return f.template operator()<Activation::kTanh>();
    case Activation::kQuickGelu: return f.template operator()<Activation::kQuickGelu>();
    case Activation::kRelu2: return f.template operator()<Activation::kRelu2>();
  }
}

}  // namespace ampkernels
