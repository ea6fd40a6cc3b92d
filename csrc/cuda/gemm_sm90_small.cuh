// The Hopper GEMM for few rows (m <= 64), linear and gated: bound by reading the weight B.
//
// Layout    A CTA has kRows rows of B (of a gated pair half of them gate, half up) and all rows of A. WGMMA takes 64 of
//           A; x_rows = 8, 16, 32 or 64 are loaded, and what lies behind them in shared memory goes into results that
//           nobody reads. Boxes of 64 k, both K-major, in the 128-byte swizzle; a stage of a ring is `boxes` of them,
//           A's before B's.
// Sources   Under a policy chunk c is multiplied by source c % sources: the `ranks` CTAs of a cluster, and in each of
//           them kTeams teams of a loading thread, a ring and a warpgroup that multiplies. So the chains of products of
//           two chunks run at the same time in one CTA, and the end of a chunk is not felt. Without a policy a team of
//           each rank has one share of k, and that is its chunk.
// Adders    Where there is more than one source, a team sends every chunk's sums, warp by warp, to the rank that owns
//           their rows of A, and goes on; a warpgroup of adders there adds them in ascending order, whoever sent them.
//           So neither ranks nor teams shape a sum under a policy.
// Threads   The teams' warpgroups, in each of which warp w multiplies the rows 16 w to 16 w + 15 of A; the adders,
//           kAdders, warp w for the same rows; one warp for each team, of which one thread loads. Who has the sums (the
//           adders, else the only team) writes the results. Where registers and shared memory allow it the next
//           kernel's CTA starts beside this one.
// Barriers  full[slot]: the loader's expect_tx and the copies' bytes. empty[slot]: one arrival of each warp of the
//           team. A slot is a stage of one team's ring: a barrier that two teams waited on could be two phases ahead
//           of one.
//           received[source][w]: chunk sums of its warp w have arrived. taken[team][w]: they have been added, and more
//           may come; it is told only to who will wait for it, so that nothing is on its way to a CTA that has ended.
// Sums      Chunks of k, each from zero, added in fp32, round to nearest, in ascending order.
// Epilogue  Through shared memory, so that a thread has four columns of a row (epilogue.cuh, with its rounding points).
// Launch    As a dependent of the kernel before it (griddepcontrol): the first boxes of B are brought into L2 while it
//           ends. Nothing is read or written before it has.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/gemm_sm90_small.h"
#include "cuda/ptx.cuh"
#include "cuda/ptx_sm90.cuh"

namespace ampkernels::cuda::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where this CTA's shared memory starts, which k it has, and which rows of B.
struct SmallPlace {
  uint32_t smem;
  int rank;
  int tile;

  __device__ __forceinline__ uint32_t barrier(int index) const { return smem + index * 8; }
  __device__ __forceinline__ uint32_t full(int slot) const { return barrier(slot); }
  __device__ __forceinline__ uint32_t empty(int slot) const { return barrier(kSmallMaxStages + slot); }
  __device__ __forceinline__ uint32_t taken(int team, int warp) const {
    return barrier(2 * kSmallMaxStages + team * 4 + warp);
  }
  __device__ __forceinline__ uint32_t received(int source, int warp) const {
    return barrier(2 * kSmallMaxStages + (kSmallMaxTeams + source) * 4 + warp);
  }
  __device__ __forceinline__ uint32_t ring() const { return smem + kSmallBarrierBytes; }
};
static_assert((2 * kSmallMaxStages + (kSmallMaxTeams + kSmallMaxTeams * kSmallMaxRanks) * 4) * 8 <= kSmallBarrierBytes);

// The slots of a team's ring, one after another.
struct SmallRing {
  int begin, end, slot;
  uint32_t phase;

  __device__ __forceinline__ SmallRing(const SmallArgs& a, int team, uint32_t first_phase)
      : begin(team * a.stages), end(begin + a.stages), slot(begin), phase(first_phase) {}
  __device__ __forceinline__ void advance() {
    if (++slot == end) {
      slot = begin;
      phase ^= 1;
    }
  }
};

