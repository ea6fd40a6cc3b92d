#include "includes.h"

#if defined(AMPKERNELS_CPU_X86)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define AMPKERNELS_ISA avx512
#define AMPKERNELS_ISA_LEVEL 512
#include "kernels_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
