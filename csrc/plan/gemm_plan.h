// Which GEMM kernel runs, with what tile and how many splits of K: a pure function of the problem, free of CUDA, so
// that it can be tested and printed on any machine. The launcher follows it to the letter.
//
// With accumulate.chunk > 0 nothing here shapes a sum: the tree is docs/design.md section 3's, and a split is one
// chunk. With chunk == 0 each split is one chain, and the splits' fp32 sums are added in ascending order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>

#include "ampkernels/params.h"

namespace ampkernels {

struct GemmProblem {
  int64_t m = 0;
  int64_t n = 0;  // rows of B; for kGated 2F
  int64_t k = 0;
  DType dtype = DType::kBFloat16;
  Accumulate accumulate;
  bool a_kmajor = true;
  bool b_kmajor = true;
  bool a_aligned = true;  // 16-byte loads of the operand work: see gemm_operand_aligned
  bool b_aligned = true;
  bool b_packable = true;  // false: a copy with another leading stride would not align B either
  EpilogueKind epilogue = EpilogueKind::kLinear;
  Activation activation = Activation::kNone;
  int arch = 90;  // compute capability, 10 * major + minor
  int sms = 132;
};

enum class GemmTile : int32_t { kLarge = 0, kMedium = 1, kSmall = 2, kSkinny = 3 };

struct GemmTileShape {
  const char* name;
  int m, n, k;
  int warps_m, warps_n;
  int stages;
  int ctas;      // that share an SM on 8.0 and 9.0
  bool chunked;  // has registers for chunk sums beside the accumulators; these tiles also take unaligned operands
  // Multiply-adds per clock and SM that `ctas` of them sustain on an H200: it ranks plans, no result depends on it.
  int rate;
};

// The mma.sync tiles. 96 KB of shared memory at most, so that they run on 8.6, 8.9 and 12.x as well. Warps of 64x64
// read the least shared memory for each multiplication, and two CTAs on an SM overlap one's epilogue with the other's
// products.
constexpr GemmTileShape kGemmTiles[] = {
    {"128x128x32", 128, 128, 32, 2, 2, 4, 2, false, 850},
    {"128x64x64", 128, 64, 64, 2, 2, 3, 2, true, 700},
    {"64x64x64", 64, 64, 64, 2, 2, 4, 3, true, 620},
    {"16x128x64", 16, 128, 64, 1, 4, 4, 3, true, 170},
};
constexpr GemmTileShape gemm_tile(GemmTile tile, bool aligned = true) {
  GemmTileShape shape = kGemmTiles[static_cast<int>(tile)];
  if (!aligned) shape.stages = 2, shape.ctas = 2;
  if (!aligned && tile == GemmTile::kMedium) shape.k = 32;
  return shape;
}

struct GemmPlan {
  const char* kernel = "sm80";  // "sm80": mma.sync and cp.async; "sm90": WGMMA and TMA; "small": the same for few rows
  GemmTile tile = GemmTile::kMedium;
  int tile_m = 0;
  int tile_n = 0;
  int tile_k = 0;
  int stages = 0;
  int warps = 0;
  int cluster = 1;
  int group_m = 16;     // tiles of M that are visited together for each tile of N, so that B is read from L2
  bool aligned = true;  // operands are read 16 bytes at a time; otherwise realigned in registers
  bool pack_a = false;  // copied to the workspace first, with 16-byte aligned rows
  bool pack_b = false;
  int64_t split = 1;      // ranges of K, summed by different CTAs
  int64_t split_len = 0;  // k in each, a multiple of 16
  const char* reason = "";
};

// True if every 16-byte piece that the kernel loads of this operand starts on a 16-byte boundary. `halves` = 2 for B of
// a gated GEMM, whose gate and up rows are read side by side.
inline bool gemm_operand_packable(const GemmOperand& x, int64_t outer, int halves) {
  return x.stride_k == 1 || halves == 1 || (outer / 2) % 8 == 0;
}
inline bool gemm_operand_aligned(const GemmOperand& x, int64_t outer, int64_t k, int halves) {
  const bool kmajor = x.stride_k == 1;
  const int64_t ld = kmajor ? x.stride_outer : x.stride_k;
  const bool one_row = (kmajor ? outer : k) <= 1;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (one_row || ld % 8 == 0) &&
         gemm_operand_packable(x, outer, halves);
}

// Whether the kernel for few rows (gemm_sm90_small.cuh), where it supports the problem, is taken. It has not been timed
// on a B of more than one wave of its tiles (docs/gemm.md, Few rows).
inline bool gemm_prefers_small(const GemmProblem& p) {
  return p.arch == 90 && p.m <= 64 && (p.m > 16 || p.n <= int64_t(128) * p.sms);
}

// Whether the WGMMA kernel of gemm_sm90.cuh, where it supports the problem, is the faster one. Its tiles have 64 rows
// or more and it does not split K: at m <= 64 the time is that of reading B, which takes more CTAs than it has tiles.
inline bool gemm_prefers_sm90(const GemmProblem& p) {
  return p.arch == 90 && p.m > 64;
}

// Whether to copy unaligned operands, before anything else is planned (the copy suits every kernel). The copy moves 4
// bytes an element; the products of an element with 256 others take longer than that.
inline void gemm_plan_packing(const GemmProblem& p, GemmPlan& plan) {
  const bool a = !p.a_aligned, b = !p.b_aligned;
  const bool pays = (!a || p.n >= 256) && (!b || (p.m >= 256 && p.b_packable));
  plan.pack_a = a && pays;
  plan.pack_b = b && pays;
  plan.aligned = pays;
}

inline GemmPlan gemm_plan(const GemmProblem& p) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t chunk = p.accumulate.chunk;
  const int64_t k16 = std::max<int64_t>(ceil_div(p.k, 16), 1) * 16;
  const int64_t sms = std::max(p.sms, 1);

