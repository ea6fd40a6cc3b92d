// layer_norm and rms_norm forward: s = x + residual, then y = (s - mean) * rstd * weight + bias, or s * rstd * (weight
// + offset); the sum, the mean and rstd as asked for.
//
// Layout. Resident tiers: the row of s in registers, in the compute type (rows_common.cuh), rms_fwd_pair with two
// threads to a lane; norm_fwd_wide, and norm_fwd_aligned in clusters: as it was stored; norm_fwd_pipeline: so in shared
// memory. Streaming tier: one CTA per row, read once for the mean, once for the deviations, once for the result.
// Statistics. Two passes over the row: the mean, then the deviations from it and their squares. The mean of the
// deviations corrects the rounding of the first mean, so a row whose mean is 10^4 times its deviation loses nothing. If
// a square overflows (|s| > 10^19 in fp32), the row is scaled by a power of two, exactly, and its statistics are taken
// again. Synchronisation. One barrier (or cluster barrier) per statistic. Rounding points. x + residual once; the sums
// (fp32, or fp64 for fp64 rows); 1 / sqrt; (s - mean), times rstd, times weight, plus bias, each once; then y and sum
// once, to their dtypes.
#include "norm_fwd_aligned.cuh"
#include "norm_fwd_flat.cuh"
#include "norm_fwd_pair.cuh"
#include "norm_fwd_pipeline.cuh"
#include "norm_fwd_shifted.cuh"
#include "norm_fwd_wide.cuh"

namespace ampkernels::cuda {
namespace {

// Vector j of unit-stride parameters.
template <bool kAligned, typename T, int V, typename C>
__device__ __forceinline__ void load_parameters(const VectorIn& w, int j, int limit, C (&v)[V]) {
  const auto load = [&]<typename D>() {
    Vectors<D, V, 1> stored;
    stored.template load_unit_stride<kAligned>(w.data, j, 1, limit);
    stored.get(0, v);
  };
  if (w.dtype == dtype_of<T>::value)
    load.template operator()<T>();
  else
    load.template operator()<Paired<T>>();
}

// Unit-stride rows and parameters: the common case, and few instructions beside the arithmetic. kAligned: all on 16
// bytes, rows of whole vectors.
template <typename T, typename O, bool kRms, bool kResidual, bool kAligned>
__global__ void __launch_bounds__(kRowsCtaThreads, kAligned ? 2 : 1)
    norm_fwd_plain(const __grid_constant__ NormFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t r = row_group_index(shape.cluster) * shape.rows_per_cta + team.slot;
  const bool active = r < p.rows;
  const int64_t row = active ? r : 0;
  const int limit = active ? int(p.cols) : 0, first = team.first(K), step = team.lanes;

  C s[K][V];
  const auto load = [&](C(&s)[K][V]) {
    Vectors<T, V, K> x;
    x.template load_unit_stride<kAligned>(aligned_row(p.x, row, sizeof(T)), first, step, limit);
    if constexpr (!kResidual) {
#pragma unroll
      for (int k = 0; k < K; ++k) x.get(k, s[k]);
      return;
    }
    const auto add = [&]<typename D>() {
      Vectors<D, V, K> residual;
      residual.template load_unit_stride<kAligned>(aligned_row(p.residual, row, sizeof(D)), first, step, limit);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C a[V];
        x.get(k, a);
        residual.get(k, s[k]);
#pragma unroll
        for (int e = 0; e < V; ++e) s[k][e] += a[e];
      }
      store_unit_stride<kAligned, D, V, K, C>(aligned_row(p.sum, row, sizeof(D)), first, step, limit, team.lane,
                                              [&](int k, C(&v)[V]) { copy(s[k], v); });
    };
    if (p.residual.dtype == dtype_of<T>::value)
      add.template operator()<T>();
    else
      add.template operator()<Paired<T>>();
  };
  const Statistics<C> stats = row_statistics<kRms>(p, team, C(shape.inverse), first, step, limit, s, load);
  if (active && team.lane == 0 && team.rank == 0) save_statistics(p, stats, row);
  const C offset = kRms ? C(p.weight_offset) : C(0);
  store_unit_stride<kAligned, O, V, K, C>(aligned_row(p.y, row, sizeof(O)), first, step, limit, team.lane,
                                          [&](int k, C(&y)[V]) {
                                            const int j = first + k * step;
                                            C w[V];
                                            stats.normalize(s[k], y);
                                            if (p.weight.data) {
                                              load_parameters<kAligned, T>(p.weight, j, limit, w);
#pragma unroll
                                              for (int e = 0; e < V; ++e) y[e] *= kRms ? w[e] + offset : w[e];
                                            }
                                            if (p.bias.data) {
                                              load_parameters<kAligned, T>(p.bias, j, limit, w);
#pragma unroll
                                              for (int e = 0; e < V; ++e) y[e] += w[e];
                                            }
                                          });
}

template <typename T, bool kRms>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    norm_fwd_resident(const __grid_constant__ NormFwdParams p, const TeamShape shape) {
  grid_launch_dependents();
  grid_dependency_wait();
  Team<compute_t<T>> team(shape);
  resident_row<T, kRms>(p, team, shape.inverse, row_group_index(shape.cluster) * shape.rows_per_cta + team.slot);
}

template <typename T>
__global__ void __launch_bounds__(kRowsStreamingThreads)
    norm_fwd_streaming(const __grid_constant__ NormFwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr int kFar = 1 << 24;  // more columns than a tile, few enough for 32-bit byte offsets
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
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
        store_vectors<T>(row_pointer(p.sum, row, begin), p.sum.dtype, p.sum.col_stride, lane, step, min(limit, tile),
                         lane, step, s);
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
#pragma unroll
        for (int k = 0; k < K; ++k)
#pragma unroll
          for (int e = 0; e < V; ++e) s[k][e] -= mean;
        apply<T>(p, stats, begin, lane, step, limit, s);
        store_vectors<T>(row_pointer(p.y, row, begin), p.y.dtype, p.y.col_stride, lane, step, min(limit, tile), lane,
                         step, s);
      }
    }
    if (pass == 2) break;
    team.reduce(sums, Sum{}, C(0));
    if (pass == 0) {
      mean = sums[1] * C(shape.inverse);
      continue;
    }
    stats = p.rms ? finish<true>(p, C(shape.inverse), mean, sums[1], sums[0], scale)
                  : finish<false>(p, C(shape.inverse), mean, sums[1], sums[0], scale);
    const bool again = scale == C(1) && overflowed(sums[0]);
    if (!__any_sync(0xffffffffu, again)) continue;
    if (again) scale = down_scale<C>();
    mean = 0;
    pass = p.rms ? 0 : -1;
  }
  if (active && lane == 0) save_statistics(p, stats, row);
}

