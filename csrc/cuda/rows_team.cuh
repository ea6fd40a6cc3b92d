// The lanes that share a row, and how they agree on a sum or a maximum: Team where they are neighbours, Columns where
// each is in another warp. Both add in the same order.
#pragma once

#include "../plan/rows_plan.h"
#include "rows_ptx.cuh"

namespace ampkernels::cuda {

struct Max {
  template <typename C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return fmax(a, b);  // drops NaN: the sum of the exponentials brings it back
  }
};
struct Sum {
  template <typename C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return a + b;
  }
};

struct TeamShape {
  int lanes;  // per CTA and row
  int rows_per_cta;
  int cluster;
  double inverse;      // 1 / cols
  uint32_t zero = 0;   // at run time only: see Vectors::forget
  int plan_lanes = 0;  // WideTeam: the plan's lanes, of which a thread has two
};
inline TeamShape team_shape(const RowsPlan& plan, int64_t cols) {
  return {plan.lanes, plan.rows_per_cta, plan.cluster, 1.0 / double(cols)};
}

// Shared memory of the reductions of a CTA: two mbarriers (clusters), then [phase][value][warp of the row's cluster].
// Phases alternate (ping-pong): a lane that still reads one result cannot be overtaken by the writes of the next.
inline constexpr int kTeamBarrierBytes = 16;
constexpr int team_scratch_bytes(const TeamShape& shape, int64_t compute_size) {
  const int warps = shape.lanes > 32 ? shape.lanes / 32 * shape.rows_per_cta * shape.cluster : 0;
  return kTeamBarrierBytes + int(4 * warps * compute_size);
}

extern __shared__ __align__(16) char rows_shared[];

// The tier of the plan, where a kernel is compiled for it alone.
enum class TeamKind { kAny, kWarp, kCta, kCluster };

// The lanes that share a row, and their reductions: one barrier each. kSlots: a CTA has several rows of more than a
// warp, which takes named barriers; a kernel whose barrier ids are not constants reserves all 16, and 4 CTAs fill an
// SM.
template <typename C, bool kSlots = false, TeamKind kTeam = TeamKind::kAny>
struct Team {
  int lanes, lane, slot, cluster, rank;
  int warps;   // of the row, over the cluster
  int stride;  // of all rows of the CTA
  int round = 0;
  int at;  // of the scratch in shared memory: an offset, for which a constant costs no registers

  __device__ __forceinline__ explicit Team(const TeamShape& shape, int scratch_at = 0)
      : lanes(shape.lanes), cluster(shape.cluster), at(scratch_at) {
    if (kTeam == TeamKind::kCta || kTeam == TeamKind::kWarp) cluster = 1;
    if (in_warp()) {  // a power of two
      slot = int(threadIdx.x) >> (31 - __clz(lanes));
      lane = int(threadIdx.x) & (lanes - 1);
      warps = 1;
    } else {
      slot = kSlots ? int(threadIdx.x) / lanes : 0;
      lane = int(threadIdx.x) - slot * lanes;
      warps = (lanes >> 5) * cluster;
    }
    stride = kSlots ? warps * shape.rows_per_cta : warps;
    rank = 0;
    if (!in_cta()) {
      rank = cluster_rank();
      if (threadIdx.x == 0) {
        mbarrier_init(barrier(0));
        mbarrier_init(barrier(1));
      }
      __syncthreads();
      cluster_arrive_relaxed();  // waited for before the first remote write
    }
  }

  template <TeamKind kOther>  // goes on where t has left off
  __device__ __forceinline__ explicit Team(const Team<C, kSlots, kOther>& t)
      : lanes(t.lanes),
        lane(t.lane),
        slot(t.slot),
        cluster(t.cluster),
        rank(t.rank),
        warps(t.warps),
        stride(t.stride),
        round(t.round),
        at(t.at) {}

  __device__ __forceinline__ bool in_warp() const {
    return kTeam == TeamKind::kAny ? lanes <= 32 : kTeam == TeamKind::kWarp;
  }
  __device__ __forceinline__ bool in_cta() const {
    return kTeam == TeamKind::kAny ? cluster == 1 : kTeam != TeamKind::kCluster;
  }
  __device__ __forceinline__ uint64_t* barrier(int phase) const {
    return reinterpret_cast<uint64_t*>(rows_shared + at) + phase;
  }
  __device__ __forceinline__ C* values() const { return reinterpret_cast<C*>(rows_shared + at + kTeamBarrierBytes); }

  __device__ __forceinline__ void sync() const {
    if (in_warp())
      __syncwarp();
    else if constexpr (kSlots)
      named_barrier(slot + 1, lanes);
    else
      __syncthreads();
  }