template <int kRows>
__device__ __forceinline__ void small_load(const SmallArgs& a, const SmallPlace& at, int team, int source) {
  const int row = at.tile * (a.gated ? kRows / 2 : kRows), up = a.n_out + row;
  const uint32_t box_x = a.x_rows * 128, bytes_x = a.boxes * box_x;

  const int first = source * a.chunk_blocks;
  const int prefetch_end = min(first + min(a.prefetch, a.chunk_blocks), a.k_blocks);
  for (int kb = first; kb < prefetch_end; ++kb) {
    ptx::tma_prefetch_2d(&a.w, kb * 64, row);
    if (a.gated) ptx::tma_prefetch_2d(&a.w, kb * 64, up);
  }
  grid_dependency_wait();

  SmallRing ring(a, team, 1);  // a fresh barrier counts as "the phase before the first has ended"
  for (int begin = first; begin < a.k_blocks; begin += a.sources * a.chunk_blocks) {
    const int end = min(begin + a.chunk_blocks, a.k_blocks);
    for (int kb = begin; kb < end; kb += a.boxes) {
      const int boxes = min(a.boxes, end - kb);
      ptx::mbarrier_wait(at.empty(ring.slot), ring.phase);
      const uint32_t bar = at.full(ring.slot), x = at.ring() + ring.slot * a.stage_bytes, w = x + bytes_x;
      ptx::mbarrier_arrive_expect_tx(bar, boxes * (box_x + kRows * 128));
      for (int q = 0; q < boxes; ++q) {
        const int k = (kb + q) * 64;
        ptx::tma_load_2d_once(w + q * kRows * 128, &a.w, bar, k, row);
        if (a.gated) ptx::tma_load_2d_once(w + q * kRows * 128 + kRows * 64, &a.w, bar, k, up);
        ptx::tma_load_2d(x + q * box_x, &a.x, bar, k, 0);
      }
      ring.advance();
    }
  }
  grid_launch_dependents();
}

// Where the sums of a source's warp lie in shared memory of the rank that owns the warp's rows: fragment by fragment,
// a quad of each lane side by side.
template <int kRows>
__device__ __forceinline__ uint32_t small_piece(const SmallArgs& a, const SmallPlace& at, int source, int warp) {
  return at.smem + a.pieces_offset + (source * a.held + warp % a.held) * kRows * 64 + threadIdx.x % 32 * 16;
}

// The sums of the source's chunk number `round`, to the adder of each warp's rows. Warp by warp: warp w of a source has
// to do with warp w of the adders only.
template <int kRows>
__device__ __forceinline__ void small_send(const SmallArgs& a, const SmallPlace& at, int team, int source, int round,
                                           const float (&part)[kRows / 2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, owner = warp / a.held;
  if (warp * 16 >= a.p.m) return;
  uint32_t to = small_piece<kRows>(a, at, source, warp), bar = at.received(source, warp);
  if (round > 0) ptx::mbarrier_wait_cluster(at.taken(team, warp), (round - 1) & 1);
  if (owner == at.rank) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      ptx::store_shared_quad(to + j * 512, part[4 * j], part[4 * j + 1], part[4 * j + 2], part[4 * j + 3]);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(bar);
  } else {
    to = ptx::cluster_address(to, owner), bar = ptx::cluster_address(bar, owner);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      ptx::store_async_cluster(to + j * 512, part[4 * j], part[4 * j + 1], part[4 * j + 2], part[4 * j + 3], bar);
    }
  }
}

