// linear, gated_linear and their backward: tensors into GemmParams / ActFwdParams / ActBwdParams, then one of
//   CUDA, fp16 and bf16   our tensor-core GEMM with its fused epilogue
//   CPU, fp16/bf16/fp32   oneDNN's fused linear where its epilogue is ours to the bit of rounding, else oneDNN +
//   act_fwd fp32/fp64 on CUDA, fp64 on CPU   the library's product through ATen, then act_fwd
// ATen is called by its `out=` overloads: autocast does not wrap those, so what Python has decided stays decided.
#include <dlfcn.h>

#include "cpu/emulate.h"
#include "cpu/kernels.h"
#include "torch_api.h"

namespace ampkernels::binding {
namespace {

using OptTensor = std::optional<Tensor>;
using OptDtype = std::optional<ScalarType>;

bool is_16bit(ScalarType t) {
  return t == ScalarType::Half || t == ScalarType::BFloat16;
}

// The same memory with other sizes and strides, without the dispatcher: no view in autograd's eyes.
Tensor reinterpret(const Tensor& t, const int64_t* sizes, const int64_t* strides, int64_t ndim) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), ndim, sizes, strides, 0, &handle));
  return Tensor(handle);
}

Tensor transposed(const Tensor& t) {
  const int64_t sizes[2] = {t.size(1), t.size(0)}, strides[2] = {t.stride(1), t.stride(0)};
  return reinterpret(t, sizes, strides, 2);
}

// (…, K) as (M, K), and (K,) as (1, K); of a contiguous copy where no one stride walks through the rows.
Tensor matrix(const Tensor& t) {
  const int64_t ndim = t.dim();
  if (ndim == 2) return t;
  const int64_t k = t.size(ndim - 1);
  int64_t m = 1, stride = k;
  bool fits = true;
  for (int64_t i = 0; i < ndim - 1; ++i) {
    const int64_t size = t.size(i);
    if (size == 1) continue;
    fits = fits && (m == 1 || stride == size * t.stride(i));
    m *= size;
    stride = t.stride(i);
  }
  const int64_t sizes[2] = {m, k}, strides[2] = {fits ? stride : k, fits ? t.stride(ndim - 1) : 1};
  return reinterpret(fits ? t : torch::stable::contiguous(t), sizes, strides, 2);
}

// The inverse, for a contiguous result: (M, N) with the leading dimensions of `like`.
Tensor unmatrix(const Tensor& t, const Tensor& like) {
  const int64_t ndim = like.dim();
  if (ndim == 2) return t;
  std::array<int64_t, 64> sizes{}, strides{};
  STD_TORCH_CHECK(ndim <= 64, "a tensor of more than 64 dimensions");
  int64_t stride = 1;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    sizes[i] = i == ndim - 1 ? t.size(1) : like.size(i);
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return reinterpret(t, sizes.data(), strides.data(), ndim);
}

// ---------------------------------------------------------------------------------------------- elementwise, any
// device

void run_act_fwd(const ActFwdParams& p, const Tensor& on) {
  if (p.rows == 0 || p.cols == 0) return;
#if defined(AMPKERNELS_WITH_CUDA)
  if (on.is_cuda()) {
    const CudaScope scope(on);
    return check_status(cuda::launch_act_fwd(p, scope.stream()), "linear");
  }
#endif
  torch::stable::parallel_for(0, p.rows, row_grain(p.cols),
                              [&](int64_t begin, int64_t end) { cpu::act_fwd_rows(p, begin, end); });
}

void run_act_bwd(ActBwdParams& p, const Tensor& on) {
  if (p.rows == 0 || p.cols == 0) return;
#if defined(AMPKERNELS_WITH_CUDA)
  if (on.is_cuda()) {
    const CudaScope scope(on);
    Holder scratch;
    p.workspace = workspace(on, cuda::act_bwd_workspace_bytes(p), scratch);
    return check_status(cuda::launch_act_bwd(p, scope.stream()), "linear");
  }
#endif
  Holder scratch;
  p.workspace = workspace(on, cpu::act_bwd_workspace_bytes(p), scratch);
  torch::stable::parallel_for(0, cpu::act_bwd_blocks(p), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) cpu::act_bwd_block(p, block);
  });
  if (p.dbias.data)
    torch::stable::parallel_for(0, p.gated ? 2 * p.cols : p.cols, 1024,
                                [&](int64_t begin, int64_t end) { cpu::act_bwd_columns(p, begin, end); });
}

