// The table of kernels, by operand type. Each gemm_sm90_*.cu instantiates one of these functions, so that they compile
// in parallel.
#pragma once

#include "cuda/gemm_sm90.cuh"

namespace ampkernels::cuda::sm90 {

template <typename T, bool kMnMajorA, bool kMnMajorB, EpilogueKind kKind, TileSm90 kTile, Chain kChain>
Kernel90 instance() {
  constexpr TileShape kShape = tile_shape(kTile);
  using C = Config<T, kMnMajorA, kMnMajorB, kKind, kShape.m, kShape.n, kShape.schedule, kChain>;
  static KernelState90 state;
  return {reinterpret_cast<const void*>(&gemm_sm90_kernel<C>),
          C::kBlockM,
          C::kBlockN,
          C::kPanel,
          C::kSmemBytes,
          C::kStages,
          C::kPingpong,
          &state};
}

// One tile for each operand order: forward (both K-major), dgrad (B MN-major), wgrad (both MN-major).
template <typename T, TileSm90 kTile, Chain kChain>
Kernel90 linear_instance(bool mn_major_a, bool mn_major_b) {
  constexpr EpilogueKind kKind = EpilogueKind::kLinear;
  if (!mn_major_a && !mn_major_b) return instance<T, false, false, kKind, kTile, kChain>();
  if (!mn_major_a && mn_major_b) return instance<T, false, true, kKind, kTile, kChain>();
  if (mn_major_a && mn_major_b) return instance<T, true, true, kKind, kTile, kChain>();
  return {};
}

// The fused ones in the one order that they occur in: gated forward, a residual forward, the activation's gradient on
// the way back.
template <typename T, TileSm90 kTile, Chain kChain>
Kernel90 fused_instance(bool mn_major_a, bool mn_major_b, EpilogueKind kind) {
  if (kind == EpilogueKind::kGated && !mn_major_a && !mn_major_b) {
    return instance<T, false, false, EpilogueKind::kGated, kTile, kChain>();
  }
  if (kind == EpilogueKind::kResidual && !mn_major_a && !mn_major_b) {
    return instance<T, false, false, EpilogueKind::kResidual, kTile, kChain>();
  }
  if (kind == EpilogueKind::kActGrad && !mn_major_a && mn_major_b) {
    return instance<T, false, true, EpilogueKind::kActGrad, kTile, kChain>();
  }
  return {};
}

template <typename T>
Kernel90 find_linear_of(bool mn_major_a, bool mn_major_b, TileSm90 tile) {
  switch (tile) {
    case TileSm90::kCoop128x256:
      return linear_instance<T, TileSm90::kCoop128x256, Chain::kFp32>(mn_major_a, mn_major_b);
    case TileSm90::kPing128x192:
      return linear_instance<T, TileSm90::kPing128x192, Chain::kFp32>(mn_major_a, mn_major_b);
    case TileSm90::kPing128x128:
      return linear_instance<T, TileSm90::kPing128x128, Chain::kFp32>(mn_major_a, mn_major_b);
    default:
      return {};
  }
}

template <typename T>
Kernel90 find_fused_of(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile) {
  switch (tile) {
    case TileSm90::kCoop128x256:
      return fused_instance<T, TileSm90::kCoop128x256, Chain::kFp32>(mn_major_a, mn_major_b, kind);
    case TileSm90::kPing128x192:
      return fused_instance<T, TileSm90::kPing128x192, Chain::kFp32>(mn_major_a, mn_major_b, kind);
    case TileSm90::kPing128x128:
      return fused_instance<T, TileSm90::kPing128x128, Chain::kFp32>(mn_major_a, mn_major_b, kind);
    default:
      return {};
  }
}

// A chunk's fragment beside the sums leaves room for one tile: 96 + 96 registers, or 128 + 64 of fp16 pairs.
template <typename T, Chain kChain>
Kernel90 find_chunked_of(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile) {
  constexpr TileSm90 kTile = kChain == Chain::kFp16 ? TileSm90::kCoop128x256 : TileSm90::kCoop128x192;
  if (tile != kTile) return {};
  if (kind == EpilogueKind::kLinear) return linear_instance<T, kTile, kChain>(mn_major_a, mn_major_b);
  return fused_instance<T, kTile, kChain>(mn_major_a, mn_major_b, kind);
}

}  // namespace ampkernels::cuda::sm90
