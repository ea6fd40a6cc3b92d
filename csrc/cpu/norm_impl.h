// LayerNorm and RMSNorm, forward and backward. A row is read from memory once: its sum while it is widened into an
// L1-resident buffer, then the sums of (s - mean) and of its square, then the normalisation.
// Statistics are exact two-pass. The mean's own rounding is carried along as the sum of s - mean, so that rows whose
// mean is far larger than their deviation lose nothing; rows whose squares overflow or vanish are scaled by a power of
// two. Rounding points: s = x + residual, s - mean, h = (s - mean) * rstd (one fma), h * weight + bias (one fma), all
// in the compute type; per-row scalars in fp64; then once to the output's dtype.
#pragma once

#include "rows.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

// Of a row in its buffer, which holds the row times `scale`, a power of two and 1 almost always. The buffer's mean is
// center + correction: together they hold more than one number of the compute type could.
template <typename C>
struct RowStatistics {
  C center;
  double correction;
  double rstd;
  double scale;
};

// The first sum of a row, taken while it is loaded: of s for layer_norm, of s^2 for rms_norm.
template <bool kRms, typename V>
AK_SIMD V first_term(V v, V sum) {
  if constexpr (kRms) {
    return fma(v, v, sum);
  } else {
    return sum + v;
  }
}

// Multiplies the row by the power of two that brings its largest magnitude into [0.5, 1); returns 1, and does nothing,
// if that is 0 or infinite.
template <typename T, typename C>
double scale_row(C* s, int64_t n) {
  const Vec<C> zero = splat(C(0));
  const C largest = reduce_max<T>(n, [&](int64_t i, auto) AK_LAMBDA {
    const Vec<C> v = load_buffer(s + i);
    return vmax(v, zero - v);
  });
  if (!(largest > C(0)) || largest - largest != C(0)) return 1;
  int exponent;
  __builtin_frexp(double(largest), &exponent);
  // Two factors: 2^-exponent itself may not fit the compute type.
  const Vec<C> first = splat(C(__builtin_ldexp(1.0, -exponent / 2)));
  const Vec<C> second = splat(C(__builtin_ldexp(1.0, -exponent - -exponent / 2)));
  for_steps<T>(n, [&](int64_t i, auto) AK_LAMBDA { store_buffer(s + i, load_buffer(s + i) * first * second); });
  return __builtin_ldexp(1.0, -exponent);
}

// Of the row of T in the buffer `s`, with `sum` its sum of first_term. If the squares overflow or vanish, the row is
// scaled, in place, and everything is taken again.
template <typename T, bool kRms, typename C = compute_t<T>>
RowStatistics<C> row_statistics(C* s, double sum, int64_t n, double eps) {
  constexpr double kTiny = sizeof(C) == 4 ? 0x1p-90 : 0x1p-960;
  double scale = 1;
  for (bool scaled = false;; scaled = true) {
    C center = C(0);
    double correction = 0, variance;
    if constexpr (kRms) {
      variance = sum / double(n);
    } else {
      center = C(sum / double(n));
      const Vec<C> vcenter = splat(center);
      const Totals t = reduce<T, 2>(n, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
        const Vec<C> d = keep(load_buffer(s + i) - vcenter, step, splat(C(0)));
        t.a = t.a + d;
        t.b = fma(d, d, t.b);
      });
      correction = t.a / double(n);
      variance = t.b / double(n) - correction * correction;
      if (variance < 0) variance = 0;
    }
    const double total = variance + eps * scale * scale;
    const bool in_range = total - total == 0 && total >= kTiny;
    if (!in_range && !scaled) scale = scale_row<T>(s, n);
    if (in_range || scaled || scale == 1) return {center, correction, 1.0 / __builtin_sqrt(total), scale};
    sum = reduce<T, 1>(n, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
            t.a = first_term<kRms>(keep(load_buffer(s + i), step, splat(C(0))), t.a);
          }).a;
  }
}

