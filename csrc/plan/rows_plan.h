// The plan of a row kernel: how many lanes share a row, and how it is held. A pure function of the row (op, length,
// dtypes, layout) and the architecture, never of the number of rows: everything here shapes the order in which a row is
// summed, so a row keeps its bits whatever stands beside it. No CUDA headers: tested on any machine, printed by
// `explain`.
#pragma once

#include <cstdio>
#include <string>

#include "ampkernels/types.h"

namespace ampkernels {

enum class RowsOp : int32_t { kSoftmaxFwd, kSoftmaxBwd, kNormFwd, kNormBwd };

enum class RowsLayout : int32_t {
  kUnit,     // elements of a row are adjacent; any base alignment
  kColumns,  // rows are adjacent, elements of a row are not: softmax over a dimension other than the last
  kGather,   // neither
};

enum class RowsTier : int32_t {
  kSubwarp,    // several rows per warp, shuffles only
  kWarp,       // one row per warp
  kCta,        // one row per CTA (norm backward: per group of warps), one barrier per reduction
  kCluster,    // one row per cluster of CTAs, reduced through distributed shared memory
  kStreaming,  // one row per CTA, read again for each pass
  kColumns,    // softmax: a row per lane; a warp does the work of one lane of the tiers above, the same sums
};

constexpr const char* rows_tier_name(RowsTier tier) {
  switch (tier) {
    case RowsTier::kSubwarp:
      return "rows per warp";
    case RowsTier::kWarp:
      return "warp per row";
    case RowsTier::kCta:
      return "CTA per row";
    case RowsTier::kCluster:
      return "cluster per row";
    case RowsTier::kStreaming:
      return "streaming";
    case RowsTier::kColumns:
      return "columns";
  }
  return "unknown";
}

constexpr int kRowsColumnsWarps = 16;  // the CTA of the columns tier, at most: 32 rows, 16 lanes of each

struct RowsPlan {
  RowsTier tier = RowsTier::kStreaming;
  int vector = 8;              // elements per vector: 16 bytes of the row's dtype
  int vectors_per_thread = 4;  // vectors of the row that one thread holds
  int lanes = 32;              // threads of one CTA that share a row (columns: that would, were the row contiguous)
  int rows_per_cta = 1;
  int cluster = 1;     // CTAs that share a row (columns: that would)
  int stages = 0;      // norm backward: rows in flight per lane group (cp.async ring)
  int row_groups = 0;  // norm backward: partial sums of dweight and dbias, at most
  const char* reason = "";

