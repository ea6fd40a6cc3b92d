// What the row kernels share: how a row is dealt to lanes, how its vectors are read and written at any alignment, and
// how the lanes of a row agree on a sum.
//
// Layout. A row is a sequence of vectors of V elements, V = 16 bytes of the row's dtype, counted from the row's first
// element wherever that lies in memory. Lane t of the L lanes of a row holds vectors t, L + t, 2L + t, ... (in a
// cluster, offset by the CTA's share). Sums run over the elements a lane holds, then over lanes by butterfly, then over
// warps and CTAs in a fixed order. None of it depends on addresses, so a row has the same bits at every alignment.
//
// Alignment. Memory is always accessed in aligned units (16 bytes, or less where a vector is less). A vector that
// starts off a unit is cut out of two neighbouring units with funnel shifts; on the way out, lanes pass the bytes that
// belong to a neighbour's unit by shuffle, and only the ends of a warp's stretch are written in parts. The unit in
// which a row ends is read and written in parts, too, so nothing past the end of a tensor is touched.
#pragma once

#include <cmath>

#include "rows_launch.cuh"
#include "rows_ptx.cuh"
#include "rows_team.cuh"
#include "rows_vectors.cuh"

namespace ampkernels::cuda {

// 2^t, at most 2 units in the last place of fp32 off. kFlush: subnormal results become 0, two instructions less.
template <bool kFlush>
__device__ __forceinline__ float exp2_fp32(float t) {
  float e;
  if constexpr (kFlush)
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
  else
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(t));
  return e;
}

// e^(d + rest), d <= 0, rest what d's own rounding left. That rounding and the one of d * log2(e) would each cost |d|
// 2^-24 of the result; both are taken back to first order.
__device__ __forceinline__ float exp_of(float d, float rest = 0) {
  const float t = d * 1.44269504f;
  const float lost = fmaf(d, 1.92596299e-8f, fmaf(rest, 1.44269504f, fmaf(d, 1.44269504f, -t)));
  const float e = exp2_fp32<false>(t);
  return d < -110.0f ? e : fmaf(e * lost, 0.693147181f, e);  // past the range: e is 0, and `lost` may be inf
}
__device__ __forceinline__ double exp_of(double d, double rest = 0) {
  const double e = exp(d);
  return d < -800.0 ? e : fma(e, rest, e);
}

// e^(s - max) over a row. Results of 16 bits take one fma: 2^(s log2(e) - max log2(e)), where the rounding of max
// log2(e) is common to the row and cancels in the quotient; a max so large that this rounding is no small factor takes
// one more step.
template <typename C>
struct RowExp {
  C max, offset;
  bool huge;
  __device__ __forceinline__ explicit RowExp(C largest) : max(largest), offset(-largest * C(1.44269504)) {
    huge = fabs(largest) > C(65536) && fabs(largest) < C(INFINITY);
  }
  __device__ __forceinline__ C precise(C s) const {
    const C d = s - max, back = d - s;  // d + rest = s - max, exactly
    return exp_of(d, (s - (d - back)) - (max + back));
  }
  __device__ __forceinline__ C coarse(C s) const { return exp2_fp32<true>(fmaf(s, 1.44269504f, offset)); }
  __device__ __forceinline__ C coarse_huge(C s) const { return exp2_fp32<true>((s - max) * 1.44269504f); }
};

// Replaces the scores of a row by their exponentials.
template <int K, int V>
__device__ __forceinline__ void exponentials(const RowExp<float>& row, bool precise, float (&s)[K][V]) {
  if (precise) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = row.precise(s[k][e]);
  } else if (row.huge) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = row.coarse_huge(s[k][e]);
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int e = 0; e < V; ++e) s[k][e] = row.coarse(s[k][e]);
  }
}

// The sum (maximum) of V values as a tree: shorter chains, smaller error.
template <int V, typename C, typename Op>
__device__ __forceinline__ C tree(const C (&v)[V], Op op) {
  C t[V];
#pragma unroll
  for (int e = 0; e < V; ++e) t[e] = v[e];
#pragma unroll
  for (int width = V / 2; width > 0; width /= 2)
#pragma unroll
    for (int e = 0; e < width; ++e) t[e] = op(t[e], t[e + width]);
  return t[0];
}

}  // namespace ampkernels::cuda
