"""Do the bits change when nothing that matters has changed? For any callable or module: ours, eager's, a peer's.

Levels, in CUB's words: *not_guaranteed* (a run may differ from the last), *run_to_run* (the same inputs on the same GPU
give the same bits), *gpu_to_gpu* (on any GPU that the rule covers). `check_run_to_run` tests the second; golden digests
the third. `check_batch` tests what serving needs besides: that a row does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .error import ulp_distance

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Where two results that should have the same bits do not.

    True in a boolean sense if they do differ.

    Attributes:
        what: the variation under which they were compared.
        differing: elements whose bits differ (two NaNs count as the same), or all if the shapes or dtypes do.
        count: of elements.
        max_ulp: the largest distance, 0 if there is none.
    """

    what: str
    differing: int
    count: int
    max_ulp: int

    def __bool__(self) -> bool:
        return self.differing > 0

    def __str__(self) -> str:
        if not self:
            return f"{self.what}: same bits"
        return f"{self.what}: {self.differing} of {self.count} differ, by up to {self.max_ulp} ulp"


def compare_bits(actual: Tensor, expected: Tensor, what: str = "") -> Difference:
    """Compares bits: -0 is not +0; NaN is NaN whatever its payload."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Difference(f"{what} (shape or dtype)", max(actual.numel(), 1), actual.numel(), 0)
    actual, expected = actual.detach().contiguous(), expected.detach().contiguous()
    integer = _INTEGERS[actual.element_size()]
    differ = actual.view(integer) != expected.view(integer)
    if actual.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
    count = int(differ.sum())
    ulps = 0
    if count and actual.is_floating_point() and actual.element_size() > 1:
        ulps = int(ulp_distance(actual[differ], expected[differ]).max())
    return Difference(what, count, actual.numel(), ulps)


def _tensors(result: Any) -> list[Tensor]:
    """All tensors of a result: a tensor, a sequence or a mapping of them, nested."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        return [t for value in result.values() for t in _tensors(value)]
    if isinstance(result, (list, tuple)):
        return [t for value in result for t in _tensors(value)]
    return []


def _compare(actual: Any, expected: Any, what: str) -> Difference:
    pairs = list(zip(_tensors(actual), _tensors(expected), strict=True))
    found = [compare_bits(a, e, what) for a, e in pairs]
    return Difference(
        what,
        sum(d.differing for d in found),
        sum(d.count for d in found),
        max((d.max_ulp for d in found), default=0),
    )


def check_run_to_run(function: Callable[..., Any], *args: Any, runs: int = 10, **kwargs: Any) -> list[Difference]:
    """Calls `function` `runs` times and compares each result with the first. Returns what differs: [] is good.

    On CUDA, other work of various sizes runs between the calls, so that blocks do not always finish in the same order.
    A function of random numbers (dropout) must seed them itself.
    """
    device = next((t.device for t in _tensors([list(args), kwargs]) if t.is_cuda), None)
    first: Any = None
    found = []
    for run in range(runs):
        if device is not None and run:
            torch.ones(1 << (14 + run % 8), device=device).mul_(2)
        result = function(*args, **kwargs)
        if run == 0:
            first = [t.detach().clone() for t in _tensors(result)]
        else:
            found.append(_compare(result, first, f"run {run + 1} against the first"))
    return [d for d in found if d]


def check_batch(
    function: Callable[[Tensor], Any], input: Tensor, *, sizes: Iterable[int] = (1, 2, 3, 7, 16, 33, 64, 100)
) -> list[Difference]:
    """Calls `function` on parts of the batch and compares with the same rows of the whole. [] is good.

    `function` maps (batch, ...) to tensors of the same batch; `input` is the whole batch. Parts begin at the start, in
    the middle and at the end, and one is every second row.
    """
    whole = _tensors(function(input))
    batch = input.shape[0]
    parts = []
    for size in sizes:
        if size <= batch:
            parts += [slice(begin, begin + size) for begin in sorted({0, (batch - size) // 2, batch - size})]
    parts.append(slice(0, batch, 2))
    found = []
    for part in parts:
        what = f"rows {part.start}:{part.stop}" + (f":{part.step}" if part.step else "") + f" of {batch}"
        found.append(_compare(function(input[part]), [t[part] for t in whole], what))
    return [d for d in found if d]


def check_layout(function: Callable[[Tensor], Any], input: Tensor) -> list[Difference]:
    """Calls `function` on the same values at other strides, offsets and alignments. [] is good."""
    expected = [t.detach().clone() for t in _tensors(function(input))]

    def placed(shape: tuple[int, ...], where: tuple[slice, ...]) -> Tensor:
        buffer = torch.zeros(shape, dtype=input.dtype, device=input.device)
        buffer[where] = input
        return buffer[where]

    everything = (slice(None),) * (input.dim() - 1)
    rows, columns = tuple(input.shape[:-1]), input.shape[-1]
    offset = torch.zeros(input.numel() + 1, dtype=input.dtype, device=input.device)[1:].view(input.shape)
    variants = {
        "one element of offset": offset.copy_(input),
        "rows with a gap": placed((*rows, columns + 3), (*everything, slice(0, columns))),
        "every second column of a wider tensor": placed((*rows, 2 * columns), (*everything, slice(0, None, 2))),
    }
    if input.dim() >= 2:
        variants["transposed strides"] = input.transpose(0, -1).contiguous().transpose(0, -1)
    found = [_compare(function(variant), expected, what) for what, variant in variants.items()]
    return [d for d in found if d]
