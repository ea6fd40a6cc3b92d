// Softmax and log-softmax, forward and backward. A row is read from memory once and written once; between, it stays in
// the L1 or L2 cache: the largest logit, then the exponentials and their sum, then the normalisation.
// Rounding points: x minus the largest x, times scale (with a mask scale * x + mask, one fma, minus the largest), exp,
// the sum (reduce), the product with 1 / sum; backward the dot product, scale * dy - scale * dot (one fma), the product
// with y; all in the compute type, then once to the output's dtype.
#pragma once

#include "rows.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

template <typename T, typename C>
void fill_row(T* y, int64_t begin, int64_t end, C value) {
  const T v = round_to<T>(value);
  for (int64_t i = begin; i < end; ++i) y[i] = v;
}

// The x of the row with the largest scale * x.
template <typename T, typename F>
AK_SIMD compute_t<T> extreme(int64_t n, compute_t<T> scale, F x) {
  using C = compute_t<T>;
  if (scale < C(0)) {
    const Vec<C> zero = splat(C(0));
    return -reduce_max<T>(n, [&](int64_t i, auto step) AK_LAMBDA { return zero - x(i, step); });
  }
  return reduce_max<T>(n, x);
}

// y = softmax(scale * x), or its logarithm, over a row of T of n columns. x(i, step) loads a step; `largest` is
// extreme's; e: a buffer. The largest is subtracted before the scale multiplies, so that its own exponent is 0 however
// large it is.
template <typename T, typename C, typename F>
AK_SIMD void softmax_row(F x, C largest, C scale, bool log, C* e, T* y, int64_t n, bool stream) {
  const Vec<C> vlargest = splat(largest), vscale = splat(scale);
  const auto logit = [&](int64_t i, auto step) AK_LAMBDA { return (x(i, step) - vlargest) * vscale; };
  if (log) {
    const double sum = reduce<T, 1>(n, [&](auto& s, int64_t i, auto step) AK_LAMBDA {
                         s.a = s.a + keep(exp_nonpositive(logit(i, step)), step, splat(C(0)));
                       }).a;
    const Vec<C> log_sum = splat(C(__builtin_log(sum)));
    for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
      if (!stream) prefetch_write(y + i, n);
      store(y + i, logit(i, step) - log_sum, step, stream);
    });
  } else {
    // A 16-bit row's in base 2, which spares exp its own multiplication: the factor's rounding is nothing beside
    // theirs.
    const Vec<C> vfactor = splat(scale * C(detail::kLog2e));
    const double sum = reduce<T, 1>(n, [&](auto& s, int64_t i, auto step) AK_LAMBDA {
                         Vec<C> v;
                         if constexpr (sizeof(T) == 2) {
                           v = exp2_nonpositive((x(i, step) - vlargest) * vfactor);
                         } else {
                           v = exp_nonpositive(logit(i, step));
                         }
                         v = keep(v, step, splat(C(0)));
                         store_buffer(e + i, v);
                         if (!stream) prefetch_write(y + i, n);
                         s.a = s.a + v;
                       }).a;
    const Vec<C> inverse = splat(C(1.0 / sum));
    for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA { store(y + i, load_buffer(e + i) * inverse, step, stream); });
  }
}

template <typename T, typename C>
void plain_row(const T* x, C scale, bool log, C* e, T* y, int64_t n, bool stream) {
  const auto load_x = [&](int64_t i, auto step) AK_LAMBDA { return load<C>(x + i, step); };
  const auto load_again = [&](int64_t i, auto step) AK_LAMBDA {
    prefetch_read(x + i, n);
    return load<C>(x + i, step);
  };
  softmax_row<T>(load_again, extreme<T>(n, scale, load_x), scale, log, e, y, n, stream);
}

// The logits, scaled and masked, lie in z, a buffer in row order, which serves as e too.
template <typename T, typename C>
void masked_row(C* z, bool log, T* y, int64_t n, bool stream) {
  const auto load_z = [&](int64_t i, auto) AK_LAMBDA { return load_buffer(z + i); };
  const C largest = extreme<T>(n, C(1), load_z);
  if (largest != C(-INFINITY)) return softmax_row<T>(load_z, largest, C(1), log, z, y, n, stream);
  // Nothing kept, unless what is kept is NaN.
  const double nan = reduce<T, 1>(n, [&](auto& s, int64_t i, auto step) AK_LAMBDA {
                       const Vec<C> v = load_buffer(z + i), zero = splat(C(0));
                       s.a = s.a + keep(select_greater(zero, v, zero, v), step, zero);
                     }).a;
  fill_row(y, 0, n, nan != nan ? C(NAN) : log ? C(-INFINITY) : C(0));
}

// Columns that a causal row keeps.
AK_SIMD int64_t causal_columns(bool causal, int64_t row, int64_t q_len, int64_t cols) {
  if (!causal) return cols;
  const int64_t kept = row % q_len + 1;
  return kept < cols ? kept : cols;
}

