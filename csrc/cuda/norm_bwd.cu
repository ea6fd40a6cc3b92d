// layer_norm and rms_norm backward. With h = (s - mean) * rstd and g = dy * (weight + offset):
//   dx = rstd * (g - mean(g) - h * mean(g * h)) + dsum,   dweight = sum over rows of dy * h,   dbias = sum of dy.
//
// Layout. Resident tiers: persistent CTAs. A CTA holds `slots` groups of lanes; each takes every R-th row, R = all
// slots of the grid, and keeps the sums of its columns in registers over all of its rows. Rows of s and dy arrive in a
// ring of stages, as they lie in memory, by bulk copies (from 9.0 on: aligned rows, and 16-bit rows at any alignment)
// or by cp.async (16-byte units, whatever the row's alignment), and are read from shared memory twice, so a row costs
// no registers while it is in flight (16-bit rows off 16 bytes: once). Weights are widened once into shared memory. The
// number of row groups and which rows each adds depend on (rows, cols, dtypes) and the architecture only: slots of a
// CTA are added in order, then CTAs in order, by a second kernel of one pass over partials that are still in L2.
// Streaming tier: dx by a CTA per row, the column sums by a second reading. Synchronisation. One barrier per row for
// both means; one more where lanes read units that other lanes copied by cp.async (rows off 16 bytes, or no whole
// number of vectors). Rounding points. d = s - mean, h = d * rstd; dy * weight; the sums (fp32, or fp64 for fp64 s) and
// the row's two means; g - mean(g), one fma with h, the product with rstd, plus dsum; then dx once to its dtype, and
// dweight, dbias once to theirs.
#include "norm_bwd_aligned.cuh"
#include "norm_bwd_resident.cuh"
#include "norm_bwd_shifted.cuh"
#include "norm_bwd_streaming.cuh"

