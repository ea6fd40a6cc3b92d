// Host side of the Hopper GEMM: tensor maps, instance lookup, launch. The instances are in gemm_sm90_*.cu.
#include "cuda/gemm_sm90.h"

#include <cuda.h>

#include <cstring>
#include <mutex>

#include "cuda/gemm_sm90_launch.h"

namespace ampkernels::cuda {
namespace {

using namespace sm90;

constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 4096;  // tile coordinates are 32 bits

// ---------------------------------------------------------------------------------------------------------- tensor
// maps

// A row-major matrix as TMA sees it: `inner` elements to a row, rows `ld` elements apart, moved in boxes.
struct MapKey {
  const void* data;
  int64_t inner, outer, ld;
  int32_t box_inner, box_outer;
  int32_t half;       // fp16 rather than bf16
  int32_t swizzle64;  // rather than 128
};

decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      pointer = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(pointer);
  }();
  return function;
}

bool encode(const MapKey& key, CUtensorMap* map) {
  const auto function = encode_function();
  if (function == nullptr) return false;
  const cuuint64_t dims[2] = {cuuint64_t(key.inner), cuuint64_t(key.outer)};
  // A single row has no stride; TMA still wants a legal one.
  const cuuint64_t strides[1] = {cuuint64_t(key.outer == 1 ? (key.inner * 2 + 15) / 16 * 16 : key.ld * 2)};
  const cuuint32_t box[2] = {cuuint32_t(key.box_inner), cuuint32_t(key.box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  return function(map, key.half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                  const_cast<void*>(key.data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  key.swizzle64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Encoding costs more than a launch can spare for each of up to six maps, so each thread keeps the latest: sets of
// four, the least recently used of a set replaced.
class MapCache {
 public:
  bool get(const MapKey& key, CUtensorMap* map) {
    uint64_t h = reinterpret_cast<uintptr_t>(key.data) ^ uint64_t(key.outer) * 0x9e3779b97f4a7c15u ^
                 uint64_t(key.inner) << 20 ^ uint64_t(key.box_outer) << 40 ^ uint64_t(key.ld) << 8;
    h *= 0x9e3779b97f4a7c15u;
    Entry* const set = entries_ + (h >> 60) * kWays;
    Entry* oldest = set;
    for (int i = 0; i < kWays; ++i) {
      if (set[i].used != 0 && same(set[i].key, key)) {
        set[i].used = ++clock_;
        *map = set[i].map;
        return true;
      }
      if (set[i].used < oldest->used) oldest = set + i;
    }
    if (!encode(key, map)) return false;
    *oldest = Entry{*map, key, ++clock_};
    return true;
  }

 private:
  static constexpr int kSets = 16, kWays = 4;
  struct Entry {
    CUtensorMap map;
    MapKey key;
    uint64_t used;
  };
  static bool same(const MapKey& a, const MapKey& b) {
    return a.data == b.data && a.inner == b.inner && a.outer == b.outer && a.ld == b.ld && a.box_inner == b.box_inner &&
           a.box_outer == b.box_outer && a.half == b.half && a.swizzle64 == b.swizzle64;
  }
  Entry entries_[kSets * kWays] = {};
  uint64_t clock_ = 0;
};

// Rows of `cols` elements, `ld` apart: 16-byte aligned, not overlapping.
bool tma_can_address(const void* data, int64_t ld, int64_t rows, int64_t cols) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         (rows == 1 || (ld >= cols && ld % 8 == 0 && ld < (int64_t(1) << 38)));
}

enum class Major { kNone, kK, kMn };

// How TMA can read an operand of `outer` rows and `k` columns.
Major major_of(const GemmOperand& o, int64_t outer, int64_t k) {
  if ((o.stride_k == 1 || k == 1) && tma_can_address(o.data, o.stride_outer, outer, k)) return Major::kK;
  if ((o.stride_outer == 1 || outer == 1) && tma_can_address(o.data, o.stride_k, k, outer)) return Major::kMn;
  return Major::kNone;
}

bool operand_map(MapCache& cache, const GemmOperand& o, int64_t outer, int64_t k, bool mn_major, int box_rows,
                 bool half, CUtensorMap* map) {
  const MapKey key = mn_major ? MapKey{o.data, outer, k, o.stride_k, 64, 64, half, 0}
                              : MapKey{o.data, k, outer, o.stride_outer, 64, box_rows, half, 0};
  return cache.get(key, map);
}

bool output(MapCache& cache, void* data, int64_t ld, int64_t rows, int64_t cols, int panel, bool half, Out90* out) {
  out->data = data;
  out->ld = ld;
  // A TMA store ends at a multiple of 16 bytes, not at the last column: what lies behind it there would be overwritten
  // (the first columns of `up` behind `gate`, where F is an odd multiple of 4).
  out->tma = data != nullptr && cols % 8 == 0 && tma_can_address(data, ld, rows, cols);
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

Kernel90 find(const GemmParams& p, const Problem& q, TileSm90 tile) {
  const bool bf16 = p.dtype == DType::kBFloat16, mn_a = q.a == Major::kMn, mn_b = q.b == Major::kMn;
  if (q.chain == Chain::kFp16) return bf16 ? Kernel90{} : find_fp16_half(mn_a, mn_b, p.kind, tile);
  if (q.chain == Chain::kFp32Chunked) return (bf16 ? find_bf16_chunked : find_fp16_chunked)(mn_a, mn_b, p.kind, tile);
  if (p.kind == EpilogueKind::kLinear) return (bf16 ? find_bf16_linear : find_fp16_linear)(mn_a, mn_b, tile);
  return (bf16 ? find_bf16_fused : find_fp16_fused)(mn_a, mn_b, p.kind, tile);
}

int device_of_this_thread() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : 0;
}

int multiprocessors(int device) {
  static std::atomic<int> count[64];
  int n = device < 64 ? count[device].load(std::memory_order_relaxed) : 0;
  if (n == 0) {
    if (cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) n = 132;
    if (device < 64) count[device].store(n, std::memory_order_relaxed);
  }
  return n;
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
  if (p.beta && (p.d_dtype != DType::kFloat32 || p.kind != EpilogueKind::kLinear)) return false;
  const Problem q = classify(p);
  if (q.a == Major::kNone || q.b == Major::kNone) return false;
  for (int tile = 0; tile < kTilesSm90; ++tile) {
    if (find(p, q, TileSm90(tile)).function != nullptr) return true;
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
  thread_local MapCache cache;
  const int device = device_of_this_thread();
  const Problem q = classify(p);
  const Kernel90 kernel = find(p, q, plan.tile);
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
  args.beta = p.beta;
  args.m = int32_t(p.m);
  args.n = int32_t(p.n);
  args.n_out = int32_t(n_out);
  args.saved.data = p.saved;
  args.saved.ld = p.ldsaved;
  args.saved.paired = reinterpret_cast<uintptr_t>(p.saved) % 4 == 0 && p.ldsaved % 2 == 0 && p.n % 2 == 0;

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
  if (p.act_out != nullptr) {
    mapped = mapped && output(cache, p.act_out, p.ldact_out, p.m, p.n, kernel.panel, half, &args.act_out);
  }
  args.d_slot = (p.pre != nullptr ? (gated ? 2 : 1) : 0) + (p.act_out != nullptr ? 1 : 0);
  args.buffered = plan.splits == 1 && (args.d.tma || args.pre.tma || args.pre_up.tma || args.act_out.tma);
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
  s.blocks_per_split = (s.k_blocks + plan.splits - 1) / plan.splits;
  s.chunk_blocks =
      p.accumulate.chunk > 0 ? int32_t(std::min<int64_t>((p.accumulate.chunk + 63) / 64, s.k_blocks)) : s.k_blocks;
  s.items_per_split = s.items_m * s.items_n;
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
