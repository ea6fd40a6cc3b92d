// The dispatcher of the GEMM: checks the request, asks the plan, launches the kernel of the device, and adds the
// splits.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "cuda/epilogue.cuh"
#include "cuda/gemm_sm80.h"
#include "cuda/launch.h"
#include "cuda/realign.cuh"
#include "plan/gemm_plan.h"
#if defined(AMPKERNELS_SM90A)  // the build has machine code for 9.0a (setup.py); without it the kernel would be empty
#include "cuda/gemm_sm90.h"
#include "cuda/gemm_sm90_small.h"
#define AMPKERNELS_GEMM_SM90 1
#else
#define AMPKERNELS_GEMM_SM90 0
#endif

namespace ampkernels::cuda {
namespace {

enum class Path { kAuto, kSm80, kSm90, kSmall };
std::atomic<Path> forced_path{Path::kAuto};

struct Device {
  int arch = 0;  // 10 * major + minor
  int sms = 0;
};

Device current_device() {
  constexpr int kCached = 64;
  static std::atomic<uint32_t> cache[kCached];  // arch << 16 | sms; 0: not asked yet
  int id = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return {};
  uint32_t packed = id < kCached ? cache[id].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    int major = 0, minor = 0, sms = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id);
    packed = static_cast<uint32_t>(10 * major + minor) << 16 | static_cast<uint32_t>(sms);
    if (id < kCached) cache[id].store(packed, std::memory_order_relaxed);
  }
  return {static_cast<int>(packed >> 16), static_cast<int>(packed & 0xffff)};
}

const char* invalid(const GemmParams& p) {
  const bool fp16 = p.dtype == DType::kFloat16;
  if (!fp16 && p.dtype != DType::kBFloat16) return "gemm: A and B must be float16 or bfloat16";
  if (p.accumulate.dtype != DType::kFloat32 && !(fp16 && p.accumulate.dtype == DType::kFloat16))
    return "gemm: the accumulator must be float32, or float16 for float16 operands";
  if (p.accumulate.chunk < 0 || p.accumulate.chunk % 16 != 0) return "gemm: chunk must be a multiple of 16";
  if (p.a.stride_k != 1 && p.a.stride_outer != 1) return "gemm: A has no unit stride";
  if (p.b.stride_k != 1 && p.b.stride_outer != 1) return "gemm: B has no unit stride";
  if (p.d_dtype != DType::kFloat32 && p.d_dtype != DType::kFloat16 && p.d_dtype != DType::kBFloat16)
    return "gemm: the output must be float32, float16 or bfloat16";
  if (p.kind == EpilogueKind::kGated && p.n % 2 != 0) return "gemm: a gated B must have an even number of rows";
  if (p.kind == EpilogueKind::kResidual &&
      (p.residual == nullptr || (p.residual_dtype != p.dtype && p.residual_dtype != DType::kFloat32)))
    return "gemm: a residual must be given, in the dtype of A and B or in float32";
  if (p.kind == EpilogueKind::kActGrad && p.saved == nullptr)
    return "gemm: an activation gradient needs the saved tensor";
  if (p.saved_is_output && p.activation != Activation::kRelu && p.activation != Activation::kNone)
    return "gemm: only relu's gradient can be taken from its output";
  return nullptr;
}

GemmProblem describe(const GemmParams& p, const Device& device) {
  const int halves = p.kind == EpilogueKind::kGated ? 2 : 1;
  GemmProblem problem;
  problem.m = p.m;
  problem.n = p.n;
  problem.k = p.k;
  problem.dtype = p.dtype;
  problem.accumulate = p.accumulate;
  problem.a_kmajor = p.a.stride_k == 1;
  problem.b_kmajor = p.b.stride_k == 1;
  problem.a_aligned = gemm_operand_aligned(p.a, p.m, p.k, 1);
  problem.b_aligned = gemm_operand_aligned(p.b, p.n, p.k, halves);
  problem.b_packable = gemm_operand_packable(p.b, p.n, halves);
  problem.epilogue = p.kind;
  problem.arch = device.arch;
  problem.sms = device.sms;
  return problem;
}

