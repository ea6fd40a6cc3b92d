// One build's kernels: kernels.h's functions as pointers, and how dispatch.cpp finds them.
#pragma once

#include "kernels.h"

namespace ampkernels::cpu {

struct KernelTable {
  const char* name;
  void (*softmax_fwd_rows)(const SoftmaxFwdParams&, int64_t, int64_t);
  void (*softmax_bwd_rows)(const SoftmaxBwdParams&, int64_t, int64_t);
  void (*norm_fwd_rows)(const NormFwdParams&, int64_t, int64_t);
  void (*norm_bwd_block)(const NormBwdParams&, int64_t);
  void (*norm_bwd_columns)(const NormBwdParams&, int64_t, int64_t);
  void (*act_fwd_rows)(const ActFwdParams&, int64_t, int64_t);
  void (*act_bwd_block)(const ActBwdParams&, int64_t);
  void (*act_bwd_columns)(const ActBwdParams&, int64_t, int64_t);
};

#if defined(__x86_64__)
#define AMPKERNELS_CPU_X86 1
namespace avx512_bf16 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx2 {
extern const KernelTable table;
}
#endif
namespace baseline {
extern const KernelTable table;
}

// Rows to a block of column sums: at most 256, so that a million rows sum as accurately as a thousand; at least 16, so
// that the partials are small beside the rows themselves. A function of the number of rows alone.
constexpr int64_t sum_block_rows(int64_t rows) {
  const int64_t n = (rows + 63) / 64;
  return n < 16 ? 16 : n > 256 ? 256 : n;
}
constexpr int64_t sum_blocks(int64_t rows) {
  return (rows + sum_block_rows(rows) - 1) / sum_block_rows(rows);
}

}  // namespace ampkernels::cpu
