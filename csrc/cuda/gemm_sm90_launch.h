// What the host hands to the Hopper GEMM kernel, and how the launcher finds its instances.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "ampkernels/params.h"
#include "plan/divisor.h"
#include "plan/gemm_sm90_plan.h"

namespace ampkernels::cuda::sm90 {

enum class Chain : int32_t { kFp32 = 0, kFp32Chunked = 1, kFp16 = 2 };

struct Schedule90 {
  int32_t items;            // tiles, or pairs of tiles, times splits
  int32_t items_per_split;  // items_m * items_n
  int32_t items_m, items_n;
  int32_t step;  // CTAs, or clusters: the distance between two items of one of them
  int32_t group;
  bool group_along_n;
  Divisor per_split, per_group, of_group, of_last_group;  // items of a split, of a group; tiles of a group's outer side
  Share share;
  int32_t k_blocks;          // of 64
  int32_t blocks_per_split;  // k_blocks unless K is split
  int32_t chunk_blocks;
};

// A 16-bit (or, for d and a residual, fp32) row-major matrix. tma: `map` addresses it.
struct Out90 {
  CUtensorMap map;
  void* data;
  int64_t ld;
  bool tma;
  bool paired;  // two neighbouring elements may be written, or read, at once
};
struct In90 {
  CUtensorMap map;
  const void* data;
  int64_t ld;
  bool tma;
  bool paired;
};

struct Args90 {
  CUtensorMap a, b;
  Out90 d, pre, pre_up, act_out;
  In90 read;  // kActGrad's saved tensor, kResidual's residual
  VectorIn bias;
  Activation activation;
  bool saved_is_output, d_fp32, read_fp32;
  bool buffered;   // some result leaves through shared memory
  bool all_tma;    // every result is of 16 bits and leaves by TMA, and what is read comes so
  int32_t d_slot;  // d's buffer of a panel, after those of the other results
  int32_t m, n, n_out;
  float* partials;  // split K: (splits, m, n) fp32 sums instead of the epilogue
  Schedule90 schedule;
};

// What the host has found out about one instance, by device.
struct KernelState90 {
  static constexpr int kDevices = 64;
  std::atomic<bool> configured[kDevices];        // its shared memory limit is set
  std::atomic<int> resident_clusters[kDevices];  // clusters of two that fit the device at once; 0: not asked yet
};

// One instance of the kernel.
struct Kernel90 {
  const void* function = nullptr;
  int block_m = 0, block_n = 0, panel = 0;
  int smem_bytes = 0;
  int stages = 0;
  bool pingpong = false;
  KernelState90* state = nullptr;
};

// The instances, one table to a translation unit. Null function: no such instance.
Kernel90 find_bf16_linear(bool mn_major_a, bool mn_major_b, TileSm90 tile);
Kernel90 find_fp16_linear(bool mn_major_a, bool mn_major_b, TileSm90 tile);
Kernel90 find_bf16_fused(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile);
Kernel90 find_fp16_fused(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile);
Kernel90 find_bf16_chunked(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile);
Kernel90 find_fp16_chunked(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile);
Kernel90 find_fp16_half(bool mn_major_a, bool mn_major_b, EpilogueKind kind, TileSm90 tile);

}  // namespace ampkernels::cuda::sm90
