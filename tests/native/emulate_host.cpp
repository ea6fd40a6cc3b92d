// emulate_gemm and tensor_core_step behind C functions, for tests/test_emulate.py (ctypes).
#include <cstdint>

#include "ampkernels/accumulate.h"
#include "cpu/emulate.h"

using namespace ampkernels;

extern "C" {

struct Matrix {
  void* data;
  int64_t stride_outer;
  int64_t stride_inner;
};

// dtypes and kinds are the numbers of types.h and params.h; a null pointer is an absent tensor.
void ak_emulate(int arch, int64_t m, int64_t n, int64_t k, int dtype, int accumulate, int64_t chunk, const Matrix* a,
                const Matrix* b, int kind, int activation, const void* bias, int bias_dtype, const Matrix* d,
                int d_dtype, const Matrix* residual, int residual_dtype, const Matrix* pre, const Matrix* saved,
                int saved_is_output, const Matrix* act_out, int64_t row_begin, int64_t row_end) {
  GemmParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.dtype = DType(dtype);
  p.accumulate = {DType(accumulate), chunk};
  p.a = {a->data, a->stride_outer, a->stride_inner};
  p.b = {b->data, b->stride_outer, b->stride_inner};
  p.kind = EpilogueKind(kind);
  p.activation = Activation(activation);
  p.bias = {bias, DType(bias_dtype), 1};
  p.d = d->data;
  p.ldd = d->stride_outer;
  p.d_dtype = DType(d_dtype);
  if (residual != nullptr) {
    p.residual = residual->data;
    p.ldresidual = residual->stride_outer;
    p.residual_dtype = DType(residual_dtype);
  }
  if (pre != nullptr) p.pre = pre->data, p.ldpre = pre->stride_outer;
  if (saved != nullptr) p.saved = saved->data, p.ldsaved = saved->stride_outer;
  p.saved_is_output = saved_is_output != 0;
  if (act_out != nullptr) p.act_out = act_out->data, p.ldact_out = act_out->stride_outer;
  cpu::emulate_gemm(p, arch, row_begin, row_end);
}

// One dot product by the scalar rule of accumulate.h; a and b are widened values, k a multiple of 16.
float ak_scalar_dot(int arch, int dtype, int accumulate, int64_t chunk, const float* a, const float* b, int64_t k) {
  const TensorCoreRule rule = tensor_core_rule(arch);
  float total = 0;
  for (int64_t begin = 0; begin < k; begin += chunk) {
    float c = 0;
    for (int64_t i = begin; i < k && i < begin + chunk; i += rule.count)
      c = tensor_core_step(rule, DType(dtype), DType(accumulate), c, a + i, b + i);
    total += c;
  }
  return total;
}

}  // extern "C"
