// The one place where a value changes precision. Storage types for fp16 and bf16 that need no CUDA header, widening
// (exact) and rounding (to nearest, ties to even), the same bits on host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "ampkernels/types.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace ampkernels {

struct alignas(2) half_t {
  uint16_t bits;
};
struct alignas(2) bfloat16_t {
  uint16_t bits;
};

template <typename To, typename From>
AK_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename T>
struct dtype_of;
template <>
struct dtype_of<half_t> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct dtype_of<bfloat16_t> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::kFloat64;
};

// ------------------------------------------------------------------------------------------------------ widening,
// exact

AK_HOST_DEVICE float to_float(float v) {
  return v;
}
AK_HOST_DEVICE float to_float(bfloat16_t v) {
  return bit_cast<float>(uint32_t(v.bits) << 16);
}
AK_HOST_DEVICE float to_float(half_t v) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(v.bits));
#else
  // A half's exponent and fraction, moved to a float's, are the value times 2^-112: one exact multiply sets it right,
  // subnormals included; inf and NaN need the exponent of all ones.
  const uint32_t magnitude = uint32_t(v.bits & 0x7fffu) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = (v.bits & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : bit_cast<uint32_t>(scaled);
  return bit_cast<float>(special | (uint32_t(v.bits & 0x8000u) << 16));
#endif
}
AK_HOST_DEVICE double to_double(double v) {
  return v;
}
template <typename T>
AK_HOST_DEVICE double to_double(T v) {
  return double(to_float(v));
}

// The type in which an element of type T is computed with: fp32, and fp64 for fp64.
template <typename T>
struct compute_of {
  using type = float;
};
template <>
struct compute_of<double> {
  using type = double;
};
template <typename T>
using compute_t = typename compute_of<T>::type;

template <typename T>
AK_HOST_DEVICE compute_t<T> widen(T v) {
  if constexpr (sizeof(T) == 8)
    return v;
  else
    return to_float(v);
}

// ------------------------------------------------------------------------- rounding: to nearest, ties to even, NaN
// quiet

AK_HOST_DEVICE bfloat16_t round_to_bfloat16(float v) {
#if defined(__CUDA_ARCH__)
  return bfloat16_t{__bfloat16_as_ushort(__float2bfloat16_rn(v))};
#else
  const uint32_t u = bit_cast<uint32_t>(v);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bfloat16_t{
      uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded)};  // NaN: 0x7fff, as the GPU writes it
#endif
}

AK_HOST_DEVICE half_t round_to_half(float v) {
#if defined(__CUDA_ARCH__)
  return half_t{__half_as_ushort(__float2half_rn(v))};
#else
  const uint32_t u = bit_cast<uint32_t>(v);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 aligns the fraction so that the FPU's own rounding does the work.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;  // 65520 and up round to infinity
  h = magnitude > 0x7f800000u ? 0x7fffu : h;   // NaN: 0x7fff, as the GPU writes it
  return half_t{uint16_t(magnitude > 0x7f800000u ? h : (h | sign))};
#endif
}

// Round to odd: the float next to v toward zero, with the last bit set if anything was cut off. A second rounding, to a
// type with at most 22 bits, then gives what one rounding of v would have given.
AK_HOST_DEVICE float round_to_odd(double v) {
  float f = float(v);
  if (!(v == v) || double(f) == v) return f;
  uint32_t u = bit_cast<uint32_t>(f);
  if ((double(f) > v) == (v > 0)) u -= 1;  // rounded away from zero (also from max to inf): step back
  return bit_cast<float>(u | 1u);
}

template <typename T>
AK_HOST_DEVICE T round_to(float v);
template <>
AK_HOST_DEVICE float round_to<float>(float v) {
  return v;
}
template <>
AK_HOST_DEVICE double round_to<double>(float v) {
  return double(v);
}
template <>
AK_HOST_DEVICE half_t round_to<half_t>(float v) {
  return round_to_half(v);
}
template <>
AK_HOST_DEVICE bfloat16_t round_to<bfloat16_t>(float v) {
  return round_to_bfloat16(v);
}
template <typename T>
AK_HOST_DEVICE T round_to(double v) {
  if constexpr (sizeof(T) == 8)
    return v;
  else if constexpr (sizeof(T) == 4)
    return float(v);
  else
    return round_to<T>(round_to_odd(v));
}

// ---------------------------------------------------------------------- element access by a run-time dtype (uniform
// branch)

// compute type C (float or double) from element `i` of an array of `dtype`.
template <typename C>
AK_HOST_DEVICE C load_as(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return C(to_float(static_cast<const half_t*>(data)[i]));
    case DType::kBFloat16:
      return C(to_float(static_cast<const bfloat16_t*>(data)[i]));
    case DType::kFloat32:
      return C(static_cast<const float*>(data)[i]);
    case DType::kFloat64:
      return C(static_cast<const double*>(data)[i]);
    default:
      return C(static_cast<const uint8_t*>(data)[i]);
  }
}

// Rounds once, to `dtype`, into element `i`.
template <typename C>
AK_HOST_DEVICE void store_as(void* data, DType dtype, int64_t i, C v) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<half_t*>(data)[i] = round_to<half_t>(v);
      return;
    case DType::kBFloat16:
      static_cast<bfloat16_t*>(data)[i] = round_to<bfloat16_t>(v);
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[i] = float(v);
      return;
    default:
      static_cast<double*>(data)[i] = double(v);
      return;
  }
}

}  // namespace ampkernels
