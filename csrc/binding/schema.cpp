// The private operators, torch.ops.ampkernels.*: one schema each, implemented for CPU and CUDA under the same name in
// linear.cpp, softmax.cpp and norm.cpp. Functional: each allocates what it returns and changes no argument. Outputs
// that were not asked for are undefined tensors, None in Python. The public way in is ampkernels/functional.py.
//
// A linear's operands may have any rank from 1, written (…, K) here; M is the number of their rows.
// `activation` is ampkernels::Activation; (acc, chunk) is ampkernels::Accumulate, chunk 0 = the library's choice.
// A missing optional dtype means "this output is not wanted".
#include <Python.h>

#include "torch_api.h"

STABLE_TORCH_LIBRARY(ampkernels, m) {
  // input (…, K), weight (N, K), bias (N,), residual (…, N) -> output (…, N), pre (M, N)
  m.def(
      "linear_fwd(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int activation, ScalarType acc, int "
      "chunk, ScalarType out_dtype, bool save_pre) -> (Tensor output, Tensor pre)");
  // weight (2F, K): rows [0, F) gate, [F, 2F) up -> output (…, F), pre (M, 2F)
  m.def(
      "gated_linear_fwd(Tensor input, Tensor weight, Tensor? bias, int activation, ScalarType acc, int chunk, "
      "ScalarType out_dtype, bool save_pre) -> (Tensor output, Tensor pre)");
  // dy (…, N) -> dpre = dy * act'(saved) (…, N), dbias = column sums (N,); saved is the pre-activation, or the output
  // for relu
  m.def(
      "linear_act_bwd(Tensor dy, Tensor? saved, int activation, bool saved_is_output, ScalarType? dpre_dtype, "
      "ScalarType? dbias_dtype) -> (Tensor dpre, Tensor dbias)");
  // dy (…, F), saved (M, 2F) -> dpre (…, 2F), dbias (2F,)
  m.def(
      "gated_linear_act_bwd(Tensor dy, Tensor saved, int activation, ScalarType? dpre_dtype, ScalarType? dbias_dtype) "
      "-> (Tensor dpre, Tensor dbias)");
  // dpre (…, N), weight (N, K) -> dinput (…, K) = dpre @ weight, times act'(saved) if saved (M, K) is given, and
  // act_out = act(saved) if want_act
  m.def(
      "linear_dgrad(Tensor dpre, Tensor weight, Tensor? saved, int activation, bool saved_is_output, bool want_act, "
      "ScalarType acc, int chunk, ScalarType out_dtype) -> (Tensor dinput, Tensor act_out)");
  // The whole backward of linear_fwd or gated_linear_fwd in one call: dy (…, N or F), input (…, K) if dweight is
  // wanted, weight if dinput is, saved as in linear_act_bwd -> dinput (…, K), dweight (N, K), dbias (N,); transposed:
  // dweight with strides (1, N)
  m.def(
      "linear_bwd(Tensor dy, Tensor? input, Tensor? weight, Tensor? saved, int activation, bool gated, bool "
      "transposed, ScalarType acc, int chunk, ScalarType? dinput_dtype, ScalarType? dweight_dtype, ScalarType? "
      "dbias_dtype) -> (Tensor dinput, Tensor dweight, Tensor dbias)");
  // grad (N, K) fp32 += dpre^T @ input of dpre (…, N), input (…, K), from the accumulators; only where the GEMM is ours
  m.def("linear_wgrad_add(Tensor(a!) grad, Tensor dpre, Tensor input, ScalarType acc, int chunk) -> ()");

  // CPU only: linear_fwd or gated_linear_fwd with the bits of the tensor cores of `arch` (80, 90)
  m.def(
      "emulate_linear(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int activation, bool gated, "
      "ScalarType acc, int chunk, ScalarType out_dtype, int arch) -> Tensor output");

  m.def(
      "softmax_fwd(Tensor input, int dim, float scale, Tensor? mask, bool causal, bool log, ScalarType out_dtype) -> "
      "Tensor output");
  m.def(
      "softmax_bwd(Tensor dy, Tensor output, int dim, float scale, bool causal, bool log, ScalarType dinput_dtype) -> "
      "Tensor dinput");

  // over the last `ndim` dimensions; sum = input + residual in residual's dtype; mean, rstd (rows,)
  m.def(
      "layer_norm_fwd(Tensor input, int ndim, Tensor? weight, Tensor? bias, float eps, Tensor? residual, "
      "ScalarType out_dtype, bool save_stats) -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "rms_norm_fwd(Tensor input, int ndim, Tensor? weight, float eps, float weight_offset, Tensor? residual, "
      "ScalarType out_dtype, bool save_stats) -> (Tensor output, Tensor sum, Tensor rstd)");
  // saved: the input, or the sum where there was a residual
  m.def(
      "layer_norm_bwd(Tensor dy, Tensor? dsum, Tensor saved, int ndim, Tensor mean, Tensor rstd, Tensor? weight, "
      "ScalarType? dinput_dtype, ScalarType? dweight_dtype, ScalarType? dbias_dtype) -> "
      "(Tensor dinput, Tensor dweight, Tensor dbias)");
  m.def(
      "rms_norm_bwd(Tensor dy, Tensor? dsum, Tensor saved, int ndim, Tensor rstd, Tensor? weight, float weight_offset, "
      "ScalarType? dinput_dtype, ScalarType? dweight_dtype) -> (Tensor dinput, Tensor dweight)");

  // What was compiled in: a JSON object (compiler, CUDA version and archs, or why CUDA was left out; the CPU's ISA).
  m.def("build_config() -> str");
  // Tests: choose the CPU build ("avx512_bf16", "avx512", "avx2", "baseline"); false if this machine cannot run it.
  m.def("set_cpu_isa(str name) -> bool");
  // Tests: the CUDA GEMM's kernels, "auto", "sm80" (mma.sync), "sm90" (WGMMA) or "small" (WGMMA for few rows); false
  // if this build has them not.
  m.def("set_gemm_path(str name) -> bool");
}

// `import ampkernels._C` runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
