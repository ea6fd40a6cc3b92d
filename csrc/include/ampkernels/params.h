// Plain structs between the binding, which fills them, and the kernels, which read them. Raw pointers, sizes, strides
// in elements (never bytes). The CPU and the CUDA kernels of one op read the same struct.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ampkernels/types.h"

namespace ampkernels {

// Where each row of a strided tensor starts: row r, written in the mixed radix `size` (last dimension fastest), starts
// at sum(index[i] * stride[i]). The binding has already merged the dimensions that can be merged, so a contiguous
// tensor has ndim == 1. A stride of 0 is an expanded dimension.
struct RowMap {
  static constexpr int kMaxDims = 8;
  int32_t ndim = 1;
  int64_t size[kMaxDims] = {1};
  int64_t stride[kMaxDims] = {0};
};

AK_HOST_DEVICE int64_t row_offset(const RowMap& map, int64_t row) {
  if (map.ndim == 1) return row * map.stride[0];
  int64_t offset = 0;
  for (int i = map.ndim - 1; i > 0; --i) {
    const int64_t q = row / map.size[i];
    offset += (row - q * map.size[i]) * map.stride[i];
    row = q;
  }
  return offset + row * map.stride[0];
}

// A matrix of rows x cols whose rows lie anywhere and whose columns lie `col_stride` apart.
struct RowsIn {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t col_stride = 1;
  RowMap rows;
};
struct RowsOut {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t col_stride = 1;
  RowMap rows;
};

// A vector of parameters (norm weight, linear bias). data == nullptr: absent.
struct VectorIn {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 1;
};
struct VectorOut {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 1;
};

// ---------------------------------------------------------------------------------------------------------------- rows

// y = softmax(scale * x + mask), or its logarithm. Statistics in fp32 (fp64 for fp64 x); y rounded once.
// mask: bool (true = keep; a dropped x is never read into the result, NaN or not) or additive float, absent if null.
// causal: row r has query index q = r % q_len and keeps columns 0 .. q (top-left aligned, as in
// scaled_dot_product_attention). A row with nothing kept gives 0 if there is a mask, NaN without one (all -inf).
struct SoftmaxFwdParams {
  int64_t rows = 0;
  int64_t cols = 0;
  RowsIn x;
  RowsIn mask;
  RowsOut y;
  double scale = 1.0;
  bool causal = false;
  bool log = false;
  int64_t q_len = 1;
};

// dx = scale * y * (dy - sum(y * dy)), or for log: dx = scale * (dy - exp(y) * sum(dy)). Causal: columns past the
// diagonal are not read and get 0.
struct SoftmaxBwdParams {
  int64_t rows = 0;
  int64_t cols = 0;
  RowsIn dy;
  RowsIn y;
  RowsOut dx;
  double scale = 1.0;
  bool causal = false;
  bool log = false;
  int64_t q_len = 1;
};

// s = x + residual in fp32 (s = x without one), the statistics and y from s; sum = s rounded once to its dtype.
// layer_norm: y = (s - mean) * rstd * weight + bias;   rms_norm: y = s * rstd * (weight + weight_offset).
// eps sits inside the root. mean and rstd: fp32 (fp64 for fp64 x), one per row; null where not wanted.
// All of x, residual, y, sum are unit-stride along the row unless col_stride says otherwise.
struct NormFwdParams {
  int64_t rows = 0;
  int64_t cols = 0;
  bool rms = false;
  RowsIn x;
  RowsIn residual;  // data == nullptr: none
  RowsOut y;
  RowsOut sum;  // data == nullptr: none; always contiguous
  VectorIn weight;
  VectorIn bias;
  double eps = 0;
  double weight_offset = 0;
  void* mean = nullptr;
  void* rstd = nullptr;
};

// With s the saved input of the norm (x, or the rounded sum), h = (s - mean) * rstd, g = dy * (weight + offset):
//   layer_norm: ds = rstd * (g - mean(g) - h * mean(g * h));   rms_norm: ds = rstd * (g - h * mean(g * h))
//   dx = ds + dsum;  dweight = sum over rows of dy * h;  dbias = sum over rows of dy.
// dx, dweight, dbias each null where not wanted. The column sums are fp32 partials (fp64 for fp64 s) in `workspace`,
// added in an order fixed by (rows, cols, dtype) alone.
struct NormBwdParams {
  int64_t rows = 0;
  int64_t cols = 0;
  bool rms = false;
  RowsIn dy;
  RowsIn s;
  RowsIn dsum;  // gradient of the returned sum; data == nullptr: none
  VectorIn weight;
  double weight_offset = 0;
  const void* mean = nullptr;  // null for rms
  const void* rstd = nullptr;
  RowsOut dx;
  VectorOut dweight;
  VectorOut dbias;
  void* workspace = nullptr;  // of norm_bwd_workspace_bytes(params)
};

// ---------------------------------------------------------------------------------------------------------------- GEMM

// Element (i, k) lies at data[i * stride_outer + k * stride_k]. One of the two strides is 1 (both may be): unit
// stride_k is "K-major" (a row-major activation, a linear weight), unit stride_outer is "MN-major" (dW's operands).
struct GemmOperand {
  const void* data = nullptr;
  int64_t stride_outer = 0;
  int64_t stride_k = 1;
};

enum class EpilogueKind : int32_t {
  kLinear = 0,  // d = act(acc + bias)                         optional: pre = acc + bias
  kGated =
      1,  // d = act(gate) * up, gate = acc + bias of row f of B, up of row F + f, F = n / 2;  optional: pre (M, 2F)
  kActGrad = 2,   // d = acc * act'(saved)                      optional: act_out = act(saved), for mlp's dW2
  kResidual = 3,  // d = act(acc + bias) + residual             optional: pre = acc + bias
};

// D[m, n] = epilogue(sum over k of A[m, k] * B[n, k]). Products exact, sums in accumulate.dtype, the epilogue in fp32,
// each output rounded once. For kGated, n counts the rows of B (2F) and D has F columns.
// With chunk > 0 the summation tree is docs/design.md section 3's and the same for every shape and kernel.
struct GemmParams {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  DType dtype = DType::kBFloat16;  // of A and B: kFloat16 or kBFloat16
  Accumulate accumulate;
  GemmOperand a;
  GemmOperand b;

