// Which tile, cluster and order the Hopper GEMM uses: a pure function of the problem. Nothing here shapes a sum, except
// `splits` under plain fp32: each range of K is one chain. Under a chunked policy a range is one chunk, and the sum is
// the same with and without.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ampkernels/params.h"

namespace ampkernels {

enum class Schedule : int32_t { kCooperative = 0, kPingpong = 1 };
enum class Share : int32_t { kNone = 0, kA = 1, kB = 2 };  // the operand that a cluster of two loads once

enum class TileSm90 : int32_t { kCoop128x256 = 0, kPing128x192 = 1, kPing128x128 = 2, kCoop128x192 = 3 };
inline constexpr int kTilesSm90 = 4;

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
  int splits = 1;  // ranges of K, whose sums a second kernel adds in ascending order
};

// What a tile reaches and what its epilogue costs, in cycles per element of the tile (docs/gemm.md).
struct TileCost {
  double reached;           // share of the tensor cores' peak in the main loop
  double plain, activated;  // epilogue of one warpgroup (ping-pong), or exposed (cooperative)
};
// The same of a range's fp32 sums, which leave from the registers, none of it under a cooperative tile's products.
constexpr double kCostOfSums = 0.27;

constexpr TileCost tile_cost(TileSm90 tile) {
  switch (tile) {
    case TileSm90::kPing128x192:
      return {0.90, 0.25, 0.70};
    case TileSm90::kPing128x128:
      return {0.80, 0.25, 0.73};
    default:
      return {0.885, 0.05, 0.22};
  }
}

// Cycles of `waves` tiles, one after the other on an SM; `sums`: of one range of K.
inline double tile_cycles(TileSm90 tile, int64_t waves, int64_t k_blocks, double activations, bool sums) {
  const TileShape shape = tile_shape(tile);
  const TileCost cost = tile_cost(tile);
  const double area = double(shape.m) * shape.n;
  const double products = double(k_blocks) * area / 32 / cost.reached;
  const double epilogue = area * (sums ? kCostOfSums : cost.plain + activations * (cost.activated - cost.plain));
  if (shape.schedule == Schedule::kCooperative) return double(waves) * (products + epilogue);
  // A ping-pong epilogue runs under the other warpgroup's products. Longer than they are, it holds both up, two tiles
  // at a time; the last one's is bare.
  if (epilogue <= products) return double(waves) * products + epilogue;
  return double((waves + 1) / 2) * (products + epilogue) + (waves % 2 == 0 ? products : 0);
}

// Cycles of adding the sums of `splits` ranges: a second launch, and 8 bytes an element and range through L2.
inline double reduce_cycles(double elements, int64_t splits) {
  return splits == 1 ? 0 : 6000 + elements * double(8 * splits + 2) / 2500;
}

inline GemmSm90Plan plan_gemm_sm90(const GemmParams& p, int sms) {
  GemmSm90Plan plan;
  const bool gated = p.kind == EpilogueKind::kGated;
  const int64_t n_out = gated ? p.n / 2 : p.n;
  const bool cheap = p.activation == Activation::kNone || p.activation == Activation::kRelu;
  const double activations = cheap ? 0 : gated ? 0.5 : 1;  // per element of the tile
  const int64_t k_blocks = (p.k + 63) / 64;
  const int64_t chunk_blocks = (p.accumulate.chunk + 63) / 64;

  double best = 0;
  const auto consider = [&](TileSm90 tile, int64_t blocks) {  // in each range of K
    const TileShape shape = tile_shape(tile);
    const int64_t out_n = gated ? shape.n / 2 : shape.n;
    const int64_t tiles = ((p.m + shape.m - 1) / shape.m) * ((n_out + out_n - 1) / out_n);
    const int64_t splits = (k_blocks + blocks - 1) / blocks;
    const int64_t waves = (tiles * splits + sms - 1) / sms;
    const double cost =
        tile_cycles(tile, waves, blocks, activations, splits > 1) + reduce_cycles(double(p.m) * double(p.n), splits);
    if (best != 0 && cost >= best) return;
    best = cost;
    plan.tile = tile;
    plan.splits = int(splits);
  };
  if (p.accumulate.dtype == DType::kFloat16) {
    plan.tile = TileSm90::kCoop128x256;
  } else if (p.accumulate.chunk > 0) {
    consider(TileSm90::kCoop128x192, k_blocks);
    if (chunk_blocks < k_blocks) consider(TileSm90::kCoop128x192, chunk_blocks);
  } else {
    for (const TileSm90 tile : {TileSm90::kPing128x192, TileSm90::kPing128x128, TileSm90::kCoop128x256}) {
      for (const int64_t splits : {1, 2, 3, 4, 5, 6, 8}) {
        const int64_t blocks = (k_blocks + splits - 1) / splits;
        if (splits > 1 && blocks < 8) break;
        consider(tile, blocks);
      }
    }
  }
  return plan;
}

}  // namespace ampkernels
