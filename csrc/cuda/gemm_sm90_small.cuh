// The Hopper GEMM for few rows (m <= 64), linear and gated: bound by reading the weight B.
//
// Layout    A CTA has kRows rows of B (of a gated pair half of them gate, half up) and all rows of A. WGMMA takes 64 of
//           A; x_rows = 8, 16, 32 or 64 are loaded, and what lies behind them in shared memory goes into results that
//           nobody reads. Boxes of 64 k, both K-major, in the 128-byte swizzle; a stage of the ring is `boxes` of them,
//           A's before B's.
// Ranks     The CTAs of a cluster split k by chunks: rank r multiplies the chunks r, r + ranks, ... and sends every
//           warp's fragments after each (st.async) to the rank that owns their rows of A, which adds a round's in
//           ascending order. So the ranks shape no sum under a policy; without one a rank's share of k is its chunk.
// Threads   Warps 0 to 3 multiply, warp w the rows 16 w to 16 w + 15 of A, and write the results. One thread of warp 4
//           loads. 160 threads and half of an SM's shared memory: the next kernel's CTA starts beside this one.
// Barriers  full[stage]: the loader's expect_tx and the copies' bytes. empty[stage]: one arrival of each warp that
//           multiplies. received[w], taken[w]: chunk sums of warp w have arrived, have been added.
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

  __device__ __forceinline__ uint32_t full(int stage) const { return smem + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return smem + (kSmallMaxStages + stage) * 8; }
  __device__ __forceinline__ uint32_t received(int warp) const { return smem + (2 * kSmallMaxStages + warp) * 8; }
  __device__ __forceinline__ uint32_t taken(int warp) const { return smem + (2 * kSmallMaxStages + 4 + warp) * 8; }
  __device__ __forceinline__ uint32_t ring() const { return smem + kSmallBarrierBytes; }
};

template <int kRows>
__device__ __forceinline__ void small_load(const SmallArgs& a, const SmallPlace& at) {
  const int row = at.tile * (a.gated ? kRows / 2 : kRows), up = a.n_out + row;
  const uint32_t box_x = a.x_rows * 128, bytes_x = a.boxes * box_x;

  const int first = at.rank * a.chunk_blocks;
  const int prefetch_end = min(first + min(a.prefetch, a.chunk_blocks), a.k_blocks);
  for (int kb = first; kb < prefetch_end; ++kb) {
    ptx::tma_prefetch_2d(&a.w, kb * 64, row);
    if (a.gated) ptx::tma_prefetch_2d(&a.w, kb * 64, up);
  }
  grid_dependency_wait();

  int stage = 0;
  uint32_t phase = 1;  // a fresh barrier counts as "the phase before the first has ended"
  for (int begin = first; begin < a.k_blocks; begin += a.ranks * a.chunk_blocks) {
    const int end = min(begin + a.chunk_blocks, a.k_blocks);
    for (int kb = begin; kb < end; kb += a.boxes) {
      const int boxes = min(a.boxes, end - kb);
      ptx::mbarrier_wait(at.empty(stage), phase);
      const uint32_t bar = at.full(stage), x = at.ring() + stage * a.stage_bytes, w = x + bytes_x;
      ptx::mbarrier_arrive_expect_tx(bar, boxes * (box_x + kRows * 128));
      for (int q = 0; q < boxes; ++q) {
        const int k = (kb + q) * 64;
        ptx::tma_load_2d_once(w + q * kRows * 128, &a.w, bar, k, row);
        if (a.gated) ptx::tma_load_2d_once(w + q * kRows * 128 + kRows * 64, &a.w, bar, k, up);
        ptx::tma_load_2d(x + q * box_x, &a.x, bar, k, 0);
      }
      if (++stage == a.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
  grid_launch_dependents();
}

// One round of the ranks: this one's chunk, if it has one, to the owner of each warp's rows; the owner adds `sources`
// of them. Warp by warp: warp w of a rank has to do with warp w of the others only.
template <int kRows>
__device__ __forceinline__ void small_exchange(const SmallArgs& a, const SmallPlace& at, int round, bool mine,
                                               int sources, bool last, const float (&part)[kRows / 2],
                                               float (&sum)[kRows / 2]) {
  constexpr int kPieceBytes = kRows * 64;  // a warp's fragments
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp * 16 >= a.p.m) return;
  const int owner = warp * a.ranks / 4, held = 4 / a.ranks;  // an owner's warps
  const auto piece = [&](int source) {
    return at.smem + a.exchange_offset + (source * held + warp % held) * kPieceBytes + lane * 16;
  };
  // Every arrival is waited for, also by a rank that has nothing left to send: none is on its way to a CTA that has
  // ended.
  if (round > 0) ptx::mbarrier_wait_cluster(at.taken(warp), (round - 1) & 1);
  if (mine) {
    const uint32_t to = ptx::cluster_address(piece(at.rank), owner);
    const uint32_t bar = ptx::cluster_address(at.received(warp), owner);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      ptx::store_async_cluster(to + j * 512, part[4 * j], part[4 * j + 1], part[4 * j + 2], part[4 * j + 3], bar);
    }
  }
  if (owner != at.rank) return;
  if (lane == 0) ptx::mbarrier_arrive_expect_tx(at.received(warp), sources * kPieceBytes);
  ptx::mbarrier_wait_cluster(at.received(warp), round & 1);
  for (int source = 0; source < sources; ++source) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float4 v = ptx::load_shared_quad(piece(source) + j * 512);
      sum[4 * j] += v.x;
      sum[4 * j + 1] += v.y;
      sum[4 * j + 2] += v.z;
      sum[4 * j + 3] += v.w;
    }
  }
  __syncwarp();
  if (!last && lane < a.ranks) ptx::mbarrier_arrive_cluster(at.taken(warp), lane);
}

