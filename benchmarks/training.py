"""Suite `train`: one small MLP trained in fp32, TF32, fp16 with a GradScaler and bf16, eager and fused.

Every run starts from the same weights and sees the same data, so losses can be compared. Eager and fused take turns, step
by step, after half a second of warm-up; the peak of memory is that of the warm-up, when each is alone. The suite ends
with the dtype it recommends for this device, and why.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.records import Row
from benchmarks.runner import failure, release
from benchmarks.timing import Timing, ratio, rotation, without_frames

SUITE = "train"
MODES = ("fp32", "tf32", "fp16", "bf16")
PROVIDERS = ("eager", "ampkernels")
WARM_UP_S = 0.25  # each of two, one after the other: half a second under load
SCALER = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 20}
LOSS_MARGIN = 1.05  # a mode whose last loss exceeds fp32's by more has lost something


@dataclass(frozen=True)
class Task:
    """What is trained."""

    layers: int
    width: int
    batch: int
    steps: int
    lr: float = 1e-4
    seed: int = 0

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Task:
        if device.type == "cuda":
            return cls(8, 4096, 4096, 10 if quick else 80)
        return cls(4, 256, 256, 10 if quick else 80, lr=1e-3)


@dataclass
class Result:
    """One training run, with everything that it takes to do it again."""

    mode: str
    provider: str
    task: Task
    device: str
    tf32: bool
    autocast: str | None
    scaler: dict[str, float] | None
    losses: list[float] = field(default_factory=list)
    scales: list[tuple[int, float]] = field(default_factory=list)  # (step, scale) where it changed
    skipped_steps: int = 0
    nonfinite_losses: int = 0
    nonfinite_gradients: int = 0  # steps whose gradients held an inf or a NaN
    samples_per_s: float = 0.0
    peak_mib: float | None = None
    fused: str = ""
    step_s: list[float] = field(default_factory=list)

    @property
    def last_loss(self) -> float:
        return self.losses[-1] if self.losses else math.nan

    @property
    def conditions(self) -> str:
        """What it takes to do this run again, beside the task."""
        parts = [
            f"autocast {self.autocast}" if self.autocast else "no autocast",
            f"TF32 {'on' if self.tf32 else 'off'}",
        ]
        parts += ["GradScaler(" + ", ".join(f"{k}={v:g}" for k, v in self.scaler.items()) + ")"] if self.scaler else []
        return ", ".join(parts)

    @property
    def timing(self) -> Timing:
        return Timing(self.step_s, statistics.median(self.step_s), "wall")


def tasks(
    device: torch.device, out: Path, providers: Sequence[str], quick: bool, console: Console
) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """One task per mode, and a last one that sums up.

    Raises:
        ValueError: None of the providers trains.
    """
    chosen = [name for name in PROVIDERS if name in providers]
    if not chosen:
        raise ValueError(f"train: none of the providers {', '.join(providers)}; valid: {', '.join(PROVIDERS)}")
    task = Task.of(device, quick)
    results: list[Result] = []
    for mode in MODES:
        yield f"train {mode}", partial(_rows, task, device, mode, chosen, results)
    yield "train summary", partial(_summary, results, device, out, console)


def describe() -> list[str]:
    """Lines for --list."""
    task = Task.of(torch.device("cuda"), quick=False)
    return [f"{task}, in {', '.join(MODES)}; on a CPU {Task.of(torch.device('cpu'), quick=False)}"]


def _rows(
    task: Task, device: torch.device, mode: str, providers: Sequence[str], results: list[Result]
) -> Iterator[Row]:
    def blank(provider: str) -> Row:
        return Row(SUITE, "train-mlp", f"{task.layers}x{task.width}x{task.batch}", mode, "", "step", provider)

    if mode == "tf32" and device.type == "cpu":
        row = blank("")
        row.status, row.reason = "skipped", "a CPU has no TF32"
        yield row
        return
    outcomes = train(task, device, mode, providers)
    base = outcomes.get("eager")
    for provider, result in outcomes.items():
        row = blank(provider)
        if isinstance(result, Exception):
            yield failure(row, result)
            continue
        results.append(result)
        row.setting = f"layers x width x batch, {task.steps} steps, AdamW, {result.conditions}"
        row.rate, row.unit, row.peak_mib = result.samples_per_s, "samples/s", result.peak_mib
        timing = result.timing
        row.median_us = row.call_us = timing.median * 1e6
        row.p20_us, row.p80_us = timing.quantile(0.2) * 1e6, timing.quantile(0.8) * 1e6
        row.timing, row.rounds = "wall", task.steps
        scaling = f", scale {result.scales[-1][1]:g}, {result.skipped_steps} steps skipped" if result.scales else ""
        row.reason = f"last loss {result.last_loss:.5f}{scaling}"
        if isinstance(base, Result):
            row.speedup = ratio(base.timing, timing)
        if not math.isfinite(result.last_loss):
            row.status = "wrong"
        yield row


def build(task: Task, device: torch.device) -> nn.Sequential:
    """`layers` linears of one width with GELU between them; the same weights every time on one device."""
    torch.manual_seed(task.seed)
    modules: list[nn.Module] = []
    for index in range(task.layers):
        modules.append(nn.Linear(task.width, task.width, device=device))
        if index + 1 < task.layers:
            modules.append(nn.GELU())
    return nn.Sequential(*modules)


def train(task: Task, device: torch.device, mode: str, providers: Sequence[str]) -> dict[str, Result | Exception]:
    """Trains with each provider, in turns; what one throws takes only that one out. TF32 is put back to what it was."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, mode == "tf32"
    outcomes: dict[str, Result | Exception] = {}
    runs: dict[str, _Training] = {}

    def attempt(provider: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            outcomes[provider] = without_frames(error)
            runs.pop(provider, None)
            release(device)

    def prepare(provider: str) -> None:
        run = _Training(task, device, mode, provider)
        run.warm_up()
        runs[provider] = run

    try:
        for provider in providers:
            attempt(provider, partial(prepare, provider))
        for index in range(task.steps):
            for provider in rotation(list(runs), index) if runs else ():
                attempt(provider, partial(runs[provider].measure, index))
        outcomes |= {provider: run.finish() for provider, run in runs.items()}
    finally:
        matmul.allow_tf32 = before
        runs.clear()
        release(device)
    return {provider: outcomes[provider] for provider in providers}


class _Training:
    """One run: a model, its optimizer and scaler, and the data."""

    def __init__(self, task: Task, device: torch.device, mode: str, provider: str) -> None:
        self.task, self.device = task, device
        self.autocast = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mode)
        self.result = Result(
            mode,
            provider,
            task,
            torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            tf32=mode == "tf32",
            autocast=str(self.autocast).removeprefix("torch.") if self.autocast else None,
            scaler=SCALER if mode == "fp16" else None,
        )
        self.allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.norms: list[float] = []
        self.model = build(task, device)
        if provider == "ampkernels":
            import ampkernels as ak

            self.result.fused = ak.fuse(self.model).summary()
        generator = torch.Generator(device).manual_seed(task.seed)
        self.x = torch.randn(task.batch, task.width, generator=generator, device=device)
        teacher = torch.randn(task.width, task.width, generator=generator, device=device) / math.sqrt(task.width)
        self.target = torch.tanh(self.x @ teacher)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task.lr, fused=True)
        self.scaler = self._new_scaler()

    def _new_scaler(self) -> Any:
        return torch.amp.GradScaler(self.device.type, enabled=self.result.scaler is not None, **SCALER)  # type: ignore[arg-type]

    def _context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and norm of the scaled gradients."""
        with self._context():
            loss = nn.functional.mse_loss(self.model(self.x).float(), self.target)
        self.scaler.scale(loss).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    def warm_up(self) -> None:
        """Loads kernels, warms the device, reads the peak of memory; then everything is as if nothing had been done."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        until, steps = time.perf_counter() + WARM_UP_S, 0
        while steps < 3 or time.perf_counter() < until:
            self.step()
            _synchronise(self.device)
            steps += 1
        if self.device.type == "cuda":
            self.result.peak_mib = (torch.cuda.max_memory_allocated(self.device) - self.allocated) / 2**20
        self.model.load_state_dict(build(self.task, self.device).state_dict())
        self.optimizer.state.clear()
        self.scaler = self._new_scaler()

    def measure(self, index: int) -> None:
        result = self.result
        _synchronise(self.device)
        start = time.perf_counter()
        loss, norm = self.step()
        _synchronise(self.device)
        result.step_s.append(time.perf_counter() - start)
        result.losses.append(float(loss))
        self.norms.append(float(norm))
        if self.scaler.is_enabled():
            scale = self.scaler.get_scale()
            previous = result.scales[-1][1] if result.scales else SCALER["init_scale"]
            if scale < previous:
                result.skipped_steps += 1
            if not result.scales or scale != previous:
                result.scales.append((index, scale))

    def finish(self) -> Result:
        result = self.result
        result.nonfinite_losses = sum(not math.isfinite(value) for value in result.losses)
        result.nonfinite_gradients = sum(not math.isfinite(value) for value in self.norms)
        result.samples_per_s = self.task.batch / result.timing.median
        return result


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recommend(results: list[Result]) -> str:
    """The fastest mode that loses nothing, and why."""
    reference = next((r for r in results if r.mode == "fp32" and r.provider == "eager"), None)
    if reference is None or not math.isfinite(reference.last_loss):
        return "no recommendation: the fp32 run is missing or did not converge"
    sound = [
        r
        for r in results
        if math.isfinite(r.last_loss) and r.nonfinite_losses == 0 and r.last_loss <= LOSS_MARGIN * reference.last_loss
    ]
    if not sound:
        return "no recommendation: no run kept all its losses finite"
    best = max(sound, key=lambda r: r.samples_per_s)
    gain = best.samples_per_s / reference.samples_per_s
    reasons = [f"{gain:.2f}x the samples/s of eager fp32 at a last loss of {best.last_loss:.5f}"]
    reasons[0] += f" (fp32: {reference.last_loss:.5f})"
    rivals = [r for r in sound if r.mode != best.mode]
    if rivals:
        second = max(rivals, key=lambda r: r.samples_per_s)
        reasons.append(f"{best.samples_per_s / second.samples_per_s:.2f}x {second.mode} ({second.provider})")
    lost = sorted({r.mode for r in results if r not in sound})
    if lost:
        reasons.append(f"set aside for their loss: {', '.join(lost)}")
    if best.mode == "fp16":
        skipped = f"{best.skipped_steps} steps skipped" if best.skipped_steps else "no step skipped"
        reasons.append(f"needs a GradScaler ({skipped})")
        bf16 = max((r for r in sound if r.mode == "bf16"), key=lambda r: r.samples_per_s, default=None)
        if bf16 is not None and bf16.samples_per_s >= 0.97 * best.samples_per_s:
            return f"bf16 with {bf16.provider}: within 3 % of fp16, and its range needs no loss scaling"
    return f"{best.mode} with {best.provider}: {'; '.join(reasons)}"


