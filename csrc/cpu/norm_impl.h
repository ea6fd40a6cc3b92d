// LayerNorm and RMSNorm, forward and backward. A row is read from memory once and from the cache after that: its sum,
// then the sums of s - mean and of its square, then the normalisation. Statistics are exact two-pass. The mean's own
// rounding is carried along as the sum of s - mean, so that rows whose mean is far larger than their deviation lose
// nothing; rows whose squares overflow or vanish are scaled by a power of two. Rounding points: s = x + residual, s -
// mean, h = (s - mean) * rstd (one fma), h * weight + bias (one fma), all in the compute type; per-row scalars in fp64;
// then once to the output's dtype.
#pragma once

#include "rows.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

// The row's mean is center + correction: together they hold more than one number of the compute type could.
template <typename C>
struct RowStatistics {
  C center;
  double correction;
  double rstd;
  bool in_range;  // the sums of squares neither overflowed nor vanished
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

// Of the row of T that s(i, step) loads, with `sum` its sum of first_term.
template <typename T, bool kRms, typename F>
AK_SIMD RowStatistics<compute_t<T>> row_statistics(F s, double sum, int64_t n, double eps) {
  using C = compute_t<T>;
  constexpr double kTiny = sizeof(C) == 4 ? 0x1p-90 : 0x1p-960;
  C center = C(0);
  double correction = 0, variance;
  if constexpr (kRms) {
    variance = sum / double(n);
  } else {
    center = C(sum / double(n));
    const Vec<C> vcenter = splat(center);
    const Totals t = reduce<T, 2>(n, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
      const Vec<C> d = keep(s(i, step) - vcenter, step, splat(C(0)));
      t.a = t.a + d;
      t.b = fma(d, d, t.b);
    });
    correction = t.a / double(n);
    variance = t.b / double(n) - correction * correction;
    if (variance < 0) variance = 0;
  }
  const double total = variance + eps;
  return {center, correction, 1.0 / __builtin_sqrt(total), total - total == 0 && total >= kTiny};
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

// Forward over consecutive rows.
template <typename T, bool kRms>
class NormFwd {
 public:
  using C = compute_t<T>;

  NormFwd(const NormFwdParams& p, int64_t begin, int64_t end)
      : p_(p),
        n_(p.cols),
        x_rows_(p.x, n_, begin, end),
        residual_rows_(p.residual, n_, begin, end),
        y_rows_(p.y, n_, begin, end),
        sum_rows_(p.sum, n_, begin, end),
        weight_(load_vector<T>(weight_scratch_, p.weight, n_, p.weight.data != nullptr ? p.weight_offset : 0, 1)),
        bias_(load_vector<T>(bias_scratch_, p.bias, n_, 0, -0.0)),  // h * weight + -0 is h * weight, zeros' signs too
        kept_(kept_scratch_.allocate<C>(kGroup * whole_steps(n_))) {}

  void run(int64_t row, int64_t end) {
    if (n_ <= kGroupCols && x_rows_.in_place() && residual_rows_.in_place() && y_rows_.in_place() &&
        sum_rows_.in_place()) {
      for (; row + kGroup <= end; row += kGroup) take<kGroup>(row);
    }
    for (; row < end; ++row) take<1>(row);
  }

 private:
  // R rows from `row` on, each with room for it as s, in the compute type.
  template <int R>
  struct Group {
    int64_t row;
    const T* x[R];
    const T* residual[R];
    T* y[R];
    T* sum[R];
    C* kept[R];
  };

