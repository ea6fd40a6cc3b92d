// One AVX2 register (with FMA and F16C): what simd.h is built of.
// Included by simd.h, inside its namespace.

using f32x32 = Pair<Pair<f32r>>;
using f64x32 = Pair<Pair<Pair<f64r>>>;

AK_SIMD f32r splat_register(float v) {
  return _mm256_set1_ps(v);
}
AK_SIMD f64r splat_register(double v) {
  return _mm256_set1_pd(v);
}
AK_SIMD f32r fma(f32r a, f32r b, f32r c) {
  return _mm256_fmadd_ps(a, b, c);
}
AK_SIMD f64r fma(f64r a, f64r b, f64r c) {
  return _mm256_fmadd_pd(a, b, c);
}
AK_SIMD f32r vmax(f32r a, f32r b) {
  return _mm256_max_ps(a, b);
}
AK_SIMD f64r vmax(f64r a, f64r b) {
  return _mm256_max_pd(a, b);
}
AK_SIMD Pair<f64r> widen(f32r v) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
}
AK_SIMD f32r narrow(Pair<f64r> v) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(v.lo)), _mm256_cvtpd_ps(v.hi), 1);
}

AK_SIMD f32r load_register(const float* p) {
  return _mm256_loadu_ps(p);
}
AK_SIMD f64r load_register(const double* p) {
  return _mm256_loadu_pd(p);
}
AK_SIMD f32r load_register(const half_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
AK_SIMD f32r load_register(const bfloat16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

AK_SIMD f32r drop_where(__m256i drop, f32r v, f32r other) {
  return _mm256_blendv_ps(v, other, _mm256_castsi256_ps(drop));
}
AK_SIMD void keep_where(f32r& v, const uint8_t* bytes, f32r other) {
  const __m256i m = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  v = drop_where(_mm256_cmpeq_epi32(m, _mm256_setzero_si256()), v, other);
}
AK_SIMD void keep_where(f64r& v, const uint8_t* bytes, f64r other) {
  int32_t four;
  __builtin_memcpy(&four, bytes, 4);
  const __m256i m = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  v = _mm256_blendv_pd(v, other, _mm256_castsi256_pd(_mm256_cmpeq_epi64(m, _mm256_setzero_si256())));
}
AK_SIMD void keep_where_even_odd(f32r& even, f32r& odd, const uint8_t* bytes, f32r other) {
  const __m256i m = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  const __m256i zero = _mm256_setzero_si256();
  even = drop_where(_mm256_cmpeq_epi32(_mm256_and_si256(m, _mm256_set1_epi32(0x00ff)), zero), even, other);
  odd = drop_where(_mm256_cmpeq_epi32(_mm256_and_si256(m, _mm256_set1_epi32(0xff00)), zero), odd, other);
}

AK_SIMD __m128i half_bits(f32r v) {
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m128i h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m128i nan16 = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
  return _mm_blendv_epi8(h, _mm_set1_epi16(0x7fff), nan16);
}
// Rounded to bf16 in the upper half of each lane; the lower half is rubbish.
AK_SIMD __m256i round_to_upper_half(f32r v) {
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff0000), nan);
}
AK_SIMD void load_even_odd(f32r& even, f32r& odd, const bfloat16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int32_t(0xffff0000u))));
}
AK_SIMD void store_even_odd(bfloat16_t* p, f32r even, f32r odd) {
  const __m256i low = _mm256_srli_epi32(round_to_upper_half(even), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi16(low, round_to_upper_half(odd), 0xaa));
}
AK_SIMD void store_register(float* p, f32r v) {
  _mm256_storeu_ps(p, v);
}
AK_SIMD void store_register(double* p, f64r v) {
  _mm256_storeu_pd(p, v);
}
AK_SIMD void store_register(half_t* p, f32r v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half_bits(v));
}
AK_SIMD void store_register(bfloat16_t* p, f32r v) {
  const __m256i low = _mm256_srli_epi32(round_to_upper_half(v), 16);
  const __m128i bits = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits);
}
