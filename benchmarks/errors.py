"""Error of a result against float64, and the bound beyond which a provider counts as wrong.

Every figure compares with the float64 oracle of the *same rounded inputs*, so it holds the provider's own error and
nothing else:

- relative L2: ||y - ref|| / ||ref||;
- max ulp: the largest distance between y and ref rounded to y's dtype, counted in representable numbers. Where a sum
  cancels, the exact result is tiny and the count is large whatever the kernel: it is telling for rows, not for GEMMs;
- total shrink: 1 - sum|y| / sum|ref|. Truncating accumulators pull sums toward zero, and this is where it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_INTEGER = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_INTEGER[torch.float64] = torch.int64
_BLOCK = 1 << 25  # elements compared at once: bounds the float64 temporaries


@dataclass(frozen=True)
class Error:
    """The worst over all results of a call (a backward returns several), and the element-wise worst."""

    rel_l2: float
    max_ulp: float
    shrink: float
    worst_element: float  # max |y - ref| / (|ref| + rms(ref))

    def exceeds(self, bound: float) -> bool:
        """True if the result is wrong: NaN compares as wrong. One bad element among millions counts too."""
        return not (self.rel_l2 <= bound and self.worst_element <= 16 * bound)


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def bound(dtype: torch.dtype, roundings: int, terms: int, accumulate: str) -> float:
    """What the relative L2 error may be before a result counts as wrong.

    `roundings` results rounded to `dtype` on the way, each off by one unit round-off at most, and a sum of `terms`
    products in tensor-core steps of 16, whose errors add up as a random walk. Four times that: the bound is there to
    find wrong kernels (a wrong activation, a missed tile, a dropped bias are all far above it), not to rank good ones.
    """
    name, _, chunk = accumulate.partition("/")
    step = unit_roundoff(torch.float16) if name == "fp16" else 2.0**-22  # a truncating fp32 step, or an fp16 one
    if dtype in (torch.float32, torch.float64):
        step = max(step, unit_roundoff(dtype)) if dtype is torch.float32 else unit_roundoff(dtype)
    steps = math.ceil((int(chunk) if chunk else max(terms, 1)) / 16)
    return 4 * (roundings * unit_roundoff(dtype) + math.sqrt(steps) * step)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns as integers in the order of the numbers: neighbours differ by one, -0 and +0 coincide."""
    bits = values.contiguous().view(_INTEGER[values.dtype]).to(torch.int64)
    lowest = torch.iinfo(_INTEGER[values.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _compare_one(result: torch.Tensor, reference: torch.Tensor) -> Error:
    if result.shape != reference.shape:
        raise ValueError(f"the result has shape {tuple(result.shape)}, the float64 oracle {tuple(reference.shape)}")
    flat, exact = result.reshape(-1), reference.reshape(-1)
    if flat.numel() == 0:
        return Error(0.0, 0.0, 0.0, 0.0)
    squares = difference = magnitude = exact_magnitude = 0.0
    ulp = worst = 0.0
    rms = math.sqrt(float(exact.square().mean()))
    for begin in range(0, flat.numel(), _BLOCK):
        y, ref = flat[begin : begin + _BLOCK], exact[begin : begin + _BLOCK]
        wide = y.double()
        delta = wide - ref
        difference += float(delta.square().sum())
        squares += float(ref.square().sum())
        magnitude += float(wide.abs().sum())
        exact_magnitude += float(ref.abs().sum())
        worst = _largest(worst, float((delta.abs() / (ref.abs() + rms).clamp_min(1e-300)).max()))
        distance = (_ordered(y) - _ordered(ref.to(y.dtype))).abs().max()
        ulp = _largest(ulp, float(distance) if bool(wide.isfinite().all()) else math.nan)
    rel = math.sqrt(difference / squares) if squares > 0 else math.sqrt(difference)
    shrink = 1.0 - magnitude / exact_magnitude if exact_magnitude > 0 else 0.0
    return Error(rel, ulp, shrink, worst)


def _largest(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def compare(results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> Error:
    """The error of a call's results: of each the relative L2, ulp and shrink, and of those the worst."""
    if len(results) != len(references):
        raise ValueError(f"the call gave {len(results)} results, the float64 oracle {len(references)}")
    total = Error(0.0, 0.0, 0.0, 0.0)
    for result, reference in zip(results, references, strict=True):
        one = _compare_one(result.detach(), reference)
        shrink = one.shrink if not abs(one.shrink) <= abs(total.shrink) else total.shrink
        total = Error(
            _largest(total.rel_l2, one.rel_l2),
            _largest(total.max_ulp, one.max_ulp),
            shrink,
            _largest(total.worst_element, one.worst_element),
        )
    return total
