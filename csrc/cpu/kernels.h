// The CPU kernels: torch-free, each over a range of rows (or of blocks), so that the binding supplies the threads.
// Each has four builds (AVX-512 with AVX512_BF16 and without, AVX2, baseline), of which one is chosen at run time; the
// bits are the same in all four.
#pragma once

#include "ampkernels/params.h"

namespace ampkernels::cpu {

// "avx512_bf16", "avx512", "avx2" or "baseline": what this machine runs, or what set_isa chose (tests). set_isa returns
// false if the machine cannot run it.
const char* isa();
bool set_isa(const char* name);

void softmax_fwd_rows(const SoftmaxFwdParams& p, int64_t begin, int64_t end);
void softmax_bwd_rows(const SoftmaxBwdParams& p, int64_t begin, int64_t end);

void norm_fwd_rows(const NormFwdParams& p, int64_t begin, int64_t end);

// Column sums go through `blocks` partial rows in the workspace. The block count depends on (rows, cols) only, never on
// the number of threads. First every block (any thread, any order), then every column of the sums.
int64_t norm_bwd_blocks(const NormBwdParams& p);
size_t norm_bwd_workspace_bytes(const NormBwdParams& p);
void norm_bwd_block(const NormBwdParams& p, int64_t block);
void norm_bwd_columns(const NormBwdParams& p, int64_t begin, int64_t end);

int64_t act_bwd_blocks(const ActBwdParams& p);
size_t act_bwd_workspace_bytes(const ActBwdParams& p);
void act_bwd_block(const ActBwdParams& p, int64_t block);
void act_bwd_columns(const ActBwdParams& p, int64_t begin, int64_t end);

void act_fwd_rows(const ActFwdParams& p, int64_t begin, int64_t end);

}  // namespace ampkernels::cpu
