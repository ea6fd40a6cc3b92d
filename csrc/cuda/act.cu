// Bias and activation over rows, forward and backward: the epilogue of the GEMMs that a library computes, and dpre and
// dbias of every linear.
//
// Threads. A block covers TX * V columns and TY rows at a time, TX * TY = 256; a thread keeps its V columns and walks
// down the rows of the block's part, with more of them on their way. Accesses are 16 bytes where the row's address
// allows, else as wide as it does. dtypes are run-time values (uniform branches): the kernels are bound by memory.
//
// Rounding points. fp32 inside (fp64 if x, respectively dy, is fp64); every output is rounded once. Column sums: a
// thread adds its rows in ascending order, the block its TY threads in order, the second kernel the parts: in each of
// 32 lanes the parts p = lane mod 32 ascending, then the lanes in order. The shape of that tree depends on (rows, cols,
// dtype) alone.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "ampkernels/activation.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/vec.cuh"

namespace ampkernels::cuda {
namespace {

constexpr int kThreads = 256;

// Elements of an access: 16 bytes of a 16-bit dtype, or of fp64.
template <typename C>
constexpr int kElements = sizeof(C) == 8 ? 2 : 8;
// Rows of a thread in flight in forward: with two, 64 bytes or more of loads.
template <typename C, bool kGated>
constexpr int kRowsInFlight = sizeof(C) == 8 || kGated ? 1 : 2;

// How (rows, cols) is cut into blocks.
struct Partition {
  int tx;                 // threads along the columns, a power of two, at most 64
  int64_t column_blocks;  // of tx * V columns
  int64_t parts;          // of the rows
  int64_t part_rows;
};

// At most 792 blocks (6 for each of 132 SMs, as a constant: a tree must not depend on the device), which two or three
// to an SM finish in whole waves; but parts of at least `min_rows` rows: the partial sums of a part are written and
// read once.
Partition partition(int64_t rows, int64_t cols, int v, int64_t min_rows) {
  Partition s;
  s.tx = 1;
  while (s.tx < 64 && int64_t(s.tx) * v < cols) s.tx *= 2;
  s.column_blocks = (cols + s.tx * v - 1) / (s.tx * v);
  const int64_t wanted = std::max<int64_t>(792 / s.column_blocks, 1);
  const int64_t possible = std::max<int64_t>(rows / std::max<int64_t>(min_rows, 2 * kThreads / s.tx), 1);
  s.parts = std::min(wanted, possible);
  s.part_rows = (rows + s.parts - 1) / s.parts;
  s.parts = (rows + s.part_rows - 1) / s.part_rows;
  return s;
}

struct Block {
  int64_t col;  // first of the thread's V columns
  int valid;    // of them; at most 0 beyond the matrix
  int64_t row, row_end, row_step;
  int64_t part;
};

template <int V>
__device__ __forceinline__ Block locate(const Partition& s, int64_t rows, int64_t cols) {
  Block b;
  b.part = blockIdx.x / s.column_blocks;
  b.col = ((blockIdx.x % s.column_blocks) * s.tx + threadIdx.x % s.tx) * V;
  b.valid = static_cast<int>(max(min(cols - b.col, int64_t(V)), int64_t(0)));
  b.row = b.part * s.part_rows + threadIdx.x / s.tx;
  b.row_end = b.valid > 0 ? min(rows, (b.part + 1) * s.part_rows) : 0;
  b.row_step = kThreads / s.tx;
  return b;
}

// T: the dtype of every matrix, all rows 16-byte aligned, cols a multiple of V, columns side by side.
template <typename T>
struct Access {
  using C = compute_t<T>;
  static constexpr int V = kElements<C>;
  static constexpr bool kPacked = true;
  using Raw = Packet<T, V>;
  static __device__ __forceinline__ const Raw* at(const RowsIn& x, int64_t row, int64_t col) {
    return reinterpret_cast<const Raw*>(static_cast<const T*>(x.data) + row_offset(x.rows, row) + col);
  }
  static __device__ __forceinline__ Raw load(const RowsIn& x, int64_t row, int64_t col, int) {
    return *at(x, row, col);
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, C (&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = widen(raw.v[j]);
  }
  static __device__ __forceinline__ void store(const RowsOut& y, int64_t row, int64_t col, int, const C (&v)[V]) {
    store_packets<V>(static_cast<T*>(y.data) + row_offset(y.rows, row) + col, v);
  }
};

// Any dtypes, strides and alignment, computed in fp32 (kDouble: fp64).
template <bool kDouble>
struct AnyAccess {
  using C = std::conditional_t<kDouble, double, float>;
  static constexpr int V = kElements<C>;
  static constexpr bool kPacked = false;
  struct Raw {
    C v[V];
  };
  static __device__ __forceinline__ Raw load(const RowsIn& x, int64_t row, int64_t col, int valid) {
    Raw raw;
    load_n(x.data, x.dtype, row_offset(x.rows, row) + col * x.col_stride, x.col_stride, valid, raw.v);
    return raw;
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, C (&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = raw.v[j];
  }
  static __device__ __forceinline__ void store(const RowsOut& y, int64_t row, int64_t col, int valid, const C (&v)[V]) {
    store_n(y.data, y.dtype, row_offset(y.rows, row) + col * y.col_stride, y.col_stride, valid, v);
  }
};

template <typename A, bool kGated>
__global__ void __launch_bounds__(kThreads, 2)
    act_fwd_kernel(const __grid_constant__ ActFwdParams p, const __grid_constant__ Partition s) {
  using C = typename A::C;
  constexpr int V = A::V, kRows = kRowsInFlight<C, kGated>;
  const Block b = locate<V>(s, p.rows, p.cols);
  C bias[V] = {}, bias_up[V] = {};
  if (p.bias.data != nullptr) {
    load_n(p.bias.data, p.bias.dtype, b.col * p.bias.stride, p.bias.stride, b.valid, bias);
    if (kGated) load_n(p.bias.data, p.bias.dtype, (p.cols + b.col) * p.bias.stride, p.bias.stride, b.valid, bias_up);
  }
  const bool residual = !kGated && p.residual.data != nullptr;
  const Result result = result_of(residual ? DType::kFloat32 : p.y.dtype);  // a sum may cancel it
#pragma unroll 1
  for (int64_t row0 = b.row; row0 < b.row_end; row0 += kRows * b.row_step) {
    typename A::Raw raw[kRows], raw_up[kRows];  // without a gate: of the residual
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = min(row0 + i * b.row_step, b.row_end - 1);  // past the end: loaded, not stored
      raw[i] = A::load(p.x, row, b.col, b.valid);
      if (kGated) raw_up[i] = A::load(p.x, row, p.cols + b.col, b.valid);
      if (residual) raw_up[i] = A::load(p.residual, row, b.col, b.valid);
    }
    C x[kRows][V], up[kRows][V];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      A::unpack(raw[i], x[i]);
      if (kGated || residual) A::unpack(raw_up[i], up[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = row0 + i * b.row_step;
      if (row >= b.row_end) break;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        x[i][j] = x[i][j] + bias[j];
        if (kGated) up[i][j] = up[i][j] + bias_up[j];
      }
      if (p.pre.data != nullptr) {
        A::store(p.pre, row, b.col, b.valid, x[i]);
        if (kGated) A::store(p.pre, row, p.cols + b.col, b.valid, up[i]);
      }
    }
    with_activation(p.activation, result, [&]<Activation kAct, Result kResult>() {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < V; ++j) x[i][j] = activation<kAct, kResult>(x[i][j]);
    });
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = row0 + i * b.row_step;
      if (row >= b.row_end) break;
      if (kGated) {
#pragma unroll
        for (int j = 0; j < V; ++j) x[i][j] = x[i][j] * up[i][j];
      }
      if (residual) {
#pragma unroll
        for (int j = 0; j < V; ++j) x[i][j] = up[i][j] + x[i][j];
      }
      A::store(p.y, row, b.col, b.valid, x[i]);
    }
  }
}

// Adds the TY threads of each column in order; partial[col] gets the sum of the block.
template <typename C, int V>
__device__ __forceinline__ void write_partial(const C (&sum)[V], C* partial, const Block& b, const Partition& s) {
  __shared__ C shared[kThreads * V];
  const int tx = threadIdx.x % s.tx, ty = threadIdx.x / s.tx;
  __syncthreads();  // `shared` may hold the gate's sums
#pragma unroll
  for (int j = 0; j < V; ++j) shared[(ty * V + j) * s.tx + tx] = sum[j];
  __syncthreads();
  // Element j of thread tx is column tx * V + j; here one thread takes one column.
  for (int i = threadIdx.x; i < s.tx * V; i += kThreads) {
    const int64_t col = b.col - tx * V + i;
    C total = 0;
    for (int y = 0; y < kThreads / s.tx; ++y) total = total + shared[(y * V + i % V) * s.tx + i / V];
    partial[col] = total;
  }
}

// The rows that a thread of backward reads, one after the other: dy, and saved, of a gated pair twice. Packed ones come
// by cp.async through a ring in shared memory, where each thread has its own 16 bytes of a stage: kStages - 1 rows are
// on their way, 49 KB (gated) to 86 KB in an SM, and take no registers.
template <typename A, bool kIdentity, bool kGated>
struct BackwardRows {
  using Raw = typename A::Raw;
  static constexpr int kSources = kIdentity ? 1 : kGated ? 3 : 2;
  static constexpr int kStages = A::kPacked ? (kIdentity ? 8 : kGated ? 3 : 4) : 1;