  template <int N, typename Op>
  __device__ __forceinline__ void reduce(C (&v)[N], Op op, C identity) {
    static_assert(N <= 2);
    const int l = lane & 31;
    if (in_warp() && lanes < 32) {
#pragma unroll 1
      for (int o = lanes >> 1; o > 0; o >>= 1)
#pragma unroll
        for (int n = 0; n < N; ++n) v[n] = op(v[n], __shfl_xor_sync(0xffffffffu, v[n], o));
      return;
    }
    C half = halves(v, op);
    butterfly(half, op);
    if (in_warp()) return join(half, v);
    C* const base = values() + (round & 1) * 2 * stride + slot * (lanes >> 5);  // value n at base[n * stride]
    C* const mine = base + rank * (lanes >> 5) + (lane >> 5);
    if (in_cta()) {
      const int n = N == 2 ? l >> 4 : 0;
      if ((l & (N == 2 ? 15 : 31)) == 0) mine[n * stride] = half;
      sync();
      half = (l & 15) < warps ? base[n * stride + (l & 15)] : identity;
      butterfly(half, op);
      join(half, v);
    } else {
      join(half, v);
      if (round == 0) cluster_wait();
      uint64_t* const arrived = barrier(round & 1);
      if (lane == 0) mbarrier_expect(arrived, warps * N * int(sizeof(C)));
      if (l < cluster)
#pragma unroll
        for (int n = 0; n < N; ++n) store_remote_shared(&mine[n * stride], arrived, l, v[n]);
      mbarrier_wait_cluster(arrived, round >> 1 & 1);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        v[n] = identity;
#pragma unroll 1
        for (int i = l; i < warps; i += 32) v[n] = op(v[n], base[n * stride + i]);
      }
      half = halves(v, op);
      butterfly(half, op);
      join(half, v);
    }
    ++round;
  }

  // A butterfly over the warp that begins with its halves: of two values, each half goes on with one, at half the
  // shuffles. The operands of every `op` are those of a butterfly of both.
  template <typename Op>
  __device__ __forceinline__ C halves(const C (&v)[1], Op op) const {
    return op(v[0], __shfl_xor_sync(0xffffffffu, v[0], 16));
  }
  template <typename Op>
  __device__ __forceinline__ C halves(const C (&v)[2], Op op) const {
    const bool upper = threadIdx.x & 16;
    return op(upper ? v[1] : v[0], __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[1], 16));
  }
  template <typename Op>
  static __device__ __forceinline__ void butterfly(C& v, Op op) {
#pragma unroll
    for (int o = 8; o > 0; o /= 2) v = op(v, __shfl_xor_sync(0xffffffffu, v, o));
  }
  static __device__ __forceinline__ void join(C half, C (&v)[1]) { v[0] = half; }
  static __device__ __forceinline__ void join(C half, C (&v)[2]) {
    const bool upper = threadIdx.x & 16;
    const C other = __shfl_xor_sync(0xffffffffu, half, 16);
    v[0] = upper ? other : half;
    v[1] = upper ? half : other;
  }

  // The first vector and the step of this lane, with K vectors per lane.
  __device__ __forceinline__ int first(int vectors_per_lane) const { return rank * vectors_per_lane * lanes + lane; }
};

// Half as many threads as the plan has lanes: warp w of the W of a CTA stands for the plan's warps w and W + w, of
// which the last may not exist. Its sums are those of the plan's Team.
template <typename C, TeamKind kTeam>
struct WideTeam : Team<C, false, kTeam> {
  using Base = Team<C, false, kTeam>;
  int plan_warps;  // of a CTA

  __device__ __forceinline__ explicit WideTeam(const TeamShape& shape)
      : Base(shape), plan_warps(shape.plan_lanes >> 5) {
    this->stride = plan_warps * this->cluster;
  }

