// norm forward of 16-bit rows that lie on 16 bytes and take a cluster, one behind the other through the same lanes.
// Rounding points are norm_fwd.cu's.
//
// In turn t every lane sums row t; takes the deviations of row t - 1, whose mean has come in, and sums those (rms has
// no such step); sends all to every warp of the row in one message; and while that is under way finishes row t - 2. So
// a warp never waits for a barrier, or for the latency of a cluster, but for what was sent half a turn ago; the rows to
// come are copied meanwhile; and a CTA keeps its place in the row, and so its parameters, in registers: from L2 they
// are twice the bytes of the row. (The latter decides: with more rows on an SM, each by itself, layer_norm in clusters
// was slower than this, and rms_norm in clusters of 8 and more.)
//
// Layout. The lanes, vectors and cluster of the plan, as in Team, and the same order of every sum: the same bits. A row
// stays in shared memory as it was stored, from its copy to its end. A lane reads what it has copied itself, so that
// copies need no barrier.
#pragma once

#include "norm_fwd_row.cuh"

namespace ampkernels::cuda {
namespace {

// Rows in shared memory: those in turns, and those on their way. Six made it slower.
constexpr int kPipelineStages = 4;
// Two mbarriers, then [phase][warp of the row's cluster] messages of up to 16 bytes.
constexpr int kExchangeBarrierBytes = 16;
constexpr int exchange_bytes(const TeamShape& shape) {
  return kExchangeBarrierBytes + 2 * (shape.lanes >> 5) * shape.cluster * 16;
}
constexpr int pipeline_ring_at(const TeamShape& shape) {
  return exchange_bytes(shape) + team_scratch_bytes(shape, sizeof(float));
}
constexpr int pipeline_shared_bytes(const TeamShape& shape) {
  return pipeline_ring_at(shape) + kPipelineStages * kRowsVectorsPerThread * shape.lanes * 16;
}

// What the warps of a row tell each other in a turn: N partial sums in one message. Turns alternate between two
// buffers: who sends in turn t + 1 has heard of turn t from all, who had then read what came in turn t - 1.
template <int N>
struct Exchange {
  static constexpr uint32_t kBytes = N == 1 ? 4 : 16;
  int lane, warps, cluster;
  uint32_t at;              // of the messages of this CTA
  uint32_t to, to_barrier;  // of this warp's, in the CTA that this lane sends to

  __device__ __forceinline__ explicit Exchange(const TeamShape& shape, int rank)
      : lane(int(threadIdx.x) & 31), cluster(shape.cluster) {
    warps = (shape.lanes >> 5) * cluster;
    if (threadIdx.x < 2) mbarrier_init(barrier(int(threadIdx.x)));
    at = shared_address(rows_shared) + kExchangeBarrierBytes;
    to = at + uint32_t(rank * (shape.lanes >> 5) + (int(threadIdx.x) >> 5)) * kBytes;
    to_barrier = shared_address(barrier(0));
    __syncthreads();
    const int other = lane < cluster ? lane : 0;
    to = remote_shared_address(to, other);
    to_barrier = remote_shared_address(to_barrier, other);
    cluster_arrive_relaxed();
    cluster_wait();
  }
  __device__ __forceinline__ uint64_t* barrier(int phase) const {
    return reinterpret_cast<uint64_t*>(rows_shared) + phase;
  }
  __device__ __forceinline__ uint32_t phase_bytes(int turn) const { return uint32_t((turn & 1) * warps) * kBytes; }

  // The sums of a warp's lanes, then of the row's warps: a Team's, all N butterflies at once.
  static __device__ __forceinline__ void butterfly(float (&v)[N]) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2)
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] += __shfl_xor_sync(0xffffffffu, v[n], o);
  }
  __device__ __forceinline__ void send(int turn, float (&v)[N]) const {
    butterfly(v);
    if (threadIdx.x == 0) mbarrier_expect(barrier(turn & 1), warps * int(kBytes));
    if (lane < cluster) send_remote_shared(to + phase_bytes(turn), to_barrier + uint32_t(turn & 1) * 8, v);
  }
  __device__ __forceinline__ void receive(int turn, float (&v)[N]) const {
    mbarrier_wait_cluster(barrier(turn & 1), turn >> 1 & 1);
    const uint32_t from = at + phase_bytes(turn);
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] = 0;
#pragma unroll 1
    for (int i = lane; i < warps; i += 32) {
      float got[kBytes / 4];
      load_shared(from + uint32_t(i) * kBytes, got);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] += got[n];
    }
    butterfly(v);
  }
};