template <typename T, bool kRms>
void norm_fwd_typed(const NormFwdParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const int64_t n = p.cols;
  RowReader<T> x_rows(p.x, n, begin, end);
  RowReader<T> residual_rows(p.residual, n, begin, end);
  RowWriter<T> y_rows(p.y, n, begin, end);
  RowWriter<T> sum_rows(p.sum, n, begin, end);
  Scratch s_scratch, weight_scratch, bias_scratch;
  C* s = s_scratch.allocate<C>(whole_steps(n));
  const C* weight = load_vector<T>(weight_scratch, p.weight, n, p.weight.data != nullptr ? p.weight_offset : 0, 1);
  const C* bias = load_vector<T>(bias_scratch, p.bias, n, 0, -0.0);  // h * weight + -0 is h * weight, zeros' signs too

  for (int64_t row = begin; row < end; ++row) {
    const T* x = x_rows.row();
    double sum;
    if (p.residual.data == nullptr) {
      sum = reduce<T, 1>(n, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
              const Vec<C> v = load<C>(x + i, step);
              store_buffer(s + i, v);
              t.a = first_term<kRms>(v, t.a);
            }).a;
    } else {
      const T* residual = residual_rows.row();
      sum = reduce<T, 1>(n, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
              const Vec<C> v = load<C>(x + i, step) + load<C>(residual + i, step);
              store_buffer(s + i, v);
              t.a = first_term<kRms>(v, t.a);
            }).a;
    }
    if (p.sum.data != nullptr) {
      T* rounded = sum_rows.row();
      for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA { store(rounded + i, load_buffer(s + i), step); });
      sum_rows.done();
    }

    const RowStatistics<C> stats = row_statistics<T, kRms>(s, sum, n, p.eps);
    if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = C((double(stats.center) + stats.correction) / stats.scale);
    if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = C(stats.rstd * stats.scale);

    T* y = y_rows.row();
    const Vec<C> rstd = splat(C(stats.rstd));
    if constexpr (kRms) {
      for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
        prefetch_read(x + i, n);
        prefetch_write(y + i, n);
        store(y + i, load_buffer(s + i) * rstd * load_buffer(weight + i), step);
      });
    } else {
      const Vec<C> center = splat(stats.center);
      const Vec<C> shift = splat(C(-stats.correction * stats.rstd));
      for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
        prefetch_read(x + i, n);
        prefetch_write(y + i, n);
        const Vec<C> h = fma(load_buffer(s + i) - center, rstd, shift);
        store(y + i, fma(h, load_buffer(weight + i), load_buffer(bias + i)), step);
      });
    }
    y_rows.done();
  }
}

void norm_fwd_rows(const NormFwdParams& p, int64_t begin, int64_t end) {
  const DType dtype = p.x.dtype;
  const bool uniform = p.y.dtype == dtype && (p.residual.data == nullptr || p.residual.dtype == dtype) &&
                       (p.sum.data == nullptr || p.sum.dtype == dtype);
  with_row_type(dtype == DType::kFloat64, dtype, uniform, [&]<typename T>() {
    if (p.rms) {
      norm_fwd_typed<T, true>(p, begin, end);
    } else {
      norm_fwd_typed<T, false>(p, begin, end);
    }
  });
}

// ------------------------------------------------------------------------------------------------------------ backward

inline bool norm_bwd_sums(const NormBwdParams& p) {
  return p.dweight.data != nullptr || p.dbias.data != nullptr;
}

