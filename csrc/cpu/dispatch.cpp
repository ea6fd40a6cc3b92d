// kernels.h: the choice of a build at run time, and what does not depend on it.
#include <atomic>
#include <cstring>

#include "kernel_table.h"

namespace ampkernels::cpu {
namespace {

const KernelTable* supported(const char* name) {
#if defined(AMPKERNELS_CPU_X86)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  if (std::strcmp(name, avx512_bf16::table.name) == 0) return has_bf16 ? &avx512_bf16::table : nullptr;
  if (std::strcmp(name, avx512::table.name) == 0) return has_avx512 ? &avx512::table : nullptr;
  if (std::strcmp(name, avx2::table.name) == 0) return has_avx2 ? &avx2::table : nullptr;
#endif
  return std::strcmp(name, baseline::table.name) == 0 ? &baseline::table : nullptr;
}

const KernelTable* best() {
  for (const char* name : {"avx512_bf16", "avx512", "avx2"}) {
    if (const KernelTable* table = supported(name)) return table;
  }
  return &baseline::table;
}

std::atomic<const KernelTable*>& chosen() {
  static std::atomic<const KernelTable*> table{best()};
  return table;
}

const KernelTable& kernels() {
  return *chosen().load(std::memory_order_relaxed);
}

int64_t partial_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : 4;
}

}  // namespace

const char* isa() {
  return kernels().name;
}

bool set_isa(const char* name) {
  const KernelTable* table = supported(name);
  if (table != nullptr) chosen().store(table, std::memory_order_relaxed);
  return table != nullptr;
}

void softmax_fwd_rows(const SoftmaxFwdParams& p, int64_t begin, int64_t end) {
  kernels().softmax_fwd_rows(p, begin, end);
}
void softmax_bwd_rows(const SoftmaxBwdParams& p, int64_t begin, int64_t end) {
  kernels().softmax_bwd_rows(p, begin, end);
}

void norm_fwd_rows(const NormFwdParams& p, int64_t begin, int64_t end) {
  kernels().norm_fwd_rows(p, begin, end);
}

int64_t norm_bwd_blocks(const NormBwdParams& p) {
  return sum_blocks(p.rows);
}
size_t norm_bwd_workspace_bytes(const NormBwdParams& p) {
  if (p.dweight.data == nullptr && p.dbias.data == nullptr) return 0;
  return size_t(sum_blocks(p.rows) * 2 * p.cols * partial_size(p.s.dtype));
}
void norm_bwd_block(const NormBwdParams& p, int64_t block) {
  kernels().norm_bwd_block(p, block);
}
void norm_bwd_columns(const NormBwdParams& p, int64_t begin, int64_t end) {
  kernels().norm_bwd_columns(p, begin, end);
}

int64_t act_bwd_blocks(const ActBwdParams& p) {
  return sum_blocks(p.rows);
}
size_t act_bwd_workspace_bytes(const ActBwdParams& p) {
  if (p.dbias.data == nullptr) return 0;
  return size_t(sum_blocks(p.rows) * (p.gated ? 2 : 1) * p.cols * partial_size(p.dy.dtype));
}
void act_bwd_block(const ActBwdParams& p, int64_t block) {
  kernels().act_bwd_block(p, block);
}
void act_bwd_columns(const ActBwdParams& p, int64_t begin, int64_t end) {
  kernels().act_bwd_columns(p, begin, end);
}

void act_fwd_rows(const ActFwdParams& p, int64_t begin, int64_t end) {
  kernels().act_fwd_rows(p, begin, end);
}

}  // namespace ampkernels::cpu