// output = act(x + bias) + residual, x + bias kept in `pre` where given.
void activate(const Tensor& x, const OptTensor& bias, const OptTensor& residual, Activation activation, bool gated,
              const Tensor& output, const Tensor* pre) {
  ActFwdParams p;
  Holder holder, residual_holder;
  p.rows = output.size(0);
  p.cols = output.size(1);
  p.gated = gated;
  p.activation = activation;
  p.x = rows_in(x, 1, 2, holder, "linear");
  if (bias) p.bias = vector_in(*bias, "linear");
  if (residual) p.residual = rows_in(*residual, 1, 2, residual_holder, "linear");
  p.y = rows_out(output, 1, 2, "linear");
  if (pre) p.pre = rows_out(*pre, 1, 2, "linear");
  run_act_fwd(p, output);
}

// ------------------------------------------------------------------------------------------------- products by a
// library

// out = a @ b in out's dtype (which is a's and b's).
void library_mm(const Tensor& a, const Tensor& b, const Tensor& out) {
  // mm.out(Tensor self, Tensor mat2, *, Tensor(a!) out). The operands are detached: an `out=` call refuses operands
  // that require grad, and this op records nothing.
  auto detached = [](const Tensor& t) {
    std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::detach", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  };
  std::array<StableIValue, 3> stack{torch::stable::detail::from(detached(a)), torch::stable::detail::from(detached(b)),
                                    torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);
}

// oneDNN's linear with a fused activation, or a fused sum with a second matrix. Outside the stable promise, so they are
// found by name; null: not in this torch.
using LinearPointwise = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, const char*,
                                           const double**, int64_t, const char**, AtenTensorHandle*);
LinearPointwise onednn_linear() {
  static const auto function =
      reinterpret_cast<LinearPointwise>(dlsym(RTLD_DEFAULT, "aoti_torch_cpu__linear_pointwise"));
  return function;
}
using LinearBinary = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*,
                                        const char*, AtenTensorHandle*);
LinearBinary onednn_linear_binary() {
  static const auto function =
      reinterpret_cast<LinearBinary>(dlsym(RTLD_DEFAULT, "aoti_torch_cpu__linear_pointwise_binary"));
  return function;
}

// Whether oneDNN has kernels for the dtype on this CPU: fp16 takes AVX512-FP16 or AMX-FP16, bf16 AVX-512.
bool onednn_takes(ScalarType dtype) {
  const auto ask = [](const char* op) {
    std::array<StableIValue, 1> stack{};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<bool>(stack[0]);
  };
  if (!onednn_linear() || dtype == ScalarType::Double) return false;
  static const bool fp16 = ask("mkldnn::_is_mkldnn_fp16_supported");
  static const bool bf16 = ask("mkldnn::_is_mkldnn_bf16_supported");
  return dtype == ScalarType::Half ? fp16 : dtype == ScalarType::BFloat16 ? bf16 : true;
}

// oneDNN's name for an activation that it computes as we promise to: in fp32, NaN kept. (Its relu turns NaN into 0.)
struct OnednnActivation {
  const char* attr;
  const char* algorithm;
};
std::optional<OnednnActivation> onednn_activation(Activation a) {
  switch (a) {
    case Activation::kNone:
      return OnednnActivation{"none", ""};
    case Activation::kGelu:
      return OnednnActivation{"gelu", "none"};
    case Activation::kGeluTanh:
      return OnednnActivation{"gelu", "tanh"};
    case Activation::kSilu:
      return OnednnActivation{"swish", ""};
    case Activation::kSigmoid:
      return OnednnActivation{"sigmoid", ""};
    case Activation::kTanh:
      return OnednnActivation{"tanh", ""};
    default:
      return std::nullopt;
  }
}

