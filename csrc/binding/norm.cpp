// layer_norm and rms_norm: shapes and strides into NormFwdParams / NormBwdParams, then the CPU or CUDA kernel.
#include "cpu/kernels.h"
#include "torch_api.h"

namespace ampkernels::binding {
namespace {

using OptTensor = std::optional<Tensor>;
using OptDtype = std::optional<ScalarType>;

// ---------------------------------------------------------------------------------------- the kernels, on either
// device

void run_norm_fwd(const NormFwdParams& p, const Tensor& input) {
  if (p.rows == 0 || p.cols == 0) return;
#if defined(AMPKERNELS_WITH_CUDA)
  if (input.is_cuda()) {
    const CudaScope scope(input);
    return check_status(cuda::launch_norm_fwd(p, scope.stream()), p.rms ? "rms_norm" : "layer_norm");
  }
#endif
  torch::stable::parallel_for(0, p.rows, row_grain(p.cols),
                              [&](int64_t begin, int64_t end) { cpu::norm_fwd_rows(p, begin, end); });
}

void run_norm_bwd(NormBwdParams& p, const Tensor& saved) {
#if defined(AMPKERNELS_WITH_CUDA)
  if (saved.is_cuda()) {
    const CudaScope scope(saved);
    Holder scratch;
    p.workspace = workspace(saved, cuda::norm_bwd_workspace_bytes(p), scratch);
    return check_status(cuda::launch_norm_bwd(p, scope.stream()), p.rms ? "rms_norm" : "layer_norm");
  }
#endif
  Holder scratch;
  p.workspace = workspace(saved, cpu::norm_bwd_workspace_bytes(p), scratch);
  torch::stable::parallel_for(0, cpu::norm_bwd_blocks(p), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) cpu::norm_bwd_block(p, block);
  });
  if (p.dweight.data || p.dbias.data)
    torch::stable::parallel_for(0, p.cols, 1024,
                                [&](int64_t begin, int64_t end) { cpu::norm_bwd_columns(p, begin, end); });
}

// ------------------------------------------------------------------------------------------------------------- forward

int64_t product(const Tensor& t, int64_t begin, int64_t end) {
  int64_t n = 1;
  for (int64_t i = begin; i < end; ++i) n *= t.size(i);
  return n;
}

// A parameter of the normalised shape as one vector; several dimensions with a gap between them are copied.
VectorIn parameter(const OptTensor& t, Holder& holder, const char* op) {
  if (!t) return {};
  Layout layout = make_layout(t->sizes().data(), t->strides().data(), t->dim(), 0, t->dim());
  if (!layout.fits) {
    holder = torch::stable::contiguous(*t);
    layout.col_stride = 1;
  }
  const Tensor& source = holder ? *holder : *t;
  return VectorIn{source.const_data_ptr(), dtype_of_tensor(source, op), layout.col_stride};
}

struct NormFwdResult {
  Tensor output, sum, mean, rstd;
};

