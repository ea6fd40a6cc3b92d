// The GPU's bits on a CPU: D = epilogue(A B^T) as csrc/cuda computes it, with the tensor core's own additions.
#pragma once

#include <cstdint>

#include "ampkernels/params.h"

namespace ampkernels::cpu {

// Rows [row_begin, row_end) of the GEMM that `p` describes, bit for bit what the GPU of `arch` (90, 80) writes when
// p.accumulate has a chunk: tensor-core steps of 16 k inside a chunk, chunk sums added in fp32 in ascending order, the
// epilogue in fp32, one rounding. chunk == 0 is taken as one chunk of all of K, which a GPU that splits K does not
// follow. Any strides. `workspace` is not used. Rows are independent: call it from several threads on disjoint ranges
// (of 64 rows and more, if there are that many: each range packs B for itself).
void emulate_gemm(const GemmParams& p, int arch, int64_t row_begin, int64_t row_end);

}  // namespace ampkernels::cpu
