// The lanes of a row of more than a warp, summed by way of shared memory: the order of Team's butterflies, and so its
// bits, with half the shuffles. FlatTeam takes the place of a Team; PairTeam gives each lane to two threads.
//
// A Team adds lanes 16, 8, 4, 2, 1 apart by shuffles, then warps 8, 4, 2, 1 apart by shuffles again. Here a lane's sum
// goes to shared memory, behind the one barrier that there is anyway, and every warp reads them all, a few to a thread
// and so placed that the ones that the tree adds first are neighbours: by bit-reversed lane. A thread adds its own, and
// five shuffles are left for the rest. (a + b = b + a: all threads get the same bits.)
#pragma once

#include "rows_common.cuh"

namespace ampkernels::cuda {

// A sum's lanes in shared memory: kLanes of each of the plan's warps, of which there are at most kWarps (a power of
// two). 16 lanes: those 16 apart have been added. kReaders: threads of a warp that read the sum.
template <int kLanes, int kWarps, int kReaders>
struct FlatSum {
  static constexpr int kFloats = kLanes * kWarps;
  static constexpr int kPart = kFloats / kReaders;        // lanes that a thread reads
  static constexpr int kWarpReaders = kReaders / kWarps;  // threads that read one of the plan's warps
  static_assert((kLanes == 16 || kLanes == 32) && kPart * kReaders == kFloats && kWarpReaders * kWarps == kReaders);

  // Where a lane's value is. Units of four floats: all threads' first ones, all their second ones, ...
  static __device__ __forceinline__ int place(int lane) {
    const int reversed = int(__brev(uint32_t(lane))) >> (kLanes == 32 ? 27 : 28) & (kLanes - 1);
    const int at = (lane >> 5) * kLanes + reversed;
    if constexpr (kPart <= 4) return at;
    return at % 4 + at / kPart * 4 + at % kPart / 4 * (4 * kReaders);
  }

