#include "cuda/gemm_sm90_instances.cuh"

namespace ampkernels::cuda::sm90 {

Kernel90 find_bf16_chunked(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile) {
  return find_chunked_of<bfloat16_t, Chain::kFp32Chunked>(mn_major_a, mn_major_b, kind, tile);
}

}  // namespace ampkernels::cuda::sm90
