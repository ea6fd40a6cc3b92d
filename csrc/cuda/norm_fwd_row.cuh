// A row of norm forward: the sum with its residual, its exact two-pass statistics, its parameters. norm_fwd.cu tells
// the rounding points.
#pragma once

#include "rows_common.cuh"

namespace ampkernels::cuda {
namespace {

// An exact factor that takes the squares of the largest values, and their sum over 2^18 columns, into range.
template <typename C>
__device__ __forceinline__ C down_scale() {
  return sizeof(C) == 8 ? C(0x1p-540) : C(0x1p-80f);
}

// The mean in two parts, whose sum fp32 cannot hold; all of scale * s.
template <typename C>
struct Statistics {
  C mean, correction, factor, scale;

  template <int V>
  __device__ __forceinline__ void normalize(const C (&d)[V], C (&h)[V]) const {  // d = scale * s - mean
    const C by = -correction * factor;
#pragma unroll
    for (int e = 0; e < V; ++e) h[e] = fma(d[e], factor, by);
  }
  __device__ __forceinline__ C saved_mean() const {
    return (mean + correction) * (scale == C(1) ? C(1) : C(1) / down_scale<C>());
  }
  __device__ __forceinline__ C saved_rstd() const { return factor * scale; }
};

template <typename T, int K, int V, typename C>
__device__ __forceinline__ void load_row(const NormFwdParams& p, int64_t row, int64_t begin, int first, int step,
                                         int limit, C (&s)[K][V]) {
  Vectors<T, V, K> x;
  x.load(row_pointer(p.x, row, begin), p.x.col_stride, first, step, limit);
  if (!p.residual.data) {
#pragma unroll
    for (int k = 0; k < K; ++k) x.get(k, s[k]);
    return;
  }
  const char* residual = row_pointer(p.residual, row, begin);
  const auto add = [&]<typename D>() {
    Vectors<D, V, K> r;
    r.load(residual, p.residual.col_stride, first, step, limit);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C a[V];
      x.get(k, a);
      r.get(k, s[k]);
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] += a[e];
    }
  };
  with_dtype<T>(p.residual.dtype, add, [&] {
    load_other(residual, p.residual.dtype, p.residual.col_stride, first, step, limit, s);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C a[V];
      x.get(k, a);
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] += a[e];
    }
  });
}

// Calls use(k, v) with the parameters of each of the lane's vectors.
template <typename T, int K, int V, typename Use>
__device__ __forceinline__ void with_parameters(const VectorIn& w, int64_t begin, int first, int step, int limit,
                                                Use&& use) {
  using C = compute_t<T>;
  const char* at = static_cast<const char*>(w.data) + begin * w.stride * element_size(w.dtype);
  const auto fast = [&]<typename D>() {
    Vectors<D, V, K> v;
    v.load(at, w.stride, first, step, limit);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C a[V];
      v.get(k, a);
      use(k, a);
    }
  };
  with_dtype<T>(w.dtype, fast, [&] {
    C a[K][V];
    load_other(at, w.dtype, w.stride, first, step, limit, a);
#pragma unroll
    for (int k = 0; k < K; ++k) use(k, a[k]);
  });
}

template <typename T, int K, int V, typename C>
__device__ __forceinline__ void apply(const NormFwdParams& p, const Statistics<C>& stats, int64_t begin, int first,
                                      int step, int limit, C (&s)[K][V]) {
#pragma unroll
  for (int k = 0; k < K; ++k) stats.normalize(s[k], s[k]);
  if (p.weight.data) {
    const C offset = p.rms ? C(p.weight_offset) : C(0);
    with_parameters<T, K, V>(p.weight, begin, first, step, limit, [&](int k, const C(&w)[V]) {
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] *= w[e] + offset;
    });
  }
  if (p.bias.data)
    with_parameters<T, K, V>(p.bias, begin, first, step, limit, [&](int k, const C(&b)[V]) {
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] += b[e];
    });
}

