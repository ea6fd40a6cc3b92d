// Which tile, cluster and order the Hopper GEMM uses: a pure function of the problem. Nothing here shapes a sum, except
// `splits`, which is 1 under a chunked policy.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ampkernels/params.h"

namespace ampkernels {

enum class Schedule : int32_t { kCooperative = 0, kPingpong = 1 };
enum class Share : int32_t { kNone = 0, kA = 1, kB = 2 };  // the operand that a cluster of two loads once

enum class TileSm90 : int32_t { kCoop128x256 = 0, kPing128x192 = 1, kPing64x256 = 2, kPing128x128 = 3, kCoop128x192 = 4, kCoop256x192 = 5 };
inline constexpr int kTilesSm90 = 6;

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
    case TileSm90::kCoop256x192:
      return {256, 192, Schedule::kCooperative};
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

inline GemmSm90Plan plan_gemm_sm90(const GemmParams& p, int sms) {
  GemmSm90Plan plan;
  (void)sms;
  if (p.accumulate.chunk > 0) plan.tile = TileSm90::kCoop128x192;
  plan.share = Share::kB;
  return plan;
}

}  // namespace ampkernels
