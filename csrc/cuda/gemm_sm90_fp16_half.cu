#include "cuda/gemm_sm90_instances.cuh"

namespace ampkernels::cuda::sm90 {

Kernel90 find_fp16_half(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile) {
  return find_chunked_of<half_t, Chain::kFp16>(mn_major_a, mn_major_b, kind, tile);
}

}  // namespace ampkernels::cuda::sm90
