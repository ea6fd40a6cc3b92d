// GEMM on mma.sync tensor cores (sm_80 and later): D[m, n] = epilogue(sum over k of A[m, k] * B[n, k]).
//
// Layout. Shared memory holds a ring of stages; a stage is A's tile, then B's. A tile is an array of 16-byte pieces as
// they lie in memory: a K-major operand gives rows of BK / 8 pieces, one row for each m (or n); an MN-major operand
// gives rows of BM / 8 pieces, one row for each k, and ldmatrix transposes on the way to the registers. Pieces are
// XOR-swizzled within their row, so that the 8 addresses of one ldmatrix phase fall on different banks in both layouts.
//
// Threads. WARPS_M x WARPS_N warps, each with a tile of WM x WN outputs in registers. In a gated GEMM, 16 consecutive
// columns of B's tile are 8 gate rows and their 8 up rows of the weight: only the loader knows, no weight is repacked.
//
// Synchronisation. Aligned operands: cp.async, STAGES - 1 tiles ahead, one __syncthreads per tile of K, fragments of
// the next k16 step loaded while the current one multiplies. Operands that cp.async cannot take (base or leading stride
// not a multiple of 16 bytes): each piece is two aligned 16-byte loads, realigned in registers by a funnel shift, one
// tile ahead; two stages, one __syncthreads per tile. Ragged edges are zero-filled pieces in both.
//
// Rounding points. A k16 step accumulates in Acc (fp32 as the tensor core does it, or fp16). With chunks, every chunk
// starts from zero and its sum is added to the total in fp32, to nearest, in ascending order; with splits of K, each
// split is one chunk, whose sum goes to the workspace, and gemm_reduce adds them in the same order. Then the
// epilogue's.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "ampkernels/params.h"
#include "cuda/epilogue.cuh"
#include "cuda/gemm_sm80.h"
#include "cuda/ptx.cuh"
#include "cuda/realign.cuh"
#include "plan/gemm_plan.h"

namespace ampkernels::cuda {

// What the launcher adds to GemmParams.
struct GemmSchedule {
  uint32_t tiles_m;
  uint32_t tiles_n;
  uint32_t group_m;
  uint32_t split;
  int64_t split_len;
  int chunk_steps;  // k16 steps in a chunk; 0: one chain per split
};

// The part of the output that a CTA computes. Tiles come in groups of group_m rows of tiles, m fastest, so that a wave
// of CTAs reads a near-square part of A and B. The block index is read anew at each call: the kernel locates its tile
// before and after the main loop, which needs the registers.
struct TileIndex {
  uint32_t m, n, split;
};
__device__ __forceinline__ TileIndex locate_tile(const GemmSchedule& s) {
  uint32_t block;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(block));
  const uint32_t tiles = s.tiles_m * s.tiles_n, split = block / tiles, tile = block % tiles;
  const uint32_t group = tile / (s.group_m * s.tiles_n), in_group = tile % (s.group_m * s.tiles_n);
  const uint32_t rows = min(s.group_m, s.tiles_m - group * s.group_m);
  return {group * s.group_m + in_group % rows, in_group / rows, split};
}

template <int BM_, int BN_, int BK_, int WARPS_M_, int WARPS_N_, int STAGES_, int CTAS_, bool CHUNKED_>
struct TileConfig {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_,
                       CTAS = CTAS_;
  static constexpr bool CHUNKED = CHUNKED_;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;
  static constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
  // The epilogue passes 16 rows of a warp's tile at a time through shared memory. A row stride of 8 mod 32 words keeps
  // both the fragments' 8-byte writes and the rows' 16-byte reads free of bank conflicts.
  static constexpr int EPI_STRIDE = WN + 8;
  static constexpr int EPI_BYTES = 2 * WARPS_M * WARPS_N * 16 * EPI_STRIDE * 4;
  static_assert(WM % 16 == 0 && WN % 32 == 0 && BK % 32 == 0);
};

// Operands that need realigning pass through registers, 8 for each piece: two stages, and half the depth where a tile
// is large.
template <GemmTile kTile, bool kAligned>
using tile_config = TileConfig<gemm_tile(kTile).m, gemm_tile(kTile).n, gemm_tile(kTile, kAligned).k,
                               gemm_tile(kTile).warps_m, gemm_tile(kTile).warps_n, gemm_tile(kTile, kAligned).stages,
                               gemm_tile(kTile, kAligned).ctas, gemm_tile(kTile).chunked>;

