// rms_norm forward of 16-bit rows that lie on 16 bytes, two threads to a lane (PairTeam): as softmax_fwd_pair. Rounding
// points are norm_fwd.cu's. For 9.0, where it was timed.
#pragma once

#include "norm_fwd_row.cuh"
#include "rows_flat.cuh"

namespace ampkernels::cuda {
namespace {

// A weight of the row's own dtype, results of it, no residual; every lane has all its vectors. The same sums in the
// same order as norm_fwd_plain's.
template <typename T, int kWarps>
__global__ void __launch_bounds__(PairTeam<kWarps>::kThreads, 1536 / PairTeam<kWarps>::kThreads)
    rms_fwd_pair(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900
  using C = float;
  using Pairs = PairTeam<kWarps>;
  constexpr int V = kVector<T>, K = Pairs::kVectors;
  grid_launch_dependents();
  grid_dependency_wait();

  Pairs team(shape);
  const int64_t row = Pairs::kOneRow ? blockIdx.x : int64_t(blockIdx.x) * shape.rows_per_cta + team.slot;
  const int first = team.first(), step = team.lanes;
  const bool active = Pairs::kOneRow || row < p.rows;
  const auto load = [&](const char* from, int k, Pack<T, V>& pack) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) pack.w[w] = 0;
    if (active) load_unit<16>(pack.w, from + uint32_t(first + k * step) * 16u);
  };

  C s[K][V], scale = 1, squares = 0;
#pragma unroll 1
  while (true) {
    Vectors<T, V, K> x;
#pragma unroll
    for (int k = 0; k < K; ++k) load(aligned_row(p.x, row, sizeof(T)), k, x.pack[k]);
    C sums[K] = {0, 0};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      x.get(k, s[k]);
      if (scale != C(1))
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] *= scale;
#pragma unroll
      for (int e = 0; e < V; ++e) sums[k] = fma(s[k][e], s[k][e], sums[k]);
    }
    squares = team.sum(sums);
    const bool again =
        scale == C(1) && overflowed(squares);  // the same for all lanes of a row; a warp may hold several
    if (!__any_sync(0xffffffffu, again)) break;
    if (again) scale = down_scale<C>();
  }
  const Statistics<C> stats = finish<true>(p, C(shape.inverse), C(0), C(0), squares, scale);
  if (active && team.lane == 0 && !team.second) save_statistics(p, stats, row);

  const C offset = C(p.weight_offset);
  char* const to = aligned_row(p.y, row, sizeof(T)) + uint32_t(first) * 16u;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Pack<T, V> weight, out;
    load(static_cast<const char*>(p.weight.data), k, weight);
    C h[V];
    stats.normalize(s[k], h);
#pragma unroll
    for (int e = 0; e < V; ++e) h[e] *= to_compute<C>(weight.element(e)) + offset;
    out.round_from(h);
    if (active) store_unit<16>(to + uint32_t(k * step) * 16u, out.w);
  }
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
