// norm backward of rows of any layout that fit a team. Layout, synchronisation and rounding points are norm_bwd.cu's.
#pragma once

#include "norm_bwd_ring.cuh"

namespace ampkernels::cuda {
namespace {

// D: the dtype of dy. kAligned: rows on 16 bytes, of whole vectors, dx and dsum of T: every lane copies what it reads.
// Otherwise anything, and D is only the wider of the two dtypes that dy may have.
template <typename T, typename D, bool kRms, bool kAligned>
__global__ void __launch_bounds__(kRowsCtaThreads, 1)
    norm_bwd_resident(const __grid_constant__ NormBwdParams p, const __grid_constant__ BwdShape shape) {
  using C = compute_t<T>;
  constexpr int V = kVector<T>, K = sizeof(T) == 2 && sizeof(D) > 2 ? 2 : 4;
#if __CUDA_ARCH__ >= 900
  constexpr bool kBulk = kAligned;  // one lane of a slot starts its copies, counted on a barrier per slot and stage
#else
  constexpr bool kBulk = false;
#endif
  grid_launch_dependents();
  grid_dependency_wait();

  C* const weight = reinterpret_cast<C*>(rows_shared + shape.weight_at);
  Team<C, true> team(shape.team, shape.scratch_at);
  const int lane = team.lane, lanes = team.lanes, slots = shape.team.rows_per_cta;
  const int64_t group = row_group_index(shape.team.cluster);
  const int segment = lanes * K * V;  // columns of this CTA
  const int64_t begin = int64_t(team.rank) * segment;
  const int limit = int(max(min(p.cols - begin, int64_t(segment)), int64_t(0)));

  // Weights in units of 16 bytes, unit u of vector j at u * (vectors of the segment) + j: free of bank conflicts.
  constexpr int kPart = 16 / int(sizeof(C));
  const int parts = lanes * K;
  for (int c = int(threadIdx.x); c < segment; c += int(blockDim.x)) {
    C w = c < limit ? C(1) : C(0);
    if (p.weight.data && c < limit)
      w = load_as<C>(p.weight.data, p.weight.dtype, (begin + c) * p.weight.stride) + (kRms ? C(p.weight_offset) : C(0));
    weight[(c % V / kPart * parts + c / V) * kPart + c % kPart] = w;
  }
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(rows_shared + shape.barriers_at) + team.slot;  // [stage][slot]
  if (kBulk && lane == 0)
    for (int i = 0; i < shape.stages; ++i) mbarrier_init(&barriers[i * slots]);
  __syncthreads();

  const int64_t step = int64_t(shape.groups) * slots;
  const int64_t row0 = group * slots + team.slot;
  // Slots stay together: rounds are those of the CTA's first slot.
  const int64_t lead = group * slots;
  const int rounds = lead < p.rows ? int((p.rows - lead + step - 1) / step) : 0;
  const int slot_bytes = shape.s_bytes + shape.dy_bytes;
  char* const ring = rows_shared + team.slot * slot_bytes;
  const int stage_bytes = slots * slot_bytes;

  // Rows of s and dy into the next stage.
  int fetch_stage = 0;
  int64_t fetch_row = row0;
  int fetches = 0;
  const auto fetch = [&] {
    if (fetches < rounds && fetch_row < p.rows) {
      char* to = ring + fetch_stage * stage_bytes;
      if constexpr (kBulk) {
        if (lane == 0) {
          uint64_t* const barrier = &barriers[fetch_stage * slots];
          const int s_bytes = limit * int(sizeof(T)), dy_bytes = limit * int(sizeof(D));
          mbarrier_expect(barrier, s_bytes + dy_bytes);
          if (limit > 0) {
            bulk_copy(shared_address(to), aligned_row(p.s, fetch_row, sizeof(T)) + begin * int(sizeof(T)), s_bytes,
                      barrier);
            bulk_copy(shared_address(to) + shape.s_bytes,
                      aligned_row(p.dy, fetch_row, sizeof(D)) + begin * int(sizeof(D)), dy_bytes, barrier);
          }
        }
      } else if constexpr (kAligned) {
        const char* s = aligned_row(p.s, fetch_row, sizeof(T)) + begin * int(sizeof(T));
        const char* dy = aligned_row(p.dy, fetch_row, sizeof(D)) + begin * int(sizeof(D));
        constexpr int kS = V * int(sizeof(T)), kDy = V * int(sizeof(D));
        const uint32_t at = shared_address(to);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int j = lane + k * lanes;
          if (j * V >= limit) continue;
          copy_unit(at + j * kS, s + j * kS, 16);
#pragma unroll
          for (int u = 0; u < kDy; u += 16) copy_unit(at + shape.s_bytes + j * kDy + u, dy + j * kDy + u, 16);
        }
      } else {
        copy_row<V, K>(to, row_pointer(p.s, fetch_row, begin), p.s.col_stride, p.s.dtype, limit, lane, lanes);
        copy_row<V, K>(to + shape.s_bytes, row_pointer(p.dy, fetch_row, begin), p.dy.col_stride, p.dy.dtype, limit,
                       lane, lanes);
      }
    }
    if (!kBulk) cp_async_commit();
    ++fetches;
    fetch_row += step;
    fetch_stage = fetch_stage + 1 == shape.stages ? 0 : fetch_stage + 1;
  };
  C next_mean = 0, next_rstd = 0;
  const auto fetch_statistics = [&](int64_t row) {
    if (row < p.rows) {
      if constexpr (!kRms) next_mean = static_cast<const C*>(p.mean)[row];
      next_rstd = static_cast<const C*>(p.rstd)[row];
    }
  };

