// rms_norm forward of long 16-bit rows that lie on 16 bytes, a row to a CTA of half the threads: as softmax_fwd_wide.
// Rounding points are norm_fwd.cu's. For 9.0, where it was timed: for others the registers do not suffice.
#pragma once

#include "norm_fwd_row.cuh"

namespace ampkernels::cuda {
namespace {

// A weight of the row's own dtype.
template <typename T>
__global__ void __launch_bounds__(kRowsCtaThreads / 2, 4)
    rms_fwd_wide(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  WideTeam<C, TeamKind::kCta> team(shape);
  const int64_t row = blockIdx.x;
  const int plan_lanes = shape.plan_lanes, vectors = int(p.cols) / V;
  const bool second = team.lane + team.lanes < plan_lanes;
  const auto vector = [&](int i, int k) { return team.lane + i * team.lanes + k * plan_lanes; };  // k of lane i
  const auto exists = [&](int i, int k) { return vector(i, k) < vectors && (i == 0 || second); };
  const auto load = [&]<Cache kCache>(const void* from, int i, int k, Pack<T, V>& pack) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) pack.w[w] = 0;
    if (exists(i, k)) load_unit<16, kCache>(pack.w, static_cast<const char*>(from) + uint32_t(vector(i, k)) * 16u);
  };

  Vectors<T, V, K> x[2];
  const char* const from = aligned_row(p.x, row, sizeof(T));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) load.template operator()<Cache::kStream>(from, i, k, x[i].pack[k]);
  C scale = 1, squares = 0;
#pragma unroll 1
  while (true) {
    C sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C s[V], sum = 0;
        x[i].get(k, s);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          s[e] *= scale;
          sum = fma(s[e], s[e], sum);
        }
        sums[i] += sum;
      }
    squares = team.sum(sums);
    if (scale != C(1) || !overflowed(squares)) break;
    scale = down_scale<C>();
  }
  const Statistics<C> stats = finish<true>(p, C(shape.inverse), C(0), C(0), squares, scale);
  if (team.lane == 0) save_statistics(p, stats, row);

  x[0].forget(shape.zero);
  x[1].forget(shape.zero);
  const C offset = C(p.weight_offset);
  char* const to = aligned_row(p.y, row, sizeof(T));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Pack<T, V> weight, out;
      load.template operator()<Cache::kKeep>(p.weight.data, i, k, weight);
      C h[V];
      x[i].get(k, h);
#pragma unroll
      for (int e = 0; e < V; ++e) h[e] *= scale;
      stats.normalize(h, h);
#pragma unroll
      for (int e = 0; e < V; ++e) h[e] *= to_compute<C>(weight.element(e)) + offset;
      out.round_from(h);
      if (exists(i, k)) store_unit<16>(to + uint32_t(vector(i, k)) * 16u, out.w);
    }
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