  const ActBwdParams& p;
  const Block& b;
  uint4* ring;  // [stage][source][thread]
  int64_t next;
  int stage = 0;

  __device__ __forceinline__ BackwardRows(const ActBwdParams& p, const Block& b, uint4* ring)
      : p(p), b(b), ring(ring), next(b.row) {
    for (int i = 0; i < kStages - 1; ++i) fetch(i);
  }

  __device__ __forceinline__ const RowsIn& matrix(int source) const { return source == 0 ? p.dy : p.saved; }
  __device__ __forceinline__ int64_t col(int source) const { return source == 2 ? p.cols + b.col : b.col; }

  __device__ __forceinline__ void fetch(int to) {
    if constexpr (A::kPacked) {
      if (next < b.row_end) {
#pragma unroll
        for (int i = 0; i < kSources; ++i) {
          cp_async_16(shared_address(&ring[(to * kSources + i) * kThreads + threadIdx.x]),
                      A::at(matrix(i), next, col(i)), 16);
        }
      }
      cp_async_commit();
      next += b.row_step;
    }
  }

  // The thread's vectors of `row`, the next one.
  __device__ __forceinline__ void take(int64_t row, Raw (&raw)[kSources]) {
    if constexpr (A::kPacked) {
      cp_async_wait<kStages - 2>();
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        raw[i] = *reinterpret_cast<const Raw*>(&ring[(stage * kSources + i) * kThreads + threadIdx.x]);
      }
      fetch(stage == 0 ? kStages - 1 : stage - 1);
      if (++stage == kStages) stage = 0;
    } else {
#pragma unroll
      for (int i = 0; i < kSources; ++i) raw[i] = A::load(matrix(i), row, col(i), b.valid);
    }
  }
};

