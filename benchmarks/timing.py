"""How a call is timed.

Candidates that are to be compared are timed together: after a warm-up that keeps the device busy for half a second,
they take turns, one sample each per round, the order rotating from round to round. Samples of one round saw the same
clocks and the same temperature, so ratios are taken round by round and only then summarised.

CUDA: a sample is one replay of a CUDA graph that holds many calls over rotating buffer sets, with an event on each
side; replays queue up behind one another, so launch latency stays out of the number. A call that cannot be captured
(it synchronises, say) is timed by events around plain calls, and its row says so. The time of a call as Python sees it,
launches included, is a second figure.

CPU: a sample is a wall-clock reading around a loop of calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

# One entry per buffer set: entry i computes on set i. Timers walk through them in order, again and again.
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Budget:
    """How long to measure. Seconds, and counts of rounds."""

    warmup_s: float = 0.5
    min_rounds: int = 11
    max_rounds: int = 100
    cuda_point_s: float = 0.25  # all candidates of one point together, on CUDA
    cpu_candidate_s: float = 0.3  # each candidate, on the CPU
    cpu_point_s: float = 30.0  # all candidates of one point together at most, on the CPU (three rounds at least)
    call_loop_s: float = 0.005  # one loop of the Python call time
    call_loops: int = 5

    @classmethod
    def quick(cls) -> Budget:
        return cls(min_rounds=15, cuda_point_s=0.15, call_loop_s=0.003, call_loops=3)


@dataclass
class Timing:
    """Seconds per call: `samples[r]` belongs to round r, in which every candidate of the run took a turn."""

    samples: list[float]
    call_s: float
    method: str  # "graph", "events", "wall" or "host"
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, max(0, round(q * (len(ordered) - 1))))]


def ratio(base: Timing, other: Timing) -> float:
    """How many times as fast `other` is as `base`: the median over rounds of the ratios within a round."""
    return statistics.median(b / o for b, o in zip(base.samples, other.samples, strict=True))


def without_frames(error: Exception) -> Exception:
    """The exception without its traceback, whose frames would keep tensors alive while others are measured."""
    return error.with_traceback(None)


def rotation(names: Sequence[str], round_index: int) -> list[str]:
    """The order of round `round_index`: each candidate follows each other one equally often, more or less."""
    shift = round_index % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if (round_index // len(names)) % 2 == 0 else order[::-1]


def make_timer(device: torch.device, budget: Budget, capture: bool = True) -> CudaTimer | WallTimer:
    """The timer of a device; `capture=False` times plain calls by events (whole models: an optimizer step, say)."""
    return CudaTimer(device, budget, capture) if device.type == "cuda" else WallTimer(budget)


class WallTimer:
    """Wall clock around loops of calls, for the CPU."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def run(self, candidates: Mapping[str, Calls]) -> dict[str, Timing | Exception]:
        results: dict[str, Timing | Exception] = {}
        loops: dict[str, _Loop] = {}
        for name, calls in candidates.items():
            try:
                loop = _Loop(calls)
                loop.issue(len(calls))  # compilers and caches; and forwards of backwards, once for every set
                loops[name] = loop
            except Exception as error:
                results[name] = without_frames(error)
        if not loops:
            return results

        warm_until = time.perf_counter() + self.budget.warmup_s
        seconds = dict.fromkeys(loops, math.inf)
        while True:
            for name, loop in loops.items():
                seconds[name] = min(seconds[name], loop.timed(1))
            if time.perf_counter() >= warm_until:
                break
        # A sample long enough for the clock and the scheduler; then enough rounds for the slowest to have its share.
        counts = {name: max(1, math.ceil(2e-3 / max(s, 1e-9))) for name, s in seconds.items()}
        shortest = min(counts[name] * max(seconds[name], 1e-9) for name in loops)
        rounds = max(self.budget.min_rounds, math.ceil(self.budget.cpu_candidate_s / shortest))
        rounds = min(rounds, max(self.budget.max_rounds, self.budget.min_rounds))
        round_s = sum(counts[name] * seconds[name] for name in loops)
        rounds = min(rounds, max(3, math.ceil(self.budget.cpu_point_s / max(round_s, 1e-9))))

        samples: dict[str, list[float]] = {name: [] for name in loops}
        names = list(loops)
        for index in range(rounds):
            for name in rotation(names, index):
                samples[name].append(loops[name].timed(counts[name]) / counts[name])
        for name in names:
            results[name] = Timing(samples[name], statistics.median(samples[name]), "wall")
        return results


@dataclass
class _Loop:
    """Calls over the buffer sets, continuing where the last loop stopped."""

    calls: Calls
    position: int = 0

    def issue(self, count: int) -> None:
        for _ in range(count):
            self.calls[self.position]()
            self.position = (self.position + 1) % len(self.calls)

    def timed(self, count: int) -> float:
        start = time.perf_counter()
        self.issue(count)
        return time.perf_counter() - start


@dataclass
class _Prepared:
    """What one CUDA sample launches, and how many calls that is."""

    launch: Callable[[], None]
    calls_per_launch: int
    method: str
    loop: _Loop
    note: str = ""
    keep: list[object] = field(default_factory=list)