  static __device__ __forceinline__ float total(const float* values, int plan_warps) {
    const int reader = int(threadIdx.x) & (kReaders - 1);
    float sum = part<kPart>(values, reader);
    if (kWarps > 2 && reader / kWarpReaders >= plan_warps) sum = 0;  // no such warp
#pragma unroll
    for (int o = 1; o < kWarpReaders; o *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
#pragma unroll
    for (int o = kReaders / 2; o >= kWarpReaders; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    return sum;
  }

 private:
  template <int N>
  static __device__ __forceinline__ float part(const float* values, int reader) {
    if constexpr (N == 1) {
      return values[reader];
    } else if constexpr (N == 2) {
      const float2 two = reinterpret_cast<const float2*>(values)[reader];
      return two.x + two.y;
    } else if constexpr (N == 4) {
      const float4 four = reinterpret_cast<const float4*>(values)[reader];
      return (four.x + four.y) + (four.z + four.w);
    } else {
      const float low = part<N / 2>(values, reader);
      return low + part<N / 2>(values + N / 2 * kReaders, reader);
    }
  }
};

// A CTA per row, of the plan's threads; kWarps of them, rounded up to a power of two.
template <int kWarps>
struct FlatTeam : Team<float, false, TeamKind::kCta> {
  using Base = Team<float, false, TeamKind::kCta>;
  using Base::Base;

  template <int N>
  __device__ __forceinline__ void reduce(float (&v)[N], Sum, float) {
    using Flat = FlatSum<16, kWarps, N == 2 ? 16 : 32>;
    const bool upper = threadIdx.x & 16;  // of two sums, a half of each warp goes on with one
    float half = halves(v, Sum{});
    float* const values = this->values() + (round & 1) * 2 * Flat::kFloats + (N == 2 && upper ? Flat::kFloats : 0);
    if (N == 2 || !upper) values[Flat::place(lane)] = half;
    __syncthreads();
    half = Flat::total(values, lanes >> 5);
    join(half, v);
    ++round;
  }
};
inline int flat_warps(const RowsPlan& plan) {  // FlatTeam's kWarps
  return plan.lanes <= 64 ? 2 : plan.lanes <= 128 ? 4 : 8;
}
constexpr int flat_scratch_bytes(int warps) {
  return kTeamBarrierBytes + 2 * 2 * 16 * warps * int(sizeof(float));
}

// Two threads for each lane, each with two of its four vectors: half the registers a thread, twice the warps.
//
// Layout. Of the plan's lane t the first thread of a pair has the vectors t and L + t, the second 2L + t and 3L + t. A
// row of up to 16 lanes is 2L neighbours in a warp, the first threads and then the second ones. Of more lanes, warp w
// has lanes 16w .. 16w + 15 so. kWarps: the plan's warps of a row, rounded up to a power of two; 0: up to 16 lanes.
//
// Order. A lane adds its vectors one after another, 0 + v0 + v1 + v2 + v3: the second thread hands over its two.
//
// Synchronisation. Up to 16 lanes none, else one barrier for each reduction.
template <int kWarps>
struct PairTeam {
  static constexpr int kThreads = kWarps == 0 ? 256 : kWarps == 1 ? 128 : 64 * kWarps;  // of a CTA, at most
  static constexpr int kVectors = kRowsVectorsPerThread / 2;                            // of a thread
  static constexpr bool kOneRow = kWarps > 1;                                           // of a CTA
  static_assert(kVectors == 2);

  int lanes, lane, slot;  // the plan's
  bool second;
  int round = 0;

  __device__ __forceinline__ explicit PairTeam(const TeamShape& shape) : lanes(shape.lanes) {
    const int thread = int(threadIdx.x);
    if constexpr (kWarps == 0) {  // a power of two
      slot = thread >> (32 - __clz(lanes));
      lane = thread & (lanes - 1);
      second = thread & lanes;
    } else {
      slot = kOneRow ? 0 : thread >> 6;
      lane = (kOneRow ? thread >> 5 << 4 : thread >> 1 & 16) + (thread & 15);
      second = thread & 16;
    }
  }

  // The first vector; the other is `lanes` after it.
  __device__ __forceinline__ int first() const { return (second ? 2 * lanes : 0) + lane; }

  // The row's largest value of v, which is no NaN.
  __device__ __forceinline__ float max(float v) {
    if constexpr (kWarps == 0) {
#pragma unroll 1
      for (int o = lanes; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
      return v;
    } else {
      const int l = int(threadIdx.x) & 31;
      int* const tops = reinterpret_cast<int*>(values());
      const int own = __reduce_max_sync(0xffffffffu, ordered(__float_as_int(v)));
      if (l == 0) tops[kOneRow ? int(threadIdx.x) >> 5 : int(threadIdx.x) >> 5 & 1] = own;
      sync();
      const int other = l < lanes >> 4 ? tops[l] : own;
      return __int_as_float(ordered(__reduce_max_sync(0xffffffffu, other)));
    }
  }

  // The row's sum, of which this thread's vectors have v.
  __device__ __forceinline__ float sum(const float (&v)[kVectors]) {
    const int apart = kWarps == 0 ? lanes : 16;
    const float two = 0.0f + v[0] + v[1];
    if constexpr (kWarps == 0) {  // both threads end the chain
      const float given = second ? v[0] : two;
      float sum = given + __shfl_xor_sync(0xffffffffu, given, apart);
      const float last = __shfl_xor_sync(0xffffffffu, v[1], apart);
      sum += second ? v[1] : last;
#pragma unroll 1
      for (int o = lanes >> 1; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      return sum;
    } else {
      const float third = __shfl_xor_sync(0xffffffffu, v[0], apart), last = __shfl_xor_sync(0xffffffffu, v[1], apart);
      float* const values = this->values();
      if (!second) values[Flat::place(lane)] = two + third + last;
      sync();
      return Flat::total(values, lanes >> 5);
    }
  }

 private:
  using Flat = FlatSum<32, kWarps == 0 ? 1 : kWarps, 32>;

  __device__ __forceinline__ void sync() const {
    if (kOneRow)
      __syncthreads();
    else if (slot == 0)  // constant numbers: see Team
      named_barrier(1, 64);
    else
      named_barrier(2, 64);
  }

  // From the bits of a float to an integer of the same order, and back.
  static __device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

  // Two halves for each row, in turn: a thread that still reads one result is not overtaken by the writes of the next.
  __device__ __forceinline__ float* values() {
    return reinterpret_cast<float*>(rows_shared) + (2 * slot + (round++ & 1)) * Flat::kFloats;
  }
};

// CTAs that make `threads` an SM, for __launch_bounds__. Where these kernels have no code, an SM may hold fewer
// threads.
constexpr int pair_ctas(int threads, int cta) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return 1;
#else
  return threads / cta;
#endif
}

inline bool takes_pairs(const RowsPlan& plan) {  // longer rows were no faster
  return plan.cluster == 1 && plan.lanes <= 128;
}
inline int pair_warps(const RowsPlan& plan) {  // PairTeam's kWarps
  return plan.lanes <= 16 ? 0 : plan.lanes == 32 ? 1 : plan.lanes == 64 ? 2 : 4;
}
inline TeamShape pair_shape(TeamShape shape) {
  shape.rows_per_cta = shape.lanes <= 16 ? 128 / shape.lanes : shape.lanes == 32 ? 2 : 1;
  return shape;
}
inline int pair_scratch_bytes(const TeamShape& shape, int warps) {
  return shape.rows_per_cta * 2 * 32 * warps * int(sizeof(float));
}
template <typename Kernel, typename Params>
Status launch_pair(Kernel kernel, int warps, int arch, const Params& p, const TeamShape& plan_shape,
                   cudaStream_t stream) {
  const TeamShape shape = pair_shape(plan_shape);
  return launch_rows(kernel, arch, (p.rows + shape.rows_per_cta - 1) / shape.rows_per_cta,
                     2 * shape.lanes * shape.rows_per_cta, 1, size_t(pair_scratch_bytes(shape, warps)), stream, p,
                     shape);
}
// Calls f.template operator()<kWarps>().
template <typename F>
Status with_pair_warps(const RowsPlan& plan, F&& f) {
  switch (pair_warps(plan)) {
    case 0:
      return f.template operator()<0>();
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    default:
      return f.template operator()<4>();
  }
}

}  // namespace ampkernels::cuda