// act(input @ weight^T + bias), or, with a residual of input's dtype, input @ weight^T + bias + residual; in input's
// dtype, rounded once from fp32.
Tensor onednn(const Tensor& input, const Tensor& weight, const OptTensor& bias, OnednnActivation act,
              const OptTensor& residual = std::nullopt) {
  OptTensor held = bias;
  // oneDNN adds a bias of the input's dtype or of fp32 in fp32.
  if (bias && bias->scalar_type() != input.scalar_type() && bias->scalar_type() != ScalarType::Float)
    held = torch::stable::to(*bias, ScalarType::Float);
  if (held && !held->is_contiguous()) held = torch::stable::contiguous(*held);
  AtenTensorHandle bias_handle = held ? held->get() : nullptr, result = nullptr;
  if (residual) {
    STABLE_TORCH_ERROR_CODE_CHECK(onednn_linear_binary()(input.get(), residual->get(), weight.get(),
                                                         held ? &bias_handle : nullptr, "add", &result));
    return Tensor(result);
  }
  STABLE_TORCH_ERROR_CODE_CHECK(onednn_linear()(input.get(), weight.get(), held ? &bias_handle : nullptr, act.attr,
                                                nullptr, 0, &act.algorithm, &result));
  return Tensor(result);
}

struct LinearResult {
  Tensor output, pre;
};

LinearResult linear_by_library(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                               const OptTensor& residual, Activation activation, bool gated, ScalarType out_dtype,
                               bool save_pre) {
  const ScalarType dtype = input.scalar_type();
  const int64_t m = input.size(0), n = weight.size(0);
  const bool by_onednn = input.is_cpu() && onednn_takes(dtype) && m > 0 && n > 0 && input.size(1) > 0;
  if (by_onednn && residual && onednn_linear_binary() && activation == Activation::kNone && out_dtype == dtype &&
      residual->scalar_type() == dtype)
    return {onednn(input, weight, bias, {"none", ""}, torch::stable::contiguous(*residual)), Tensor()};
  // Another output dtype than the operands', a residual still to be added, or a dtype that the CPU's library has no
  // kernels for: the operands are widened (exact), so that nothing is rounded on the way.
  if (is_16bit(dtype) &&
      (out_dtype != dtype || residual || (input.is_cpu() && onednn_linear() && !onednn_takes(dtype)))) {
    auto r =
        linear_by_library(torch::stable::to(input, ScalarType::Float), torch::stable::to(weight, ScalarType::Float),
                          bias, residual, activation, gated, out_dtype, save_pre);
    if (save_pre) r.pre = torch::stable::to(r.pre, dtype);
    return r;
  }
  if (by_onednn && !save_pre && !gated && !residual && out_dtype == dtype)
    if (const auto act = onednn_activation(activation)) return {onednn(input, weight, bias, *act), Tensor()};

  Tensor product = by_onednn ? onednn(input, weight, bias, {"none", ""}) : empty_contiguous(input, dtype, {m, n});
  if (!by_onednn) library_mm(input, transposed(weight), product);
  const OptTensor bias_left = by_onednn ? std::nullopt : bias;  // what act_fwd still has to add
  if (activation == Activation::kNone && !gated && !bias_left && !residual && out_dtype == dtype && !save_pre)
    return {product, Tensor()};
  Tensor output = empty_contiguous(input, out_dtype, {m, gated ? n / 2 : n});
  activate(product, bias_left, residual, activation, gated, output, save_pre && bias_left ? &product : nullptr);
  return {output, save_pre ? product : Tensor()};
}

// -----------------------------------------------------------------------------------------------------------------
// GEMM

// Element (outer, k) of a 2-D tensor; a copy only where neither stride is 1.
GemmOperand gemm_operand(const Tensor& t, int64_t outer_dim, Holder& holder) {
  const int64_t k_dim = 1 - outer_dim;
  auto unit = [&](int64_t dim) { return t.stride(dim) == 1 || t.size(dim) == 1; };
  if (!unit(0) && !unit(1)) holder = torch::stable::contiguous(t);
  const Tensor& source = holder ? *holder : t;
  GemmOperand operand{source.const_data_ptr(), source.stride(outer_dim), source.stride(k_dim)};
  if (source.size(k_dim) == 1)
    operand.stride_k = 1;
  else if (source.size(outer_dim) == 1 && operand.stride_k != 1)
    operand.stride_outer = 1;
  return operand;
}

// Blocks of 64 rows: what the emulation packs B for once.
void emulate(const GemmParams& p, int arch) {
  torch::stable::parallel_for(0, (p.m + 63) / 64, 1, [&](int64_t begin, int64_t end) {
    cpu::emulate_gemm(p, arch, begin * 64, end * 64 < p.m ? end * 64 : p.m);
  });
}

