// layer_norm and rms_norm backward. With h = (s - mean) * rstd and g = dy * (weight + offset):
//   dx = rstd * (g - mean(g) - h * mean(g * h)) + dsum,   dweight = sum over rows of dy * h,   dbias = sum of dy.
//
// Layout. Resident tiers: persistent CTAs. A CTA holds `slots` groups of lanes; each takes every R-th row, R = all
// slots of the grid, and keeps the sums of its columns in registers over all of its rows. Rows of s and dy arrive in a
// ring of stages, as they lie in memory, by bulk copies (aligned rows, from 9.0 on) or by cp.async (16-byte units,
// whatever the row's alignment), and are read from shared memory twice, so a row costs no registers while it is in
// flight. Weights are widened once into shared memory. The number of row groups and which rows each adds depend on
// (rows, cols, dtypes) and the architecture only: slots of a CTA are added in order, then CTAs in order, by a second
// kernel of one pass over partials that are still in L2. Streaming tier: dx by a CTA per row, the column sums by a
// second reading. Synchronisation. One barrier per row for both means; one more where lanes read units that other lanes
// copied (rows off 16 bytes, or no whole number of vectors). Rounding points. d = s - mean, h = d * rstd; dy * weight;
// the sums (fp32, or fp64 for fp64 s) and the row's two means; g - mean(g), one fma with h, the product with rstd, plus
// dsum; then dx once to its dtype, and dweight, dbias once to theirs.
#include "norm_bwd_streaming.cuh"
#include "rows_common.cuh"

namespace ampkernels::cuda {
namespace {

struct BwdShape {
  TeamShape team;
  int groups;  // CTAs (clusters) that add rows
  int stages;
  int s_bytes;  // of one slot and stage
  int dy_bytes;
  int weight_at;  // offsets into shared memory
  int scratch_at;
  int barriers_at;
};

__device__ __forceinline__ void copy_unit(uint32_t to, const char* from, int bytes) {  // zeroes the rest of 16
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// `count` elements of a row into shared memory: unit-stride rows as they lie, beginning at the 16-byte unit that holds
// the first element; others element by element, each lane its own vectors.
template <int V, int K>
__device__ __forceinline__ void copy_row(char* to, const char* row, int64_t stride, DType dtype, int count, int lane,
                                         int lanes) {
  const int size = element_size(dtype);
  if (stride == 1) {
    const int shift = int(misalignment(row, 16)), bytes = shift + count * size;
    const char* from = row - shift + lane * 16;
    uint32_t at = uint32_t(__cvta_generic_to_shared(to)) + lane * 16;
#pragma unroll 4
    for (int b = lane * 16; b < bytes; b += lanes * 16) {
      copy_unit(at, from, min(bytes - b, 16));
      at += lanes * 16;
      from += lanes * 16;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < K * V; ++i) {
      const int c = (lane + i / V * lanes) * V + i % V;
      if (c >= count) continue;
      const char* from = row + int64_t(c) * stride * size;
      if (size == 2)
        *reinterpret_cast<uint16_t*>(to + c * 2) = *reinterpret_cast<const uint16_t*>(from);
      else if (size == 4)
        *reinterpret_cast<uint32_t*>(to + c * 4) = *reinterpret_cast<const uint32_t*>(from);
      else
        *reinterpret_cast<uint64_t*>(to + c * 8) = *reinterpret_cast<const uint64_t*>(from);
    }
  }
}

template <int U>
__device__ __forceinline__ void read_unit(uint32_t* w, const char* p) {
  if constexpr (U == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else if constexpr (U == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    w[0] = v.x, w[1] = v.y;
  } else {
    w[0] = *reinterpret_cast<const uint32_t*>(p);
  }
}

// Vector j of a row that copy_row put at `from`, the first element `shift` bytes in.
template <typename D, int V, typename C>
__device__ __forceinline__ void read_vector(const char* from, int shift, int j, C (&v)[V]) {
  using P = Pack<D, V>;
  constexpr int B = P::kBytes, U = P::kUnit, W = U / 4, kUnits = B / U;
  P pack;
  const int off = shift & (U - 1);
  const char* p = from + (shift - off) + j * B;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) read_unit<U>(pack.w + u * W, p + u * U);
  if (off) {
    uint32_t next[W];
    read_unit<U>(next, p + B);
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      funnel<W>(pack.w + u * W, pack.w + u * W, u + 1 < kUnits ? pack.w + (u + 1) * W : next, off);
  }
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] = to_compute<C>(pack.element(e));
}

// One vector as it lies in shared memory at `at`, its 16-byte units `hop` bytes apart.
template <typename D, int V>
__device__ __forceinline__ Pack<D, V> read_shared(uint32_t at, int hop) {
  Pack<D, V> pack;
#pragma unroll
  for (int u = 0; u < Pack<D, V>::kBytes / 16; ++u)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.w[u * 4]), "=r"(pack.w[u * 4 + 1]), "=r"(pack.w[u * 4 + 2]), "=r"(pack.w[u * 4 + 3])
                 : "r"(at + u * hop)
                 : "memory");
  return pack;
}
// Keeps a value from being computed ahead of its use, for which there are no registers.
[[maybe_unused]] __device__ __forceinline__ void here(uint32_t& v) {
  asm volatile("" : "+r"(v));
}