// XOR of a row's pieces, for rows of `pieces` 16-byte pieces: 8 consecutive rows at one piece cover all 32 banks.
__device__ __forceinline__ int swizzle(int row, int pieces) {
  return pieces >= 8 ? row & 7 : pieces == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
}

// ------------------------------------------------------------------------------------------- global to shared memory

// A thread's pieces of one operand's tile: piece c lies THREADS pieces after piece c - 1, which is a whole number of
// rows (a multiple of 8 of them wherever there is more than one piece), so that all have the same column and swizzle.
template <int OUTER, int BK, int THREADS, bool kKMajor>
struct TileLoader {
  static constexpr int kPieces = OUTER * BK / 8 / THREADS;
  static_assert(kPieces * THREADS * 8 == OUTER * BK);

  const char* src;     // piece 0 of the next tile
  int64_t row_step;    // bytes from piece to piece
  int64_t tile_step;   // bytes from tile to tile
  uint32_t smem;       // piece 0 in the stage
  int k;               // offset in the tile of piece 0's first element
  int k_step;          // from piece to piece: 0 if K-major
  uint32_t row_bytes;  // of a piece that k does not cut; K-major: bit mask of the rows that exist

  // outer0: first row of the operand in the tile; limit: rows of the operand. With half > 0 (gated) the tile takes
  // OUTER / 2 rows from outer0 on and as many from half + outer0 on, in turns of 8, and limit = half.
  __device__ __forceinline__ TileLoader(const GemmOperand& x, int64_t outer0, int64_t limit, int64_t half, int64_t k0) {
    const int tid = threadIdx.x;
    constexpr int pieces = kKMajor ? BK / 8 : OUTER / 8;
    const int row = tid / pieces, column = tid % pieces;
    constexpr int rows = THREADS / pieces;
    smem = (row * pieces + (column ^ swizzle(row, pieces))) * 16;
    const auto outer_of = [&](int i) -> int64_t {  // without the offset of the up half
      return half > 0 ? outer0 + (i / 16) * 8 + i % 8 : outer0 + i;
    };
    const auto up_of = [&](int i) -> int64_t { return half > 0 && (i & 8) ? half : 0; };
    const char* base = static_cast<const char*>(x.data);
    if constexpr (kKMajor) {
      k = column * 8;
      k_step = 0;
      row_bytes = 0;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) row_bytes |= outer_of(row + c * rows) < limit ? 1u << c : 0u;
      src = base + ((outer_of(row) + up_of(row)) * x.stride_outer + k0 + k) * 2;
      row_step = (half > 0 ? rows / 2 : rows) * x.stride_outer * 2;
      tile_step = BK * 2;
    } else {
      k = row;
      k_step = rows;
      const int64_t outer = outer_of(column * 8);
      row_bytes = static_cast<uint32_t>(max(min(limit - outer, int64_t(8)), int64_t(0))) * 2;
      src = base + (outer + up_of(column * 8) + (k0 + k) * x.stride_k) * 2;
      row_step = rows * x.stride_k * 2;
      tile_step = BK * x.stride_k * 2;
    }
  }

  // Valid bytes of piece c in a tile with k_left elements of K left.
  __device__ __forceinline__ int bytes(int c, int k_left) const {
    if constexpr (kKMajor) return row_bytes >> c & 1 ? max(min(k_left - k, 8), 0) * 2 : 0;
    return k + c * k_step < k_left ? row_bytes : 0;
  }

  __device__ __forceinline__ void copy_async(uint32_t stage, int k_left) {
    const char* p = src;
#pragma unroll
    for (int c = 0; c < kPieces; ++c, p += row_step) cp_async_16(stage + smem + c * THREADS * 16, p, bytes(c, k_left));
    src += tile_step;
  }

  __device__ __forceinline__ void load(RawPiece (&raw)[kPieces], int k_left) {
    const char* p = src;
#pragma unroll
    for (int c = 0; c < kPieces; ++c, p += row_step) raw[c] = load_raw(p, bytes(c, k_left));
    src += tile_step;
  }

  // Stores what the last load() loaded; tile_step is a multiple of 16 bytes, so the shifts are those of `src` now.
  __device__ __forceinline__ void store(const RawPiece (&raw)[kPieces], uint32_t stage, int k_left) const {
    uint32_t address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(src));
#pragma unroll
    for (int c = 0; c < kPieces; ++c, address += static_cast<uint32_t>(row_step))
      st_shared_16(stage + smem + c * THREADS * 16, realign(raw[c], address & 15, bytes(c, k_left)));
  }
};

