// norm backward of 16-bit rows that lie on 16 bytes, from 9.0 on. Layout, synchronisation and rounding points are
// norm_bwd.cu's.
#pragma once

#include "norm_bwd_ring.cuh"

namespace ampkernels::cuda {
namespace {

// Where 16-bit rows lie on 16 bytes and are whole vectors, s, dy, dx and dsum of T, from 9.0 on: the sums of
// norm_bwd_resident in its order, so its bits, with fewer instructions. No branch stands between a lane's vectors: what
// lies past the end of a row is zero in shared memory, and adds nothing. Addresses go up vector by vector, since 64 of
// 128 registers are column sums. W: the weights in shared memory, in fp32 (16-byte unit u of vector j at u * (vectors
// of the segment) + j), or as stored, which leaves room for a third stage of the longest rows. kDsum: there is a dsum.
template <typename T, typename W, bool kRms, bool kDsum, TeamKind kTeam>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    norm_bwd_aligned(const __grid_constant__ NormBwdParams p, const __grid_constant__ BwdShape shape) {
#if __CUDA_ARCH__ >= 900
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr int kUnits = V * int(sizeof(W)) / 16;  // of 16 bytes, of the weights of a vector
  static_assert(V * sizeof(T) == 16);
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C, true, kTeam> team(shape.team, shape.scratch_at);
  const int lane = team.lane, lanes = team.lanes, slots = shape.team.rows_per_cta;
  const int group = int(row_group_index(kTeam == TeamKind::kCluster ? shape.team.cluster : 1));
  const int segment = lanes * K * V;  // columns of this CTA
  const int64_t begin = int64_t(team.rank) * segment;
  const int limit = int(max(min(p.cols - begin, int64_t(segment)), int64_t(0)));

  // Row `group * slots + slot`, then every step-th. Slots stay together: rounds are those of the CTA's first slot.
  const int64_t row0 = int64_t(group) * slots + team.slot, step = int64_t(shape.groups) * slots,
                lead = row0 - team.slot;
  const int rounds = lead < p.rows ? int((p.rows - lead + step - 1) / step) : 0;

  // The ring: stage, slot, then s and dy.
  const int slot_bytes = shape.s_bytes + shape.dy_bytes, stage_bytes = slots * slot_bytes;
  const uint32_t ring = shared_address(rows_shared) + team.slot * slot_bytes;
#pragma unroll 1
  for (int j = limit / V + lane; j < lanes * K; j += lanes)
#pragma unroll 1
    for (int i = 0; i < shape.stages; ++i) {
      char* const at = rows_shared + team.slot * slot_bytes + i * stage_bytes + j * 16;
      *reinterpret_cast<uint4*>(at) = uint4{};
      *reinterpret_cast<uint4*>(at + shape.s_bytes) = uint4{};
    }
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(rows_shared + shape.barriers_at) + team.slot;  // [stage][slot]
  if (lane == 0)
#pragma unroll 1
    for (int i = 0; i < shape.stages; ++i) mbarrier_init(&barriers[i * slots]);
  __syncwarp();  // lanes of one warp may hold several slots: their barriers are initialised one after the other

  // A row into a stage: one lane of a slot starts its copies, counted on a barrier per slot and stage.
  const auto fetch = [&](int64_t row, int stage) {
    if (row < p.rows && lane == 0) {
      const uint32_t to = ring + stage * stage_bytes;
      uint64_t* const barrier = &barriers[stage * slots];
      const int bytes = limit * int(sizeof(T));
      mbarrier_expect(barrier, 2 * bytes);
      if (limit > 0) {
        bulk_copy(to, aligned_row(p.s, row, sizeof(T)) + begin * int(sizeof(T)), bytes, barrier);
        bulk_copy(to + shape.s_bytes, aligned_row(p.dy, row, sizeof(T)) + begin * int(sizeof(T)), bytes, barrier);
      }
    }
  };
  const int64_t ahead = step * (shape.stages - 1);
#pragma unroll 1
  for (int i = 0; i < shape.stages - 1; ++i) fetch(row0 + i * step, i);

  // Weights, while the first rows are on their way.
  const C offset = kRms ? C(p.weight_offset) : C(0);
  if (team.slot == 0) place_weights<T, W>(p, shape, begin, limit, offset, lane, lanes);
  __syncthreads();

  C dweight[K][V], dbias[kRms ? 1 : K][V];
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) {
      dweight[k][e] = 0;
      if constexpr (!kRms) dbias[k][e] = 0;
    }

