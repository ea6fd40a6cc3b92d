// One AVX-512 register: what simd.h is built of.
// Included by simd.h, inside its namespace.

using f32x32 = Pair<f32r>;
using f64x32 = Pair<Pair<f64r>>;

AK_SIMD f32r splat_register(float v) {
  return _mm512_set1_ps(v);
}
AK_SIMD f64r splat_register(double v) {
  return _mm512_set1_pd(v);
}
AK_SIMD f32r fma(f32r a, f32r b, f32r c) {
  return _mm512_fmadd_ps(a, b, c);
}
AK_SIMD f64r fma(f64r a, f64r b, f64r c) {
  return _mm512_fmadd_pd(a, b, c);
}
AK_SIMD f32r vmax(f32r a, f32r b) {
  return _mm512_max_ps(a, b);
}
AK_SIMD f64r vmax(f64r a, f64r b) {
  return _mm512_max_pd(a, b);
}
AK_SIMD Pair<f64r> widen(f32r v) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))};
}
AK_SIMD f32r narrow(Pair<f64r> v) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(v.lo)), _mm512_cvtpd_ps(v.hi), 1);
}
AK_SIMD f32r load_register(const float* p) {
  return _mm512_loadu_ps(p);
}
AK_SIMD f64r load_register(const double* p) {
  return _mm512_loadu_pd(p);
}
AK_SIMD f32r load_register(const half_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
AK_SIMD f32r load_register(const bfloat16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// v where the byte of its lane is not 0, other elsewhere: in element order, or of an even and an odd register.
AK_SIMD void keep_where(f32r& v, const uint8_t* bytes, f32r other) {
  const __m512i m = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  v = _mm512_mask_mov_ps(other, _mm512_test_epi32_mask(m, m), v);
}
AK_SIMD void keep_where(f64r& v, const uint8_t* bytes, f64r other) {
  const __m512i m = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  v = _mm512_mask_mov_pd(other, _mm512_test_epi64_mask(m, m), v);
}
AK_SIMD void keep_where_even_odd(f32r& even, f32r& odd, const uint8_t* bytes, f32r other) {
  const __m512i m = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  even = _mm512_mask_mov_ps(other, _mm512_test_epi32_mask(m, _mm512_set1_epi32(0x00ff)), even);
  odd = _mm512_mask_mov_ps(other, _mm512_test_epi32_mask(m, _mm512_set1_epi32(0xff00)), odd);
}

AK_SIMD __m256i half_bits(f32r v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m256i h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_mask_mov_epi16(h, nan, _mm256_set1_epi16(0x7fff));
}
// Rounded to bf16 in the upper half of each lane; the lower half is rubbish.
AK_SIMD __m512i round_to_upper_half(f32r v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fff0000));
}
AK_SIMD void load_even_odd(f32r& even, f32r& odd, const bfloat16_t* p) {
  const __m512i bits = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int32_t(0xffff0000u))));
}
// Rounded to bf16 and packed, sixteen bits at a time: the upper halves plus one where the lower ones, with the last bit
// kept added (saturating), are above the middle. Nine instructions; two registers rounded and packed take fourteen.
// AVX512_BF16 has one for nearly all of it; but it takes subnormals for zeros, and keeps a NaN's payload.
AK_SIMD __m512i even_odd_bits(f32r even, f32r odd) {
  const __mmask32 odds = 0xaaaaaaaau;
#if defined(AMPKERNELS_ISA_BF16)
  constexpr int kQuiet = 0x01, kSubnormal = 0x20, kSignalling = 0x80, kNot = kQuiet | kSubnormal | kSignalling;
  const __mmask16 special = _mm512_fpclass_ps_mask(even, kNot) | _mm512_fpclass_ps_mask(odd, kNot);
  if (__builtin_expect(special == 0, 1)) {
    const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh(odd, even);  // the evens, then the odds
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(pairs, packed);
  }
#else
  const __mmask16 special = _mm512_cmp_ps_mask(even, odd, _CMP_UNORD_Q);
  if (__builtin_expect(special == 0, 1)) {
    const __m512i e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
    const __m512i upper = _mm512_mask_blend_epi16(odds, _mm512_srli_epi32(e, 16), o);
    const __m512i lower = _mm512_mask_blend_epi16(odds, e, _mm512_slli_epi32(o, 16));
    const __m512i last = _mm512_and_si512(upper, _mm512_set1_epi16(1));
    const __mmask32 up = _mm512_cmpgt_epu16_mask(_mm512_adds_epu16(lower, last), _mm512_set1_epi16(int16_t(0x8000)));
    return _mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
  }
#endif
  return _mm512_mask_blend_epi16(odds, _mm512_srli_epi32(round_to_upper_half(even), 16), round_to_upper_half(odd));
}
AK_SIMD void store_even_odd(bfloat16_t* p, f32r even, f32r odd) {
  _mm512_storeu_si512(p, even_odd_bits(even, odd));
}
AK_SIMD void store_register(float* p, f32r v) {
  _mm512_storeu_ps(p, v);
}
AK_SIMD void store_register(double* p, f64r v) {
  _mm512_storeu_pd(p, v);
}
AK_SIMD void store_register(half_t* p, f32r v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half_bits(v));
}
AK_SIMD void store_register(bfloat16_t* p, f32r v) {
  const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_upper_half(v), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
}
