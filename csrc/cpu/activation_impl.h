// The epilogue of the GEMMs that a library computes, y = act(x + bias), and its backward, dpre = dy * act'(saved) with
// the column sums of dpre; plain or gated. Elementwise, kStep columns at a time, which are widened into L1-resident
// arrays, so that the activations of activation.h, written for one number, run as plain loops that the compiler
// vectorises. Rounding points: x + bias, the activation, the gate's product, all in the compute type; then once to the
// output's dtype.
#pragma once

#include "rows.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

constexpr int64_t kStep = 256;

template <typename C>
struct alignas(64) StepBuffer {
  C values[kStep];
};

template <typename C>
void apply_activation(Activation a, Result result, C* v, int64_t n) {
  with_activation(a, result, [&]<Activation A, Result R>() {
    for (int64_t i = 0; i < n; ++i) v[i] = activation<A, R>(v[i]);
  });
}
template <typename C>
void apply_activation_grad(Activation a, Result result, bool saved_is_output, C* v, int64_t n) {
  with_activation(a, result, [&]<Activation A, Result R>() {
    if constexpr (A == Activation::kRelu || A == Activation::kNone) {
      if (saved_is_output) {
        for (int64_t i = 0; i < n; ++i) v[i] = activation_grad_from_output<A>(v[i]);
        return;
      }
    }
    for (int64_t i = 0; i < n; ++i) v[i] = activation_grad<A, R>(v[i]);
  });
}

// v = x + bias over n columns, and pre = v rounded where it is wanted (it may be x itself).
template <typename T, typename C>
AK_SIMD void add_bias(C* v, const T* x, const C* bias, T* pre, int64_t n) {
  for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
    const Vec<C> sum = load<C>(x + i, step) + load_buffer(bias + i);
    store_buffer(v + i, sum);
    if (pre != nullptr) store(pre + i, sum, step);
  });
}

template <typename T>
void act_fwd_typed(const ActFwdParams& p, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  const int64_t x_cols = p.gated ? 2 * p.cols : p.cols;
  RowReader<T> x_rows(p.x, x_cols, begin, end);
  RowReader<T> residual_rows(p.residual, p.cols, begin, end);
  RowWriter<T> y_rows(p.y, p.cols, begin, end);
  RowWriter<T> pre_rows(p.pre, x_cols, begin, end);
  VectorIn up_part = p.bias;
  if (p.gated && p.bias.data != nullptr) {
    up_part.data = static_cast<const char*>(p.bias.data) + p.cols * p.bias.stride * dtype_size(p.bias.dtype);
  }
  Scratch bias_scratch, up_bias_scratch;
  const C* bias = load_vector<T>(bias_scratch, p.bias, p.cols, 0, -0.0);  // x + -0 is x, zeros' signs too
  const C* up_bias = p.gated ? load_vector<T>(up_bias_scratch, up_part, p.cols, 0, -0.0) : nullptr;
  StepBuffer<C> gate, up;
  const bool adds = p.residual.data != nullptr;
  const Result result = result_of(adds ? DType::kFloat32 : p.y.dtype);  // a sum may cancel it

  for (int64_t row = begin; row < end; ++row) {
    const T* x = x_rows.row();
    const T* residual = residual_rows.row();
    T* y = y_rows.row();
    T* pre = p.pre.data != nullptr ? pre_rows.row() : nullptr;
    for (int64_t c = 0; c < p.cols; c += kStep) {
      const int64_t n = p.cols - c < kStep ? p.cols - c : kStep;
      add_bias(gate.values, x + c, bias + c, pre != nullptr ? pre + c : nullptr, n);
      apply_activation(p.activation, result, gate.values, whole_steps(n));
      if (p.gated) {
        const int64_t u = p.cols + c;
        add_bias(up.values, x + u, up_bias + c, pre != nullptr ? pre + u : nullptr, n);
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          store(y + c + i, load_buffer(gate.values + i) * load_buffer(up.values + i), step);
        });
      } else if (adds) {
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          store(y + c + i, load<C>(residual + c + i, step) + load_buffer(gate.values + i), step);
        });
      } else {
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA { store(y + c + i, load_buffer(gate.values + i), step); });
      }
    }
    y_rows.done();
    if (pre != nullptr) pre_rows.done();
  }
}

void act_fwd_rows(const ActFwdParams& p, int64_t begin, int64_t end) {
  const DType dtype = p.x.dtype;
  const bool uniform = p.y.dtype == dtype && (p.pre.data == nullptr || p.pre.dtype == dtype) &&
                       (p.residual.data == nullptr || p.residual.dtype == dtype);
  with_row_type(dtype == DType::kFloat64, dtype, uniform, [&]<typename T>() { act_fwd_typed<T>(p, begin, end); });
}

// ------------------------------------------------------------------------------------------------------------ backward