void run_gemm(GemmParams& p, const Tensor& on, const char* op) {
#if defined(AMPKERNELS_WITH_CUDA)
  if (on.is_cuda()) {
    const CudaScope scope(on);
    Holder scratch;
    p.workspace = workspace(on, cuda::gemm_workspace_bytes(p), scratch);
    return check_status(cuda::launch_gemm(p, scope.stream()), op);
  }
#endif
  (void)on, (void)op;
  emulate(p, 90);
}

GemmParams gemm_params(int64_t m, int64_t n, int64_t k, ScalarType dtype, ScalarType acc, int64_t chunk) {
  GemmParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.dtype = to_dtype(dtype, "linear");
  p.accumulate = {to_dtype(acc, "linear"), chunk};
  return p;
}

// Rows with a unit stride; widened (exact) if it has neither fp32 nor the operands' dtype. An fp64 one belongs to fp64
// operands alone, which are a library's.
void set_residual(GemmParams& p, const Tensor& residual, ScalarType dtype, Holder& holder) {
  const ScalarType own = residual.scalar_type();
  if (own != dtype && own != ScalarType::Float) holder = torch::stable::to(residual, ScalarType::Float);
  if (holder ? holder->stride(1) != 1 : residual.stride(1) != 1)
    holder = torch::stable::contiguous(holder ? *holder : residual);
  const Tensor& rows = holder ? *holder : residual;
  p.kind = EpilogueKind::kResidual;
  p.residual = rows.const_data_ptr();
  p.residual_dtype = dtype_of_tensor(rows, "linear");
  p.ldresidual = rows.stride(0);
}

void set_output(GemmParams& p, const Tensor& d) {
  p.d = d.mutable_data_ptr();
  p.d_dtype = dtype_of_tensor(d, "linear");
  p.ldd = d.stride(0);
}

// True where the tensor core's sums are wanted: on CUDA from our GEMM; on the CPU, under a policy that names them, from
// its emulation.
bool by_gemm(const Tensor& a, ScalarType acc, int64_t chunk, int64_t m, int64_t n, int64_t k) {
  const bool named = chunk > 0 || acc == ScalarType::Half;
#if defined(AMPKERNELS_WITH_CUDA)
  const bool here = a.is_cuda() || named;
#else
  const bool here = named;
#endif
  return here && is_16bit(a.scalar_type()) && m > 0 && n > 0 && k > 0;
}

// --------------------------------------------------------------------------------------------------------------
// forward

std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                                   const OptTensor& residual, int64_t activation, bool gated, ScalarType acc,
                                   int64_t chunk, ScalarType out_dtype, bool save_pre) {
  const int64_t m = input.size(0), n = weight.size(0), k = input.size(1);
  if (by_gemm(input, acc, chunk, m, n, k)) {
    const ScalarType dtype = input.scalar_type();
    if (out_dtype == ScalarType::Double) {  // the accumulators are fp32: fp64 holds the same numbers
      auto [output, pre] =
          forward(input, weight, bias, residual, activation, gated, acc, chunk, ScalarType::Float, save_pre);
      return {torch::stable::to(output, ScalarType::Double), pre};
    }
    Tensor output = empty_contiguous(input, out_dtype, {m, gated ? n / 2 : n});
    Tensor pre = save_pre ? empty_contiguous(input, dtype, {m, n}) : Tensor();
    Holder a_holder, b_holder;
    GemmParams p = gemm_params(m, n, k, dtype, acc, chunk);
    p.a = gemm_operand(input, 0, a_holder);
    p.b = gemm_operand(weight, 0, b_holder);
    p.kind = gated ? EpilogueKind::kGated : EpilogueKind::kLinear;
    p.activation = Activation(activation);
    if (bias) p.bias = vector_in(*bias, "linear");
    Holder residual_holder;
    if (residual) set_residual(p, *residual, dtype, residual_holder);
    set_output(p, output);
    if (save_pre) {
      p.pre = pre.mutable_data_ptr();
      p.ldpre = n;
    }
    run_gemm(p, input, gated ? "gated_linear" : "linear");
    return {output, pre};
  }
  auto r = linear_by_library(input, weight, bias, residual, Activation(activation), gated, out_dtype, save_pre);
  return {std::move(r.output), std::move(r.pre)};
}