// ---------------------------------------------------------------------------------------- shared memory to registers

// A warp's ldmatrix.x4 loads, each of 16 (m or n) by 16 k. kOuterBit: which bit of the matrix number (lane / 8) moves
// along m or n; the other moves along k. In the swizzled address, steps along the row of pieces are XORs, since they
// never carry into the lane's own bits; steps of whole rows are immediate offsets.
template <int OUTER, int BK, int COUNT, int kOuterBit, bool kKMajor>
struct FragmentAddress {
  static constexpr uint32_t kRowK = BK * 2, kRowMN = OUTER * 2;  // bytes of a row of the tile, K-major and MN-major
  uint32_t row;                                                  // offset of the row of this lane
  uint32_t column;                                               // swizzled offset in the row

  __device__ __forceinline__ explicit FragmentAddress(int warp_outer) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    const int lane = threadIdx.x % 32, l = lane % 8;
    const int o8 = (lane >> (3 + kOuterBit)) & 1, k8 = (lane >> (4 - kOuterBit)) & 1;
    const int s = swizzle(l, kKMajor ? BK / 8 : OUTER / 8);  // the rows that a lane loads differ by multiples of 8
    row = kKMajor ? (warp_outer + o8 * 8 + l) * kRowK : (k8 * 8 + l) * kRowMN;
    column = kKMajor ? (k8 ^ s) * 16 : ((warp_outer / 8 + o8) ^ s) * 16;
  }

  __device__ __forceinline__ void load(uint32_t (&r)[COUNT][4], uint32_t tile, int step) const {
    if constexpr (kKMajor) {
      const uint32_t base = tile + row + (column ^ (step * 32));
#pragma unroll
      for (int i = 0; i < COUNT; ++i) ldmatrix_x4<false>(r[i], base + i * 16 * kRowK);
    } else {
      const uint32_t base = tile + row + step * 16 * kRowMN;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) ldmatrix_x4<true>(r[i], base + (column ^ (i * 32)));
    }
  }
};

// ------------------------------------------------------------------------------------------------------ accumulators

// One 16x8 fragment in fp32 or fp16. Lane 4g + t holds columns 2t, 2t + 1 of rows g (half 0) and g + 8 (half 1).
template <typename T, bool kHalfAcc>
struct Accumulator {
  float c[4];
  __device__ __forceinline__ void clear() { c[0] = c[1] = c[2] = c[3] = 0.f; }
  __device__ __forceinline__ float get(int i) const { return c[i]; }
};
template <typename T>
struct Accumulator<T, true> {
  uint32_t c[2];
  __device__ __forceinline__ void clear() { c[0] = c[1] = 0u; }
  __device__ __forceinline__ float get(int i) const {
    return to_float(half_t{static_cast<uint16_t>(c[i / 2] >> (i % 2 * 16))});
  }
};

// ------------------------------------------------------------------------------------------------------------ kernel

