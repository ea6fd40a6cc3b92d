// Loads and stores of N consecutive elements, widened to the compute type. Each takes the widest access that the
// address allows: one or more of 16 bytes, else 8, 4, or single elements; addresses differ in alignment from row to row
// where a leading stride is odd, so the choice is made at run time and costs two integer instructions.
#pragma once

#include <cstdint>

#include "ampkernels/convert.h"

namespace ampkernels::cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Packet {
  T v[N];
};

__device__ __forceinline__ bool is_aligned(const void* p, uint32_t bytes) {
  return (static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & (bytes - 1)) == 0;
}

template <int M, typename T, typename C, int N>
__device__ __forceinline__ void load_packets(const T* p, C (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += M) {
    const Packet<T, M> packet = *reinterpret_cast<const Packet<T, M>*>(p + i);
#pragma unroll
    for (int j = 0; j < M; ++j) out[i + j] = widen(packet.v[j]);
  }
}

template <int M, typename T, typename C, int N>
__device__ __forceinline__ void store_packets(T* p, const C (&in)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += M) {
    Packet<T, M> packet;
#pragma unroll
    for (int j = 0; j < M; ++j) packet.v[j] = round_to<T>(in[i + j]);
    *reinterpret_cast<Packet<T, M>*>(p + i) = packet;
  }
}

// out[i] = p[i * stride] for i < valid, else 0.
template <typename T, typename C, int N>
__device__ __forceinline__ void load_n(const T* p, int64_t stride, int valid, C (&out)[N]) {
  constexpr int kWide = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  constexpr int kHalf = kWide > 1 ? kWide / 2 : 1;
  if (stride == 1 && valid >= N) {
    if (is_aligned(p, sizeof(T) * kWide)) return load_packets<kWide>(p, out);
    if (kHalf > 1 && is_aligned(p, sizeof(T) * kHalf)) return load_packets<kHalf>(p, out);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = i < valid ? C(widen(p[i * stride])) : C(0);
}

// p[i * stride] = in[i], rounded once, for i < valid.
template <typename T, typename C, int N>
__device__ __forceinline__ void store_n(T* p, int64_t stride, int valid, const C (&in)[N]) {
  constexpr int kWide = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  constexpr int kHalf = kWide > 1 ? kWide / 2 : 1;
  if (stride == 1 && valid >= N) {
    if (is_aligned(p, sizeof(T) * kWide)) return store_packets<kWide>(p, in);
    if (kHalf > 1 && is_aligned(p, sizeof(T) * kHalf)) return store_packets<kHalf>(p, in);
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < valid) p[i * stride] = round_to<T>(in[i]);
}

// The same by a run-time dtype (a uniform branch); `offset` in elements.
template <typename C, int N>
__device__ __forceinline__ void load_n(const void* data, DType dtype, int64_t offset, int64_t stride, int valid,
                                       C (&out)[N]) {
  switch (dtype) {
    case DType::kFloat16:
      return load_n(static_cast<const half_t*>(data) + offset, stride, valid, out);
    case DType::kBFloat16:
      return load_n(static_cast<const bfloat16_t*>(data) + offset, stride, valid, out);
    case DType::kFloat32:
      return load_n(static_cast<const float*>(data) + offset, stride, valid, out);
    default:
      return load_n(static_cast<const double*>(data) + offset, stride, valid, out);
  }
}

template <typename C, int N>
__device__ __forceinline__ void store_n(void* data, DType dtype, int64_t offset, int64_t stride, int valid,
                                        const C (&in)[N]) {
  switch (dtype) {
    case DType::kFloat16:
      return store_n(static_cast<half_t*>(data) + offset, stride, valid, in);
    case DType::kBFloat16:
      return store_n(static_cast<bfloat16_t*>(data) + offset, stride, valid, in);
    case DType::kFloat32:
      return store_n(static_cast<float*>(data) + offset, stride, valid, in);
    default:
      return store_n(static_cast<double*>(data) + offset, stride, valid, in);
  }
}

}  // namespace ampkernels::cuda