  const C inverse = C(shape.team.inverse);
  C next_mean = 0, next_rstd = 0;
  const auto fetch_statistics = [&](int64_t row) {
    if (row < p.rows) {
      if constexpr (!kRms) next_mean = static_cast<const C*>(p.mean)[row];
      next_rstd = static_cast<const C*>(p.rstd)[row];
    }
  };
  fetch_statistics(row0);

  int stage = 0, parity = 0;
  int64_t row = row0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round, row += step) {
    const bool active = row < p.rows;
    const C mean = next_mean, rstd = next_rstd;
    const int free = stage == 0 ? shape.stages - 1 : stage - 1;
    if (active) mbarrier_wait(&barriers[stage * slots], parity);
    fetch_statistics(row + step);

    // One vector after the other, the lane's first at s_at and w_at: the deviations d = s - mean, dy and w.
    const uint32_t first = ring + stage * stage_bytes + lane * 16;
    uint32_t s_at, dy_at, w_at;
    const auto rewind = [&] {
      s_at = first, dy_at = first + shape.s_bytes;
      w_at = shared_address(rows_shared) + shape.weight_at + lane * 16;
    };
    const auto read = [&](int k, C(&d)[V], C(&dy)[V], C(&w)[V]) {
      here(s_at), here(dy_at), here(w_at);
      const Pack<T, V> s = read_shared<T, V>(s_at, 16);
      const Pack<T, V> g = read_shared<T, V>(dy_at, 16);
      const Pack<W, V> weights = read_shared<W, V>(w_at, lanes * K * 16);
      s_at += lanes * 16, dy_at += lanes * 16, w_at += lanes * 16;
      // What does not exist has no deviation: a large one, times rstd, would be infinite, and times 0 NaN.
      const C center = (lane + k * lanes) * V < limit ? mean : C(0);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        d[e] = to_compute<C>(s.element(e));
        if constexpr (!kRms) d[e] -= center;
        dy[e] = to_compute<C>(g.element(e));
        w[e] = to_compute<C>(weights.element(e));
        if constexpr (kRms && kUnits == 1) w[e] += offset;
      }
    };
    if (++stage == shape.stages) {
      stage = 0;
      parity ^= 1;
    }

    C sums[kRms ? 1 : 2] = {0};  // of g * h, of g
    if (active) {
      rewind();
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C d[V], dy[V], w[V], gd = 0, gm = 0;
        read(k, d, dy, w);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          const C h = d[e] * rstd, g = dy[e] * w[e];
          gd = fma(g, h, gd);
          dweight[k][e] = fma(dy[e], h, dweight[k][e]);
          if constexpr (!kRms) {
            gm += g;
            dbias[k][e] += dy[e];
          }
        }
        sums[0] += gd;
        if constexpr (!kRms) sums[1] += gm;
      }
    }
    if (!p.dx.data) {
      team.sync();
      fetch(row + ahead, free);
      continue;
    }
    Vectors<T, V, K> dsum;
    if (kDsum && active)
      dsum.load_aligned(aligned_row(p.dsum, row, sizeof(T)) + begin * int(sizeof(T)), lane, lanes, limit / V);
    team.reduce(sums, Sum{}, C(0));
    if (kTeam == TeamKind::kWarp) __syncwarp();  // the shuffles of a warp's reduction order no memory
    fetch(row + ahead, free);                    // every lane has left the stage of the last round
    if (!active) continue;
    // g - mean(g) first: where the gradient is 0 (a row of one element, a constant g), so is what is left of it.
    const C mean_gh = sums[0] * inverse, mean_g = kRms ? C(0) : sums[kRms ? 0 : 1] * inverse;
    char* const dx = aligned_row(p.dx, row, sizeof(T)) + begin * int(sizeof(T)) + lane * 16;
    rewind();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C d[V], dy[V], w[V];
      read(k, d, dy, w);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const C g = dy[e] * w[e];
        d[e] = fma(-mean_gh, d[e] * rstd, kRms ? g : g - mean_g) * rstd;
      }
      if constexpr (kDsum)
#pragma unroll
        for (int e = 0; e < V; ++e) d[e] += to_compute<C>(dsum.pack[k].element(e));
      Pack<T, V> out;
      out.round_from(d);
      if ((lane + k * lanes) * V < limit) store_unit<16>(dx + k * lanes * 16, out.w);
    }
  }

  C* partial = static_cast<C*>(p.workspace) + int64_t(group) * p.cols + begin;
  if (p.dweight.data) {
    publish(partial, dweight, team.slot, slots, lane, lanes, limit);
    partial += shape.groups * p.cols;
  }
  if constexpr (!kRms)
    if (p.dbias.data) publish(partial, dbias, team.slot, slots, lane, lanes, limit);
#endif
}

}  // namespace
}  // namespace ampkernels::cuda
