"""Suite `train`: one small MLP trained in fp32, TF32, fp16 with a GradScaler and bf16, eager and fused.

Every run starts from the same weights and sees the same data, so losses can be compared. The runs come one after
another, each with the device to itself. The suite ends with the dtype it recommends for this device, and why.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
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
from benchmarks.runner import failure, is_out_of_memory, release

SUITE = "train"
MODES = ("fp32", "tf32", "fp16", "bf16")
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
        return cls(4, 256, 256, 10 if quick else 80)


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

    @property
    def last_loss(self) -> float:
        return self.losses[-1] if self.losses else math.nan


def tasks(
    device: torch.device, out: Path, quick: bool, console: Console
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    task = Task.of(device, quick)
    results: list[Result] = []
    for mode in MODES:
        for provider in ("eager", "ampkernels"):
            yield f"train {mode} {provider}", partial(_run, task, device, mode, provider, results)
    yield "train summary", partial(_summary, results, device, out, console)


def _run(task: Task, device: torch.device, mode: str, provider: str, results: list[Result]) -> list[Row]:
    shape = f"{task.layers}x{task.width}x{task.batch}"
    row = Row(SUITE, "train-mlp", shape, mode, "", "step", provider, setting="layers x width x batch, AdamW")
    if mode == "tf32" and device.type == "cpu":
        row.status, row.reason = "skipped", "a CPU has no TF32"
        return [row]
    try:
        result = train(task, device, mode, provider)
    except Exception as error:
        failure(row, error)
        if is_out_of_memory(error):
            release(device)
        return [row]
    finally:
        release(device)
    results.append(result)
    row.rate, row.unit, row.peak_mib = result.samples_per_s, "samples/s", result.peak_mib
    row.median_us = task.batch / result.samples_per_s * 1e6
    row.timing, row.rounds = "wall", task.steps
    scaling = f", scale {result.scales[-1][1]:g}, {result.skipped_steps} steps skipped" if result.scales else ""
    row.reason = f"last loss {result.last_loss:.5f}{scaling}"
    eager = next((r for r in results if r.mode == mode and r.provider == "eager"), None)
    if eager is not None:
        row.speedup = result.samples_per_s / eager.samples_per_s
    if not math.isfinite(result.last_loss):
        row.status = "wrong"
    return [row]


def build(task: Task, device: torch.device) -> nn.Sequential:
    """`layers` linears of one width with GELU between them; the same weights every time on one device."""
    torch.manual_seed(task.seed)
    modules: list[nn.Module] = []
    for index in range(task.layers):
        modules.append(nn.Linear(task.width, task.width, device=device))
        if index + 1 < task.layers:
            modules.append(nn.GELU())
    return nn.Sequential(*modules)


def train(task: Task, device: torch.device, mode: str, provider: str) -> Result:
    """One run; TF32 is set for its duration and put back."""
    tf32_before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    try:
        return _train(task, device, mode, provider)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32_before


def _train(task: Task, device: torch.device, mode: str, provider: str) -> Result:
    autocast_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mode)
    result = Result(
        mode,
        provider,
        task,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        tf32=mode == "tf32",
        autocast=str(autocast_dtype).removeprefix("torch.") if autocast_dtype else None,
        scaler=SCALER if mode == "fp16" else None,
    )
    model = build(task, device)
    if provider == "ampkernels":
        import ampkernels as ak

        result.fused = ak.fuse(model).summary()
    generator = torch.Generator(device).manual_seed(task.seed)
    x = torch.randn(task.batch, task.width, generator=generator, device=device)
    teacher = torch.randn(task.width, task.width, generator=generator, device=device) / math.sqrt(task.width)
    target = torch.tanh(x @ teacher)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    scaler: Any = torch.amp.GradScaler(device.type, enabled=mode == "fp16", **SCALER)  # type: ignore[arg-type]

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=autocast_dtype) if autocast_dtype else nullcontext()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with context():
            loss = nn.functional.mse_loss(model(x).float(), target)
        scaler.scale(loss).backward()
        norm = torch.stack(torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])).norm()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    # Kernels are loaded and libraries warmed on a throw-away copy of the state, so that all runs start alike.
    before = copy.deepcopy(model.state_dict())
    optimizer_before = copy.deepcopy(optimizer.state_dict())
    scaler_before = copy.deepcopy(scaler.state_dict())
    for _ in range(3):
        step()
    model.load_state_dict(before)
    optimizer.load_state_dict(optimizer_before)
    optimizer.state.clear()
    scaler.load_state_dict(scaler_before)

    _synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    norms: list[float] = []
    for index in range(task.steps):
        start = time.perf_counter()
        loss, norm = step()
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
        result.losses.append(float(loss))
        norms.append(float(norm))
        if scaler.is_enabled():
            scale = scaler.get_scale()
            previous = result.scales[-1][1] if result.scales else SCALER["init_scale"]
            if scale < previous:
                result.skipped_steps += 1
            if not result.scales or scale != previous:
                result.scales.append((index, scale))
    result.nonfinite_losses = sum(not math.isfinite(value) for value in result.losses)
    result.nonfinite_gradients = sum(not math.isfinite(value) for value in norms)
    result.samples_per_s = task.batch / statistics.median(seconds)
    if device.type == "cuda":
        result.peak_mib = torch.cuda.max_memory_allocated(device) / 2**20
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
    advice = recommend(results)
    console.print(f"recommended here: {advice}", highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    record = {"torch": torch.__version__, "recommended": advice, "runs": [asdict(r) for r in results]}
    (out / "train.json").write_text(json.dumps(record, indent=1) + "\n")
    row = Row(SUITE, "train-mlp", "", "", "", "step", "recommended", reason=advice)
    return [row]
