"""Test data from integers alone: the same bits on every machine, device and version of torch.

Element i of a tensor with seed s is a function of h = mix(i + 0x9e3779b9 * (s + 1)), where mix is a 32-bit
xor-shift-multiply hash. Values are at most 24 bits long, so that they are exact in fp32, and are rounded once to the
dtype, to nearest even. No random number generator of any library is involved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("normal", "uniform", "wide", "subnormal", "special")
_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of the 32-bit integers (in int64; the products wrap, their low 32 bits are right)."""
    x = (x ^ (x >> 16)) & _MASK
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def generate(kind: str, shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """A CPU tensor of `kind`.

    - "normal": the sum of four uniform 16-bit integers, centred, times 2^-15: standard deviation 1.15;
    - "uniform": in [0, 1), 24 bits: sums of products all have one sign;
    - "wide": normal times 2^-8 .. 2^8;
    - "subnormal": normal times 2^-20 (fp16) or 2^-130 (bf16): mostly subnormal;
    - "special": normal with one infinity of each sign and one NaN in 512 on average, and one zero in 8.
    """
    if kind not in KINDS:
        raise ValueError(f"generate: kind must be one of {KINDS}, got {kind!r}")
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    h = _mix((i + 0x9E3779B9 * (seed + 1)) & _MASK)
    if kind == "uniform":
        x = (h >> 8).float() * 2.0**-24
    else:
        g = _mix(h ^ 0x85EBCA6B)
        x = ((h & 0xFFFF) + (h >> 16) + (g & 0xFFFF) + (g >> 16) - 131070).float() * 2.0**-15
        more = _mix(g ^ 0xC2B2AE35)
        if kind == "wide":
            x = torch.ldexp(x, (more % 17 - 8).int())
        elif kind == "subnormal":
            x = x * 2.0 ** (-130 if dtype == torch.bfloat16 else -20)
        elif kind == "special":
            for remainder, value in ((0, math.inf), (1, -math.inf), (2, math.nan)):
                x = x.masked_fill(more % 512 == remainder, value)
            x = x.masked_fill(more % 8 == 7, 0.0)
    return x.to(dtype).reshape(tuple(shape))