// One block of rows. A row of s and dy is read from memory once; the second pass finds it in the cache. The block's
// column sums of dy * h and of dy go to the workspace, cols of the one and cols of the other.
template <typename T, bool kRms>
void norm_bwd_typed(const NormBwdParams& p, int64_t block) {
  using C = compute_t<T>;
  const int64_t n = p.cols;
  const int64_t begin = block * sum_block_rows(p.rows);
  const int64_t end = p.rows - begin < sum_block_rows(p.rows) ? p.rows : begin + sum_block_rows(p.rows);
  RowReader<T> s_rows(p.s, n, begin, end);
  RowReader<T> dy_rows(p.dy, n, begin, end);
  RowReader<T> dsum_rows(p.dsum, n, begin, end);
  RowWriter<T> dx_rows(p.dx, n, begin, end);
  Scratch weight_scratch, sums_scratch;
  const C* weight = load_vector<T>(weight_scratch, p.weight, n, p.weight.data != nullptr ? p.weight_offset : 0, 1);
  const bool sums = norm_bwd_sums(p);
  C* dweight = sums ? sums_scratch.allocate<C>(2 * whole_steps(n)) : nullptr;
  C* dbias = sums ? dweight + whole_steps(n) : nullptr;
  if (sums) {
    for (int64_t i = 0; i < 2 * whole_steps(n); ++i) dweight[i] = C(0);
  }

  for (int64_t row = begin; row < end; ++row) {
    const T* s = s_rows.row();
    const T* dy = dy_rows.row();
    const T* dsum = p.dsum.data != nullptr ? dsum_rows.row() : nullptr;
    T* dx = p.dx.data != nullptr ? dx_rows.row() : nullptr;
    const Vec<C> rstd = splat(static_cast<const C*>(p.rstd)[row]);
    Vec<C> center = splat(C(0));
    if constexpr (!kRms) center = splat(static_cast<const C*>(p.mean)[row]);

    // The sums of h, g and g * h. h's own mean is what the saved mean's rounding left; it is taken off.
    double mean_h = 0, mean_g = 0, mean_gh = 0;
    if constexpr (kRms) {
      mean_gh = reduce<T, 1>(n,
                             [&](auto& t, int64_t i, auto step) AK_LAMBDA {
                               const Vec<C> h = load<C>(s + i, step) * rstd;
                               const Vec<C> g = load<C>(dy + i, step) * load_buffer(weight + i);
                               t.a = fma(g, h, t.a);
                             })
                    .a /
                double(n);
    } else {
      const Totals t = reduce<T, 3>(n, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
        const Vec<C> h = keep((load<C>(s + i, step) - center) * rstd, step, splat(C(0)));
        const Vec<C> g = load<C>(dy + i, step) * load_buffer(weight + i);
        t.a = t.a + h;
        t.b = t.b + g;
        t.c = fma(g, h, t.c);
      });
      mean_h = t.a / double(n);
      mean_g = t.b / double(n);
      mean_gh = t.c / double(n) - mean_h * mean_g;
    }

    const Vec<C> shift = splat(C(-mean_h)), vmean_g = splat(C(mean_g)), vmean_gh_negated = splat(C(-mean_gh));
    for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
      prefetch_read(s + i, n);
      prefetch_read(dy + i, n);
      const Vec<C> dy_i = load<C>(dy + i, step);
      Vec<C> h;
      if constexpr (kRms) {
        h = load<C>(s + i, step) * rstd;
      } else {
        h = fma(load<C>(s + i, step) - center, rstd, shift);
      }
      if (sums) {
        store_buffer(dweight + i, fma(dy_i, h, load_buffer(dweight + i)));
        if constexpr (!kRms) store_buffer(dbias + i, dy_i + load_buffer(dbias + i));
      }
      if (dx != nullptr) {
        prefetch_write(dx + i, n);
        Vec<C> g = dy_i * load_buffer(weight + i);
        if constexpr (!kRms) g = g - vmean_g;
        g = fma(h, vmean_gh_negated, g);
        if (dsum != nullptr) {
          store(dx + i, fma(g, rstd, load<C>(dsum + i, step)), step);
        } else {
          store(dx + i, g * rstd, step);
        }
      }
    });
    if (dx != nullptr) dx_rows.done();
  }
  if (sums) {
    C* partials = static_cast<C*>(p.workspace) + block * 2 * n;
    from_row_order<T>(partials, dweight, n);
    from_row_order<T>(partials + n, dbias, n);
  }
}

void norm_bwd_block(const NormBwdParams& p, int64_t block) {
  const DType dtype = p.s.dtype;
  const bool uniform = p.dy.dtype == dtype && (p.dsum.data == nullptr || p.dsum.dtype == dtype) &&
                       (p.dx.data == nullptr || p.dx.dtype == dtype);
  with_row_type(dtype == DType::kFloat64, dtype, uniform, [&]<typename T>() {
    if (p.rms) {
      norm_bwd_typed<T, true>(p, block);
    } else {
      norm_bwd_typed<T, false>(p, block);
    }
  });
}

void norm_bwd_columns(const NormBwdParams& p, int64_t begin, int64_t end) {
  const auto add = [&]<typename C>(const C* partials) {
    if (p.dweight.data != nullptr) add_partials(partials, sum_blocks(p.rows), 2 * p.cols, p.dweight, begin, end);
    if (p.dbias.data != nullptr) add_partials(partials + p.cols, sum_blocks(p.rows), 2 * p.cols, p.dbias, begin, end);
  };
  if (p.s.dtype == DType::kFloat64) {
    add(static_cast<const double*>(p.workspace));
  } else {
    add(static_cast<const float*>(p.workspace));
  }
}

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
