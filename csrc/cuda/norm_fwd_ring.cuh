// norm forward of 16-bit rows that lie on 16 bytes, one after the other. Layout, synchronisation and rounding points
// are norm_fwd.cu's, the rows under way rows_ring.cuh's.
#pragma once

#include "norm_fwd_row.cuh"
#include "rows_ring.cuh"

namespace ampkernels::cuda {
namespace {

// The rounds in `again`, from the start: the rare rows that norm_fwd_ring cannot finish. Out of line, and after the
// other rows, so that they cost no registers there.
template <typename T, bool kRms>
__device__ __noinline__ void resident_rows_again(const NormFwdParams& p, Team<compute_t<T>> team, double inverse,
                                                 int64_t row, int slots, uint32_t again) {
#pragma unroll 1
  for (; again != 0; row += slots, again >>= 1)
    if (again & 1) resident_row<T, kRms>(p, team, inverse, row);
}

// Vector j of parameters of the row's own dtype, on 16 bytes, as stored.
template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load_own_parameters(const VectorIn& w, uint32_t j, bool exists) {
  Pack<T, V> pack;
#pragma unroll
  for (int i = 0; i < Pack<T, V>::kWords; ++i) pack.w[i] = 0;
  if (exists) load_unit<16, Cache::kKeep>(pack.w, static_cast<const char*>(w.data) + j * 16u);
  return pack;
}

// In a cluster, each exchange throws L1 away (mbarrier_wait_cluster), so a lane keeps its parameters in shared memory,
// but for layer_norm with a residual, for which there is no room.
constexpr int norm_ring_parameters(bool rms, bool residual, bool cluster) {
  return !cluster || (residual && !rms) ? 0 : rms ? 1 : 2;
}

// 16-bit rows of whole vectors with a residual, a sum and parameters of their own dtype, all on 16 bytes. No branch
// stands between the loads of the parameters, and few instructions are left beside the arithmetic: layer_norm is bound
// by issue as much as by memory. The same operations in the same order as resident_row, so the same bits.
template <typename T, bool kRms, bool kResidual, TeamKind kTeam>
__global__ void __launch_bounds__(kRowsCtaThreads, kRowsFwdThreads / kRowsCtaThreads)
    norm_fwd_ring(const __grid_constant__ NormFwdParams p, const __grid_constant__ RingShape shape) {
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr int kParameters = norm_ring_parameters(kRms, kResidual, kTeam == TeamKind::kCluster);
  Team<C, false, kTeam> team(shape.team);
  const RingRows<kTeam> rows(shape, p.rows, team.slot);
  const int first = team.first(K), step = team.lanes, vectors = int(p.cols) / V;
  const auto exists = [&](int k) { return first + k * step < vectors; };
  const auto offset_of = [&](int k) { return uint32_t(first + k * step) * 16u; };

  LaneRing<kResidual ? 2 : 1, K, kParameters> ring(shape);
  grid_launch_dependents();
  grid_dependency_wait();

  if constexpr (kParameters > 0)
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (exists(k)) {
        ring.copy_parameter(0, k, static_cast<const char*>(p.weight.data) + offset_of(k));
        if constexpr (kParameters > 1) ring.copy_parameter(1, k, static_cast<const char*>(p.bias.data) + offset_of(k));
      }
  const auto fetch = [&](int i) {
    if (i < rows.mine) {
      const int64_t row = rows.row(i);
      const char* const x = aligned_row(p.x, row, sizeof(T));
#pragma unroll
      for (int k = 0; k < K; ++k)
        if (exists(k)) ring.copy(0, k, x + offset_of(k));
      if constexpr (kResidual) {
        const char* const residual = aligned_row(p.residual, row, sizeof(T));
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (exists(k)) ring.copy(1, k, residual + offset_of(k));
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < shape.stages; ++i) {
#pragma unroll
    for (int k = 0; k < K; ++k)  // what does not exist is 0 in every row
      if (!exists(k) || i >= rows.mine) ring.clear(k);
    fetch(i);
    ring.next_stage();
  }

  static_assert(kRowsFwdRounds <= 32);
  uint32_t again = 0;
#pragma unroll 1
  for (int i = 0; i < rows.rounds; ++i) {
    const bool active = kTeam != TeamKind::kWarp || i < rows.mine;
    wait_for_row(shape.stages);
    C s[K][V];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      widen(ring.template read<T, V>(0, k), s[k]);
      if constexpr (kResidual) {
        C a[V];
        widen(ring.template read<T, V>(1, k), a);
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] += a[e];
      }
    }
    fetch(i + shape.stages);
    ring.next_stage();
    if constexpr (kResidual) {
      char* const sum = aligned_row(p.sum, rows.row(i), sizeof(T));
#pragma unroll
      for (int k = 0; k < K; ++k) {
        Pack<T, V> out;
        out.round_from(s[k]);
        if (exists(k) && active) store_unit<16>(sum + offset_of(k), out.w);
      }
    }

    const C inverse = C(shape.team.inverse);
    C mean = 0;
    if constexpr (!kRms) {
      C sum[1] = {0};
#pragma unroll
      for (int k = 0; k < K; ++k) sum[0] += tree(s[k], Sum{});
      team.reduce(sum, Sum{}, C(0));
      mean = sum[0] * inverse;
    }
    C sums[kRms ? 1 : 2] = {0};  // of the squares, of the deviations
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C squares = 0;
      const C center = exists(k) ? mean : C(0);  // what does not exist has no deviation
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if constexpr (!kRms) s[k][e] -= center;
        squares = fma(s[k][e], s[k][e], squares);
      }
      sums[0] += squares;
      if constexpr (!kRms) sums[1] += tree(s[k], Sum{});
    }
    team.reduce(sums, Sum{}, C(0));
    if (__any_sync(0xffffffffu, overflowed(sums[0]))) {
      again |= 1u << i;
      continue;
    }
    const Statistics<C> stats = finish<kRms>(p, inverse, mean, sums[kRms ? 0 : 1], sums[0], C(1));
    if (active && team.lane == 0 && team.rank == 0) save_statistics(p, stats, rows.row(i));

    const C offset = kRms ? C(p.weight_offset) : C(0);
    char* const y = aligned_row(p.y, rows.row(i), sizeof(T));
    constexpr int kTogether = kRms && kParameters == 0 ? 2 : 1;  // vectors whose parameters are loaded at once
#pragma unroll
    for (int k0 = 0; k0 < K; k0 += kTogether) {
      Pack<T, V> w[kTogether], b[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int k = k0 + j;
        if constexpr (kParameters > 0)
          w[j] = ring.template read_parameter<T, V>(0, k);
        else
          w[j] = load_own_parameters<T, V>(p.weight, first + k * step, exists(k));
        if constexpr (kParameters > 1)
          b[j] = ring.template read_parameter<T, V>(1, k);
        else if constexpr (!kRms)
          b[j] = load_own_parameters<T, V>(p.bias, first + k * step, exists(k));
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int k = k0 + j;
        C h[V];
        stats.normalize(s[k], h);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const C weight = to_compute<C>(w[j].element(e));
          if constexpr (kRms)
            h[e] *= weight + offset;
          else
            h[e] = h[e] * weight + to_compute<C>(b[j].element(e));
        }
        Pack<T, V> out;
        out.round_from(h);
        if (exists(k) && active) store_unit<16>(y + offset_of(k), out.w);
      }
    }
  }
  if (again != 0) {
    const Team<C> any(team);
    resident_rows_again<T, kRms>(p, any, shape.team.inverse, rows.first, rows.slots, again);
  }
}

}  // namespace
}  // namespace ampkernels::cuda
