// softmax and log_softmax: shapes and strides into SoftmaxFwdParams / SoftmaxBwdParams, then the CPU or CUDA kernel.
#include "cpu/kernels.h"
#include "torch_api.h"

namespace ampkernels::binding {
namespace {

// The mask as if expanded to the input's shape: stride 0 along every dimension that it broadcasts.
RowsIn mask_rows(const Tensor& mask, const Tensor& input, int64_t dim, Holder& holder, const char* op) {
  const int64_t ndim = input.dim(), lead = ndim - mask.dim();
  STD_TORCH_CHECK(lead >= 0 && ndim <= 64, op, ": mask must broadcast to ", shape_str(input), ", got ",
                  shape_str(mask));
  std::array<int64_t, 64> strides{};
  auto fill = [&](const Tensor& m) {
    for (int64_t i = 0; i < ndim; ++i) {
      const int64_t size = i < lead ? 1 : m.size(i - lead);
      STD_TORCH_CHECK(size == 1 || size == input.size(i), op, ": mask must broadcast to ", shape_str(input), ", got ",
                      shape_str(m));
      strides[i] = size == 1 ? 0 : m.stride(i - lead);
    }
  };
  fill(mask);
  Layout layout = make_layout(input.sizes().data(), strides.data(), ndim, dim, dim + 1);
  if (!layout.fits) {
    holder = torch::stable::contiguous(mask);
    fill(*holder);
    layout = make_layout(input.sizes().data(), strides.data(), ndim, dim, dim + 1);
    STD_TORCH_CHECK(layout.fits, op, ": mask broadcasts over more than ", RowMap::kMaxDims, " separate dimensions");
  }
  const Tensor& source = holder ? *holder : mask;
  return RowsIn{source.const_data_ptr(), dtype_of_tensor(source, op), layout.col_stride, layout.rows};
}

Tensor softmax_fwd(const Tensor& input, int64_t dim, double scale, std::optional<Tensor> mask, bool causal, bool log,
                   ScalarType out_dtype) {
  Tensor output = empty_contiguous_like(input, out_dtype);
  if (input.numel() == 0) return output;
  Holder x_holder, mask_holder;
  SoftmaxFwdParams p;
  p.cols = input.dim() > 0 ? input.size(dim) : 1;
  p.rows = input.numel() / p.cols;
  p.x = rows_in(input, dim, dim + 1, x_holder, "softmax");
  p.y = rows_out(output, dim, dim + 1, "softmax");
  if (mask) p.mask = mask_rows(*mask, input, dim, mask_holder, "softmax");
  p.scale = scale;
  p.causal = causal;
  p.log = log;
  p.q_len = causal ? input.size(input.dim() - 2) : 1;
#if defined(AMPKERNELS_WITH_CUDA)
  if (input.is_cuda()) {
    const CudaScope scope(input);
    check_status(cuda::launch_softmax_fwd(p, scope.stream()), "softmax");
    return output;
  }
#endif
  torch::stable::parallel_for(0, p.rows, row_grain(p.cols),
                              [&](int64_t begin, int64_t end) { cpu::softmax_fwd_rows(p, begin, end); });
  return output;
}

Tensor softmax_bwd(const Tensor& dy, const Tensor& output, int64_t dim, double scale, bool causal, bool log,
                   ScalarType dinput_dtype) {
  Tensor dinput = empty_contiguous_like(output, dinput_dtype);
  if (output.numel() == 0) return dinput;
  Holder dy_holder, y_holder;
  SoftmaxBwdParams p;
  p.cols = output.dim() > 0 ? output.size(dim) : 1;
  p.rows = output.numel() / p.cols;
  p.dy = rows_in(dy, dim, dim + 1, dy_holder, "softmax");
  p.y = rows_in(output, dim, dim + 1, y_holder, "softmax");
  p.dx = rows_out(dinput, dim, dim + 1, "softmax");
  p.scale = scale;
  p.causal = causal;
  p.log = log;
  p.q_len = causal ? output.size(output.dim() - 2) : 1;
#if defined(AMPKERNELS_WITH_CUDA)
  if (output.is_cuda()) {
    const CudaScope scope(output);
    check_status(cuda::launch_softmax_bwd(p, scope.stream()), "softmax");
    return dinput;
  }
#endif
  torch::stable::parallel_for(0, p.rows, row_grain(p.cols),
                              [&](int64_t begin, int64_t end) { cpu::softmax_bwd_rows(p, begin, end); });
  return dinput;
}

}  // namespace

#define AK_REGISTER_SOFTMAX(m)                    \
  m.impl("softmax_fwd", TORCH_BOX(&softmax_fwd)); \
  m.impl("softmax_bwd", TORCH_BOX(&softmax_bwd))

STABLE_TORCH_LIBRARY_IMPL(ampkernels, CPU, m) {
  AK_REGISTER_SOFTMAX(m);
}
#if defined(AMPKERNELS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(ampkernels, CUDA, m) {
  AK_REGISTER_SOFTMAX(m);
}
#endif

}  // namespace ampkernels::binding
