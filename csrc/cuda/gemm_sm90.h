// The Hopper (sm_90a) GEMM: TMA, WGMMA, fused epilogues. docs/gemm.md tells its design.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ampkernels/params.h"
#include "plan/gemm_sm90_plan.h"

namespace ampkernels::cuda {

// Whether this kernel computes `p`: 16-byte aligned operands whose leading strides are multiples of 16 bytes, chunks of
// whole 64s, d in the operands' dtype or fp32. Everything else goes to the mma.sync kernel. Says nothing of the device.
bool gemm_sm90_supports(const GemmParams& p);

// With gemm_sm90_splits(p) > 1 the launch leaves that many (m, n) slabs of fp32 sums in p.workspace, and adding them in
// ascending order and the epilogue are the caller's.
int gemm_sm90_splits(const GemmParams& p);
size_t gemm_sm90_workspace_bytes(const GemmParams& p);
Status launch_gemm_sm90(const GemmParams& p, cudaStream_t stream);

// The same under a plan of the caller's, for tests and tuning.
Status launch_gemm_sm90(const GemmParams& p, const GemmSm90Plan& plan, cudaStream_t stream);

}  // namespace ampkernels::cuda
