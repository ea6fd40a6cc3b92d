#include "includes.h"

#if defined(AMPKERNELS_CPU_X86)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define AMPKERNELS_ISA avx512_bf16
#define AMPKERNELS_ISA_LEVEL 512
#define AMPKERNELS_ISA_BF16 1
#include "kernels_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
