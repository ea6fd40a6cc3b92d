"""Part 2: a small Vision Transformer trained on scikit-learn's digits, in fp32, in eager and in fused autocast."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from ..fuse import fuse
from .report import Outcome, console, gain, mib, peak_bytes, progress, synchronize

BATCH = 128


@dataclass(frozen=True)
class Data:
    """8x8 images in [-1, 1] and their digits."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(device: torch.device) -> Data:
    """The 1797 digits that scikit-learn ships, four fifths of them for training."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    split = train_test_split(
        bunch.images / 8.0 - 1.0, bunch.target, test_size=0.2, random_state=0, stratify=bunch.target
    )
    train_x, test_x = (torch.tensor(part, dtype=torch.float32, device=device).unsqueeze(1) for part in split[:2])
    train_y, test_y = (torch.tensor(part, device=device) for part in split[2:])
    return Data(train_x, train_y, test_x, test_y)


def vision_transformer() -> nn.Module:
    """16 patches of 2x2, width 192, 4 blocks; the same weights every time."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=192, depth=4, num_heads=3, mlp_ratio=4.0
    )


@dataclass
class Run:
    """One training run."""

    losses: list[float]
    accuracy: float
    seconds_per_step: float
    peak: int
    skipped: int


def train(model: nn.Module, data: Data, amp: torch.dtype | None, steps: int, advance: Callable[[], None]) -> Run:
    """AdamW with warm-up; a GradScaler where autocast is to fp16. The order of the batches is the same in every run."""
    device = data.train_images.device
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps + 2, pct_start=0.2)
    scaler = torch.amp.GradScaler(device.type, enabled=amp is torch.float16)
    order = torch.Generator().manual_seed(1)
    skipped = 0

    def context() -> AbstractContextManager[object]:
        return torch.autocast(device.type, amp) if amp else nullcontext()

    def step() -> Tensor:
        nonlocal skipped
        batch = torch.randint(len(data.train_images), (BATCH,), generator=order).to(device)
        with context():
            logits = model(data.train_images[batch])
        loss = nn.functional.cross_entropy(logits.float(), data.train_labels[batch])
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        schedule.step()
        return loss.detach()

    step()  # warms up; the optimizer's state exists from here on
    peak = peak_bytes(step, device)
    losses, times = [], []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        loss = step()
        synchronize(device)
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        advance()
    model.eval()
    with torch.inference_mode(), context():
        right = (model(data.test_images).argmax(-1) == data.test_labels).double().mean()
    return Run(losses, float(right), sorted(times)[len(times) // 2], peak, skipped)


def plot(runs: dict[str, Run], device: str, path: Path) -> None:
    """The loss curves, each a running mean over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=True):
        losses = torch.tensor(run.losses)
        smooth = losses.unfold(0, min(10, len(losses)), 1).mean(-1)
        axes.plot(
            range(len(losses) - len(smooth) + 1, len(losses) + 1),
            smooth,
            style,
            label=f"{name}: {run.accuracy:.1%} right",
        )
    axes.set(
        xlabel="step", ylabel="loss, mean of 10 steps", yscale="log", title=f"Vision Transformer on digits, {device}"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run(device: torch.device, dtype: torch.dtype, steps: int, out: Path) -> Outcome:
    """Trains the three variants from the same weights on the same batches."""
    data = load(device)
    amp = str(dtype).removeprefix("torch.")
    fused_model = vision_transformer()
    report = fuse(fused_model)
    console.print(f"\n[bold]2. Vision Transformer on digits[/]: {steps} steps of {BATCH} images")
    console.print(str(report), highlight=False)
    variants = {
        "eager fp32": (vision_transformer(), None),
        f"eager {amp} autocast": (vision_transformer(), dtype),
        f"fused {amp} autocast": (fused_model, dtype),
    }
    runs: dict[str, Run] = {}
    with progress() as bar:
        for name, (model, precision) in variants.items():
            task = bar.add_task(name, total=steps)
            runs[name] = train(model, data, precision, steps, functools.partial(bar.advance, task))

    table = Table(
        "variant", "device", "dtype", "last loss", "test accuracy", "time per step", "peak memory", "steps skipped"
    )
    for (name, result), (_, precision) in zip(runs.items(), variants.values(), strict=True):
        last = sum(result.losses[-10:]) / len(result.losses[-10:])
        table.add_row(
            name, str(device), amp if precision else "float32", f"{last:.4f}", f"{result.accuracy:.1%}",
            f"{result.seconds_per_step * 1e3:.1f} ms", mib(result.peak), str(result.skipped),
        )  # fmt: skip
    console.print(table)
    path = out / "digits.png"
    plot(runs, str(device), path)
    console.print(f"loss curves: {path}")
    _, eager, fused = runs.values()
    return Outcome(
        f"in the Vision Transformer {len(report.fused)} were, and a training step was "
        f"{gain(eager.seconds_per_step, fused.seconds_per_step)}, at {fused.accuracy:.1%} against {eager.accuracy:.1%} accuracy"
    )
