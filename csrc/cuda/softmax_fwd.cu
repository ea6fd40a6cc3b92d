// softmax and log_softmax forward: y = e^(s - max) / sum(e^(s - max)), s = scale * x + mask, or s - max - log(sum).
//
// Layout. Resident tiers: a row's scores live in registers, in the compute type, 32 registers per thread
// (rows_common.cuh deals the vectors); softmax_fwd_wide: as it was stored; softmax_fwd_pair: 16 registers, two threads
// to a lane. Streaming tier: one CTA per row, online maximum and sum, then a second reading. Columns tier: softmax over
// a dimension that is not the last; a lane per row keeps the accesses coalesced, and the warps of a CTA add as the
// lanes of a resident row do (Columns); rows of more than 16 such lanes are read three times. Synchronisation. One
// barrier (or cluster barrier) for the maximum, one for the sum; columns: one a halving. Skipped reads. Columns past
// the diagonal of a causal row, and vectors whose mask drops all of their elements. Rounding points. s once (one fma),
// s - max, e^, the sum (fp32, or fp64 for fp64 rows), 1 / sum and the product; then y once, to its dtype.
#include "softmax_fwd_pair.cuh"

namespace ampkernels::cuda {
namespace {

template <typename C>
__device__ __forceinline__ C minus_infinity() {
  return -C(INFINITY);
}
// What a kept element counts for the maximum at least: a row that keeps something is thereby told from one that does
// not.
template <typename C>
__device__ __forceinline__ C lowest() {
  return sizeof(C) == 8 ? C(-1.7976931348623157e308) : C(-3.402823466e38f);
}

__device__ __forceinline__ int64_t kept_columns(const SoftmaxFwdParams& p, int64_t row) {
  return p.causal ? min(p.cols, row % p.q_len + 1) : p.cols;
}

// One score and its claim on the maximum. `add` is the additive mask, -inf where a bool mask drops.
template <bool kMasked, typename C>
__device__ __forceinline__ C score(C x, C scale, C add, C& largest) {
  if constexpr (kMasked) {
    const bool kept = add != minus_infinity<C>();
    const C s = kept ? fma(x, scale, add) : add;
    largest = kept ? fmax(fmax(s, lowest<C>()), largest) : largest;
    return s;
  } else {
    const C s = x * scale;
    largest = fmax(s, largest);
    return s;
  }
}

// The scores of this lane's vectors among `limit` columns that start at column `begin` of the row; -inf elsewhere.
// kApart: the lanes of the warp read adjacent rows.
template <typename T, bool kMasked, bool kApart = false, int K, int V, typename C>
__device__ __forceinline__ C load_scores(const SoftmaxFwdParams& p, int64_t row, int64_t begin, int first, int step,
                                         int limit, C (&s)[K][V]) {
  const C scale = C(p.scale);
  uint32_t keep = ~0u;
  if constexpr (kMasked) {
    const char* mask = p.mask.data ? row_pointer(p.mask, row, begin) : nullptr;
    if (!mask) {
#pragma unroll
      for (int k = 0; k < K; ++k)
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] = 0;
    } else if (p.mask.dtype == DType::kBool) {
      Vectors<uint8_t, V, K> m;
      m.load(mask, p.mask.col_stride, first, step, limit);
      keep = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        uint32_t any = 0;
#pragma unroll
        for (int i = 0; i < m.pack[k].kWords; ++i) any |= m.pack[k].w[i];
        keep |= uint32_t(any != 0) << k;
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] = m.pack[k].element(e) ? C(0) : minus_infinity<C>();
      }
    } else {
      with_dtype<T>(
          p.mask.dtype,
          [&]<typename D>() {
            Vectors<D, V, K> m;
            m.load(mask, p.mask.col_stride, first, step, limit);
#pragma unroll
            for (int k = 0; k < K; ++k) m.get(k, s[k]);
          },
          [&] { load_other(mask, p.mask.dtype, p.mask.col_stride, first, step, limit, s); });
      keep = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        bool any = false;
#pragma unroll
        for (int e = 0; e < V; ++e) any |= s[k][e] != minus_infinity<C>();
        keep |= uint32_t(any) << k;
      }
    }
  }
  Vectors<T, V, K> x;
  if constexpr (kApart)
    x.load_apart(row_pointer(p.x, row, begin), p.x.col_stride, first, step, limit, keep);
  else
    x.load(row_pointer(p.x, row, begin), p.x.col_stride, first, step, limit, keep);
  C largest = minus_infinity<C>();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int count = limit - (first + k * step) * V;
    C v[V];
    x.get(k, v);
    if (count >= V) {
      C top[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        top[e] = minus_infinity<C>();
        s[k][e] = score<kMasked>(v[e], scale, s[k][e], top[e]);
      }
      largest = fmax(largest, tree(top, Max{}));
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        C top = minus_infinity<C>();
        const C z = score<kMasked>(v[e], scale, s[k][e], top);
        s[k][e] = e < count ? z : minus_infinity<C>();
        largest = e < count ? fmax(largest, top) : largest;
      }
    }
  }
  return largest;
}