// Adds all chunk sums of this warp's rows of A, in ascending order, if this rank owns them.
template <int kRows, int kTeams>
__device__ __forceinline__ void small_add(const SmallArgs& a, const SmallPlace& at, float (&sum)[kRows / 2]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (warp / a.held != at.rank || warp * 16 >= a.p.m) return;
  int source = 0;
  uint32_t phase = 0;
  for (int chunk = 0; chunk < a.chunks; ++chunk) {
    const int rank = source / kTeams;
    const uint32_t bar = at.received(source, warp), from = small_piece<kRows>(a, at, source, warp);
    if (rank != at.rank && lane == 0) ptx::mbarrier_arrive_expect_tx(bar, kRows * 64);
    ptx::mbarrier_wait_cluster(bar, phase);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float4 v = ptx::load_shared_quad(from + j * 512);
      sum[4 * j] += v.x;
      sum[4 * j + 1] += v.y;
      sum[4 * j + 2] += v.z;
      sum[4 * j + 3] += v.w;
    }
    __syncwarp();
    if (lane == 0 && chunk + a.sources < a.chunks) {
      const uint32_t taken = at.taken(source % kTeams, warp);
      if (rank == at.rank) {
        ptx::mbarrier_arrive(taken);
      } else {
        ptx::mbarrier_arrive_cluster(taken, rank);
      }
    }
    if (++source == a.sources) {
      source = 0;
      phase ^= 1;
    }
  }
}

