// What was compiled in, and the choice of the CPU build: the ops without tensors.
#include <string>

#include "cpu/kernels.h"
#include "torch_api.h"

#if __has_include("build_config.h")
#include "build_config.h"  // written by setup.py: #define AMPKERNELS_BUILD_CONFIG "<json>"
#endif
#if !defined(AMPKERNELS_BUILD_CONFIG)
#define AMPKERNELS_BUILD_CONFIG "{}"
#endif

namespace ampkernels::binding {
namespace {

std::string build_config() {
  return AMPKERNELS_BUILD_CONFIG;
}
bool set_cpu_isa(std::string name) {
  return cpu::set_isa(name.c_str());
}
bool set_gemm_path([[maybe_unused]] std::string name) {
#if defined(AMPKERNELS_WITH_CUDA)
  return cuda::set_gemm_path(name.c_str());
#else
  return false;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ampkernels, CompositeExplicitAutograd, m) {
  m.impl("build_config", TORCH_BOX(&build_config));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("set_gemm_path", TORCH_BOX(&set_gemm_path));
}

}  // namespace ampkernels::binding