// What a lane adds to the sum of its row's exponentials. For softmax itself they replace the scores.
template <int K, int V, typename C>
__device__ __forceinline__ C exponential_sum(const RowExp<C>& row_exp, bool log, bool precise, C (&s)[K][V]) {
  C sum = 0;
  if (log) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C e[V];
#pragma unroll
      for (int i = 0; i < V; ++i) e[i] = row_exp.precise(s[k][i]);
      sum += tree(e, Sum{});
    }
  } else {
    exponentials(row_exp, precise, s);
#pragma unroll
    for (int k = 0; k < K; ++k) sum += tree(s[k], Sum{});
  }
  return sum;
}

// The end of every tier: from the row's maximum and sum to its results. Nothing kept: 0 (log: -inf).
template <typename T, bool kMasked>
struct Finish {
  using C = compute_t<T>;
  C max, factor;
  bool log;

  // The maximum to subtract: 0 where a mask keeps nothing, so that the exponentials are 0 and not NaN.
  static __device__ __forceinline__ C shift(C largest) {
    return kMasked && largest == minus_infinity<C>() ? C(0) : largest;
  }
  __device__ __forceinline__ Finish(const SoftmaxFwdParams& p, C largest, C sum) : max(shift(largest)), log(p.log) {
    const bool empty = kMasked && largest == minus_infinity<C>();
    if (log)
      factor = empty ? C(0) : ::log(sum);
    else
      factor = empty ? C(0) : C(1) / sum;
  }
  __device__ __forceinline__ C from_score(C s) const {
    return log ? (s - max) - factor : RowExp<C>(max).precise(s) * factor;
  }
  // In place, from what exponential_sum leaves.
  template <int K, int V>
  __device__ __forceinline__ void apply(C (&s)[K][V]) const {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < V; ++i) s[k][i] = log ? (s[k][i] - max) - factor : s[k][i] * factor;
  }
};

// Unit-stride rows without a mask: the common case, and few instructions beside the arithmetic. kAligned: rows on 16
// bytes, of whole vectors.
template <typename T, typename O, bool kLog, bool kAligned>
__global__ void __launch_bounds__(kRowsCtaThreads, 2)
    softmax_fwd_plain(const __grid_constant__ SoftmaxFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t r = row_group_index(shape.cluster) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int first = team.first(K), step = team.lanes;
  const int limit = active ? int(kept_columns(p, row)) : 0;

  Vectors<T, V, K> x;
  x.template load_unit_stride<kAligned>(aligned_row(p.x, row, sizeof(T)), first, step, limit);
  C s[K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) x.get(k, s[k]);
  if (p.scale != 1.0) {
    const C scale = C(p.scale);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] *= scale;
  }
  if ((first + (K - 1) * step + 1) * V > limit)
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int count = limit - (first + k * step) * V;
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = e < count ? s[k][e] : minus_infinity<C>();
    }
  C largest[1] = {minus_infinity<C>()};
#pragma unroll
  for (int k = 0; k < K; ++k) largest[0] = fmax(largest[0], tree(s[k], Max{}));
  team.reduce(largest, Max{}, minus_infinity<C>());

  C sum[1] = {exponential_sum(RowExp<C>(largest[0]), kLog, sizeof(O) > 2, s)};
  team.reduce(sum, Sum{}, C(0));
  const C factor = kLog ? ::log(sum[0]) : C(1) / sum[0];
  store_unit_stride<kAligned, O, V, K, C>(aligned_row(p.y, row, sizeof(O)), first, step, active ? int(p.cols) : 0,
                                          team.lane, [&](int k, C(&y)[V]) {
#pragma unroll
                                            for (int i = 0; i < V; ++i)
                                              y[i] = kLog ? (s[k][i] - largest[0]) - factor : s[k][i] * factor;
                                          });
}