  int cta_threads() const {
    const bool turns = tier == RowsTier::kColumns && lanes > kRowsColumnsWarps;
    return (turns ? kRowsColumnsWarps : lanes) * rows_per_cta;
  }
};

// A thread holds 64 bytes of a row, whatever the dtype: forward in the compute type (32 registers of a 16-bit row),
// backward two rows as they are stored.
constexpr int rows_vector(DType dtype) {
  return int(16 / dtype_size(dtype));
}
constexpr int kRowsVectorsPerThread = 4;

// The dtype, beside its own, for which the kernels of a row have 16-byte accesses to its other operands.
constexpr DType rows_paired_dtype(DType dtype) {
  return dtype == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32;
}

constexpr int kRowsCtaThreads = 512;        // the most threads of a CTA that share a row
constexpr int kRowsStreamingThreads = 256;  // the CTA of the streaming tier, which may have twice the registers
constexpr int kRowsSmallCtaThreads = 128;   // the CTA of the warp tiers
constexpr int kRowsMaxCluster = 16;         // 8 is portable; 16 is allowed by opt-in on 9.0 and 10.0

// arch: 80, 86, 90, ... Shared memory that one CTA may have, in bytes.
constexpr int rows_max_shared(int arch) {
  return arch == 80 || arch == 87 ? 163 * 1024 : arch >= 90 && arch < 120 ? 227 * 1024 : 99 * 1024;
}

// Shared memory of norm backward beside the ring: the reductions', per byte of the compute type: [phase][value][warp].
constexpr int kNormBwdScratchBytes = 2 * 2 * 16 * kRowsMaxCluster;

inline int64_t norm_bwd_stage_bytes(const RowsPlan& plan, int64_t s_size, int64_t dy_size) {
  const int64_t elements = int64_t(plan.lanes) * plan.vectors_per_thread * plan.vector;
  return plan.rows_per_cta * ((elements * s_size + 32) + (elements * dy_size + 32));
}
inline int64_t norm_bwd_weight_bytes(const RowsPlan& plan, int64_t compute_size) {
  return int64_t(plan.lanes) * plan.vectors_per_thread * plan.vector * compute_size;
}
inline int64_t norm_bwd_shared_bytes(const RowsPlan& plan, int64_t s_size, int64_t dy_size, int64_t compute_size) {
  return plan.stages * norm_bwd_stage_bytes(plan, s_size, dy_size) + norm_bwd_weight_bytes(plan, compute_size) +
         kNormBwdScratchBytes * compute_size + 16 +
         plan.rows_per_cta * plan.stages * 8;  // and a barrier per slot and stage
}

// CTAs or clusters that an H200 holds at once with one CTA an SM (cudaOccupancyMaxActiveClusters).
constexpr int rows_resident_groups(int cluster) {
  return cluster == 1 ? 132 : cluster == 2 ? 66 : cluster == 4 ? 30 : cluster == 8 ? 15 : 7;
}

// `other` is the dtype of the second operand held with the row: dy in norm backward, else the row's own.
inline RowsPlan plan_rows(RowsOp op, int64_t cols, DType dtype, DType other, RowsLayout layout, int arch) {
  RowsPlan plan;
  plan.vector = rows_vector(dtype);
  plan.vectors_per_thread = kRowsVectorsPerThread;
  const int64_t size = dtype_size(dtype), other_size = dtype_size(other);
  const int64_t compute_size = size == 8 ? 8 : 4;

  int max_threads = kRowsCtaThreads;
  if (op == RowsOp::kNormBwd) {
    if (size == 2 && other_size > size) plan.vectors_per_thread = 2;  // two stages of the wider dy must fit
    if (rows_max_shared(arch) < 200 * 1024) max_threads = kRowsCtaThreads / 2;
  }
  const int64_t per_thread = int64_t(plan.vector) * plan.vectors_per_thread;
  const int64_t needed = (cols + per_thread - 1) / per_thread;  // threads that hold the row

  if ((op == RowsOp::kSoftmaxBwd && other != dtype) ||
      (op == RowsOp::kNormBwd && other != dtype && other != rows_paired_dtype(dtype))) {
    plan.tier = RowsTier::kStreaming;
    plan.lanes = kRowsStreamingThreads;
    plan.reason = "the two rows differ in dtype";
  } else if (needed <= 32) {
    int lanes = 1;
    while (lanes < needed) lanes *= 2;
    plan.tier = lanes == 32 ? RowsTier::kWarp : RowsTier::kSubwarp;
    plan.lanes = lanes;
    plan.rows_per_cta = (op == RowsOp::kNormBwd ? max_threads : kRowsSmallCtaThreads) / lanes;
    plan.reason = "the row fits the registers of one warp";
  } else if (needed <= max_threads) {
    plan.tier = RowsTier::kCta;
    plan.lanes = int((needed + 31) / 32 * 32);
    plan.rows_per_cta = op == RowsOp::kNormBwd ? max_threads / plan.lanes : 1;
    plan.reason = "the row fits one CTA";
  } else if (arch >= 90 && needed <= int64_t(max_threads) * (arch < 120 ? kRowsMaxCluster : 8)) {
    plan.tier = RowsTier::kCluster;
    int cluster = 2;
    while (int64_t(max_threads) * cluster < needed) cluster *= 2;
    plan.cluster = cluster;
    plan.lanes = int(((needed + cluster - 1) / cluster + 31) / 32 * 32);
    plan.reason = "the row fits the CTAs of one cluster";
  } else {
    plan.tier = RowsTier::kStreaming;
    plan.lanes = kRowsStreamingThreads;
    plan.reason =
        arch >= 90 ? "longer than a cluster holds" : "longer than a CTA holds, and no clusters on this architecture";
  }

  if (size == 8 && op != RowsOp::kNormBwd) {  // small teams too, but no tier of its own: fp64 is for checking
    if (plan.lanes > kRowsStreamingThreads || plan.tier == RowsTier::kCluster) {
      plan.cluster = 1;
      plan.lanes = kRowsStreamingThreads;
    }
    plan.tier = RowsTier::kStreaming;
    plan.reason = "fp64 rows are read again for each pass";
  }
  // The layout chooses the threads, never the sum: lanes, vectors and cluster stay those of a contiguous row.
  const bool softmax = op == RowsOp::kSoftmaxFwd || op == RowsOp::kSoftmaxBwd;
  if (softmax && layout == RowsLayout::kColumns && plan.tier != RowsTier::kStreaming) {
    plan.tier = RowsTier::kColumns;
    plan.rows_per_cta = 32;
    plan.reason = "adjacent rows: one lane per row keeps the accesses coalesced";
  }
  if (op == RowsOp::kNormBwd) {
    plan.row_groups = rows_resident_groups(plan.cluster);
    if (plan.tier == RowsTier::kStreaming) plan.row_groups = 16;
    plan.stages = 4;
    while (plan.stages > 1 &&
           norm_bwd_shared_bytes(plan, size, other_size, compute_size) > rows_max_shared(arch) - 1024)
      --plan.stages;
  }
  return plan;
}

inline std::string to_string(const RowsPlan& plan) {
  char text[320];
  std::snprintf(text, sizeof text, "%s: %d lanes x %d vectors of %d, %d rows per CTA, cluster %d, stages %d (%s)",
                rows_tier_name(plan.tier), plan.lanes, plan.vectors_per_thread, plan.vector, plan.rows_per_cta,
                plan.cluster, plan.stages, plan.reason);
  return text;
}

}  // namespace ampkernels
