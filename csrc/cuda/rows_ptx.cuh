// The PTX that the row kernels use beside ptx.cuh's: barriers, clusters, bulk copies, aligned loads and stores. Empty
// where an architecture has no such thing: the plan never asks for it there.
#pragma once

#include <cuda_runtime.h>

#include "ampkernels/convert.h"
#include "cuda/ptx.cuh"

namespace ampkernels::cuda {

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
#else
  return 0;
#endif
}
// Index of the CTA, or of its cluster.
__device__ __forceinline__ int64_t row_group_index(int cluster) {
  uint32_t id;
#if __CUDA_ARCH__ >= 900
  if (cluster > 1)
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  else
#endif
    asm("mov.u32 %0, %%ctaid.x;" : "=r"(id));
  return id;
}
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals = 1) {  // per phase
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier)),
      "r"(arrivals)
      : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}
// For what this CTA's own copies have written. An acquire at cluster scope throws away L1 (CCTL.IVALL), parameters and
// spilled registers with it, so this one is at CTA scope.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}
// For what other CTAs of the cluster have written (store_remote_shared).
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n}" ::
          "r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}
// Arrives when this thread's cp.asyncs have: one of the arrivals that mbarrier_init was told.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// What this thread has seen in shared memory comes before the bulk copies that it starts from here on.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// `bytes` (a multiple of 16) into shared memory, counted on `barrier`.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
// The address that `local` has in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t remote_shared_address(uint32_t local, int rank) {
  uint32_t remote = local;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
#endif
  return remote;
}
// Writes `value` to the address `local` has in CTA `rank` of the cluster, and counts its bytes on that CTA's `barrier`:
// no fence, where a release on the cluster barrier would wait for every global store in flight.
template <typename C>
__device__ __forceinline__ void store_remote_shared(C* local, uint64_t* barrier, int rank, C value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t to = remote_shared_address(shared_address(local), rank);
  const uint32_t remote_barrier = remote_shared_address(shared_address(barrier), rank);
  if constexpr (sizeof(C) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(bit_cast<uint32_t>(value)), "r"(remote_barrier)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
                 "l"(bit_cast<uint64_t>(value)), "r"(remote_barrier)
                 : "memory");
#endif
}

// store_remote_shared of fp32 to remote_shared_address's: one value, or three in a message of 16 bytes.
template <int N>
__device__ __forceinline__ void send_remote_shared(uint32_t to, uint32_t barrier, const float (&v)[N]) {
  static_assert(N == 1 || N == 3);
#if __CUDA_ARCH__ >= 900
  if constexpr (N == 1)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v[0]),
                 "r"(barrier)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %3}, [%4];" ::"r"(to),
                 "f"(v[0]), "f"(v[1]), "f"(v[2]), "r"(barrier)
                 : "memory");
#endif
}
// One word, two or four.
template <typename W, int N>
__device__ __forceinline__ void load_shared(uint32_t from, W (&w)[N]) {
  static_assert(sizeof(W) == 4 && (N == 1 || N == 2 || N == 4));
  uint32_t v[N];
  if constexpr (N == 1)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[0]) : "r"(from));
  else if constexpr (N == 2)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from));
  else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from));
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = bit_cast<W>(v[i]);
}

// An aligned unit of U bytes. Plain loads: with L1::no_allocate, or with .cs, the same kernels take 3 to 9 % longer
// on an H200 (docs/rows.md).
template <int U>
__device__ __forceinline__ void load_unit(uint32_t* w, const char* p) {
  if constexpr (U == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
  } else if constexpr (U == 8) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
  } else {
    static_assert(U == 4);
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
  }
}
template <int U>
__device__ __forceinline__ void store_unit(char* p, const uint32_t* w) {
  if constexpr (U == 16)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  else if constexpr (U == 8)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
  else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory");
}

}  // namespace ampkernels::cuda
