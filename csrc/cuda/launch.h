// The launchers of the CUDA kernels: torch-free, params struct and stream in, Status out. Each checks the launch's
// error. Nothing here allocates or synchronises; scratch memory comes from the caller, sized by *_workspace_bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "ampkernels/params.h"

namespace ampkernels::cuda {

Status launch_softmax_fwd(const SoftmaxFwdParams& p, cudaStream_t stream);
Status launch_softmax_bwd(const SoftmaxBwdParams& p, cudaStream_t stream);

Status launch_norm_fwd(const NormFwdParams& p, cudaStream_t stream);
size_t norm_bwd_workspace_bytes(const NormBwdParams& p);
Status launch_norm_bwd(const NormBwdParams& p, cudaStream_t stream);

// Tensor-core GEMM with the fused epilogue of GemmParams (fp16 and bf16), forward, dgrad and wgrad alike.
size_t gemm_workspace_bytes(const GemmParams& p);
Status launch_gemm(const GemmParams& p, cudaStream_t stream);
// Tests and benchmarks: which kernel launch_gemm takes, "auto", "sm80" (mma.sync), "sm90" (WGMMA) or "small" (few rows
// on Hopper); what the last two do not support is then an error. Process-wide; false if the name is unknown or was not
// compiled in.
bool set_gemm_path(const char* name);

size_t act_bwd_workspace_bytes(const ActBwdParams& p);
Status launch_act_bwd(const ActBwdParams& p, cudaStream_t stream);
Status launch_act_fwd(const ActFwdParams& p, cudaStream_t stream);

}  // namespace ampkernels::cuda