NormFwdResult norm_fwd(bool rms, const Tensor& input, int64_t ndim, const OptTensor& weight, const OptTensor& bias,
                       double eps, double weight_offset, const OptTensor& residual, ScalarType out_dtype,
                       bool save_stats) {
  const char* op = rms ? "rms_norm" : "layer_norm";
  const int64_t col_begin = input.dim() - ndim, col_end = input.dim();
  const ScalarType stats = statistics_dtype(input);
  NormFwdParams p;
  p.rms = rms;
  p.rows = product(input, 0, col_begin);
  p.cols = product(input, col_begin, col_end);
  p.eps = eps;
  p.weight_offset = weight_offset;

  NormFwdResult r{empty_contiguous_like(input, out_dtype),
                  residual ? empty_contiguous_like(input, residual->scalar_type()) : Tensor(),
                  save_stats && !rms ? empty_contiguous(input, stats, {p.rows}) : Tensor(),
                  save_stats ? empty_contiguous(input, stats, {p.rows}) : Tensor()};
  Holder x_holder, residual_holder, weight_holder, bias_holder;
  p.x = rows_in(input, col_begin, col_end, x_holder, op);
  p.y = rows_out(r.output, col_begin, col_end, op);
  if (residual) {
    p.residual = rows_in(*residual, col_begin, col_end, residual_holder, op);
    p.sum = rows_out(r.sum, col_begin, col_end, op);
  }
  p.weight = parameter(weight, weight_holder, op);
  p.bias = parameter(bias, bias_holder, op);
  if (save_stats) {
    if (!rms) p.mean = r.mean.mutable_data_ptr();
    p.rstd = r.rstd.mutable_data_ptr();
  }
  run_norm_fwd(p, input);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, int64_t ndim, OptTensor weight,
                                                          OptTensor bias, double eps, OptTensor residual,
                                                          ScalarType out_dtype, bool save_stats) {
  auto r = norm_fwd(false, input, ndim, weight, bias, eps, 0.0, residual, out_dtype, save_stats);
  return {std::move(r.output), std::move(r.sum), std::move(r.mean), std::move(r.rstd)};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd(const Tensor& input, int64_t ndim, OptTensor weight, double eps,
                                                double weight_offset, OptTensor residual, ScalarType out_dtype,
                                                bool save_stats) {
  auto r = norm_fwd(true, input, ndim, weight, std::nullopt, eps, weight_offset, residual, out_dtype, save_stats);
  return {std::move(r.output), std::move(r.sum), std::move(r.rstd)};
}

// ------------------------------------------------------------------------------------------------------------ backward

struct NormBwdResult {
  Tensor dinput, dweight, dbias;
};

NormBwdResult norm_bwd(bool rms, const Tensor& dy, const OptTensor& dsum, const Tensor& saved, int64_t ndim,
                       const OptTensor& mean, const Tensor& rstd, const OptTensor& weight, double weight_offset,
                       OptDtype dinput_dtype, OptDtype dweight_dtype, OptDtype dbias_dtype) {
  const char* op = rms ? "rms_norm" : "layer_norm";
  const int64_t col_begin = saved.dim() - ndim, col_end = saved.dim();
  NormBwdParams p;
  p.rms = rms;
  p.rows = product(saved, 0, col_begin);
  p.cols = product(saved, col_begin, col_end);
  p.weight_offset = weight_offset;
  p.mean = mean ? mean->const_data_ptr() : nullptr;
  p.rstd = rstd.const_data_ptr();

  auto parameter_grad = [&](OptDtype dtype) {
    if (!dtype) return Tensor();
    Tensor grad = empty_contiguous(saved, *dtype, saved.sizes().data() + col_begin, ndim);
    if (p.rows == 0) torch::stable::zero_(grad);  // a sum of nothing
    return grad;
  };
  NormBwdResult r{dinput_dtype ? empty_contiguous_like(saved, *dinput_dtype) : Tensor(), parameter_grad(dweight_dtype),
                  parameter_grad(dbias_dtype)};
  if (p.rows == 0 || p.cols == 0) return r;

  Holder dy_holder, s_holder, dsum_holder, weight_holder;
  p.dy = rows_in(dy, col_begin, col_end, dy_holder, op);
  p.s = rows_in(saved, col_begin, col_end, s_holder, op);
  if (dsum) p.dsum = rows_in(*dsum, col_begin, col_end, dsum_holder, op);
  p.weight = parameter(weight, weight_holder, op);
  if (dinput_dtype) p.dx = rows_out(r.dinput, col_begin, col_end, op);
  if (dweight_dtype) p.dweight = vector_out(r.dweight, op);
  if (dbias_dtype) p.dbias = vector_out(r.dbias, op);
  run_norm_bwd(p, saved);
  return r;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& dy, OptTensor dsum, const Tensor& saved, int64_t ndim,
                                                  const Tensor& mean, const Tensor& rstd, OptTensor weight,
                                                  OptDtype dinput_dtype, OptDtype dweight_dtype, OptDtype dbias_dtype) {
  auto r = norm_bwd(false, dy, dsum, saved, ndim, mean, rstd, weight, 0.0, dinput_dtype, dweight_dtype, dbias_dtype);
  return {std::move(r.dinput), std::move(r.dweight), std::move(r.dbias)};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& dy, OptTensor dsum, const Tensor& saved, int64_t ndim,
                                        const Tensor& rstd, OptTensor weight, double weight_offset,
                                        OptDtype dinput_dtype, OptDtype dweight_dtype) {
  auto r = norm_bwd(true, dy, dsum, saved, ndim, std::nullopt, rstd, weight, weight_offset, dinput_dtype, dweight_dtype,
                    std::nullopt);
  return {std::move(r.dinput), std::move(r.dweight)};
}

}  // namespace

#define AK_REGISTER_NORMS(m)                            \
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd)); \
  m.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));     \
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd)); \
  m.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd))

STABLE_TORCH_LIBRARY_IMPL(ampkernels, CPU, m) {
  AK_REGISTER_NORMS(m);
}
#if defined(AMPKERNELS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(ampkernels, CUDA, m) {
  AK_REGISTER_NORMS(m);
}
#endif

}  // namespace ampkernels::binding
