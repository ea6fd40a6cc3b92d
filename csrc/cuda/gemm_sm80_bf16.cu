// The kernels of gemm_sm80.cuh for one dtype and accumulator: a file each, so that they compile in parallel.
#include "cuda/gemm_sm80.cuh"

namespace ampkernels::cuda {
template Status launch_gemm_sm80<bfloat16_t, false>(const GemmParams&, const GemmPlan&, cudaStream_t);
}  // namespace ampkernels::cuda
