"""The roofs of this device, measured in the run that uses them: no datasheet figure appears anywhere.

Memory: a copy, a read (the faster of a sum and a matrix-vector product) and two reads to one write, each over buffers
far larger than any cache. Arithmetic: a square product by the library, sustained after half a second under load; the
first milliseconds of a cold card are faster than anything it can keep up. All are timed with events (CUDA) or a wall
clock (CPU) around plain calls: a captured copy becomes a memcpy node, which runs on other hardware, and slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Roof:
    kind: str  # "copy", "read", "read2write1", "gemm"
    dtype: torch.dtype
    rate: float  # bytes per second, or floating-point operations per second
    what: str  # the call that reached it
    seconds: float  # of that call

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.kind == "gemm" else "GB/s"

    @property
    def figure(self) -> float:
        return self.rate / (1e12 if self.kind == "gemm" else 1e9)


class Roofs:
    """Measures each roof the first time it is asked for, and keeps it for the run."""

    def __init__(self, device: torch.device, quick: bool = False) -> None:
        self.device = device
        self.quick = quick
        self.measured: dict[tuple[str, torch.dtype], Roof] = {}
        self.fresh: list[Roof] = []  # measured since the caller last looked

    def memory(self, kind: str) -> Roof:
        return self._get(kind, torch.float32)

    def gemm(self, dtype: torch.dtype) -> Roof:
        return self._get("gemm", dtype)

    def _get(self, kind: str, dtype: torch.dtype) -> Roof:
        key = (kind, dtype)
        if key not in self.measured:
            roof = self._measure_gemm(dtype) if kind == "gemm" else self._measure_memory(kind)
            self.measured[key] = roof
            self.fresh.append(roof)
        return self.measured[key]

    def take_fresh(self) -> list[Roof]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def _buffer_bytes(self) -> int:
        if self.device.type == "cuda":
            return min(2 << 30, torch.cuda.get_device_properties(self.device).total_memory // 16)
        return 512 << 20

    def _measure_memory(self, kind: str) -> Roof:
        size = self._buffer_bytes()
        a = torch.randn(size // 64, device=self.device).repeat(16)  # drawing all of it takes a CPU seconds
        b = torch.empty_like(a).copy_(a)
        if kind == "copy":
            return self._best(kind, torch.float32, [("Tensor.copy_", 2 * size, lambda: b.copy_(a))])
        if kind == "read":
            matrix, vector = a.view(-1, 4096), torch.randn(4096, device=self.device)
            calls: list[tuple[str, int, Callable[[], object]]] = [
                ("Tensor.sum", size, a.sum),
                ("torch.mv", size, lambda: torch.mv(matrix, vector)),
            ]
            return self._best(kind, torch.float32, calls)
        out = torch.empty_like(a)
        return self._best(kind, torch.float32, [("torch.add", 3 * size, lambda: torch.add(a, b, out=out))])

    def _measure_gemm(self, dtype: torch.dtype) -> Roof:
        cuda = self.device.type == "cuda"
        n = 8192 if cuda and dtype.itemsize == 2 else 4096 if cuda else 2048
        x = torch.randn(n, n, device=self.device).to(dtype)
        w = torch.randn(n, n, device=self.device).to(dtype)
        out = torch.empty(n, n, device=self.device, dtype=dtype)
        return self._best("gemm", dtype, [(f"torch.mm {n}x{n}x{n}", 2 * n**3, lambda: torch.mm(x, w.t(), out=out))])

    def _best(self, kind: str, dtype: torch.dtype, calls: list[tuple[str, int, Callable[[], object]]]) -> Roof:
        roofs = []
        for what, work, call in calls:
            seconds = self._sustained(call)
            roofs.append(Roof(kind, dtype, work / seconds, what, seconds))
        return max(roofs, key=lambda roof: roof.rate)

    def _sustained(self, call: Callable[[], object]) -> float:
        """Median seconds of a call, after half a second of the same."""
        rounds = 10 if self.quick else 20
        call()
        if self.device.type != "cuda":
            times: list[float] = []
            begin = time.perf_counter()
            while len(times) < rounds or time.perf_counter() - begin < 0.5:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return statistics.median(times[len(times) // 2 :])
        torch.cuda.synchronize(self.device)
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            for _ in range(5):
                call()
            torch.cuda.synchronize(self.device)
        pairs = []
        for _ in range(rounds):
            start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start_event.record()
            call()
            end_event.record()
            pairs.append((start_event, end_event))
        torch.cuda.synchronize(self.device)
        return float(statistics.median(s.elapsed_time(e) * 1e-3 for s, e in pairs))
