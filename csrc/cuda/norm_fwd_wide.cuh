// norm forward of long 16-bit rows that lie on 16 bytes, with half the threads of the plan: as softmax_fwd_wide.
// Rounding points are norm_fwd.cu's. For 9.0, where it was timed: for others the registers do not suffice.
#pragma once

#include "norm_fwd_aligned.cuh"

namespace ampkernels::cuda {
namespace {

// What a thread has of a row: vectors k of two lanes.
struct WideLanes {
  int first, lanes, plan_lanes, vectors;
  bool second;

  __device__ __forceinline__ int vector(int i, int k) const { return first + i * lanes + k * plan_lanes; }
  __device__ __forceinline__ bool exists(int i, int k) const { return vector(i, k) < vectors && (i == 0 || second); }
};

// One row; kScaled: after its squares have overflowed, else false is returned where they do.
template <typename T, bool kRms, bool kScaled, TeamKind kTeam>
__device__ __forceinline__ bool wide_row(const NormFwdParams& p, const TeamShape& shape, WideTeam<float, kTeam>& team,
                                         int64_t row) {
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  const WideLanes at{team.rank * K * shape.plan_lanes + team.lane, team.lanes, shape.plan_lanes, int(p.cols) / V,
                     team.lane + team.lanes < shape.plan_lanes};
  const C inverse = C(shape.inverse), scale = kScaled ? down_scale<C>() : C(1);

  Vectors<T, V, K> x[2];
  const char* const from = aligned_row(p.x, row, sizeof(T));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int w = 0; w < V / 2; ++w) x[i].pack[k].w[w] = 0;
      if (at.exists(i, k)) load_unit<16>(x[i].pack[k].w, from + uint32_t(at.vector(i, k)) * 16u);
    }
  const auto get = [&](int i, int k, C(&s)[V]) {
    x[i].get(k, s);
    if constexpr (kScaled)
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] *= scale;
  };

  C mean = 0;
  if constexpr (!kRms) {
    C sums[1][2] = {}, total[1];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C s[V];
        get(i, k, s);
        sums[0][i] += tree(s, Sum{});
      }
    team.sum(sums, total);
    mean = total[0] * inverse;
    x[0].forget(shape.zero);
    x[1].forget(shape.zero);
  }
  C sums[kRms ? 1 : 2][2] = {}, total[kRms ? 1 : 2];  // of the squares, of the deviations
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C d[V], squares = 0;
      get(i, k, d);
      const C center = at.exists(i, k) ? mean : C(0);  // what does not exist has no deviation
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if constexpr (!kRms) d[e] -= center;
        squares = fma(d[e], d[e], squares);
      }
      sums[0][i] += squares;
      if constexpr (!kRms) sums[1][i] += tree(d, Sum{});
    }
  team.sum(sums, total);
  if (!kScaled && overflowed(total[0])) return false;
  const Statistics<C> stats = finish<kRms>(p, inverse, mean, total[kRms ? 0 : 1], total[0], scale);
  if (team.lane == 0 && team.rank == 0) save_statistics(p, stats, row);

  x[0].forget(shape.zero);
  x[1].forget(shape.zero);
  const C offset = kRms ? C(p.weight_offset) : C(0);
  char* const to = aligned_row(p.y, row, sizeof(T));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T, V> weight = load_own_parameters<T, V>(p.weight, at.vector(i, k), at.exists(i, k));
      [[maybe_unused]] Pack<T, V> bias, out;
      if constexpr (!kRms) bias = load_own_parameters<T, V>(p.bias, at.vector(i, k), at.exists(i, k));
      C h[V];
      get(i, k, h);
      if constexpr (!kRms)
#pragma unroll
        for (int e = 0; e < V; ++e) h[e] -= mean;
      stats.normalize(h, h);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const C w = to_compute<C>(weight.element(e));
        if constexpr (kRms)
          h[e] *= w + offset;
        else
          h[e] = h[e] * w + to_compute<C>(bias.element(e));
      }
      out.round_from(h);
      if (at.exists(i, k)) store_unit<16>(to + uint32_t(at.vector(i, k)) * 16u, out.w);
    }
  return true;
}
// Out of line, so that the rare row costs no registers elsewhere.
template <typename T, bool kRms, TeamKind kTeam>
__device__ __noinline__ void wide_row_again(const NormFwdParams& p, const TeamShape& shape, WideTeam<float, kTeam> team,
                                            int64_t row) {
  wide_row<T, kRms, true>(p, shape, team, row);
}

// Parameters and results of the row's own dtype; no residual.
template <typename T, bool kRms, TeamKind kTeam>
__global__ void __launch_bounds__(kRowsCtaThreads / 2, 4)
    norm_fwd_wide(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900
  grid_launch_dependents();
  grid_dependency_wait();
  WideTeam<float, kTeam> team(shape);
  const int64_t row = row_group_index(kTeam == TeamKind::kCluster ? shape.cluster : 1);
  if (!wide_row<T, kRms, false>(p, shape, team, row)) wide_row_again<T, kRms>(p, shape, team, row);
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
