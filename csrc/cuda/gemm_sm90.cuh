// The Hopper GEMM kernel: D = epilogue(A * B^T) for GemmParams, one persistent CTA per SM.
//
// Threads   warpgroup 0 loads (one elected thread; its registers go to the others), warpgroups 1 and 2 multiply.
//           Cooperative: both work on one tile, each on half of its rows. Pingpong: each has a tile of its own and they
//           take turns at the tensor cores, so that one's epilogue runs under the other's products.
// Memory    A and B tiles of 64 k arrive by TMA in a ring of kStages slots, in the 128-byte swizzle that WGMMA reads.
//           Both majors are read as they lie: a K-major box is 64 k wide, an MN-major one 64 m or n wide. In a cluster
//           of two, the operand that both CTAs need is loaded half by each and multicast.
// Barriers  full[slot]: the loader's expect_tx and the copies' bytes. empty[slot]: one arrival per consumer warp, from
//           both CTAs where the cluster shares. order[w]: one per warp of the other warpgroup, when it has issued the
//           last product of its turn (pingpong: of its tile).
// Products  one WGMMA group (64 k) in flight while the next slot is awaited; a slot is released one step behind.
// Sums      kFp32: one chain over k in the accumulators. kFp32Chunked: every chunk from zero in a second fragment,
//           added in fp32, round to nearest, in ascending order. kFp16: the same with an fp16 fragment. The first chunk
//           of the next tile, whose fragment the epilogue does not read, is multiplied under this tile's epilogue.
// Read      kActGrad's saved tensor and kResidual's residual come by TMA, a panel ahead, the first one under the tile's
//           products.
// Epilogue  by panels of kPanel columns: bias and activation in fp32, one rounding, stmatrix into a swizzled buffer,
//           TMA store; the next panel does not wait for it. fp32 results go straight from the registers (a fragment row
//           is a full 32-byte sector).
#pragma once

#include <type_traits>

#include "cuda/gemm_sm90_config.cuh"
#include "cuda/gemm_sm90_epilogue.cuh"
#include "cuda/ptx_sm90.cuh"

