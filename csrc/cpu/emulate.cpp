// emulate.h: the tensor core's rule (accumulate.h) for sixteen columns at a time, and the GEMM's epilogue.
//
// A step of a tensor core is integer arithmetic in disguise. With e the largest exponent of the step, every product,
// which is exact in fp32, times 2^(fraction_bits - e) and converted toward zero, is an int32 below 2^27; the sums of
// those are exact, and one conversion back, with the bits below the 24th cut off, is the step's result. Two multiplies,
// a conversion and an add for each product, and half an add and half a maximum (of 16-bit lanes) for e.
//
// That holds while nothing overflows or turns subnormal on the way, which is known for a row of A and a panel of B from
// the range of their exponents ("plain"). Otherwise each step checks its lanes, and those outside the range, or with an
// infinity or NaN, take the scalar rule.
//
// Layout: A one row at a time, values [k] and exponents [k]; B in panels of 16 columns, values [k][16] and exponents
// [k / 2][16][2], so that one 32-bit lane holds the exponents of two k. K is padded with zeros to a multiple of 16.
#include "emulate.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ampkernels/accumulate.h"
#include "ampkernels/activation.h"
#include "ampkernels/convert.h"

// One source, three instruction sets, chosen when the library is loaded. The bits are the same in all three.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define AK_TARGETS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define AK_TARGETS
#endif
#define AK_INLINE inline __attribute__((always_inline))
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the baseline's, passed only to inlined functions
#endif

namespace ampkernels::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kStep = 16;      // k of one instruction, whichever the rule's count
constexpr int64_t kRows = 64;  // rows of A to one packing of B

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using i16x32 = int16_t __attribute__((vector_size(64)));
using i8x16 = int8_t __attribute__((vector_size(16)));

// In place of an exponent. Sums of two stay apart from each other, from true sums and inside 16 bits.
constexpr int16_t kZeroExponent = -8000;
constexpr int16_t kSpecialExponent = 16000;

// The exponents of a step between which nothing overflows or turns subnormal.
constexpr int kLowest = -95;
constexpr int kHighest = 120;

template <typename V, typename T>
AK_INLINE V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V>
AK_INLINE V max_of(const V& a, const V& b) {
  return a > b ? a : b;
}

AK_INLINE bool any(const i32x16& mask) {
  const i8x16 bytes = __builtin_convertvector(mask, i8x16);
  uint64_t halves[2];
  std::memcpy(halves, &bytes, sizeof(halves));
  return (halves[0] | halves[1]) != 0;
}

// One or more rows of A (pointers already at this step) against one panel of B.
struct StepOperands {
  const float* a;
  const int16_t* a_exponent;
};

// |sum| + c, both integers in units of 2^(e - fraction): the exact sum, cut to 24 bits, as fp32 times 2^(e - fraction).
// Half: rounded to nearest even to fp16 instead.
template <int kFraction, bool kHalf>
AK_INLINE f32x16 round_sum(const i32x16& products, const i32x16& c, const i32x16& e) {
  // 16 products are below 2^31, and c, below 2^26, may take the sum past it: magnitudes are unsigned.
  const i32x16 negative_products = products < 0;
  const u32x16 magnitude_products = u32x16((products ^ negative_products) - negative_products);
  const u32x16 total = magnitude_products + u32x16((c ^ negative_products) - negative_products);
  const i32x16 flipped = total > 0xf0000000u;  // c outweighed the products
  const u32x16 magnitude = u32x16((i32x16(total) ^ flipped) - flipped);
  u32x16 below = magnitude >> 24;  // ones in the places below the 24th bit
  below |= below >> 1;
  below |= below >> 2;
  below |= below >> 4;
  const u32x16 kept = magnitude & ~below;
  const f32x16 high = __builtin_convertvector(i32x16(kept >> 8), f32x16);
  const f32x16 low = __builtin_convertvector(i32x16(kept & 0xffu), f32x16);
  f32x16 f = high * 256.0f + low;  // exact: 24 bits
  const f32x16 unit = f32x16((e + (127 - kFraction)) << 23);
  if constexpr (kHalf) {
    // Round to odd, then to 11 bits (fewer below 2^-14) by adding a number whose last place is the result's.
    const u32x16 odd = u32x16((magnitude & below) != 0u) & 1u;
    f = f32x16(u32x16(f) | odd) * unit;
    const u32x16 field = max_of(u32x16(f) >> 23, u32x16{} + (127 - 14));
    const f32x16 aligner = f32x16(((field + 13u) << 23) | 0x400000u);
    f = (f + aligner) - aligner;
    f = f > 65504.0f ? f32x16{} + INFINITY : f;
  } else {
    f = f * unit;
  }
  const u32x16 sign = u32x16((negative_products ^ flipped) & (f != 0.0f)) & 0x80000000u;  // a zero is +0
  return f32x16(u32x16(f) | sign);
}

