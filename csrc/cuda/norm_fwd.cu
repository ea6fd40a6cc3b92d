// layer_norm and rms_norm forward: s = x + residual, then y = (s - mean) * rstd * weight + bias, or s * rstd * (weight +
// offset); the sum, the mean and rstd as asked for.
//
// Layout. Resident tiers: the row of s in registers, in the compute type (rows_common.cuh). Streaming tier: one CTA per
// row, read once for the mean, once for the deviations, once for the result.
// Statistics. Two passes over the row: the mean, then the deviations from it and their squares. The mean of the deviations
// corrects the rounding of the first mean, so a row whose mean is 10^4 times its deviation loses nothing. If a square
// overflows (|s| > 10^19 in fp32), the row is scaled by a power of two, exactly, and its statistics are taken again.
// Synchronisation. One barrier (or cluster barrier) per statistic.
// Rounding points. x + residual once; the sums (fp32, or fp64 for fp64 rows); 1 / sqrt; (s - mean), times rstd, times
// weight, plus bias, each once; then y and sum once, to their dtypes.
#include "rows_common.cuh"

namespace ampkernels::cuda {
namespace {

// An exact factor that takes the squares of the largest values, and their sum over 2^18 columns, into range.
template <typename C>
__device__ __forceinline__ C down_scale() {
  return sizeof(C) == 8 ? C(0x1p-540) : C(0x1p-80f);
}

template <typename C>
struct Statistics {
  C shift;  // what is subtracted from scale * s
  C mean, rstd;
  C scale, factor;  // y = (scale * s - shift) * factor
};

template <typename T, int K, int V, typename C>
__device__ __forceinline__ void load_row(const NormFwdParams& p, int64_t row, int64_t begin, int first, int step, int limit,
                                         C (&s)[K][V]) {
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
__device__ __forceinline__ void with_parameters(const VectorIn& w, int64_t begin, int first, int step, int limit, Use&& use) {
  using C = compute_t<T>;
  const char* at = static_cast<const char*>(w.data) + begin * w.stride * element_size(w.dtype);
  const auto fast = [&]<typename D>() {
    Vectors<D, V, K> v;
    v.template load<Cache::kKeep>(at, w.stride, first, step, limit);
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
__device__ __forceinline__ void apply(const NormFwdParams& p, const Statistics<C>& stats, int64_t begin, int first, int step,
                                      int limit, C (&s)[K][V]) {
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) s[k][e] = (s[k][e] - stats.shift) * stats.factor;
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
template <typename C>
__device__ __forceinline__ Statistics<C> finish(const NormFwdParams& p, C mean, C deviations, C squares, C scale) {
  const C n = C(p.cols);
  const C correction = p.rms ? C(0) : deviations / n;
  C variance = squares / n;
  if (!p.rms) variance = fmax(fma(-correction, correction, variance), C(0)) + C(0) * squares;  // NaN stays
  Statistics<C> stats;
  stats.scale = scale;
  stats.shift = mean + correction;
  stats.factor = C(1) / sqrt(variance + C(p.eps) * scale * scale);
  stats.mean = stats.shift / scale;
  stats.rstd = stats.factor * scale;
  return stats;
}

template <typename T, bool kRms>
__global__ void __launch_bounds__(kRowsCtaThreads, 2)
    norm_fwd_resident(const __grid_constant__ NormFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kVectorsPerThread<RowsOp::kNormFwd, T>;
  __shared__ C scratch[Team<C>::kScratch];
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape, scratch);
  const int64_t r = int64_t(blockIdx.x / shape.cluster) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(p.cols) : 0, first = team.first(K), step = team.lanes;

  C s[K][V];
  load_row<T>(p, row, 0, first, step, limit, s);
  if (p.sum.data)
    store_vectors<T>(row_pointer(p.sum, row), p.sum.dtype, p.sum.col_stride, first, step, limit, team.lane, team.lanes, s);

  const auto fill_padding = [&](C value) {  // so that it adds nothing to a sum
#pragma unroll
    for (int k = 0; k < K; ++k)
      if ((first + k * step + 1) * V > limit)
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] = (first + k * step) * V + e < limit ? s[k][e] : value;
  };

  C scale = 1;
  Statistics<C> stats;
#pragma unroll 1
  while (true) {
    C mean = 0;
    if constexpr (!kRms) {
      C sum[1] = {0};
#pragma unroll
      for (int k = 0; k < K; ++k) sum[0] += tree(s[k], Sum{});
      team.reduce(sum, Sum{}, C(0));
      mean = sum[0] / C(p.cols);
      fill_padding(mean);
    }
    C sums[2] = {0, 0};  // of the squares, of the deviations
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C d[V], square[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        d[e] = kRms ? s[k][e] : s[k][e] - mean;
        square[e] = d[e] * d[e];
      }
      sums[0] += tree(square, Sum{});
      if constexpr (!kRms) sums[1] += tree(d, Sum{});
    }
    if constexpr (kRms) {
      C squares[1] = {sums[0]};
      team.reduce(squares, Sum{}, C(0));
      sums[0] = squares[0];
    } else {
      team.reduce(sums, Sum{}, C(0));
    }
    stats = finish(p, mean, sums[1], sums[0], scale);
    // Uniform over the lanes of a row, but a warp may hold several rows: all go round again, at their own scales.
    const bool again = scale == C(1) && !(sums[0] <= C(sizeof(C) == 8 ? 1.7976931348623157e308 : 3.402823466e38));
    if (!__any_sync(0xffffffffu, again)) break;
    if (again) scale = down_scale<C>();
    const C by = again ? scale : C(1);
    fill_padding(C(0));
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] *= by;
  }
  if (active && team.lane == 0 && team.rank == 0) {
    if (p.mean) static_cast<C*>(p.mean)[row] = stats.mean;
    if (p.rstd) static_cast<C*>(p.rstd)[row] = stats.rstd;
  }
  apply<T>(p, stats, 0, first, step, limit, s);
  store_vectors<T>(row_pointer(p.y, row), p.y.dtype, p.y.col_stride, first, step, limit, team.lane, team.lanes, s);
}

template <typename T>
__global__ void __launch_bounds__(kRowsCtaThreads)
    norm_fwd_streaming(const __grid_constant__ NormFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kVectorsPerThread<RowsOp::kNormFwd, T>;
  constexpr int kFar = 1 << 24;  // more columns than a tile, few enough for 32-bit byte offsets
  __shared__ C scratch[Team<C>::kScratch];
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape, scratch);
  const int64_t r = int64_t(blockIdx.x) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0, cols = active ? p.cols : 0;
  const int lane = team.lane, step = team.lanes, tile = step * K * V;

