// Division of work items by a number that the host knows: a multiplication and a shift.
#pragma once

#include <cstdint>

#include "ampkernels/types.h"

namespace ampkernels {

struct Divisor {
  uint32_t value = 1, magic = 0, shift = 0;

  Divisor() = default;
  // For 0 <= n < 2^31: n / value == (n * magic) >> (32 + shift), with magic = ceil(2^(32 + shift) / value).
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while ((uint64_t(1) << (shift + 1)) < value) ++shift;
    magic = value == 1 ? 0 : uint32_t(((uint64_t(1) << (32 + shift)) + value - 1) / value);
  }
  AK_HOST_DEVICE int32_t quotient(int32_t n) const {
    return value == 1 ? n : int32_t((uint64_t(uint32_t(n)) * magic) >> 32 >> shift);
  }
};

}  // namespace ampkernels