// Long 16-bit rows on 16 bytes, of whole vectors, with results of their dtype, scale > 0, and not causal. What limits
// them is latency, the load's and in a cluster the exchanges', which only other rows of the SM fill. So the row stays
// as it was stored, and a thread does the work of two lanes of the plan: 64 elements in 32 registers, widened again for
// each of the three passes, and 128 KB of rows on an SM, in clusters 160, where softmax_fwd_plain has 64. The same sums
// in the same order. For 9.0, where it was timed: for others the registers do not suffice.
template <typename T, bool kScaled, bool kLog, TeamKind kTeam>
__global__ void __launch_bounds__(kRowsCtaThreads / 2, kTeam == TeamKind::kCluster && !kLog ? 5 : 4)
    softmax_fwd_wide(const __grid_constant__ SoftmaxFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  WideTeam<C, kTeam> team(shape);
  const int64_t row = row_group_index(kTeam == TeamKind::kCluster ? shape.cluster : 1);
  const int plan_lanes = shape.plan_lanes, vectors = int(p.cols) / V;
  int first = team.rank * K * plan_lanes + team.lane;
  const bool second = team.lane + team.lanes < plan_lanes;
  const auto vector = [&](int i, int k) { return first + i * team.lanes + k * plan_lanes; };  // k of lane i
  const auto exists = [&](int i, int k) { return vector(i, k) < vectors && (i == 0 || second); };

  Vectors<T, V, K> x[2];
  const char* const from = aligned_row(p.x, row, sizeof(T));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int w = 0; w < V / 2; ++w) x[i].pack[k].w[w] = kMinusInfinityPair<T>;
      if (exists(i, k)) load_unit<16>(x[i].pack[k].w, from + uint32_t(vector(i, k)) * 16u);
    }
  Pack<T, 2> top;
  top.w[0] = kMinusInfinityPair<T>;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int w = 0; w < V / 2; ++w) top.w[0] = max_pair<T>(top.w[0], x[i].pack[k].w[w]);
  C largest[1] = {fmax(to_compute<C>(top.element(0)), to_compute<C>(top.element(1)))};
  const C scale = C(p.scale);
  if constexpr (kScaled) largest[0] *= scale;  // rounding keeps the order
  team.reduce(largest, Max{}, minus_infinity<C>());

  RowExp<C> row_exp(largest[0]);
  if constexpr (!kLog) row_exp.max = row_exp.offset = row_exp.huge ? row_exp.max : row_exp.offset;  // one register
  const auto scores = [&](int i, int k, C(&s)[V]) {
    x[i].get(k, s);
    if constexpr (kScaled)
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] *= scale;
  };
  const auto exponential = [&](int i, int k, C(&s)[V]) {
    scores(i, k, s);
    if constexpr (kLog) {
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] = row_exp.precise(s[e]);
    } else if (row_exp.huge) {
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] = row_exp.coarse_huge(s[e]);
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] = row_exp.coarse(s[e]);
    }
  };
  C sums[1][2] = {}, sum[1];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C s[V];
      exponential(i, k, s);
      sums[0][i] += tree(s, Sum{});
    }
  team.sum(sums, sum);
  const C factor = kLog ? ::log(sum[0]) : C(1) / sum[0];
  x[0].forget(shape.zero);
  x[1].forget(shape.zero);
  first ^= int(shape.zero);  // nor is any place in the row kept, of which one was spilled
  char* const to = aligned_row(p.y, row, sizeof(T));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C y[V];
      if constexpr (kLog)
        scores(i, k, y);
      else
        exponential(i, k, y);
#pragma unroll
      for (int e = 0; e < V; ++e) y[e] = kLog ? (y[e] - largest[0]) - factor : y[e] * factor;
      Pack<T, V> out;
      out.round_from(y);
      if (exists(i, k)) store_unit<16>(to + uint32_t(vector(i, k)) * 16u, out.w);
    }
#endif
}

template <typename T, bool kMasked>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    softmax_fwd_resident(const __grid_constant__ SoftmaxFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>;
  constexpr int K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t row = row_group_index(shape.cluster) * shape.rows_per_cta + team.slot;
  const bool active = row < p.rows;
  const int first = team.first(K), step = team.lanes;

  C s[K][V];
  C largest[1] = {
      load_scores<T, kMasked>(p, active ? row : 0, 0, first, step, active ? int(kept_columns(p, row)) : 0, s)};
  team.reduce(largest, Max{}, minus_infinity<C>());
  const RowExp<C> row_exp(Finish<T, kMasked>::shift(largest[0]));
  C sum[1] = {exponential_sum(row_exp, p.log, element_size(p.y.dtype) > 2, s)};
  team.reduce(sum, Sum{}, C(0));
  Finish<T, kMasked>(p, largest[0], sum[0]).apply(s);
  store_vectors<T>(row_pointer(p.y, active ? row : 0), p.y.dtype, p.y.col_stride, first, step, active ? int(p.cols) : 0,
                   team.lane, team.lanes, s);
}

