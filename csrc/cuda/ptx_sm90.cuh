// The Hopper instructions that the GEMM is made of, one function each: mbarriers, bulk tensor copies, warpgroup MMA.
// Everything here is sm_90a only.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ampkernels/convert.h"

namespace ampkernels::cuda::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// One lane of a converged warp, always the same one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// ------------------------------------------------------------------------------------------------------------ barriers

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the other CTA of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives on the barrier at the same offset in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Waits for the end of the phase of parity `parity`.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// The same where the phase counts writes of other CTAs of the cluster (store_async_cluster).
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address at which this CTA's shared memory `smem` lies in that of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t smem, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem), "r"(rank));
  return remote;
}

// 16 bytes into another CTA's shared memory, counted on a barrier there. Both addresses by cluster_address.
__device__ __forceinline__ void store_async_cluster(uint32_t remote, float a, float b, float c, float d,
                                                    uint32_t remote_bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(remote_bar)
      : "memory");
}

// ---------------------------------------------------------------------------------------------------------- bulk
// copies

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t c0,
                                            int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem),
      "l"(map), "r"(bar), "r"(c0), "r"(c1)
      : "memory");
}

// What is read once: L2 may drop it first.
__device__ __forceinline__ void tma_load_2d_once(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t c0,
                                                 int32_t c1) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "l"(kEvictFirst)
      : "memory");
}

// Brings a box into L2. A hint: it orders nothing, and what is written there later is what a later load reads.
__device__ __forceinline__ void tma_prefetch_2d(const CUtensorMap* map, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}

// The same box into the same offset of every CTA named in `mask`, counted on each one's own barrier.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t bar, int32_t c0,
                                                      int32_t c1, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, uint32_t smem, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(smem),
               "r"(c0), "r"(c1)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the newest kPending groups of stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Ordinary writes to shared memory before it are seen by the copy engine after it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t smem, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared_pair(uint32_t smem, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_shared_quad(uint32_t smem, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ float4 load_shared_quad(uint32_t smem) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem) : "memory");
  return v;
}

// ------------------------------------------------------------------------------------------------------- warpgroup MMA

template <int kRegisters>
__device__ __forceinline__ void register_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void register_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of an accumulator across the asynchronous MMAs.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void fence_registers(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// A shared-memory operand in the 128-byte swizzle. K-major: rows of 64 k (128 bytes), groups of 8 rows 1024 bytes
// apart; 16 k further is 32 bytes further. MN-major: rows of 64 m or n (128 bytes), one per k, groups of 8 k 1024 bytes
// apart, blocks of 64 m or n 8192 bytes apart; 16 k further is 2048 bytes further.
template <bool kMnMajor>
__device__ __forceinline__ constexpr uint64_t wgmma_descriptor(uint32_t smem) {
  constexpr uint64_t kLeading = kMnMajor ? 8192 : 16, kStride = 1024, kSwizzle128 = 1;
  return uint64_t((smem & 0x3ffff) >> 4) | ((kLeading >> 4) << 16) | ((kStride >> 4) << 32) | (kSwizzle128 << 62);
}
template <bool kMnMajor>
inline constexpr uint64_t kWgmmaDescriptorStepK16 = (kMnMajor ? 2048 : 32) >> 4;

#define AK_S16(b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15)                           \
  "%" #b0 ",%" #b1 ",%" #b2 ",%" #b3 ",%" #b4 ",%" #b5 ",%" #b6 ",%" #b7 ",%" #b8 ",%" #b9 ",%" #b10 ",%" #b11 \
  ",%" #b12 ",%" #b13 ",%" #b14 ",%" #b15
#define AK_LIST16 AK_S16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define AK_LIST32 AK_LIST16 "," AK_S16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
#define AK_LIST48 AK_LIST32 "," AK_S16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47)
#define AK_LIST56 AK_LIST48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define AK_LIST64 AK_LIST48 "," AK_S16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)
#define AK_LIST80 AK_LIST64 "," AK_S16(64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79)
#define AK_LIST96 AK_LIST80 "," AK_S16(80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95)
#define AK_LIST112 AK_LIST96 "," AK_S16(96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111)
#define AK_LIST128 AK_LIST112 "," AK_S16(112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122, 123, 124, 125, 126, 127)

#define AK_D4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define AK_D16(c, d, i) AK_D4(c, d, i), AK_D4(c, d, i + 4), AK_D4(c, d, i + 8), AK_D4(c, d, i + 12)
#define AK_D32(c, d) AK_D16(c, d, 0), AK_D16(c, d, 16)
#define AK_D48(c, d) AK_D32(c, d), AK_D16(c, d, 32)
#define AK_D56(c, d) AK_D48(c, d), AK_D4(c, d, 48), AK_D4(c, d, 52)
#define AK_D64(c, d) AK_D48(c, d), AK_D16(c, d, 48)
#define AK_D96(c, d) AK_D64(c, d), AK_D16(c, d, 64), AK_D16(c, d, 80)
#define AK_D128(c, d) AK_D96(c, d), AK_D16(c, d, 96), AK_D16(c, d, 112)

#define AK_WGMMA(N, TYPES, LIST, A, B, SCALE, TA, TB, ...)                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #SCALE                                                         \
               ", 0;\n"                                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" LIST "}, %" #A ", %" #B ", p, 1, 1, %" #TA \
               ", %" #TB ";\n}"                                                                                    \
               : __VA_ARGS__                                                                                       \
               : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(int(kMnMajorA)), "n"(int(kMnMajorB)))

