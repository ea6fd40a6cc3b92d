#include "includes.h"

#if defined(AMPKERNELS_CPU_X86)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define AMPKERNELS_ISA avx2
#define AMPKERNELS_ISA_LEVEL 256
#include "kernels_impl.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