// Also fp64 rows of any length. A missing mask is a mask that keeps everything: the same bits.
template <typename T>
__global__ void __launch_bounds__(kRowsStreamingThreads, 1)
    softmax_fwd_streaming(const __grid_constant__ SoftmaxFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr int kFar = 1 << 24;  // more columns than a tile, few enough for 32-bit byte offsets
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t r = int64_t(blockIdx.x) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0, kept = active ? kept_columns(p, row) : 0;
  const int tile = team.lanes * K * V;

  C largest[1] = {minus_infinity<C>()}, sum[1] = {0};
#pragma unroll 1
  for (int64_t begin = 0; begin < kept; begin += tile) {
    C s[K][V];
    const C top = load_scores<T, true>(p, row, begin, team.lane, team.lanes, int(min(kept - begin, int64_t(kFar))), s);
    if (top > largest[0]) {
      sum[0] *= exp_of(largest[0] - top);
      largest[0] = top;
    }
    const C max = largest[0] == minus_infinity<C>() ? C(0) : largest[0];  // nothing kept yet: the exponentials are 0
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < V; ++i) s[k][i] = exp_of(s[k][i] - max);
      sum[0] += tree(s[k], Sum{});
    }
  }
  const C mine = largest[0];
  team.reduce(largest, Max{}, minus_infinity<C>());
  sum[0] *= mine == largest[0] ? C(1) : exp_of(mine - largest[0]);
  team.reduce(sum, Sum{}, C(0));
  const Finish<T, true> finish(p, largest[0], sum[0]);

#pragma unroll 1
  for (int64_t begin = 0; begin < p.cols; begin += tile) {
    C s[K][V];
    const int limit = int(max(min(kept - begin, int64_t(kFar)), int64_t(0)));
    load_scores<T, true>(p, row, begin, team.lane, team.lanes, limit, s);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < V; ++i) s[k][i] = finish.from_score(s[k][i]);
    // A tile is written by itself: bytes that belong to a unit of the next tile go out one by one.
    store_vectors<T>(row_pointer(p.y, row, begin), p.y.dtype, p.y.col_stride, team.lane, team.lanes,
                     active ? int(min(p.cols - begin, int64_t(tile))) : 0, team.lane, team.lanes, s);
  }
}

// Adjacent rows, a lane for each: the sums and the bits of the resident tiers (Columns).
template <typename T, bool kMasked>
__global__ void __launch_bounds__(32 * kRowsColumnsWarps, 1)
    softmax_fwd_columns(const __grid_constant__ SoftmaxFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Columns<C> team(shape);
  const int64_t r = int64_t(blockIdx.x) * 32 + team.lane;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(kept_columns(p, row)) : 0, step = team.lanes;
  const bool precise = element_size(p.y.dtype) > 2;

  C s[K][V], largest = minus_infinity<C>();
  const auto load = [&](int first) { return load_scores<T, kMasked, true>(p, row, 0, first, step, limit, s); };
  team.template each<K>([&](int first) { largest = fmax(largest, load(first)); });
  largest = team.reduce(largest, Max{});
  const RowExp<C> row_exp(Finish<T, kMasked>::shift(largest));

  const auto partial = [&](int first) {
    if (!team.held) load(first);
    return exponential_sum(row_exp, p.log, precise, s);
  };
  const C sum = team.template sum<K>(partial);
  const Finish<T, kMasked> finish(p, largest, sum);

  team.template each<K>([&](int first) {
    if (!team.held) {
      load(first);
      if (!p.log) exponentials(row_exp, precise, s);
    }
    finish.apply(s);
    store_vectors<T>(row_pointer(p.y, row), p.y.dtype, p.y.col_stride, first, step, active ? int(p.cols) : 0, 0, 1, s);
  });
}

// Up to 256 lanes softmax_fwd_plain is as fast, and so it is for as many rows as it holds at once in CTAs, two an SM.
template <typename T>
bool takes_wide(const SoftmaxFwdParams& p, const RowsPlan& plan, bool on_16, int arch) {
  const bool many = plan.cluster > 1 || p.rows > 2 * rows_resident_groups(1);
  return arch == 90 && on_16 && plan.lanes > kRowsCtaThreads / 2 && many && p.y.dtype == dtype_of<T>::value &&
         !p.causal && (p.log ? p.scale == 1.0 && plan.cluster > 1 : float(p.scale) > 0.0f);
}
template <typename T>
auto wide_kernel(const SoftmaxFwdParams& p, RowsTier tier) {
  if (tier == RowsTier::kCluster)
    return p.log            ? softmax_fwd_wide<T, false, true, TeamKind::kCluster>
           : p.scale == 1.0 ? softmax_fwd_wide<T, false, false, TeamKind::kCluster>
                            : softmax_fwd_wide<T, true, false, TeamKind::kCluster>;
  return p.scale == 1.0 ? softmax_fwd_wide<T, false, false, TeamKind::kCta>
                        : softmax_fwd_wide<T, true, false, TeamKind::kCta>;
}