def _summary(results: list[Result], device: torch.device, out: Path, console: Console) -> list[Row]:
    table = Table(title=f"train on {device}", title_justify="left", box=None)
    names = ("dtype", "provider", "samples/s", "peak MiB", "last loss", "loss scale", "skipped", "inf/NaN loss, grad")
    for name in names:
        table.add_column(name, justify="left" if name in ("dtype", "provider", "loss scale") else "right")
    for r in results:
        table.add_row(
            r.mode,
            r.provider,
            f"{r.samples_per_s:.4g}",
            "" if r.peak_mib is None else f"{r.peak_mib:.0f}",
            f"{r.last_loss:.5f}",
            " ".join(f"{step}:{scale:g}" for step, scale in r.scales),
            str(r.skipped_steps) if r.scaler else "",
            f"{r.nonfinite_losses}, {r.nonfinite_gradients}",
        )
    console.print(table)
    if results:
        console.print(f"all of them: {results[0].task}, AdamW, on {results[0].device}, torch {torch.__version__}")
    for mode, conditions in {r.mode: r.conditions for r in results}.items():
        console.print(f"{mode}: {conditions}", highlight=False)
    advice = recommend(results)
    console.print(f"recommended here: {advice}", highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    record = {"torch": torch.__version__, "recommended": advice, "runs": [asdict(r) for r in results]}
    (out / "train.json").write_text(json.dumps(record, indent=1) + "\n")
    row = Row(SUITE, "train-mlp", "", "", "", "step", "recommended", reason=advice)
    row.rounds = results[0].task.steps if results else None
    row.setting = f"{row.rounds} steps" if results else ""
    return [row]