// What norm_fwd_plain asks for.
template <typename T>
bool plain(const NormFwdParams& p) {
  const auto dtype = [](DType d) { return d == dtype_of<T>::value || d == dtype_of<Paired<T>>::value; };
  const auto parameters = [&](const VectorIn& v) { return !v.data || (v.stride == 1 && dtype(v.dtype)); };
  return unit_stride_rows(p.x) && unit_stride_rows(p.y) && dtype(p.y.dtype) && parameters(p.weight) &&
         parameters(p.bias) &&
         (!p.residual.data || (unit_stride_rows(p.residual) && dtype(p.residual.dtype) && p.sum.data &&
                               unit_stride_rows(p.sum) && p.sum.dtype == p.residual.dtype));
}
bool on_16(const VectorIn& v) {
  return reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
}
bool aligned(const NormFwdParams& p, int vector) {
  return p.cols % vector == 0 && aligned_rows(p.x) && aligned_rows(p.y) && on_16(p.weight) && on_16(p.bias) &&
         (!p.residual.data || (aligned_rows(p.residual) && aligned_rows(p.sum)));
}

// Parameters, all that the op has, and results of the row's own dtype.
template <typename T>
bool own_dtypes(const NormFwdParams& p) {
  const auto own = [](const VectorIn& v) { return v.data && v.dtype == dtype_of<T>::value; };
  return p.y.dtype == dtype_of<T>::value && own(p.weight) && (p.rms ? !p.bias.data : own(p.bias));
}

