// The body of kernels_<isa>.cpp: every kernel, and the table of them.
#pragma once

#include "activation_impl.h"
#include "norm_impl.h"
#include "softmax_impl.h"

namespace ampkernels::cpu::AMPKERNELS_ISA {

#define AK_STRING(x) AK_STRING_(x)
#define AK_STRING_(x) #x
const KernelTable table = {
    AK_STRING(AMPKERNELS_ISA), softmax_fwd_rows, softmax_bwd_rows, norm_fwd_rows,  norm_bwd_block,
    norm_bwd_columns,          act_fwd_rows,     act_bwd_block,    act_bwd_columns};

}  // namespace ampkernels::cpu::AMPKERNELS_ISA