class CudaTimer:
    """CUDA-graph replays between events, all on one side stream."""

    SAMPLE_S = 5e-4  # a replay is at least this long, so that the gap around it is below half a per cent
    MAX_CALLS = 512  # in one graph

    def __init__(self, device: torch.device, budget: Budget, capture: bool = True) -> None:
        self.device = device
        self.budget = budget
        self.capture = capture
        self.stream = torch.cuda.Stream(device)

    def run(self, candidates: Mapping[str, Calls]) -> dict[str, Timing | Exception]:
        results: dict[str, Timing | Exception] = {}
        prepared: dict[str, _Prepared] = {}
        torch.cuda.synchronize(self.device)  # inputs were made on another stream
        with torch.cuda.stream(self.stream):
            for name, calls in candidates.items():
                try:
                    prepared[name] = self._prepare(calls)
                except Exception as error:
                    results[name] = without_frames(error)
            if prepared:
                results.update(self._measure(prepared))
            torch.cuda.synchronize(self.device)
        return results

    def _measure(self, prepared: dict[str, _Prepared]) -> dict[str, Timing]:
        names = list(prepared)
        # Warm up with the very work that is measured: a GPU under power limits settles only under its own load.
        warm_until = time.perf_counter() + self.budget.warmup_s
        warm_rounds, round_s = 0, 0.0
        while True:
            start = time.perf_counter()
            for name in names:
                prepared[name].launch()
            torch.cuda.synchronize(self.device)
            round_s = time.perf_counter() - start
            warm_rounds += 1
            if time.perf_counter() >= warm_until and warm_rounds >= 2:
                break
        rounds = math.ceil(self.budget.cuda_point_s / max(round_s, 1e-6))
        rounds = min(max(rounds, self.budget.min_rounds), self.budget.max_rounds)

        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
        for index in range(rounds):
            for name in rotation(names, index):
                start_event = torch.cuda.Event(enable_timing=True)
                end_event = torch.cuda.Event(enable_timing=True)
                start_event.record()
                prepared[name].launch()
                end_event.record()
                events[name].append((start_event, end_event))
        torch.cuda.synchronize(self.device)

        call_s = self._call_times(prepared)
        timings = {}
        for name in names:
            item = prepared[name]
            samples = [s.elapsed_time(e) * 1e-3 / item.calls_per_launch for s, e in events[name]]
            timings[name] = Timing(samples, call_s[name], item.method, item.note)
        return timings

    def _call_times(self, prepared: dict[str, _Prepared]) -> dict[str, float]:
        """Wall-clock seconds per call issued from Python one after another: the larger of host and device time."""
        loops: dict[str, list[float]] = {name: [] for name in prepared}
        counts = {}
        for name, item in prepared.items():
            item.loop.timed(2)
            torch.cuda.synchronize(self.device)
            once = self._synchronised(item.loop, 3) / 3
            counts[name] = min(500, math.ceil(self.budget.call_loop_s / max(once, 1e-7)))
        for index in range(self.budget.call_loops):
            for name in rotation(list(prepared), index):
                loops[name].append(self._synchronised(prepared[name].loop, counts[name]) / counts[name])
        return {name: statistics.median(values) for name, values in loops.items()}

    def _synchronised(self, loop: _Loop, count: int) -> float:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        loop.issue(count)
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _prepare(self, calls: Calls) -> _Prepared:
        loop = _Loop(calls)
        loop.issue(max(len(calls), 4))  # compilers, handles, workspaces; and forwards of backwards, once for every set
        torch.cuda.synchronize(self.device)
        note = ""
        if self.capture:
            try:
                return self._capture(loop)
            except Exception as error:
                torch.cuda.synchronize(self.device)
                reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
                note = f"not captured ({reason}); events around calls"
        seconds = self._synchronised(loop, 3) / 3
        count = min(self.MAX_CALLS, max(len(calls), math.ceil(self.SAMPLE_S / max(seconds, 1e-7))))
        return _Prepared(lambda: loop.issue(count), count, "events", loop, note)

    def _capture(self, loop: _Loop) -> _Prepared:
        count = len(loop.calls)  # each set once; more only if a replay would be shorter than SAMPLE_S
        while True:
            graph = torch.cuda.CUDAGraph()
            # Outputs of the last len(calls) calls stay alive while capturing, so outputs rotate like the inputs do.
            alive: deque[object] = deque(maxlen=len(loop.calls))
            with torch.cuda.graph(graph, stream=self.stream):
                for index in range(count):
                    alive.append(loop.calls[index % len(loop.calls)]())
            alive.clear()
            graph.replay()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(self.device)
            seconds = start.elapsed_time(end) * 1e-3
            if seconds >= self.SAMPLE_S or count >= self.MAX_CALLS:
                return _Prepared(graph.replay, count, "graph", loop, keep=[graph])
            wanted = math.ceil(count * 1.2 * self.SAMPLE_S / max(seconds, 1e-6))
            count = min(self.MAX_CALLS, max(wanted, 2 * count))