template <typename T, bool kHalfAcc, typename Config, bool kAligned>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS)
    gemm_sm80_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ GemmSchedule sched) {
  constexpr int BM = Config::BM, BN = Config::BN, BK = Config::BK, WM = Config::WM, WN = Config::WN;
  constexpr int THREADS = Config::THREADS, STAGES = Config::STAGES, STEPS = BK / 16;
  constexpr int MF = WM / 16, NF = WN / 8;
  extern __shared__ __align__(128) char smem[];
  const uint32_t ring = shared_address(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / Config::WARPS_N * WM, warp_n = warp % Config::WARPS_N * WN;

  const bool gated = p.kind == EpilogueKind::kGated;
  constexpr auto columns_of = [](bool is_gated) { return is_gated ? BN / 2 : BN; };  // of D in a tile

  Accumulator<T, kHalfAcc> acc[MF][NF];
  float sum[Config::CHUNKED ? MF : 1][Config::CHUNKED ? NF : 1][4];
#pragma unroll
  for (int i = 0; i < MF; ++i)
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      acc[i][j].clear();
      if constexpr (Config::CHUNKED) sum[i][j][0] = sum[i][j][1] = sum[i][j][2] = sum[i][j][3] = 0.f;
    }

  // k16 steps until the end of the chunk; without chunks it starts at 0 and never comes back to it.
  const int chunk_steps = sched.chunk_steps;
  int chunk_left = chunk_steps;
  const auto end_chunk = [&] {
    if constexpr (Config::CHUNKED) {
#pragma unroll
      for (int i = 0; i < MF; ++i)
#pragma unroll
        for (int j = 0; j < NF; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] = sum[i][j][e] + acc[i][j].get(e);
          acc[i][j].clear();
        }
    }
  };
  const auto multiply = [&](const uint32_t (&a)[MF][4], const uint32_t (&b)[NF / 2][4]) {
#pragma unroll
    for (int i = 0; i < MF; ++i)
#pragma unroll
      for (int j = 0; j < NF; ++j) mma_m16n8k16<T>(acc[i][j].c, a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    if constexpr (Config::CHUNKED) {
      if (--chunk_left == 0) {
        end_chunk();
        chunk_left = chunk_steps;
      }
    }
  };

  // One copy for each pair of layouts: with the layout a run-time branch around each fragment's loads, the loads and
  // the multiplications do not overlap.
  const auto main_loop = [&]<bool kAKMajor, bool kBKMajor>() {
    const TileIndex tile = locate_tile(sched);
    const int64_t k_begin = tile.split * sched.split_len;
    const int64_t k_count = min(p.k - k_begin, sched.split_len);
    const int k_tiles = static_cast<int>((k_count + BK - 1) / BK);
    const int last_tile = static_cast<int>(k_count - (k_tiles - 1) * int64_t(BK));
    const auto k_left = [&](int t) { return t + 1 < k_tiles ? BK : last_tile; };
    const int64_t half = gated ? p.n / 2 : 0;
    TileLoader<BM, BK, THREADS, kAKMajor> load_a(p.a, int64_t(tile.m) * BM, p.m, 0, k_begin);
    TileLoader<BN, BK, THREADS, kBKMajor> load_b(p.b, int64_t(tile.n) * columns_of(gated), gated ? half : p.n, half,
                                                 k_begin);
    const FragmentAddress<BM, BK, MF, 0, kAKMajor> address_a(warp_m);
    const FragmentAddress<BN, BK, NF / 2, 1, kBKMajor> address_b(warp_n);
    if constexpr (kAligned) {
      uint32_t a[2][MF][4], b[2][NF / 2][4];
#pragma unroll
      for (int s = 0; s < STAGES - 1; ++s) {
        if (s < k_tiles) {
          load_a.copy_async(ring + s * Config::STAGE_BYTES, k_left(s));
          load_b.copy_async(ring + s * Config::STAGE_BYTES + Config::A_BYTES, k_left(s));
        }
        cp_async_commit();
      }
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      uint32_t read = ring, write = ring + (STAGES - 1) * Config::STAGE_BYTES;
      const uint32_t ring_end = ring + STAGES * Config::STAGE_BYTES;
      address_a.load(a[0], read, 0);
      address_b.load(b[0], read + Config::A_BYTES, 0);
#pragma unroll 1
      for (int t = 0; t < k_tiles; ++t) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          if (s == STEPS - 1) {
            // The next tile has arrived, and every warp is done reading the stage that the next copy overwrites.
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            read = read + Config::STAGE_BYTES == ring_end ? ring : read + Config::STAGE_BYTES;
          }
          address_a.load(a[(s + 1) % 2], read, (s + 1) % STEPS);
          address_b.load(b[(s + 1) % 2], read + Config::A_BYTES, (s + 1) % STEPS);
          if (s == 0) {
            if (t + STAGES - 1 < k_tiles) {
              load_a.copy_async(write, k_left(t + STAGES - 1));
              load_b.copy_async(write + Config::A_BYTES, k_left(t + STAGES - 1));
            }
            cp_async_commit();
            write = write + Config::STAGE_BYTES == ring_end ? ring : write + Config::STAGE_BYTES;
          }
          multiply(a[s % 2], b[s % 2]);
        }
      }
      cp_async_wait<0>();
    } else {
      uint32_t a[MF][4], b[NF / 2][4];
      RawPiece raw_a[decltype(load_a)::kPieces], raw_b[decltype(load_b)::kPieces];
      const auto load = [&](int t) {
        load_a.load(raw_a, k_left(t));
        load_b.load(raw_b, k_left(t));
      };
      const auto store = [&](int t) {
        const uint32_t stage = ring + (t & 1) * Config::STAGE_BYTES;
        load_a.store(raw_a, stage, k_left(t));
        load_b.store(raw_b, stage + Config::A_BYTES, k_left(t));
      };
      load(0);
      store(0);
      if (k_tiles > 1) load(1);
#pragma unroll 1
      for (int t = 0; t < k_tiles; ++t) {
        __syncthreads();  // tile t is stored, and every warp is done with tile t - 1
        if (t + 1 < k_tiles) store(t + 1);
        if (t + 2 < k_tiles) load(t + 2);
        const uint32_t stage = ring + (t & 1) * Config::STAGE_BYTES;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          address_a.load(a, stage, s);
          address_b.load(b, stage + Config::A_BYTES, s);
          multiply(a, b);
        }
      }
    }
  };
  if (p.k > 0) {
    const bool a_kmajor = p.a.stride_k == 1, b_kmajor = p.b.stride_k == 1;
    if (a_kmajor && b_kmajor)
      main_loop.template operator()<true, true>();
    else if (a_kmajor)
      main_loop.template operator()<true, false>();
    else if (b_kmajor)
      main_loop.template operator()<false, true>();
    else
      main_loop.template operator()<false, false>();
  }
  end_chunk();  // the last, maybe short, chunk; an empty one adds zero
  const auto total = [&](int i, int j, int e) {
    if constexpr (Config::CHUNKED)
      return sum[i][j][e];
    else
      return acc[i][j].get(e);
  };

  const TileIndex tile = locate_tile(sched);
  const int64_t half = gated ? p.n / 2 : 0, n_limit = gated ? half : p.n;
  const int64_t n0 = int64_t(tile.n) * columns_of(gated), row0 = int64_t(tile.m) * BM + warp_m;
  const int g = lane / 4, t2 = lane % 4 * 2;
  if (sched.split > 1) {
    // The sum of this split, as one slab of (m, n) floats.
    float* slab = static_cast<float*>(p.workspace) + tile.split * p.m * p.n;
#pragma unroll
    for (int i = 0; i < MF; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t row = row0 + i * 16 + h * 8 + g;
        if (row >= p.m) continue;
#pragma unroll
        for (int j = 0; j < NF; ++j) {
          const int column = warp_n + j * 8;  // of B's tile
          const int64_t col = n0 + (gated ? column / 16 * 8 : column) + t2;
          float* out = slab + row * p.n + col + (gated && (column & 8) ? half : 0);
          if (col < n_limit) out[0] = total(i, j, h * 2);
          if (col + 1 < n_limit) out[1] = total(i, j, h * 2 + 1);
        }
      }
    return;
  }

  __syncthreads();  // the ring is free: each warp takes two slices of it, one for sums, one for what the epilogue reads
  constexpr int STRIDE = Config::EPI_STRIDE;
  float* const slice = reinterpret_cast<float*>(smem) + warp * 2 * 16 * STRIDE;
  float* const aux = slice + 16 * STRIDE;
  const int quads = (gated ? WN / 2 : WN) / kQuad;  // in a row; divides 32, so a lane keeps its columns
  const int lane_row = lane / quads, rows_per_pass = 32 / quads, column = lane % quads * kQuad;
  // Gate columns 8f .. 8f + 7 of a gated tile are columns 16f .. of the slice, their up columns the next 8.
  const int slice_column = gated ? column / 8 * 16 + column % 8 : column;
  QuadRows r;
  r.col = n0 + (gated ? warp_n / 2 : warp_n) + column;
  r.valid = static_cast<int>(max(min(n_limit - r.col, int64_t(kQuad)), int64_t(0)));
  r.row_step = rows_per_pass;
  float bias[kQuad], bias_up[kQuad];
  load_bias(p.bias, r.col, r.valid, bias);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) bias_up[j] = 0.f;
  if (gated) load_bias(p.bias, half + r.col, r.valid, bias_up);

