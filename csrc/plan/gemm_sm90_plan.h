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

// Cost of one tile in tensor-core cycles, from the counts of docs/gemm.md: products at the share of their peak that the
// tile's shared-memory traffic allows, and the epilogue where nothing hides it.
inline double tile_cycles(TileSm90 tile, int64_t k_blocks, bool heavy_epilogue) {
  const TileShape shape = tile_shape(tile);
  const bool pingpong = shape.schedule == Schedule::kPingpong;
  const double products = double(shape.m) * shape.n * 64 * 2 / 8192;
  const double efficiency = tile == TileSm90::kPing128x192 ? 0.885 : tile == TileSm90::kPing128x128 ? 0.86 : 0.85;
  const double elements = double(shape.m) * shape.n;
  // A ping-pong epilogue is hidden unless it is longer than the other tile's products.
  const double epilogue = elements * (heavy_epilogue ? 0.12 : 0.06);
  const double main = double(k_blocks) * products / 2 / efficiency;
  return pingpong ? std::max(main, (main + epilogue) / 2) + 300 : main + epilogue + 600;
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
    const bool heavy = gated || p.activation != Activation::kNone || p.kind == EpilogueKind::kActGrad;
    double best = 0;
    for (const TileSm90 tile : {TileSm90::kPing128x192, TileSm90::kPing128x128, TileSm90::kCoop128x256}) {
      const int64_t waves = (tiles(tile) + sms - 1) / sms;
      const double cost = double(waves) * tile_cycles(tile, (p.k + 63) / 64, heavy);
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
