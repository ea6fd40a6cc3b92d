// The Hopper GEMM's epilogue: from one warpgroup's accumulators to the results in memory.
//
// By panels of kPanel columns, in a panel by strips of 64 rows and kStrip columns: a strip gets bias and activation in
// fp32, is rounded once, and goes by stmatrix into the panel's swizzled buffer. One proxy fence, one barrier of the
// warpgroup and one TMA store per 64 rows end a panel. The buffers rotate, and the barrier also says that the next
// panel's have been read, so that nobody waits for a store.
//
// Registers cannot be indexed. Without an activation the strips are unrolled and read the accumulators where they are;
// with one there is a loop over strips for each activation, and a strip is copied out of the accumulators by a uniform
// branch. What leaves or comes otherwise than by TMA (odd strides, fp32, split K) takes run_any, one loop with every
// case in it.
#pragma once

#include <utility>

#include "ampkernels/activation.h"
#include "cuda/gemm_sm90_config.cuh"
#include "cuda/ptx.cuh"
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
  int kept;      // thread(), where a register is left for it
  int next = 0;  // the buffer of the next panel's first result; run_reading: the number of panels done

  __device__ __forceinline__ Epilogue(const Args90& args, uint32_t smem, int group)
      : args(args), smem(smem), group(group), kept(threadIdx.x % kWarpgroup) {
    asm volatile("" : "+r"(kept));
  }

  // The thread's number in the warpgroup. Reading it takes as long as a load; where no register is left, it is read all
  // the same, and nothing that is computed from it is kept either.
  __device__ __forceinline__ int thread() const {
    if constexpr (!C::kLean) return kept;
    int t = threadIdx.x % kWarpgroup;
    asm volatile("" : "+r"(t));
    return t;
  }
  __device__ __forceinline__ bool leader() const { return thread() == 0; }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group, kWarpgroup); }

  // The tile's bias, in fp32; gated: gate, then up.
  __device__ __forceinline__ uint32_t bias() const { return smem + C::kOffsetBias + group * C::kBlockN * 4; }

  // The buffer of the panel's result number `slot`.
  __device__ __forceinline__ uint32_t buffer(int slot) const {
    const int i = next + slot;
    return smem + C::kOffsetEpilogue +
           (group * C::kBuffers + (i < C::kBuffers ? i : i - C::kBuffers)) * C::kBufferBytes;
  }

  // A thread's part of the tile's bias: asked for before the products, widened and kept in shared memory after them.
  static constexpr int kBiasValues = (C::kBlockN + kWarpgroup - 1) / kWarpgroup;
  struct Bias {
    uint32_t bits[kBiasValues];  // as stored, if in 16 or 32 bits; fp64 has been rounded
  };
  __device__ __forceinline__ Bias fetch_bias(int col0) const {
    Bias bias = {};
    const DType dtype = args.bias.dtype;
    if (args.bias.data == nullptr) return bias;
#pragma unroll
    for (int v = 0; v < kBiasValues; ++v) {
      const int i = v * kWarpgroup + thread();
      const bool up = C::kGated && i >= C::kBlockN / 2;
      const int col = col0 + i - (up ? C::kBlockN / 2 : 0);
      const int64_t at = ((up ? args.n_out : 0) + col) * args.bias.stride;
      if (i >= C::kBlockN || col >= args.n_out) continue;
      if (dtype == DType::kFloat64) {
        bias.bits[v] = bit_cast<uint32_t>(load_as<float>(args.bias.data, dtype, at));
      } else if (dtype == DType::kFloat32) {
        bias.bits[v] = static_cast<const uint32_t*>(args.bias.data)[at];
      } else {
        bias.bits[v] = static_cast<const uint16_t*>(args.bias.data)[at];
      }
    }
    return bias;
  }
  __device__ __forceinline__ void keep_bias(const Bias& values) const {
    if (args.bias.data == nullptr) return;
    sync();  // the last tile's has been read
#pragma unroll
    for (int v = 0; v < kBiasValues; ++v) {
      const int i = v * kWarpgroup + thread();
      const uint32_t bits = values.bits[v];
      const float b = args.bias.dtype == DType::kFloat16    ? to_float(half_t{uint16_t(bits)})
                      : args.bias.dtype == DType::kBFloat16 ? to_float(bfloat16_t{uint16_t(bits)})
                                                            : bit_cast<float>(bits);
      if (i < C::kBlockN) ptx::store_shared(bias() + i * 4, b);
    }
    sync();
  }

  __device__ __forceinline__ void add_bias(float (&v)[kValues], int first) const {
    const uint32_t at = bias() + (first + 2 * (thread() % 4)) * 4;
#pragma unroll
    for (int j = 0; j < C::kStrip / 8; ++j) {
      const float2 b = ptx::load_shared_pair(at + j * 32);
      v[4 * j] += b.x;
      v[4 * j + 1] += b.y;
      v[4 * j + 2] += b.x;
      v[4 * j + 3] += b.y;
    }
  }

  // Where fragment row h (0 or 1) of a thread lies, from a strip's first row.
  __device__ __forceinline__ static int fragment_row(int thread, int h) {
    return thread / 32 * 16 + thread % 32 / 4 + 8 * h;
  }
  __device__ __forceinline__ static int fragment_col(int thread, int j) { return 8 * j + 2 * (thread % 4); }

  __device__ __forceinline__ static void round_strip(const float (&v)[kValues], uint32_t (&pairs)[kValues / 2]) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) pairs[i] = round_pair<T>(v[2 * i], v[2 * i + 1]);
  }

  // Where this thread's stmatrix row begins in a buffer: 16-byte chunk number c of it is at that ^ (c << 4), in the
  // swizzle that TMA reads, which exchanges chunks by 128-byte lines.
  static constexpr int kRowBytes = C::kPanel * 2;
  __device__ __forceinline__ uint32_t matrix_row() const {
    const int t = thread(), lane = t % 32, r = t / 32 * 16 + lane % 16;
    return r * kRowBytes + ((lane / 16 ^ (r * kRowBytes / 128 % (kRowBytes / 16))) << 4);
  }
  __device__ __forceinline__ static void stage(uint32_t row, const uint32_t (&pairs)[kValues / 2], int fragment,
                                               int across) {
    row += fragment * C::kFragmentBytes;
#pragma unroll
    for (int q = 0; q < C::kStrip / 16; ++q) {
      ptx::stmatrix_x4(row ^ ((across * (C::kStrip / 8) + 2 * q) << 4), pairs[4 * q], pairs[4 * q + 1],
                       pairs[4 * q + 2], pairs[4 * q + 3]);
    }
  }

  __device__ __forceinline__ static void unstage(uint32_t row, uint32_t (&pairs)[kValues / 2], int fragment,
                                                 int across) {
    row += fragment * C::kFragmentBytes;
#pragma unroll
    for (int q = 0; q < C::kStrip / 16; ++q) {
      uint32_t part[4];
      ldmatrix_x4<false>(part, row ^ ((across * (C::kStrip / 8) + 2 * q) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[4 * q + i] = part[i];
    }
  }

  // Rounds a strip once, to T, and writes it: into the panel's buffer, or, where TMA cannot address the matrix, from
  // the registers.
  __device__ __forceinline__ void store16(const Out90& out, int slot, const float (&v)[kValues], int fragment,
                                          int across, int row, int col) {
    uint32_t pairs[kValues / 2];
    round_strip(v, pairs);
    if (out.tma) {
      stage(buffer(slot) + matrix_row(), pairs, fragment, across);
    } else {
      store_pairs(out, pairs, row, col);
    }
  }

  // Sends the panel's buffer on its way. The leader alone.
  __device__ __forceinline__ void send(const Out90& out, uint32_t from, int row0, int col) const {
    if (!out.tma) return;
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f) {
      if (row0 + f * 64 < args.m) {
        ptx::tma_store_2d(&out.map, from + f * C::kFragmentBytes, col, row0 + f * 64);
      }
    }
  }

  __device__ __forceinline__ void store_pairs(const Out90& out, const uint32_t (&pairs)[kValues / 2], int row,
                                              int col) const {
    T* base = static_cast<T*>(out.data);
    const int t = thread();
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(t, i & 1), c = col + fragment_col(t, i / 2);
      if (r >= args.m || c >= args.n_out) continue;
      T* p = base + int64_t(r) * out.ld + c;
      p[0] = T{uint16_t(pairs[i] & 0xffffu)};
      if (c + 1 < args.n_out) p[1] = T{uint16_t(pairs[i] >> 16)};
    }
  }

  __device__ __forceinline__ void load_pairs(const In90& in, uint32_t (&pairs)[kValues / 2], int row, int col) const {
    const T* base = static_cast<const T*>(in.data);
    const int t = thread();
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(t, i & 1), c = col + fragment_col(t, i / 2);
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

  __device__ __forceinline__ static void add_residual(float (&v)[kValues], const uint32_t (&residual)[kValues / 2]) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      float low, high;
      widen_pair<T>(residual[i], low, high);
      v[2 * i] = low + v[2 * i];
      v[2 * i + 1] = high + v[2 * i + 1];
    }
  }
  // The same of a residual where it lies, all of it asked for before any is added.
  __device__ __forceinline__ void add_residual(const In90& in, float (&v)[kValues], int row, int col) const {
    if (!args.read_fp32) {
      uint32_t residual[kValues / 2];
      load_pairs(in, residual, row, col);
      return add_residual(v, residual);
    }
    const float* base = static_cast<const float*>(in.data);
    const int t = thread();
    float2 old[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(t, i & 1), c = col + fragment_col(t, i / 2);
      const float* p = base + int64_t(r) * in.ld + c;
      old[i] = make_float2(0.0f, 0.0f);
      if (r < args.m && c + 1 < args.n_out && in.paired) {
        old[i] = *reinterpret_cast<const float2*>(p);
      } else if (r < args.m && c < args.n_out) {
        old[i].x = p[0];
        if (c + 1 < args.n_out) old[i].y = p[1];
      }
    }
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      v[2 * i] = old[i].x + v[2 * i];
      v[2 * i + 1] = old[i].y + v[2 * i + 1];
    }
  }

  // fp32 results straight from the registers.
  __device__ __forceinline__ void store32(float* base, int64_t ld, int cols, bool paired, const float (&v)[kValues],
                                          int row, int col) const {
    const int t = thread();
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int r = row + fragment_row(t, i & 1), c = col + fragment_col(t, i / 2);
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

  // kLanes values go through an activation together: a warp of the epilogue is alone on its scheduler (math.h, Lanes).
  static constexpr int kLanes = C::kLarge ? 4 : 8;
  template <Activation A, Result R>
  __device__ __forceinline__ static void activate(float (&v)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; i += kLanes) {
      Lanes<kLanes> x;
#pragma unroll
      for (int l = 0; l < kLanes; ++l) x.v[l] = v[i + l];
      x = activation<A, R>(x);
#pragma unroll
      for (int l = 0; l < kLanes; ++l) v[i + l] = x.v[l];
    }
  }
  // The value's form is that of its result, d (activation_dtype), or, of a saved tensor, 16 bits.
  __device__ __forceinline__ void activate(float (&v)[kValues]) const {
    const bool residual = !C::kActGrad && args.read.data != nullptr;
    with_activation(args.activation, args.d_fp32 || residual ? Result::kAny : Result::k16Bit,
                    [&]<Activation A, Result R>() { activate<A, R>(v); });
  }
  template <Activation A>
  __device__ __forceinline__ static void multiply_by_slope(float (&v)[kValues], const uint32_t (&saved)[kValues / 2]) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      Lanes<4> x;
      widen_pair<T>(saved[i / 2], x.v[0], x.v[1]);
      widen_pair<T>(saved[i / 2 + 1], x.v[2], x.v[3]);
      const Lanes<4> slope = activation_grad<A, Result::k16Bit>(x);
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

  // The buffers of a panel are free: the last panel's barrier has seen to it, unless the results take all of them.
  __device__ __forceinline__ void begin_panel(int results) const {
    if (2 * results <= C::kBuffers) return;
    if (leader()) ptx::bulk_wait_read<0>();
    sync();
  }
  __device__ __forceinline__ void end_panel(int results, int row0, int col) {
    ptx::fence_async_proxy();
    // Before the barrier lets anyone go on to the next panel's buffers, the stores before this panel's have read them.
    if (leader()) ptx::bulk_wait_read<0>();
    sync();
    if (leader()) {
      send(args.d, buffer(args.d_slot), row0, col);
      if constexpr (C::kActGrad) {
        send(args.act_out, buffer(0), row0, col);
      } else {
        send(args.pre, buffer(0), row0, col);
        if constexpr (C::kGated) send(args.pre_up, buffer(1), row0, col);
      }
      ptx::bulk_commit();
    }
    next += results;
    if (next >= C::kBuffers) next -= C::kBuffers;
  }

  // d = acc + bias, by TMA.
  template <int kPanelIndex, class Between>
  __device__ __forceinline__ void run_plain_panel(const Accumulators<C>& acc, int row0, int col0, Between between) {
    const int col = col0 + kPanelIndex * C::kPanel;
    if (col >= args.n_out) return;
    begin_panel(1);
    const uint32_t row = buffer(0) + matrix_row();
    const bool biased = args.bias.data != nullptr;
    [&]<int... kStrips>(std::integer_sequence<int, kStrips...>) {
      const auto strip = [&]<int kStripInPanel>() {
        constexpr int kAcross = kStripInPanel % C::kStripsAcross;
        between();
        float v[kValues], up[kValues];
        take<kPanelIndex * C::kStripsPerPanel + kStripInPanel>(acc, v, up);
        if (biased) add_bias(v, kPanelIndex * C::kPanel + kAcross * C::kStrip);
        uint32_t pairs[kValues / 2];
        round_strip(v, pairs);
        between();
        stage(row, pairs, kStripInPanel / C::kStripsAcross, kAcross);
      };
      (strip.template operator()<kStrips>(), ...);
    }(std::make_integer_sequence<int, C::kStripsPerPanel>{});
    end_panel(1, row0, col);
  }
  template <class Between>
  __device__ __forceinline__ void run_plain(const Accumulators<C>& acc, int row0, int col0, Between between) {
    [&]<int... kPanels>(std::integer_sequence<int, kPanels...>) {
      (run_plain_panel<kPanels>(acc, row0, col0, between), ...);
    }(std::make_integer_sequence<int, C::kPanels>{});
  }

  // y = act(acc + bias), or act(gate) * up, with the pre-activations where they are wanted; all by TMA.
  template <Activation A, class Between>
  __device__ __forceinline__ void run_activated(const Accumulators<C>& acc, int row0, int col0, Between between) {
    const int results = args.d_slot + 1;
    const bool biased = args.bias.data != nullptr, saves = args.pre.data != nullptr;
#pragma unroll 1
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int panel_col = col0 + panel * C::kPanel;
      if (panel_col >= args.n_out) break;
      begin_panel(results);
#pragma unroll 1
      for (int strip = 0; strip < C::kStripsPerPanel; ++strip) {
        between();
        const int fragment = strip / C::kStripsAcross, across = strip % C::kStripsAcross;
        const int first = panel * C::kPanel + across * C::kStrip;
        float v[kValues], up[kValues];
        take(acc, panel * C::kStripsPerPanel + strip, v, up);
        if (biased) {
          add_bias(v, first);
          if constexpr (C::kGated) add_bias(up, C::kBlockN / 2 + first);
        }
        uint32_t pairs[kValues / 2];
        if (saves) {
          round_strip(v, pairs);
          stage(buffer(0) + matrix_row(), pairs, fragment, across);
          if constexpr (C::kGated) {
            round_strip(up, pairs);
            stage(buffer(1) + matrix_row(), pairs, fragment, across);
          }
        }
        activate<A, Result::k16Bit>(v);
        between();
        if constexpr (C::kGated) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) v[i] *= up[i];
        }
        round_strip(v, pairs);
        stage(buffer(args.d_slot) + matrix_row(), pairs, fragment, across);
      }
      end_panel(results, row0, panel_col);
    }
  }

  // kReads: panel number i of the matrix that is read is in the group's buffer i % 2, and so is the result that takes
  // its place; the other result is in the buffer 2 + i % 2.
  __device__ __forceinline__ uint32_t read_buffer(int turn) const {
    return smem + C::kOffsetEpilogue + (group * C::kBuffers + turn) * C::kBufferBytes;
  }
  __device__ __forceinline__ uint32_t read_barrier(int turn) const {
    return smem + C::kOffsetRead + (group * 2 + turn) * 8;
  }
  // Asks for panel number `next + ahead`, whose buffer's last store has been read. The leader alone.
  __device__ __forceinline__ void fetch(int row0, int col, int ahead = 0) const {
    if (!args.all_tma || row0 >= args.m || col >= args.n_out) return;
    const int turn = (next + ahead) % 2;
    const int fragments = min((args.m - row0 + 63) / 64, C::kFragments);
    ptx::mbarrier_arrive_expect_tx(read_barrier(turn), uint32_t(fragments * C::kFragmentBytes));
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f) {
      if (f < fragments) {
        ptx::tma_load_2d(read_buffer(turn) + f * C::kFragmentBytes, &args.read.map, read_barrier(turn), col,
                         row0 + f * 64);
      }
    }
  }

  // Panel by panel, strip by strip, step(strip of the tile, fragment, across, where this thread's row of the panel that
  // has come begins). `in_place` is the result that takes its place, `beside` lies two buffers on.
  template <class Step>
  __device__ __forceinline__ void run_reading(const Out90& in_place, const Out90& beside, int row0, int col0,
                                              Step step) {
#pragma unroll 1
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int panel_col = col0 + panel * C::kPanel;
      if (panel_col >= args.n_out) break;
      const int turn = next % 2;
      ptx::mbarrier_wait(read_barrier(turn), next / 2 % 2);
#pragma unroll 1
      for (int strip = 0; strip < C::kStripsPerPanel; ++strip) {
        if (strip == C::kStripsPerPanel / 2 && panel + 1 < C::kPanels && leader()) {
          ptx::bulk_wait_read<0>();  // the last panel's stores, half a panel ago
          fetch(row0, panel_col + C::kPanel, 1);
        }
        step(panel * C::kStripsPerPanel + strip, strip / C::kStripsAcross, strip % C::kStripsAcross,
             read_buffer(turn) + matrix_row());
      }
      ptx::fence_async_proxy();
      if (leader()) ptx::bulk_wait_read<0>();
      sync();
      if (leader()) {
        send(in_place, read_buffer(turn), row0, panel_col);
        send(beside, read_buffer(turn) + 2 * C::kBufferBytes, row0, panel_col);
        ptx::bulk_commit();
      }
      ++next;
    }
  }

  // d = acc * act'(saved), and act(saved), rounded, where it is wanted; all by TMA.
  template <Activation A, class Between>
  __device__ __forceinline__ void run_act_grad(const Accumulators<C>& acc, int row0, int col0, Between between) {
    const bool activates = args.act_out.data != nullptr;
    run_reading(args.act_out, args.d, row0, col0, [&](int index, int fragment, int across, uint32_t row) {
      between();
      uint32_t saved[kValues / 2], pairs[kValues / 2];
      unstage(row, saved, fragment, across);
      float v[kValues], up[kValues];
      if (activates) {
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) widen_pair<T>(saved[i], v[2 * i], v[2 * i + 1]);
        if (!args.saved_is_output) activate<A, Result::k16Bit>(v);
        round_strip(v, pairs);
        stage(row, pairs, fragment, across);
      }
      take(acc, index, v, up);
      multiply_by_slope<A>(v, saved);
      between();
      round_strip(v, pairs);
      stage(row + 2 * C::kBufferBytes, pairs, fragment, across);
    });
  }

  // d = act(acc + bias) + residual, and the pre-activation where it is wanted; all by TMA.
  template <Activation A, class Between>
  __device__ __forceinline__ void run_residual(const Accumulators<C>& acc, int row0, int col0, Between between) {
    const bool biased = args.bias.data != nullptr, saves = args.pre.data != nullptr;
    run_reading(args.d, args.pre, row0, col0, [&](int index, int fragment, int across, uint32_t row) {
      between();
      float v[kValues], up[kValues];
      take(acc, index, v, up);
      if (biased) {
        add_bias(v, index / C::kStripsPerPanel * C::kPanel + across * C::kStrip);
      }
      uint32_t residual[kValues / 2], pairs[kValues / 2];
      if (saves) {
        round_strip(v, pairs);
        stage(row + 2 * C::kBufferBytes, pairs, fragment, across);
      }
      activate<A, Result::kAny>(v);
      between();
      unstage(row, residual, fragment, across);
      add_residual(v, residual);
      round_strip(v, pairs);
      stage(row, pairs, fragment, across);
    });
  }

  // `between` is called twice for every strip: what else this warpgroup has to do meanwhile.
  template <class Between>
  __device__ __forceinline__ void run(const Accumulators<C>& acc, int row0, int col0, int split, Between between) {
    if (row0 >= args.m) return;
    if (args.all_tma) {
      if constexpr (!C::kGated && !C::kReads) {
        if (args.activation == Activation::kNone && args.pre.data == nullptr) {
          return run_plain(acc, row0, col0, between);
        }
      }
      return with_activation(args.activation, [&]<Activation A>() {
        if constexpr (C::kActGrad) {
          run_act_grad<A>(acc, row0, col0, between);
        } else if constexpr (C::kResidual) {
          run_residual<A>(acc, row0, col0, between);
        } else {
          run_activated<A>(acc, row0, col0, between);
        }
      });
    }
    if constexpr (!C::kResidual) run_any(acc, row0, col0, split);
  }

  __device__ __forceinline__ void run_any(const Accumulators<C>& acc, int row0, int col0, int split) {
    const bool partial = args.partials != nullptr;
    const int results = args.d_slot + 1;
#pragma unroll 1
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const int panel_col = col0 + panel * C::kPanel;
      if (panel_col >= args.n_out || row0 >= args.m) break;
      begin_panel(results);
#pragma unroll 1
      for (int strip = 0; strip < C::kStripsPerPanel; ++strip) {
        const int fragment = strip / C::kStripsAcross, across = strip % C::kStripsAcross;
        const int row = row0 + fragment * 64;
        const int first = panel * C::kPanel + across * C::kStrip;
        const int col = col0 + first;
        if (row >= args.m) break;
        float v[kValues], up[kValues];
        const int index = panel * C::kStripsPerPanel + strip;
        if (!C::kActGrad || partial) take(acc, index, v, up);
        if (partial) {
          float* base = args.partials + int64_t(split) * args.m * args.n;
          const bool paired = args.n_out % 2 == 0;
          if constexpr (C::kGated) store32(base + args.n_out, args.n, args.n_out, paired, up, row, col);
          store32(base, args.n, args.n_out, paired, v, row, col);
          continue;
        }
        if constexpr (C::kActGrad) {
          uint32_t saved[kValues / 2];
          load_pairs(args.read, saved, row, col);
          if (args.act_out.data != nullptr) {
            float y[kValues];
#pragma unroll
            for (int i = 0; i < kValues / 2; ++i) widen_pair<T>(saved[i], y[2 * i], y[2 * i + 1]);
            with_activation(args.saved_is_output ? Activation::kNone : args.activation,
                            [&]<Activation A>() { activate<A, Result::k16Bit>(y); });
            store16(args.act_out, 0, y, fragment, across, row, col);
          }
          take(acc, index, v, up);
          with_activation(args.activation, [&]<Activation A>() { multiply_by_slope<A>(v, saved); });
        } else if constexpr (C::kGated) {
          if (args.bias.data != nullptr) {
            add_bias(v, first);
            add_bias(up, C::kBlockN / 2 + first);
          }
          if (args.pre.data != nullptr) {
            store16(args.pre, 0, v, fragment, across, row, col);
            store16(args.pre_up, 1, up, fragment, across, row, col);
          }
          activate(v);
#pragma unroll
          for (int i = 0; i < kValues; ++i) v[i] *= up[i];
        } else {
          if (args.bias.data != nullptr) add_bias(v, first);
          if (args.pre.data != nullptr) store16(args.pre, 0, v, fragment, across, row, col);
          if (args.activation != Activation::kNone) activate(v);
          if (args.read.data != nullptr) add_residual(args.read, v, row, col);
        }
        if (args.d_fp32) {
          store32(static_cast<float*>(args.d.data), args.d.ld, args.n_out, args.d.paired, v, row, col);
        } else {
          store16(args.d, args.d_slot, v, fragment, across, row, col);
        }
      }
      if (args.buffered) end_panel(results, row0, panel_col);
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace ampkernels::cuda::sm90