std::tuple<Tensor, Tensor> linear_fwd(const Tensor& input, const Tensor& weight, OptTensor bias, OptTensor residual,
                                      int64_t activation, ScalarType acc, int64_t chunk, ScalarType out_dtype,
                                      bool save_pre) {
  if (residual) residual = matrix(*residual);
  auto [output, pre] =
      forward(matrix(input), weight, bias, residual, activation, false, acc, chunk, out_dtype, save_pre);
  return {unmatrix(output, input), pre};
}

std::tuple<Tensor, Tensor> gated_linear_fwd(const Tensor& input, const Tensor& weight, OptTensor bias,
                                            int64_t activation, ScalarType acc, int64_t chunk, ScalarType out_dtype,
                                            bool save_pre) {
  auto [output, pre] =
      forward(matrix(input), weight, bias, std::nullopt, activation, true, acc, chunk, out_dtype, save_pre);
  return {unmatrix(output, input), pre};
}

// -------------------------------------------------------------------------------------------------------------
// backward

std::tuple<Tensor, Tensor> act_bwd(const Tensor& dy, const OptTensor& saved, Activation activation, bool gated,
                                   bool saved_is_output, OptDtype dpre_dtype, OptDtype dbias_dtype) {
  // The kernels compute in fp64 for fp64 dy: a fp64 layer with a narrower output gets a wider dy.
  if (saved && saved->scalar_type() == ScalarType::Double && dy.scalar_type() != ScalarType::Double)
    return act_bwd(torch::stable::to(dy, ScalarType::Double), saved, activation, gated, saved_is_output, dpre_dtype,
                   dbias_dtype);
  const int64_t m = dy.size(0), n = gated ? 2 * dy.size(1) : dy.size(1);
  Tensor dpre = dpre_dtype ? empty_contiguous(dy, *dpre_dtype, {m, n}) : Tensor();
  Tensor dbias = dbias_dtype ? empty_contiguous(dy, *dbias_dtype, {n}) : Tensor();
  if (m == 0 || n == 0) {
    if (dbias_dtype) torch::stable::zero_(dbias);
    return {dpre, dbias};
  }
  ActBwdParams p;
  Holder dy_holder, saved_holder;
  p.rows = m;
  p.cols = dy.size(1);
  p.gated = gated;
  p.activation = activation;
  p.dy = rows_in(dy, 1, 2, dy_holder, "linear");
  if (saved) p.saved = rows_in(*saved, 1, 2, saved_holder, "linear");
  p.saved_is_output = saved_is_output;
  if (dpre_dtype) p.dpre = rows_out(dpre, 1, 2, "linear");
  if (dbias_dtype) p.dbias = vector_out(dbias, "linear");
  run_act_bwd(p, dy);
  return {dpre, dbias};
}

std::tuple<Tensor, Tensor> linear_act_bwd(const Tensor& dy, OptTensor saved, int64_t activation, bool saved_is_output,
                                          OptDtype dpre_dtype, OptDtype dbias_dtype) {
  if (saved) saved = matrix(*saved);
  auto [dpre, dbias] =
      act_bwd(matrix(dy), saved, Activation(activation), false, saved_is_output, dpre_dtype, dbias_dtype);
  return {dpre_dtype ? unmatrix(dpre, dy) : dpre, dbias};
}

std::tuple<Tensor, Tensor> gated_linear_act_bwd(const Tensor& dy, const Tensor& saved, int64_t activation,
                                                OptDtype dpre_dtype, OptDtype dbias_dtype) {
  auto [dpre, dbias] = act_bwd(matrix(dy), saved, Activation(activation), true, false, dpre_dtype, dbias_dtype);
  return {dpre_dtype ? unmatrix(dpre, dy) : dpre, dbias};
}