template <typename T>
void softmax_fwd_typed(const SoftmaxFwdParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const bool masked = p.mask.data != nullptr;
  const bool bool_mask = masked && p.mask.dtype == DType::kBool;
  const bool same_mask = masked && p.mask.dtype == dtype_of<T>::value;  // additive, of x's own type
  const RowsIn none;
  RowReader<T> x_rows(p.x, p.cols, begin, end);
  RowReader<uint8_t> bool_rows(bool_mask ? p.mask : none, p.cols, begin, end);
  RowReader<T> same_rows(same_mask ? p.mask : none, p.cols, begin, end);
  RowReader<C> other_rows(masked && !bool_mask && !same_mask ? p.mask : none, p.cols, begin, end);
  RowWriter<T> y_rows(p.y, p.cols, begin, end);
  Scratch scratch, mask_scratch;
  C* e = scratch.allocate<C>(whole_steps(p.cols));
  C* ordered = masked && !bool_mask && !same_mask ? mask_scratch.allocate<C>(whole_steps(p.cols)) : nullptr;
  const C scale = C(p.scale);
  const Vec<C> vscale = splat(scale), dropped = splat(C(-INFINITY));

  for (int64_t row = begin; row < end; ++row) {
    const T* x = x_rows.row();
    T* y = y_rows.row();
    const int64_t n = causal_columns(p.causal, row, p.q_len, p.cols);
    if (!masked) {
      plain_row(x, scale, p.log, e, y, n, y_rows.streams());
    } else {
      if (bool_mask) {
        const uint8_t* mask = bool_rows.row();
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          store_buffer(e + i, select_kept<T>(mask + i, load<C>(x + i, step) * vscale, dropped, step));
        });
      } else if (same_mask) {
        const T* mask = same_rows.row();
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          store_buffer(e + i, fma(load<C>(x + i, step), vscale, load<C>(mask + i, step)));
        });
      } else {
        const C* mask = other_rows.row();
        for (int64_t i = 0; i < n; ++i) ordered[i] = mask[i] == mask[i] ? mask[i] : C(NAN);  // see exp2_nonpositive
        to_row_order<T>(ordered, n);
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          store_buffer(e + i, fma(load<C>(x + i, step), vscale, load_buffer(ordered + i)));
        });
      }
      masked_row(e, p.log, y, n, y_rows.streams());
    }
    if (n < p.cols) fill_row(y, n, p.cols, p.log ? C(-INFINITY) : C(0));
    y_rows.done();
  }
}

void softmax_fwd_rows(const SoftmaxFwdParams& p, int64_t begin, int64_t end) {
  with_row_type(p.x.dtype == DType::kFloat64, p.x.dtype, p.x.dtype == p.y.dtype,
                [&]<typename T>() { softmax_fwd_typed<T>(p, begin, end); });
}

template <typename T>
class SoftmaxBwd {
 public:
  using C = compute_t<T>;

  SoftmaxBwd(const SoftmaxBwdParams& p, int64_t begin, int64_t end)
      : p_(p),
        y_rows_(p.y, p.cols, begin, end),
        dy_rows_(p.dy, p.cols, begin, end),
        dx_rows_(p.dx, p.cols, begin, end) {}

  void run(int64_t row, int64_t end) {
    if (p_.cols <= kGroupCols && y_rows_.in_place() && dy_rows_.in_place() && dx_rows_.in_place()) {
      for (; row + kGroup <= end; row += kGroup) take<kGroup>(row);
    }
    for (; row < end; ++row) take<1>(row);
  }

 private:
  template <int R>
  void take(int64_t row) {
    const T *y[R], *dy[R];
    T* dx[R];
    double sum[R];
    for (int r = 0; r < R; ++r) {
      if (r > 0) dx_rows_.done();
      y[r] = y_rows_.row();
      dy[r] = dy_rows_.row();
      dx[r] = dx_rows_.row();
      sum[r] = reduce<T, 1>(columns(row + r), [&](auto& s, int64_t i, auto step) AK_LAMBDA {
                 prefetch_half<0>(y[r], i, p_.cols, R);
                 prefetch_half<0>(dy[r], i, p_.cols, R);
                 const Vec<C> v = load<C>(dy[r] + i, step);
                 s.a = p_.log ? s.a + v : fma(load<C>(y[r] + i, step), v, s.a);
               }).a;
    }
    const bool stream = dx_rows_.streams();
    const Vec<C> scale = splat(C(p_.scale));
    for (int r = 0; r < R; ++r) {
      const Vec<C> negated = splat(p_.log ? C(-sum[r]) : C(-sum[r]) * C(p_.scale));
      for_steps<T>(columns(row + r), [&](int64_t i, auto step) AK_LAMBDA {
        prefetch_half<1>(y[r], i, p_.cols, R);
        prefetch_half<1>(dy[r], i, p_.cols, R);
        if (!stream) prefetch_write(dx[r] + i, R * p_.cols);
        const Vec<C> v = load<C>(y[r] + i, step), dv = load<C>(dy[r] + i, step);
        store(dx[r] + i, p_.log ? fma(exp_nonpositive(v), negated, dv) * scale : v * fma(dv, scale, negated), step,
              stream);
      });
      fill_row(dx[r], columns(row + r), p_.cols, C(0));
    }
    dx_rows_.done();
  }
  int64_t columns(int64_t row) const { return causal_columns(p_.causal, row, p_.q_len, p_.cols); }

  const SoftmaxBwdParams& p_;
  RowReader<T> y_rows_, dy_rows_;
  RowWriter<T> dx_rows_;
};

void softmax_bwd_rows(const SoftmaxBwdParams& p, int64_t begin, int64_t end) {
  const bool fp64 = p.y.dtype == DType::kFloat64 || p.dy.dtype == DType::kFloat64;
  with_row_type(fp64, p.y.dtype, p.y.dtype == p.dy.dtype && p.y.dtype == p.dx.dtype,
                [&]<typename T>() { SoftmaxBwd<T>(p, begin, end).run(begin, end); });
}

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