// softmax_fwd_pair's: rows of up to 4096 columns.
template <typename T>
bool takes_pair(const SoftmaxFwdParams& p, const RowsPlan& plan, bool on_16, int arch) {
  return arch == 90 && on_16 && takes_pairs(plan) && p.y.dtype == dtype_of<T>::value && !p.causal && !p.log &&
         float(p.scale) > 0.0f;
}
template <typename T, int kWarps>
auto pair_kernel(bool whole) {
  return whole ? softmax_fwd_pair<T, true, kWarps> : softmax_fwd_pair<T, false, kWarps>;
}

}  // namespace

Status launch_softmax_fwd(const SoftmaxFwdParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return {};
  Status status;
  const Device* device = current_device(&status);
  if (!device) return status;
  const RowsLayout layout = layout_of(p.cols, p.x);
  const RowsPlan plan = plan_rows(RowsOp::kSoftmaxFwd, p.cols, p.x.dtype, p.x.dtype, layout, device->arch);
  const TeamShape shape = team_shape(plan, p.cols);
  const size_t scratch = size_t(team_scratch_bytes(shape, p.x.dtype == DType::kFloat64 ? 8 : 4));
  const int64_t ctas = (p.rows + plan.rows_per_cta - 1) / plan.rows_per_cta;
  return dispatch_row_dtype(p.x.dtype, [&]<typename T>() -> Status {
    [[maybe_unused]] const bool masked = p.mask.data != nullptr;
    if constexpr (sizeof(T) < 8) {
      if (plan.tier == RowsTier::kColumns)
        return launch_rows(masked ? softmax_fwd_columns<T, true> : softmax_fwd_columns<T, false>, device->arch, ctas,
                           plan.cta_threads(), 1, columns_scratch_bytes(plan), stream, p, shape);
      if (plan.tier != RowsTier::kStreaming && !masked && unit_stride_rows(p.x) && unit_stride_rows(p.y)) {
        // Instantiated for what occurs: results of the row's dtype at any alignment, fp32 results of aligned 16-bit
        // rows.
        const auto launch = [&](auto kernel) {
          return launch_rows(kernel, device->arch, ctas, plan.cta_threads(), plan.cluster, scratch, stream, p, shape);
        };
        const bool on_16 = p.cols % plan.vector == 0 && aligned_rows(p.x) && aligned_rows(p.y);
        if constexpr (sizeof(T) == 2) {
          if (takes_wide<T>(p, plan, on_16, device->arch)) {
            const TeamShape wide = wide_shape(shape);
            return launch_rows(wide_kernel<T>(p, plan.tier), device->arch, ctas, wide.lanes, plan.cluster, scratch,
                               stream, p, wide);
          }
          if (takes_pair<T>(p, plan, on_16, device->arch))
            return with_pair_warps(plan, [&]<int kWarps>() {
              return launch_pair(pair_kernel<T, kWarps>(rows_whole(plan, p.cols)), kWarps, device->arch, p, shape,
                                 stream);
            });
        }
        if (p.y.dtype == dtype_of<T>::value) {
          if (on_16) return launch(p.log ? softmax_fwd_plain<T, T, true, true> : softmax_fwd_plain<T, T, false, true>);
          return launch(p.log ? softmax_fwd_plain<T, T, true, false> : softmax_fwd_plain<T, T, false, false>);
        }
        if constexpr (sizeof(T) == 2)
          if (p.y.dtype == DType::kFloat32 && on_16)
            return launch(p.log ? softmax_fwd_plain<T, float, true, true> : softmax_fwd_plain<T, float, false, true>);
      }
      if (plan.tier != RowsTier::kStreaming)
        return launch_rows(masked ? softmax_fwd_resident<T, true> : softmax_fwd_resident<T, false>, device->arch, ctas,
                           plan.cta_threads(), plan.cluster, scratch, stream, p, shape);
    }
    return launch_rows(softmax_fwd_streaming<T>, device->arch, ctas, plan.cta_threads(), 1, scratch, stream, p, shape);
  });
}

}  // namespace ampkernels::cuda