// The sums of this CTA's rows of A and of B.
template <typename T, int kRows>
__device__ __forceinline__ void small_multiply(const SmallArgs& a, const SmallPlace& at, float (&sum)[kRows / 2]) {
  const int lane = threadIdx.x % 32;
  const uint64_t step_x = a.x_rows * 128 >> 4;
  const uint32_t bytes_x = a.boxes * a.x_rows * 128;
  int stage = 0, held = -1, round = 0;
  uint32_t phase = 0;
  const auto release_held = [&] {
    if (held >= 0 && lane == 0) ptx::mbarrier_arrive(at.empty(held));
    held = -1;
  };
  float part[kRows / 2];
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sum[i] = 0.0f;
  for (int first = 0; first < a.chunks; first += a.ranks, ++round) {
    const int begin = (first + at.rank) * a.chunk_blocks, end = min(begin + a.chunk_blocks, a.k_blocks);
    uint64_t x = 0, w = 0;
    int left = 0;  // boxes of this stage
    for (int kb = begin; kb < end; ++kb) {
      if (left == 0) {
        left = min(a.boxes, end - kb);
        ptx::mbarrier_wait(at.full(stage), phase);
        const uint32_t slot = at.ring() + stage * a.stage_bytes;
        x = ptx::wgmma_descriptor<false>(slot), w = ptx::wgmma_descriptor<false>(slot + bytes_x);
      }
      ptx::fence_registers(part);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ptx::wgmma<T, kRows, false, false>(part, x + k * ptx::kWgmmaDescriptorStepK16<false>,
                                           w + k * ptx::kWgmmaDescriptorStepK16<false>, kb > begin || k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      release_held();
      x += step_x;
      w += kRows * 128 >> 4;
      if (--left == 0) {
        held = stage;
        if (++stage == a.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
    ptx::wgmma_wait<0>();
    ptx::fence_registers(part);
    release_held();
    if (a.ranks == 1) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) sum[i] += part[i];
    } else {
      small_exchange<kRows>(a, at, round, begin < a.k_blocks, min(a.ranks, a.chunks - first),
                            first + a.ranks >= a.chunks, part, sum);
    }
  }
}

// Results of the rows of A that this rank owns. The ring is read no more, and its place taken.
template <typename T, int kRows>
__device__ __forceinline__ void small_store(const SmallArgs& a, const SmallPlace& at, const float (&sum)[kRows / 2]) {
  constexpr int kPitch = (kRows + 8) * 4;  // bytes; the pad keeps eight rows' pairs in different banks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::named_barrier_sync(1, 128);
  if (warp * a.ranks / 4 == at.rank && warp * 16 < a.p.m) {
    const uint32_t to = at.ring() + (warp * 16 + lane / 4) * kPitch + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      ptx::store_shared_pair(to + j * 32, sum[4 * j], sum[4 * j + 1]);
      ptx::store_shared_pair(to + j * 32 + 8 * kPitch, sum[4 * j + 2], sum[4 * j + 3]);
    }
  }
  ptx::named_barrier_sync(1, 128);

  const int columns = a.gated ? kRows / 2 : kRows, quads = columns / kQuad;
  const int first_row = at.rank * 64 / a.ranks + threadIdx.x / quads, quad = threadIdx.x % quads;
  QuadRows r;
  r.row = first_row;
  r.row_end = min(a.p.m, int64_t((at.rank + 1) * 64 / a.ranks));
  r.row_step = 128 / quads;
  r.col = int64_t(at.tile) * columns + quad * kQuad;
  r.valid = int(min(a.n_out - r.col, int64_t(kQuad)));
  if (r.valid <= 0) return;
  float bias[kQuad], bias_up[kQuad] = {};
  load_bias(a.p.bias, r.col, r.valid, bias);
  if (a.gated) load_bias(a.p.bias, a.n_out + r.col, r.valid, bias_up);
  apply_epilogue<T>(
      a.p, r, bias, bias_up,
      [&](int i, int up, float (&v)[kQuad]) {
        const float4 s =
            ptx::load_shared_quad(at.ring() + (first_row + i * r.row_step) * kPitch + quad * 16 + up * columns * 4);
        v[0] = s.x, v[1] = s.y, v[2] = s.z, v[3] = s.w;
      },
      [&](int i, float (&v)[kQuad]) { load_epilogue_input<T>(a.p, first_row + i * r.row_step, r.col, r.valid, v); });
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, int kRows>
__global__ void __launch_bounds__(kSmallThreads, 2) gemm_sm90_small_kernel(const __grid_constant__ SmallArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t smem[];
  SmallPlace at;
  at.smem = ptx::smem_address(smem);
  at.rank = int(blockIdx.x) % args.ranks;
  at.tile = int(blockIdx.x) / args.ranks;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  if (threadIdx.x == 128) {
    ptx::prefetch_tensormap(&args.x);
    ptx::prefetch_tensormap(&args.w);
    for (int i = 0; i < args.stages; ++i) {
      ptx::mbarrier_init(at.full(i), 1);
      ptx::mbarrier_init(at.empty(i), 4);
    }
    for (int i = 0; i < 4; ++i) {
      ptx::mbarrier_init(at.received(i), 1);
      ptx::mbarrier_init(at.taken(i), 1);
    }
    ptx::fence_mbarrier_init();
  }
  const bool clustered = args.ranks > 1;
  if (clustered) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp == 4) {
    if (ptx::elect_one()) small_load<kRows>(args, at);
    __syncwarp();
    if (clustered) cluster_arrive_relaxed();
  } else {
    grid_dependency_wait();
    float sum[kRows / 2];
    small_multiply<T, kRows>(args, at, sum);
    if (clustered) cluster_arrive_relaxed();
    small_store<T, kRows>(args, at, sum);
  }
  if (clustered) {  // no CTA ends before the others have sent what they owe to its shared memory
    __syncwarp();
    cluster_wait();
  }
#endif
}

}  // namespace ampkernels::cuda::sm90
