// The epilogue of GemmParams on four consecutive columns of a row, shared by the GEMM kernels and the split-K reducer.
//
// Rounding points: everything is fp32 (acc + bias, the activation, its product with the gate or the accumulator); each
// output is rounded once, to its own dtype. A kernel holds every activation, behind a branch that is uniform and taken
// once for four elements, and needs no instantiation for each.
#pragma once

#include "ampkernels/activation.h"
#include "ampkernels/params.h"
#include "cuda/vec.cuh"

namespace ampkernels::cuda {

constexpr int kQuad = 4;

// One thread's share: columns col .. col + 3 (of which `valid` exist) of the rows row, row + row_step, ... < row_end.
struct QuadRows {
  int64_t row;
  int64_t row_end;
  int row_step;
  int64_t col;
  int valid;
};

__device__ __forceinline__ void load_bias(const VectorIn& bias, int64_t col, int valid, float (&v)[kQuad]) {
#pragma unroll
  for (int i = 0; i < kQuad; ++i) v[i] = 0.f;
  if (bias.data != nullptr) load_n(bias.data, bias.dtype, col * bias.stride, bias.stride, valid, v);
}

// What the epilogue reads of memory beside the bias: the saved tensor of kActGrad, the residual of kResidual.
__device__ __forceinline__ bool epilogue_has_input(const GemmParams& p) {
  return p.kind == EpilogueKind::kActGrad || p.kind == EpilogueKind::kResidual;
}
template <typename T>
__device__ __forceinline__ void load_epilogue_input(const GemmParams& p, int64_t row, int64_t col, int valid,
                                                    float (&v)[kQuad]) {
  if (p.kind == EpilogueKind::kActGrad)
    load_n(static_cast<const T*>(p.saved) + row * p.ldsaved + col, 1, valid, v);
  else
    load_n(p.residual, p.residual_dtype, row * p.ldresidual + col, 1, valid, v);
}

// The same for kLoads rows, row_step apart, into out[l * out_step]. All loads are in flight before the first is used:
// with the branch on alignment around each load they would be waited for one by one.
template <typename S, int kLoads>
__device__ __forceinline__ void load_input_rows(const S* src, int64_t ld, const QuadRows& r, float* out, int out_step) {
  const S* p = src + r.row * ld + r.col;
  if (r.valid == kQuad && is_aligned(p, sizeof(S) * kQuad) && ld % kQuad == 0) {
    Packet<S, kQuad> in[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      if (r.row + l * r.row_step < r.row_end)
        in[l] = *reinterpret_cast<const Packet<S, kQuad>*>(p + l * r.row_step * ld);
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
      *reinterpret_cast<float4*>(out + l * out_step) =
          make_float4(widen(in[l].v[0]), widen(in[l].v[1]), widen(in[l].v[2]), widen(in[l].v[3]));
  } else {
    float v[kQuad];
#pragma unroll 1
    for (int l = 0; l < kLoads && r.row + l * r.row_step < r.row_end; ++l) {
      load_n(p + l * r.row_step * ld, 1, r.valid, v);
      *reinterpret_cast<float4*>(out + l * out_step) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
}

// acc(i, half, v): the sums of the i-th row (half 1: the up column of a gated pair). input(i, v):
// load_epilogue_input's.
template <typename T, typename Acc, typename Input>
__device__ __forceinline__ void apply_epilogue(const GemmParams& p, const QuadRows& r, const float (&bias)[kQuad],
                                               const float (&bias_up)[kQuad], Acc&& acc, Input&& input) {
  const bool gated = p.kind == EpilogueKind::kGated, act_grad = p.kind == EpilogueKind::kActGrad;
  const bool residual = p.kind == EpilogueKind::kResidual;
  int i = 0;
#pragma unroll 1
  for (int64_t row = r.row; row < r.row_end; row += r.row_step, ++i) {
    float v[kQuad], w[kQuad];  // w: up of a gated pair, or what the epilogue reads
    acc(i, 0, v);
    if (gated) acc(i, 1, w);
    if (act_grad || residual) input(i, w);
    if (!act_grad) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) v[j] = v[j] + bias[j];
      if (gated) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) w[j] = w[j] + bias_up[j];
      }
      if (p.pre != nullptr) {
        T* pre = static_cast<T*>(p.pre) + row * p.ldpre + r.col;
        store_n(pre, 1, r.valid, v);
        if (gated) store_n(pre + p.n / 2, 1, r.valid, w);
      }
    }
    // saved_is_output needs no branch: it is relu's alone, and relu' and relu are the same of relu(x) as of x.
    // kActGrad's saved tensor and act_out are T's, 16 bits wide.
    with_activation(p.activation, act_grad ? Result::k16Bit : result_of(activation_dtype(p)),
                    [&]<Activation A, Result R>() {
                      if (act_grad) {
#pragma unroll
                        for (int j = 0; j < kQuad; ++j) {
                          v[j] = v[j] * activation_grad<A, R>(w[j]);
                          if (p.act_out != nullptr) w[j] = activation<A, R>(w[j]);
                        }
                      } else {
#pragma unroll
                        for (int j = 0; j < kQuad; ++j) v[j] = activation<A, R>(v[j]);
                      }
                    });
    if (gated) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) v[j] = v[j] * w[j];
    }
    if (residual) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) v[j] = w[j] + v[j];
    }
    store_n(p.d, p.d_dtype, row * p.ldd + r.col, 1, r.valid, v);
    if (act_grad && p.act_out != nullptr)
      store_n(static_cast<T*>(p.act_out) + row * p.ldact_out + r.col, 1, r.valid, w);
  }
}

}  // namespace ampkernels::cuda