  C dweight[K][V], dbias[kRms ? 1 : K][V];
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) {
      dweight[k][e] = 0;
      if constexpr (!kRms) dbias[k][e] = 0;
    }

  const C inverse = C(shape.team.inverse);
  fetch_statistics(row0);
  for (int i = 0; i < shape.stages - 1; ++i) fetch();
  int stage = 0, parity = 0;
  int64_t row_or_past = row0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round, row_or_past += step) {
    const bool active = row_or_past < p.rows;
    const int64_t row = active ? row_or_past : 0;
    const C mean = next_mean, rstd = next_rstd;
    if constexpr (kBulk) {
      if (active) mbarrier_wait(&barriers[stage * slots], parity);
    } else {
      if (shape.stages == 1) {
        if (!kAligned) team.sync();
        fetch();
      }
      if (shape.stages <= 2)
        cp_async_wait<0>();
      else if (shape.stages == 3)
        cp_async_wait<1>();
      else
        cp_async_wait<2>();
      if (!kAligned) team.sync();  // lanes read units that other lanes copied
      if (shape.stages > 1) fetch();
    }
    fetch_statistics(row_or_past + step);

    const char* s_at = ring + stage * stage_bytes;
    const char* dy_at = s_at + shape.s_bytes;
    if (++stage == shape.stages) {
      stage = 0;
      parity ^= 1;
    }
    const int here = active ? limit : 0;
    int s_shift = 0, dy_shift = 0;
    if constexpr (!kAligned) {
      if (p.s.col_stride == 1) s_shift = int(misalignment(row_pointer(p.s, row, begin), 16));
      if (p.dy.col_stride == 1) dy_shift = int(misalignment(row_pointer(p.dy, row, begin), 16));
    }

    // One vector: the deviations d = s - mean, dy and g = dy * weight; zeros past the end.
    const auto read = [&](int j, C(&d)[V], C(&dy)[V], C(&g)[V]) {
      read_vector<T, V>(s_at, s_shift, j, d);
      if constexpr (kAligned) {
        read_vector<D, V>(dy_at, 0, j, dy);
      } else {
        if (p.dy.dtype == dtype_of<T>::value)
          read_vector<T, V>(dy_at, dy_shift, j, dy);
        else
          read_vector<Paired<T>, V>(dy_at, dy_shift, j, dy);  // the plan sends every other dtype to the streaming tier
        if ((j + 1) * V > here)
#pragma unroll
          for (int e = 0; e < V; ++e)
            if (j * V + e >= here) d[e] = mean, dy[e] = 0;
      }
#pragma unroll
      for (int part = 0; part < V / kPart; ++part) {
        uint32_t w[4];
        read_unit<16>(w, reinterpret_cast<const char*>(weight + (part * parts + j) * kPart));
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
          const int e = part * kPart + i;
          if constexpr (!kRms) d[e] -= mean;
          if constexpr (sizeof(C) == 4)
            g[e] = dy[e] * bit_cast<float>(w[i]);
          else
            g[e] = dy[e] * bit_cast<double>(uint64_t(w[2 * i]) | uint64_t(w[2 * i + 1]) << 32);
        }
      }
    };

    C sums[kRms ? 1 : 2] = {0};  // of g * h, of g
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int j = lane + k * lanes;
      asm volatile("" ::: "memory");  // one vector at a time: the column sums leave no registers for more
      if (j * V >= here) continue;
      C d[V], dy[V], g[V], gd = 0, gm = 0;
      read(j, d, dy, g);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const C h = d[e] * rstd;
        gd = fma(g[e], h, gd);
        dweight[k][e] = fma(dy[e], h, dweight[k][e]);
        if constexpr (!kRms) {
          gm += g[e];
          dbias[k][e] += dy[e];
        }
      }
      sums[0] += gd;
      if constexpr (!kRms) sums[1] += gm;
    }
    if (!p.dx.data) {
      if (kBulk) {
        team.sync();
        fetch();
      }
      continue;
    }
    team.reduce(sums, Sum{}, C(0));
    if (kBulk) {
      if (lanes <= 32) __syncwarp();  // the shuffles of a warp's reduction order no memory
      fetch();                        // every lane has left the stage of the last round
    }
    // g - mean(g) first: where the gradient is 0 (a row of one element, a constant g), so is what is left of it.
    const C mean_gh = sums[0] * inverse, mean_g = kRms ? C(0) : sums[kRms ? 0 : 1] * inverse;
    const auto combine = [&](int j, C(&g)[V]) {
      C d[V], dy[V];
      read(j, d, dy, g);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const C h = d[e] * rstd;
        g[e] = fma(-mean_gh, h, kRms ? g[e] : g[e] - mean_g) * rstd;
      }
    };
    if constexpr (kAligned) {
      char* dx = aligned_row(p.dx, row, sizeof(T)) + begin * int(sizeof(T));
      Vectors<T, V, K> dsum;
      if (p.dsum.data)
        dsum.load_aligned(aligned_row(p.dsum, row, sizeof(T)) + begin * int(sizeof(T)), lane, lanes, here / V);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int j = lane + k * lanes;
        if (j * V >= here) continue;
        C g[V];
        combine(j, g);
        if (p.dsum.data) {
          C a[V];
          dsum.get(k, a);
#pragma unroll
          for (int e = 0; e < V; ++e) g[e] += a[e];
        }
        Pack<T, V> out;
        out.round_from(g);
        store_unit<16>(dx + j * 16, out.w);
      }
    } else {
      char* dx = row_pointer(p.dx, row, begin);
      const char* dsum = p.dsum.data ? row_pointer(p.dsum, row, begin) : nullptr;
#pragma unroll 1
      for (int k = 0; k < K; ++k) {
        const int j = lane + k * lanes;
        C g[1][V];
        if (j * V < here) {
          combine(j, g[0]);
          if (dsum) add_vector<T, V>(p.dsum, dsum, j, here, g[0]);
        }
        store_vectors<T>(dx, p.dx.dtype, p.dx.col_stride, j, 0, here, lane, lanes, g);
      }
    }
  }
  cp_async_wait<0>();

  C* partial = static_cast<C*>(p.workspace) + int64_t(group) * p.cols + begin;
  if (p.dweight.data) {
    publish(partial, dweight, team.slot, slots, lane, lanes, limit);
    partial += shape.groups * p.cols;
  }
  if constexpr (!kRms)
    if (p.dbias.data) publish(partial, dbias, team.slot, slots, lane, lanes, limit);
}

}  // namespace
}  // namespace ampkernels::cuda