// Adds `kCount` products to each of `kParallel` rows' accumulators.
template <int kFraction, int kCount, bool kHalf, bool kPlain, int kParallel>
AK_INLINE void add_products(f32x16 (&c)[kParallel], const StepOperands (&rows)[kParallel], int offset, const float* b,
                            const int16_t* b_exponent, DType operands) {
  f32x16 scale[kParallel];
  i32x16 e[kParallel];
  i32x16 sum[kParallel];
  i32x16 rare[kParallel];
#pragma GCC unroll 4
  for (int r = 0; r < kParallel; ++r) {
    i16x32 pairs;
#pragma GCC unroll 8
    for (int j = 0; j < kCount; j += 2) {
      const i16x32 a_pair = i16x32(i32x16{} + load<int32_t>(rows[r].a_exponent + offset + j));
      const i16x32 exponents = load<i16x32>(b_exponent + (offset + j) * kLanes) + a_pair;
      pairs = j == 0 ? exponents : max_of(pairs, exponents);
    }
    const i32x16 products = max_of((i32x16(pairs) << 16) >> 16, i32x16(pairs) >> 16);
    const i32x16 c_bits = i32x16(c[r]) & 0x7fffffff;
    const i32x16 c_exponent = max_of(c_bits >> 23, i32x16{} + (kHalf ? 127 - 14 : 1)) - 127;
    e[r] = max_of(products, c_bits == 0 ? i32x16{} + 2 * kZeroExponent : c_exponent);
    const i32x16 nothing = e[r] < kZeroExponent / 2;
    if constexpr (!kPlain) rare[r] = ~nothing & ((e[r] < kLowest) | (e[r] > kHighest));
    e[r] = nothing ? i32x16{} : e[r];
    if constexpr (!kPlain) e[r] = rare[r] ? i32x16{} : e[r];
    scale[r] = f32x16(((127 + kFraction) - e[r]) << 23);
    sum[r] = i32x16{};
  }
#pragma GCC unroll 16
  for (int j = 0; j < kCount; ++j) {
    const f32x16 bj = load<f32x16>(b + (offset + j) * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kParallel; ++r)
      sum[r] += __builtin_convertvector((rows[r].a[offset + j] * bj) * scale[r], i32x16);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kParallel; ++r) {
    f32x16 result = round_sum<kFraction, kHalf>(sum[r], __builtin_convertvector(c[r] * scale[r], i32x16), e[r]);
    // fp16 overflows from finite operands; there is no way back from infinity then.
    if constexpr (kHalf) result = (i32x16(c[r]) & 0x7fffffff) == 0x7f800000 ? c[r] : result;
    if constexpr (!kPlain) {
      if (any(rare[r])) {
        const DType accumulator = kHalf ? DType::kFloat16 : DType::kFloat32;
        for (int n = 0; n < kLanes; ++n)
          if (rare[r][n] != 0)
            result[n] = tensor_core_step({kFraction, kCount}, operands, accumulator, c[r][n], rows[r].a + offset,
                                         b + offset * kLanes + n, kLanes);
      }
    }
    c[r] = result;
  }
}

