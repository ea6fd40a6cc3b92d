// The words every layer shares: dtypes, activations, the accumulation policy, and how a launcher reports failure.
// Torch-free and CUDA-free: g++ and nvcc both read it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define AK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define AK_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace ampkernels {

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3, kBool = 4 };

constexpr int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

// The numbers are the wire format between Python (ampkernels/_ops.py) and C++.
enum class Activation : int32_t {
  kNone = 0,
  kRelu = 1,
  kGelu = 2,  // erf
  kGeluTanh = 3,
  kSilu = 4,
  kSigmoid = 5,
  kTanh = 6,
  kQuickGelu = 7,  // x * sigmoid(1.702 x)
  kRelu2 = 8,      // relu(x)^2
};
constexpr int32_t kActivationCount = 9;

// docs/design.md section 3. chunk == 0: the library chooses (still fp32 partials in a fixed order).
struct Accumulate {
  DType dtype = DType::kFloat32;  // kFloat32 or kFloat16
  int64_t chunk = 0;              // a multiple of 16, or 0
};

// What a torch-free launcher returns. `text` has static storage, or is null on success. `cuda_error` is the
// cudaError_t (0 if none): the binding turns it into an exception that names the op.
struct Status {
  const char* text = nullptr;
  int cuda_error = 0;
  constexpr bool ok() const { return text == nullptr && cuda_error == 0; }
};

}  // namespace ampkernels
