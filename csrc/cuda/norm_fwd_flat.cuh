// layer_norm forward of 16-bit rows that lie on 16 bytes, a CTA of up to 256 threads to a row, whose lanes are summed
// by way of shared memory (FlatTeam). Rounding points are norm_fwd.cu's. For 9.0, where it was timed.
#pragma once

#include "norm_fwd_aligned.cuh"
#include "rows_flat.cuh"

namespace ampkernels::cuda {
namespace {

// Parameters and results of the row's dtype, no residual; every lane has all its vectors. The same operations in the
// same order as norm_fwd_aligned, in fewer instructions between the load and the store: half the shuffles, and no call
// for the rare row whose squares overflow, which takes the loop a second time.
template <typename T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 32 / kWarps)
    layer_norm_flat(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  FlatTeam<kWarps> team(shape);
  const int64_t row = blockIdx.x;
  const int lane = team.lane, step = team.lanes;
  const C inverse = C(shape.inverse);

  C s[K][V], scale = 1;
  Statistics<C> stats;
#pragma unroll 1
  while (true) {
    Vectors<T, V, K> x;
    const char* const from = aligned_row(p.x, row, sizeof(T)) + uint32_t(lane) * 16u;
#pragma unroll
    for (int k = 0; k < K; ++k) load_unit<16>(x.pack[k].w, from + uint32_t(k * step) * 16u);
#pragma unroll
    for (int k = 0; k < K; ++k) x.get(k, s[k]);
    if (scale != C(1))
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] *= scale;
    C sum[1] = {0};
#pragma unroll
    for (int k = 0; k < K; ++k) sum[0] += tree(s[k], Sum{});
    team.reduce(sum, Sum{}, C(0));
    const C mean = sum[0] * inverse;
    C sums[2] = {0, 0};  // of the squares, of the deviations
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C squares = 0;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        s[k][e] -= mean;
        squares = fma(s[k][e], s[k][e], squares);
      }
      sums[0] += squares;
      sums[1] += tree(s[k], Sum{});
    }
    team.reduce(sums, Sum{}, C(0));
    stats = finish<false>(p, inverse, mean, sums[1], sums[0], scale);
    if (scale != C(1) || !overflowed(sums[0])) break;
    scale = down_scale<C>();
  }
  if (lane == 0) save_statistics(p, stats, row);

  char* const to = aligned_row(p.y, row, sizeof(T)) + uint32_t(lane) * 16u;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Pack<T, V> w = load_own_parameters<T, V>(p.weight, lane + k * step, true);
    const Pack<T, V> b = load_own_parameters<T, V>(p.bias, lane + k * step, true);
    C h[V];
    stats.normalize(s[k], h);
#pragma unroll
    for (int e = 0; e < V; ++e) h[e] = h[e] * to_compute<C>(w.element(e)) + to_compute<C>(b.element(e));
    Pack<T, V> out;
    out.round_from(h);
    store_unit<16>(to + uint32_t(k * step) * 16u, out.w);
  }
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