namespace ampkernels::cuda {
namespace {

// Adds the groups' partial sums, groups w, w + 16, ... by warp w, then the warps in order.
template <typename C>
__global__ void __launch_bounds__(512)
    column_sums(const C* partial, int groups, int64_t cols, const VectorOut dweight, const VectorOut dbias) {
  __shared__ C sums[16][33];
  grid_launch_dependents();
  grid_dependency_wait();
  const int64_t tiles = (cols + 31) / 32;
  const bool later = blockIdx.x >= tiles;  // the second of two outputs
  const bool bias = later || !dweight.data;
  void* const out = bias ? dbias.data : dweight.data;
  const DType dtype = bias ? dbias.dtype : dweight.dtype;
  const int64_t stride = bias ? dbias.stride : dweight.stride;
  if (later) partial += groups * cols;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t c = (blockIdx.x - (later ? tiles : 0)) * 32 + lane;
  C sum = 0;
  if (c < cols)
#pragma unroll 4
    for (int g = warp; g < groups; g += 16) sum += partial[g * cols + c];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && c < cols) {
    sum = 0;
#pragma unroll
    for (int w = 0; w < 16; ++w) sum += sums[w][lane];
    store_as(out, dtype, c * stride, sum);
  }
}

RowsPlan plan_of(const NormBwdParams& p, int arch) {
  return plan_rows(RowsOp::kNormBwd, p.cols, p.s.dtype, p.dy.dtype, layout_of(p.cols, p.s), arch);
}

int groups_of(const NormBwdParams& p, const RowsPlan& plan) {
  const int slots = plan.tier == RowsTier::kStreaming ? 1 : plan.rows_per_cta;
  return int(std::min<int64_t>(plan.row_groups, (p.rows + slots - 1) / slots));
}

template <typename T, typename D>
bool aligned(const NormBwdParams& p, const RowsPlan& plan) {
  const auto mine = [](const auto& m) { return aligned_rows(m) && m.dtype == dtype_of<T>::value; };
  return plan.stages > 1 && p.cols % plan.vector == 0 && mine(p.s) && aligned_rows(p.dy) &&
         p.dy.dtype == dtype_of<D>::value && (!p.dx.data || mine(p.dx)) && (!p.dsum.data || mine(p.dsum));
}

template <typename T, typename D>
auto resident_kernel(const NormBwdParams& p, const RowsPlan& plan) {
  if constexpr (sizeof(T) < 8)
    if (aligned<T, D>(p, plan))
      return p.rms ? norm_bwd_resident<T, D, true, true> : norm_bwd_resident<T, D, false, true>;
  return p.rms ? norm_bwd_resident<T, D, true, false> : norm_bwd_resident<T, D, false, false>;
}

template <typename T, typename W, bool kDsum>
auto aligned_kernel(bool rms, RowsTier tier) {
  if (tier == RowsTier::kCluster)
    return rms ? norm_bwd_aligned<T, W, true, kDsum, TeamKind::kCluster>
               : norm_bwd_aligned<T, W, false, kDsum, TeamKind::kCluster>;
  if constexpr (sizeof(W) > sizeof(T))  // shorter rows have room for fp32 weights
    if (tier != RowsTier::kCta)
      return rms ? norm_bwd_aligned<T, W, true, kDsum, TeamKind::kWarp>
                 : norm_bwd_aligned<T, W, false, kDsum, TeamKind::kWarp>;
  return rms ? norm_bwd_aligned<T, W, true, kDsum, TeamKind::kCta>
             : norm_bwd_aligned<T, W, false, kDsum, TeamKind::kCta>;
}

// 16-bit rows of T at any alignment and of any length. One lane has all of a row of up to 32 columns, in no whole
// units.
template <typename T>
bool takes_shifted(const NormBwdParams& p, const RowsPlan& plan) {
  const auto mine = [](const auto& m) { return unit_stride_rows(m) && m.dtype == dtype_of<T>::value; };
  return plan.stages > 1 && plan.lanes > 1 && p.rows < 1 << 30 && mine(p.s) && mine(p.dy) &&
         (!p.dx.data || mine(p.dx)) && !p.dsum.data;
}

template <typename T>
auto shifted_kernel(bool rms, RowsTier tier) {
  if (tier == RowsTier::kCluster)
    return rms ? norm_bwd_shifted<T, true, TeamKind::kCluster> : norm_bwd_shifted<T, false, TeamKind::kCluster>;
  if (tier == RowsTier::kCta)
    return rms ? norm_bwd_shifted<T, true, TeamKind::kCta> : norm_bwd_shifted<T, false, TeamKind::kCta>;
  return rms ? norm_bwd_shifted<T, true, TeamKind::kWarp> : norm_bwd_shifted<T, false, TeamKind::kWarp>;
}

template <typename T>
Status launch_streaming_dx(const NormBwdParams& p, const RowsPlan& plan, int arch, cudaStream_t stream) {
  const TeamShape shape{plan.lanes, 1, 1, 1.0 / double(p.cols)};
  return launch_rows(norm_bwd_streaming_dx<T>, arch, p.rows, plan.lanes, 1,
                     size_t(team_scratch_bytes(shape, sizeof(compute_t<T>))), stream, p, shape);
}

template <typename C>
Status launch_column_sums(const NormBwdParams& p, int groups, int arch, cudaStream_t stream) {
  const int outputs = (p.dweight.data ? 1 : 0) + (p.dbias.data ? 1 : 0);
  if (outputs == 0) return {};
  return launch_rows(column_sums<C>, arch, (p.cols + 31) / 32 * outputs, 512, 1, 0, stream,
                     static_cast<const C*>(p.workspace), groups, p.cols, p.dweight, p.dbias);
}

}  // namespace

size_t norm_bwd_workspace_bytes(const NormBwdParams& p) {
  Status status;
  const Device* device = current_device(&status);
  if (!device || p.rows == 0) return 0;
  const int outputs = (p.dweight.data ? 1 : 0) + (p.dbias.data ? 1 : 0);
  const int64_t size = p.s.dtype == DType::kFloat64 ? 8 : 4;
  return size_t(outputs) * size_t(groups_of(p, plan_of(p, device->arch))) * size_t(p.cols * size);
}