// From the sums of the squares (and, for layer_norm, of the deviations) to the statistics.
template <bool kRms, typename C>
__device__ __forceinline__ Statistics<C> finish(const NormFwdParams& p, C inverse, C mean, C deviations, C squares,
                                                C scale) {
  const C correction = kRms ? C(0) : deviations * inverse;
  C variance = squares * inverse;
  if (!kRms) variance = fmax(fma(-correction, correction, variance), C(0)) + C(0) * squares;  // NaN stays
  return {mean, correction, C(1) / sqrt(variance + C(p.eps) * scale * scale), scale};
}

template <typename C>
__device__ __forceinline__ bool overflowed(C squares) {  // or NaN, which the second attempt keeps
  return !(squares <= C(sizeof(C) == 8 ? 1.7976931348623157e308 : 3.402823466e38));
}

// Loads a row by load(s), takes its statistics, and leaves its deviations from the mean in s (for rms: itself), scaled
// if the squares overflow otherwise: then the row is loaded again.
template <bool kRms, int K, int V, typename C, typename AnyTeam, typename Load>
__device__ __forceinline__ Statistics<C> row_statistics(const NormFwdParams& p, AnyTeam& team, C inverse, int first,
                                                        int step, int limit, C (&s)[K][V], Load&& load) {
  C scale = 1;
#pragma unroll 1
  while (true) {
    load(s);
    if (scale != C(1))
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] *= scale;
    C mean = 0;
    C sums[kRms ? 1 : 2] = {0};  // of the squares, of the deviations
    if constexpr (!kRms) {
      C sum[1] = {0};
#pragma unroll
      for (int k = 0; k < K; ++k) sum[0] += tree(s[k], Sum{});
      team.reduce(sum, Sum{}, C(0));
      mean = sum[0] * inverse;
      if ((first + (K - 1) * step + 1) * V > limit)  // what does not exist has no deviation
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
          for (int e = 0; e < V; ++e) s[k][e] = (first + k * step) * V + e < limit ? s[k][e] : mean;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C squares = 0;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if constexpr (!kRms) s[k][e] -= mean;
        squares = fma(s[k][e], s[k][e], squares);
      }
      sums[0] += squares;
      if constexpr (!kRms) sums[1] += tree(s[k], Sum{});
    }
    team.reduce(sums, Sum{}, C(0));
    // The same for all lanes of a row, but a warp may hold several rows: all go round again, at their own scales.
    const bool again = scale == C(1) && overflowed(sums[0]);
    if (!__any_sync(0xffffffffu, again)) return finish<kRms>(p, inverse, mean, sums[kRms ? 0 : 1], sums[0], scale);
    if (again) scale = down_scale<C>();
  }
}

template <typename C>
__device__ __forceinline__ void save_statistics(const NormFwdParams& p, const Statistics<C>& stats, int64_t row) {
  if (p.mean) static_cast<C*>(p.mean)[row] = stats.saved_mean();
  if (p.rstd) static_cast<C*>(p.rstd)[row] = stats.saved_rstd();
}

template <int V, typename C>
__device__ __forceinline__ void copy(const C (&from)[V], C (&to)[V]) {
#pragma unroll
  for (int e = 0; e < V; ++e) to[e] = from[e];
}

// A row of any layout and dtypes, in the registers of its team.
template <typename T, bool kRms>
__device__ __forceinline__ void resident_row(const NormFwdParams& p, Team<compute_t<T>>& team, double inverse,
                                             int64_t r) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(p.cols) : 0, first = team.first(K), step = team.lanes;

  C s[K][V];
  const auto load = [&](C(&s)[K][V]) {
    load_row<T>(p, row, 0, first, step, limit, s);
    if (p.sum.data)
      store_vectors<T>(row_pointer(p.sum, row), p.sum.dtype, p.sum.col_stride, first, step, limit, team.lane,
                       team.lanes, s);
  };
  const Statistics<C> stats = row_statistics<kRms>(p, team, C(inverse), first, step, limit, s, load);
  if (active && team.lane == 0 && team.rank == 0) save_statistics(p, stats, row);
  apply<T>(p, stats, 0, first, step, limit, s);
  store_vectors<T>(row_pointer(p.y, row), p.y.dtype, p.y.col_stride, first, step, limit, team.lane, team.lanes, s);
}

}  // namespace
}  // namespace ampkernels::cuda
