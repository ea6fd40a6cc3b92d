// Forward rows of 16-bit elements that lie on 16 bytes: a team takes one row after the other, and each of its lanes has
// its vectors of the next rows under way into shared memory (cp.async) while it works on the present one, whose
// reductions and stores would otherwise leave the memory idle.
//
// A lane reads from the ring what it has copied there itself, so the ring needs no barrier, and a lane's vectors lie as
// far apart as the CTA has threads: no bank conflicts, however many lanes share a row. Which rows a team takes, and how
// many are under way, shapes no sum.
#pragma once

#include "rows_common.cuh"

namespace ampkernels::cuda {

struct RingShape {
  TeamShape team;
  int stages;  // rows under way
  int rounds;  // rows of a team, one after the other
  int at;      // of the ring in shared memory, behind the team's scratch
  int hop;     // from one of a lane's places in the ring to the next: 16 bytes for each thread of the CTA
};

// A lane's vectors of N operands (a row, its residual), K of each, in `stages` stages; before them P parameters, which
// stay.
template <int N, int K, int P>
struct LaneRing {
  static constexpr int kPlaces = N * K;  // of a stage
  const RingShape& shape;
  const int hop;
  uint32_t at;  // the stage of the present row

  __device__ __forceinline__ explicit LaneRing(const RingShape& s) : shape(s), hop(s.hop), at(begin()) {}
  __device__ __forceinline__ uint32_t parameters() const {
    return shared_address(rows_shared) + shape.at + threadIdx.x * 16;
  }
  __device__ __forceinline__ uint32_t begin() const { return parameters() + P * K * hop; }

  __device__ __forceinline__ void copy(int n, int k, const char* from) const {
    cp_async_16(at + (n * K + k) * hop, from, 16);
  }
  __device__ __forceinline__ void clear(int k) const {
#pragma unroll
    for (int n = 0; n < N; ++n) st_shared_16(at + (n * K + k) * hop, uint4{});
  }
  template <typename T, int V>
  __device__ __forceinline__ Pack<T, V> read(int n, int k) const {
    Pack<T, V> pack;
    ld_shared_16(pack.w, at + (n * K + k) * hop);
    return pack;
  }
  __device__ __forceinline__ void next_stage() {
    at += kPlaces * hop;
    if (at == begin() + shape.stages * kPlaces * hop) at = begin();
  }

  __device__ __forceinline__ void copy_parameter(int n, int k, const char* from) const {
    cp_async_16(parameters() + (n * K + k) * hop, from, 16);
  }
  template <typename T, int V>
  __device__ __forceinline__ Pack<T, V> read_parameter(int n, int k) const {
    Pack<T, V> pack;
    ld_shared_16(pack.w, parameters() + (n * K + k) * hop);
    return pack;
  }
};

// Waits for all but the latest stages - 1 rows.
__device__ __forceinline__ void wait_for_row(int stages) {
  static_assert(kRowsMaxStages == 3);
  if (stages == 1)
    cp_async_wait<0>();
  else if (stages == 2)
    cp_async_wait<1>();
  else
    cp_async_wait<2>();
}

// The rows of a team, in the order of rounds; they follow each other in memory but for those of the CTA's other slots.
template <TeamKind kTeam>
struct RingRows {
  int64_t first;
  int rounds;  // of the CTA, or cluster
  int mine;    // rounds in which there is a row for this slot: the last may have none
  int slots;

  __device__ __forceinline__ RingRows(const RingShape& shape, int64_t rows, int slot)
      : slots(kTeam == TeamKind::kWarp ? shape.team.rows_per_cta : 1) {
    const int64_t group = row_group_index(kTeam == TeamKind::kCluster ? shape.team.cluster : 1);
    const int64_t lead = group * shape.rounds * slots;
    first = kTeam == TeamKind::kWarp ? lead + slot : lead;
    rounds = int(min((rows - lead + slots - 1) / slots, int64_t(shape.rounds)));
    mine = kTeam == TeamKind::kWarp && row(rounds - 1) >= rows ? rounds - 1 : rounds;
  }
  __device__ __forceinline__ int64_t row(int i) const { return first + int64_t(i) * slots; }
};

// Host side. `operands` rows of 16-bit elements in a stage, `parameters` that stay in shared memory.
struct RingLaunch {
  RingShape shape;
  int64_t groups;
  size_t shared;
};
inline RingLaunch ring_launch(const RowsPlan& plan, int64_t rows, int64_t cols, int stages, int operands,
                              int parameters) {
  RingLaunch launch;
  launch.shape.team = team_shape(plan, cols);
  launch.shape.at = team_scratch_bytes(launch.shape.team, sizeof(float));
  launch.shape.hop = plan.cta_threads() * 16;
  launch.shape.rounds = rows_fwd_rounds(plan, rows);
  launch.shape.stages = std::min(stages, launch.shape.rounds);
  const int64_t taken = int64_t(launch.shape.rounds) * plan.rows_per_cta;
  launch.groups = (rows + taken - 1) / taken;
  launch.shared = size_t(launch.shape.at) + size_t(launch.shape.stages * operands + parameters) *
                                                size_t(kRowsVectorsPerThread * launch.shape.hop);
  return launch;
}

}  // namespace ampkernels::cuda