#pragma unroll 1
  for (int i = 0; i < MF; ++i) {
    r.row = row0 + i * 16 + lane_row;
    r.row_end = r.valid > 0 ? min(p.m, row0 + i * 16 + 16) : 0;
    if (epilogue_has_input(p)) {  // a lane reads back its own slots only
      constexpr int kLoads = 16 * WN / kQuad / 32;
      float* out = aux + lane_row * STRIDE + column;
      if (p.kind == EpilogueKind::kActGrad)
        load_input_rows<T, kLoads>(static_cast<const T*>(p.saved), p.ldsaved, r, out, rows_per_pass * STRIDE);
      else if (p.residual_dtype == DType::kFloat32)
        load_input_rows<float, kLoads>(static_cast<const float*>(p.residual), p.ldresidual, r, out,
                                       rows_per_pass * STRIDE);
      else
        load_input_rows<T, kLoads>(static_cast<const T*>(p.residual), p.ldresidual, r, out, rows_per_pass * STRIDE);
    }
#pragma unroll
    for (int f = 0; f < MF; ++f)  // registers have no index: pick fragment row i by a uniform branch
      if (f == i) {
#pragma unroll
        for (int j = 0; j < NF; ++j) {
          *reinterpret_cast<float2*>(slice + g * STRIDE + j * 8 + t2) = make_float2(total(f, j, 0), total(f, j, 1));
          *reinterpret_cast<float2*>(slice + (g + 8) * STRIDE + j * 8 + t2) =
              make_float2(total(f, j, 2), total(f, j, 3));
        }
      }
    __syncwarp();
    const auto read = [&](const float* from, int pass, int col, float (&v)[kQuad]) {
      const float4 q = *reinterpret_cast<const float4*>(from + (pass * rows_per_pass + lane_row) * STRIDE + col);
      v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    };
    apply_epilogue<T>(
        p, r, bias, bias_up, [&](int pass, int up, float (&v)[kQuad]) { read(slice, pass, slice_column + up * 8, v); },
        [&](int pass, float (&v)[kQuad]) { read(aux, pass, column, v); });
    __syncwarp();
  }
}