  template <int R>
  void take(int64_t row) {
    Group<R> g{row};
    for (int r = 0; r < R; ++r) {
      if (r > 0) y_rows_.done(), sum_rows_.done();
      g.x[r] = x_rows_.row();
      g.residual[r] = residual_rows_.row();
      g.y[r] = y_rows_.row();
      g.sum[r] = sum_rows_.row();
      g.kept[r] = kept_ + r * whole_steps(n_);
    }
    const auto load_x = [&](int r, int64_t i, auto step) AK_LAMBDA { return load<C>(g.x[r] + i, step); };
    const auto load_kept = [&](int r, int64_t i, auto) AK_LAMBDA { return load_buffer(g.kept[r] + i); };
    if (p_.residual.data != nullptr) {
      const auto load_sum = [&](int r, int64_t i, auto step) AK_LAMBDA {
        const Vec<C> v = load_x(r, i, step) + load<C>(g.residual[r] + i, step);
        store_buffer(g.kept[r] + i, v);
        return v;
      };
      normalise(g, load_sum, load_kept);
    } else if constexpr (std::is_same_v<T, half_t>) {  // costs more to widen again than to keep widened
      const auto load_first = [&](int r, int64_t i, auto step) AK_LAMBDA {
        const Vec<C> v = load_x(r, i, step);
        store_buffer(g.kept[r] + i, v);
        return v;
      };
      normalise(g, load_first, load_kept);
    } else {
      normalise(g, load_x, load_x);
    }
    y_rows_.done(), sum_rows_.done();
  }

  // first(r, i, step) loads s of row r for the first time, again(r, i, step) after that.
  template <int R, typename First, typename Again>
  AK_SIMD void normalise(const Group<R>& g, First first, Again again) const {
    double sum[R];
    for (int r = 0; r < R; ++r) {
      sum[r] = reduce<T, 1>(n_, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
                 prefetch_half<0>(g.x[r], i, n_, R);
                 t.a = first_term<kRms>(first(r, i, step), t.a);
               }).a;
    }
    RowStatistics<C> stats[R];
    for (int r = 0; r < R; ++r) {
      const auto s = [&](int64_t i, auto step) AK_LAMBDA { return again(r, i, step); };
      if (g.sum[r] != nullptr) {
        for_steps<T>(n_, [&](int64_t i, auto step) AK_LAMBDA { store(g.sum[r] + i, s(i, step), step); });
      }
      stats[r] = row_statistics<T, kRms>(s, sum[r], n_, p_.eps);
    }
    finish(g, again, stats, 1);
    for (int r = 0; r < R; ++r) {
      if (stats[r].in_range) continue;
      for_steps<T>(n_, [&](int64_t i, auto step) AK_LAMBDA { store_buffer(g.kept[r] + i, again(r, i, step)); });
      finish_scaled({g.row + r, {g.x[r]}, {}, {g.y[r]}, {}, {g.kept[r]}});
    }
  }

  // The output and the statistics of rows, times scale, that s(r, i, step) loads.
  template <int R, typename F>
  AK_SIMD void finish(const Group<R>& g, F s, const RowStatistics<C> (&stats)[R], double scale) const {
    Vec<C> center[R], rstd[R], shift[R];
    for_group<R>([&](auto r) AK_LAMBDA {
      if (p_.mean != nullptr) static_cast<C*>(p_.mean)[g.row + r] = C((stats[r].center + stats[r].correction) / scale);
      if (p_.rstd != nullptr) static_cast<C*>(p_.rstd)[g.row + r] = C(stats[r].rstd * scale);
      center[r] = splat(stats[r].center);
      rstd[r] = splat(C(stats[r].rstd));
      shift[r] = splat(C(-stats[r].correction * stats[r].rstd));
    });
    const bool stream = y_rows_.streams();
    for_steps<T>(n_, [&](int64_t i, auto step) AK_LAMBDA {
      const Vec<C> weight = load_buffer(weight_ + i);
      const Vec<C> bias = kRms ? weight : load_buffer(bias_ + i);
      for_group<R>([&](auto r) AK_LAMBDA {
        prefetch_half<1>(g.x[r], i, n_, R);
        if (!stream) prefetch_write(g.y[r] + i, R * n_);
        if constexpr (kRms) {
          store(g.y[r] + i, s(r, i, step) * rstd[r] * weight, step, stream);
        } else {
          const Vec<C> h = fma(s(r, i, step) - center[r], rstd[r], shift[r]);
          store(g.y[r] + i, fma(h, weight, bias), step, stream);
        }
      });
    });
  }

