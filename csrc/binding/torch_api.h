// Everything the binding uses of torch: the stable ABI only (TORCH_TARGET_VERSION), so one build serves torch 2.10 and
// later. If this had to change, it would change in this folder alone.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>

#include "ampkernels/params.h"
#if defined(AMPKERNELS_WITH_CUDA)
#include "cuda/launch.h"
#endif

namespace ampkernels::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::initializer_list<int64_t>;

// ------------------------------------------------------------------------------------------------------------- dtypes

inline DType to_dtype(ScalarType t, const char* op) {
  switch (t) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      STD_TORCH_CHECK(false, op, ": dtype must be float16, bfloat16, float32, float64 or bool, got ", t);
  }
}
inline DType dtype_of_tensor(const Tensor& t, const char* op) {
  return to_dtype(t.scalar_type(), op);
}

// Statistics and partial sums: fp64 for fp64 inputs, fp32 for all others.
inline ScalarType statistics_dtype(const Tensor& input) {
  return input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// --------------------------------------------------------------------------------------------------------- allocation

// Uninitialised, on `like`'s device, from torch's allocator; straight through the C shim (no dispatcher).
inline Tensor empty_strided(const Tensor& like, ScalarType dtype, const int64_t* sizes, const int64_t* strides,
                            int64_t ndim) {
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(ndim, sizes, strides, type, device_type, device_index, &handle));
  return Tensor(handle);
}

inline Tensor empty_contiguous(const Tensor& like, ScalarType dtype, const int64_t* sizes, int64_t ndim) {
  std::array<int64_t, 64> strides{};
  STD_TORCH_CHECK(ndim <= 64, "a tensor of more than 64 dimensions");
  int64_t stride = 1;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return empty_strided(like, dtype, sizes, strides.data(), ndim);
}
inline Tensor empty_contiguous(const Tensor& like, ScalarType dtype, Sizes sizes) {
  return empty_contiguous(like, dtype, sizes.begin(), int64_t(sizes.size()));
}
inline Tensor empty_contiguous_like(const Tensor& like, ScalarType dtype) {
  return empty_contiguous(like, dtype, like.sizes().data(), like.dim());
}

// Scratch memory, kept by `holder`; null where none is needed.
inline void* workspace(const Tensor& like, size_t bytes, std::optional<Tensor>& holder) {
  if (bytes == 0) return nullptr;
  holder = empty_contiguous(like, ScalarType::Byte, {int64_t(bytes)});
  return holder->mutable_data_ptr();
}

// ---------------------------------------------------------------------------------------------- layouts of the structs

// How a tensor is read as rows x cols: its shape (or the shape it broadcasts to), and which dimensions make up a row.
struct Layout {
  RowMap rows;
  int64_t col_stride = 1;
  bool fits = true;  // false: needs a contiguous copy first (row dimensions or columns that no RowMap describes)
};

// sizes/strides of all `ndim` dimensions; columns are dimensions [col_begin, col_end), rows are all others, in order.
// Dimensions of size 1 vanish, neighbours that one stride walks through become one.
inline Layout make_layout(const int64_t* sizes, const int64_t* strides, int64_t ndim, int64_t col_begin,
                          int64_t col_end) {
  Layout layout;
  RowMap cols;
  int row_dims = 0, col_dims = 0;
  for (int64_t i = 0; i < ndim; ++i) {
    if (sizes[i] == 1) continue;
    const bool is_col = i >= col_begin && i < col_end;
    RowMap& map = is_col ? cols : layout.rows;
    int& n = is_col ? col_dims : row_dims;
    if (n > 0 && map.stride[n - 1] == strides[i] * sizes[i]) {
      map.size[n - 1] *= sizes[i];
      map.stride[n - 1] = strides[i];
    } else if (n < (is_col ? 1 : RowMap::kMaxDims)) {
      map.size[n] = sizes[i];
      map.stride[n++] = strides[i];
    } else {
      layout.fits = false;
    }
  }
  layout.rows.ndim = row_dims > 0 ? row_dims : 1;
  layout.col_stride = col_dims > 0 ? cols.stride[0] : 1;
  return layout;
}

// Keeps a copy alive that had to be made; empty where the tensor is read as it lies.
using Holder = std::optional<Tensor>;

// A tensor as rows for reading. A copy is made only where no RowMap fits.
inline RowsIn rows_in(const Tensor& t, int64_t col_begin, int64_t col_end, Holder& holder, const char* op) {
  Layout layout = make_layout(t.sizes().data(), t.strides().data(), t.dim(), col_begin, col_end);
  if (!layout.fits) {
    holder = torch::stable::contiguous(t);
    layout = make_layout(holder->sizes().data(), holder->strides().data(), holder->dim(), col_begin, col_end);
  }
  const Tensor& source = holder ? *holder : t;
  return RowsIn{source.const_data_ptr(), dtype_of_tensor(source, op), layout.col_stride, layout.rows};
}

// A tensor that we have just allocated.
inline RowsOut rows_out(const Tensor& t, int64_t col_begin, int64_t col_end, const char* op) {
  const Layout layout = make_layout(t.sizes().data(), t.strides().data(), t.dim(), col_begin, col_end);
  return RowsOut{t.mutable_data_ptr(), dtype_of_tensor(t, op), layout.col_stride, layout.rows};
}

inline VectorIn vector_in(const Tensor& t, const char* op) {
  return VectorIn{t.const_data_ptr(), dtype_of_tensor(t, op), t.dim() > 0 ? t.stride(0) : 1};
}
inline VectorOut vector_out(const Tensor& t, const char* op) {
  return VectorOut{t.mutable_data_ptr(), dtype_of_tensor(t, op), 1};
}

inline std::string shape_str(const Tensor& t) {
  std::string s = "(";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + (t.dim() == 1 ? ",)" : ")");
}

// ------------------------------------------------------------------------------------------------------------
// launching

// Work per thread below which threads cost more than they bring.
inline int64_t row_grain(int64_t cols) {
  return cols >= 16384 ? 1 : 16384 / (cols > 0 ? cols : 1);
}

#if defined(AMPKERNELS_WITH_CUDA)
// Makes the tensor's device current for its lifetime and knows that device's current stream.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& t) {
    const int32_t device = t.get_device_index();
    int current = -1;
    if (cudaGetDevice(&current) != cudaSuccess || current != device) guard_.emplace(device);
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;  // none where the device is current already
  cudaStream_t stream_ = nullptr;
};

inline void check_status(Status status, const char* op) {
  if (status.ok()) return;
  const char* cuda = status.cuda_error ? cudaGetErrorString(cudaError_t(status.cuda_error)) : "";
  STD_TORCH_CHECK(false, op, ": ", status.text ? status.text : "CUDA launch failed", status.cuda_error ? ": " : "",
                  cuda);
}
#endif

}  // namespace ampkernels::binding
