// norm backward for rows that no CTA or cluster holds, and for dtypes that the ring has no vectors for: dx by a CTA per
// row that reads it twice, the column sums by a second reading, a thread per column.
#pragma once

#include "norm_bwd_ring.cuh"

namespace ampkernels::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kRowsStreamingThreads)
    norm_bwd_streaming_dx(const __grid_constant__ NormBwdParams p, const TeamShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, kFar = 1 << 24;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C> team(shape);
  const int64_t row = blockIdx.x;
  const int lane = team.lane, step = team.lanes, tile = step * V;
  const C mean = p.rms ? C(0) : static_cast<const C*>(p.mean)[row], rstd = static_cast<const C*>(p.rstd)[row];
  const C offset = p.rms ? C(p.weight_offset) : C(0);

  C sums[2] = {0, 0};
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int64_t begin = 0; begin < p.cols; begin += tile) {
      const int limit = int(min(p.cols - begin, int64_t(kFar)));
      Vectors<T, V, 1> s;
      s.load(row_pointer(p.s, row, begin), p.s.col_stride, lane, step, limit);
      C h[V], g[1][V], w[V];
      s.get(0, h);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        h[e] = (h[e] - mean) * rstd;
        g[0][e] = 0;
        w[e] = 0;
      }
      add_vector<T, V>(p.dy, row_pointer(p.dy, row, begin), lane, limit, g[0]);
      if (p.weight.data) {
        RowsIn weight;
        weight.dtype = p.weight.dtype;
        weight.col_stride = p.weight.stride;
        add_vector<T, V>(
            weight, static_cast<const char*>(p.weight.data) + begin * p.weight.stride * element_size(p.weight.dtype),
            lane, limit, w);
#pragma unroll
        for (int e = 0; e < V; ++e) g[0][e] *= w[e] + offset;
      }
      if (pass == 0) {
#pragma unroll
        for (int e = 0; e < V; ++e) {  // past the end g is 0
          sums[0] = fma(g[0][e], h[e], sums[0]);
          sums[1] += g[0][e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < V; ++e) g[0][e] = fma(-h[e], sums[0], g[0][e] - (p.rms ? C(0) : sums[1])) * rstd;
        if (p.dsum.data) add_vector<T, V>(p.dsum, row_pointer(p.dsum, row, begin), lane, limit, g[0]);
        store_vectors<T>(row_pointer(p.dx, row, begin), p.dx.dtype, p.dx.col_stride, lane, step, min(limit, tile), lane,
                         step, g);
      }
    }
    if (pass == 0) {
      team.reduce(sums, Sum{}, C(0));
      sums[0] *= C(shape.inverse);
      sums[1] *= C(shape.inverse);
    }
  }
}

// A thread per column, a group of rows per blockIdx.y.
template <typename C>
__global__ void __launch_bounds__(128) norm_bwd_streaming_sums(const __grid_constant__ NormBwdParams p) {
  grid_launch_dependents();
  grid_dependency_wait();
  const int64_t tiles = (p.cols + 127) / 128;
  const int64_t c = int64_t(blockIdx.x) % tiles * 128 + threadIdx.x;
  const int group = int(blockIdx.x / tiles), groups = int(gridDim.x / tiles);
  if (c >= p.cols) return;
  C dweight = 0, dbias = 0;
#pragma unroll 4
  for (int64_t row = group; row < p.rows; row += groups) {
    const C s = load_as<C>(p.s.data, p.s.dtype, row_offset(p.s.rows, row) + c * p.s.col_stride);
    const C dy = load_as<C>(p.dy.data, p.dy.dtype, row_offset(p.dy.rows, row) + c * p.dy.col_stride);
    const C mean = p.rms ? C(0) : static_cast<const C*>(p.mean)[row];
    dweight = fma(dy, (s - mean) * static_cast<const C*>(p.rstd)[row], dweight);
    dbias += dy;
  }
  C* partial = static_cast<C*>(p.workspace);
  if (p.dweight.data) {
    partial[group * p.cols + c] = dweight;
    partial += groups * p.cols;
  }
  if (p.dbias.data) partial[group * p.cols + c] = dbias;
}

}  // namespace
}  // namespace ampkernels::cuda