  EpilogueKind kind = EpilogueKind::kLinear;
  Activation activation = Activation::kNone;
  VectorIn bias;  // n elements

  void* d = nullptr;  // row-major, unit column stride
  DType d_dtype = DType::kBFloat16;
  int64_t ldd = 0;

  const void* residual = nullptr;  // kResidual reads: row-major (m, n); an fp32 d itself, to add to what it holds
  DType residual_dtype = DType::kBFloat16;  // `dtype` or kFloat32
  int64_t ldresidual = 0;

  void* pre = nullptr;  // written: the pre-activation in `dtype`, row-major (m, n); null: not wanted
  int64_t ldpre = 0;
  const void* saved = nullptr;  // kActGrad reads: what forward saved, in `dtype`, row-major (m, n)
  int64_t ldsaved = 0;
  bool saved_is_output = false;  // `saved` is act(pre), not pre (relu only)
  void* act_out = nullptr;       // kActGrad writes act(saved), in `dtype`, row-major (m, n); null: not wanted
  int64_t ldact_out = 0;

  void* workspace = nullptr;  // of gemm_workspace_bytes(params): split-K partials
};

// The dtype that an activation's value is computed for (`result_of`, activation.h): d's, but fp32 where something is
// added to it before the rounding, which may cancel it.
AK_HOST_DEVICE DType activation_dtype(const GemmParams& p) {
  return p.kind == EpilogueKind::kResidual ? DType::kFloat32 : p.d_dtype;
}

// dpre = dy * act'(saved), elementwise over (rows, cols), with dbias = column sums of the fp32 dpre before rounding.
// gated: saved (rows, 2 * cols) holds gate | up, dpre (rows, 2 * cols) = [dy * up * act'(gate) | dy * act(gate)] and
// dbias has 2 * cols. dpre null: only dbias wanted (activation kNone: dbias = column sums of dy).
struct ActBwdParams {
  int64_t rows = 0;
  int64_t cols = 0;
  bool gated = false;
  Activation activation = Activation::kNone;
  RowsIn dy;
  RowsIn saved;  // data == nullptr for kNone
  bool saved_is_output = false;
  RowsOut dpre;
  VectorOut dbias;            // data == nullptr: not wanted
  void* workspace = nullptr;  // of act_bwd_workspace_bytes(params): fp32 (fp64 for fp64 dy) column partials
};

// y = act(x + bias) + residual over (rows, cols), or gated: x (rows, 2 * cols) -> y (rows, cols). The epilogue of the
// GEMMs that a library computes (fp32 and fp64, and 16-bit on the CPU). pre: x + bias rounded to its dtype, where
// wanted (it may be x's own memory).
struct ActFwdParams {
  int64_t rows = 0;
  int64_t cols = 0;
  bool gated = false;
  Activation activation = Activation::kNone;
  RowsIn x;
  VectorIn bias;
  RowsIn residual;  // data == nullptr: none (gated: never)
  RowsOut y;
  RowsOut pre;  // data == nullptr: not wanted
};

}  // namespace ampkernels
