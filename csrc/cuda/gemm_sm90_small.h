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

constexpr int small_threads(int teams, bool adders) {
  return teams * 160 + (adders ? 128 : 0);
}
// On an SM, by registers: one for this kernel and one for the next that starts beside it.
constexpr int small_ctas(int rows, int teams) {
  return teams == 1 || rows <= 64 ? 2 : 1;
}

struct SmallArgs {
  CUtensorMap x, w;
  GemmParams p;
  int32_t n_out;
  bool gated;
  int32_t x_rows;          // of A that a box holds
  int32_t ranks, sources;  // ranks times teams
  int32_t boxes;           // of 64 k to a stage
  int32_t stages;          // of a team's ring
  int32_t stage_bytes;
  int32_t prefetch;  // boxes of B that a team brings into L2 before the kernel before has ended
  int32_t held;      // a rank's fragments of 16 rows of A
  int32_t pieces_offset;
  int32_t k_blocks, chunk_blocks, chunks;
};

}  // namespace sm90
}  // namespace ampkernels::cuda
