// Host side of the row kernels: the device, launch attributes, dtype dispatch, and what a row's layout allows.
#pragma once

#include <algorithm>

#include "../plan/rows_plan.h"
#include "ampkernels/convert.h"
#include "ampkernels/params.h"
#include "launch.h"

namespace ampkernels::cuda {

// What the kernels may use: the device's architecture, or, where they come from PTX of one before 9.0, that one, whose
// code has no clusters and no bulk copies.
struct Device {
  int arch = 0;  // 80, 90, ...
};
namespace {
__global__ void as_compiled() {}
}  // namespace
inline const Device* current_device(Status* status) {
  static Device devices[64];
  int index = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess && (index < 0 || index >= 64)) error = cudaErrorInvalidDevice;
  if (error == cudaSuccess && __atomic_load_n(&devices[index].arch, __ATOMIC_RELAXED) == 0) {
    int major = 0, minor = 0;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    cudaFuncAttributes attributes = {};
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, as_compiled);
    const int compiled = attributes.ptxVersion, arch = 10 * major + minor;
    if (error == cudaSuccess)
      __atomic_store_n(&devices[index].arch, compiled < 90 ? std::min(compiled, arch) : arch, __ATOMIC_RELAXED);
  }
  if (error != cudaSuccess) {
    *status = Status{"cannot query the current device", int(error)};
    return nullptr;
  }
  return &devices[index];
}

// Launches with the attributes the kernel needs: dependent launch and clusters from 9.0 on, and large shared memory.
template <typename... Parameters, typename... Args>
Status launch_rows(void (*kernel)(Parameters...), int arch, int64_t ctas, int threads, int cluster, size_t shared,
                   cudaStream_t stream, Args... args) {
  if (ctas == 0) return {};
  if (ctas * cluster > 0x7fffffffLL) return Status{"too many rows for one launch", 0};
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) return Status{"cannot get the shared memory", int(error)};
  }
  if (cluster > 8) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return Status{"cannot get clusters of 16", int(error)};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(ctas * cluster));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  config.numAttrs = 0;
  if (arch >= 90) {
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& size = attributes[config.numAttrs++];
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = unsigned(cluster);
    size.val.clusterDim.y = size.val.clusterDim.z = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(args)...);
  return error == cudaSuccess ? Status{} : Status{"launch failed", int(error)};
}

// Calls f.template operator()<T>() on the host for the dtype of a row.
template <typename F>
Status dispatch_row_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f.template operator()<half_t>();
    case DType::kBFloat16:
      return f.template operator()<bfloat16_t>();
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    default:
      return Status{"rows must be floating point", 0};
  }
}

// Rows as load_aligned reads them: one row stride, everything on 16 bytes. (cols is checked once, by the caller.)
template <typename Row>
bool aligned_rows(const Row& m) {
  return m.col_stride == 1 && m.rows.ndim == 1 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
         m.rows.stride[0] * dtype_size(m.dtype) % 16 == 0;
}
template <typename Row>
bool unit_stride_rows(const Row& m) {
  return m.col_stride == 1 && m.rows.ndim == 1;
}

// Every lane has all its vectors.
inline bool rows_whole(const RowsPlan& plan, int64_t cols) {
  return cols == int64_t(plan.cluster) * plan.lanes * plan.vectors_per_thread * plan.vector;
}

inline RowsLayout layout_of(int64_t cols, const RowsIn& x) {
  if (x.col_stride == 1 || cols == 1) return RowsLayout::kUnit;
  return x.rows.stride[x.rows.ndim - 1] == 1 ? RowsLayout::kColumns : RowsLayout::kGather;
}

}  // namespace ampkernels::cuda