#if AMPKERNELS_GEMM_SM90
bool takes_small(const GemmParams& p, const Device& device) {
  const Path path = forced_path.load(std::memory_order_relaxed);
  const bool wanted = path == Path::kAuto ? gemm_prefers_small(describe(p, device)) : path == Path::kSmall;
  return wanted && device.arch == 90 && gemm_sm90_small_supports(p);
}
bool takes_sm90(const GemmParams& p, const Device& device) {
  const Path path = forced_path.load(std::memory_order_relaxed);
  const bool wanted = path == Path::kAuto ? gemm_prefers_sm90(describe(p, device)) : path == Path::kSm90;
  return wanted && device.arch == 90 && gemm_sm90_supports(p);
}
#endif

// An operand as a row-major matrix of rows x cols, and the bytes of its copy with rows of whole 16-byte pieces.
struct Rows {
  int64_t rows, cols, ld, pieces;
  size_t bytes() const { return static_cast<size_t>(rows) * pieces * 16; }
};
Rows rows_of(const GemmOperand& x, int64_t outer, int64_t k) {
  const bool kmajor = x.stride_k == 1;
  const int64_t cols = kmajor ? k : outer;
  return {kmajor ? outer : k, cols, kmajor ? x.stride_outer : x.stride_k, (cols + 7) / 8};
}

// One thread: one 16-byte piece of the copy. The pad at the end of a row is zero.
__global__ void __launch_bounds__(256) gemm_pack(const char* src, uint4* dst, const Rows r) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  if (i >= r.rows * r.pieces) return;
  const int64_t row = i / r.pieces, piece = i % r.pieces;
  const char* from = src + (row * r.ld + piece * 8) * 2;
  const int bytes = static_cast<int>(min(r.cols - piece * 8, int64_t(8))) * 2;
  dst[i] = realign(load_raw(from, bytes), static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15), bytes);
}

// Copies x to *workspace, points it at the copy, and moves *workspace behind it.
Status pack(GemmOperand& x, int64_t outer, int64_t k, char** workspace, cudaStream_t stream) {
  const Rows r = rows_of(x, outer, k);
  const int64_t blocks = (r.rows * r.pieces + 255) / 256;
  if (blocks > INT32_MAX) return {"gemm: an unaligned operand of 2^42 elements"};
  gemm_pack<<<static_cast<unsigned>(blocks), 256, 0, stream>>>(static_cast<const char*>(x.data),
                                                               reinterpret_cast<uint4*>(*workspace), r);
  x.data = *workspace;
  (x.stride_k == 1 ? x.stride_outer : x.stride_k) = r.pieces * 8;
  *workspace += r.bytes();
  return {nullptr, cudaPeekAtLastError()};
}

// Adds the slabs of fp32 partial sums, in ascending order of k, and applies the epilogue. One thread: four columns.
template <typename T>
__global__ void __launch_bounds__(256) gemm_reduce(const __grid_constant__ GemmParams p, int64_t split) {
  const bool gated = p.kind == EpilogueKind::kGated;
  const int64_t columns = gated ? p.n / 2 : p.n, quads = (columns + kQuad - 1) / kQuad;
  const int64_t index = blockIdx.x * int64_t(256) + threadIdx.x;
  if (index >= p.m * quads) return;
  QuadRows r;
  r.row = index / quads;
  r.row_end = r.row + 1;
  r.row_step = 1;
  r.col = index % quads * kQuad;
  r.valid = static_cast<int>(min(columns - r.col, int64_t(kQuad)));
  float bias[kQuad], bias_up[kQuad] = {};
  load_bias(p.bias, r.col, r.valid, bias);
  if (gated) load_bias(p.bias, columns + r.col, r.valid, bias_up);

  const int64_t slab = p.m * p.n;
  apply_epilogue<T>(
      p, r, bias, bias_up,
      [&](int, int up, float (&v)[kQuad]) {
        const float* from = static_cast<const float*>(p.workspace) + r.row * p.n + r.col + up * columns;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) v[j] = 0.f;
#pragma unroll 4
        for (int64_t s = 0; s < split; ++s) {
          float part[kQuad];
          load_n(from + s * slab, 1, r.valid, part);
#pragma unroll
          for (int j = 0; j < kQuad; ++j) v[j] = v[j] + part[j];
        }
      },
      [&](int, float (&v)[kQuad]) { load_epilogue_input<T>(p, r.row, r.col, r.valid, v); });
}

template <typename T>
Status launch_reduce(const GemmParams& p, int64_t split, cudaStream_t stream) {
  const int64_t columns = p.kind == EpilogueKind::kGated ? p.n / 2 : p.n;
  const int64_t blocks = (p.m * ((columns + kQuad - 1) / kQuad) + 255) / 256;
  if (blocks > INT32_MAX) return {"gemm: more than 2^31 - 1 blocks of the output"};
  gemm_reduce<T><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(p, split);
  return {nullptr, cudaPeekAtLastError()};
}

}  // namespace

