// Everything that is compiled for the machine's common subset: what the ISA builds use from outside. It must come
// before their target pragmas, so that no inline function of it is ever built for more than the machine may have.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "ampkernels/activation.h"
#include "ampkernels/convert.h"
#include "ampkernels/params.h"
#include "kernel_table.h"

#if defined(AMPKERNELS_CPU_X86)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"          // wide vectors passed between functions that are always inlined
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own AVX-512 header warns about itself
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
