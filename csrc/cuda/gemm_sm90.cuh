// The Hopper GEMM kernel: D = epilogue(A * B^T) for GemmParams, one persistent CTA per SM.
//
// Threads   warpgroup 0 loads (one elected thread; its registers go to the others), warpgroups 1 and 2 multiply.
//           Cooperative: both work on one tile, each on half of its rows. Pingpong: each has a tile of its own and they
//           take turns at the tensor cores, so that one's epilogue runs under the other's products.
// Memory    A and B tiles of 64 k arrive by TMA in a ring of kStages slots, in the 128-byte swizzle that WGMMA reads. Both
//           majors are read as they lie: a K-major box is 64 k wide, an MN-major one 64 m or n wide. In a cluster of two,
//           the operand that both CTAs need is loaded half by each and multicast.
// Barriers  full[slot]: the loader's expect_tx and the copies' bytes. empty[slot]: one arrival per consumer warp, from
//           both CTAs where the cluster shares. order[w] (pingpong): one per warp of the other warpgroup, when it has
//           issued its last product.
// Products  one WGMMA group (64 k) in flight while the next slot is awaited; a slot is released one step behind.
// Sums      kFp32: one chain over k in the accumulators. kFp32Chunked: every chunk from zero in a second fragment, added
//           in fp32, round to nearest, in ascending order. kFp16: the same with an fp16 fragment.
// Epilogue  by panels of kPanel columns: bias and activation in fp32, one rounding, stmatrix into a swizzled buffer, TMA
//           store; the next panel does not wait for it. fp32 results go straight from the registers (a fragment row is a
//           full 32-byte sector).
#pragma once

#include <type_traits>

#include "ampkernels/activation.h"
#include "ampkernels/convert.h"
#include "ampkernels/params.h"
#include "gemm_sm90_launch.h"
#include "ptx_sm90.cuh"

namespace ampkernels::cuda::sm90 {

inline constexpr int kBlockK = 64;
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = kWarpgroup * (1 + kConsumers);
inline constexpr int kTurnBlocks = 2;
inline constexpr int kMaxSmem = 232448;

template <typename T_, bool kMnMajorA_, bool kMnMajorB_, EpilogueKind kKind_, int kBlockM_, int kBlockN_,
          Schedule kSchedule_, Chain kChain_, bool kTurns_ = true>
struct Config {
  using T = T_;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_;
  static constexpr EpilogueKind kKind = kKind_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr bool kPingpong = kSchedule_ == Schedule::kPingpong;
  static constexpr Chain kChain = kChain_;
  static constexpr bool kGated = kKind == EpilogueKind::kGated;

  static constexpr int kRowsPerGroup = kPingpong ? kBlockM : kBlockM / kConsumers;
  static constexpr int kFragments = kRowsPerGroup / 64;  // m64 fragments of a warpgroup
  static constexpr int kAccumulators = kBlockN / 2;      // per thread and fragment
  static constexpr int kOutN = kGated ? kBlockN / 2 : kBlockN;

  // The epilogue goes by panels, each one fence, one barrier and one store per 64 rows, and in a panel by strips, as wide
  // as the registers beside the accumulators (and the part of a chunk) can hold.
  static constexpr bool kLean = kFragments * kAccumulators > 128 || kChain != Chain::kFp32;
  static constexpr int kPanel = kOutN % 64 != 0 || kChain != Chain::kFp32 || (kGated && kFragments == 1) ? 32 : 64;
  static constexpr int kWidest = kKind == EpilogueKind::kLinear ? (kLean ? 32 : 64) : (kLean ? 16 : 32);
  static constexpr int kStrip = kWidest < kPanel ? kWidest : kPanel;
  static constexpr int kPanels = kOutN / kPanel;
  static constexpr int kStripsAcross = kPanel / kStrip;  // a panel, one fragment's rows
  static constexpr int kStripsPerPanel = kFragments * kStripsAcross;
  static constexpr int kBuffers = kGated || kPanel == 32 ? 3 : 2;  // panels per warpgroup
  static constexpr int kFragmentBytes = 64 * kPanel * 2;
  static constexpr int kBufferBytes = kFragments * kFragmentBytes;
  // Cooperative warpgroups take turns of kTurnBlocks at the tensor cores, so that they do not finish together and one's
  // promotion or epilogue runs under the other's products.
  static constexpr bool kTurns = !kPingpong && kTurns_;
    static constexpr int kProducerRegisters = kLean ? 24 : 40;
  static constexpr int kConsumerRegisters = kLean ? 240 : 232;

