"""How far a result is from an exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _steps(x: Tensor) -> Tensor:
    """The place of each value among all values of its dtype, 0 at zero: neighbours differ by 1, -0 and +0 by none."""
    bits = x.contiguous().view(_INTEGERS[x.element_size()]).to(torch.int64)
    magnitude = bits & ((1 << (8 * x.element_size() - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """How many values of the dtype lie between the two, elementwise (int64).

    Both must have the same floating-point dtype and shape. NaN against NaN is 0, against a number the largest int64;
    infinity is the value after the largest one. In fp64, values of opposite signs can be further apart than int64
    counts; they come out as its largest too.

    Raises:
        ValueError: the dtypes or shapes differ, or the dtype is not fp16, bf16, fp32 or fp64.
    """
    if actual.dtype != expected.dtype or not actual.is_floating_point() or actual.element_size() == 1:
        raise ValueError(
            f"ulp_distance: actual and expected must share a floating-point dtype of 16 bits or more, got "
            f"{actual.dtype} and {expected.dtype}"
        )
    if actual.shape != expected.shape:
        raise ValueError(
            f"ulp_distance: actual must have shape {tuple(expected.shape)} as expected has, got {tuple(actual.shape)}"
        )
    a, b = _steps(actual.detach()), _steps(expected.detach())
    largest = torch.iinfo(torch.int64).max
    distance = (a - b).abs()
    distance = torch.where(distance < 0, largest, distance)  # the difference overflowed
    if actual.dtype == torch.float64:
        distance = torch.where(((a < 0) != (b < 0)) & (a.abs() > largest - b.abs()), largest, distance)
    one, both = actual.isnan() | expected.isnan(), actual.isnan() & expected.isnan()
    return torch.where(both, 0, torch.where(one, largest, distance))


@dataclass(frozen=True)
class ErrorReport:
    """An error against float64, seen from several sides. `str()` prints it.

    Attributes:
        relative_l2: ||actual - expected|| / ||expected||.
        max_abs: the largest |actual - expected|.
        max_ulp: the largest distance in units of the actual's dtype from the expected value rounded to that dtype.
        shrink: sum(|expected| - |actual|) / sum |expected|: what is lost toward zero over all, where unbiased errors
            cancel. A truncating accumulator has a positive one.
        correctly_rounded: the fraction of elements at 0 ulp.
        histogram: counts at 0, 1, 2, 3-4, 5-8, 9-16, ... ulp, by the upper end of each bin.
        non_finite: elements where exactly one of the two is finite, or that differ and are not.
        count: of elements.
    """

    relative_l2: float
    max_abs: float
    max_ulp: int
    shrink: float
    correctly_rounded: float
    histogram: dict[int, int]
    non_finite: int
    count: int

    def __str__(self) -> str:
        lines = [
            f"relative L2 {self.relative_l2:.2e}, max |error| {self.max_abs:.2e}, max {self.max_ulp} ulp, "
            f"shrink {self.shrink:+.2e}, {self.correctly_rounded:.1%} correctly rounded of {self.count}"
        ]
        if self.non_finite:
            lines.append(f"{self.non_finite} elements are not finite where the exact result is, or the reverse")
        most = max(self.histogram.values(), default=0)
        for upper, count in self.histogram.items():
            lines.append(f"  <= {upper:>6} ulp {count:>9}  {'#' * math.ceil(40 * count / most)}")
        return "\n".join(lines)


def error_report(actual: Tensor, expected: Tensor) -> ErrorReport:
    """Compares a result with the exact one.

    Args:
        actual: fp16, bf16, fp32 or fp64.
        expected: the exact result in float64, of the same shape.

    Elements that are not finite in either are counted in `non_finite` (unless they agree) and left out of the rest.
    """
    if expected.dtype != torch.float64:
        raise ValueError(f"error_report: expected must be float64, got {expected.dtype}")
    actual, expected = actual.detach(), expected.detach().to(actual.device)
    rounded = expected.to(actual.dtype)
    distance = ulp_distance(actual, rounded)
    finite = actual.isfinite() & rounded.isfinite()
    wrong = int((~finite & (distance != 0)).sum())
    a, e, ulps = actual[finite].double(), expected[finite], distance[finite]
    error = a - e

    histogram: dict[int, int] = {}
    if ulps.numel():
        # 0, 1, 2, then the powers of two: the bin of d is the bit length of d - 1.
        bins = torch.where(
            ulps == 0, -1, (ulps - 1).clamp_min(0).double().add(0.5).log2().floor().add(1).long().clamp_min(0)
        )
        for i in range(-1, int(bins.max()) + 1):
            histogram[0 if i < 0 else 2**i] = int((bins == i).sum())

    def ratio(x: Tensor, y: Tensor) -> float:
        return float(x / y) if float(y) != 0 else (0.0 if float(x) == 0 else math.inf)

    return ErrorReport(
        relative_l2=ratio(torch.linalg.vector_norm(error), torch.linalg.vector_norm(e)),
        max_abs=float(error.abs().max()) if error.numel() else 0.0,
        max_ulp=int(ulps.max()) if ulps.numel() else 0,
        shrink=ratio((e.abs() - a.abs()).sum(), e.abs().sum()),
        correctly_rounded=float((ulps == 0).double().mean()) if ulps.numel() else 1.0,
        histogram=histogram,
        non_finite=wrong,
        count=actual.numel(),
    )
