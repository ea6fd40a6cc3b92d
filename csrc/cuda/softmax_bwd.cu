// softmax and log_softmax backward: dx = scale * y * (dy - sum(y * dy)), or for log: dx = scale * (dy - e^y * sum(dy)).
//
// Layout. Resident tiers: y and dy stay in registers as they are stored, 64 bytes of each per thread, and are widened
// twice; each is read once. Streaming tier: read again for the second pass; also where dy and y differ in dtype.
// Columns tier: as forward. Synchronisation. One barrier (or cluster barrier) for the sum. Skipped reads. Columns past
// the diagonal of a causal row. Rounding points. The products and the sum (fp32, or fp64 for fp64 rows), dy - sum, its
// product with y and with scale; then dx once, to its dtype.
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

// Unit-stride rows: the common case, and few instructions beside the arithmetic. kAligned: rows on 16 bytes, of whole
// vectors.
template <typename T, typename O, bool kLog, bool kAligned>
__global__ void __launch_bounds__(kRowsCtaThreads, kAligned ? 2 : 1)
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

  C sum[1] = {0};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C a[V], b[V];
    y.get(k, a);
    dy.get(k, b);
#pragma unroll
    for (int e = 0; e < V; ++e) a[e] = term(a[e], b[e], p.log);
    sum[0] += tree(a, Sum{});
  }
  team.reduce(sum, Sum{}, C(0));
  y.forget(shape.zero);
  dy.forget(shape.zero);
  store_computed<T, V, K>(row_pointer(p.dx, row), p.dx.dtype, p.dx.col_stride, first, step, active ? int(p.cols) : 0,
                          team.lane, team.lanes, [&](int k, C(&dx)[V]) {
                            C a[V], b[V];
                            y.get(k, a);
                            dy.get(k, b);
#pragma unroll
                            for (int e = 0; e < V; ++e) dx[e] = gradient(a[e], b[e], sum[0], C(p.scale), p.log);
                            if (p.causal || p.log)  // padding is 0, and e^0 is not
#pragma unroll
                              for (int e = 0; e < V; ++e) dx[e] = (first + k * step) * V + e < limit ? dx[e] : C(0);
                          });
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

// Lane l of every warp works on row 32 * blockIdx.x + l; warp w takes columns w, w + warps, ...
template <typename T>
__global__ void __launch_bounds__(32 * kColumnsMaxWarps)
    softmax_bwd_columns(const __grid_constant__ SoftmaxBwdParams p, const int warps) {
  using C = compute_t<T>;
  constexpr int E = kColumnsPerThread / 2;
  __shared__ C scratch[kColumnsMaxWarps][33];
  grid_launch_dependents();
  grid_dependency_wait();

  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t row = int64_t(blockIdx.x) * 32 + lane;
  const bool active = row < p.rows;
  const int64_t at = active ? row : 0, kept = active ? kept_columns(p, row) : 0;
  const char *y_row = row_pointer(p.y, at), *dy_row = row_pointer(p.dy, at);

  C y[E], dy[E];
  const auto read = [&](const char* p_row, DType dtype, int64_t stride, int64_t begin, C(&v)[E]) {
    const auto fast = [&]<typename D>() {
      const D* q = reinterpret_cast<const D*>(p_row) + (begin + warp) * stride;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        v[e] = begin + warp + e * warps < kept ? to_compute<C>(*q) : C(0);
        q += warps * stride;
      }
    };
    with_dtype<T>(dtype, fast, [&] {
#pragma unroll 1
      for (int i = 0; i < E; ++i) {
        const int64_t c = begin + warp + i * warps;
        const C value = c < kept ? load_as<C>(p_row, dtype, c * stride) : C(0);
#pragma unroll
        for (int e = 0; e < E; ++e) v[e] = e == i ? value : v[e];
      }
    });
  };

  const int64_t tile = int64_t(E) * warps;
  C sum = 0;
#pragma unroll 1
  for (int64_t begin = 0; begin < p.cols; begin += tile) {
    read(y_row, p.y.dtype, p.y.col_stride, begin, y);
    read(dy_row, p.dy.dtype, p.dy.col_stride, begin, dy);
#pragma unroll
    for (int e = 0; e < E; ++e) sum += term(y[e], dy[e], p.log);
  }
  scratch[warp][lane] = sum;
  __syncthreads();
  C total = 0;
  for (int w = 0; w < warps; ++w) total += scratch[w][lane];

  if (!active) return;
  char* dx = row_pointer(p.dx, row);
#pragma unroll 1
  for (int64_t begin = 0; begin < p.cols; begin += tile) {
    if (p.cols > tile) {
      read(y_row, p.y.dtype, p.y.col_stride, begin, y);
      read(dy_row, p.dy.dtype, p.dy.col_stride, begin, dy);
    }
#pragma unroll
    for (int e = 0; e < E; ++e)
      dy[e] = begin + warp + e * warps < kept ? gradient(y[e], dy[e], total, C(p.scale), p.log) : C(0);
    const auto store = [&]<typename O>() {
      O* q = reinterpret_cast<O*>(dx) + (begin + warp) * p.dx.col_stride;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if (begin + warp + e * warps < p.cols) *q = round_to<O>(dy[e]);
        q += warps * p.dx.col_stride;
      }
    };
    with_dtype<T>(p.dx.dtype, store, [&] {
#pragma unroll 1
      for (int i = 0; i < E; ++i) {
        C value = dy[0];
#pragma unroll
        for (int e = 0; e < E; ++e) value = e == i ? dy[e] : value;
        const int64_t c = begin + warp + i * warps;
        if (c < p.cols) store_as(dx, p.dx.dtype, c * p.dx.col_stride, value);
      }
    });
  }
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
    if (plan.tier == RowsTier::kColumns)
      return launch_rows(softmax_bwd_columns<T>, device->arch, ctas, plan.cta_threads(), 1, 0, stream, p, plan.lanes);
    if constexpr (sizeof(T) < 8)
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
    return launch_rows(softmax_bwd_streaming<T>, device->arch, ctas, plan.cta_threads(), 1, scratch, stream, p, shape);
  });
}

}  // namespace ampkernels::cuda