// Adds the slots' sums of this CTA's columns, in order, into the group's place in the workspace.
template <int K, int V, typename C>
__device__ __forceinline__ void publish(C* partial, const C (&v)[K][V], int slot, int slots, int lane, int lanes,
                                        int limit) {
  C* const all = reinterpret_cast<C*>(rows_shared);
  const int segment = lanes * K * V;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int e = 0; e < V; ++e) all[slot * segment + (lane + k * lanes) * V + e] = v[k][e];
  __syncthreads();
  for (int c = int(threadIdx.x); c < limit; c += int(blockDim.x)) {
    C sum = 0;
#pragma unroll 8
    for (int i = 0; i < slots; ++i) sum += all[i * segment + c];
    partial[c] = sum;
  }
}

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
  if (team.slot == 0) {
    char* const weight = rows_shared + shape.weight_at;
    const auto place = [&]<typename P>() {
      Vectors<P, V, K> w;
      w.template load<Cache::kKeep>(static_cast<const P*>(p.weight.data) + begin, 1, lane, lanes, limit);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int j = lane + k * lanes;
        if constexpr (kUnits == 1) {
          *reinterpret_cast<uint4*>(weight + j * 16) = *reinterpret_cast<const uint4*>(w.pack[k].w);
        } else {
          C v[V];
          w.get(k, v);
#pragma unroll
          for (int e = 0; e < V; ++e)
            reinterpret_cast<C*>(weight + (e / 4 * lanes * K + j) * 16)[e % 4] = v[e] + offset;
        }
      }
    };
    if constexpr (kUnits == 1) {
      place.template operator()<W>();
    } else if (p.weight.data && p.weight.stride == 1 && p.weight.dtype == dtype_of<T>::value) {
      place.template operator()<T>();
    } else if (p.weight.data && p.weight.stride == 1 && p.weight.dtype == dtype_of<Paired<T>>::value) {
      place.template operator()<Paired<T>>();
    } else {
      for (int c = lane; c < segment; c += lanes) {
        C w = c < limit ? C(1) : C(0);
        if (p.weight.data && c < limit)
          w = load_as<C>(p.weight.data, p.weight.dtype, (begin + c) * p.weight.stride) + offset;
        reinterpret_cast<C*>(weight + (c % V / 4 * lanes * K + c / V) * 16)[c % 4] = w;
      }
    }
  }
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
    const auto read = [&](C(&d)[V], C(&dy)[V], C(&w)[V]) {
      here(s_at), here(dy_at), here(w_at);
      const Pack<T, V> s = read_shared<T, V>(s_at, 16);
      const Pack<T, V> g = read_shared<T, V>(dy_at, 16);
      const Pack<W, V> weights = read_shared<W, V>(w_at, lanes * K * 16);
      s_at += lanes * 16, dy_at += lanes * 16, w_at += lanes * 16;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        d[e] = to_compute<C>(s.element(e));
        if constexpr (!kRms) d[e] -= mean;
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
        read(d, dy, w);
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
      read(d, dy, w);
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
    if (!kBulk) copy_commit();
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
        copy_wait<0>();
      else if (shape.stages == 3)
        copy_wait<1>();
      else
        copy_wait<2>();
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
  copy_wait<0>();

  C* partial = static_cast<C*>(p.workspace) + int64_t(group) * p.cols + begin;
  if (p.dweight.data) {
    publish(partial, dweight, team.slot, slots, lane, lanes, limit);
    partial += shape.groups * p.cols;
  }
  if constexpr (!kRms)
    if (p.dbias.data) publish(partial, dbias, team.slot, slots, lane, lanes, limit);
}

