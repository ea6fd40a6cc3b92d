"""Suite `host`: what a call costs in Python and in torch's dispatch, on inputs so small that the device never limits.

Three kinds of call: `fwd` under no_grad; `fwd+graph`, a forward that records a graph; `fwd+bwd`, that and
`torch.autograd.grad` for all inputs. On CUDA the clock stops when the last call is issued, and the queue is emptied
between samples; on the CPU the tiny kernels are in the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.ops import OPS, Op, Tensors, shape_name
from benchmarks.providers import Function, Implementation, Provider, Unsupported
from benchmarks.records import Row
from benchmarks.runner import dtype_name, failure
from benchmarks.timing import Budget, Timing, ratio, rotation, without_frames

SUITE = "host"
KINDS = ("fwd", "fwd+graph", "fwd+bwd")
_SHAPES = {2: (16, 64), 3: (16, 64, 64)}  # by the number of an operation's axes
_CALLS = {"fwd": 200, "fwd+graph": 200, "fwd+bwd": 50}  # in a sample: fewer launches than CUDA's queue holds
_WARM_ROUNDS = 3


def tasks(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    directions: Sequence[str],
    providers: Sequence[Provider],
    budget: Budget,
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    for dtype in dtypes:
        for op in OPS.values():
            for kind in KINDS:
                if ("bwd" if kind == "fwd+bwd" else "fwd") in directions:
                    yield (
                        f"host {op.name} {dtype_name(dtype)} {kind}",
                        partial(_rows, op, dtype, kind, device, providers, budget),
                    )


def describe() -> list[str]:
    """Lines for --list."""
    shapes = ", ".join(f"{'x'.join('MNK'[:n])} = {shape_name(shape)}" for n, shape in _SHAPES.items())
    return [f"every operation at {shapes}: {', '.join(KINDS)}"]


def _rows(
    op: Op, dtype: torch.dtype, kind: str, device: torch.device, providers: Sequence[Provider], budget: Budget
) -> list[Row]:
    shape = _SHAPES[len(op.axes)]
    inputs = op.inputs(shape, dtype, device, seed=0)
    rows: list[Row] = []
    calls: dict[int, Callable[[], object]] = {}
    for provider in providers:
        for implementation in _implementations(provider, op, dtype, kind, device):
            name = " ".join(filter(None, (provider.name, implementation.variant)))
            row = Row(SUITE, op.name, shape_name(shape), dtype_name(dtype), implementation.accumulate, kind, name)
            row.setting, row.reason = op.setting, implementation.note
            rows.append(row)
            try:
                call = _call(implementation, inputs, kind)
                call()  # compilers and caches
                calls[len(rows) - 1] = call
            except Exception as error:
                failure(row, without_frames(error))
    _time(rows, calls, _CALLS[kind], device, budget)
    return rows


def _implementations(
    provider: Provider, op: Op, dtype: torch.dtype, kind: str, device: torch.device
) -> list[Implementation]:
    """What takes part: the whole operation, under plain fp32 where the policy is ours to choose."""
    if provider.missing(device) is not None:
        return []
    try:
        offered = list(provider.implementations(op, dtype, "fwd" if kind == "fwd" else "bwd", ("fp32",), device))
    except Unsupported:
        return []
    return [implementation for implementation in offered if not implementation.partial]


def _call(implementation: Implementation, inputs: Tensors, kind: str) -> Callable[[], object]:
    function: Function = implementation.call
    tensors = implementation.prepare(inputs) if implementation.prepare else inputs
    if kind == "fwd":

        def forward() -> Any:
            with torch.no_grad():
                return function(*tensors)

        return forward
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if kind == "fwd+graph":
        return lambda: function(*leaves)
    dy = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, dy)


def _time(
    rows: Sequence[Row], calls: dict[int, Callable[[], object]], count: int, device: torch.device, budget: Budget
) -> None:
    samples: dict[int, list[float]] = {index: [] for index in calls}
    names = [str(index) for index in calls]
    for round_index in range(-_WARM_ROUNDS, budget.min_rounds) if names else ():
        for name in rotation(names, max(round_index, 0)):
            call = calls[int(name)]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            if round_index >= 0:
                samples[int(name)].append((time.perf_counter() - start) / count)
    timings = {index: Timing(times, 0.0, "host") for index, times in samples.items()}
    base = next((t for i, t in timings.items() if rows[i].provider == "eager"), None)
    for place, index in enumerate(sorted(timings, key=lambda i: timings[i].median), 1):
        row, timing = rows[index], timings[index]
        row.median_us = row.call_us = timing.median * 1e6
        row.p20_us, row.p80_us = timing.quantile(0.2) * 1e6, timing.quantile(0.8) * 1e6
        row.rounds, row.timing, row.rank = len(timing.samples), timing.method, place
        row.speedup = None if base is None else ratio(base, timing)