std::tuple<Tensor, Tensor> dgrad(const Tensor& dpre, const Tensor& weight, const OptTensor& saved, int64_t activation,
                                 bool saved_is_output, bool want_act, ScalarType acc, int64_t chunk,
                                 ScalarType out_dtype) {
  const int64_t m = dpre.size(0), n = weight.size(1), k = dpre.size(1);
  const ScalarType dtype = dpre.scalar_type();
  if (by_gemm(dpre, acc, chunk, m, n, k)) {
    if (out_dtype == ScalarType::Double) {
      auto [wide, act] =
          dgrad(dpre, weight, saved, activation, saved_is_output, want_act, acc, chunk, ScalarType::Float);
      return {torch::stable::to(wide, ScalarType::Double), act};
    }
    Tensor dinput = empty_contiguous(dpre, out_dtype, {m, n});
    Tensor act_out = want_act ? empty_contiguous(dpre, dtype, {m, n}) : Tensor();
    Holder a_holder, b_holder;
    GemmParams p = gemm_params(m, n, k, dtype, acc, chunk);
    p.a = gemm_operand(dpre, 0, a_holder);
    p.b = gemm_operand(weight, 1, b_holder);
    if (saved) {
      p.kind = EpilogueKind::kActGrad;
      p.activation = Activation(activation);
      p.saved = saved->const_data_ptr();
      p.ldsaved = saved->stride(0);
      p.saved_is_output = saved_is_output;
      if (want_act) {
        p.act_out = act_out.mutable_data_ptr();
        p.ldact_out = n;
      }
    }
    set_output(p, dinput);
    run_gemm(p, dpre, "linear backward");
    return {dinput, act_out};
  }
  Tensor dinput = empty_contiguous(dpre, dtype, {m, n});
  library_mm(dpre, weight, dinput);
  Tensor act_out = Tensor();
  if (saved) {
    if (want_act) {
      act_out = empty_contiguous(dpre, dtype, {m, n});
      activate(*saved, std::nullopt, std::nullopt, saved_is_output ? Activation::kNone : Activation(activation), false,
               act_out, nullptr);
    }
    dinput =
        std::get<0>(act_bwd(dinput, saved, Activation(activation), false, saved_is_output, out_dtype, std::nullopt));
  } else if (out_dtype != dtype) {
    dinput = torch::stable::to(dinput, out_dtype);
  }
  return {dinput, act_out};
}

// out = a^T @ b by our GEMM; add: out += it.
void run_wgrad(const Tensor& a, const Tensor& b, const Tensor& out, ScalarType acc, int64_t chunk, bool add) {
  Holder a_holder, b_holder;
  GemmParams p = gemm_params(a.size(1), b.size(1), a.size(0), a.scalar_type(), acc, chunk);
  p.a = gemm_operand(a, 1, a_holder);
  p.b = gemm_operand(b, 1, b_holder);
  set_output(p, out);
  if (add) {
    p.kind = EpilogueKind::kResidual;
    p.residual = p.d;
    p.residual_dtype = p.d_dtype;
    p.ldresidual = p.ldd;
  }
  run_gemm(p, a, "linear backward");
}

Tensor wgrad(const Tensor& dpre, const Tensor& input, bool transposed_out, ScalarType acc, int64_t chunk,
             ScalarType out_dtype) {
  if (out_dtype == ScalarType::Double && is_16bit(dpre.scalar_type()))
    return torch::stable::to(wgrad(dpre, input, transposed_out, acc, chunk, ScalarType::Float), out_dtype);
  // transposed_out: dweight^T = input^T @ dpre, laid out row by row, is dweight with strides (1, N).
  const Tensor& a = transposed_out ? input : dpre;
  const Tensor& b = transposed_out ? dpre : input;
  const int64_t m = a.size(1), n = b.size(1), k = a.size(0);
  Tensor dweight = empty_contiguous(dpre, out_dtype, {m, n});
  if (by_gemm(dpre, acc, chunk, m, n, k)) {
    run_wgrad(a, b, dweight, acc, chunk, false);
    return transposed_out ? transposed(dweight) : dweight;
  }
  if (out_dtype == dpre.scalar_type()) {
    library_mm(transposed(a), b, dweight);
  } else {
    Tensor product = empty_contiguous(dpre, dpre.scalar_type(), {m, n});
    library_mm(transposed(a), b, product);
    dweight = torch::stable::to(product, out_dtype);
  }
  return transposed_out ? transposed(dweight) : dweight;
}