// Adds the groups' partial sums, groups w, w + 16, ... by warp w, then the warps in order.
template <typename C>
__global__ void __launch_bounds__(512)
    column_sums(const C* partial, int groups, int64_t cols, const VectorOut dweight, const VectorOut dbias) {
  __shared__ C sums[16][33];
  grid_launch_dependents();
  grid_dependency_wait();
  const int64_t tiles = (cols + 31) / 32;
  const bool later = blockIdx.x >= tiles;  // the second of two outputs
  const bool bias = later || !dweight.data;
  void* const out = bias ? dbias.data : dweight.data;
  const DType dtype = bias ? dbias.dtype : dweight.dtype;
  const int64_t stride = bias ? dbias.stride : dweight.stride;
  if (later) partial += groups * cols;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t c = (blockIdx.x - (later ? tiles : 0)) * 32 + lane;
  C sum = 0;
  if (c < cols)
#pragma unroll 4
    for (int g = warp; g < groups; g += 16) sum += partial[g * cols + c];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && c < cols) {
    sum = 0;
#pragma unroll
    for (int w = 0; w < 16; ++w) sum += sums[w][lane];
    store_as(out, dtype, c * stride, sum);
  }
}

RowsPlan plan_of(const NormBwdParams& p, int arch) {
  return plan_rows(RowsOp::kNormBwd, p.cols, p.s.dtype, p.dy.dtype, layout_of(p.cols, p.s), arch);
}

int groups_of(const NormBwdParams& p, const RowsPlan& plan) {
  const int slots = plan.tier == RowsTier::kStreaming ? 1 : plan.rows_per_cta;
  return int(std::min<int64_t>(plan.row_groups, (p.rows + slots - 1) / slots));
}

template <typename T, typename D>
bool aligned(const NormBwdParams& p, const RowsPlan& plan) {
  const auto mine = [](const auto& m) { return aligned_rows(m) && m.dtype == dtype_of<T>::value; };
  return plan.stages > 1 && p.cols % plan.vector == 0 && mine(p.s) && aligned_rows(p.dy) &&
         p.dy.dtype == dtype_of<D>::value && (!p.dx.data || mine(p.dx)) && (!p.dsum.data || mine(p.dsum));
}

template <typename T, typename D>
auto resident_kernel(const NormBwdParams& p, const RowsPlan& plan) {
  if constexpr (sizeof(T) < 8)
    if (aligned<T, D>(p, plan))
      return p.rms ? norm_bwd_resident<T, D, true, true> : norm_bwd_resident<T, D, false, true>;
  return p.rms ? norm_bwd_resident<T, D, true, false> : norm_bwd_resident<T, D, false, false>;
}

template <typename T, typename W, bool kDsum>
auto aligned_kernel(bool rms, RowsTier tier) {
  if (tier == RowsTier::kCluster)
    return rms ? norm_bwd_aligned<T, W, true, kDsum, TeamKind::kCluster>
               : norm_bwd_aligned<T, W, false, kDsum, TeamKind::kCluster>;
  if constexpr (sizeof(W) > sizeof(T))  // shorter rows have room for fp32 weights
    if (tier != RowsTier::kCta)
      return rms ? norm_bwd_aligned<T, W, true, kDsum, TeamKind::kWarp>
                 : norm_bwd_aligned<T, W, false, kDsum, TeamKind::kWarp>;
  return rms ? norm_bwd_aligned<T, W, true, kDsum, TeamKind::kCta>
             : norm_bwd_aligned<T, W, false, kDsum, TeamKind::kCta>;
}

template <typename T>
Status launch_streaming_dx(const NormBwdParams& p, const RowsPlan& plan, int arch, cudaStream_t stream) {
  const TeamShape shape{plan.lanes, 1, 1, 1.0 / double(p.cols)};
  return launch_rows(norm_bwd_streaming_dx<T>, arch, p.rows, plan.lanes, 1,
                     size_t(team_scratch_bytes(shape, sizeof(compute_t<T>))), stream, p, shape);
}

template <typename C>
Status launch_column_sums(const NormBwdParams& p, int groups, int arch, cudaStream_t stream) {
  const int outputs = (p.dweight.data ? 1 : 0) + (p.dbias.data ? 1 : 0);
  if (outputs == 0) return {};
  return launch_rows(column_sums<C>, arch, (p.cols + 31) / 32 * outputs, 512, 1, 0, stream,
                     static_cast<const C*>(p.workspace), groups, p.cols, p.dweight, p.dbias);
}

}  // namespace