Status launch_norm_bwd(const NormBwdParams& p, cudaStream_t stream) {
  if (p.cols == 0) return {};
  Status status;
  const Device* device = current_device(&status);
  if (!device) return status;
  const int arch = device->arch;
  const RowsPlan plan = plan_of(p, arch);
  const int groups = groups_of(p, plan);
  return dispatch_row_dtype(p.s.dtype, [&]<typename T>() -> Status {
    using C = compute_t<T>;
    if (groups > 0 && plan.tier == RowsTier::kStreaming) {
      if (p.dx.data) status = launch_streaming_dx<T>(p, plan, arch, stream);
      if (status.ok() && (p.dweight.data || p.dbias.data))
        status = launch_rows(norm_bwd_streaming_sums<C>, arch, (p.cols + 127) / 128 * groups, 128, 1, 0, stream, p);
    } else if (groups > 0) {
      const int64_t elements = int64_t(plan.lanes) * plan.vectors_per_thread * plan.vector;
      const int64_t s_size = dtype_size(p.s.dtype), dy_size = dtype_size(p.dy.dtype);
      BwdShape shape;
      shape.team = team_shape(plan, p.cols);
      shape.groups = groups;
      shape.step = groups * plan.rows_per_cta;
      shape.stages = plan.stages;
      shape.s_bytes = int(elements * s_size + 32);
      shape.dy_bytes = int(elements * dy_size + 32);
      const int64_t stage_bytes = norm_bwd_stage_bytes(plan, s_size, dy_size);
      const int64_t scratch_bytes = team_scratch_bytes(shape.team, sizeof(C));
      int64_t weight_bytes = norm_bwd_weight_bytes(plan, sizeof(C));
      // norm_bwd_aligned: weights as they are stored, where that makes room for a third stage. norm_bwd_shifted:
      // statistics beside the barriers, dx after them, and a stage less where they leave no room for it.
      bool fast = false, stored = false, shifted = false;
      int64_t out_bytes = 0;
      if constexpr (sizeof(T) == 2) {
        fast = arch >= 90 && aligned<T, T>(p, plan);
        // On 16 bytes, too, layer_norm of 8192 columns and more is faster by norm_bwd_shifted (docs/rows.md).
        const bool longer = !p.rms && plan.lanes >= kRowsCtaThreads / 2;
        shifted = arch >= 90 && (!fast || longer) && takes_shifted<T>(p, plan);
        fast = fast && !shifted;
        if (shifted) out_bytes = shifted_out_bytes(plan);
        stored = fast && plan.stages == 2 && p.weight.data && p.weight.stride == 1 &&
                 p.weight.dtype == dtype_of<T>::value &&
                 3 * (stage_bytes + plan.rows_per_cta * 8) + weight_bytes / 2 + scratch_bytes <= rows_max_shared(arch);
      }
      if (stored) {
        shape.stages = 3;
        weight_bytes /= 2;
      }
      if (shifted)
        while (shape.stages * (stage_bytes + plan.rows_per_cta * 16) + weight_bytes + scratch_bytes + out_bytes >
               rows_max_shared(arch))
          --shape.stages;
      const int64_t ring = shape.stages * stage_bytes;
      const int64_t merge =
          plan.rows_per_cta * elements * int64_t(sizeof(C));  // the slots' sums, after the ring's time
      shape.weight_at = int(std::max(ring, merge));
      shape.scratch_at = int(shape.weight_at + weight_bytes);
      shape.barriers_at = int(shape.scratch_at + scratch_bytes);
      shape.statistics_at = shape.barriers_at + plan.rows_per_cta * shape.stages * 8;
      shape.out_at = shape.statistics_at + (shifted ? plan.rows_per_cta * shape.stages * 8 : 0);
      const size_t shared = size_t(shape.out_at + out_bytes);
      const auto launch = [&](auto kernel) {
        return launch_rows(kernel, arch, groups, plan.cta_threads(), plan.cluster, shared, stream, p, shape);
      };
      if constexpr (sizeof(T) == 2) {
        if (stored)
          status = launch(p.dsum.data ? aligned_kernel<T, T, true>(p.rms, plan.tier)
                                      : aligned_kernel<T, T, false>(p.rms, plan.tier));
        else if (fast)
          status = launch(p.dsum.data ? aligned_kernel<T, float, true>(p.rms, plan.tier)
                                      : aligned_kernel<T, float, false>(p.rms, plan.tier));
        else if (shifted)
          status = launch(shifted_kernel<T>(p.rms, plan.tier));
        else
          status = plan.vectors_per_thread == 2 ? launch(resident_kernel<T, float>(p, plan))
                                                : launch(resident_kernel<T, T>(p, plan));
      } else {
        status = launch(resident_kernel<T, T>(p, plan));
      }
    }
    if (!status.ok()) return status;
    return launch_column_sums<C>(p, groups, arch, stream);
  });
}

}  // namespace ampkernels::cuda
