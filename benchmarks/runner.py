"""Runs points: for each one inputs, every provider's error against float64, their times side by side, and rows."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import errors
from benchmarks.ops import OPS, RESIDUAL, Op, Tensors, place, shape_name
from benchmarks.providers import Implementation, Provider, Unsupported
from benchmarks.records import Row
from benchmarks.roofs import Roof, Roofs
from benchmarks.timing import Budget, Calls, Timing, make_timer, ratio

# Most float64 work (floating-point operations) that one oracle may cost before it is taken over a subset of rows.
_ORACLE_LIMIT = {"cuda": 2e13, "cpu": 2e10}
_MAX_SETS = {"cuda": 256, "cpu": 64}


@dataclass(frozen=True)
class Point:
    """One place to measure: every provider computes this.

    Attributes:
        layout: Of the first input: one of `ops.LAYOUTS`.
        residual: Norms: of x + residual; linear: plus a residual.
    """

    suite: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    direction: str
    layout: str = "contiguous"
    residual: bool = False

    def __str__(self) -> str:
        return f"{self.op} {shape_name(self.shape)} {dtype_name(self.dtype)} {self.direction}"

    @property
    def operation(self) -> Op:
        return (RESIDUAL if self.residual else OPS)[self.op]

    @property
    def setting(self) -> str:
        return self.operation.setting + ("" if self.layout == "contiguous" else f", {self.layout}")


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def describe(error: BaseException) -> str:
    """An exception on one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def failure(row: Row, error: BaseException) -> Row:
    """The row of something that threw. What a provider says it does not offer is skipped; the rest are errors."""
    if is_out_of_memory(error):
        row.status, row.reason = "oom", "out of memory"
    elif isinstance(error, (Unsupported, NotImplementedError)):
        row.status, row.reason = "skipped", str(error)
    else:
        row.status, row.reason = "error", describe(error)
    return row


