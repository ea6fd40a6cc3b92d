// Which tile, cluster and order the Hopper GEMM uses: a pure function of the problem. Nothing here shapes a sum, except
// `splits`, which is 1 under a chunked policy.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ampkernels/params.h"

namespace ampkernels {

enum class Schedule : int32_t { kCooperative = 0, kPingpong = 1 };
enum class Share : int32_t { kNone = 0, kA = 1, kB = 2 };  // the operand that a cluster of two loads once

enum class TileSm90 : int32_t { kCoop128x256 = 0, kPing128x192 = 1, kPing64x256 = 2, kPing128x128 = 3, kCoop128x192 = 4 };
inline constexpr int kTilesSm90 = 5;

struct TileShape {
  int m, n;
  Schedule schedule;
};
constexpr TileShape tile_shape(TileSm90 tile) {
  switch (tile) {
    case TileSm90::kCoop128x256:
      return {128, 256, Schedule::kCooperative};
    case TileSm90::kPing128x192:
      return {128, 192, Schedule::kPingpong};
    case TileSm90::kPing64x256:
      return {64, 256, Schedule::kPingpong};
    case TileSm90::kPing128x128:
      return {128, 128, Schedule::kPingpong};
    case TileSm90::kCoop128x192:
      return {128, 192, Schedule::kCooperative};
  }
  return {};
}

struct GemmSm90Plan {
  TileSm90 tile = TileSm90::kCoop128x256;
  Share share = Share::kNone;
  int group = 8;  // tiles along one dimension whose operands a wave keeps in L2
  bool group_along_n = false;
  int splits = 1;
};

// Cost of one tile in tensor-core cycles, fitted to the measurements in docs/gemm.md: the products at the share of their
// peak that the tile reaches, and the epilogue where nothing hides it.
inline double tile_cycles(TileSm90 tile, int64_t k_blocks, bool activated) {
  const TileShape shape = tile_shape(tile);
  const double area = double(shape.m) * shape.n;
  const double reached = tile == TileSm90::kPing128x192 ? 0.89 : tile == TileSm90::kPing128x128 ? 0.87 : 0.86;
  const double products = double(k_blocks) * area / 32 / reached;
  if (shape.schedule == Schedule::kPingpong) {
    // One warpgroup alone in its epilogue; longer than the other's products, it holds both up.
    const double epilogue = area * (activated ? 0.9 : 0.45);
    return std::max(products, (products + epilogue) / 2);
  }
  return products + area * (activated ? 0.45 : 0.15);
}

inline GemmSm90Plan plan_gemm_sm90(const GemmParams& p, int sms) {
  GemmSm90Plan plan;
  const bool gated = p.kind == EpilogueKind::kGated;
  const int64_t n_out = gated ? p.n / 2 : p.n;
  const auto tiles = [&](TileSm90 tile) {
    const TileShape shape = tile_shape(tile);
    const int64_t out_n = gated ? shape.n / 2 : shape.n;
    return ((p.m + shape.m - 1) / shape.m) * ((n_out + out_n - 1) / out_n);
  };
  if (p.accumulate.dtype == DType::kFloat16) {
    plan.tile = TileSm90::kCoop128x256;
  } else if (p.accumulate.chunk > 0) {
    plan.tile = TileSm90::kCoop128x192;
  } else {
    const bool activated = gated || p.activation != Activation::kNone || p.kind == EpilogueKind::kActGrad;
    double best = 0;
    for (const TileSm90 tile : {TileSm90::kPing128x192, TileSm90::kPing128x128, TileSm90::kCoop128x256}) {
      const int64_t waves = (tiles(tile) + sms - 1) / sms;
      const double cost = double(waves) * tile_cycles(tile, (p.k + 63) / 64, activated);
      if (best == 0 || cost < best) {
        best = cost;
        plan.tile = tile;
      }
    }
  }
  plan.group = 8;
  return plan;
}

}  // namespace ampkernels
