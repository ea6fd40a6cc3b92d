// norm forward of 16-bit rows that do not lie on 16 bytes, or are not whole vectors long: their vectors are cut out of
// units of 16 bytes, and the results into such units again (Vectors::load_cut, store_cut). Layout, synchronisation and
// rounding points are norm_fwd.cu's, of the rows held in fp32.
#pragma once

#include "norm_fwd_row.cuh"

namespace ampkernels::cuda {
namespace {

// The warp tiers with a residual.
template <bool kResidual, TeamKind kTeam>
inline constexpr bool kSmallShifted = kResidual && kTeam == TeamKind::kWarp;

// Parameters of the row's own dtype, on 16 bytes; residual, sum and results of it. Against norm_fwd_plain, the loads of
// the parameters have no branch between them, and two CTAs of 512 threads fill an SM. With a residual that spills a few
// registers, which costs less than fewer threads do; in the warp tiers it spilled more, and 80 registers, six CTAs of
// 128 threads, were faster. The same operations in the same order as resident_row, so the same bits.
template <typename T, bool kRms, bool kResidual, TeamKind kTeam>
__global__ void __launch_bounds__(kSmallShifted<kResidual, kTeam> ? kRowsSmallCtaThreads : kRowsCtaThreads,
                                  kSmallShifted<kResidual, kTeam> ? 6 : 2)
    norm_fwd_shifted(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  using P = Pack<T, V>;
  static_assert(P::kBytes == 16);
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C, false, kTeam> team(shape);
  const int64_t r = row_group_index(kTeam == TeamKind::kCluster ? shape.cluster : 1) * shape.rows_per_cta + team.slot;
  const bool active = kTeam != TeamKind::kWarp || r < p.rows;  // else a CTA, or a cluster, for each row
  const int64_t row = active ? r : 0;
  const int limit = active ? int(p.cols) : 0, first = team.first(K), step = team.lanes;

  const auto load = [&](C(&s)[K][V]) {
    Vectors<T, V, K> x, residual;
    x.load(aligned_row(p.x, row, sizeof(T)), 1, first, step, limit);
    if constexpr (kResidual) residual.load(aligned_row(p.residual, row, sizeof(T)), 1, first, step, limit);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      x.get(k, s[k]);
      if constexpr (kResidual) {
        C a[V];
        residual.get(k, a);
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] += a[e];
        P sum[1];  // one vector at a time, for the registers
        sum[0].round_from(s[k]);
        store_cut<T, 1>(aligned_row(p.sum, row, sizeof(T)), first + k * step, step, limit, team.lane, step, sum);
      }
    }
  };
  C s[K][V];
  const Statistics<C> stats = row_statistics<kRms>(p, team, C(shape.inverse), first, step, limit, s, load);
  if (active && team.lane == 0 && team.rank == 0) save_statistics(p, stats, row);

  // The last vector's parameters may be fewer than a unit.
  const int whole = int(p.cols) / V, rest = int(p.cols) % V * int(sizeof(T));
  P end_weight, end_bias;
  bool has_end = false;
#pragma unroll
  for (int k = 0; k < K; ++k) has_end |= first + k * step == whole;
  if (has_end) {
    load_part(end_weight.w, static_cast<const char*>(p.weight.data) + whole * 16, rest);
    if constexpr (!kRms) load_part(end_bias.w, static_cast<const char*>(p.bias.data) + whole * 16, rest);
  }
  const auto parameters = [&](const VectorIn& from, const P& end, int k) {
    const int j = first + k * step;
    P w;
    load_unit<16>(w.w, static_cast<const char*>(from.data) + uint32_t(min(j, whole - 1)) * 16u);
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) w.w[i] = j == whole ? end.w[i] : w.w[i];
    return w;
  };
  const C offset = kRms ? C(p.weight_offset) : C(0);
  P y[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const P w = parameters(p.weight, end_weight, k);
    [[maybe_unused]] P b;
    if constexpr (!kRms) b = parameters(p.bias, end_bias, k);
    C h[V];
    stats.normalize(s[k], h);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const C weight = to_compute<C>(w.element(e));
      if constexpr (kRms)
        h[e] *= weight + offset;
      else
        h[e] = h[e] * weight + to_compute<C>(b.element(e));
    }
    y[k].round_from(h);
  }
  store_cut<T, K>(aligned_row(p.y, row, sizeof(T)), first, step, limit, team.lane, step, y);
}

}  // namespace
}  // namespace ampkernels::cuda