namespace ampkernels::cuda::sm90 {

struct TileIndex {
  int m, n, split;
};

// Work items in an order that keeps a wave's operands in L2: groups of `group` tiles along one dimension, the other
// dimension inside a group. A cluster of two takes one item, two tiles that share an operand.
__device__ __forceinline__ TileIndex tile_of(const Schedule90& s, int work, int rank) {
  const int split = s.per_split.quotient(work);
  work -= split * s.items_per_split;
  const int outer_count = s.group_along_n ? s.items_n : s.items_m;
  const int index = s.per_group.quotient(work);
  const int first = index * s.group;
  const int in_group = work - index * int(s.per_group.value);
  const Divisor& size = outer_count - first < s.group ? s.of_last_group : s.of_group;
  const int inner = size.quotient(in_group);
  const int outer = first + in_group - inner * int(size.value);
  TileIndex tile{s.group_along_n ? inner : outer, s.group_along_n ? outer : inner, split};
  if (s.share == Share::kB) tile.m = 2 * tile.m + rank;
  if (s.share == Share::kA) tile.n = 2 * tile.n + rank;
  return tile;
}

__device__ __forceinline__ int blocks_of(const Schedule90& s, int split) {
  return min(s.k_blocks - split * s.blocks_per_split, s.blocks_per_split);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A CTA's place in its cluster and its first item; the next one is schedule.step further.
struct Walk {
  int rank, first;
};
__device__ __forceinline__ Walk walk_of(const Schedule90& s) {
  if (s.share == Share::kNone) return {0, int(blockIdx.x)};
  return {int(ptx::cluster_rank()), int(blockIdx.x / 2)};
}

// Loads an operand's tile of kRows rows, 64 k from k on: the first half from `row`, the second from `second_row` (which
// lies elsewhere where the halves are gate and up). If the cluster shares the operand, each CTA loads every other box,
// into both. kRows x 128 bytes in either major.
template <bool kMnMajor, int kRows>
__device__ __forceinline__ void load_tile(const CUtensorMap* map, uint32_t smem, uint32_t bar, int row, int second_row,
                                          int k, bool shared, int rank) {
  constexpr int kHalf = kRows / 2, kBox = kMnMajor ? 64 : kHalf;
#pragma unroll
  for (int r = 0; r < kRows; r += kBox) {
    if (shared && (r / kBox) % 2 != rank) continue;
    const int at = kHalf < kBox || r < kHalf ? row + r : second_row + r - kHalf;
    const int c0 = kMnMajor ? at : k, c1 = kMnMajor ? k : at;
    if (shared) {
      ptx::tma_load_2d_multicast(smem + r * 128, map, bar, c0, c1, 0x3);
    } else {
      ptx::tma_load_2d(smem + r * 128, map, bar, c0, c1);
    }
  }
}

template <class C>
__device__ __forceinline__ void produce(const Args90& args, uint32_t smem) {
  const Schedule90& s = args.schedule;
  const auto [rank, first] = walk_of(s);
  int stage = 0;
  uint32_t phase = 1;  // a fresh barrier counts as "the phase before the first has ended"
  for (int work = first; work < s.items; work += s.step) {
    const TileIndex tile = tile_of(s, work, rank);
    const int row_a = tile.m * C::kBlockM, row_b = tile.n * C::kOutN;
    const int second_b = C::kGated ? args.n_out + row_b : row_b + C::kBlockN / 2;
    const int k_begin = tile.split * s.blocks_per_split * kBlockK;
    const int blocks = blocks_of(s, tile.split);
    for (int kb = 0; kb < blocks; ++kb) {
      ptx::mbarrier_wait(smem + C::kOffsetEmpty + stage * 8, phase);
      const uint32_t bar = smem + C::kOffsetFull + stage * 8;
      const uint32_t slot = smem + stage * C::kStageBytes;
      ptx::mbarrier_arrive_expect_tx(bar, C::kStageBytes);
      const int k = k_begin + kb * kBlockK;
      load_tile<C::kMnMajorA, C::kBlockM>(&args.a, slot, bar, row_a, row_a + C::kBlockM / 2, k, s.share == Share::kA,
                                          rank);
      load_tile<C::kMnMajorB, C::kBlockN>(&args.b, slot + C::kBytesA, bar, row_b, second_b, k, s.share == Share::kB,
                                          rank);
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

// The ring's position as a consumer sees it, and the release of a slot to the loaders that fill it.
template <class C>
struct Ring {
  uint32_t smem;
  bool shared;
  int rank;
  int stage = 0;
  uint32_t phase = 0;
  int held = -1;  // the slot that the group in flight reads

  __device__ __forceinline__ void advance() {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int blocks) {
    stage += blocks;
    phase ^= (stage / C::kStages) & 1;
    stage %= C::kStages;
  }
  __device__ __forceinline__ void release_held() {
    if (held >= 0 && threadIdx.x % 32 == 0) {
      const uint32_t empty = smem + C::kOffsetEmpty + held * 8;
      ptx::mbarrier_arrive(empty);
      if (shared) ptx::mbarrier_arrive_cluster(empty, rank ^ 1);
    }
    held = -1;
  }
};

// Issues the products of one slot into `sum` (or into `half`) as one group.
template <class C>
__device__ __forceinline__ void multiply_slot(const Ring<C>& ring, int group,
                                              float (&sum)[C::kFragments][C::kAccumulators], bool accumulate) {
  const uint32_t slot = ring.smem + ring.stage * C::kStageBytes;
  const int first_row = C::kPingpong ? 0 : group * C::kRowsPerGroup;
  const uint64_t desc_a = ptx::wgmma_descriptor<C::kMnMajorA>(slot + first_row * 128);
  const uint64_t desc_b = ptx::wgmma_descriptor<C::kMnMajorB>(slot + C::kBytesA);
#pragma unroll
  for (int k = 0; k < kBlockK / 16; ++k) {
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f) {
      ptx::wgmma<typename C::T, C::kBlockN, C::kMnMajorA, C::kMnMajorB>(
          sum[f], desc_a + k * ptx::kWgmmaDescriptorStepK16<C::kMnMajorA> + f * (8192 >> 4),
          desc_b + k * ptx::kWgmmaDescriptorStepK16<C::kMnMajorB>, accumulate || k > 0);
    }
  }
}
template <class C>
__device__ __forceinline__ void multiply_slot(const Ring<C>& ring, int group, uint32_t (&half)[1][C::kBlockN / 4],
                                              bool accumulate) {
  const uint32_t slot = ring.smem + ring.stage * C::kStageBytes;
  const int first_row = C::kPingpong ? 0 : group * C::kRowsPerGroup;
  const uint64_t desc_a = ptx::wgmma_descriptor<C::kMnMajorA>(slot + first_row * 128);
  const uint64_t desc_b = ptx::wgmma_descriptor<C::kMnMajorB>(slot + C::kBytesA);
#pragma unroll
  for (int k = 0; k < kBlockK / 16; ++k) {
    ptx::wgmma_half<C::kBlockN, C::kMnMajorA, C::kMnMajorB>(
        half[0], desc_a + k * ptx::kWgmmaDescriptorStepK16<C::kMnMajorA>,
        desc_b + k * ptx::kWgmmaDescriptorStepK16<C::kMnMajorB>, accumulate || k > 0);
  }
}

// Whose turn it is at the tensor cores. A turn is waited for before its first product and handed on after its last.
template <class C>
struct Turns {
  uint32_t smem;
  int group;
  uint32_t parity;  // warpgroup 0 goes first: a fresh barrier has "ended" the phase of parity 1

  __device__ __forceinline__ void take() {
    ptx::mbarrier_wait(smem + C::kOffsetOrder + group * 8, parity);
    parity ^= 1;
  }
  __device__ __forceinline__ void hand_on() {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem + C::kOffsetOrder + (group ^ 1) * 8);
  }
};

// A chain of products, from zero, into the fragments `part`.
template <class C>
struct Products {
  using Part = std::conditional_t<C::kChain == Chain::kFp16, uint32_t[1][C::kBlockN / 4],
                                  float[C::kFragments][C::kAccumulators]>;

  Ring<C> ring;
  Turns<C> turns;
  int group;
  int done = 0, blocks = 0;  // blocks issued, blocks of the chain

  __device__ __forceinline__ void begin(int count) {
    done = 0;
    blocks = count;
  }
  // Issues the next block as one group, and waits for the one before it.
  template <bool kTurns>
  __device__ __forceinline__ void step(Part& part) {
    if (kTurns && done % kTurnBlocks == 0) turns.take();
    ptx::mbarrier_wait(ring.smem + C::kOffsetFull + ring.stage * 8, ring.phase);
    fence(part);
    ptx::wgmma_fence();
    multiply_slot<C>(ring, group, part, done > 0);
    ptx::wgmma_commit();
    ++done;
    if (kTurns && (done % kTurnBlocks == 0 || done == blocks)) turns.hand_on();
    ptx::wgmma_wait<1>();
    ring.release_held();
    ring.held = ring.stage;
    ring.advance();
  }
  __device__ __forceinline__ void settle() {
    ptx::wgmma_wait<0>();
    ring.release_held();
  }
  // The rest of the chain. Returns with all of it done.
  template <bool kTurns>
  __device__ __forceinline__ void finish(Part& part) {
    while (done < blocks) step<kTurns>(part);
    if (C::kPingpong) turns.hand_on();
    settle();
    fence(part);
  }
  // Tells the compiler that all lanes agree about where they are, so that it forms descriptors in uniform registers.
  // Behind the epilogue it cannot see that.
  __device__ __forceinline__ void make_uniform() {
    const auto uniform = [](auto& value) { value = __shfl_sync(0xffffffffu, value, 0); };
    uniform(ring.stage);
    uniform(ring.phase);
    uniform(ring.held);
    uniform(turns.parity);
    uniform(done);
    uniform(blocks);
  }
  __device__ __forceinline__ static void fence(Part& part) {
#pragma unroll
    for (auto& fragment : part) ptx::fence_registers(fragment);
  }
};

// sum = (kFirst ? 0 : sum) + part, in fp32, round to nearest.
template <class C, bool kFirst>
__device__ __forceinline__ void promote(Accumulators<C>& acc, const typename Products<C>::Part& part) {
  if constexpr (C::kChain == Chain::kFp16) {
#pragma unroll
    for (int i = 0; i < C::kBlockN / 4; ++i) {
      float low, high;
      widen_pair<half_t>(part[0][i], low, high);
      acc.sum[0][2 * i] = (kFirst ? 0.0f : acc.sum[0][2 * i]) + low;
      acc.sum[0][2 * i + 1] = (kFirst ? 0.0f : acc.sum[0][2 * i + 1]) + high;
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) acc.sum[0][i] = (kFirst ? 0.0f : acc.sum[0][i]) + part[0][i];
  }
}

// One chain to a tile, in the accumulators that the epilogue reads.
template <class C>
__device__ __forceinline__ void consume(const Args90& args, uint32_t smem, int group) {
  const Schedule90& s = args.schedule;
  const auto [rank, first] = walk_of(s);
  Products<C> products{{smem, s.share != Share::kNone, rank}, {smem, group, group == 0 ? 1u : 0u}, group};
  Epilogue<C> epilogue(args, smem, group);

  if (C::kPingpong && group == 1 && first < s.items) {
    products.ring.skip(blocks_of(s, s.per_split.quotient(first)));
  }
  for (int work = C::kPingpong ? first + group * s.step : first; work < s.items;) {
    const TileIndex tile = tile_of(s, work, rank);
    const int row0 = tile.m * C::kBlockM + (C::kPingpong ? 0 : group * C::kRowsPerGroup);
    const int col0 = tile.n * C::kOutN;
    const typename Epilogue<C>::Bias bias = epilogue.fetch_bias(col0);  // under the products
    if constexpr (C::kReads) {
      if (epilogue.leader()) epilogue.fetch(row0, col0);
    }
    if (C::kPingpong) products.turns.take();
    Accumulators<C> acc;
    products.begin(blocks_of(s, tile.split));
    products.template finish<C::kTurns>(acc.sum);
    epilogue.keep_bias(bias);
    epilogue.run(acc, row0, col0, tile.split, [] {});
    if constexpr (C::kPingpong) {
      if (work + s.step < s.items) products.ring.skip(blocks_of(s, s.per_split.quotient(work + s.step)));
      work += 2 * s.step;
    } else {
      work += s.step;
    }
  }
  if (epilogue.leader()) ptx::bulk_wait_read<0>();  // shared memory outlives the stores that read it
}

// Chunks: a chain of its own for each, added to the sums that the epilogue reads. So the next tile's first chunk needs
// none of the registers of this tile's epilogue, and runs under it.
template <class C>
__device__ __forceinline__ void consume_chunks(const Args90& args, uint32_t smem, int group) {
  static_assert(!C::kPingpong && C::kFragments == 1);
  const Schedule90& s = args.schedule;
  const auto [rank, first] = walk_of(s);
  Products<C> products{{smem, s.share != Share::kNone, rank}, {smem, group, group == 0 ? 1u : 0u}, group};
  Epilogue<C> epilogue(args, smem, group);
  Accumulators<C> acc;
  typename Products<C>::Part part;
  int row0 = args.m, col0 = 0, split = 0;  // of the tile whose sums are in `acc`; before the first there is none

  for (int work = first;; work += s.step) {
    TileIndex tile = {};
    int blocks = 0;
    if (work < s.items) {
      tile = tile_of(s, work, rank);
      blocks = blocks_of(s, tile.split);
    }
    products.begin(min(blocks, s.chunk_blocks));
    epilogue.run(acc, row0, col0, split, [&] {
      if (products.done < products.blocks) products.template step<false>(part);
    });
    products.make_uniform();
    products.settle();  // ptxas carries no products in flight over the epilogue's end
    if (blocks == 0) break;
    row0 = tile.m * C::kBlockM + group * C::kRowsPerGroup;
    col0 = tile.n * C::kOutN;
    split = tile.split;
    const typename Epilogue<C>::Bias bias = epilogue.fetch_bias(col0);
    if constexpr (C::kReads) {
      if (epilogue.leader()) epilogue.fetch(row0, col0);
    }
    products.template finish<false>(part);
    promote<C, true>(acc, part);
    epilogue.keep_bias(bias);
    for (int kb = s.chunk_blocks; kb < blocks; kb += s.chunk_blocks) {
      products.begin(min(s.chunk_blocks, blocks - kb));
      products.template finish<C::kTurns>(part);
      promote<C, false>(acc, part);
    }
  }
  if (epilogue.leader()) ptx::bulk_wait_read<0>();  // shared memory outlives the stores that read it
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class C>
__global__ void __launch_bounds__(kThreads, 1) gemm_sm90_kernel(const __grid_constant__ Args90 args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t smem[];
  uint32_t base = ptx::smem_address(smem);
  asm volatile("" : "+r"(base));  // kept, not computed again from the CTA's window in every loop
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const bool clustered = args.schedule.share != Share::kNone;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&args.a);
    ptx::prefetch_tensormap(&args.b);
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(base + C::kOffsetFull + i * 8, 1);
      ptx::mbarrier_init(base + C::kOffsetEmpty + i * 8, (C::kPingpong ? 4 : 8) * (clustered ? 2 : 1));
    }
    for (int i = 0; i < kConsumers; ++i) ptx::mbarrier_init(base + C::kOffsetOrder + i * 8, 4);
    for (int i = 0; C::kReads && i < kConsumers * 2; ++i) ptx::mbarrier_init(base + C::kOffsetRead + i * 8, 1);
    ptx::fence_mbarrier_init();
  }
  if (clustered) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (group == 0) {
    ptx::register_dealloc<C::kProducerRegisters>();
    if (threadIdx.x / 32 == 0 && ptx::elect_one()) produce<C>(args, base);
  } else {
    ptx::register_alloc<C::kConsumerRegisters>();
    if constexpr (C::kChain == Chain::kFp32) {
      consume<C>(args, base, group - 1);
    } else {
      consume_chunks<C>(args, base, group - 1);
    }
  }
  // A CTA stays until its neighbour has sent the last copy and arrival it owes to this one's shared memory.
  if (clustered) {
    __syncwarp();
    ptx::cluster_sync();
  }
#endif
}

}  // namespace ampkernels::cuda::sm90