// kIdentity: no activation, dpre is dy; the kernel is there for the sums.
template <typename A, bool kIdentity, bool kGated>
__global__ void __launch_bounds__(kThreads, kGated ? 2 : 3)
    act_bwd_kernel(const __grid_constant__ ActBwdParams p, const __grid_constant__ Partition s, int64_t partial_cols) {
  using C = typename A::C;
  using Rows = BackwardRows<A, kIdentity, kGated>;
  constexpr int V = A::V;
  __shared__ uint4 ring[A::kPacked ? Rows::kStages * Rows::kSources * kThreads : 1];
  const Block b = locate<V>(s, p.rows, p.cols);
  Rows rows(p, b, ring);
  C sum[V] = {}, sum_up[V] = {};
#pragma unroll 1
  for (int64_t row = b.row; row < b.row_end; row += b.row_step) {
    typename A::Raw raw[Rows::kSources];
    rows.take(row, raw);
    C dpre[V], dup[V];  // dup: of a gated pair's up
    A::unpack(raw[0], dpre);
    if constexpr (!kIdentity) {
      C saved[V];
      A::unpack(raw[1], saved);
      if constexpr (kGated) A::unpack(raw[2], dup);
      // saved_is_output needs no branch: relu' is the same of relu(x) as of x.
      with_activation(p.activation, result_of(p.saved.dtype), [&]<Activation kAct, Result kResult>() {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const C dy = dpre[j], grad = activation_grad<kAct, kResult>(saved[j]);
          if constexpr (kGated) {
            dpre[j] = dy * dup[j] * grad;
            dup[j] = dy * activation<kAct, kResult>(saved[j]);
          } else {
            dpre[j] = dy * grad;
          }
        }
      });
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sum[j] = sum[j] + dpre[j];
      if constexpr (kGated) sum_up[j] = sum_up[j] + dup[j];
    }
    if (p.dpre.data != nullptr) {
      A::store(p.dpre, row, b.col, b.valid, dpre);
      if constexpr (kGated) A::store(p.dpre, row, p.cols + b.col, b.valid, dup);
    }
  }
  if (p.dbias.data == nullptr) return;
  C* partial = static_cast<C*>(p.workspace) + b.part * partial_cols;
  write_partial(sum, partial, b, s);
  if constexpr (kGated) write_partial(sum_up, partial + partial_cols / 2, b, s);
}

