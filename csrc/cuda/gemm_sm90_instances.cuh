// The table of one translation unit's kernels.
#pragma once

#include "gemm_sm90.cuh"

namespace ampkernels::cuda::sm90 {

template <typename T, bool kMnMajorA, bool kMnMajorB, EpilogueKind kKind, TileSm90 kTile, Chain kChain>
Kernel90 instance() {
  constexpr TileShape kShape = tile_shape(kTile);
  using C = Config<T, kMnMajorA, kMnMajorB, kKind, kShape.m, kShape.n, kShape.schedule, kChain>;
  static KernelState90 state;
  return {reinterpret_cast<const void*>(&gemm_sm90_kernel<C>), C::kBlockM, C::kBlockN, C::kStrip, C::kSmemBytes, C::kStages,
          C::kPingpong, &state};
}

}  // namespace ampkernels::cuda::sm90