  static constexpr int kBytesA = kBlockM * kBlockK * 2, kBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBias = kConsumers * kBlockN * 4;
  static constexpr int kEpilogueBytes = kConsumers * kBuffers * kBufferBytes;
  static constexpr int kStagesThatFit = (kMaxSmem - kEpilogueBytes - kBias - 512) / kStageBytes;
  static constexpr int kStages = kStagesThatFit < 8 ? kStagesThatFit : 8;

  static constexpr int kOffsetEpilogue = kStages * kStageBytes;
  static constexpr int kOffsetBias = kOffsetEpilogue + kEpilogueBytes;
  static constexpr int kOffsetBarriers = kOffsetBias + kBias;
  static constexpr int kOffsetFull = kOffsetBarriers, kOffsetEmpty = kOffsetFull + kStages * 8;
  static constexpr int kOffsetOrder = kOffsetEmpty + kStages * 8;
  static constexpr int kSmemBytes = kOffsetOrder + kConsumers * 8;

  static_assert(kStages >= 3 && kSmemBytes <= kMaxSmem);
  static_assert(kBlockM % 64 == 0 && kBlockN % 64 == 0 && kOutN % kPanel == 0);
  static_assert(kChain == Chain::kFp32 || kFragments == 1, "the chunk's fragment has no registers beside two of them");
};

// The registers of one warpgroup's fragments.
template <class C>
struct Accumulators {
  float sum[C::kFragments][C::kAccumulators];
};

struct TileIndex {
  int m, n, split;
};

// Work items in an order that keeps a wave's operands in L2: groups of `group` tiles along one dimension, the other
// dimension inside a group. A cluster of two takes one item, two tiles that share an operand.
__device__ __forceinline__ TileIndex tile_of(const Schedule90& s, int work, int rank) {
  const int split = work / s.items_per_split;
  work -= split * s.items_per_split;
  const int outer_count = s.group_along_n ? s.items_n : s.items_m;
  const int inner_count = s.group_along_n ? s.items_m : s.items_n;
  const int per_group = s.group * inner_count;
  const int first = work / per_group * s.group;
  const int in_group = work % per_group;
  const int size = min(s.group, outer_count - first);
  const int inner = in_group / size;
  const int outer = first + in_group - inner * size;
  TileIndex tile{s.group_along_n ? inner : outer, s.group_along_n ? outer : inner, split};
  if (s.share == Share::kB) tile.m = 2 * tile.m + rank;
  if (s.share == Share::kA) tile.n = 2 * tile.n + rank;
  return tile;
}

__device__ __forceinline__ int blocks_of(const Schedule90& s, int split) {
  return min(s.k_blocks - split * s.blocks_per_split, s.blocks_per_split);
}

template <typename T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  if constexpr (dtype_of<T>::value == DType::kBFloat16) {
    return bit_cast<uint32_t>(__floats2bfloat162_rn(low, high));
  } else {
    return bit_cast<uint32_t>(__floats2half2_rn(low, high));
  }
}

