// The Hopper GEMM's epilogue: from one warpgroup's accumulators to the results in memory.
//
// By panels of kPanel columns, in a panel by strips of 64 rows and kStrip columns: a strip is copied out of the
// accumulators, gets bias and activation in fp32, is rounded once, and goes by stmatrix into the panel's swizzled
// buffer. One proxy fence, one barrier of the warpgroup and one TMA store per 64 rows end a panel. The buffers rotate,
// and the barrier also says that the next panel's have been read, so that nobody waits for a store.
#pragma once

#include "ampkernels/activation.h"
#include "cuda/gemm_sm90_config.cuh"
#include "cuda/ptx_sm90.cuh"

namespace ampkernels::cuda::sm90 {

// convert.h's rounding and widening, two elements to a register.
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

// One consumer warpgroup's way out of the registers.
template <class C>
struct Epilogue {
  using T = typename C::T;
  // Of a strip, a thread has columns 8 j + 2 (lane % 4) + {0, 1} of rows lane / 4 + {0, 8}.
  static constexpr int kValues = C::kStrip / 2;

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
    return smem + C::kOffsetEpilogue +
           (group * C::kBuffers + (i < C::kBuffers ? i : i - C::kBuffers)) * C::kBufferBytes;
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
  __device__ __forceinline__ int fragment_row(int h) const {
    return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
  }
  __device__ __forceinline__ int fragment_col(int j) const { return 8 * j + 2 * (threadIdx.x % 4); }

  // Rounds a strip once, to T, and writes it: into the panel's buffer, in the swizzle that TMA reads, or, where TMA
  // cannot address the matrix, from the registers.
  __device__ __forceinline__ void store16(const Out90& out, int slot, const float (&v)[kValues], int fragment,
                                          int across, int row, int col) {
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

  __device__ __forceinline__ void store_pairs(const Out90& out, const uint32_t (&pairs)[kValues / 2], int row,
                                              int col) const {
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
  __device__ __forceinline__ void store32(float* base, int64_t ld, int cols, bool paired, bool add, float (&v)[kValues],
                                          int row, int col) const {
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

  // Four values go through an activation together: a warp of the epilogue is alone on its scheduler (math.h, Lanes).
  template <Activation A>
  __device__ __forceinline__ static void activate(float (&v)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      const Lanes<4> y = activation<A>(Lanes<4>{v[i], v[i + 1], v[i + 2], v[i + 3]});
#pragma unroll
      for (int l = 0; l < 4; ++l) v[i + l] = y.v[l];
    }
  }
  template <Activation A>
  __device__ __forceinline__ static void multiply_by_slope(float (&v)[kValues], const uint32_t (&saved)[kValues / 2]) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      Lanes<4> x;
      widen_pair<T>(saved[i / 2], x.v[0], x.v[1]);
      widen_pair<T>(saved[i / 2 + 1], x.v[2], x.v[3]);
      const Lanes<4> slope = activation_grad<A>(x);
#pragma unroll
      for (int l = 0; l < 4; ++l) v[i + l] *= slope.v[l];
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
  __device__ __forceinline__ static void take(const Accumulators<C>& acc, int strip, float (&v)[kValues],
                                              float (&up)[kValues]) {
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
#pragma unroll
            for (int i = 0; i < kValues / 2; ++i) widen_pair<T>(saved[i], y[2 * i], y[2 * i + 1]);
            with_activation(args.saved_is_output ? Activation::kNone : args.activation,
                            [&]<Activation A>() { activate<A>(y); });
            store16(args.act_out, 0, y, fragment, across, row, col);
          }
          take(acc, index, v, up);
          with_activation(args.activation, [&]<Activation A>() { multiply_by_slope<A>(v, saved); });
        } else if constexpr (C::kGated) {
          add_bias(v, first);
          add_bias(up, C::kBlockN / 2 + first);
          if (args.pre.data != nullptr) {
            store16(args.pre, 0, v, fragment, across, row, col);
            store16(args.pre_up, 1, up, fragment, across, row, col);
          }
          with_activation(args.activation, [&]<Activation A>() { activate<A>(v); });
#pragma unroll
          for (int i = 0; i < kValues; ++i) v[i] *= up[i];
        } else {
          add_bias(v, first);
          if (args.pre.data != nullptr) store16(args.pre, 0, v, fragment, across, row, col);
          if (args.activation != Activation::kNone) {
            with_activation(args.activation, [&]<Activation A>() { activate<A>(v); });
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
        // Before the barrier lets anyone go on to the next panel's buffers, the stores before this panel's have read
        // them.
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

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace ampkernels::cuda::sm90
