// One instance of the Hopper GEMM: its tile, its summation chain, its shared memory and its registers.
#pragma once

#include "ampkernels/convert.h"
#include "ampkernels/params.h"
#include "cuda/gemm_sm90_launch.h"

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
  static constexpr bool kActGrad = kKind == EpilogueKind::kActGrad;
  static constexpr bool kResidual = kKind == EpilogueKind::kResidual;
  static constexpr bool kReads = kActGrad || kResidual;  // a matrix beside the bias

  static constexpr int kRowsPerGroup = kPingpong ? kBlockM : kBlockM / kConsumers;
  static constexpr int kFragments = kRowsPerGroup / 64;  // m64 fragments of a warpgroup
  static constexpr int kAccumulators = kBlockN / 2;      // per thread and fragment
  static constexpr int kOutN = kGated ? kBlockN / 2 : kBlockN;

  // The epilogue goes by panels, each one fence, one barrier and one store per 64 rows, and in a panel by strips, as
  // wide as the registers beside the accumulators can hold. kLean: few are left beside these and a chunk's fragment, so
  // that nothing can be kept through the products.
  static constexpr bool kLarge = kFragments * kAccumulators > 128;
  static constexpr bool kLean = kLarge || kChain != Chain::kFp32;
  static constexpr int kPanel =
      kOutN % 64 != 0 || kChain != Chain::kFp32 || kReads || (kGated && kFragments == 1) ? 32 : 64;
  static constexpr int kWidest = kReads ? 16 : kGated ? (kLean ? 16 : 32) : (kLarge || kMnMajorB ? 32 : 64);
  static constexpr int kStrip = kWidest < kPanel ? kWidest : kPanel;
  static constexpr int kPanels = kOutN / kPanel;
  static constexpr int kStripsAcross = kPanel / kStrip;  // a panel, one fragment's rows
  static constexpr int kStripsPerPanel = kFragments * kStripsAcross;
  // Panels per warpgroup. kReads: two of the matrix that is read, which a result takes the place of, and two of the
  // other result.
  static constexpr int kBuffers = kReads ? 4 : kGated || kPanel == 32 ? 3 : 2;
  static constexpr int kFragmentBytes = 64 * kPanel * 2;
  static constexpr int kBufferBytes = kFragments * kFragmentBytes;
  // Cooperative warpgroups take turns of kTurnBlocks at the tensor cores, so that they do not finish together and one's
  // promotion or epilogue runs under the other's products.
  static constexpr bool kTurns = !kPingpong && kTurns_;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

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
  static constexpr int kOffsetRead = kOffsetOrder + kConsumers * 8;
  static constexpr int kSmemBytes = kOffsetRead + (kReads ? kConsumers * 2 * 8 : 0);

  static_assert(kStages >= 3 && kSmemBytes <= kMaxSmem);
  static_assert(kBlockM % 64 == 0 && kBlockN % 64 == 0 && kOutN % kPanel == 0);
  static_assert(kChain == Chain::kFp32 || kFragments == 1, "the chunk's fragment has no registers beside two of them");
};

// The registers of one warpgroup's fragments.
template <class C>
struct Accumulators {
  float sum[C::kFragments][C::kAccumulators];
};

}  // namespace ampkernels::cuda::sm90
