"""Suite `model`: whole models with random weights; eager AMP, fused, and `torch.compile` of each, side by side.

The models are those of `transformers` and `timm`, built from their configurations. Weights are fp32, the forward runs
under autocast, the optimizer is AdamW. `torch.compile` compiles each block of the stack, as people do to keep compile
time down; all blocks share one compilation. Times are events around plain calls (CUDA) or wall clocks (CPU): whole
steps, launch gaps included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import errors
from benchmarks.records import Row
from benchmarks.runner import dtype_name, failure, release
from benchmarks.timing import Budget, Calls, Timing, make_timer, ratio

SUITE = "model"
VARIANTS = ("eager", "ampkernels", "compile", "ampkernels+compile")


@dataclass(frozen=True)
class Size:
    """Layers and the batch; `length` is the sequence length, or the image's side."""

    layers: int
    batch: int
    length: int


@dataclass(frozen=True)
class Model:
    """A model to build, its input, and where its repeated blocks are."""

    name: str
    module: str  # the package it needs
    build: Callable[[Size], nn.Module]
    input: Callable[[Size, torch.device], torch.Tensor]
    forward: Callable[[Any, torch.Tensor], torch.Tensor]
    blocks: Callable[[Any], Sequence[nn.Module]]
    full: Size
    small: Size  # for --quick and the CPU


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_layer=size.layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=size.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaModel(config)


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertModel

    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(num_hidden_layers=size.layers, **dropout), add_pooling_layer=False)


def _vit(size: Size) -> nn.Module:
    import timm

    return timm.create_model("vit_base_patch16_224", pretrained=False, depth=size.layers, img_size=size.length)


def _embeddings(width: int) -> Callable[[Size, torch.device], torch.Tensor]:
    def make(size: Size, device: torch.device) -> torch.Tensor:
        return torch.randn(size.batch, size.length, width, device=device)

    return make


def _hidden(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model(inputs_embeds=x).last_hidden_state
    return hidden


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "gpt2-small",
            "transformers",
            _gpt2,
            _embeddings(768),
            _hidden,
            lambda m: m.h,
            Size(12, 8, 1024),
            Size(2, 2, 128),
        ),
        Model(
            "llama-8-layers",
            "transformers",
            _llama,
            _embeddings(2048),
            _hidden,
            lambda m: m.layers,
            Size(8, 4, 2048),
            Size(1, 1, 128),
        ),
        Model(
            "vit-b",
            "timm",
            _vit,
            lambda s, device: torch.randn(s.batch, 3, s.length, s.length, device=device),
            lambda m, x: m(x),
            lambda m: m.blocks,
            Size(12, 64, 224),
            Size(2, 4, 224),
        ),
        Model(
            "bert-base",
            "transformers",
            _bert,
            _embeddings(768),
            _hidden,
            lambda m: m.encoder.layer,
            Size(12, 16, 512),
            Size(2, 2, 128),
        ),
    )
}