// The sums of `kParallel` rows of A with a panel of B, over all of K in chunks of `chunk_steps` steps.
template <int kFraction, int kCount, bool kHalf, bool kPlain, int kParallel>
AK_INLINE void accumulate_rows(StepOperands (&rows)[kParallel], const float* b, const int16_t* b_exponent,
                               int64_t steps, int64_t chunk_steps, DType operands, float* const (&out)[kParallel]) {
  f32x16 total[kParallel] = {};
  for (int64_t begin = 0; begin < steps; begin += chunk_steps) {
    const int64_t end = begin + chunk_steps < steps ? begin + chunk_steps : steps;
    f32x16 c[kParallel] = {};
    for (int64_t step = begin; step < end; ++step) {
#pragma GCC unroll 2
      for (int offset = 0; offset < kStep; offset += kCount)
        add_products<kFraction, kCount, kHalf, kPlain>(c, rows, offset, b, b_exponent, operands);
      for (StepOperands& row : rows) {
        row.a += kStep;
        row.a_exponent += kStep;
      }
      b += kStep * kLanes;
      b_exponent += kStep * kLanes;
    }
    for (int r = 0; r < kParallel; ++r) total[r] += c[r];
  }
  for (int r = 0; r < kParallel; ++r) std::memcpy(out[r], &total[r], sizeof(f32x16));
}

// Smallest and largest exponent of what is neither zero nor special, and whether anything is special.
struct ExponentRange {
  int lowest = 1000;
  int highest = -1000;
  bool special = false;
};

struct Panel {
  const float* a;  // packed rows of A
  const int16_t* a_exponent;
  const ExponentRange* a_range;
  int64_t rows;
  const float* b;
  const int16_t* b_exponent;
  ExponentRange b_range;
  int64_t steps;
  int64_t chunk_steps;
  DType operands;
  float* out;  // rows x ld
  int64_t ld;
};

// Whether every exponent that a step of these can see lies between kLowest and kHighest. A sum of products is a
// multiple of 2^(lowest - 25), so that cancellation costs 25 at the bottom; the length of K costs its logarithm at the
// top.
bool is_plain(const ExponentRange& a, const ExponentRange& b, int64_t steps) {
  int log2_k = 6;
  while ((int64_t(1) << log2_k) < steps * kStep * 4) ++log2_k;
  return !a.special && !b.special && a.lowest + b.lowest >= kLowest + 25 && a.highest + b.highest + log2_k <= kHighest;
}

template <int kFraction, int kCount, bool kHalf>
AK_INLINE void accumulate_panel(const Panel& p) {
  const int64_t k = p.steps * kStep;
  for (int64_t row = 0; row < p.rows;) {
    const bool plain = is_plain(p.a_range[row], p.b_range, p.steps);
    const StepOperands first{p.a + row * k, p.a_exponent + row * k};
    float* const out = p.out + row * p.ld;
    if (plain && row + 1 < p.rows && is_plain(p.a_range[row + 1], p.b_range, p.steps)) {
      // Two rows at a time: the one's additions hide the latency of the other's.
      StepOperands rows[2] = {first, {first.a + k, first.a_exponent + k}};
      float* const outs[2] = {out, out + p.ld};
      accumulate_rows<kFraction, kCount, kHalf, true>(rows, p.b, p.b_exponent, p.steps, p.chunk_steps, p.operands,
                                                      outs);
      row += 2;
      continue;
    }
    StepOperands rows[1] = {first};
    float* const outs[1] = {out};
    if (plain)
      accumulate_rows<kFraction, kCount, kHalf, true>(rows, p.b, p.b_exponent, p.steps, p.chunk_steps, p.operands,
                                                      outs);
    else
      accumulate_rows<kFraction, kCount, kHalf, false>(rows, p.b, p.b_exponent, p.steps, p.chunk_steps, p.operands,
                                                       outs);
    ++row;
  }
}

AK_TARGETS void accumulate_sm90_fp32(const Panel& p) {
  accumulate_panel<25, 16, false>(p);
}
AK_TARGETS void accumulate_sm90_fp16(const Panel& p) {
  accumulate_panel<25, 16, true>(p);
}
AK_TARGETS void accumulate_sm80_fp32(const Panel& p) {
  accumulate_panel<24, 8, false>(p);
}
AK_TARGETS void accumulate_sm80_fp16(const Panel& p) {
  accumulate_panel<24, 8, true>(p);
}