// dbias[col] = the parts' sums: lane y of 32 adds the parts y, y + 32, ..., then the lanes are added in order.
template <typename C>
__global__ void __launch_bounds__(1024) column_sum_kernel(const C* partial, int64_t parts, int64_t partial_cols,
                                                          int64_t cols, int64_t half, VectorOut out) {
  __shared__ C shared[32][33];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int64_t i = blockIdx.x * int64_t(32) + x;  // index into out
  C sum = 0;
  if (i < cols) {
    const C* from = partial + (half > 0 && i >= half ? partial_cols / 2 + i - half : i);
#pragma unroll 4
    for (int64_t p = y; p < parts; p += 32) sum = sum + from[p * partial_cols];
  }
  shared[y][x] = sum;
  __syncthreads();
  if (y != 0 || i >= cols) return;
  C total = 0;
#pragma unroll
  for (int l = 0; l < 32; ++l) total = total + shared[l][x];
  store_as(out.data, out.dtype, i * out.stride, total);
}

// True if Access<T> can take the matrix: rows of `cols` (or, gated, 2 * cols) 16-bit elements. An absent one is no
// obstacle.
template <typename Rows>
bool is_packed(const Rows& x, DType dtype, int64_t rows, int64_t cols) {
  if (x.data == nullptr) return true;
  bool ok = x.dtype == dtype && dtype_size(dtype) == 2 && x.col_stride == 1 && cols % 8 == 0 &&
            reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i < x.rows.ndim; ++i) ok = ok && (x.rows.stride[i] % 8 == 0 || rows == 1);
  return ok;
}

// The last column block writes whole vectors, so the partial rows are padded to whole blocks.
template <typename C>
int64_t padded_cols(const Partition& s) {
  return s.column_blocks * s.tx * kElements<C>;
}

constexpr int64_t kMinPartRows = 16;

template <typename C>
size_t act_bwd_bytes(const ActBwdParams& p) {
  const Partition s = partition(p.rows, p.cols, kElements<C>, kMinPartRows);
  return static_cast<size_t>(s.parts) * padded_cols<C>(s) * (p.gated ? 2 : 1) * sizeof(C);
}

