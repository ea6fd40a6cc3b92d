// norm backward of 16-bit rows at any alignment and of any length, from 9.0 on: the sums of norm_bwd_resident in its
// order, so its bits.
//
// Layout. Rows of s and dy lie in a ring in shared memory as in memory, from the 16-byte unit that holds their first
// element on: whole units by one bulk copy, the unit in which the row ends by a cp.async that zeroes the rest of it and
// the unit after it. So what lies past the end of a row is zero, as in norm_bwd_aligned, and adds nothing.
//
// Thread map. Lane t has vectors t, L + t, 2L + t, 3L + t, cut out of units t, t + 1, ... by funnel shifts; how many
// words the row is off is a branch, the same for all lanes of a row, and leaves four shifts a vector, where selects
// take eleven instructions more (they are taken where a warp has several rows: 65536x255 LayerNorm 46.8 us, by branches
// 50.6). Vectors are cut once and held as stored, in 32 registers, for the second pass.
//
// dx leaves in whole units. A warp puts its vectors of dx into shared memory of its own and cuts its units, the end of
// one vector and the beginning of the next, out of that; the units that it has in part, before its first lane's vectors
// and after its last lane's, are 8 elements a vector together, and each lane writes one (of 16 lanes, two). Before, the
// end of the neighbour's vector came by shuffle: LayerNorm 16384x4095 152.9 us, through shared memory 131.2.
//
// Synchronisation. One barrier per row for both means. Every lane waits for the row's mbarrier, which counts the bytes
// of the bulk copies and the arrival of the cp.asyncs, the row's statistics among them; after the barrier of the means
// no lane reads the stage any more, and it is filled again at once. Rounding points are norm_bwd.cu's.
//
// Registers. LayerNorm has 64 column sums and 32 words of the row in 128. With all else that the compiler would keep
// from row to row it spilled 47 words, at 196.6 us for 16384x4095; what is computed again costs less (117.6).
#pragma once

#include "norm_bwd_ring.cuh"

namespace ampkernels::cuda {
namespace {

// Shared memory of a warp for its vectors of dx; the 16 bytes before and after them are read to no effect.
inline constexpr int kShiftedOutBytes = kRowsVectorsPerThread * 512 + 16;
inline int shifted_out_bytes(const RowsPlan& plan) {
  return plan.cta_threads() / 32 * kShiftedOutBytes + 16;
}

// An element of 16 bits from shared memory.
__device__ __forceinline__ void store_element(char* to, uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  *reinterpret_cast<uint16_t*>(to) = v;
}

// f(k, v) for each of K vectors of 16 bytes that begin `shift` bytes (even, under 16) after at, at + hop, ... in shared
// memory. `apart`: lanes of the warp differ in `shift`, and selects take the place of the branch.
template <int K, typename F>
__device__ __forceinline__ void read_shifted(bool apart, uint32_t at, int hop, uint32_t shift, F&& f) {
  uint32_t v[4], unit[4];
  if (apart) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      uint32_t next[4];
      load_shared(at + k * hop, unit);
      load_shared(at + k * hop + 16, next);
      funnel<4>(v, unit, next, shift);
      f(k, v);
    }
    return;
  }
  with_words<3>(int(shift), [&]<int S>() {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      uint32_t next[4];
      load_shared(at + k * hop, unit);
      if constexpr (S == 0) {  // one word of it
        uint32_t word[1];
        load_shared(at + k * hop + 16, word);
        next[0] = word[0];
      } else {
        load_shared(at + k * hop + 16, next);
      }
      cut<S>(v, unit, next, shift & 2);
      f(k, v);
    }
  });
}

