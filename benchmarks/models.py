"""Suite `model`: whole models with random weights; eager AMP, fused, and `torch.compile` of each, side by side.

The models are those of `transformers` and `timm`, built from their configurations. Weights are fp32, the forward runs
under autocast, the optimizer is AdamW. `torch.compile` compiles each block of the stack, as people do to keep compile
time down; all blocks share one compilation. Times are events around plain calls (CUDA) or wall clocks (CPU): whole
steps, launch gaps included.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import errors
from benchmarks.providers import Unsupported
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
    quick: Size  # for --quick on a GPU: fewer layers, but tokens enough to keep it busy
    small: Size  # for the CPU


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
        # With a gradient, as trained embeddings have; and the first block then has the same graph as all the others.
        return torch.randn(size.batch, size.length, width, device=device, requires_grad=True)

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
            Size(4, 64, 512),
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
            Size(2, 4, 2048),
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
            Size(4, 128, 224),
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
            Size(4, 64, 512),
            Size(2, 2, 128),
        ),
    )
}


def _chosen(names: Sequence[str] | None, quick: bool) -> list[Model]:
    """Models by name, or those of the suite. ValueError that lists the valid ones if a name is none."""
    for name in names or ():
        if name not in MODELS:
            raise ValueError(f"model: unknown shape {name!r}; valid: {', '.join(MODELS)}")
    wanted = names if names is not None else ["gpt2-small"] if quick else MODELS
    return [model for model in MODELS.values() if model.name in wanted]


def _variants(providers: Sequence[str]) -> list[str]:
    variants = [v for v in VARIANTS if all(part in providers for part in v.split("+"))]
    if not variants:
        raise ValueError(f"model: none of the providers {', '.join(providers)}; valid: eager, ampkernels, compile")
    return variants


def _kinds(directions: Sequence[str]) -> list[str]:
    """What is timed: `bwd` stands for a whole training step."""
    return [kind for direction, kind in (("fwd", "fwd"), ("bwd", "step")) if direction in directions]


def tasks(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    directions: Sequence[str],
    names: Sequence[str] | None,
    providers: Sequence[str],
    budget: Budget,
    quick: bool,
) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """One task per model and dtype.

    Args:
        names: Of models; None for those of the suite.
        providers: Of eager, ampkernels and compile, those that take part.

    Raises:
        ValueError: A name is no model's, or no provider can run one.
    """
    variants = _variants(providers)
    for model in _chosen(names, quick):
        for dtype in dtypes:
            run = _Run(model, _size(model, device, quick), device, dtype, budget)
            yield f"model {model.name} {dtype_name(dtype)}", partial(run.rows, _kinds(directions), variants)


def compilations(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    directions: Sequence[str],
    names: Sequence[str] | None,
    providers: Sequence[str],
    quick: bool,
) -> list[Callable[[], object]]:
    """Calls that fill the compilers' caches on disk, one per model, direction and variant that compiles."""
    return [
        partial(_Run(model, _size(model, device, quick), device, dtype, Budget()).compile, kind, variant)
        for model in _chosen(names, quick)
        for dtype in dtypes
        for kind in _kinds(directions)
        for variant in _variants(providers)
        if "compile" in variant
    ]


def describe() -> list[str]:
    """Lines for --list."""
    texts = [f"{m.name} ({m.full.layers}x{m.full.batch}x{m.full.length}, from {m.module})" for m in MODELS.values()]
    return [f"layers x batch x length: {', '.join(texts)}"]


def _size(model: Model, device: torch.device, quick: bool) -> Size:
    return model.small if device.type == "cpu" else model.quick if quick else model.full


class _Run:
    """One model in one dtype: builds the variants, checks each against float64, times them together."""

    def __init__(self, model: Model, size: Size, device: torch.device, dtype: torch.dtype, budget: Budget) -> None:
        self.model, self.size, self.device, self.dtype, self.budget = model, size, device, dtype, budget

    def rows(self, directions: Sequence[str], variants: Sequence[str]) -> Iterator[Row]:
        """Never raises but for KeyboardInterrupt."""
        try:
            self._require()
            master, x = self._build()
            reference = self._reference(master, x[:1])
        except Exception as error:
            for direction in directions:
                yield from (failure(self._row(variant, direction), error) for variant in variants)
            return
        try:
            for direction in directions:
                yield from self._direction(master, x, reference, direction, variants)
                release(self.device)
        finally:
            torch.compiler.reset()
            release(self.device)

    def compile(self, direction: str, variant: str) -> None:
        """Runs one variant once, of a model of one block, since all share one compilation; measures nothing."""
        self.size = replace(self.size, layers=1)
        try:
            self._require()
            master, x = self._build()
            model, _ = self._variant(master, variant)
            call = self._step(model, x) if direction == "step" else self._forward(model, x)
            call()
        except Exception:  # the measuring run will meet it again, and say so
            pass
        finally:
            torch.compiler.reset()
            release(self.device)

    def _require(self) -> None:
        if importlib.util.find_spec(self.model.module) is None:
            raise Unsupported(f"{self.model.module} is not installed")
        if self.dtype is torch.float32:
            raise Unsupported("automatic mixed precision has no fp32 mode")

    def _build(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        with torch.device(self.device):  # initialised there: half a billion weights take seconds on a CPU
            master = self.model.build(self.size)
        return master, self.model.input(self.size, self.device)

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
            import torch._functorch.config as functorch_config

            functorch_config.donated_buffer = (
                True  # its default, which single operations switch off; part of cache keys
            )
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
                self._check(row, model, x, reference, by_variant.get("eager"))
                row.peak_mib = self._peak(call)
                calls[variant] = [call]
            except Exception as error:
                failure(row, error)
                release(self.device)
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
            x.grad = None
            return loss

        return call

    def _check(self, row: Row, model: nn.Module, x: torch.Tensor, reference: torch.Tensor, eager: Row | None) -> None:
        """The output's error against float64 before any step; wrong if several times that of eager AMP."""
        # As it is timed, so that a compiler compiles one graph and not two: nothing here drops out while training.
        with torch.set_grad_enabled(model.training), self._autocast():
            output = self.model.forward(model, x)[: len(reference)]
        error = errors.compare([output], [reference])
        row.rel_l2, row.max_ulp, row.shrink = error.rel_l2, error.max_ulp, error.shrink
        row.error_over = "output of one sample"
        if eager is None:
            return
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