  // A kept row whose squares overflow or vanish: it is scaled in place, and all is taken again.
  void finish_scaled(const Group<1>& g) const {
    const auto s = [&](int64_t i, auto) AK_LAMBDA { return load_buffer(g.kept[0] + i); };
    const double scale = scale_row<T>(g.kept[0], n_);
    const double sum = reduce<T, 1>(n_, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
                         t.a = first_term<kRms>(keep(s(i, step), step, splat(C(0))), t.a);
                       }).a;
    const RowStatistics<C> stats[] = {row_statistics<T, kRms>(s, sum, n_, p_.eps * scale * scale)};
    finish(g, [&](int, int64_t i, auto step) AK_LAMBDA { return s(i, step); }, stats, scale);
  }

  const NormFwdParams& p_;
  int64_t n_;
  RowReader<T> x_rows_, residual_rows_;
  RowWriter<T> y_rows_, sum_rows_;
  Scratch weight_scratch_, bias_scratch_, kept_scratch_;
  const C* weight_;
  const C* bias_;
  C* kept_;
};

void norm_fwd_rows(const NormFwdParams& p, int64_t begin, int64_t end) {
  const DType dtype = p.x.dtype;
  const bool uniform = p.y.dtype == dtype && (p.residual.data == nullptr || p.residual.dtype == dtype) &&
                       (p.sum.data == nullptr || p.sum.dtype == dtype);
  with_row_type(dtype == DType::kFloat64, dtype, uniform, [&]<typename T>() {
    if (p.rms) {
      NormFwd<T, true>(p, begin, end).run(begin, end);
    } else {
      NormFwd<T, false>(p, begin, end).run(begin, end);
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
class NormBwd {
 public:
  using C = compute_t<T>;

  NormBwd(const NormBwdParams& p, int64_t begin, int64_t end)
      : p_(p),
        n_(p.cols),
        s_rows_(p.s, n_, begin, end),
        dy_rows_(p.dy, n_, begin, end),
        dsum_rows_(p.dsum, n_, begin, end),
        dx_rows_(p.dx, n_, begin, end),
        weight_(load_vector<T>(weight_scratch_, p.weight, n_, p.weight.data != nullptr ? p.weight_offset : 0, 1)),
        dweight_(norm_bwd_sums(p) ? sums_scratch_.allocate<C>(2 * whole_steps(n_)) : nullptr),
        dbias_(dweight_ == nullptr ? nullptr : dweight_ + whole_steps(n_)) {}

  void run(int64_t row, int64_t end, C* partials) {
    const bool sums = norm_bwd_sums(p_);
    for (int64_t i = 0; sums && i < 2 * whole_steps(n_); ++i) dweight_[i] = C(0);
    if (n_ <= kGroupCols && s_rows_.in_place() && dy_rows_.in_place() && dsum_rows_.in_place() && dx_rows_.in_place()) {
      for (; row + kGroup <= end; row += kGroup) take<kGroup>(row);
    }
    for (; row < end; ++row) take<1>(row);
    if (sums) {
      from_row_order<T>(partials, dweight_, n_);
      from_row_order<T>(partials + n_, dbias_, n_);
    }
  }

 private:
  template <int R>
  void take(int64_t row) {
    const T *s[R], *dy[R], *dsum[R];
    T* dx[R];
    // The means of h, g and g * h. h's own is what the saved mean's rounding left; it is taken off.
    double mean_h[R], mean_g[R], mean_gh[R];
    for (int r = 0; r < R; ++r) {
      if (r > 0) dx_rows_.done();
      s[r] = s_rows_.row();
      dy[r] = dy_rows_.row();
      dsum[r] = dsum_rows_.row();
      dx[r] = dx_rows_.row();
      const Vec<C> rstd = row_rstd(row + r), center = row_center(row + r);
      const Totals t = reduce<T, kRms ? 1 : 3>(n_, [&](auto& t, int64_t i, auto step) AK_LAMBDA {
        prefetch_half<0>(s[r], i, n_, R);
        prefetch_half<0>(dy[r], i, n_, R);
        const Vec<C> g = load<C>(dy[r] + i, step) * load_buffer(weight_ + i);
        if constexpr (kRms) {
          t.a = fma(g, load<C>(s[r] + i, step) * rstd, t.a);
        } else {
          const Vec<C> h = keep((load<C>(s[r] + i, step) - center) * rstd, step, splat(C(0)));
          t.a = fma(g, h, t.a);
          t.b = t.b + g;
          t.c = t.c + h;
        }
      });
      mean_h[r] = t.c / double(n_);
      mean_g[r] = t.b / double(n_);
      mean_gh[r] = t.a / double(n_) - mean_h[r] * mean_g[r];
    }

    Vec<C> rstd[R], center[R], shift[R], vmean_g[R], vmean_gh_negated[R];
    for_group<R>([&](auto r) AK_LAMBDA {
      rstd[r] = row_rstd(row + r);
      center[r] = row_center(row + r);
      shift[r] = splat(C(-mean_h[r]));
      vmean_g[r] = splat(C(mean_g[r]));
      vmean_gh_negated[r] = splat(C(-mean_gh[r]));
    });
    const bool stream = dx_rows_.streams();
    for_steps<T>(n_, [&](int64_t i, auto step) AK_LAMBDA {
      const Vec<C> weight = load_buffer(weight_ + i);
      Vec<C> dweight, dbias;
      if (dweight_ != nullptr) {
        dweight = load_buffer(dweight_ + i);
        dbias = load_buffer(dbias_ + i);
      }
      for_group<R>([&](auto r) AK_LAMBDA {
        prefetch_half<1>(s[r], i, n_, R);
        prefetch_half<1>(dy[r], i, n_, R);
        const Vec<C> dy_i = load<C>(dy[r] + i, step);
        Vec<C> h = load<C>(s[r] + i, step), g = dy_i * weight;
        if constexpr (kRms) {
          h = h * rstd[r];
        } else {
          h = fma(h - center[r], rstd[r], shift[r]);
          g = g - vmean_g[r];
          dbias = dbias + dy_i;
        }
        dweight = fma(dy_i, h, dweight);
        if (dx[r] != nullptr) {
          if (!stream) prefetch_write(dx[r] + i, R * n_);
          g = fma(h, vmean_gh_negated[r], g);
          store(dx[r] + i, dsum[r] != nullptr ? fma(g, rstd[r], load<C>(dsum[r] + i, step)) : g * rstd[r], step,
                stream);
        }
      });
      if (dweight_ != nullptr) {
        store_buffer(dweight_ + i, dweight);
        if constexpr (!kRms) store_buffer(dbias_ + i, dbias);
      }
    });
    dx_rows_.done();
  }

  Vec<C> AK_SIMD row_rstd(int64_t row) const { return splat(static_cast<const C*>(p_.rstd)[row]); }
  Vec<C> AK_SIMD row_center(int64_t row) const { return splat(kRms ? C(0) : static_cast<const C*>(p_.mean)[row]); }

  const NormBwdParams& p_;
  int64_t n_;
  RowReader<T> s_rows_, dy_rows_, dsum_rows_;
  RowWriter<T> dx_rows_;
  Scratch weight_scratch_, sums_scratch_;
  const C* weight_;
  C* dweight_;  // the block's sums, null where not wanted
  C* dbias_;
};

void norm_bwd_block(const NormBwdParams& p, int64_t block) {
  const DType dtype = p.s.dtype;
  const bool uniform = p.dy.dtype == dtype && (p.dsum.data == nullptr || p.dsum.dtype == dtype) &&
                       (p.dx.data == nullptr || p.dx.dtype == dtype);
  const int64_t begin = block * sum_block_rows(p.rows);
  const int64_t end = p.rows - begin < sum_block_rows(p.rows) ? p.rows : begin + sum_block_rows(p.rows);
  with_row_type(dtype == DType::kFloat64, dtype, uniform, [&]<typename T>() {
    compute_t<T>* partials = static_cast<compute_t<T>*>(p.workspace) + block * 2 * p.cols;
    if (p.rms) {
      NormBwd<T, true>(p, begin, end).run(begin, end, partials);
    } else {
      NormBwd<T, false>(p, begin, end).run(begin, end, partials);
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
