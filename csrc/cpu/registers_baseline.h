// One register of what every machine of the architecture has, as the compiler's own vector of four floats: what simd.h
// is built of. Included by simd.h, inside its namespace.

using f32x32 = Pair<Pair<Pair<f32r>>>;
using f64x32 = Pair<Pair<Pair<Pair<f64r>>>>;

AK_SIMD f32r splat_register(float v) {
  return f32r{v, v, v, v};
}
AK_SIMD f64r splat_register(double v) {
  return f64r{v, v};
}
// Without the instruction these are calls to libm, slow and correctly rounded: the bits come first.
AK_SIMD f32r fma(f32r a, f32r b, f32r c) {
  return f32r{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
              __builtin_fmaf(a[3], b[3], c[3])};
}
AK_SIMD f64r fma(f64r a, f64r b, f64r c) {
  return f64r{__builtin_fma(a[0], b[0], c[0]), __builtin_fma(a[1], b[1], c[1])};
}
AK_SIMD f32r vmax(f32r a, f32r b) {
  return a > b ? a : b;
}
AK_SIMD f64r vmax(f64r a, f64r b) {
  return a > b ? a : b;
}
AK_SIMD Pair<f64r> widen(f32r v) {
  return {f64r{double(v[0]), double(v[1])}, f64r{double(v[2]), double(v[3])}};
}
AK_SIMD f32r narrow(Pair<f64r> v) {
  return f32r{float(v.lo[0]), float(v.lo[1]), float(v.hi[0]), float(v.hi[1])};
}

template <typename T>
AK_SIMD auto load_register(const T* p) {
  if constexpr (sizeof(T) == 8) {
    return f64r{p[0], p[1]};
  } else {
    return f32r{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  }
}
template <typename T>
AK_SIMD void store_register(T* p, f32r v) {
  for (int i = 0; i < kRegisterFloats; ++i) p[i] = round_to<T>(v[i]);
}
AK_SIMD void store_register(double* p, f64r v) {
  p[0] = v[0];
  p[1] = v[1];
}
AK_SIMD void keep_where(f32r& v, const uint8_t* bytes, f32r other) {
  for (int i = 0; i < kRegisterFloats; ++i) v[i] = bytes[i] != 0 ? v[i] : other[i];
}
AK_SIMD void keep_where(f64r& v, const uint8_t* bytes, f64r other) {
  for (int i = 0; i < kRegisterDoubles; ++i) v[i] = bytes[i] != 0 ? v[i] : other[i];
}
AK_SIMD void keep_where_even_odd(f32r& even, f32r& odd, const uint8_t* bytes, f32r other) {
  for (int i = 0; i < kRegisterFloats; ++i) {
    even[i] = bytes[2 * i] != 0 ? even[i] : other[i];
    odd[i] = bytes[2 * i + 1] != 0 ? odd[i] : other[i];
  }
}
AK_SIMD void load_even_odd(f32r& even, f32r& odd, const bfloat16_t* p) {
  even = f32r{to_float(p[0]), to_float(p[2]), to_float(p[4]), to_float(p[6])};
  odd = f32r{to_float(p[1]), to_float(p[3]), to_float(p[5]), to_float(p[7])};
}
AK_SIMD void store_even_odd(bfloat16_t* p, f32r even, f32r odd) {
  for (int i = 0; i < kRegisterFloats; ++i) {
    p[2 * i] = round_to_bfloat16(even[i]);
    p[2 * i + 1] = round_to_bfloat16(odd[i]);
  }
}
