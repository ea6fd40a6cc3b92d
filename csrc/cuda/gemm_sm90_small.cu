// Host side of the Hopper GEMM for few rows, and its instances.
#include "cuda/gemm_sm90_small.h"

#include <algorithm>
#include <cstring>

#include "cuda/gemm_sm90_maps.h"
#include "cuda/gemm_sm90_small.cuh"

namespace ampkernels::cuda {
namespace {

using namespace sm90;

constexpr int kDevices = 64;

struct Instance {
  const void* function;
  std::atomic<bool>* configured;  // its shared memory limit is set, by device
};

template <typename T, int kRows, int kTeams, bool kAdders>
Instance instance() {
  static std::atomic<bool> configured[kDevices];
  return {reinterpret_cast<const void*>(&gemm_sm90_small_kernel<T, kRows, kTeams, kAdders>), configured};
}

// Those that the plan asks for: 112 and 128 rows are for a B that fills the device without a split of k.
template <typename T>
Instance instance_of(const GemmSmallPlan& plan) {
  if (plan.teams == 2) {
    if (plan.rows == 32) return instance<T, 32, 2, true>();
    if (plan.rows == 64) return instance<T, 64, 2, true>();
  } else if (plan.ranks > 1) {
    if (plan.rows == 32) return instance<T, 32, 1, true>();
    if (plan.rows == 64) return instance<T, 64, 1, true>();
  } else {
    if (plan.rows == 32) return instance<T, 32, 1, false>();
    if (plan.rows == 64) return instance<T, 64, 1, false>();
    if (plan.rows == 112) return instance<T, 112, 1, false>();
    if (plan.rows == 128) return instance<T, 128, 1, false>();
  }
  return {};
}

cudaError_t configure(const Instance& kernel, int device) {
  if (device < kDevices && kernel.configured[device].load(std::memory_order_acquire)) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmallSmem);
  // Otherwise the driver may leave an SM no more shared memory than one CTA takes.
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess && device < kDevices) kernel.configured[device].store(true, std::memory_order_release);
  return error;
}

}  // namespace

bool gemm_sm90_small_supports(const GemmParams& p) {
  if (p.m < 1 || p.m > kSmallRows || p.n < 1 || p.k < 1 || p.n > kMaxExtent || p.k > kMaxExtent) return false;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return false;
  if (p.accumulate.dtype != DType::kFloat32) return false;
  if (p.accumulate.chunk % 64 != 0 && p.accumulate.chunk < p.k) return false;
  if (p.kind == EpilogueKind::kActGrad) return false;
  return major_of(p.a, p.m, p.k) == Major::kK && major_of(p.b, p.n, p.k) == Major::kK;
}

Status launch_gemm_sm90_small(const GemmParams& p, cudaStream_t stream) {
  const int device = device_of_this_thread();
  const GemmSmallPlan plan = plan_gemm_small(p, multiprocessors(device));
  const bool half = p.dtype == DType::kFloat16, gated = p.kind == EpilogueKind::kGated;
  const Instance kernel = half ? instance_of<half_t>(plan) : instance_of<bfloat16_t>(plan);
  if (kernel.function == nullptr) return {"gemm: no kernel for this plan of few rows"};
  if (const cudaError_t error = configure(kernel, device); error != cudaSuccess) {
    return {"gemm: setting the shared memory limit failed", int(error)};
  }

  SmallArgs args;
  args.p = p;
  args.gated = gated;
  args.n_out = int32_t(gated ? p.n / 2 : p.n);
  args.x_rows = plan.x_rows;
  args.ranks = plan.ranks;
  args.sources = plan.ranks * plan.teams;
  args.boxes = plan.boxes;
  args.stages = plan.stages;
  args.stage_bytes = plan.boxes * (plan.x_rows + plan.rows) * 128;
  args.prefetch = plan.prefetch;
  args.held = plan.held();
  args.k_blocks = int32_t((p.k + 63) / 64);
  args.chunk_blocks = int32_t(plan.chunk_blocks);
  args.chunks = (args.k_blocks + args.chunk_blocks - 1) / args.chunk_blocks;
  if (!map_cache().get(MapKey{p.a.data, p.k, p.m, p.a.stride_outer, 64, plan.x_rows, half, 0, 1}, &args.x) ||
      !map_cache().get(MapKey{p.b.data, p.k, p.n, p.b.stride_outer, 64, gated ? plan.rows / 2 : plan.rows, half, 0, 1},
                       &args.w)) {
    return {"gemm: encoding a tensor map failed"};
  }

  // The rings, of which a single team's also holds the sums on their way out; the last box of A with the 64 rows that
  // WGMMA reads; then what the sources send.
  const bool adders = args.sources > 1;
  const int rings = plan.teams * args.stages * args.stage_bytes,
            last_x = rings - args.stage_bytes + (args.boxes - 1) * args.x_rows * 128;
  args.pieces_offset = kSmallBarrierBytes + std::max({rings, last_x + 64 * 128, adders ? 0 : 64 * (plan.rows + 8) * 4});
  const int smem = args.pieces_offset + plan.piece_bytes();
  if (smem > kSmallSmem || args.stages < 2 || plan.teams * args.stages > kSmallMaxStages) {
    return {"gemm: a ring that does not fit"};
  }

  const int64_t columns = gated ? plan.rows / 2 : plan.rows;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned((args.n_out + columns - 1) / columns * plan.ranks));
  config.blockDim = dim3(unsigned(small_threads(plan.teams, adders)));
  config.dynamicSmemBytes = size_t(smem);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = unsigned(plan.ranks);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = plan.ranks > 1 ? 2 : 1;
  void* arguments[1] = {&args};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (error != cudaSuccess) return {"gemm: the launch failed", int(error)};
  return {};
}

}  // namespace ampkernels::cuda
