// How a tensor core adds (docs/design.md, section 3): the rule of one step, in plain scalar code. It says what the GPU
// computes; csrc/cpu/emulate.cpp computes the same bits many at a time and falls back to this for what is rare.
//
// One step adds `count` products a[i] * b[i] to an accumulator c:
//   e = the largest of exponent(c) and exponent(a[i]) + exponent(b[i]), zeros not counting. An operand's exponent is
//   its
//       exponent field's: a subnormal counts with the smallest normal exponent, and a product with a significand of 2
//       or more with the sum of the exponents;
//   every product and c are truncated toward zero to a multiple of 2^(e - fraction_bits) and added exactly;
//   the sum is truncated toward zero to fp32, or rounded to nearest even to fp16. A result of zero is +0, also where
//   the sum was negative; a finite sum of 2^128 and more gives infinity.
// Infinities and NaN follow IEEE-754; a NaN comes out as 0x7fffffff (fp32) or 0x7fff (fp16).
//
//   arch  fraction_bits  count                          status
//   90    25             16                             checked on an H200: wgmma and mma.sync, bf16 and fp16
//   80    24             8, so that k16 is two steps    published for A100, not checked here
#pragma once

#include <cmath>
#include <cstdint>

#include "ampkernels/convert.h"
#include "ampkernels/types.h"

namespace ampkernels {

struct TensorCoreRule {
  int fraction_bits;
  int count;  // products in one step
};

constexpr TensorCoreRule tensor_core_rule(int arch) {
  return arch >= 90 ? TensorCoreRule{25, 16} : TensorCoreRule{24, 8};
}

// The exponent with which a subnormal operand counts.
constexpr int min_exponent(DType dtype) {
  return dtype == DType::kFloat16 ? -14 : -126;
}

// `a` and `b` are widened fp16 or bf16 values (`operands`); b[i] lies at b[i * b_stride]. `c` and the result are values
// of `accumulator`, fp32 or fp16, in a float.
inline float tensor_core_step(TensorCoreRule rule, DType operands, DType accumulator, float c, const float* a,
                              const float* b, int64_t b_stride = 1) {
  const auto exponent = [](float v, int smallest) {
    const int e = std::ilogb(v);
    return e < smallest ? smallest : e;
  };
  constexpr int kNothing = -100000;
  int e = c != 0 ? exponent(c, min_exponent(accumulator)) : kNothing;
  bool finite = std::isfinite(c);
  for (int i = 0; i < rule.count; ++i) {
    const float bi = b[i * b_stride];
    finite = finite && std::isfinite(a[i]) && std::isfinite(bi);
    if (!finite) break;
    if (a[i] == 0 || bi == 0) continue;
    const int product = exponent(a[i], min_exponent(operands)) + exponent(bi, min_exponent(operands));
    e = product > e ? product : e;
  }
  double sum = 0;
  if (!finite) {
    sum = double(c);
    for (int i = 0; i < rule.count; ++i) sum += double(a[i]) * double(b[i * b_stride]);
    return std::isnan(sum) ? bit_cast<float>(0x7fffffffu) : float(sum);
  }
  if (e == kNothing) return 0.0f;
  const double unit = std::ldexp(1.0, e - rule.fraction_bits);
  const double inverse = std::ldexp(1.0, rule.fraction_bits - e);
  // At most 17 terms below 2^27 in units: exact in a double.
  for (int i = 0; i < rule.count; ++i) sum += std::trunc(double(a[i]) * double(b[i * b_stride]) * inverse);
  sum = (sum + std::trunc(double(c) * inverse)) * unit;
  float result = 0;
  if (accumulator == DType::kFloat16) {
    result = to_float(round_to<half_t>(sum));
  } else if (std::fabs(sum) >= 0x1p128) {
    result = sum > 0 ? INFINITY : -INFINITY;
  } else {
    result = float(sum);
    if (std::fabs(double(result)) > std::fabs(sum)) result = bit_cast<float>(bit_cast<uint32_t>(result) - 1);
  }
  return result == 0 ? 0.0f : result;
}

}  // namespace ampkernels