// This lane's vectors of the rows in shared memory: 0 past the end of a row, from the start. kWhole: every lane has all
// its vectors.
template <typename T, bool kWhole, int kStages>
struct RowRing {
  static constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  static_assert(sizeof(T) == 2);
  uint32_t at, hop;  // bytes: this lane's first vector in stage 0; from vector to vector
  uint32_t offset;   // of this lane's first vector in a row
  int held;          // vectors of this lane that exist

  __device__ __forceinline__ RowRing(const TeamShape& shape, int rank, int vectors)
      : at(shared_address(rows_shared) + uint32_t(pipeline_ring_at(shape)) + threadIdx.x * 16),
        hop(uint32_t(shape.lanes) * 16) {
    const int first = rank * K * shape.lanes + int(threadIdx.x);
    offset = uint32_t(first) * 16;
    held = max(vectors - first + shape.lanes - 1, 0) / shape.lanes;
    if constexpr (!kWhole)
#pragma unroll 1
      for (int i = 0; i < kStages; ++i)
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (!exists(k)) st_shared_16(stage(i) + uint32_t(k) * hop, uint4{0, 0, 0, 0});
  }
  __device__ __forceinline__ bool exists(int k) const { return kWhole || k < held; }
  // Stage i of a row, for -kStages <= i.
  __device__ __forceinline__ uint32_t stage(int i) const { return at + uint32_t(i < 0 ? i + kStages : i) * K * hop; }

  __device__ __forceinline__ void copy(uint32_t stage, const char* row) const {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (exists(k)) cp_async_16(stage + uint32_t(k) * hop, row + offset + uint32_t(k) * hop, 16);
  }
  __device__ __forceinline__ void get(uint32_t stage, int k, float (&v)[V]) const {
    Pack<T, V> pack;
    load_shared(stage + uint32_t(k) * hop, pack.w);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = to_compute<float>(pack.element(e));
  }
  __device__ __forceinline__ void parameters(const VectorIn& m, int k, float (&v)[V]) const {
    Pack<T, V> pack;
#pragma unroll
    for (int i = 0; i < Pack<T, V>::kWords; ++i) pack.w[i] = 0;
    if (exists(k)) load_unit<16>(pack.w, static_cast<const char*>(m.data) + offset + uint32_t(k) * hop);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = to_compute<float>(pack.element(e));
  }
  __device__ __forceinline__ void store(char* row, int k, const float (&v)[V]) const {
    Pack<T, V> out;
    out.round_from(v);
    if (exists(k)) store_unit<16>(row + offset + uint32_t(k) * hop, out.w);
  }
};

// Rows first, first + step, ..., each by itself: out of line, so that it costs no registers elsewhere.
template <typename T, bool kRms>
__device__ __noinline__ void rows_again(const NormFwdParams& p, const TeamShape& shape, int64_t first, int64_t step) {
  Team<compute_t<T>> team(shape, exchange_bytes(shape));
#pragma unroll 1
  for (int64_t r = first; r < p.rows; r += step) resident_row<T, kRms>(p, team, shape.inverse, r);
}