template <typename T, bool kRms, TeamKind kTeam>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    norm_bwd_shifted(const __grid_constant__ NormBwdParams p, const __grid_constant__ BwdShape shape) {
#if __CUDA_ARCH__ >= 900
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread, B = int(sizeof(T));
  static_assert(V * B == 16);
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C, true, kTeam> team(shape.team, shape.scratch_at);
  const int lanes = team.lanes, slots = shape.team.rows_per_cta;
  const int &lane = team.lane, &slot = team.slot;
  const int group = int(row_group_index(kTeam == TeamKind::kCluster ? shape.team.cluster : 1));
  const int segment = lanes * K * V;  // columns of this CTA
  const int64_t begin = int64_t(team.rank) * segment;
  const int limit =
      kTeam == TeamKind::kCluster ? int(max(min(p.cols - begin, int64_t(segment)), int64_t(0))) : int(p.cols);

  // Rows from `group * slots + slot` on, every step-th; launched for fewer than 2^30. 64 of 128 registers are column
  // sums, 32 the row: what can be had from a few others is computed again for every row.
  const int rows = int(p.rows), step = shape.step;
  int row = group * slots + slot;
  uint32_t shared = shared_address(rows_shared);

  // The ring: stage, slot, then s and dy. The units that no row's copies reach are zero.
  const int slot_bytes = shape.s_bytes + shape.dy_bytes, stage_bytes = slots * slot_bytes;
  const auto stage_of = [&](int i) { return shared + i * stage_bytes + slot * slot_bytes; };
#pragma unroll 1
  for (int j = limit / V + 2 + lane; j <= lanes * K; j += lanes)
#pragma unroll 1
    for (int i = 0; i < shape.stages; ++i) {
      char* const at = rows_shared + i * stage_bytes + slot * slot_bytes + j * 16;
      *reinterpret_cast<uint4*>(at) = uint4{};
      *reinterpret_cast<uint4*>(at + shape.s_bytes) = uint4{};
    }
  // A barrier and the statistics of a row for every stage and slot.
  const auto barrier_of = [&](int i) {
    return reinterpret_cast<uint64_t*>(rows_shared + shape.barriers_at) + i * slots + slot;
  };
  const auto statistics_of = [&](int i) { return shared + shape.statistics_at + (i * slots + slot) * 8; };
  if (lane == 0)
#pragma unroll 1
    for (int i = 0; i < shape.stages; ++i) mbarrier_init(barrier_of(i), 2);
  __syncthreads();

  // A row into a stage: one lane of a slot starts its copies, counted on a barrier per slot and stage.
  const auto fetch = [&](int row, int stage) {
    if (row < rows && lane == 0) {
      uint64_t* const barrier = barrier_of(stage);
      int expected = 0;
      const auto copy = [&](const RowsIn& m, uint32_t to) {
        const char* from = aligned_row(m, row, B) + begin * B;
        const int shift = int(misalignment(from, 16)), bytes = limit > 0 ? shift + limit * B : 0;
        const int whole = bytes & ~15;
        from -= shift;
        if (whole > 0) bulk_copy(to, from, whole, barrier);
        copy_unit(to + whole, bytes > whole ? from + whole : from, bytes - whole);
        copy_unit(to + whole + 16, from, 0);
        expected += whole;
      };
      const uint32_t to = stage_of(stage);
      fence_proxy_async();  // a bulk copy may lie where a row's end, copied by cp.async, was before
      copy(p.s, to);
      copy(p.dy, to + shape.s_bytes);
      if constexpr (!kRms) copy_word(statistics_of(stage), static_cast<const C*>(p.mean) + row);
      copy_word(statistics_of(stage) + 4, static_cast<const C*>(p.rstd) + row);
      cp_async_arrive(barrier);
      mbarrier_expect(barrier, expected);
    }
  };
#pragma unroll 1
  for (int i = 0; i < shape.stages; ++i) fetch(row + i * step, i);

  // Weights, while the first rows are on their way.
  if (team.slot == 0) place_weights<T, float>(p, shape, begin, limit, kRms ? C(p.weight_offset) : C(0), lane, lanes);
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
  const bool apart = kTeam == TeamKind::kWarp && lanes < 32;
  const auto again = [&] {  // no address is kept from before
    here(team.lane), here(team.slot);
    if constexpr (kTeam == TeamKind::kWarp) {
      here(shared);
    } else {
      team.lanes = lanes;
      here(team.lanes);
      team.warps = (team.lanes >> 5) * team.cluster;
      team.stride = team.warps * slots;
    }
  };
  int turn = 0;  // the stage, and from bit 8 on the phase of its barriers
#pragma unroll 1
  for (; row - slot < rows; row += step) {  // slots stay together
    again();
    const bool active = row < rows;
    if (active) mbarrier_wait(barrier_of(turn & 255), turn >> 8);
    uint32_t statistics[2];
    load_shared(statistics_of(turn & 255), statistics);
    const C mean = bit_cast<C>(statistics[0]), rstd = bit_cast<C>(statistics[1]);
    const auto shift_of = [&](const auto& m) { return misalignment(aligned_row(m, row, B), 16); };

    // Half a vector after the other: the deviations d = s - mean, dy and w.
    uint32_t w_at, s[K][4], g[K][4];
    const auto rewind = [&] { w_at = shared + shape.weight_at + lane * 16; };
    const auto read = [&](int k, int half, C(&d)[V / 2], C(&dy)[V / 2], C(&w)[V / 2]) {
      here(w_at);
      load_shared(w_at + half * lanes * K * 16, w);
      if (half == 1) w_at += lanes * 16;
#pragma unroll
      for (int e = 0; e < V / 2; ++e) {
        const auto element = [&](const uint32_t (&v)[4]) {
          return to_compute<C>(bit_cast<T>(uint16_t(v[half * 2 + e / 2] >> (16 * (e & 1)))));
        };
        d[e] = element(s[k]);
        if constexpr (!kRms) d[e] -= mean;
        dy[e] = element(g[k]);
      }
    };

    C sums[kRms ? 1 : 2] = {0};  // of g * h, of g
    if (active) {
      const uint32_t first = stage_of(turn & 255) + lane * 16;
      read_shifted<K>(apart, first, lanes * 16, shift_of(p.s), [&](int k, const uint32_t (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[k][i] = v[i];
      });
      read_shifted<K>(apart, first + shape.s_bytes, lanes * 16, shift_of(p.dy), [&](int k, const uint32_t (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) g[k][i] = v[i];
      });
      // Past the end dy is 0, and a deviation near 0 keeps h finite, whatever the mean.
      if constexpr (!kRms)
        if ((lane + (K - 1) * lanes + 1) * V > limit) {
          const uint32_t mean_pair = round_pair<T>(mean, mean);
#pragma unroll
          for (int k = 0; k < K; ++k) {
            const int left = limit - (lane + k * lanes) * V;
            if (left < V)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                if (left < 2 * i + 2) s[k][i] = left == 2 * i + 1 ? __byte_perm(s[k][i], mean_pair, 0x7610) : mean_pair;
          }
        }
      rewind();
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C gd = 0, gm = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          C d[V / 2], dy[V / 2], w[V / 2];
          read(k, half, d, dy, w);
#pragma unroll
          for (int e = 0; e < V / 2; ++e) {
            const C h = d[e] * rstd, g = dy[e] * w[e];
            gd = fma(g, h, gd);
            C& column = dweight[k][half * V / 2 + e];
            column = fma(dy[e], h, column);
            if constexpr (!kRms) {
              gm += g;
              dbias[k][half * V / 2 + e] += dy[e];
            }
          }
        }
        sums[0] += gd;
        if constexpr (!kRms) sums[1] += gm;
      }
    }
    if (p.dx.data)
      team.reduce(sums, Sum{}, C(0));
    else
      team.sync();
    __syncwarp();  // the shuffles of a warp's reduction order no memory
    again();
    here(turn);
    fetch(row + shape.stages * step, turn & 255);  // every lane has left it
    if ((++turn & 255) == shape.stages) turn = (turn & 256) ^ 256;
    if (!p.dx.data) continue;
    // g - mean(g) first: where the gradient is 0 (a row of one element, a constant g), so is what is left of it.
    const C mean_gh = sums[0] * inverse, mean_g = kRms ? C(0) : sums[kRms ? 0 : 1] * inverse;

    // Vectors of dx, one after the other, of a warp's lanes.
    const int thread = slot * lanes + lane;
    const uint32_t out = shared + shape.out_at + thread / 32 * kShiftedOutBytes + 16 + (thread & 31) * 16;
    rewind();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      uint32_t own[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        C d[V / 2], dy[V / 2], w[V / 2];
        read(k, half, d, dy, w);
#pragma unroll
        for (int e = 0; e < V / 2; ++e) {
          const C g = dy[e] * w[e];
          d[e] = fma(-mean_gh, d[e] * rstd, kRms ? g : g - mean_g) * rstd;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) own[half * 2 + i] = round_pair<T>(d[2 * i], d[2 * i + 1]);
      }
      st_shared_16(out + k * 512, uint4{own[0], own[1], own[2], own[3]});
    }
    __syncwarp();
    if (active) {
      // This lane's vectors begin `shift` bytes into its units. It is the `near`-th of `stretch` lanes of its row and
      // warp.
      char* const dx = aligned_row(p.dx, row, B) + begin * B;
      const int shift = int(misalignment(dx, 16)), end = limit + shift / B;  // elements from the first unit's begin on
      const int stretch = min(lanes, 32), near = lane & (stretch - 1);
      const bool joined = near > 0 || shift == 0;
      char* to = dx - shift + lane * 16;
      int left = joined ? end - lane * V : 0, last = -1;
      const uint32_t from = out - shift;
      read_shifted<K>(apart, from & ~15u, 512, from & 15, [&](int k, const uint32_t (&v)[4]) {
        if (left >= V)
          store_unit<16>(to, v);
        else if (left > 0)
          last = k;
        to += lanes * 16;
        left -= lanes * V;
      });
      // The unit in which the row ends.
      if (last >= 0) {
        const int c = (lane + last * lanes) * V;
#pragma unroll
        for (int e = 0; e < V - 1; ++e)
          if (c + e < end) store_element(dx - shift + (c + e) * B, from + last * 512 + e * B);
      }
      // What a warp has of its first and last units: up to `shift` the one after the last lane's vector, then the first
      // lane's.
      if (shift != 0)
#pragma unroll 1
        for (int i = near; i < K * V; i += stretch) {
          const int e = i % V, k = i / V, away = (e * B < shift ? stretch : 0) - near;
          const int c = (lane + away + k * lanes) * V + e;
          if (c < end) store_element(dx - shift + c * B, from + away * 16 + k * 512 + e * B);
        }
    }
    __syncwarp();
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