// Where norm_fwd_aligned is taken: layer_norm, but with a residual in clusters only; rms_norm in warps and clusters,
// without a residual (docs/rows.md, What set the numbers).
bool takes_aligned(const NormFwdParams& p, RowsTier tier) {
  return p.residual.data ? !p.rms && tier == RowsTier::kCluster : !p.rms || tier != RowsTier::kCta;
}
template <typename T, bool kWhole>
auto aligned_kernel(const NormFwdParams& p, RowsTier tier) {
  if (tier == RowsTier::kCluster)
    return p.residual.data ? norm_fwd_aligned<T, false, true, kWhole, TeamKind::kCluster>
           : p.rms         ? norm_fwd_aligned<T, true, false, kWhole, TeamKind::kCluster>
                           : norm_fwd_aligned<T, false, false, kWhole, TeamKind::kCluster>;
  if (tier == RowsTier::kCta) return norm_fwd_aligned<T, false, false, kWhole, TeamKind::kCta>;
  return p.rms ? norm_fwd_aligned<T, true, false, kWhole, TeamKind::kWarp>
               : norm_fwd_aligned<T, false, false, kWhole, TeamKind::kWarp>;
}

// layer_norm_flat's: layer_norm of more than 1024 and up to 8192 columns, without a residual, every lane whole. Few
// rows, and rows whose lanes are not, are as fast or faster in norm_fwd_aligned.
bool takes_flat(const NormFwdParams& p, const RowsPlan& plan, bool whole, int arch) {
  return arch == 90 && whole && !p.rms && plan.tier == RowsTier::kCta && plan.lanes <= kRowsCtaThreads / 2 &&
         p.rows > 2 * rows_resident_groups(1) && !p.residual.data;
}
template <typename T>
auto flat_kernel(int warps) {
  return warps == 2 ? layer_norm_flat<T, 2> : warps == 4 ? layer_norm_flat<T, 4> : layer_norm_flat<T, 8>;
}

// rms_fwd_pair's: rms_norm of up to 4096 columns, without a residual, every lane whole. In warps only rows that fill
// every SM twice over: fewer are faster in norm_fwd_aligned.
bool takes_pair(const NormFwdParams& p, const RowsPlan& plan, bool whole, int arch) {
  const bool many = plan.tier == RowsTier::kCta || p.rows * plan.lanes > 768 * rows_resident_groups(1);
  return arch == 90 && whole && p.rms && takes_pairs(plan) && many && !p.residual.data;
}

// norm_fwd_wide's: long rows without a residual, layer_norm in a CTA, rms_norm in clusters of 2 and 4, too. Two of them
// an SM has held as they are, so few are faster so.
bool takes_wide(const NormFwdParams& p, const RowsPlan& plan, int arch) {
  const bool longer = plan.lanes > kRowsCtaThreads / 2 && plan.cluster <= (p.rms ? 4 : 1);
  return arch == 90 && longer && !p.residual.data && p.rows > 2 * rows_resident_groups(plan.cluster);
}
template <typename T>
auto wide_kernel(const NormFwdParams& p, RowsTier tier) {
  if (tier == RowsTier::kCluster) return norm_fwd_wide<T, true, TeamKind::kCluster>;
  return p.rms ? norm_fwd_wide<T, true, TeamKind::kCta> : norm_fwd_wide<T, false, TeamKind::kCta>;
}

// norm_fwd_pipeline's: the longer ones, at least four to a group. A row takes three turns, so few rows are faster each
// by itself.
bool takes_pipeline(const NormFwdParams& p, const RowsPlan& plan, int arch) {
  const bool longer = plan.cluster > (p.rms ? 4 : 1);
  return arch == 90 && longer && !p.residual.data && p.rows >= 4 * rows_resident_groups(plan.cluster);
}
template <typename T, bool kWhole>
auto pipeline_kernel(const NormFwdParams& p) {
  return p.rms ? norm_fwd_pipeline<T, true, kWhole> : norm_fwd_pipeline<T, false, kWhole>;
}

// norm_fwd_shifted's: rows at any alignment and of any length from a vector on, parameters on 16 bytes.
template <typename T>
bool takes_shifted(const NormFwdParams& p) {
  return p.cols >= kVector<T> && on_16(p.weight) && on_16(p.bias) &&
         (!p.residual.data || p.residual.dtype == dtype_of<T>::value);
}
template <typename T, TeamKind kTeam>
auto shifted_kernel(const NormFwdParams& p) {
  if (p.residual.data) return p.rms ? norm_fwd_shifted<T, true, true, kTeam> : norm_fwd_shifted<T, false, true, kTeam>;
  return p.rms ? norm_fwd_shifted<T, true, false, kTeam> : norm_fwd_shifted<T, false, false, kTeam>;
}
template <typename T>
auto shifted_kernel(const NormFwdParams& p, RowsTier tier) {
  return tier == RowsTier::kCluster ? shifted_kernel<T, TeamKind::kCluster>(p)
         : tier == RowsTier::kCta   ? shifted_kernel<T, TeamKind::kCta>(p)
                                    : shifted_kernel<T, TeamKind::kWarp>(p);
}

