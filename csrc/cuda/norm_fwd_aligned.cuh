// norm forward of 16-bit rows that lie on 16 bytes. Layout, synchronisation and rounding points are norm_fwd.cu's.
#pragma once

#include "norm_fwd_row.cuh"

namespace ampkernels::cuda {
namespace {

// The same, from the start, for the rare row that norm_fwd_aligned cannot finish: out of line, so that it costs no
// registers elsewhere.
template <typename T, bool kRms>
__device__ __noinline__ void resident_row_again(const NormFwdParams& p, Team<compute_t<T>> team, double inverse,
                                                int64_t r) {
  resident_row<T, kRms>(p, team, inverse, r);
}

// Vector j of parameters of the row's own dtype, on 16 bytes, as stored.
template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load_own_parameters(const VectorIn& w, uint32_t j, bool exists) {
  Pack<T, V> pack;
#pragma unroll
  for (int i = 0; i < Pack<T, V>::kWords; ++i) pack.w[i] = 0;
  if (exists) load_unit<16>(pack.w, static_cast<const char*>(w.data) + j * 16u);
  return pack;
}

// 16-bit rows of whole vectors with parameters of their own dtype, all on 16 bytes. Against norm_fwd_plain, the loads
// of the parameters have no branch between them, and few instructions are left beside the arithmetic: layer_norm is
// bound by issue as much as by memory. The same operations in the same order as resident_row, so the same bits.
//
// In a CTA or a warp the row is held in fp32, which saves widening it again, and two CTAs of 512 threads fill an SM. In
// a cluster, whose exchanges take longer than that, it stays as it was stored, 16 registers instead of 32, and there is
// room for a third. kWhole: every lane has all its vectors.
template <typename T, bool kRms, bool kResidual, bool kWhole, TeamKind kTeam>
__global__ void __launch_bounds__(kRowsCtaThreads, kResidual || kTeam != TeamKind::kCluster ? 2 : 3)
    norm_fwd_aligned(const __grid_constant__ NormFwdParams p, const __grid_constant__ TeamShape shape) {
  using C = float;
  constexpr int V = kVector<T>, K = kRowsVectorsPerThread;
  constexpr bool kHeld = kResidual || kTeam != TeamKind::kCluster;
  grid_launch_dependents();
  grid_dependency_wait();

  Team<C, false, kTeam> team(shape);
  const int64_t r = row_group_index(kTeam == TeamKind::kCluster ? shape.cluster : 1) * shape.rows_per_cta + team.slot;
  const bool active = kTeam != TeamKind::kWarp || r < p.rows;  // else a CTA, or a cluster, for each row
  const int64_t row = active ? r : 0;
  const int limit = active ? int(p.cols) / V : 0, first = team.first(K), step = team.lanes;  // in vectors
  const auto exists = [&](int k) { return kWhole || first + k * step < limit; };

  Vectors<T, V, K> x;
  const auto load = [&]<typename D>(const RowsIn& m, Vectors<D, V, K>& v) {
    constexpr int kBytes = Pack<D, V>::kBytes, U = Pack<D, V>::kUnit;
    const char* const at = aligned_row(m, row, sizeof(D));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if constexpr (!kWhole)
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) v.pack[k].w[i] = 0;
      if (exists(k))
#pragma unroll
        for (int u = 0; u < kBytes / U; ++u)
          load_unit<U>(v.pack[k].w + u * (U / 4), at + uint32_t(first + k * step) * uint32_t(kBytes) + u * U);
    }
  };
  load(p.x, x);
  C held[kHeld ? K : 1][V];
  if constexpr (kResidual) {
    const auto add = [&]<typename D>() {
      Vectors<D, V, K> residual;
      load(p.residual, residual);
      char* const sum = aligned_row(p.sum, row, sizeof(D));
#pragma unroll
      for (int k = 0; k < K; ++k) {
        C a[V];
        x.get(k, a);
        residual.get(k, held[k]);
#pragma unroll
        for (int e = 0; e < V; ++e) held[k][e] += a[e];
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        Pack<D, V> out;
        constexpr int kBytes = Pack<D, V>::kBytes, U = Pack<D, V>::kUnit;
        out.round_from(held[k]);
        if (exists(k) && active)
#pragma unroll
          for (int u = 0; u < kBytes / U; ++u)
            store_unit<U>(sum + uint32_t(first + k * step) * uint32_t(kBytes) + u * U, out.w + u * (U / 4));
      }
    };
    if (p.residual.dtype == dtype_of<T>::value)
      add.template operator()<T>();
    else
      add.template operator()<Paired<T>>();
  } else if constexpr (kHeld) {
#pragma unroll
    for (int k = 0; k < K; ++k) x.get(k, held[k]);
  }
  const auto get = [&](int k, C(&s)[V]) {
    if constexpr (kHeld)
      copy(held[k], s);
    else
      x.get(k, s);
  };

