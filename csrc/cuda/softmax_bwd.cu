// softmax and log_softmax backward: dx = scale * y * (dy - sum(y * dy)), or for log: dx = scale * (dy - e^y * sum(dy)).
//
// Layout. Resident tiers: y and dy stay in registers as they are stored, 64 bytes of each per thread, and are widened
// twice; each is read once. Streaming tier: read again for the second pass; also where dy and y differ in dtype.
// Columns tier: as forward, longer rows read twice. Synchronisation. One barrier (or cluster barrier) for the sum;
// columns: one a halving. Skipped reads. Columns past the diagonal of a causal row. Rounding points. The products and
// the sum (fp32, or fp64 for fp64 rows), dy - sum, its product with y and with scale; then dx once, to its dtype.
#include "rows_common.cuh"

namespace ampkernels::cuda {
namespace {

__device__ __forceinline__ int64_t kept_columns(const SoftmaxBwdParams& p, int64_t row) {
  return p.causal ? min(p.cols, row % p.q_len + 1) : p.cols;
}

// What an element adds to the row's sum.
template <typename C>
__device__ __forceinline__ C term(C y, C dy, bool log) {
  return log ? dy : y * dy;
}
template <typename C>
__device__ __forceinline__ C gradient(C y, C dy, C sum, C scale, bool log) {
  return log ? fma(-exp_of(y), sum, dy) * scale : y * (dy - sum) * scale;
}

// What a lane adds to the row's sum.
template <typename C, typename T, int V, int K>
__device__ __forceinline__ C lane_sum(const Vectors<T, V, K>& y, const Vectors<T, V, K>& dy, bool log) {
  C sum = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C a[V], b[V];
    y.get(k, a);
    dy.get(k, b);
#pragma unroll
    for (int e = 0; e < V; ++e) a[e] = term(a[e], b[e], log);
    sum += tree(a, Sum{});
  }
  return sum;
}

// A lane's part of dx; `limit` columns are kept of the `cols` that exist. `lane`, `lanes`: as store_vector's.
template <typename T, int V, int K, typename C>
__device__ __forceinline__ void store_gradient(const SoftmaxBwdParams& p, char* row, int first, int step, int limit,
                                               int cols, int lane, int lanes, const Vectors<T, V, K>& y,
                                               const Vectors<T, V, K>& dy, C sum) {
  store_computed<T, V, K>(row, p.dx.dtype, p.dx.col_stride, first, step, cols, lane, lanes, [&](int k, C(&dx)[V]) {
    C a[V], b[V];
    y.get(k, a);
    dy.get(k, b);
#pragma unroll
    for (int e = 0; e < V; ++e) dx[e] = gradient(a[e], b[e], sum, C(p.scale), p.log);
    if (p.causal || p.log)  // padding is 0, and e^0 is not
#pragma unroll
      for (int e = 0; e < V; ++e) dx[e] = (first + k * step) * V + e < limit ? dx[e] : C(0);
  });
}

// Unit-stride rows: the common case, and few instructions beside the arithmetic. kAligned: rows on 16 bytes, of whole
// vectors.
template <typename T, typename O, bool kLog, bool kAligned>
__global__ void __launch_bounds__(kRowsCtaThreads, 2)
    softmax_bwd_plain(const __grid_constant__ SoftmaxBwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t r = row_group_index(shape.cluster) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(kept_columns(p, row)) : 0, first = team.first(K), step = team.lanes;

  Vectors<T, V, K> y, dy;
  y.template load_unit_stride<kAligned>(aligned_row(p.y, row, sizeof(T)), first, step, limit);
  dy.template load_unit_stride<kAligned>(aligned_row(p.dy, row, sizeof(T)), first, step, limit);

  C sum[1] = {0};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C a[V], b[V];
    y.get(k, a);
    dy.get(k, b);
#pragma unroll
    for (int e = 0; e < V; ++e) a[e] = term(a[e], b[e], kLog);
    if (p.causal) {
      const int count = limit - (first + k * step) * V;
#pragma unroll
      for (int e = 0; e < V; ++e) a[e] = e < count ? a[e] : C(0);
    }
    sum[0] += tree(a, Sum{});
  }
  team.reduce(sum, Sum{}, C(0));
  y.forget(shape.zero);
  dy.forget(shape.zero);
  store_unit_stride<kAligned, O, V, K, C>(aligned_row(p.dx, row, sizeof(O)), first, step, active ? int(p.cols) : 0,
                                          team.lane, [&](int k, C(&dx)[V]) {
                                            C a[V], b[V];
                                            y.get(k, a);
                                            dy.get(k, b);
#pragma unroll
                                            for (int e = 0; e < V; ++e)
                                              dx[e] = gradient(a[e], b[e], sum[0], C(p.scale), kLog);
                                            if (p.causal) {
                                              const int count = limit - (first + k * step) * V;
#pragma unroll
                                              for (int e = 0; e < V; ++e) dx[e] = e < count ? dx[e] : C(0);
                                            }
                                          });
}