// The sums of each chunk of one source, to `finish(round, sums)`.
template <typename T, int kRows, typename Finish>
__device__ __forceinline__ void small_multiply(const SmallArgs& a, const SmallPlace& at, int team, int source,
                                               Finish&& finish) {
  constexpr uint64_t kUpper = ptx::wgmma_descriptor<false>(0) >> 32 << 32;
  const int lane = threadIdx.x % 32;
  const uint32_t step_x = a.x_rows * 128 >> 4;
  const uint32_t bytes_x = a.boxes * a.x_rows * 128;
  SmallRing ring(a, team, 0);
  int held = -1;
  const auto release_held = [&] {
    if (held >= 0 && lane == 0) ptx::mbarrier_arrive(at.empty(held));
    held = -1;
  };
  float part[kRows / 2];
  int round = 0;
  for (int chunk = source; chunk < a.chunks; chunk += a.sources, ++round) {
    const int begin = chunk * a.chunk_blocks, end = min(begin + a.chunk_blocks, a.k_blocks);
    uint32_t x = 0, w = 0;  // descriptors, without the upper half, which is the same for all
    int left = 0;           // boxes of this stage
    for (int kb = begin; kb < end; ++kb) {
      if (left == 0) {
        left = min(a.boxes, end - kb);
        ptx::mbarrier_wait(at.full(ring.slot), ring.phase);
        const uint32_t stage = at.ring() + ring.slot * a.stage_bytes;
        x = uint32_t(ptx::wgmma_descriptor<false>(stage)), w = uint32_t(ptx::wgmma_descriptor<false>(stage + bytes_x));
      }
      ptx::fence_registers(part);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t step = k * ptx::kWgmmaDescriptorStepK16<false>;
        ptx::wgmma<T, kRows, false, false>(part, kUpper | (x + step), kUpper | (w + step), kb > begin || k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      release_held();
      x += step_x;
      w += kRows * 128 >> 4;
      if (--left == 0) {
        held = ring.slot;
        ring.advance();
      }
    }
    ptx::wgmma_wait<0>();
    ptx::fence_registers(part);
    release_held();
    finish(round, part);
  }
}

// Results of the rows of A that this rank owns, by the 128 threads that have the sums. What they go through is the ring
// of the only team, or what the sources send: the adders have had all of it, while a ring may still be read for rows
// that nobody sends.
template <typename T, int kRows, bool kAdders>
__device__ __forceinline__ void small_store(const SmallArgs& a, const SmallPlace& at, const float (&sum)[kRows / 2]) {
  constexpr int kPitch = (kRows + 8) * 4;  // bytes; the pad keeps eight rows' pairs in different banks
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t staging = kAdders ? at.smem + a.pieces_offset : at.ring();
  ptx::named_barrier_sync(1, 128);
  if (warp / a.held == at.rank && warp * 16 < a.p.m) {
    const uint32_t to = staging + (warp % a.held * 16 + lane / 4) * kPitch + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      ptx::store_shared_pair(to + j * 32, sum[4 * j], sum[4 * j + 1]);
      ptx::store_shared_pair(to + j * 32 + 8 * kPitch, sum[4 * j + 2], sum[4 * j + 3]);
    }
  }
  ptx::named_barrier_sync(1, 128);

  const int columns = a.gated ? kRows / 2 : kRows, quads = columns / kQuad;
  const int staged_row = thread / quads, quad = thread % quads, first_row = at.rank * a.held * 16;
  QuadRows r;
  r.row = first_row + staged_row;
  r.row_end = min(a.p.m, int64_t(first_row + a.held * 16));
  r.row_step = 128 / quads;
  r.col = int64_t(at.tile) * columns + quad * kQuad;
  r.valid = int(min(a.n_out - r.col, int64_t(kQuad)));
  if (r.valid <= 0 || staged_row >= r.row_step) return;
  float bias[kQuad], bias_up[kQuad] = {};
  load_bias(a.p.bias, r.col, r.valid, bias);
  if (a.gated) load_bias(a.p.bias, a.n_out + r.col, r.valid, bias_up);
  apply_epilogue<T>(
      a.p, r, bias, bias_up,
      [&](int i, int up, float (&v)[kQuad]) {
        const float4 s =
            ptx::load_shared_quad(staging + (staged_row + i * r.row_step) * kPitch + quad * 16 + up * columns * 4);
        v[0] = s.x, v[1] = s.y, v[2] = s.z, v[3] = s.w;
      },
      [&](int i, float (&v)[kQuad]) { load_epilogue_input<T>(a.p, r.row + i * r.row_step, r.col, r.valid, v); });
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, int kRows, int kTeams, bool kAdders>
__global__ void __launch_bounds__(small_threads(kTeams, kAdders), small_ctas(kRows, kTeams))
    gemm_sm90_small_kernel(const __grid_constant__ SmallArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(kAdders || kTeams == 1);
  constexpr int kFirstLoader = (kTeams + kAdders) * 4;  // warps
  extern __shared__ __align__(1024) uint8_t smem[];
  SmallPlace at;
  at.smem = ptx::smem_address(smem);
  at.rank = int(blockIdx.x) % args.ranks;
  at.tile = int(blockIdx.x) / args.ranks;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  if (threadIdx.x == kFirstLoader * 32) {
    ptx::prefetch_tensormap(&args.x);
    ptx::prefetch_tensormap(&args.w);
    for (int i = 0; i < kTeams * args.stages; ++i) {
      ptx::mbarrier_init(at.full(i), 1);
      ptx::mbarrier_init(at.empty(i), 4);
    }
    if (kAdders) {
      for (int i = 0; i < kTeams * 4; ++i) ptx::mbarrier_init(at.taken(0, i), 1);
      for (int i = 0; i < args.sources * 4; ++i) ptx::mbarrier_init(at.received(0, i), 1);
    }
    ptx::fence_mbarrier_init();
  }
  const bool clustered = kAdders && args.ranks > 1;
  if (clustered) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp >= kFirstLoader) {
    const int team = warp - kFirstLoader;
    if (ptx::elect_one()) small_load<kRows>(args, at, team, at.rank * kTeams + team);
    __syncwarp();
    if (clustered) cluster_arrive_relaxed();
  } else if (kAdders && warp < kTeams * 4) {
    const int team = warp / 4, source = at.rank * kTeams + team;
    small_multiply<T, kRows>(args, at, team, source, [&](int round, const float (&part)[kRows / 2]) {
      small_send<kRows>(args, at, team, source, round, part);
    });
    __syncwarp();
    if (clustered) cluster_arrive_relaxed();
  } else {
    grid_dependency_wait();
    float sum[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sum[i] = 0.0f;
    if constexpr (kAdders) {
      small_add<kRows, kTeams>(args, at, sum);
    } else {
      small_multiply<T, kRows>(args, at, 0, 0, [&](int, const float (&part)[kRows / 2]) {
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sum[i] += part[i];
      });
    }
    __syncwarp();
    if (clustered) cluster_arrive_relaxed();
    small_store<T, kRows, kAdders>(args, at, sum);
  }
  if (clustered) {  // no CTA ends before the others have sent what they owe to its shared memory
    __syncwarp();
    cluster_wait();
  }
#endif
}

}  // namespace ampkernels::cuda::sm90
