"""Who computes it: ours, PyTorch's own ways, and other libraries.

A provider turns an operation into a function of its tensors that autograd can differentiate. Nothing is imported before
a provider is asked for; one that is not installed, or does not offer an operation, says so in its reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.ops import ACTIVATION, EPS, GATE, Op, Tensors

Function = Callable[..., Any]  # tensors in, one tensor out


class Unsupported(Exception):
    """The provider does not offer this; the text says what, and the point is skipped with it."""


@dataclass(frozen=True)
class Implementation:
    """A provider's way to compute one operation.

    Attributes:
        call: The operation on tensors.
        accumulate: How sums are accumulated: one of our policies, or "library" where the library decides.
        partial: It computes less than the operation (a plain product, say): shown for comparison, never checked
            against the oracle, never ranked.
        prepare: Applied to the inputs once, outside the timing (a dtype that the library insists on, say).
        note: Something that a reader of the row must know.
        variant: Told apart from the provider's other ways by this, after its name.
    """

    call: Function
    accumulate: str = "library"
    partial: bool = False
    prepare: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] | None = None
    note: str = ""
    variant: str = ""


class Provider:
    """Base class: `modules` are the packages it needs, `devices` where it runs, and each operation is a method."""

    name: str
    modules: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    compiles = False  # at run time, and finds it again on disk: --precompile runs it ahead
    not_quick = False  # takes part in --quick only when named: slow to start, or a detail
    aliases: tuple[str, ...] = ()

    def missing(self, device: torch.device) -> str | None:
        """Why this provider cannot run here, or None. Imports nothing."""
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    def implementations(
        self, op: Op, dtype: torch.dtype, direction: str, accumulates: Sequence[str], device: torch.device
    ) -> Iterator[Implementation]:
        """The ways this provider offers `op`: usually one. Raises Unsupported if there is none."""
        method = None if op.residual else getattr(self, op.name, None)
        if method is None:
            raise Unsupported(f"{self.name} has no {op.name}{' with a residual' * op.residual}")
        yield method(dtype, direction)


def _eager_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def _eager_gated_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.silu(gate) * up


def _eager_mlp(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    return F.linear(_eager_linear(x, w1, b1), w2, b2)


def _eager_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _eager_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def _eager_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], w, EPS)


def _eager_layer_norm_residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    total = x + r
    return _eager_layer_norm(total, w, b), total


def _eager_rms_norm_residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Tensors:
    total = x + r
    return _eager_rms_norm(total, w), total


def _eager_linear_residual(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b) + r


EAGER_RESIDUAL: dict[str, Function] = {
    "linear": _eager_linear_residual,
    "layer_norm": _eager_layer_norm_residual,
    "rms_norm": _eager_rms_norm_residual,
}
EAGER: dict[str, Function] = {
    "linear": _eager_linear,
    "gated_linear": _eager_gated_linear,
    "mlp": _eager_mlp,
    "softmax": _eager_softmax,
    "layer_norm": _eager_layer_norm,
    "rms_norm": _eager_rms_norm,
}


def eager(op: Op) -> Function:
    return (EAGER_RESIDUAL if op.residual else EAGER)[op.name]


class Eager(Provider):
    """Plain PyTorch; for fp16 GEMMs on CUDA also with fp16 accumulation, where a policy of ours asks for it."""

    name = "eager"

    def implementations(
        self, op: Op, dtype: torch.dtype, direction: str, accumulates: Sequence[str], device: torch.device
    ) -> Iterator[Implementation]:
        yield Implementation(eager(op))
        fp16_asked = any(a.partition("/")[0] == "fp16" for a in accumulates)
        fp16_possible = op.is_gemm and dtype is torch.float16 and device.type == "cuda" and direction == "fwd"
        if fp16_asked and fp16_possible:
            yield Implementation(with_fp16_accumulation(eager(op)), accumulate="fp16")


def with_fp16_accumulation(function: Function) -> Function:
    """The function under `torch.backends.cuda.matmul.allow_fp16_accumulation`."""

    def call(*tensors: torch.Tensor) -> Any:
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_fp16_accumulation
        matmul.allow_fp16_accumulation = True
        try:
            return function(*tensors)
        finally:
            matmul.allow_fp16_accumulation = before

    return call


class Compile(Provider):
    """`torch.compile` of the eager operation, specialised to each shape."""

    name = "compile"
    aliases = ("torch.compile",)
    compiles = not_quick = True
    mode = "default"

    def implementations(
        self, op: Op, dtype: torch.dtype, direction: str, accumulates: Sequence[str], device: torch.device
    ) -> Iterator[Implementation]:
        import torch._functorch.config as functorch_config

        # A backward that is run more than once over the same forward, as here, must not reuse saved buffers.
        functorch_config.donated_buffer = False
        torch.compiler.reset()  # or the cache of specialisations fills up, and the compiler falls back to dynamic shapes
        mode = None if self.mode == "default" else self.mode
        compiled = torch.compile(eager(op), dynamic=False, mode=mode)
        yield Implementation(compiled, note=f"mode {self.mode}", variant="" if mode is None else mode)


class Cublas(Provider):
    """The plain product by the GEMM library behind `torch.mm`: no bias, no activation. What fusion has to beat."""

    name = "mm"

    def linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        if direction != "fwd":
            raise Unsupported("mm is the plain forward product")
        return Implementation(lambda x, w, b: torch.mm(x, w.t()), partial=True, note="plain product")

    gated_linear = linear


class CublasLt(Provider):
    """cuBLASLt's fused bias + GELU(tanh) epilogue."""

    name = "cublaslt"
    devices = ("cuda",)

    def linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        if direction != "fwd":
            raise Unsupported("_addmm_activation is forward only")
        return Implementation(lambda x, w, b: torch._addmm_activation(b, x, w.t(), use_gelu=True))