def release(device: torch.device) -> None:
    """Give back what a finished point held: graphs keep private pools until they are collected."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class _Candidate:
    row: Row
    implementation: Implementation


class OpRunner:
    """Measures operation points on one device.

    Args:
        device: Where to run.
        providers: Who takes part, in the order of the table.
        accumulates: Our accumulation policies to measure in GEMMs.
        budget: How long to measure.
        roofs: The measured roofs, shared by all points of the run.
    """

    def __init__(
        self,
        device: torch.device,
        providers: Sequence[Provider],
        accumulates: Sequence[str],
        budget: Budget,
        roofs: Roofs,
    ) -> None:
        self.device = device
        self.providers = providers
        self.accumulates = accumulates
        self.timer = make_timer(device, budget)
        self.roofs = roofs
        self._told: set[tuple[str, str, str]] = set()
        self._threw: dict[tuple[str, ...], list[str]] = {}  # what, at which shapes

    def run(self, point: Point) -> list[Row]:
        """Rows of one point, never raising but for KeyboardInterrupt."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peers; what matters of them is in the rows
                return self._run(point)
        except Exception as error:
            return [failure(self._row(point, ""), error)]
        finally:
            release(self.device)

    def compile(self, point: Point) -> None:
        """Runs every provider once, to fill the compilers' caches on disk; measures nothing."""
        op = point.operation
        inputs = op.inputs(point.shape, point.dtype, self.device, seed=0)
        for candidate in self._candidates(point, op)[0]:
            try:
                call = _bind(candidate.implementation, [inputs], point.direction)[0]
                call()
            except Exception:  # the measuring run will meet it again, and say so
                continue
        release(self.device)

    def _row(self, point: Point, provider: str, accumulate: str = "") -> Row:
        return Row(
            suite=point.suite,
            op=point.op,
            shape=shape_name(point.shape),
            dtype=dtype_name(point.dtype),
            accumulate=accumulate,
            direction=point.direction,
            provider=provider,
            setting=point.setting,
        )

    def _run(self, point: Point) -> list[Row]:
        op = point.operation
        candidates, rows = self._candidates(point, op)
        if not candidates:
            return rows
        inputs = op.inputs(point.shape, point.dtype, self.device, seed=0)
        check = _Check(op, point, inputs, self.device)
        runnable = [c for c in candidates if self._check(c, check)]
        rows = [c.row for c in candidates if c.row.status != "skipped" or self._is_news(c.row)] + rows
        del check
        if not runnable:
            return rows

        sets = self._input_sets(op, point, inputs)
        calls: dict[str, Calls] = {}
        for index, candidate in enumerate(runnable):
            try:
                calls[str(index)] = _bind(candidate.implementation, sets, point.direction)
            except Exception as error:
                failure(candidate.row, error)
        results = self.timer.run(calls)
        timed: list[tuple[_Candidate, Timing]] = []
        for index, candidate in enumerate(runnable):
            result = results.get(str(index))
            if isinstance(result, Timing):
                timed.append((candidate, result))
            elif result is not None:
                failure(candidate.row, result)
        roof_kind, least_seconds, roof = self._roof(op, point)
        self._fill(op, point, timed, roof_kind, least_seconds, roof)
        self._rank(timed)
        return rows

    def _candidates(self, point: Point, op: Op) -> tuple[list[_Candidate], list[Row]]:
        """Who takes part, and a row for everybody who does not (one per provider and operation, not per point)."""
        candidates, absent = [], []
        for provider in self.providers:
            row = self._row(point, provider.name)
            reason = provider.missing(self.device)
            try:
                if reason is not None:
                    raise Unsupported(reason)
                offered = provider.implementations(op, point.dtype, point.direction, self.accumulates, self.device)
                for implementation in offered:
                    name = " ".join(filter(None, (provider.name, implementation.variant)))
                    own = replace(row, provider=name, accumulate=implementation.accumulate)
                    candidates.append(_Candidate(own, implementation))
            except Unsupported as error:
                if self._is_news(failure(row, error)):
                    absent.append(row)
            except Exception as error:  # its import failed, say
                absent.append(failure(row, error))
        return candidates, absent

    def _is_news(self, row: Row) -> bool:
        """Whether this reason to skip has not been told yet: one row for it is enough."""
        key = (row.provider, row.accumulate, row.reason)
        new = key not in self._told
        self._told.add(key)
        return new

    def _check(self, candidate: _Candidate, check: _Check) -> bool:
        """Error and peak memory of one candidate; False if it threw."""
        row, implementation = candidate.row, candidate.implementation
        row.reason = implementation.note
        # What threw at two shapes of an operation is not tried at all the others: some throw only after compiling.
        kind = (row.op, row.dtype, row.direction, row.provider, row.accumulate)
        threw = self._threw.setdefault(kind, [])
        if len(threw) >= 2:
            row.status, row.reason = "error", f"not tried: threw at two shapes before this one: {threw[-1]}"
            return False
        try:
            results, peak = check.results(implementation)
            row.peak_mib = peak
            if implementation.partial:
                row.status = "partial"
                return True
            error = check.error(results)
            row.rel_l2, row.max_ulp, row.shrink = error.rel_l2, error.max_ulp, error.shrink
            row.error_over = check.scope
            limit = check.bound(implementation.accumulate)
            if error.exceeds(limit):
                row.status = "wrong"
                found = f"relative L2 {error.rel_l2:.2g}, worst element {error.worst_element:.2g}"
                row.reason = f"error above the bound {limit:.2g}: {found}"
            return True
        except Exception as error:
            failure(row, error)
            if row.status == "oom":
                release(self.device)
            elif row.status == "error":
                threw.append(row.reason)
            return False

    def _input_sets(self, op: Op, point: Point, inputs: Tensors) -> list[Tensors]:
        """As many sets of inputs as it takes to overflow the last-level cache, three times over on CUDA."""
        size = op.bytes(point.shape, point.dtype, point.direction)
        count = max(2, math.ceil(cache_bytes(self.device) / max(size, 1)))
        if count > _MAX_SETS[self.device.type]:  # too small to leave the cache by any sensible number of sets
            count = 8
        others = (op.inputs(point.shape, point.dtype, self.device, seed) for seed in range(1, count))
        return [(place(first, point.layout), *rest) for first, *rest in (inputs, *others)]

    def _roof(self, op: Op, point: Point) -> tuple[str, float, Roof]:
        """The roof that bounds this point, and the least time it allows."""
        size = op.bytes(point.shape, point.dtype, point.direction)
        if not op.is_gemm:
            copy = self.roofs.memory("copy")
            return "copy", size / copy.rate, copy
        read, gemm = self.roofs.memory("read"), self.roofs.gemm(point.dtype)
        by_memory, by_compute = size / read.rate, op.work(point.shape, point.direction) / gemm.rate
        return ("read", by_memory, read) if by_memory > by_compute else ("gemm", by_compute, gemm)

    def _fill(
        self,
        op: Op,
        point: Point,
        timed: Sequence[tuple[_Candidate, Timing]],
        roof_kind: str,
        least_seconds: float,
        roof: Roof,
    ) -> None:
        base = next((t for c, t in timed if c.row.provider == "eager" and c.row.accumulate == "library"), None)
        work = op.work(point.shape, point.direction)
        size = op.bytes(point.shape, point.dtype, point.direction)
        warm = size * _MAX_SETS[self.device.type] < cache_bytes(self.device)
        for candidate, timing in timed:
            row = candidate.row
            row.median_us = timing.median * 1e6
            row.p20_us, row.p80_us = timing.quantile(0.2) * 1e6, timing.quantile(0.8) * 1e6
            row.call_us = timing.call_s * 1e6
            row.rounds, row.timing = len(timing.samples), timing.method
            if timing.note:
                row.reason = "; ".join(filter(None, (row.reason, timing.note)))
            if warm:
                row.reason = "; ".join(filter(None, (row.reason, "in cache")))
            by_compute = roof_kind == "gemm"
            row.rate, row.unit = (work / 1e12, "TFLOP/s") if by_compute else (size / 1e9, "GB/s")
            row.rate /= timing.median
            row.roof, row.roof_rate = roof_kind, roof.figure
            row.roof_share = least_seconds / timing.median
            if base is not None:
                row.speedup = ratio(base, timing)

    def _rank(self, timed: Sequence[tuple[_Candidate, Timing]]) -> None:
        right = sorted((c for c, _ in timed if c.row.status == "ok"), key=lambda c: c.row.median_us or math.inf)
        for rank, candidate in enumerate(right, 1):
            candidate.row.rank = rank