size_t norm_bwd_workspace_bytes(const NormBwdParams& p) {
  Status status;
  const Device* device = current_device(&status);
  if (!device || p.rows == 0) return 0;
  const int outputs = (p.dweight.data ? 1 : 0) + (p.dbias.data ? 1 : 0);
  const int64_t size = p.s.dtype == DType::kFloat64 ? 8 : 4;
  return size_t(outputs) * size_t(groups_of(p, plan_of(p, device->arch))) * size_t(p.cols * size);
}

Status launch_norm_bwd(const NormBwdParams& p, cudaStream_t stream) {
  if (p.cols == 0) return {};
  Status status;
  const Device* device = current_device(&status);
  if (!device) return status;
  const int arch = device->arch;
  const RowsPlan plan = plan_of(p, arch);
  const int groups = groups_of(p, plan);
  return dispatch_row_dtype(p.s.dtype, [&]<typename T>() -> Status {
    using C = compute_t<T>;
    if (groups > 0 && plan.tier == RowsTier::kStreaming) {
      if (p.dx.data) status = launch_streaming_dx<T>(p, plan, arch, stream);
      if (status.ok() && (p.dweight.data || p.dbias.data))
        status = launch_rows(norm_bwd_streaming_sums<C>, arch, (p.cols + 127) / 128 * groups, 128, 1, 0, stream, p);
    } else if (groups > 0) {
      const int64_t elements = int64_t(plan.lanes) * plan.vectors_per_thread * plan.vector;
      const int64_t s_size = dtype_size(p.s.dtype), dy_size = dtype_size(p.dy.dtype);
      BwdShape shape;
      shape.team = team_shape(plan, p.cols);
      shape.groups = groups;
      shape.stages = plan.stages;
      shape.s_bytes = int(elements * s_size + 32);
      shape.dy_bytes = int(elements * dy_size + 32);
      const int64_t stage_bytes = norm_bwd_stage_bytes(plan, s_size, dy_size);
      const int64_t scratch_bytes = team_scratch_bytes(shape.team, sizeof(C));
      int64_t weight_bytes = norm_bwd_weight_bytes(plan, sizeof(C));
      // 16-bit rows on 16 bytes: weights as they are stored, where that makes room for a third stage.
      bool fast = false, stored = false;
      if constexpr (sizeof(T) == 2) {
        fast = arch >= 90 && aligned<T, T>(p, plan);
        stored = fast && plan.stages == 2 && p.weight.data && p.weight.stride == 1 &&
                 p.weight.dtype == dtype_of<T>::value &&
                 3 * (stage_bytes + plan.rows_per_cta * 8) + weight_bytes / 2 + scratch_bytes <= rows_max_shared(arch);
      }
      if (stored) {
        shape.stages = 3;
        weight_bytes /= 2;
      }
      const int64_t ring = shape.stages * stage_bytes;
      const int64_t merge =
          plan.rows_per_cta * elements * int64_t(sizeof(C));  // the slots' sums, after the ring's time
      shape.weight_at = int(std::max(ring, merge));
      shape.scratch_at = int(shape.weight_at + weight_bytes);
      shape.barriers_at = int(shape.scratch_at + scratch_bytes);
      const size_t shared = size_t(shape.barriers_at) + size_t(plan.rows_per_cta * shape.stages) * 8;
      const auto launch = [&](auto kernel) {
        return launch_rows(kernel, arch, groups, plan.cta_threads(), plan.cluster, shared, stream, p, shape);
      };
      if constexpr (sizeof(T) == 2) {
        if (stored)
          status = launch(p.dsum.data ? aligned_kernel<T, T, true>(p.rms, plan.tier)
                                      : aligned_kernel<T, T, false>(p.rms, plan.tier));
        else if (fast)
          status = launch(p.dsum.data ? aligned_kernel<T, float, true>(p.rms, plan.tier)
                                      : aligned_kernel<T, float, false>(p.rms, plan.tier));
        else
          status = plan.vectors_per_thread == 2 ? launch(resident_kernel<T, float>(p, plan))
                                                : launch(resident_kernel<T, T>(p, plan));
      } else {
        status = launch(resident_kernel<T, T>(p, plan));
      }
    }
    if (!status.ok()) return status;
    return launch_column_sums<C>(p, groups, arch, stream);
  });
}

}  // namespace ampkernels::cuda