template <typename T>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    softmax_bwd_resident(const __grid_constant__ SoftmaxBwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t r = row_group_index(shape.cluster) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(kept_columns(p, row)) : 0, first = team.first(K), step = team.lanes;

  Vectors<T, V, K> y, dy;
  y.load(row_pointer(p.y, row), p.y.col_stride, first, step, limit);
  dy.load(row_pointer(p.dy, row), p.dy.col_stride, first, step, limit);

  C sum[1] = {lane_sum<C>(y, dy, p.log)};
  team.reduce(sum, Sum{}, C(0));
  y.forget(shape.zero);
  dy.forget(shape.zero);
  store_gradient<T>(p, row_pointer(p.dx, row), first, step, limit, active ? int(p.cols) : 0, team.lane, team.lanes, y,
                    dy, sum[0]);
}

template <typename T>
__global__ void __launch_bounds__(kRowsStreamingThreads)
    softmax_bwd_streaming(const __grid_constant__ SoftmaxBwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr int kFar = 1 << 24;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t r = int64_t(blockIdx.x) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0, kept = active ? kept_columns(p, row) : 0;
  const int lane = team.lane, step = team.lanes, tile = step * K * V;

  Vectors<T, V, K> y;
  C dy[K][V];
  const auto load = [&](int64_t begin) {
    const int limit = int(max(min(kept - begin, int64_t(kFar)), int64_t(0)));
    y.load(row_pointer(p.y, row, begin), p.y.col_stride, lane, step, limit);
    const char* q = row_pointer(p.dy, row, begin);
    const auto same = [&]<typename D>() {
      Vectors<D, V, K> v;
      v.load(q, p.dy.col_stride, lane, step, limit);
#pragma unroll
      for (int k = 0; k < K; ++k) v.get(k, dy[k]);
    };
    with_dtype<T>(p.dy.dtype, same, [&] { load_other(q, p.dy.dtype, p.dy.col_stride, lane, step, limit, dy); });
    return limit;
  };

  C sum[1] = {0};
#pragma unroll 1
  for (int64_t begin = 0; begin < kept; begin += tile) {
    load(begin);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C a[V];
      y.get(k, a);
#pragma unroll
      for (int e = 0; e < V; ++e) a[e] = term(a[e], dy[k][e], p.log);
      sum[0] += tree(a, Sum{});
    }
  }
  team.reduce(sum, Sum{}, C(0));

#pragma unroll 1
  for (int64_t begin = 0; begin < p.cols; begin += tile) {
    const int limit = load(begin);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C a[V];
      y.get(k, a);
#pragma unroll
      for (int e = 0; e < V; ++e)
        dy[k][e] = (lane + k * step) * V + e < limit ? gradient(a[e], dy[k][e], sum[0], C(p.scale), p.log) : C(0);
    }
    store_vectors<T>(row_pointer(p.dx, row, begin), p.dx.dtype, p.dx.col_stride, lane, step,
                     active ? int(min(p.cols - begin, int64_t(tile))) : 0, lane, step, dy);
  }
}

