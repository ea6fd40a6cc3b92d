// The activations and fp32 functions over arrays, for tests/test_math.py (ctypes). Built with -ffp-contract=off.
#include <cstdint>

#include "ampkernels/activation.h"
#include "ampkernels/math.h"

using namespace ampkernels;

extern "C" {

void ak_activation(int act, int grad, int result, const float* x, float* y, int64_t n) {
  with_activation(static_cast<Activation>(act), static_cast<Result>(result), [&]<Activation A, Result R>() {
    if (grad)
      for (int64_t i = 0; i < n; ++i) y[i] = activation_grad<A, R>(x[i]);
    else
      for (int64_t i = 0; i < n; ++i) y[i] = activation<A, R>(x[i]);
  });
}

void ak_activation_fp64(int act, int grad, const double* x, double* y, int64_t n) {
  with_activation(static_cast<Activation>(act), [&]<Activation A>() {
    for (int64_t i = 0; i < n; ++i) y[i] = grad ? activation_grad<A>(x[i]) : activation<A>(x[i]);
  });
}

void ak_exp(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_fp32(x[i]);
}

}  // extern "C"