// d = a * b + (scale_d ? d : 0) over m64 nN k16, both operands from shared memory. fp32 accumulators.
template <typename T, int kN, bool kMnMajorA, bool kMnMajorB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t desc_a, uint64_t desc_b, uint32_t scale_d) {
  static_assert(kN == 32 || kN == 64 || kN == 112 || kN == 128 || kN == 192 || kN == 256);
#define AK_WGMMA_F32(TYPES)                                                      \
  if constexpr (kN == 32) {                                                      \
    AK_WGMMA(32, TYPES, AK_LIST16, 16, 17, 18, 19, 20, AK_D16("+f", d, 0));      \
  } else if constexpr (kN == 64) {                                               \
    AK_WGMMA(64, TYPES, AK_LIST32, 32, 33, 34, 35, 36, AK_D32("+f", d));         \
  } else if constexpr (kN == 112) {                                              \
    AK_WGMMA(112, TYPES, AK_LIST56, 56, 57, 58, 59, 60, AK_D56("+f", d));        \
  } else if constexpr (kN == 128) {                                              \
    AK_WGMMA(128, TYPES, AK_LIST64, 64, 65, 66, 67, 68, AK_D64("+f", d));        \
  } else if constexpr (kN == 192) {                                              \
    AK_WGMMA(192, TYPES, AK_LIST96, 96, 97, 98, 99, 100, AK_D96("+f", d));       \
  } else {                                                                       \
    AK_WGMMA(256, TYPES, AK_LIST128, 128, 129, 130, 131, 132, AK_D128("+f", d)); \
  }
  if constexpr (dtype_of<T>::value == DType::kBFloat16) {
    AK_WGMMA_F32("f32.bf16.bf16")
  } else {
    AK_WGMMA_F32("f32.f16.f16")
  }
#undef AK_WGMMA_F32
}

// The same with fp16 accumulators, two to a register; fp16 operands only.
template <int kN, bool kMnMajorA, bool kMnMajorB>
__device__ __forceinline__ void wgmma_half(uint32_t (&d)[kN / 4], uint64_t desc_a, uint64_t desc_b, uint32_t scale_d) {
  static_assert(kN == 128 || kN == 192 || kN == 256);
  if constexpr (kN == 128) {
    AK_WGMMA(128, "f16.f16.f16", AK_LIST32, 32, 33, 34, 35, 36, AK_D32("+r", d));
  } else if constexpr (kN == 192) {
    AK_WGMMA(192, "f16.f16.f16", AK_LIST48, 48, 49, 50, 51, 52, AK_D48("+r", d));
  } else {
    AK_WGMMA(256, "f16.f16.f16", AK_LIST64, 64, 65, 66, 67, 68, AK_D64("+r", d));
  }
}

#undef AK_WGMMA

}  // namespace ampkernels::cuda::ptx