bool set_gemm_path(const char* name) {
  constexpr struct {
    const char* name;
    Path path;
    bool built;
  } kPaths[] = {{"auto", Path::kAuto, true},
                {"sm80", Path::kSm80, true},
                {"sm90", Path::kSm90, AMPKERNELS_GEMM_SM90},
                {"small", Path::kSmall, AMPKERNELS_GEMM_SM90}};
  for (const auto& known : kPaths) {
    if (std::strcmp(name, known.name) != 0 || !known.built) continue;
    forced_path = known.path;
    return true;
  }
  return false;
}

size_t gemm_workspace_bytes(const GemmParams& p) {
  if (p.m <= 0 || p.n <= 0) return 0;
  const Device device = current_device();
  const GemmPlan plan = gemm_plan(describe(p, device));
  // The packed copies come first, then what the GEMM itself needs.
  const size_t packed =
      (plan.pack_a ? rows_of(p.a, p.m, p.k).bytes() : 0) + (plan.pack_b ? rows_of(p.b, p.n, p.k).bytes() : 0);
#if AMPKERNELS_GEMM_SM90
  GemmParams q = p;  // with the addresses and strides that the copies will have
  for (GemmOperand* x : {plan.pack_a ? &q.a : nullptr, plan.pack_b ? &q.b : nullptr}) {
    if (x == nullptr) continue;
    const Rows r = rows_of(*x, x == &q.a ? p.m : p.n, p.k);
    x->data = nullptr;
    (x->stride_k == 1 ? x->stride_outer : x->stride_k) = r.pieces * 8;
  }
  if (takes_small(q, device)) return packed;
  if (takes_sm90(q, device)) return packed + gemm_sm90_workspace_bytes(q);
#endif
  return packed + (plan.split > 1 ? static_cast<size_t>(plan.split) * p.m * p.n * sizeof(float) : 0);
}

Status launch_gemm(const GemmParams& params, cudaStream_t stream) {
  if (params.m <= 0 || params.n <= 0) return {};
  if (const char* text = invalid(params)) return {text};
  GemmParams p = params;
  const Device device = current_device();
  const GemmPlan plan = gemm_plan(describe(p, device));
  if ((plan.pack_a || plan.pack_b) && p.workspace == nullptr) return {"gemm: packing needs its workspace"};
  char* workspace = static_cast<char*>(p.workspace);
  if (plan.pack_a)
    if (const Status s = pack(p.a, p.m, p.k, &workspace, stream); !s.ok()) return s;
  if (plan.pack_b)
    if (const Status s = pack(p.b, p.n, p.k, &workspace, stream); !s.ok()) return s;
  p.workspace = workspace;
#if AMPKERNELS_GEMM_SM90
  if (takes_small(p, device)) return launch_gemm_sm90_small(p, stream);
  if (takes_sm90(p, device)) {
    const Status status = launch_gemm_sm90(p, stream);
    const int splits = gemm_sm90_splits(p);
    if (!status.ok() || splits == 1) return status;
    return p.dtype == DType::kBFloat16 ? launch_reduce<bfloat16_t>(p, splits, stream)
                                       : launch_reduce<half_t>(p, splits, stream);
  }
#endif
  const Path path = forced_path.load(std::memory_order_relaxed);
  if (path == Path::kSm90 || path == Path::kSmall) return {"gemm: the path that was asked for does not take this"};
  if (plan.split > 1 && p.workspace == nullptr) return {"gemm: a split of K needs its workspace"};

  const bool bf16 = p.dtype == DType::kBFloat16;
  const bool half_acc = p.accumulate.dtype == DType::kFloat16;
  const Status status = bf16       ? launch_gemm_sm80<bfloat16_t, false>(p, plan, stream)
                        : half_acc ? launch_gemm_sm80<half_t, true>(p, plan, stream)
                                   : launch_gemm_sm80<half_t, false>(p, plan, stream);
  if (!status.ok() || plan.split == 1) return status;
  return bf16 ? launch_reduce<bfloat16_t>(p, plan.split, stream) : launch_reduce<half_t>(p, plan.split, stream);
}

}  // namespace ampkernels::cuda
