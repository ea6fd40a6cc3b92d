#include "cuda/gemm_sm90_instances.cuh"

namespace ampkernels::cuda::sm90 {

Kernel90 find_fp16_linear(bool mn_major_a, bool mn_major_b, TileSm90 tile) {
  return find_linear_of<half_t>(mn_major_a, mn_major_b, tile);
}

}  // namespace ampkernels::cuda::sm90