// ------------------------------------------------------------------------------------------------------------ launch

// Opts the kernel into its dynamic shared memory, once per device.
template <typename Kernel>
Status allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& devices) {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return {"cudaGetDevice", e};
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (devices.load(std::memory_order_relaxed) & bit) return {};
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return {"cudaFuncSetAttribute", e};
  devices.fetch_or(bit, std::memory_order_relaxed);
  return {};
}

template <typename T, bool kHalfAcc, GemmTile kTile, bool kAligned>
Status launch_gemm_sm80_tile(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  using Config = tile_config<kTile, kAligned>;
  static std::atomic<uint64_t> devices{0};
  constexpr int ring_bytes = Config::STAGES * Config::STAGE_BYTES;
  constexpr int bytes = ring_bytes > Config::EPI_BYTES ? ring_bytes : Config::EPI_BYTES;
  const auto kernel = gemm_sm80_kernel<T, kHalfAcc, Config, kAligned>;
  if (const Status s = allow_shared_memory(kernel, bytes, devices); !s.ok()) return s;

  GemmSchedule sched;
  const bool gated = p.kind == EpilogueKind::kGated;
  const int64_t columns = gated ? p.n / 2 : p.n, tile_columns = gated ? Config::BN / 2 : Config::BN;
  const int64_t tiles_m = (p.m + Config::BM - 1) / Config::BM, tiles_n = (columns + tile_columns - 1) / tile_columns;
  if (tiles_m > INT32_MAX || tiles_n > INT32_MAX / tiles_m || plan.split > INT32_MAX / (tiles_m * tiles_n))
    return {"gemm: more than 2^31 - 1 tiles of the output"};
  sched.tiles_m = static_cast<uint32_t>(tiles_m);
  sched.tiles_n = static_cast<uint32_t>(tiles_n);
  sched.group_m = static_cast<uint32_t>(std::min<int64_t>(plan.group_m, tiles_m));
  sched.split = static_cast<uint32_t>(plan.split);
  sched.split_len = plan.split_len;
  const bool chunks = plan.split == 1 && p.accumulate.chunk < p.k;
  sched.chunk_steps = chunks ? static_cast<int>(p.accumulate.chunk / 16) : 0;
  const uint32_t grid = sched.tiles_m * sched.tiles_n * sched.split;
  kernel<<<grid, Config::THREADS, bytes, stream>>>(p, sched);
  return {nullptr, cudaPeekAtLastError()};
}

template <typename T, bool kHalfAcc>
Status launch_gemm_sm80(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  switch (plan.tile) {
    case GemmTile::kLarge:
      if constexpr (!kHalfAcc) return launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kLarge, true>(p, plan, stream);
      break;
    case GemmTile::kMedium:
      return plan.aligned ? launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kMedium, true>(p, plan, stream)
                          : launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kMedium, false>(p, plan, stream);
    case GemmTile::kSmall:
      return plan.aligned ? launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kSmall, true>(p, plan, stream)
                          : launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kSmall, false>(p, plan, stream);
    case GemmTile::kSkinny:
      return plan.aligned ? launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kSkinny, true>(p, plan, stream)
                          : launch_gemm_sm80_tile<T, kHalfAcc, GemmTile::kSkinny, false>(p, plan, stream);
  }
  return {"gemm: the plan names a tile that has no such kernel"};
}

}  // namespace ampkernels::cuda