template <typename T>
__device__ __forceinline__ void widen_pair(uint32_t pair, float& low, float& high) {
  low = to_float(T{uint16_t(pair & 0xffffu)});
  high = to_float(T{uint16_t(pair >> 16)});
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A CTA's walk through the items: its place in its cluster, its first item, and the distance to the next.
struct Walk {
  int rank, first, step;
};
__device__ __forceinline__ Walk walk_of(const Schedule90& s) {
  if (s.share == Share::kNone) return {0, int(blockIdx.x), int(gridDim.x)};
  return {int(ptx::cluster_rank()), int(blockIdx.x / 2), int(gridDim.x / 2)};
}

// Loads an operand's tile of kRows rows, 64 k from k on: the first half from `row`, the second from `second_row` (which
// lies elsewhere where the halves are gate and up). If the cluster shares the operand, each CTA loads every other box,
// into both. kRows x 128 bytes in either major.
template <bool kMnMajor, int kRows>
__device__ __forceinline__ void load_tile(const CUtensorMap* map, uint32_t smem, uint32_t bar, int row, int second_row, int k,
                                          bool shared, int rank) {
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
  const auto [rank, first, step] = walk_of(s);
  int stage = 0;
  uint32_t phase = 1;  // a fresh barrier counts as "the phase before the first has ended"
  for (int work = first; work < s.items; work += step) {
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
      load_tile<C::kMnMajorA, C::kBlockM>(&args.a, slot, bar, row_a, row_a + C::kBlockM / 2, k, s.share == Share::kA, rank);
      load_tile<C::kMnMajorB, C::kBlockN>(&args.b, slot + C::kBytesA, bar, row_b, second_b, k, s.share == Share::kB, rank);
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
    if (held < 0) return;
    if (threadIdx.x % 32 == 0) {
      const uint32_t empty = smem + C::kOffsetEmpty + held * 8;
      ptx::mbarrier_arrive(empty);
      if (shared) ptx::mbarrier_arrive_cluster(empty, rank ^ 1);
    }
    held = -1;
  }
};

// Issues the products of one slot into `sum` (or into `half`) as one group.
template <class C>
__device__ __forceinline__ void multiply_slot(const Ring<C>& ring, int group, float (&sum)[C::kFragments][C::kAccumulators],
                                              bool accumulate) {
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
__device__ __forceinline__ void multiply_slot(const Ring<C>& ring, int group, uint32_t (&half)[C::kBlockN / 4],
                                              bool accumulate) {
  const uint32_t slot = ring.smem + ring.stage * C::kStageBytes;
  const int first_row = C::kPingpong ? 0 : group * C::kRowsPerGroup;
  const uint64_t desc_a = ptx::wgmma_descriptor<C::kMnMajorA>(slot + first_row * 128);
  const uint64_t desc_b = ptx::wgmma_descriptor<C::kMnMajorB>(slot + C::kBytesA);
#pragma unroll
  for (int k = 0; k < kBlockK / 16; ++k) {
    ptx::wgmma_half<C::kBlockN, C::kMnMajorA, C::kMnMajorB>(half, desc_a + k * ptx::kWgmmaDescriptorStepK16<C::kMnMajorA>,
                                                            desc_b + k * ptx::kWgmmaDescriptorStepK16<C::kMnMajorB>,
                                                            accumulate || k > 0);
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

// The products of blocks [0, blocks) of one chain, into `part`; the first one overwrites it. Returns with all of them done.
template <class C, typename Part>
__device__ __forceinline__ void multiply_chain(Ring<C>& ring, Turns<C>& turns, int group, int blocks, Part& part) {
  const auto fence_part = [](auto& r) {
    if constexpr (C::kChain == Chain::kFp16) {
      ptx::fence_registers(r);
    } else {
#pragma unroll
      for (int f = 0; f < C::kFragments; ++f) ptx::fence_registers(r[f]);
    }
  };
  for (int kb = 0; kb < blocks; ++kb) {
    if (C::kTurns && kb % kTurnBlocks == 0) turns.take();
    ptx::mbarrier_wait(ring.smem + C::kOffsetFull + ring.stage * 8, ring.phase);
    fence_part(part);
    ptx::wgmma_fence();
    multiply_slot<C>(ring, group, part, kb > 0);
    ptx::wgmma_commit();
    if (C::kTurns && (kb % kTurnBlocks == kTurnBlocks - 1 || kb + 1 == blocks)) turns.hand_on();
    ptx::wgmma_wait<1>();
    ring.release_held();
    ring.held = ring.stage;
    ring.advance();
  }
  if (C::kPingpong) turns.hand_on();
  ptx::wgmma_wait<0>();
  fence_part(part);
  ring.release_held();
}

// All products of one tile.
template <class C>
__device__ __forceinline__ void multiply(Ring<C>& ring, Turns<C>& turns, int group, int blocks, int chunk_blocks,
                                         Accumulators<C>& acc) {
  if constexpr (C::kChain == Chain::kFp32) {
    multiply_chain<C>(ring, turns, group, blocks, acc.sum);
  } else {
    static_assert(!C::kPingpong);
    constexpr bool kHalf = C::kChain == Chain::kFp16;
    std::conditional_t<kHalf, uint32_t[C::kBlockN / 4], float[1][C::kAccumulators]> part;
#pragma unroll
    for (int i = 0; i < C::kAccumulators; ++i) acc.sum[0][i] = 0.0f;
    for (int kb = 0; kb < blocks; kb += chunk_blocks) {
      multiply_chain<C>(ring, turns, group, min(chunk_blocks, blocks - kb), part);
      if constexpr (kHalf) {
#pragma unroll
        for (int i = 0; i < C::kBlockN / 4; ++i) {
          float low, high;
          widen_pair<half_t>(part[i], low, high);
          acc.sum[0][2 * i] += low;
          acc.sum[0][2 * i + 1] += high;
        }
      } else {
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) acc.sum[0][i] += part[0][i];
      }
    }
  }
}

// One consumer warpgroup's way out of the registers.
template <class C>
struct Epilogue {
  using T = typename C::T;
  static constexpr int kValues = C::kStrip / 2;  // per thread and strip: columns 8 j + 2 (lane % 4) + {0, 1}, rows lane / 4 + {0, 8}

  const Args90& args;
  uint32_t smem;
  int group;
  int next = 0;  // the buffer of the next panel's first result

  __device__ __forceinline__ bool leader() const { return threadIdx.x % kWarpgroup == 0; }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group, kWarpgroup); }

  // The tile's bias, in fp32; gated: gate, then up.
  __device__ __forceinline__ uint32_t bias() const { return smem + C::kOffsetBias + group * C::kBlockN * 4; }

  // The buffer of the panel's result number `slot`.
  __device__ __forceinline__ uint32_t buffer(int slot) const {
    const int i = next + slot;
    return smem + C::kOffsetEpilogue + (group * C::kBuffers + (i < C::kBuffers ? i : i - C::kBuffers)) * C::kBufferBytes;
  }

  __device__ __forceinline__ void load_bias(int col0) {
    if (args.bias.data == nullptr) return;
    sync();  // the last tile's has been read
    for (int i = threadIdx.x % kWarpgroup; i < C::kBlockN; i += kWarpgroup) {
      const bool up = C::kGated && i >= C::kBlockN / 2;
      const int col = col0 + i - (up ? C::kBlockN / 2 : 0);
      const int64_t at = (up ? args.n_out : 0) + col;
      const float b = col < args.n_out ? load_as<float>(args.bias.data, args.bias.dtype, at * args.bias.stride) : 0.0f;
      ptx::store_shared(bias() + i * 4, b);
    }
  }

  __device__ __forceinline__ void add_bias(float (&v)[kValues], int first) const {
    if (args.bias.data == nullptr) return;
#pragma unroll
    for (int j = 0; j < C::kStrip / 8; ++j) {
      const float2 b = ptx::load_shared_pair(bias() + (first + 8 * j + 2 * (threadIdx.x % 4)) * 4);
      v[4 * j] += b.x;
      v[4 * j + 1] += b.y;
      v[4 * j + 2] += b.x;
      v[4 * j + 3] += b.y;
    }
  }

  // Where fragment row h (0 or 1) of this thread lies, from a strip's first row.
  __device__ __forceinline__ int fragment_row(int h) const { return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h; }
  __device__ __forceinline__ int fragment_col(int j) const { return 8 * j + 2 * (threadIdx.x % 4); }

  // Rounds a strip once, to T, and writes it: into the panel's buffer, in the swizzle that TMA reads, or, where TMA cannot
  // address the matrix, from the registers.
  __device__ __forceinline__ void store16(const Out90& out, int slot, const float (&v)[kValues], int fragment, int across,
                                          int row, int col) {
    uint32_t pairs[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) pairs[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
    if (!out.tma) {
      store_pairs(out, pairs, row, col);
      return;
    }
    constexpr int kRowBytes = C::kPanel * 2, kChunks = kRowBytes / 16;  // the swizzle: 16-byte chunks by 128-byte lines
    const int lane = threadIdx.x % 32;
    const int r = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    const uint32_t base = buffer(slot) + fragment * C::kFragmentBytes + r * kRowBytes;
    const int turn = r * kRowBytes / 128 % kChunks;
    const int first = across * (C::kStrip / 8) + lane / 16;
#pragma unroll
    for (int q = 0; q < C::kStrip / 16; ++q) {
      ptx::stmatrix_x4(base + (((first + 2 * q) ^ turn) << 4), pairs[4 * q], pairs[4 * q + 1], pairs[4 * q + 2],
                       pairs[4 * q + 3]);
    }
  }

  // Sends the panel's buffer on its way. The leader alone.
  __device__ __forceinline__ void send(const Out90& out, int slot, int row0, int col) const {
    if (!out.tma) return;
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f) {
      if (row0 + f * 64 < args.m) {
        ptx::tma_store_2d(&out.map, buffer(slot) + f * C::kFragmentBytes, col, row0 + f * 64);
      }
    }
  }

  __device__ __forceinline__ void store_pairs(const Out90& out, const uint32_t (&pairs)[kValues / 2], int row, int col) const {
    T* base = static_cast<T*>(out.data);
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(i & 1), c = col + fragment_col(i / 2);
      if (r >= args.m || c >= args.n_out) continue;
      T* p = base + int64_t(r) * out.ld + c;
      p[0] = T{uint16_t(pairs[i] & 0xffffu)};
      if (c + 1 < args.n_out) p[1] = T{uint16_t(pairs[i] >> 16)};
    }
  }

  __device__ __forceinline__ void load_pairs(const In90& in, uint32_t (&pairs)[kValues / 2], int row, int col) const {
    const T* base = static_cast<const T*>(in.data);
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(i & 1), c = col + fragment_col(i / 2);
      pairs[i] = 0;
      if (r >= args.m || c >= args.n_out) continue;
      const T* p = base + int64_t(r) * in.ld + c;
      if (in.paired) {  // even ld and column count, 4-byte aligned
        pairs[i] = *reinterpret_cast<const uint32_t*>(p);
      } else {
        pairs[i] = p[0].bits | (c + 1 < args.n_out ? uint32_t(p[1].bits) << 16 : 0u);
      }
    }
  }

  // fp32 results straight from the registers; `add` reads what is there first.
  __device__ __forceinline__ void store32(float* base, int64_t ld, int cols, bool paired, bool add, float (&v)[kValues], int row, int col) const {
    if (add) {
      float2 old[kValues / 2];
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) {
        const int r = row + fragment_row(i & 1), c = col + fragment_col(i / 2);
        const float* p = base + int64_t(r) * ld + c;
        old[i] = make_float2(0.0f, 0.0f);
        if (r < args.m && c + 1 < cols && paired) {
          old[i] = *reinterpret_cast<const float2*>(p);
        } else if (r < args.m && c < cols) {
          old[i].x = p[0];
          if (c + 1 < cols) old[i].y = p[1];
        }
      }
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) {
        v[2 * i] = old[i].x + v[2 * i];
        v[2 * i + 1] = old[i].y + v[2 * i + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(i & 1), c = col + fragment_col(i / 2);
      if (r >= args.m || c >= cols) continue;
      float* p = base + int64_t(r) * ld + c;
      if (c + 1 < cols && paired) {
        *reinterpret_cast<float2*>(p) = make_float2(v[2 * i], v[2 * i + 1]);
      } else {
        p[0] = v[2 * i];
        if (c + 1 < cols) p[1] = v[2 * i + 1];
      }
    }
  }

  // Strip number `strip` of the tile: panel by panel, in a panel fragment by fragment.
  template <int kStripIndex>
  __device__ __forceinline__ static void take(const Accumulators<C>& acc, float (&v)[kValues], float (&up)[kValues]) {
    constexpr int panel = kStripIndex / C::kStripsPerPanel, s = kStripIndex % C::kStripsPerPanel;
    constexpr int f = s / C::kStripsAcross, at = (panel * C::kPanel + s % C::kStripsAcross * C::kStrip) / 2;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      v[i] = acc.sum[f][at + i];
      if constexpr (C::kGated) up[i] = acc.sum[f][C::kAccumulators / 2 + at + i];
    }
  }
  // The loop over strips stays a loop, so that the code of nine activations exists once: a strip is copied out of the
  // accumulators by a uniform branch, since registers cannot be indexed.
  template <int kBegin = 0, int kEnd = C::kPanels * C::kStripsPerPanel>
  __device__ __forceinline__ static void take(const Accumulators<C>& acc, int strip, float (&v)[kValues], float (&up)[kValues]) {
    if constexpr (kBegin + 1 == kEnd) {
      take<kBegin>(acc, v, up);
    } else {
      constexpr int kMiddle = (kBegin + kEnd) / 2;
      if (strip < kMiddle) {
        take<kBegin, kMiddle>(acc, strip, v, up);
      } else {
        take<kMiddle, kEnd>(acc, strip, v, up);
      }
    }
  }

  __device__ __forceinline__ void run(const Accumulators<C>& acc, int row0, int col0, int split) {
    const bool partial = args.partials != nullptr;
    const int results = args.d_slot + 1;
    sync();  // the bias is there
#pragma unroll 1
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int panel_col = col0 + panel * C::kPanel;
      if (panel_col >= args.n_out || row0 >= args.m) break;
      if (2 * results > C::kBuffers) {  // otherwise the last panel's barrier has seen to it
        if (leader()) ptx::bulk_wait_read<0>();
        sync();
      }
#pragma unroll 1
      for (int strip = 0; strip < C::kStripsPerPanel; ++strip) {
        const int fragment = strip / C::kStripsAcross, across = strip % C::kStripsAcross;
        const int row = row0 + fragment * 64;
        const int first = panel * C::kPanel + across * C::kStrip;
        const int col = col0 + first;
        if (row >= args.m) break;
        float v[kValues], up[kValues];
        const int index = panel * C::kStripsPerPanel + strip;
        if (C::kKind != EpilogueKind::kActGrad || partial) take(acc, index, v, up);
        if (partial) {
          float* base = args.partials + int64_t(split) * args.m * args.n;
          const bool paired = args.n_out % 2 == 0;
          if constexpr (C::kGated) store32(base + args.n_out, args.n, args.n_out, paired, false, up, row, col);
          store32(base, args.n, args.n_out, paired, false, v, row, col);
          continue;
        }
        if constexpr (C::kKind == EpilogueKind::kActGrad) {
          uint32_t saved[kValues / 2];
          load_pairs(args.saved, saved, row, col);
          if (args.act_out.data != nullptr) {
            float y[kValues];
            with_activation(args.saved_is_output ? Activation::kNone : args.activation, [&]<Activation A>() {
#pragma unroll
              for (int i = 0; i < kValues / 2; ++i) {
                widen_pair<T>(saved[i], y[2 * i], y[2 * i + 1]);
                y[2 * i] = activation<A>(y[2 * i]);
                y[2 * i + 1] = activation<A>(y[2 * i + 1]);
              }
            });
            store16(args.act_out, 0, y, fragment, across, row, col);
          }
          take(acc, index, v, up);
          with_activation(args.activation, [&]<Activation A>() {
#pragma unroll
            for (int i = 0; i < kValues / 2; ++i) {
              float x0, x1;
              widen_pair<T>(saved[i], x0, x1);
              v[2 * i] *= activation_grad<A>(x0);
              v[2 * i + 1] *= activation_grad<A>(x1);
            }
          });
        } else if constexpr (C::kGated) {
          add_bias(v, first);
          add_bias(up, C::kBlockN / 2 + first);
          if (args.pre.data != nullptr) {
            store16(args.pre, 0, v, fragment, across, row, col);
            store16(args.pre_up, 1, up, fragment, across, row, col);
          }
          with_activation(args.activation, [&]<Activation A>() {
#pragma unroll
            for (int i = 0; i < kValues; ++i) v[i] = activation<A>(v[i]) * up[i];
          });
        } else {
          add_bias(v, first);
          if (args.pre.data != nullptr) store16(args.pre, 0, v, fragment, across, row, col);
          if (args.activation != Activation::kNone) {
            with_activation(args.activation, [&]<Activation A>() {
#pragma unroll
              for (int i = 0; i < kValues; ++i) v[i] = activation<A>(v[i]);
            });
          }
        }
        if (args.d_fp32) {
          store32(static_cast<float*>(args.d.data), args.d.ld, args.n_out, args.d.paired, args.beta, v, row, col);
        } else {
          store16(args.d, args.d_slot, v, fragment, across, row, col);
        }
      }
      if (args.buffered) {
        ptx::fence_async_proxy();
        // Before the barrier lets anyone go on to the next panel's buffers, the stores before this panel's have read them.
        if (leader()) ptx::bulk_wait_read<0>();
        sync();
        if (leader()) {
          send(args.d, args.d_slot, row0, panel_col);
          if constexpr (C::kKind == EpilogueKind::kActGrad) {
            send(args.act_out, 0, row0, panel_col);
          } else {
            send(args.pre, 0, row0, panel_col);
            if constexpr (C::kGated) send(args.pre_up, 1, row0, panel_col);
          }
          ptx::bulk_commit();
        }
        next += results;
        if (next >= C::kBuffers) next -= C::kBuffers;
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void consume(const Args90& args, uint32_t smem, int group) {
  const Schedule90& s = args.schedule;
  const auto [rank, first, step] = walk_of(s);
  Ring<C> ring{smem, s.share != Share::kNone, rank};
  Turns<C> turns{smem, group, group == 0 ? 1u : 0u};
  Epilogue<C> epilogue{args, smem, group};

  if (C::kPingpong && group == 1 && first < s.items) ring.skip(blocks_of(s, first / s.items_per_split));
  for (int work = C::kPingpong ? first + group * step : first; work < s.items;) {
    const TileIndex tile = tile_of(s, work, rank);
    const int blocks = blocks_of(s, tile.split);
    const int row0 = tile.m * C::kBlockM + (C::kPingpong ? 0 : group * C::kRowsPerGroup);
    const int col0 = tile.n * C::kOutN;
    epilogue.load_bias(col0);
    if (C::kPingpong) turns.take();
    Accumulators<C> acc;
    multiply<C>(ring, turns, group, blocks, s.chunk_blocks, acc);
    epilogue.run(acc, row0, col0, tile.split);
    if constexpr (C::kPingpong) {
      if (work + step < s.items) ring.skip(blocks_of(s, (work + step) / s.items_per_split));
      work += 2 * step;
    } else {
      work += step;
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
    consume<C>(args, base, group - 1);
  }
  // A CTA stays until its neighbour has sent the last copy and arrival it owes to this one's shared memory.
  if (clustered) {
    __syncwarp();
    ptx::cluster_sync();
  }
#endif
}

}  // namespace ampkernels::cuda::sm90
