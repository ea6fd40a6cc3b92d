// Matrices of 1, 2, 4 or 8-byte elements transposed in register tiles: how rows with strided columns are moved.
#pragma once

#include "simd.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

// A K x K tile, transposed: K runs of K adjacent elements of U, `from_stride` apart, become K runs `to_stride` apart.
template <typename U>
constexpr int kTile = 16 / int(sizeof(U));
#if defined(AMPKERNELS_CPU_X86)
AK_SIMD __m128i load_run(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
AK_SIMD void store_run(void* p, __m128i v) {
  _mm_storeu_si128(static_cast<__m128i*>(p), v);
}
AK_SIMD void transpose_tile(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride) {
  __m128i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = load_run(from + i * from_stride);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm_unpacklo_epi16(a[i], a[i + 1]);
    b[i + 1] = _mm_unpackhi_epi16(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm_unpacklo_epi32(b[i], b[i + 2]);
    a[i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
    a[i + 2] = _mm_unpacklo_epi32(b[i + 1], b[i + 3]);
    a[i + 3] = _mm_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    store_run(to + 2 * i * to_stride, _mm_unpacklo_epi64(a[i], a[i + 4]));
    store_run(to + (2 * i + 1) * to_stride, _mm_unpackhi_epi64(a[i], a[i + 4]));
  }
}
AK_SIMD void transpose_tile(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  const __m128i a0 = load_run(from), a1 = load_run(from + from_stride), a2 = load_run(from + 2 * from_stride),
                a3 = load_run(from + 3 * from_stride);
  const __m128i b0 = _mm_unpacklo_epi32(a0, a1), b1 = _mm_unpackhi_epi32(a0, a1), b2 = _mm_unpacklo_epi32(a2, a3),
                b3 = _mm_unpackhi_epi32(a2, a3);
  store_run(to, _mm_unpacklo_epi64(b0, b2));
  store_run(to + to_stride, _mm_unpackhi_epi64(b0, b2));
  store_run(to + 2 * to_stride, _mm_unpacklo_epi64(b1, b3));
  store_run(to + 3 * to_stride, _mm_unpackhi_epi64(b1, b3));
}
#endif
template <typename U>
AK_SIMD void transpose_tile(const U* from, int64_t from_stride, U* to, int64_t to_stride) {
  for (int i = 0; i < kTile<U>; ++i) {
    for (int j = 0; j < kTile<U>; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

// `outer` runs of `inner` elements, transposed: to[j][i] = from[i][j].
template <typename U>
void transpose(const U* from, int64_t from_stride, U* to, int64_t to_stride, int64_t outer, int64_t inner) {
  constexpr int64_t K = kTile<U>;
  int64_t i = 0;
  for (; i + K <= outer; i += K) {
    int64_t j = 0;
    for (; j + K <= inner; j += K) {
      transpose_tile(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    }
    for (; j < inner; ++j) {
      for (int64_t k = i; k < i + K; ++k) to[j * to_stride + k] = from[k * from_stride + j];
    }
  }
  for (; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