// Adjacent rows, a lane for each: the sums and the bits of the resident tiers (Columns).
template <typename T>
__global__ void __launch_bounds__(32 * kRowsColumnsWarps, 1)
    softmax_bwd_columns(const __grid_constant__ SoftmaxBwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Columns<C> team(shape);
  const int64_t r = int64_t(blockIdx.x) * 32 + team.lane;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(kept_columns(p, row)) : 0, step = team.lanes;

  const char *const y_row = row_pointer(p.y, row), *const dy_row = row_pointer(p.dy, row);
  char* const dx_row = row_pointer(p.dx, row);

  Vectors<T, V, K> y, dy;
  const auto load = [&](int first) {
    y.load_apart(y_row, p.y.col_stride, first, step, limit);
    dy.load_apart(dy_row, p.dy.col_stride, first, step, limit);
  };
  const auto partial = [&](int first) {
    load(first);
    return lane_sum<C>(y, dy, p.log);
  };
  const C sum = team.template sum<K>(partial);
  y.forget(shape.zero);
  dy.forget(shape.zero);
  team.template each<K>([&](int first) {
    if (!team.held) load(first);
    store_gradient<T>(p, dx_row, first, step, limit, active ? int(p.cols) : 0, 0, 1, y, dy, sum);
  });
}

}  // namespace

Status launch_softmax_bwd(const SoftmaxBwdParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return {};
  Status status;
  const Device* device = current_device(&status);
  if (!device) return status;
  const RowsPlan plan =
      plan_rows(RowsOp::kSoftmaxBwd, p.cols, p.y.dtype, p.dy.dtype, layout_of(p.cols, p.y), device->arch);
  const TeamShape shape = team_shape(plan, p.cols);
  const size_t scratch = size_t(team_scratch_bytes(shape, p.y.dtype == DType::kFloat64 ? 8 : 4));
  const int64_t ctas = (p.rows + plan.rows_per_cta - 1) / plan.rows_per_cta;
  return dispatch_row_dtype(p.y.dtype, [&]<typename T>() -> Status {
    if constexpr (sizeof(T) < 8) {
      if (plan.tier == RowsTier::kColumns)
        return launch_rows(softmax_bwd_columns<T>, device->arch, ctas, plan.cta_threads(), 1,
                           columns_scratch_bytes(plan), stream, p, shape);
      if (plan.tier != RowsTier::kStreaming) {
        const auto launch = [&](auto kernel) {
          return launch_rows(kernel, device->arch, ctas, plan.cta_threads(), plan.cluster, scratch, stream, p, shape);
        };
        if (unit_stride_rows(p.y) && unit_stride_rows(p.dy) && unit_stride_rows(p.dx)) {
          // Instantiated for what occurs: results of the row's dtype at any alignment, and those of autocast.
          const bool on_16 = p.cols % plan.vector == 0 && aligned_rows(p.y) && aligned_rows(p.dy) && aligned_rows(p.dx);
          if (p.dx.dtype == dtype_of<T>::value) {
            if (on_16)
              return launch(p.log ? softmax_bwd_plain<T, T, true, true> : softmax_bwd_plain<T, T, false, true>);
            return launch(p.log ? softmax_bwd_plain<T, T, true, false> : softmax_bwd_plain<T, T, false, false>);
          }
          if constexpr (sizeof(T) == 4)
            if (p.dx.dtype == DType::kBFloat16 && on_16)
              return launch(p.log ? softmax_bwd_plain<T, bfloat16_t, true, true>
                                  : softmax_bwd_plain<T, bfloat16_t, false, true>);
        }
        return launch(softmax_bwd_resident<T>);
      }
    }
    return launch_rows(softmax_bwd_streaming<T>, device->arch, ctas, plan.cta_threads(), 1, scratch, stream, p, shape);
  });
}

}  // namespace ampkernels::cuda