// Parameters of the row's own dtype. Row r belongs to group r modulo their number, which shapes no sum.
template <typename T, bool kRms, bool kWhole>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    norm_fwd_pipeline(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
#if __CUDA_ARCH__ == 900  // where it was timed
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr int kStages = kPipelineStages;
  constexpr int kBehind = kRms ? 1 : 2;  // turns from a row's first sum to its end
  constexpr int N = kRms ? 1 : 3;        // rms: squares; else the sum, and of the row before the squares and deviations
  constexpr int kSquares = kRms ? 0 : 1;
  grid_launch_dependents();
  grid_dependency_wait();

  const int cluster = shape.cluster, rank = cluster_rank();
  const Exchange<N> exchange(shape, rank);
  const RowRing<T, kWhole, kStages> ring(shape, rank, int(p.cols) / V);
  const int64_t group = row_group_index(cluster), groups = gridDim.x / uint32_t(cluster);
  const int count = int((p.rows - group + groups - 1) / groups);
  const int64_t x_hop = p.x.rows.stride[0] * groups * int64_t(sizeof(T));
  const int64_t y_hop = p.y.rows.stride[0] * groups * int64_t(sizeof(T));
  const char* x = aligned_row(p.x, group, sizeof(T));  // of the next row to copy
  char* y = aligned_row(p.y, group, sizeof(T));        // of the next to end
#pragma unroll
  for (int i = 0; i < kStages - kBehind; ++i) {
    if (i < count) ring.copy(ring.stage(i), x);
    cp_async_commit();
    x += x_hop;
  }
  C weight[K][V], bias[kRms ? 1 : K][V];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    ring.parameters(p.weight, k, weight[k]);
    if constexpr (kRms)
#pragma unroll
      for (int e = 0; e < V; ++e) weight[k][e] += C(p.weight_offset);
    else
      ring.parameters(p.bias, k, bias[k]);
  }

  const C inverse = C(shape.inverse);
  C mean = 0;
  int first_again = count, stage = 0;  // of row `turn`
#pragma unroll 1
  for (int turn = 0; turn < count + kBehind; ++turn) {
    C got[N] = {0};
    if (turn > 0) exchange.receive(turn - 1, got);
    const C end_mean = mean;
    if constexpr (!kRms) mean = got[0] * inverse;

    // Of rows that do not exist, too: nobody looks at what comes of it, and there is no branch between the sums.
    cp_async_wait<kStages - kBehind - 1>();
    C sent[N] = {0};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C s[V];
      ring.get(ring.stage(stage), k, s);
      if constexpr (kRms) {
        C squares = 0;
#pragma unroll
        for (int e = 0; e < V; ++e) squares = fma(s[e], s[e], squares);
        sent[0] += squares;
      } else {
        sent[0] += tree(s, Sum{});
      }
    }
    if constexpr (!kRms) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C d[V], squares = 0;
        ring.get(ring.stage(stage - 1), k, d);
        const C center = ring.exists(k) ? mean : C(0);  // what does not exist has no deviation
#pragma unroll
        for (int e = 0; e < V; ++e) {
          d[e] -= center;
          squares = fma(d[e], d[e], squares);
        }
        sent[kSquares] += squares;
        sent[N - 1] += tree(d, Sum{});
      }
    }
    if (turn < count + kBehind - 1) exchange.send(turn, sent);

    const uint32_t end_stage = ring.stage(stage - kBehind);
    if (turn >= kBehind) {
      const int end = turn - kBehind;
      if (overflowed(got[kSquares])) first_again = min(first_again, end);
      const Statistics<C> stats = finish<kRms>(p, inverse, end_mean, got[N - 1], got[kSquares], C(1));
      if (threadIdx.x == 0 && rank == 0) save_statistics(p, stats, group + end * groups);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C h[V];
        ring.get(end_stage, k, h);
        if constexpr (!kRms)
#pragma unroll
          for (int e = 0; e < V; ++e) h[e] -= end_mean;
        stats.normalize(h, h);
#pragma unroll
        for (int e = 0; e < V; ++e) h[e] = kRms ? h[e] * weight[k][e] : h[e] * weight[k][e] + bias[kRms ? 0 : k][e];
        ring.store(y, k, h);
      }
      y += y_hop;
    }
    if (turn + kStages - kBehind < count) ring.copy(end_stage, x);
    cp_async_commit();
    x += x_hop;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  // A row whose squares overflow is rare: it and all that come after it in this group are taken again.
  if (first_again < count) rows_again<T, kRms>(p, shape, group + first_again * groups, groups);
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
