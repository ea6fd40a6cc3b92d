"""The dtypes: what they hold, and where this package uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """One floating-point format.

    Attributes:
        name: torch's name of it; `dtype` is None where torch has none.
        exponent_bits, fraction_bits: without the sign and the implicit one.
        largest, smallest_normal, smallest_subnormal: positive values.
        unit_roundoff: the largest relative error of one rounding to nearest, 2^-(fraction_bits + 1).
        use: where it occurs here.
    """

    name: str
    dtype: torch.dtype | None
    exponent_bits: int
    fraction_bits: int
    largest: float
    use: str

    @property
    def smallest_normal(self) -> float:
        return float(2.0 ** (2 - 2 ** (self.exponent_bits - 1)))

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * 2.0**-self.fraction_bits

    @property
    def unit_roundoff(self) -> float:
        return float(2.0 ** -(self.fraction_bits + 1))

    @property
    def largest_integer(self) -> int:
        """All integers up to this one are held exactly: 2048 + 1 is 2048 in fp16."""
        return int(2 ** (self.fraction_bits + 1))


DTYPES: tuple[DType, ...] = (
    DType(
        "float16",
        torch.float16,
        5,
        10,
        65504.0,
        'inputs, outputs, saved activations; accumulators under "fp16" and "fp16/<chunk>"',
    ),
    DType("bfloat16", torch.bfloat16, 8, 7, (2 - 2.0**-7) * 2.0**127, "inputs, outputs, saved activations; never adds"),
    DType(
        "float32",
        torch.float32,
        8,
        23,
        (2 - 2.0**-23) * 2.0**127,
        "accumulators, epilogues, statistics, column sums; inputs and outputs of rows, and of GEMMs through ATen",
    ),
    DType("float64", torch.float64, 11, 52, (2 - 2.0**-52) * 2.0**1023, "fp64 inputs, and the oracle of every test"),
    DType("float8_e4m3fn", torch.float8_e4m3fn, 4, 3, 448.0, "not used: for comparison"),
    DType("tf32", None, 8, 10, (2 - 2.0**-10) * 2.0**127, "not used: what cuBLAS may round fp32 inputs to"),
)