class Liger(Provider):
    name = "liger"
    modules = ("liger_kernel", "triton")
    devices = ("cuda",)
    aliases = ("liger-kernel",)
    compiles = True

    def gated_linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        from liger_kernel.transformers.functional import liger_swiglu

        def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
            (gate_w, up_w), (gate_b, up_b) = w.chunk(2), b.chunk(2)  # two products, as in its LigerSwiGLUMLP
            return liger_swiglu(F.linear(x, gate_w, gate_b), F.linear(x, up_w, up_b))

        return Implementation(call)

    def softmax(self, dtype: torch.dtype, direction: str) -> Implementation:
        from liger_kernel.transformers.functional import liger_softmax

        return Implementation(liger_softmax)

    def layer_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        from liger_kernel.transformers.functional import liger_layer_norm

        return Implementation(lambda x, w, b: liger_layer_norm(x, w, b, EPS))

    def rms_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        from liger_kernel.transformers.functional import liger_rms_norm

        # Its default writes dx over dy; that would feed each repetition the result of the one before.
        return Implementation(lambda x, w: liger_rms_norm(x, w, EPS, in_place=False), note="in_place=False")


class Quack(Provider):
    name = "quack"
    modules = ("quack", "cutlass")
    devices = ("cuda",)
    aliases = ("quack-kernels",)
    compiles = not_quick = True

    def linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        if direction != "fwd":
            raise Unsupported("quack differentiates linear + activation only inside its mlp")
        from quack.linear import linear_act_func

        def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
            return linear_act_func(x, w, "gelu_tanh_approx", bias=b, store_preact=False, tuned=False)[1]

        return Implementation(call, note="untuned")

    def gated_linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        if direction != "fwd":
            raise Unsupported("quack differentiates a gated linear only inside its mlp")
        from quack.linear import linear_gated_func

        def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
            options: dict[str, Any] = {"store_preact": False, "tuned": False, "concat_layout": True}
            return linear_gated_func(x, w, "swiglu", bias=b, **options)[1]

        return Implementation(call, note="untuned, concat_layout")

    def mlp(self, dtype: torch.dtype, direction: str) -> Implementation:
        from quack.mlp import mlp_func

        return Implementation(
            lambda x, w1, b1, w2, b2: mlp_func(x, w1, w2, "gelu_tanh_approx", bias1=b1, bias2=b2, tuned=False),
            note="untuned",
        )

    def softmax(self, dtype: torch.dtype, direction: str) -> Implementation:
        from quack.softmax import softmax

        return Implementation(softmax)

    def rms_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        from quack.rmsnorm import rmsnorm

        return Implementation(lambda x, w: rmsnorm(x, w, eps=EPS))

    def layer_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        return Implementation(
            _quack_layer_norm(),
            prepare=lambda tensors: (tensors[0], tensors[1].float(), tensors[2].float()),
            note="fp32 weight and bias",
        )


def _quack_layer_norm() -> Function:
    """Its LayerNorm comes as two plain functions: joined here into one that autograd knows."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
            out, rstd, mean = layernorm_fwd(x, w, b, eps=EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, w, rstd, mean)
            return out

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            x, w, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, w, dy, rstd, mean)

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return LayerNorm.apply(x, w, b) if x.requires_grad else layernorm_fwd(x, w, b, eps=EPS)

    return call


class QuackMm(Provider):
    """QuACK's plain product, untuned: the like of `mm`."""

    name = "quack_mm"
    modules = ("quack", "cutlass")
    devices = ("cuda",)
    compiles = not_quick = True

    def linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        if direction != "fwd":
            raise Unsupported("quack_mm is the plain forward product")
        from quack.gemm_interface import gemm

        return Implementation(lambda x, w, b: gemm(x, w.t(), tuned=False), partial=True, note="plain product, untuned")