class _Check:
    """The float64 truth of one point, and candidates' results against it."""

    def __init__(self, op: Op, point: Point, inputs: Tensors, device: torch.device) -> None:
        self.op, self.point, self.inputs, self.device = op, point, inputs, device
        rows = point.shape[0]
        work = op.work(point.shape, point.direction)
        size = 8 * op.traffic(point.shape, point.direction) * 4  # float64, with autograd's temporaries
        room = torch.cuda.mem_get_info(device)[0] * 0.5 if device.type == "cuda" else 4e9
        share = min(1.0, _ORACLE_LIMIT[device.type] / max(work, 1), room / max(size, 1))
        self.rows: torch.Tensor | None = None
        self.scope = "all results"
        if share < 1.0:
            count = max(1, int(rows * share))
            self.rows = torch.linspace(0, rows - 1, count, device=device).round().long().unique()
            self.scope = f"{len(self.rows)} of {rows} rows" + (", input gradient" if point.direction == "bwd" else "")
        self.dy = self._dy()
        self.references = self._reference()

    def _dy(self) -> torch.Tensor | None:
        if self.point.direction == "fwd":
            return None
        with torch.no_grad():
            result = self.op.oracle(*(t[:1] if i == 0 else t for i, t in enumerate(self.inputs)))
            shape = _outputs(result)[0].shape
        return _random_dy((self.point.shape[0], *shape[1:]), self.point.dtype, self.device, seed=-1)

    def _reference(self) -> list[torch.Tensor]:
        def pick(t: torch.Tensor) -> torch.Tensor:
            return t if self.rows is None else t[self.rows]

        rows = 2 if self.op.residual else 1  # operands whose rows are those of the result
        wide = [(pick(t) if i < rows else t).detach().double() for i, t in enumerate(self.inputs)]
        if self.dy is None:
            with torch.no_grad():
                return _outputs(self.op.oracle(*wide))
        leaves = wide if self.rows is None else wide[:1]
        for leaf in leaves:
            leaf.requires_grad_()
        return list(torch.autograd.grad(self.op.oracle(*wide), leaves, pick(self.dy).double()))

    def results(self, implementation: Implementation) -> tuple[list[torch.Tensor], float | None]:
        """A fresh call's results and the MiB it allocated at its peak beyond its inputs (CUDA only)."""
        first, *rest = self.inputs
        tensors = [place(first, self.point.layout), *(t.clone() for t in rest)]
        if implementation.prepare:
            tensors = list(implementation.prepare(tuple(tensors)))
        dy = None if self.dy is None else self.dy.clone()
        cuda = self.device.type == "cuda"
        if cuda:
            self._once(implementation, tensors, dy)  # compilers and workspaces are not the call's memory
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        results = self._once(implementation, tensors, dy)
        peak = None
        if cuda:
            torch.cuda.synchronize(self.device)
            peak = (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
        if self.rows is not None:
            results = [r[self.rows] for r in (results if dy is None else results[:1])]
        return results, peak

    def _once(
        self, implementation: Implementation, tensors: Sequence[torch.Tensor], dy: torch.Tensor | None
    ) -> list[torch.Tensor]:
        if dy is None:
            with torch.no_grad():
                return _outputs(implementation.call(*tensors))
        leaves = [t.detach().requires_grad_() for t in tensors]
        return list(torch.autograd.grad(implementation.call(*leaves), leaves, dy))

    def error(self, results: Sequence[torch.Tensor]) -> errors.Error:
        return errors.compare(results, self.references)

    def bound(self, accumulate: str) -> float:
        roundings = self.op.roundings[self.point.direction == "bwd"]
        terms = self.op.terms(self.point.shape)
        if self.point.direction == "bwd":
            terms = max(terms, self.point.shape[0])
        return errors.bound(self.point.dtype, roundings, terms, accumulate)


def _outputs(result: torch.Tensor | Tensors) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _random_dy(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1_000_003 + seed)
    return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)