template <typename C>
Status act_bwd(const ActBwdParams& p, cudaStream_t stream) {
  const Partition s = partition(p.rows, p.cols, kElements<C>, kMinPartRows);
  const int64_t partial_cols = padded_cols<C>(s) * (p.gated ? 2 : 1);
  const int64_t grid = s.parts * s.column_blocks, cols = p.gated ? 2 * p.cols : p.cols, sum_grid = (cols + 31) / 32;
  if (std::max(grid, sum_grid) > INT32_MAX) return {"act_bwd: too many columns"};
  const auto launch = [&]<typename A>() {
    const auto kernel = p.gated                             ? act_bwd_kernel<A, false, true>
                        : p.activation == Activation::kNone ? act_bwd_kernel<A, true, false>
                                                            : act_bwd_kernel<A, false, false>;
    kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, s, partial_cols);
  };
  const DType dtype = p.dy.dtype;
  const bool packets = is_packed(p.dy, dtype, p.rows, p.cols) && is_packed(p.saved, dtype, p.rows, p.cols) &&
                       is_packed(p.dpre, dtype, p.rows, p.cols);
  if (packets && dtype == DType::kBFloat16)
    launch.template operator()<Access<bfloat16_t>>();
  else if (packets && dtype == DType::kFloat16)
    launch.template operator()<Access<half_t>>();
  else
    launch.template operator()<AnyAccess<sizeof(C) == 8>>();
  if (const cudaError_t e = cudaPeekAtLastError()) return {nullptr, e};
  if (p.dbias.data == nullptr) return {};
  column_sum_kernel<C><<<static_cast<unsigned>(sum_grid), 1024, 0, stream>>>(
      static_cast<const C*>(p.workspace), s.parts, partial_cols, cols, p.gated ? p.cols : 0, p.dbias);
  return {nullptr, cudaPeekAtLastError()};
}

template <typename C>
Status act_fwd(const ActFwdParams& p, cudaStream_t stream) {
  const Partition s = partition(p.rows, p.cols, kElements<C>, 1);
  const int64_t grid = s.parts * s.column_blocks;
  if (grid > INT32_MAX) return {"act_fwd: too many columns"};
  const auto launch = [&]<typename A>() {
    const auto kernel = p.gated ? act_fwd_kernel<A, true> : act_fwd_kernel<A, false>;
    kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(p, s);
  };
  const DType dtype = p.x.dtype;
  const bool packets = is_packed(p.x, dtype, p.rows, p.cols) && is_packed(p.y, dtype, p.rows, p.cols) &&
                       is_packed(p.pre, dtype, p.rows, p.cols) && is_packed(p.residual, dtype, p.rows, p.cols);
  if (packets && dtype == DType::kBFloat16)
    launch.template operator()<Access<bfloat16_t>>();
  else if (packets && dtype == DType::kFloat16)
    launch.template operator()<Access<half_t>>();
  else
    launch.template operator()<AnyAccess<sizeof(C) == 8>>();
  return {nullptr, cudaPeekAtLastError()};
}

// With no rows the sums are zero: one thread for each column.
__global__ void zero_vector(VectorOut out, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  if (i < n) store_as(out.data, out.dtype, i * out.stride, 0.f);
}

}  // namespace

Status launch_act_fwd(const ActFwdParams& p, cudaStream_t stream) {
  if (p.rows <= 0 || p.cols <= 0) return {};
  return p.x.dtype == DType::kFloat64 ? act_fwd<double>(p, stream) : act_fwd<float>(p, stream);
}

size_t act_bwd_workspace_bytes(const ActBwdParams& p) {
  if (p.rows <= 0 || p.cols <= 0 || p.dbias.data == nullptr) return 0;
  return p.dy.dtype == DType::kFloat64 ? act_bwd_bytes<double>(p) : act_bwd_bytes<float>(p);
}

Status launch_act_bwd(const ActBwdParams& p, cudaStream_t stream) {
  if (p.cols <= 0) return {};
  if (p.saved_is_output && p.activation != Activation::kRelu && p.activation != Activation::kNone)
    return {"act_bwd: only relu's gradient can be taken from its output"};
  if (p.rows <= 0) {
    const int64_t cols = p.gated ? 2 * p.cols : p.cols;
    if (p.dbias.data != nullptr)
      zero_vector<<<static_cast<unsigned>((cols + 255) / 256), 256, 0, stream>>>(p.dbias, cols);
    return {nullptr, cudaPeekAtLastError()};
  }
  if ((p.activation != Activation::kNone || p.gated) && p.saved.data == nullptr)
    return {"act_bwd: an activation's gradient needs the saved tensor"};
  return p.dy.dtype == DType::kFloat64 ? act_bwd<double>(p, stream) : act_bwd<float>(p, stream);
}

}  // namespace ampkernels::cuda
