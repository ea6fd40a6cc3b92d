"""What the two parts of the demo share: the terminal, timing, peak memory, and how a gain is put into words."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed._tools.mem_tracker import MemTracker

console = Console()
console.width = max(console.width, 110)  # a narrower table would break its words


@dataclass(frozen=True)
class Outcome:
    """What a part of the demo adds to the last line."""

    sentence: str


def progress() -> Progress:
    """A progress bar with counts and the time gone by; a line per task where the output is no terminal."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def synchronize(device: torch.device) -> None:
    """Waits for the device's work; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call's tensors hold at once, beyond what was held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with MemTracker() as tracker:
        function()
    return int(sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()))


def median(values: list[float]) -> float:
    """The middle of the values."""
    return statistics.median(values)


def gain(before: float, after: float) -> str:
    """The change of a time in words, a gain or not: "1.24x faster", "no faster (0.98x)"."""
    ratio = before / after
    return (
        f"{ratio:.2f}x faster"
        if ratio >= 1.03
        else f"no faster ({ratio:.2f}x)"
        if ratio >= 0.97
        else f"slower ({ratio:.2f}x)"
    )


def mib(n: int) -> str:
    """Bytes as MiB."""
    return f"{n / 2**20:.1f} MiB"
