// The Hopper GEMM for few rows: gemm_sm90_small.cuh has its design.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "ampkernels/params.h"
#include "plan/gemm_small_plan.h"

namespace ampkernels::cuda {

// Whether this kernel computes `p`: K-major operands that TMA can address. Says nothing of the device.
bool gemm_sm90_small_supports(const GemmParams& p);
Status launch_gemm_sm90_small(const GemmParams& p, cudaStream_t stream);

namespace sm90 {

inline constexpr int kSmallThreads = 160;

struct SmallArgs {
  CUtensorMap x, w;
  GemmParams p;
  int32_t n_out;
  bool gated;
  int32_t x_rows;  // of A that a box holds
  int32_t ranks;
  int32_t boxes;  // of 64 k to a stage
  int32_t stages, stage_bytes;
  int32_t prefetch;  // boxes of B that are brought into L2 before the kernel before has ended
  int32_t exchange_offset;
  int32_t k_blocks, chunk_blocks, chunks;
};

}  // namespace sm90
}  // namespace ampkernels::cuda