// Stores dpre, and adds it to the column sums, where each is wanted.
template <typename C, typename T>
AK_SIMD void emit_gradient(Vec<C> v, T* dpre, C* dbias, int64_t i, auto step) {
  if (dpre != nullptr) store(dpre + i, v, step);
  if (dbias != nullptr) store_buffer(dbias + i, load_buffer(dbias + i) + v);
}

template <typename T>
void act_bwd_typed(const ActBwdParams& p, int64_t block) {
  using C = compute_t<T>;
  const int64_t cols = p.cols, out_cols = p.gated ? 2 * p.cols : p.cols;
  const int64_t begin = block * sum_block_rows(p.rows);
  const int64_t end = p.rows - begin < sum_block_rows(p.rows) ? p.rows : begin + sum_block_rows(p.rows);
  RowReader<T> dy_rows(p.dy, cols, begin, end);
  RowReader<T> saved_rows(p.saved, out_cols, begin, end);
  RowWriter<T> dpre_rows(p.dpre, out_cols, begin, end);
  Scratch sums_scratch;
  C* sums = p.dbias.data != nullptr ? sums_scratch.allocate<C>(2 * whole_steps(cols)) : nullptr;
  C* up_sums = sums != nullptr ? sums + whole_steps(cols) : nullptr;
  if (sums != nullptr) {
    for (int64_t i = 0; i < 2 * whole_steps(cols); ++i) sums[i] = C(0);
  }
  StepBuffer<C> act, grad;

  for (int64_t row = begin; row < end; ++row) {
    const T* dy = dy_rows.row();
    const T* saved = p.saved.data != nullptr ? saved_rows.row() : nullptr;
    T* dpre = p.dpre.data != nullptr ? dpre_rows.row() : nullptr;
    for (int64_t c = 0; c < cols; c += kStep) {
      const int64_t n = cols - c < kStep ? cols - c : kStep;
      T* dpre_c = dpre != nullptr ? dpre + c : nullptr;
      C* sums_c = sums != nullptr ? sums + c : nullptr;
      if (saved == nullptr) {
        for_steps<T>(n, [&](int64_t i, auto step)
                            AK_LAMBDA { emit_gradient<C>(load<C>(dy + c + i, step), dpre_c, sums_c, i, step); });
        continue;
      }
      for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
        const Vec<C> v = load<C>(saved + c + i, step);
        store_buffer(grad.values + i, v);
        if (p.gated) store_buffer(act.values + i, v);
      });
      apply_activation_grad(p.activation, result_of(p.saved.dtype), p.saved_is_output, grad.values, whole_steps(n));
      if (!p.gated) {
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          emit_gradient<C>(load<C>(dy + c + i, step) * load_buffer(grad.values + i), dpre_c, sums_c, i, step);
        });
      } else {
        apply_activation(p.activation, result_of(p.saved.dtype), act.values, whole_steps(n));
        T* dup_c = dpre != nullptr ? dpre_c + cols : nullptr;
        C* up_sums_c = sums != nullptr ? up_sums + c : nullptr;
        const T* up = saved + cols + c;
        for_steps<T>(n, [&](int64_t i, auto step) AK_LAMBDA {
          const Vec<C> dy_i = load<C>(dy + c + i, step);
          const Vec<C> dgate = dy_i * load<C>(up + i, step) * load_buffer(grad.values + i);
          emit_gradient<C>(dgate, dpre_c, sums_c, i, step);
          emit_gradient<C>(dy_i * load_buffer(act.values + i), dup_c, up_sums_c, i, step);
        });
      }
    }
    if (dpre != nullptr) dpre_rows.done();
  }
  if (sums != nullptr) {
    C* partials = static_cast<C*>(p.workspace) + block * out_cols;
    from_row_order<T>(partials, sums, cols);
    if (p.gated) from_row_order<T>(partials + cols, up_sums, cols);
  }
}

void act_bwd_block(const ActBwdParams& p, int64_t block) {
  const DType dtype = p.dy.dtype;
  const bool uniform =
      (p.saved.data == nullptr || p.saved.dtype == dtype) && (p.dpre.data == nullptr || p.dpre.dtype == dtype);
  with_row_type(dtype == DType::kFloat64, dtype, uniform, [&]<typename T>() { act_bwd_typed<T>(p, block); });
}

void act_bwd_columns(const ActBwdParams& p, int64_t begin, int64_t end) {
  if (p.dbias.data == nullptr) return;
  const int64_t stride = p.gated ? 2 * p.cols : p.cols;
  if (p.dy.dtype == DType::kFloat64) {
    add_partials(static_cast<const double*>(p.workspace), sum_blocks(p.rows), stride, p.dbias, begin, end);
  } else {
    add_partials(static_cast<const float*>(p.workspace), sum_blocks(p.rows), stride, p.dbias, begin, end);
  }
}

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