  const C inverse = C(shape.inverse);
  C mean = 0;
  if constexpr (!kRms) {
    C sum[1] = {0};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C s[V];
      get(k, s);
      sum[0] += tree(s, Sum{});
    }
    team.reduce(sum, Sum{}, C(0));
    mean = sum[0] * inverse;
    if constexpr (!kHeld) x.forget(shape.zero);
  }
  C sums[kRms ? 1 : 2] = {0};  // of the squares, of the deviations
#pragma unroll
  for (int k = 0; k < K; ++k) {
    C d[V], squares = 0;
    get(k, d);
    const C center = exists(k) ? mean : C(0);  // what does not exist has no deviation
#pragma unroll
    for (int e = 0; e < V; ++e) {
      if constexpr (!kRms) d[e] -= center;
      squares = fma(d[e], d[e], squares);
    }
    sums[0] += squares;
    if constexpr (!kRms) sums[1] += tree(d, Sum{});
    if constexpr (kHeld && !kRms) copy(d, held[k]);
  }
  team.reduce(sums, Sum{}, C(0));
  if (__any_sync(0xffffffffu, overflowed(sums[0]))) {
    Team<C> any(team);
    resident_row_again<T, kRms>(p, any, shape.inverse, r);
    return;
  }
  const Statistics<C> stats = finish<kRms>(p, inverse, mean, sums[kRms ? 0 : 1], sums[0], C(1));
  if (active && team.lane == 0 && team.rank == 0) save_statistics(p, stats, row);

  if constexpr (!kHeld) x.forget(shape.zero);
  const C offset = kRms ? C(p.weight_offset) : C(0);
  char* const y = aligned_row(p.y, row, sizeof(T));
  constexpr int kTogether = kHeld ? 2 : 1;  // vectors whose parameters are loaded at once
#pragma unroll
  for (int k0 = 0; k0 < K; k0 += kTogether) {
    Pack<T, V> w[kTogether], b[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int k = k0 + i;
      w[i] = load_own_parameters<T, V>(p.weight, first + k * step, exists(k));
      if constexpr (!kRms) b[i] = load_own_parameters<T, V>(p.bias, first + k * step, exists(k));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int k = k0 + i;
      C h[V];
      get(k, h);
      if constexpr (!kRms && !kHeld)
#pragma unroll
        for (int e = 0; e < V; ++e) h[e] -= mean;
      stats.normalize(h, h);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const C weight = to_compute<C>(w[i].element(e));
        if constexpr (kRms)
          h[e] *= weight + offset;
        else
          h[e] = h[e] * weight + to_compute<C>(b[i].element(e));
      }
      Pack<T, V> out;
      out.round_from(h);
      constexpr int kBytes = Pack<T, V>::kBytes, U = Pack<T, V>::kUnit;
      if (exists(k) && active)
#pragma unroll
        for (int u = 0; u < kBytes / U; ++u)
          store_unit<U>(y + uint32_t(first + k * step) * uint32_t(kBytes) + u * U, out.w + u * (U / 4));
    }
  }
}

}  // namespace
}  // namespace ampkernels::cuda
