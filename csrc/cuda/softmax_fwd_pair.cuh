// softmax forward of 16-bit rows that lie on 16 bytes, two threads to a lane (PairTeam). Rounding points are
// softmax_fwd.cu's. For 9.0, where it was timed.
#pragma once

#include "rows_flat.cuh"

namespace ampkernels::cuda {
namespace {

// The larger ones of two pairs of 16-bit values: exact, and NaN is dropped, as by fmax.
template <typename T>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  if constexpr (dtype_of<T>::value == DType::kBFloat16)
    return bit_cast<uint32_t>(__hmax2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b)));
  else
    return bit_cast<uint32_t>(__hmax2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
}
template <typename T>
inline constexpr uint32_t kMinusInfinityPair = dtype_of<T>::value == DType::kBFloat16 ? 0xff80ff80u : 0xfc00fc00u;

// Whole vectors, results of the row's dtype, scale > 0, not causal. What limits these rows is latency: a row's own
// computing, which no load of it overlaps, takes half as long with 16 elements a thread, and an SM holds twice the
// warps. kWhole: every lane has all its vectors. The same sums in the same order as softmax_fwd_plain.
template <typename T, bool kWhole, int kWarps>
__global__ void __launch_bounds__(PairTeam<kWarps>::kThreads,
                                  pair_ctas(kWarps == 1 ? 2048 : 1536, PairTeam<kWarps>::kThreads))
    softmax_fwd_pair(const __grid_constant__ SoftmaxFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900
  using C = float;
  using Pairs = PairTeam<kWarps>;
  constexpr int V = kVector<T>, K = Pairs::kVectors;
  grid_launch_dependents();
  grid_dependency_wait();

  Pairs team(shape);
  const int64_t row = Pairs::kOneRow ? blockIdx.x : int64_t(blockIdx.x) * shape.rows_per_cta + team.slot;
  const int first = team.first(), step = team.lanes, vectors = int(p.cols) / V;
  const bool active = Pairs::kOneRow || row < p.rows;
  const auto exists = [&](int k) { return active && (kWhole || first + k * step < vectors); };

  Vectors<T, V, K> x;
  const char* const from = aligned_row(p.x, row, sizeof(T)) + uint32_t(first) * 16u;
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) x.pack[k].w[w] = kMinusInfinityPair<T>;
    if (exists(k)) load_unit<16>(x.pack[k].w, from + uint32_t(k * step) * 16u);
  }
  Pack<T, 2> top;
  top.w[0] = kMinusInfinityPair<T>;
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int w = 0; w < V / 2; ++w) top.w[0] = max_pair<T>(top.w[0], x.pack[k].w[w]);
  C largest = fmax(to_compute<C>(top.element(0)), to_compute<C>(top.element(1)));
  C s[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) x.get(k, s[k]);
  if (p.scale != 1.0) {
    const C scale = C(p.scale);
    largest *= scale;  // rounding keeps the order
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] *= scale;
  }

  exponentials(RowExp<C>(team.max(largest)), false, s);
  C sums[K];
#pragma unroll
  for (int k = 0; k < K; ++k) sums[k] = tree(s[k], Sum{});
  const C factor = C(1) / team.sum(sums);
  char* const to = aligned_row(p.y, row, sizeof(T)) + uint32_t(first) * 16u;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C y[V];
#pragma unroll
    for (int e = 0; e < V; ++e) y[e] = s[k][e] * factor;
    Pack<T, V> out;
    out.round_from(y);
    if (exists(k)) store_unit<16>(to + uint32_t(k * step) * 16u, out.w);
  }
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