class Apex(Provider):
    name = "apex"
    modules = ("apex",)
    devices = ("cuda",)

    def layer_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        return Implementation(lambda x, w, b: fused_layer_norm_affine(x, w, b, x.shape[-1:], EPS))

    def rms_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return Implementation(lambda x, w: fused_rms_norm_affine(x, w, x.shape[-1:], EPS))

    def mlp(self, dtype: torch.dtype, direction: str) -> Implementation:
        from apex.fused_dense import FusedDenseGeluDenseFunc  # its functional forms have changed names

        return Implementation(FusedDenseGeluDenseFunc.apply)


class TransformerEngine(Provider):
    name = "transformer_engine"
    modules = ("transformer_engine",)
    devices = ("cuda",)
    aliases = ("te",)

    def layer_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        return Implementation(_te_norm("LayerNorm", direction))

    def rms_norm(self, dtype: torch.dtype, direction: str) -> Implementation:
        return Implementation(_te_norm("RMSNorm", direction))


def _te_norm(name: str, direction: str) -> Function:
    """Its norms are modules: one per parameter set, built on first use and fed our tensors as its parameters."""
    if direction != "fwd":
        raise Unsupported("transformer_engine's backward frees what its forward saved: it cannot be repeated")
    import transformer_engine.pytorch.ops as te_ops

    module_class = getattr(te_ops, name)
    modules: dict[int, Any] = {}

    def call(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        module = modules.get(id(parameters[0]))
        if module is None:
            module = module_class(x.shape[-1], eps=EPS, device=x.device, dtype=x.dtype)
            for key, value in zip(("weight", "bias"), parameters, strict=False):
                module._parameters[key] = value
            modules[id(parameters[0])] = module
        return module(x)

    return call


class Ours(Provider):
    """ampkernels; GEMMs once per accumulation policy."""

    name = "ampkernels"
    modules = ("ampkernels",)
    aliases = ("ours", "ak")

    def implementations(
        self, op: Op, dtype: torch.dtype, direction: str, accumulates: Sequence[str], device: torch.device
    ) -> Iterator[Implementation]:
        import ampkernels as ak

        if op.name == "softmax":
            yield Implementation(lambda x: ak.softmax(x), accumulate="fp32")
        elif op.residual and not op.is_gemm:
            yield Implementation(
                lambda x, r, *w: getattr(ak, op.name)(x, x.shape[-1:], *w, eps=EPS, residual=r), accumulate="fp32"
            )
        elif op.name == "layer_norm":
            yield Implementation(lambda x, w, b: ak.layer_norm(x, x.shape[-1:], w, b, EPS), accumulate="fp32")
        elif op.name == "rms_norm":
            yield Implementation(lambda x, w: ak.rms_norm(x, x.shape[-1:], w, EPS), accumulate="fp32")
        else:
            possible = [a for a in accumulates if not a.startswith("fp16") or dtype is torch.float16]
            if not possible:
                raise Unsupported(f"accumulate {', '.join(accumulates)} needs fp16 inputs")
            for accumulate in possible:
                yield Implementation(self._gemm(ak, op, accumulate), accumulate=accumulate)

    def _gemm(self, ak: Any, op: Op, accumulate: str) -> Function:
        if op.residual:
            return lambda x, r, w, b: ak.linear(x, w, b, residual=r, accumulate=accumulate)
        if op.name == "linear":
            return lambda x, w, b: ak.linear(x, w, b, activation=ACTIVATION, accumulate=accumulate)
        if op.name == "gated_linear":
            return lambda x, w, b: ak.gated_linear(x, w, b, activation=GATE, accumulate=accumulate)
        return lambda x, w1, b1, w2, b2: ak.mlp(x, w1, b1, w2, b2, activation=ACTIVATION, accumulate=accumulate)


class OursMm(Provider):
    """Our plain product, under plain fp32: what an epilogue costs is the rest of the time."""

    name = "ampkernels_mm"
    modules = ("ampkernels",)
    devices = ("cuda",)
    not_quick = True

    def linear(self, dtype: torch.dtype, direction: str) -> Implementation:
        if direction != "fwd":
            raise Unsupported("ampkernels_mm is the plain forward product")
        import ampkernels as ak

        return Implementation(
            lambda x, w, b: ak.linear(x, w, accumulate="fp32"), accumulate="fp32", partial=True, note="plain product"
        )


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Ours(),
        Eager(),
        Compile(),
        Cublas(),
        CublasLt(),
        OursMm(),
        Liger(),
        Quack(),
        QuackMm(),
        Apex(),
        TransformerEngine(),
    )
}


def find_provider(name: str) -> Provider:
    """By name or alias; ValueError that lists the valid ones."""
    for provider in PROVIDERS.values():
        if name == provider.name or name in provider.aliases:
            return provider
    raise ValueError(f"unknown provider {name!r}; valid: {', '.join(PROVIDERS)}")