def tasks(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    directions: Sequence[str],
    names: Sequence[str] | None,
    budget: Budget,
    quick: bool,
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """One task per model and dtype. `names` picks models; ValueError that lists them if one is unknown."""
    for name in names or ():
        if name not in MODELS:
            raise ValueError(f"model: unknown shape {name!r}; valid: {', '.join(MODELS)}")
    small = quick or device.type == "cpu"
    chosen = names if names is not None else ["gpt2-small"] if quick else MODELS
    for model in MODELS.values():
        if model.name in chosen:
            for dtype in dtypes:
                if dtype is torch.float32:
                    continue  # AMP has no fp32 mode
                run = _Run(model, model.small if small else model.full, device, dtype, budget)
                kinds = ["fwd"] if "fwd" in directions else []
                kinds += ["step"] if "bwd" in directions else []
                variants = VARIANTS[:2] if quick else VARIANTS
                yield f"model {model.name} {dtype_name(dtype)}", partial(run.rows, kinds, variants)


class _Run:
    """One model in one dtype: builds the variants, checks each against float64, times them together."""

    def __init__(self, model: Model, size: Size, device: torch.device, dtype: torch.dtype, budget: Budget) -> None:
        self.model, self.size, self.device, self.dtype, self.budget = model, size, device, dtype, budget

    def rows(self, directions: Sequence[str], variants: Sequence[str]) -> list[Row]:
        rows: list[Row] = []
        try:
            torch.manual_seed(0)
            with torch.device(self.device):  # initialised there: half a billion weights take seconds on a CPU
                master = self.model.build(self.size)
            x = self.model.input(self.size, self.device)
            reference = self._reference(master, x[:1])
        except Exception as error:
            return [failure(self._row("eager", direction), error) for direction in directions]
        try:
            for direction in directions:
                rows += self._direction(master, x, reference, direction, variants)
                release(self.device)
        finally:
            torch.compiler.reset()
            release(self.device)
        return rows

    def _row(self, variant: str, direction: str) -> Row:
        size = self.size
        shape = f"{size.layers}x{size.batch}x{size.length}"
        setting = "layers x batch x length, AMP, AdamW" if direction == "step" else "layers x batch x length, AMP"
        row = Row(SUITE, self.model.name, shape, dtype_name(self.dtype), "", direction, variant)
        row.setting = setting
        return row

    def _reference(self, master: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model.forward(copy.deepcopy(master).double().eval(), x.double())

    def _variant(self, master: nn.Module, variant: str) -> tuple[nn.Module, str]:
        """A copy of the model made ready, and a note."""
        model, notes = copy.deepcopy(master), []
        if "ampkernels" in variant:
            import ampkernels as ak

            report = ak.fuse(model)
            notes.append(report.summary())
        if "compile" in variant:
            for block in self.model.blocks(model):
                block.compile(dynamic=False)
            notes.append("each block compiled")
        return model, "; ".join(notes)

    def _direction(
        self, master: nn.Module, x: torch.Tensor, reference: torch.Tensor, direction: str, variants: Sequence[str]
    ) -> list[Row]:
        rows, calls, by_variant = [], dict[str, Calls](), {}
        for variant in variants:
            row = self._row(variant, direction)
            rows.append(row)
            by_variant[variant] = row
            try:
                model, row.reason = self._variant(master, variant)
                call = self._step(model, x) if direction == "step" else self._forward(model, x)
                self._check(row, model, x[:1], reference, by_variant["eager"])
                row.peak_mib = self._peak(call)
                calls[variant] = [call]
            except Exception as error:
                failure(row, error)
        results = make_timer(self.device, self.budget, capture=False).run(calls)
        base = results.get("eager")
        items = self.size.batch * (1 if self.model.name.startswith("vit") else self.size.length)
        for variant, result in results.items():
            row = by_variant[variant]
            if not isinstance(result, Timing):
                failure(row, result)
                continue
            row.median_us, row.call_us = result.median * 1e6, result.call_s * 1e6
            row.p20_us, row.p80_us = result.quantile(0.2) * 1e6, result.quantile(0.8) * 1e6
            row.rounds, row.timing = len(result.samples), result.method
            row.rate = items / result.median
            row.unit = "images/s" if self.model.name.startswith("vit") else "tokens/s"
            if isinstance(base, Timing):
                row.speedup = ratio(base, result)
        right = [row for row in rows if row.status == "ok" and row.median_us is not None]
        for place, row in enumerate(sorted(right, key=lambda r: r.median_us or 0.0), 1):
            row.rank = place
        return rows

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _forward(self, model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
        model.eval()

        def call() -> object:
            with torch.no_grad(), self._autocast():
                return self.model.forward(model, x)

        return call

    def _step(self, model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        scaler: Any = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)

        def call() -> object:
            with self._autocast():
                loss = self.model.forward(model, x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return call

    def _check(self, row: Row, model: nn.Module, x: torch.Tensor, reference: torch.Tensor, eager: Row) -> None:
        """The output's error against float64 before any step; wrong if several times that of eager AMP."""
        was_training = model.training
        with torch.no_grad(), self._autocast():
            output = self.model.forward(model.eval(), x)
        model.train(was_training)
        error = errors.compare([output], [reference])
        row.rel_l2, row.shrink, row.error_over = error.rel_l2, error.shrink, "output of one sample"
        if eager.rel_l2 is not None and not error.rel_l2 <= 4 * eager.rel_l2:
            row.status, row.reason = "wrong", f"error {error.rel_l2:.2g}, eager AMP's is {eager.rel_l2:.2g}"

    def _peak(self, call: Callable[[], object]) -> float | None:
        if self.device.type != "cuda":
            call()
            return None
        call()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