void accumulate(int arch, DType accumulator, const Panel& p) {
  const bool half = accumulator == DType::kFloat16;
  if (arch >= 90)
    half ? accumulate_sm90_fp16(p) : accumulate_sm90_fp32(p);
  else
    half ? accumulate_sm80_fp16(p) : accumulate_sm80_fp32(p);
}

// ------------------------------------------------------------------------------------------------------------- packing

AK_INLINE int16_t exponent_of(float v, int smallest, ExponentRange& range) {
  const uint32_t bits = bit_cast<uint32_t>(v) & 0x7fffffffu;
  if (bits == 0) return kZeroExponent;
  const int e = int(bits >> 23) - 127;
  if (e == 128) {
    range.special = true;
    return kSpecialExponent;
  }
  const int clamped = e < smallest ? smallest : e;
  range.lowest = std::min(range.lowest, e < smallest ? smallest - 23 : e);  // a subnormal's last place may lie that low
  range.highest = std::max(range.highest, clamped);
  return int16_t(clamped);
}

// Row `outer` of an operand, widened and padded with zeros. Element k goes to value[k * value_stride] and to
// exponent[(k / 2) * pair_stride + k % 2].
template <typename T>
void pack_row(const GemmOperand& from, int64_t outer, int64_t k, int64_t padded_k, float* value, int64_t value_stride,
              int16_t* exponent, int64_t pair_stride, ExponentRange& range) {
  const T* data = static_cast<const T*>(from.data) + outer * from.stride_outer;
  const int smallest = min_exponent(dtype_of<T>::value);
  for (int64_t i = 0; i < padded_k; ++i) {
    const float v = i < k ? to_float(data[i * from.stride_k]) : 0.0f;
    value[i * value_stride] = v;
    exponent[(i / 2) * pair_stride + i % 2] = exponent_of(v, smallest, range);
  }
}

// ------------------------------------------------------------------------------------------------------------ epilogue

AK_INLINE float canonical_nan(float v) {
  return v != v ? bit_cast<float>(0x7fffffffu) : v;
}

template <typename T>
AK_INLINE void store_row(const float* v, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (std::is_same_v<T, float>)
      out[i] = canonical_nan(v[i]);  // the NaN that a GPU's arithmetic gives
    else
      out[i] = round_to<T>(v[i]);
  }
}
AK_TARGETS void store_half(const float* v, half_t* out, int64_t n) {
  store_row(v, out, n);
}
AK_TARGETS void store_bfloat16(const float* v, bfloat16_t* out, int64_t n) {
  store_row(v, out, n);
}
AK_TARGETS void store_float(const float* v, float* out, int64_t n) {
  store_row(v, out, n);
}

void store(const float* v, void* out, DType dtype, int64_t offset, int64_t n) {
  if (dtype == DType::kFloat16)
    store_half(v, static_cast<half_t*>(out) + offset, n);
  else if (dtype == DType::kBFloat16)
    store_bfloat16(v, static_cast<bfloat16_t*>(out) + offset, n);
  else if (dtype == DType::kFloat32)
    store_float(v, static_cast<float*>(out) + offset, n);
  else
    for (int64_t i = 0; i < n; ++i) static_cast<double*>(out)[offset + i] = double(canonical_nan(v[i]));
}

AK_TARGETS void add(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += x[i];
}
AK_TARGETS void multiply(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] *= x[i];
}
AK_TARGETS void apply_activation(Activation activation_kind, Result result, const float* x, float* y, int64_t n) {
  with_activation(activation_kind, result, [&]<Activation A, Result R>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) y[i] = activation<A, R>(x[i]);
  });
}
AK_TARGETS void apply_activation_grad(Activation activation_kind, const float* x, float* y, int64_t n) {
  with_activation(activation_kind, Result::k16Bit, [&]<Activation A, Result R>() __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) y[i] = activation_grad<A, R>(x[i]);
  });
}

