// 16 bytes from any 2-byte aligned address: two aligned loads and a funnel shift.
#pragma once

#include <cstdint>

namespace ampkernels::cuda {

// Two aligned 16-byte loads that contain a piece at any address. Never reads a 16-byte block without a valid element.
struct RawPiece {
  uint4 low, high;
};

__device__ __forceinline__ RawPiece load_raw(const char* src, int bytes) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(src) & 15);
  const uint4* block = reinterpret_cast<const uint4*>(src - shift);
  return {bytes > 0 ? __ldg(block) : zero, bytes + shift > 16 ? __ldg(block + 1) : zero};
}

__device__ __forceinline__ uint4 realign(const RawPiece& raw, int shift, int bytes) {
  const uint32_t w[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  uint32_t x[6], y[5], out[4];
#pragma unroll
  for (int i = 0; i < 6; ++i) x[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) y[i] = shift & 4 ? x[i + 1] : x[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = __funnelshift_r(y[i], y[i + 1], (shift & 2) * 8);
    if (bytes < 16) out[i] &= bytes >= 4 * i + 4 ? ~0u : bytes == 4 * i + 2 ? 0xffffu : 0u;
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace ampkernels::cuda
