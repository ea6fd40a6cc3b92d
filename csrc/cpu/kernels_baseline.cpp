#include "includes.h"

#define AMPKERNELS_ISA baseline
#define AMPKERNELS_ISA_LEVEL 128
#include "kernels_impl.h"