// One row of the output from one row of sums (n of them, overwritten).
void epilogue(const GemmParams& p, int64_t row, const float* bias, float* sums, float* scratch) {
  const int64_t n = p.n;
  if (p.kind == EpilogueKind::kActGrad) {
    float* const saved = scratch;
    float* const result = scratch + n;
    for (int64_t i = 0; i < n; ++i) saved[i] = load_as<float>(p.saved, p.dtype, row * p.ldsaved + i);
    if (p.act_out != nullptr) {
      apply_activation(p.activation, Result::k16Bit, saved, result, n);
      store(result, p.act_out, p.dtype, row * p.ldact_out, n);
    }
    apply_activation_grad(p.activation, saved, result, n);
    multiply(result, sums, n);
    store(sums, p.d, p.d_dtype, row * p.ldd, n);
    return;
  }
  if (bias != nullptr) add(bias, sums, n);
  if (p.pre != nullptr) store(sums, p.pre, p.dtype, row * p.ldpre, n);
  if (p.kind == EpilogueKind::kGated) {
    apply_activation(p.activation, result_of(p.d_dtype), sums, scratch, n / 2);
    multiply(sums + n / 2, scratch, n / 2);
    store(scratch, p.d, p.d_dtype, row * p.ldd, n / 2);
    return;
  }
  float* result = sums;
  if (p.activation != Activation::kNone) {
    apply_activation(p.activation, result_of(activation_dtype(p)), sums, scratch, n);
    result = scratch;
  }
  if (p.kind == EpilogueKind::kResidual)
    for (int64_t i = 0; i < n; ++i)
      result[i] = load_as<float>(p.residual, p.residual_dtype, row * p.ldresidual + i) + result[i];
  store(result, p.d, p.d_dtype, row * p.ldd, n);
}

template <typename T>
void emulate(const GemmParams& p, int arch, int64_t row_begin, int64_t row_end) {
  const int64_t steps = (p.k + kStep - 1) / kStep;
  const int64_t k = steps * kStep;
  const int64_t ld = (p.n + kLanes - 1) / kLanes * kLanes;
  const int64_t block = std::min(kRows, row_end - row_begin);

  std::vector<float> a(block * k), b(k * kLanes), sums(block * ld), scratch(2 * ld), bias;
  std::vector<int16_t> a_exponent(block * k), b_exponent(k * kLanes);
  if (p.bias.data != nullptr) {
    bias.resize(p.n);
    for (int64_t i = 0; i < p.n; ++i) bias[i] = load_as<float>(p.bias.data, p.bias.dtype, i * p.bias.stride);
  }

  for (int64_t begin = row_begin; begin < row_end; begin += block) {
    const int64_t rows = std::min(block, row_end - begin);
    ExponentRange a_range[kRows];
    for (int64_t r = 0; r < rows; ++r)
      pack_row<T>(p.a, begin + r, p.k, k, &a[r * k], 1, &a_exponent[r * k], 2, a_range[r]);
    for (int64_t column = 0; column < p.n; column += kLanes) {
      const int64_t columns = std::min<int64_t>(kLanes, p.n - column);
      if (columns < kLanes) {
        std::fill(b.begin(), b.end(), 0.0f);
        std::fill(b_exponent.begin(), b_exponent.end(), kZeroExponent);
      }
      ExponentRange b_range;
      for (int64_t j = 0; j < columns; ++j)
        pack_row<T>(p.b, column + j, p.k, k, &b[j], kLanes, &b_exponent[2 * j], 2 * kLanes, b_range);
      Panel panel{a.data(),
                  a_exponent.data(),
                  a_range,
                  rows,
                  b.data(),
                  b_exponent.data(),
                  b_range,
                  steps,
                  p.accumulate.chunk > 0 ? p.accumulate.chunk / kStep : steps,
                  p.dtype,
                  &sums[column],
                  ld};
      accumulate(arch, p.accumulate.dtype, panel);
    }
    for (int64_t r = 0; r < rows; ++r)
      epilogue(p, begin + r, bias.empty() ? nullptr : bias.data(), &sums[r * ld], scratch.data());
  }
}

}  // namespace

void emulate_gemm(const GemmParams& p, int arch, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.n == 0) return;
  if (p.dtype == DType::kFloat16)
    emulate<half_t>(p, arch, row_begin, row_end);
  else
    emulate<bfloat16_t>(p, arch, row_begin, row_end);
}

}  // namespace ampkernels::cpu