std::tuple<Tensor, Tensor> linear_dgrad(const Tensor& dpre, const Tensor& weight, OptTensor saved, int64_t activation,
                                        bool saved_is_output, bool want_act, ScalarType acc, int64_t chunk,
                                        ScalarType out_dtype) {
  if (saved) saved = matrix(*saved);
  auto [dinput, act_out] =
      dgrad(matrix(dpre), weight, saved, activation, saved_is_output, want_act, acc, chunk, out_dtype);
  return {unmatrix(dinput, dpre), saved && want_act ? unmatrix(act_out, dpre) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> linear_bwd(const Tensor& dy, OptTensor input, OptTensor weight, OptTensor saved,
                                              int64_t activation, bool gated, bool transposed, ScalarType acc,
                                              int64_t chunk, OptDtype dinput_dtype, OptDtype dweight_dtype,
                                              OptDtype dbias_dtype) {
  const auto act = Activation(activation);
  const bool none = act == Activation::kNone && !gated;
  const OptTensor& operand = dinput_dtype ? weight : input;
  const ScalarType dtype = operand ? operand->scalar_type() : dy.scalar_type();  // the one computed in
  Tensor dinput, dweight, dbias, dpre = matrix(dy);
  const bool fresh = (dinput_dtype || dweight_dtype) && (!none || dy.scalar_type() != dtype);  // else dpre is dy
  if (fresh || dbias_dtype) {
    if (saved) saved = matrix(*saved);
    Tensor new_dpre;
    std::tie(new_dpre, dbias) = act_bwd(dpre, saved, act, gated, !gated && act == Activation::kRelu,
                                        fresh ? OptDtype(dtype) : std::nullopt, dbias_dtype);
    if (fresh) dpre = new_dpre;
  }
  if (dinput_dtype) {
    dinput = std::get<0>(dgrad(dpre, *weight, std::nullopt, 0, false, false, acc, chunk, *dinput_dtype));
    dinput = unmatrix(dinput, dy);
  }
  if (dweight_dtype) dweight = wgrad(dpre, matrix(*input), transposed, acc, chunk, *dweight_dtype);
  return {dinput, dweight, dbias};
}

void linear_wgrad_add(Tensor grad, const Tensor& dpre_rows, const Tensor& input_rows, ScalarType acc, int64_t chunk) {
  const Tensor dpre = matrix(dpre_rows), input = matrix(input_rows);
  const int64_t m = dpre.size(1), n = input.size(1), k = dpre.size(0);
  if (m == 0 || n == 0 || k == 0) return;
  STD_TORCH_CHECK(by_gemm(dpre, acc, chunk, m, n, k), "linear_wgrad_add: a library computes this product");
  run_wgrad(dpre, input, grad, acc, chunk, true);
}

// The bits of `arch` (80, 90) on the CPU, under any policy.
Tensor emulate_linear(const Tensor& input, const Tensor& weight, OptTensor bias, OptTensor residual, int64_t activation,
                      bool gated, ScalarType acc, int64_t chunk, ScalarType out_dtype, int64_t arch) {
  const int64_t m = input.size(0), n = weight.size(0), k = input.size(1);
  Tensor output = empty_contiguous(input, out_dtype, {m, gated ? n / 2 : n});
  if (m == 0 || n == 0) return output;
  Holder a_holder, b_holder;
  GemmParams p = gemm_params(m, n, k, input.scalar_type(), acc, chunk);
  p.a = gemm_operand(input, 0, a_holder);
  p.b = gemm_operand(weight, 0, b_holder);
  p.kind = gated ? EpilogueKind::kGated : EpilogueKind::kLinear;
  p.activation = Activation(activation);
  if (bias) p.bias = vector_in(*bias, "emulate_linear");
  Holder residual_holder;
  if (residual) set_residual(p, *residual, input.scalar_type(), residual_holder);
  set_output(p, output);
  emulate(p, int(arch));
  return output;
}

}  // namespace

#define AK_REGISTER_LINEAR(m)                                       \
  m.impl("linear_fwd", TORCH_BOX(&linear_fwd));                     \
  m.impl("gated_linear_fwd", TORCH_BOX(&gated_linear_fwd));         \
  m.impl("linear_act_bwd", TORCH_BOX(&linear_act_bwd));             \
  m.impl("gated_linear_act_bwd", TORCH_BOX(&gated_linear_act_bwd)); \
  m.impl("linear_dgrad", TORCH_BOX(&linear_dgrad));                 \
  m.impl("linear_bwd", TORCH_BOX(&linear_bwd));                     \
  m.impl("linear_wgrad_add", TORCH_BOX(&linear_wgrad_add))

STABLE_TORCH_LIBRARY_IMPL(ampkernels, CPU, m) {
  AK_REGISTER_LINEAR(m);
  m.impl("emulate_linear", TORCH_BOX(&emulate_linear));
}
#if defined(AMPKERNELS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(ampkernels, CUDA, m) {
  AK_REGISTER_LINEAR(m);
}
#endif

}  // namespace ampkernels::binding