template <typename T, typename O, bool kAligned>
auto plain_kernel(const NormFwdParams& p) {
  if (p.residual.data)
    return p.rms ? norm_fwd_plain<T, O, true, true, kAligned> : norm_fwd_plain<T, O, false, true, kAligned>;
  return p.rms ? norm_fwd_plain<T, O, true, false, kAligned> : norm_fwd_plain<T, O, false, false, kAligned>;
}

}  // namespace

Status launch_norm_fwd(const NormFwdParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return {};
  Status status;
  const Device* device = current_device(&status);
  if (!device) return status;
  const RowsPlan plan = plan_rows(RowsOp::kNormFwd, p.cols, p.x.dtype, p.x.dtype, layout_of(p.cols, p.x), device->arch);
  const TeamShape shape = team_shape(plan, p.cols);
  const size_t scratch = size_t(team_scratch_bytes(shape, p.x.dtype == DType::kFloat64 ? 8 : 4));
  const int64_t ctas = (p.rows + plan.rows_per_cta - 1) / plan.rows_per_cta;
  return dispatch_row_dtype(p.x.dtype, [&]<typename T>() -> Status {
    if constexpr (sizeof(T) < 8)
      if (plan.tier != RowsTier::kStreaming) {
        const auto launch = [&](auto kernel) {
          return launch_rows(kernel, device->arch, ctas, plan.cta_threads(), plan.cluster, scratch, stream, p, shape);
        };
        // Instantiated for what occurs: results of the row's dtype at any alignment, fp32 results of aligned 16-bit
        // rows.
        if (plain<T>(p)) {
          const bool aligned_16 = aligned(p, plan.vector);
          if constexpr (sizeof(T) == 2) {
            const bool own = own_dtypes<T>(p), fast = own && aligned_16, whole = rows_whole(plan, p.cols);
            if (own && !aligned_16 && takes_shifted<T>(p)) return launch(shifted_kernel<T>(p, plan.tier));
            if (fast && takes_pair(p, plan, whole, device->arch))
              return with_pair_warps(plan, [&]<int kWarps>() {
                return launch_pair(rms_fwd_pair<T, kWarps>, kWarps, device->arch, p, shape, stream);
              });
            if (fast && takes_wide(p, plan, device->arch)) {
              const TeamShape wide = wide_shape(shape);
              return launch_rows(wide_kernel<T>(p, plan.tier), device->arch, ctas, wide.lanes, plan.cluster, scratch,
                                 stream, p, wide);
            }
            if (fast && takes_pipeline(p, plan, device->arch)) {
              const int64_t most = rows_resident_groups(plan.cluster), turns = (p.rows + most - 1) / most;
              return launch_rows(whole ? pipeline_kernel<T, true>(p) : pipeline_kernel<T, false>(p), device->arch,
                                 (p.rows + turns - 1) / turns, plan.lanes, plan.cluster,
                                 size_t(pipeline_shared_bytes(shape)), stream, p, shape);
            }
            if (fast && takes_flat(p, plan, whole, device->arch)) {
              const int warps = flat_warps(plan);
              return launch_rows(flat_kernel<T>(warps), device->arch, ctas, plan.lanes, 1,
                                 size_t(flat_scratch_bytes(warps)), stream, p, shape);
            }
            if (fast && takes_aligned(p, plan.tier))
              return launch(whole ? aligned_kernel<T, true>(p, plan.tier) : aligned_kernel<T, false>(p, plan.tier));
          }
          if (p.y.dtype == dtype_of<T>::value)
            return launch(aligned_16 ? plain_kernel<T, T, true>(p) : plain_kernel<T, T, false>(p));
          if constexpr (sizeof(T) == 2)
            if (aligned_16) return launch(plain_kernel<T, float, true>(p));
        }
        return launch(p.rms ? norm_fwd_resident<T, true> : norm_fwd_resident<T, false>);
      }
    return launch_rows(norm_fwd_streaming<T>, device->arch, ctas, plan.cta_threads(), 1, scratch, stream, p, shape);
  });
}

}  // namespace ampkernels::cuda
