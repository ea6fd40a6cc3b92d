// Tensor maps of row-major matrices, cached, and the device's numbers: what the launchers of the Hopper GEMMs share.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "ampkernels/params.h"

namespace ampkernels::cuda::sm90 {

inline constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 4096;  // tile coordinates are 32 bits

// A row-major matrix as TMA sees it: `inner` elements to a row, rows `ld` elements apart, moved in boxes.
struct MapKey {
  const void* data;
  int64_t inner, outer, ld;
  int32_t box_inner, box_outer;
  int32_t half;        // fp16 rather than bf16
  int32_t swizzle64;   // rather than 128
  int32_t narrow = 0;  // misses read 128 bytes, not 256: what comes in boxes of 128 by many CTAs at once
};

inline decltype(&cuTensorMapEncodeTiled) encode_function() {
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

inline bool encode(const MapKey& key, CUtensorMap* map) {
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
                  key.narrow ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
           a.box_outer == b.box_outer && a.half == b.half && a.swizzle64 == b.swizzle64 && a.narrow == b.narrow;
  }
  Entry entries_[kSets * kWays] = {};
  uint64_t clock_ = 0;
};

// One to a thread, for all kernels.
inline MapCache& map_cache() {
  thread_local MapCache cache;
  return cache;
}

// Rows of `cols` elements, `ld` apart: 16-byte aligned, not overlapping.
inline bool tma_can_address(const void* data, int64_t ld, int64_t rows, int64_t cols) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         (rows == 1 || (ld >= cols && ld % 8 == 0 && ld < (int64_t(1) << 38)));
}

enum class Major { kNone, kK, kMn };

// How TMA can read an operand of `outer` rows and `k` columns.
inline Major major_of(const GemmOperand& o, int64_t outer, int64_t k) {
  if ((o.stride_k == 1 || k == 1) && tma_can_address(o.data, o.stride_outer, outer, k)) return Major::kK;
  if ((o.stride_outer == 1 || outer == 1) && tma_can_address(o.data, o.stride_k, k, outer)) return Major::kMn;
  return Major::kNone;
}

inline int device_of_this_thread() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : 0;
}

inline int multiprocessors(int device) {
  static std::atomic<int> count[64];
  int n = device < 64 ? count[device].load(std::memory_order_relaxed) : 0;
  if (n == 0) {
    if (cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) n = 132;
    if (device < 64) count[device].store(n, std::memory_order_relaxed);
  }
  return n;
}

}  // namespace ampkernels::cuda::sm90