  GemmPlan best;
  gemm_plan_packing(p, best);
  double best_cost = -1;
  for (int t = 0; t < 4; ++t) {
    const GemmTileShape tile = gemm_tile(static_cast<GemmTile>(t), best.aligned);
    const bool skinny = t == static_cast<int>(GemmTile::kSkinny);
    if (!tile.chunked && (chunk > 0 || !best.aligned || p.accumulate.dtype == DType::kFloat16)) continue;
    if (skinny != (p.m <= 16)) continue;
    // For kGated a tile holds tile.n / 2 gate columns and their up columns: as many tiles as for n columns.
    const int64_t tiles = ceil_div(p.m, tile.m) * ceil_div(p.n, tile.n);

    const auto consider = [&](int64_t split, int64_t split_len) {
      // Clocks: full rounds, then the rest; a CTA alone on its SM runs at about 0.65 of the SM's rate.
      const double work = double(tile.m) * tile.n * double(split_len + 3 * tile.k) / tile.rate;
      const int64_t slots = sms * tile.ctas, rest = tiles * split % slots;
      double cost = double(tiles * split / slots) * tile.ctas * work;
      if (rest > 0) cost += work * (rest <= sms ? 1 / 0.65 : double(ceil_div(rest, sms)));
      if (split > 1) cost += 6000 + double(split) * double(p.m) * double(p.n) * 8 / 1500;  // a launch; 1.5 KB a clock
      if (best_cost >= 0 && cost >= best_cost) return;
      best_cost = cost;
      best.tile = static_cast<GemmTile>(t);
      best.split = split;
      best.split_len = split_len;
    };
    consider(1, k16);
    if (chunk > 0) {
      // A reducer adds chunk sums, so a split is one chunk.
      if (chunk < k16 && p.m <= std::max<int64_t>(chunk / 4, 16)) consider(ceil_div(k16, chunk), chunk);
    } else {
      for (const int64_t split : {2, 3, 4, 6, 8, 12, 16, 24, 32}) {
        const int64_t len = ceil_div(ceil_div(k16, split), tile.k) * tile.k;
        if (len < 4 * tile.k) break;
        consider(ceil_div(k16, len), len);
      }
    }
  }

  const GemmTileShape tile = gemm_tile(best.tile, best.aligned);
  best.tile_m = tile.m;
  best.tile_n = tile.n;
  best.tile_k = tile.k;
  best.stages = tile.stages;
  best.warps = tile.warps_m * tile.warps_n;
  best.reason = !best.aligned                    ? "unaligned operands, realigned in registers"
                : best.tile == GemmTile::kSkinny ? "m <= 16: bound by reading B"
                : best.split > 1                 ? "too few output tiles: K split"
                : best.tile == GemmTile::kLarge  ? "the largest tile fills the device"
                : chunk > 0                      ? "chunk sums share the registers"
                                                 : "smaller tiles fill the device better";
  return best;
}

inline std::ostream& operator<<(std::ostream& out, const GemmPlan& plan) {
  out << "gemm " << plan.kernel << ' ' << plan.tile_m << 'x' << plan.tile_n << 'x' << plan.tile_k << ", ";
  if (plan.stages > 0) out << plan.stages << " stages, ";
  out << plan.warps << " warps";
  if (plan.cluster > 1) out << ", cluster " << plan.cluster;
  if (plan.pack_a) out << ", A packed";
  if (plan.pack_b) out << ", B packed";
  if (plan.split > 1) out << ", K in " << plan.split << " splits of " << plan.split_len;
  return out << " (" << plan.reason << ')';
}

inline std::string to_string(const GemmPlan& plan) {
  std::ostringstream out;
  out << plan;
  return out.str();
}

}  // namespace ampkernels
