// Host side of the Hopper GEMM: tensor maps, instance lookup, launch. The instances are in gemm_sm90_*.cu.
#include "cuda/gemm_sm90.h"

#include <cstring>

#include "cuda/gemm_sm90_launch.h"
#include "cuda/gemm_sm90_maps.h"

namespace ampkernels::cuda {
namespace {

using namespace sm90;

bool operand_map(MapCache& cache, const GemmOperand& o, int64_t outer, int64_t k, bool mn_major, int box_rows,
                 bool half, CUtensorMap* map) {
  const MapKey key = mn_major ? MapKey{o.data, outer, k, o.stride_k, 64, 64, half, 0}
                              : MapKey{o.data, k, outer, o.stride_outer, 64, box_rows, half, 0};
  return cache.get(key, map);
}

// A TMA store ends at a multiple of 16 bytes, not at the last column: what lies behind it there would be overwritten
// (the first columns of `up` behind `gate`, where F is an odd multiple of 4).
bool tma_can_store(const void* data, int64_t ld, int64_t rows, int64_t cols) {
  return cols % 8 == 0 && tma_can_address(data, ld, rows, cols);
}

bool output(MapCache& cache, void* data, int64_t ld, int64_t rows, int64_t cols, int panel, bool half, Out90* out) {
  out->data = data;
  out->ld = ld;
  out->tma = data != nullptr && tma_can_store(data, ld, rows, cols);
  return !out->tma || cache.get(MapKey{data, cols, rows, ld, panel, 64, half, panel == 32}, &out->map);
}

// ------------------------------------------------------------------------------------------------------------- problem

struct Problem {
  Major a = Major::kNone, b = Major::kNone;
  Chain chain = Chain::kFp32;
};

Problem classify(const GemmParams& p) {
  Problem q;
  q.a = major_of(p.a, p.m, p.k);
  q.b = major_of(p.b, p.n, p.k);
  q.chain = p.accumulate.dtype == DType::kFloat16 ? Chain::kFp16
            : p.accumulate.chunk > 0              ? Chain::kFp32Chunked
                                                  : Chain::kFp32;
  return q;
}

// The instances with a residual read and write by TMA alone, in forward's order of operands; kLinear's take it
// anywhere.
EpilogueKind instance_kind(const GemmParams& p, const Problem& q, int splits) {
  if (p.kind != EpilogueKind::kResidual) return p.kind;
  const bool all_tma = p.residual_dtype == p.dtype && p.d_dtype == p.dtype &&
                       tma_can_address(p.residual, p.ldresidual, p.m, p.n) && tma_can_store(p.d, p.ldd, p.m, p.n) &&
                       (p.pre == nullptr || tma_can_store(p.pre, p.ldpre, p.m, p.n));
  return all_tma && splits == 1 && q.a == Major::kK && q.b == Major::kK ? EpilogueKind::kResidual
                                                                        : EpilogueKind::kLinear;
}

Kernel90 find(const GemmParams& p, const Problem& q, EpilogueKind kind, TileSm90 tile) {
  const bool bf16 = p.dtype == DType::kBFloat16, mn_a = q.a == Major::kMn, mn_b = q.b == Major::kMn;
  if (q.chain == Chain::kFp16) return bf16 ? Kernel90{} : find_fp16_half(mn_a, mn_b, kind, tile);
  if (q.chain == Chain::kFp32Chunked) return (bf16 ? find_bf16_chunked : find_fp16_chunked)(mn_a, mn_b, kind, tile);
  if (kind == EpilogueKind::kLinear) return (bf16 ? find_bf16_linear : find_fp16_linear)(mn_a, mn_b, tile);
  return (bf16 ? find_bf16_fused : find_fp16_fused)(mn_a, mn_b, kind, tile);
}

cudaError_t configure(const Kernel90& kernel, int device) {
  if (device < KernelState90::kDevices && kernel.state->configured[device].load(std::memory_order_acquire))
    return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
  if (error == cudaSuccess && device < KernelState90::kDevices) {
    kernel.state->configured[device].store(true, std::memory_order_release);
  }
  return error;
}

// A persistent grid must not exceed what is resident at once: the rest would run as a second wave. GPCs with an odd
// number of multiprocessors leave one of them out.
cudaError_t resident_clusters(const Kernel90& kernel, const cudaLaunchConfig_t& config, int device, int* count) {
  *count =
      device < KernelState90::kDevices ? kernel.state->resident_clusters[device].load(std::memory_order_relaxed) : 0;
  if (*count != 0) return cudaSuccess;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(count, kernel.function, &config);
  if (error == cudaSuccess && device < KernelState90::kDevices) kernel.state->resident_clusters[device].store(*count);
  return error;
}

}  // namespace

bool gemm_sm90_supports(const GemmParams& p) {
  if (p.m < 1 || p.n < 1 || p.k < 1 || p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) return false;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return false;
  if (p.accumulate.dtype == DType::kFloat16 && p.dtype != DType::kFloat16) return false;
  if (p.accumulate.chunk % 64 != 0 && p.accumulate.chunk < p.k) return false;
  if (p.d_dtype != p.dtype && p.d_dtype != DType::kFloat32) return false;
  const Problem q = classify(p);
  if (q.a == Major::kNone || q.b == Major::kNone) return false;
  for (int tile = 0; tile < kTilesSm90; ++tile) {
    if (find(p, q, instance_kind(p, q, 1), TileSm90(tile)).function != nullptr) return true;
  }
  return false;
}

int gemm_sm90_splits(const GemmParams& p) {
  return plan_gemm_sm90(p, multiprocessors(device_of_this_thread())).splits;
}

size_t gemm_sm90_workspace_bytes(const GemmParams& p) {
  const int splits = gemm_sm90_splits(p);
  return splits > 1 ? size_t(splits) * size_t(p.m) * size_t(p.n) * sizeof(float) : 0;
}

Status launch_gemm_sm90(const GemmParams& p, cudaStream_t stream) {
  return launch_gemm_sm90(p, plan_gemm_sm90(p, multiprocessors(device_of_this_thread())), stream);
}

Status launch_gemm_sm90(const GemmParams& p, const GemmSm90Plan& plan, cudaStream_t stream) {
  MapCache& cache = map_cache();
  const int device = device_of_this_thread();
  const Problem q = classify(p);
  const EpilogueKind kind = instance_kind(p, q, plan.splits);
  const Kernel90 kernel = find(p, q, kind, plan.tile);
  if (kernel.function == nullptr) return {"gemm: no Hopper kernel for this tile and problem", 0};
  if (const cudaError_t error = configure(kernel, device); error != cudaSuccess) {
    return {"gemm: setting the shared memory limit failed", int(error)};
  }

  const bool gated = p.kind == EpilogueKind::kGated;
  const bool half = p.dtype == DType::kFloat16;
  const int64_t n_out = gated ? p.n / 2 : p.n;
  Args90 args;
  std::memset(static_cast<void*>(&args), 0, sizeof(args));
  args.bias = p.bias;
  args.activation = p.activation;
  args.saved_is_output = p.saved_is_output;
  args.d_fp32 = p.d_dtype == DType::kFloat32;
  args.m = int32_t(p.m);
  args.n = int32_t(p.n);
  args.n_out = int32_t(n_out);
  const bool residual = p.kind == EpilogueKind::kResidual;
  args.read.data = residual ? p.residual : p.saved;
  args.read.ld = residual ? p.ldresidual : p.ldsaved;
  args.read_fp32 = residual && p.residual_dtype == DType::kFloat32;
  args.read.paired = reinterpret_cast<uintptr_t>(args.read.data) % (args.read_fp32 ? 8 : 4) == 0 &&
                     args.read.ld % 2 == 0 && p.n % 2 == 0;

  bool mapped = operand_map(cache, p.a, p.m, p.k, q.a == Major::kMn, kernel.block_m / 2, half, &args.a) &&
                operand_map(cache, p.b, p.n, p.k, q.b == Major::kMn, kernel.block_n / 2, half, &args.b);
  if (args.d_fp32) {
    args.d.data = p.d;
    args.d.ld = p.ldd;
    args.d.paired = reinterpret_cast<uintptr_t>(p.d) % 8 == 0 && p.ldd % 2 == 0;
  } else {
    mapped = mapped && output(cache, p.d, p.ldd, p.m, n_out, kernel.panel, half, &args.d);
  }
  if (p.pre != nullptr) {
    mapped = mapped && output(cache, p.pre, p.ldpre, p.m, n_out, kernel.panel, half, &args.pre);
    if (gated) {
      mapped = mapped && output(cache, static_cast<uint16_t*>(p.pre) + n_out, p.ldpre, p.m, n_out, kernel.panel, half,
                                &args.pre_up);
    }
  }
  if (args.read.data != nullptr && !args.read_fp32 && tma_can_address(args.read.data, args.read.ld, p.m, p.n)) {
    args.read.tma = true;
    mapped =
        mapped && cache.get(MapKey{args.read.data, p.n, p.m, args.read.ld, kernel.panel, 64, half, kernel.panel == 32},
                            &args.read.map);
  }
  if (p.act_out != nullptr) {
    mapped = mapped && output(cache, p.act_out, p.ldact_out, p.m, p.n, kernel.panel, half, &args.act_out);
  }
  args.d_slot = (p.pre != nullptr ? (gated ? 2 : 1) : 0) + (p.act_out != nullptr ? 1 : 0);
  args.buffered = plan.splits == 1 && (args.d.tma || args.pre.tma || args.pre_up.tma || args.act_out.tma);
  args.all_tma = plan.splits == 1 && kind == p.kind && args.d.tma &&
                 (p.pre == nullptr || (args.pre.tma && (!gated || args.pre_up.tma))) &&
                 (p.act_out == nullptr || args.act_out.tma) && (args.read.data == nullptr || args.read.tma);
  if (!mapped) return {"gemm: encoding a tensor map failed", 0};

  Schedule90& s = args.schedule;
  const int out_n = gated ? kernel.block_n / 2 : kernel.block_n;
  s.items_m = int32_t((p.m + kernel.block_m - 1) / kernel.block_m);
  s.items_n = int32_t((n_out + out_n - 1) / out_n);
  s.share = plan.share;
  if (s.share == Share::kB) s.items_m = (s.items_m + 1) / 2;
  if (s.share == Share::kA) s.items_n = (s.items_n + 1) / 2;
  s.group = plan.group;
  s.group_along_n = plan.group_along_n;
  s.k_blocks = int32_t((p.k + 63) / 64);
  s.chunk_blocks =
      p.accumulate.chunk > 0 ? int32_t(std::min<int64_t>((p.accumulate.chunk + 63) / 64, s.k_blocks)) : s.k_blocks;
  s.blocks_per_split =
      plan.splits > 1 && p.accumulate.chunk > 0 ? s.chunk_blocks : (s.k_blocks + plan.splits - 1) / plan.splits;
  s.items_per_split = s.items_m * s.items_n;
  const int outer = s.group_along_n ? s.items_n : s.items_m, inner = s.group_along_n ? s.items_m : s.items_n;
  s.per_split = Divisor(uint32_t(s.items_per_split));
  s.per_group = Divisor(uint32_t(s.group * inner));
  s.of_group = Divisor(uint32_t(s.group));
  s.of_last_group = Divisor(uint32_t(outer % s.group == 0 ? s.group : outer % s.group));
  s.items = s.items_per_split * ((s.k_blocks + s.blocks_per_split - 1) / s.blocks_per_split);
  if (plan.splits > 1) {
    if (p.workspace == nullptr) return {"gemm: a split of K needs its workspace", 0};
    if (s.items != s.items_per_split * plan.splits) return {"gemm: a split of K without any k", 0};
    args.partials = static_cast<float*>(p.workspace);
  }

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(std::min(multiprocessors(device), s.items)));
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = size_t(kernel.smem_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  if (s.share != Share::kNone) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = 2;
    attribute[0].val.clusterDim.y = 1;
    attribute[0].val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    config.gridDim = dim3(unsigned(multiprocessors(device) / 2 * 2));
    int clusters = 0;
    if (const cudaError_t error = resident_clusters(kernel, config, device, &clusters);
        error != cudaSuccess || clusters == 0) {
      return {"gemm: no cluster of two fits the device", int(error)};
    }
    config.gridDim = dim3(unsigned(std::min(clusters, s.items) * 2));
  }
  s.step = int32_t(config.gridDim.x) / (s.share == Share::kNone ? 1 : 2);
  void* arguments[1] = {&args};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel.function, arguments);
  if (error != cudaSuccess) return {"gemm: the launch failed", int(error)};
  return {};
}

}  // namespace ampkernels::cuda
