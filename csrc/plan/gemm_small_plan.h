// How the Hopper GEMM for few rows (gemm_sm90_small.cuh) is cut: a pure function of the problem, free of CUDA.
//
// What shapes a sum (`ranks`, through `chunk_blocks`) depends on n, k, the kind, the policy and the device, not on m:
// the bits of a row are the same for 1 to 64 rows even without a policy. With a policy `ranks` and `teams` shape
// nothing, and without one there is one team.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ampkernels/params.h"

namespace ampkernels {

inline constexpr int kSmallRows = 64;       // the most rows of A
inline constexpr int kSmallMaxStages = 16;  // of all rings of a CTA
inline constexpr int kSmallMaxRanks = 4;
inline constexpr int kSmallMaxTeams = 2;
inline constexpr int kSmallSmem = 232448;        // the most that a CTA can have
inline constexpr int kSmallHalfSmem = 115712;    // of two CTAs on an SM
inline constexpr int kSmallBarrierBytes = 1024;  // the barriers, and the ring stays on 1024 bytes

struct GemmSmallPlan {
  int rows = 64;             // of B to a CTA: 32, 64, 112 or 128 (the last two by one team and without ranks)
  int ranks = 1;             // CTAs that split k: 1, 2 or 4
  int teams = 1;             // in a CTA that split its k: 1 or 2
  int x_rows = 64;           // of A that are loaded: 8, 16, 32 or 64
  int boxes = 2;             // of 64 k to a stage
  int stages = 2;            // of a team's ring
  int prefetch = 0;          // boxes of a team
  int64_t chunk_blocks = 0;  // of 64 k in a chunk; without a policy in a rank's share of k

  // Fragments of 16 rows of A that a rank owns.
  int held() const { return std::max((x_rows + 15) / 16 / ranks, 1); }
  // Of shared memory for what the sources send to a rank.
  int piece_bytes() const { return ranks * teams > 1 ? ranks * teams * held() * rows * 64 : 0; }
};

inline GemmSmallPlan plan_gemm_small(const GemmParams& p, int sms) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t k_blocks = std::max<int64_t>(ceil_div(p.k, 64), 1);
  const int64_t n_out = p.kind == EpilogueKind::kGated ? p.n / 2 : p.n;
  const int64_t policy = p.accumulate.chunk > 0 ? std::min(ceil_div(p.accumulate.chunk, 64), k_blocks) : 0;

  // Clocks. An SM reads 17 bytes of DRAM in one, A's rows count for 16 of B's; a CTA needs some 400 for the products of
  // 64 k, 500 to promote a chunk, 700 to send one to the adders, 1300 until the last of them is added. Two teams halve
  // that. Clusters of four on every SM do not all start at once (docs/gemm.md has the measurements).
  GemmSmallPlan plan;
  int64_t best = -1, ctas = 0;
  for (const int ranks : {1, 2, kSmallMaxRanks}) {
    const int64_t chunk = policy > 0 ? policy : ceil_div(k_blocks, ranks), chunks = ceil_div(k_blocks, chunk);
    if (chunks < ranks) continue;
    for (const int rows : {128, 64, 32}) {
      // Fewer and larger CTAs than SMs were slow at times: they are for what 64 rows do not cover in one wave.
      if (rows == 128 && ceil_div(p.n, 64) <= 2 * int64_t(sms)) continue;
      const int64_t count = ceil_div(n_out, p.kind == EpilogueKind::kGated ? rows / 2 : rows) * ranks;
      const int64_t per_sm = ceil_div(count, sms);
      // One wave where it can be: a cluster's CTAs run at the same time, and each starts with an empty ring.
      if (per_sm > 2 && (ranks > 1 || rows < 128)) continue;
      // Two CTAs on an SM cover each other's ends of chunks. Of chunks of 128, adding takes longer than multiplying,
      // and one team is faster (docs/gemm.md, Few rows, the table by plan).
      const int teams = policy >= 8 && per_sm == 1 && chunks >= 2 * ranks ? 2 : 1;
      const int64_t rounds = ceil_div(chunks, ranks * teams);
      const int64_t reading = per_sm * (rows + 16) * std::min(ceil_div(chunks, ranks) * chunk, k_blocks) * 128 / 17;
      const int64_t products = ceil_div(per_sm, 2) * (std::min(rounds * chunk, k_blocks) * 400 +
                                                      (ranks > 1 ? 1300 + rounds * 700 : rounds * 500));
      int64_t cost = std::max(reading, products) + reading / 8;
      if (ranks == 4 && count > sms * 9 / 10) cost += cost / 3;
      if (ranks > 1) cost += ranks == 2 ? 1500 : 3000;
      if (best >= 0 && cost >= best) continue;
      best = cost, ctas = count;
      plan.rows = rows, plan.ranks = ranks, plan.teams = teams, plan.chunk_blocks = chunk;
    }
  }

  // 112 rows where they make one CTA on nearly every SM (14336 rows on 132) and 64 rows two on some: faster at m = 1
  // and 16, not at 64 (docs/gemm.md, the same table). Eight stages leave no room for a CTA of the next kernel, which
  // would upset the balance.
  const int64_t count112 = ceil_div(n_out, p.kind == EpilogueKind::kGated ? 56 : 112);
  if (plan.rows == 64 && plan.ranks == 1 && ctas > sms && count112 <= sms && count112 >= sms * 9 / 10 && p.m <= 32) {
    plan.rows = 112, ctas = count112;
  }

  plan.x_rows = p.m <= 8 ? 8 : p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64;
  // Two teams have twice as many stages of half the size.
  plan.boxes = std::max((plan.rows == 32 ? 4 : plan.rows == 64 ? 2 : 1) / plan.teams, 1);
  const int box = plan.rows * 128, stage = plan.boxes * (box + plan.x_rows * 128);
  // 64 to 96 KB of B on the way: less does not hide the latency, more was slower. In half of the shared memory, so that
  // the next kernel can start beside this one, unless A takes too much of it, or the registers leave no room for it.
  const int wanted = (98304 / plan.teams + plan.boxes * box - 1) / (plan.boxes * box);
  const auto stages = [&](int smem) {
    const int fit = (smem - kSmallBarrierBytes - plan.piece_bytes()) / (plan.teams * stage);
    return std::min({fit, wanted, kSmallMaxStages / plan.teams});
  };
  const auto on_the_way = [&] { return plan.teams * plan.stages * plan.boxes * box; };
  plan.stages = plan.rows == 112 ? 8 : stages(kSmallHalfSmem);
  if (plan.rows != 112 && on_the_way() < 65536 && ctas <= sms && plan.ranks < 4) plan.stages = stages(kSmallSmem);
  plan.prefetch = plan.stages * plan.boxes / 2;
  return plan;
}

}  // namespace ampkernels
