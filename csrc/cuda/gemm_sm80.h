// The mma.sync GEMM's launcher, one instantiation per dtype and accumulator (gemm_sm80_*.cu).
#pragma once

#include <cuda_runtime_api.h>

#include "ampkernels/convert.h"
#include "ampkernels/params.h"
#include "plan/gemm_plan.h"

namespace ampkernels::cuda {

// Runs exactly `plan`; with plan.split > 1 it leaves the partial sums in p.workspace, for gemm_reduce.
template <typename T, bool kHalfAcc>
Status launch_gemm_sm80(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream);

}  // namespace ampkernels::cuda