  C s[K][V];
  Statistics<C> stats;
  C scale = 1, mean = 0;
  // Passes: 0 the mean, 1 the squares, 2 the result; 0 and 1 again if a square overflowed.
#pragma unroll 1
  for (int pass = p.rms ? 1 : 0; pass < 3; ++pass) {
    C sums[2] = {0, 0};
#pragma unroll 1
    for (int64_t begin = 0; begin < p.cols; begin += tile) {
      const int limit = int(max(min(cols - begin, int64_t(kFar)), int64_t(0)));
      load_row<T>(p, row, begin, lane, step, limit, s);
      if (pass == 2 && p.sum.data)
        store_vectors<T>(row_pointer(p.sum, row, begin), p.sum.dtype, p.sum.col_stride, lane, step, min(limit, tile), lane,
                         step, s);
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] *= scale;
      if (pass < 2) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          C d[V], square[V];
#pragma unroll
          for (int e = 0; e < V; ++e) {
            d[e] = (lane + k * step) * V + e < limit ? s[k][e] - mean : C(0);
            square[e] = d[e] * d[e];
          }
          sums[0] += tree(square, Sum{});
          sums[1] += tree(d, Sum{});
        }
      } else {
        apply<T>(p, stats, begin, lane, step, limit, s);
        store_vectors<T>(row_pointer(p.y, row, begin), p.y.dtype, p.y.col_stride, lane, step, min(limit, tile), lane, step,
                         s);
      }
    }
    if (pass == 2) break;
    team.reduce(sums, Sum{}, C(0));
    if (pass == 0) {
      mean = sums[1] / C(p.cols);
      continue;
    }
    stats = finish(p, mean, sums[1], sums[0], scale);
    const bool again = scale == C(1) && !(sums[0] <= C(sizeof(C) == 8 ? 1.7976931348623157e308 : 3.402823466e38));
    if (!__any_sync(0xffffffffu, again)) continue;
    if (again) scale = down_scale<C>();
    mean = 0;
    pass = p.rms ? 0 : -1;
  }
  if (active && lane == 0) {
    if (p.mean) static_cast<C*>(p.mean)[row] = stats.mean;
    if (p.rstd) static_cast<C*>(p.rstd)[row] = stats.rstd;
  }
}

}  // namespace

Status launch_norm_fwd(const NormFwdParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return {};
  Status status;
  const Device* device = current_device(&status);
  if (!device) return status;
  const RowsPlan plan =
      plan_rows(RowsOp::kNormFwd, p.cols, p.x.dtype, p.x.dtype, layout_of(p.cols, p.x), device->arch);
  const TeamShape shape{plan.lanes, plan.rows_per_cta, plan.cluster};
  const int64_t ctas = (p.rows + plan.rows_per_cta - 1) / plan.rows_per_cta;
  return dispatch_row_dtype(p.x.dtype, [&]<typename T>() -> Status {
    if constexpr (sizeof(T) < 8)
      if (plan.tier != RowsTier::kStreaming)
        return launch_rows(p.rms ? norm_fwd_resident<T, true> : norm_fwd_resident<T, false>, device->arch, ctas,
                           plan.cta_threads(), plan.cluster, 0, stream, p, shape);
    return launch_rows(norm_fwd_streaming<T>, device->arch, ctas, plan.cta_threads(), 1, 0, stream, p, shape);
  });
}

}  // namespace ampkernels::cuda