  // total[n]: the sum over the plan's lanes of v[n], this thread's two.
  template <int N>
  __device__ __forceinline__ void sum(const C (&v)[N][2], C (&total)[N]) {
    const int l = this->lane & 31, own = this->lanes >> 5, warp = this->lane >> 5, all = this->stride;
    const bool second = warp + own < plan_warps, upper = l & 16;
    C* const base = this->values() + (this->round & 1) * 2 * all;
    C* const mine = base + this->rank * plan_warps + warp;
#pragma unroll
    for (int n = 0; n < N; ++n) {  // a half of the warp for each of the two
      total[n] = this->halves(v[n], Sum{});
      this->butterfly(total[n], Sum{});
    }
    if (this->in_cta()) {
      if ((l & 15) == 0 && (second || !upper))
#pragma unroll
        for (int n = 0; n < N; ++n) mine[n * all + (upper ? own : 0)] = total[n];
      this->sync();
#pragma unroll
      for (int n = 0; n < N; ++n) total[n] = (l & 15) < all ? base[n * all + (l & 15)] : C(0);
    } else {
      if (this->round == 0) cluster_wait();
      uint64_t* const arrived = this->barrier(this->round & 1);
      if (this->lane == 0) mbarrier_expect(arrived, all * N * int(sizeof(C)));
#pragma unroll
      for (int n = 0; n < N; ++n) {
        C two[2];
        this->join(total[n], two);
        if (l < this->cluster) {
          store_remote_shared(mine + n * all, arrived, l, two[0]);
          if (second) store_remote_shared(mine + n * all + own, arrived, l, two[1]);
        }
      }
      mbarrier_wait_cluster(arrived, this->round >> 1 & 1);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        C sum = 0;
#pragma unroll 1
        for (int i = l; i < all; i += 32) sum += base[n * all + i];
        total[n] = sum + __shfl_xor_sync(0xffffffffu, sum, 16);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) this->butterfly(total[n], Sum{});
    ++this->round;
  }
};
inline TeamShape wide_shape(TeamShape shape) {  // with the plan's scratch
  shape.plan_lanes = shape.lanes;
  shape.lanes = (shape.lanes / 32 + 1) / 2 * 32;
  return shape;
}

// Lane l of every warp works on row 32 * blockIdx.x + l, and a warp does for its 32 rows what a lane of each row's Team
// would. A Team's butterflies add halves, then quarters, ... (a + b = b + a: all of its lanes get the bits of lane 0);
// here a warp adds the value of the warp half the number above it, then a quarter, ..., through shared memory.
//
// A turn is 32 lanes, a warp of the Team: warp w stands for its lanes w and w + 16, the pair that a butterfly adds
// first. A cluster's last butterfly runs over 32 lanes, of which lane i has added the sums of the Team's warps i,
// i + 32, ...: here warp w keeps those of i = w and i = w + 16. A single CTA's last butterfly, over 16 lanes, is the
// same tree with zeros beside it, which change no sum that started from +0.
template <typename C>
struct Columns {
  static constexpr int kWarps = kRowsColumnsWarps;
  static_assert(kWarps == 16);
  int lanes, cluster;  // the Team's
  int warps;           // of this CTA: a power of two
  int lane, warp;
  bool held;  // a warp stands for one lane: what it has loaded stays in registers
  int round = 0;

  __device__ __forceinline__ explicit Columns(const TeamShape& shape)
      : lanes(shape.lanes),
        cluster(shape.cluster),
        warps(min(shape.lanes, kWarps)),
        lane(int(threadIdx.x) & 31),
        warp(int(threadIdx.x) >> 5),
        held(shape.lanes <= kWarps) {}

  // f(first vector) for each lane that this warp stands for, with K vectors per lane; end_turn() after each turn.
  template <int K, typename F, typename G>
  __device__ __forceinline__ void each(F&& f, G&& end_turn) const {
#pragma unroll 1
    for (int rank = 0; rank < cluster; ++rank)
#pragma unroll 1
      for (int t = warp; t < lanes; t += kWarps) {
        f(rank * K * lanes + t);
        if (lanes <= kWarps || (t & kWarps)) end_turn();
      }
  }
  template <int K, typename F>
  __device__ __forceinline__ void each(F&& f) const {
    each<K>(f, [] {});
  }

  // Over the warps. Rounds alternate between two halves of shared memory, as Team's do.
  template <typename Op>
  __device__ __forceinline__ C reduce(C v, Op op) {
    C* const values = reinterpret_cast<C*>(rows_shared) + (round++ & 1) * 32 * warps + lane;
    values[32 * warp] = v;
#pragma unroll 1
    for (int half = warps >> 1; half > 0; half >>= 1) {
      __syncthreads();
      if (warp < half) values[32 * warp] = v = op(v, values[32 * (warp + half)]);
    }
    __syncthreads();
    return values[0];
  }

  // The sum over the Team's lanes of partial(first vector).
  template <int K, typename F>
  __device__ __forceinline__ C sum(F&& partial) {
    C pair = 0, turn_sum = 0, low = 0, high = 0;
    int turn = 0;
    each<K>([&](int first) { pair += partial(first); },
            [&] {
              turn_sum = reduce(pair, Sum{});
              if (warp == (turn & 15)) (turn & 16 ? high : low) += turn_sum;
              ++turn;
              pair = 0;
            });
    if (lanes <= 32) return turn_sum;
    return reduce(low + high, Sum{});
  }
};
inline int columns_scratch_bytes(const RowsPlan& plan) {
  return 2 * plan.cta_threads() * int(sizeof(float));
}

}  // namespace ampkernels::cuda