def _bind(implementation: Implementation, sets: Sequence[Tensors], direction: str) -> list[Callable[[], object]]:
    """One call per set of inputs. A backward's forward runs here, once; its calls replay the backward alone."""
    prepared = [implementation.prepare(s) if implementation.prepare else s for s in sets]
    if direction == "fwd":
        return [_forward(implementation.call, tensors) for tensors in prepared]
    return [_Backward(implementation.call, tensors, seed) for seed, tensors in enumerate(prepared)]


def _forward(call: Callable[..., torch.Tensor], tensors: Tensors) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call(*tensors)

    return run


class _Backward:
    """`torch.autograd.grad` of one call's output. The forward runs at the first use: on the timer's stream."""

    def __init__(self, call: Callable[..., torch.Tensor], tensors: Tensors, seed: int) -> None:
        self.call, self.leaves, self.seed = call, [t.detach().requires_grad_() for t in tensors], seed
        self.output: torch.Tensor | None = None
        self.dy: torch.Tensor | None = None

    def __call__(self) -> object:
        if self.output is None:
            self.output = self.call(*self.leaves)
            self.dy = _random_dy(self.output.shape, self.output.dtype, self.output.device, self.seed)
        return torch.autograd.grad(self.output, self.leaves, self.dy, retain_graph=True)


def cache_bytes(device: torch.device) -> int:
    """What the rotating buffers must exceed: three times the L2 on CUDA, once the last-level cache on the CPU."""
    if device.type == "cuda":
        return 3 * torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KMG")) * scale)
    return min(max(sizes, default=32 << 20), 256 << 20)
