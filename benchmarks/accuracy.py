"""Suite `numerics`: the error of a plain product over K, for every policy and provider, on two kinds of data.

Normal data cancels, and its sums stay small; uniform data in [0, 1) has one sign, and its sums grow with K, which is
where an accumulator that truncates drifts. Results are compared before they are rounded to 16 bits wherever a provider
can return fp32. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import errors, oracle
from benchmarks.ops import shape_name
from benchmarks.providers import Provider, with_fp16_accumulation
from benchmarks.records import Row
from benchmarks.runner import dtype_name, failure

SUITE = "numerics"
DATA = ("normal", "uniform")
LENGTHS, QUICK_LENGTHS = (256, 1024, 4096, 16384, 65536), (1024, 16384)  # K
_M = _N = 256

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Candidate:
    provider: str
    accumulate: str
    product: Product


def tasks(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    providers: Sequence[Provider],
    accumulates: Sequence[str],
    quick: bool,
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    lengths = QUICK_LENGTHS if quick else LENGTHS
    names = {provider.name for provider in providers}
    for dtype in dtypes:
        for data in DATA:
            for k in lengths:
                title = f"numerics {data} K={k} {dtype_name(dtype)}"
                yield title, partial(_rows, device, dtype, data, k, names, accumulates)


def describe() -> list[str]:
    """Lines for --list."""
    return [f"{_M}x{_N}xK, K = {', '.join(map(str, LENGTHS))}; data: {', '.join(DATA)}"]


def _inputs(data: str, k: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(k)
    draw = torch.randn if data == "normal" else torch.rand
    x = draw(_M, k, generator=generator, device=device).to(dtype)
    return x, draw(_N, k, generator=generator, device=device).to(dtype)


def _rows(
    device: torch.device, dtype: torch.dtype, data: str, k: int, names: set[str], accumulates: Sequence[str]
) -> list[Row]:
    x, w = _inputs(data, k, dtype, device)
    reference = oracle.linear(x, w, None, None)
    rows = []
    for candidate in _candidates(device, dtype, names, accumulates):
        shape = shape_name((_M, _N, k))
        row = Row(SUITE, "product", shape, dtype_name(dtype), candidate.accumulate, "fwd", candidate.provider)
        try:
            y = candidate.product(x, w)
            row.setting = f"{data} data, {dtype_name(y.dtype)} out"
            error = errors.compare([y], [reference])
            row.rel_l2, row.max_ulp, row.shrink = error.rel_l2, error.max_ulp, error.shrink
            row.error_over = "all results"
        except Exception as error:
            failure(row, error)
            row.setting = f"{data} data"
        rows.append(row)
    return rows


def _candidates(
    device: torch.device, dtype: torch.dtype, names: set[str], accumulates: Sequence[str]
) -> Iterator[_Candidate]:
    if "eager" in names:
        if device.type == "cuda" and dtype is not torch.float32:
            yield _Candidate("eager", "library", lambda x, w: torch.mm(x, w.t(), out_dtype=torch.float32))
            yield _Candidate("eager", "fp32 product", lambda x, w: torch.mm(x.float(), w.float().t()))
        else:
            yield _Candidate("eager", "library", lambda x, w: torch.mm(x, w.t()))
        if device.type == "cuda" and dtype is torch.float16:
            yield _Candidate("eager", "fp16", with_fp16_accumulation(lambda x, w: torch.mm(x, w.t())))
    if "ampkernels" in names:
        for accumulate in accumulates:
            if not accumulate.startswith("fp16") or dtype is torch.float16:
                yield _Candidate("ampkernels", accumulate, _ours(accumulate))


def _ours(accumulate: str) -> Product:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        import ampkernels as ak

        return ak.linear(x, w, accumulate=accumulate, out_dtype=torch.float32)

    return product
