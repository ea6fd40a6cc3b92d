"""The operations that are measured: their inputs, their float64 oracle, and the work that a call must do at least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import oracle

Tensors = tuple[torch.Tensor, ...]
DIRECTIONS = ("fwd", "bwd")
LAYOUTS = ("contiguous", "misaligned", "strided")


@dataclass(frozen=True)
class Op:
    """One operation. `shape` below is always a tuple in the order of `axes`.

    Attributes:
        make: Random inputs of a shape; the first one holds the rows (M of them), the rest are shared by all rows.
        oracle: The same operation in float64.
        flops: Multiply-adds of the forward, counted twice, in GEMMs only; a backward does twice that.
        traffic: Elements that a forward, and a backward, must move: each input read once, each output written once.
        terms: Length of the sums that the forward accumulates.
        roundings: Times an unfused forward, and its backward, rounds to the storage dtype on the way to a result.
        residual: A residual is the second input: of a norm of x + residual, which returns the sum, too, or of a linear
            that adds it to its result. The forward alone is measured.
    """

    name: str
    axes: tuple[str, ...]
    setting: str
    make: Callable[[Sequence[int], torch.Generator], Tensors]
    oracle: Callable[..., torch.Tensor | Tensors]
    flops: Callable[[Sequence[int]], int]
    traffic: Callable[[Sequence[int], str], int]
    terms: Callable[[Sequence[int]], int]
    roundings: tuple[int, int]
    residual: bool = False

    @property
    def is_gemm(self) -> bool:
        return "K" in self.axes

    def work(self, shape: Sequence[int], direction: str) -> int:
        """Floating-point operations of a call (GEMMs only)."""
        return self.flops(shape) * (1 if direction == "fwd" else 2)

    def bytes(self, shape: Sequence[int], dtype: torch.dtype, direction: str) -> int:
        """Bytes that a call must move between the device and its memory."""
        return self.traffic(shape, direction) * dtype.itemsize

    def inputs(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensors:
        """Random normal inputs, rounded to `dtype`; drawn on the device, reproducible from the seed there."""
        generator = torch.Generator(device).manual_seed(seed)
        return tuple(t.to(dtype) for t in self.make(shape, generator))

    def parse(self, text: str) -> tuple[int, ...]:
        """`8192x14336x4096` -> (8192, 14336, 4096); ValueError if it is not a shape of this operation."""
        parts = text.lower().split("x")
        if len(parts) != len(self.axes) or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise ValueError(f"{self.name}: a shape is {'x'.join(self.axes)} with positive integers, got {text!r}")
        return tuple(int(p) for p in parts)


def shape_name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def place(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of a matrix in a layout of `LAYOUTS`: one element off an aligned base, or rows 8 elements further apart."""
    rows, cols = tensor.shape
    if layout == "misaligned":
        return tensor.new_empty(rows * cols + 1)[1:].view(rows, cols).copy_(tensor)
    if layout == "strided":
        return tensor.new_empty(rows, cols + 8)[:, :cols].copy_(tensor)
    return tensor.clone()


def _randn(*size: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=generator, device=generator.device).mul_(scale)


def _linear_inputs(shape: Sequence[int], g: torch.Generator) -> Tensors:
    m, n, k = shape
    return (
        _randn(m, k, generator=g),
        _randn(n, k, generator=g, scale=1 / math.sqrt(k)),
        _randn(n, generator=g),
    )


def _linear_residual_inputs(shape: Sequence[int], g: torch.Generator) -> Tensors:
    x, w, b = _linear_inputs(shape, g)
    return x, _randn(*shape[:2], generator=g), w, b


def _mlp_inputs(shape: Sequence[int], g: torch.Generator) -> Tensors:
    m, h, k = shape
    return (
        _randn(m, k, generator=g),
        _randn(h, k, generator=g, scale=1 / math.sqrt(k)),
        _randn(h, generator=g),
        _randn(k, h, generator=g, scale=1 / math.sqrt(h)),
        _randn(k, generator=g),
    )


def _row_inputs(parameters: int, matrices: int = 1) -> Callable[[Sequence[int], torch.Generator], Tensors]:
    def make(shape: Sequence[int], g: torch.Generator) -> Tensors:
        m, n = shape
        operands = [_randn(m, n, generator=g) for _ in range(matrices)]
        return (*operands, *(_randn(n, generator=g) for _ in range(parameters)))

    return make


def _linear_traffic(shape: Sequence[int], direction: str) -> int:
    m, n, k = shape
    if direction == "fwd":
        return m * k + n * k + n + m * n
    return 2 * m * n + 2 * m * k + 2 * n * k + n  # dy, saved, x, w read; dx, dw, db written


def _gated_traffic(shape: Sequence[int], direction: str) -> int:
    m, n, k = shape
    if direction == "fwd":
        return m * k + n * k + n + m * n // 2
    return m * n // 2 + m * n + 2 * m * k + 2 * n * k + n


def _mlp_traffic(shape: Sequence[int], direction: str) -> int:
    m, h, k = shape
    if direction == "fwd":
        return 2 * m * k + 2 * h * k + h + k
    return 3 * m * k + m * h + 4 * h * k + h + k  # x, dy, saved h, both weights; dx and all parameter gradients


def _row_traffic(parameters: int, matrices: int = 1) -> Callable[[Sequence[int], str], int]:
    def traffic(shape: Sequence[int], direction: str) -> int:
        m, n = shape
        if direction == "fwd":
            return 2 * matrices * m * n + parameters * n
        return 3 * m * n + (1 + parameters) * n * bool(parameters)

    return traffic


def _gemm_flops(shape: Sequence[int]) -> int:
    m, n, k = shape
    return 2 * m * n * k


def _mlp_flops(shape: Sequence[int]) -> int:
    m, h, k = shape
    return 4 * m * h * k


ACTIVATION = "gelu_tanh"  # of linear and mlp: the one that cuBLASLt has as an epilogue
GATE = "silu"  # of gated_linear: SwiGLU
EPS = 1e-5

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "linear",
            ("M", "N", "K"),
            f"bias, {ACTIVATION}",
            _linear_inputs,
            lambda x, w, b: oracle.linear(x, w, b, ACTIVATION),
            _gemm_flops,
            _linear_traffic,
            lambda s: s[2],
            (2, 3),
        ),
        Op(
            "gated_linear",
            ("M", "N", "K"),
            f"bias, {GATE}, N = 2F",
            _linear_inputs,
            lambda x, w, b: oracle.gated_linear(x, w, b, GATE),
            _gemm_flops,
            _gated_traffic,
            lambda s: s[2],
            (4, 5),
        ),
        Op(
            "mlp",
            ("M", "H", "K"),
            f"biases, {ACTIVATION}",
            _mlp_inputs,
            lambda x, w1, b1, w2, b2: oracle.mlp(x, w1, b1, w2, b2, ACTIVATION),
            _mlp_flops,
            _mlp_traffic,
            lambda s: max(s[1], s[2]),
            (3, 5),
        ),
        Op(
            "softmax",
            ("M", "N"),
            "last dimension",
            _row_inputs(0),
            oracle.softmax,
            lambda s: 0,
            _row_traffic(0),
            lambda s: s[1],
            (2, 3),
        ),
        Op(
            "layer_norm",
            ("M", "N"),
            "weight, bias",
            _row_inputs(2),
            lambda x, w, b: oracle.layer_norm(x, w, b, EPS),
            lambda s: 0,
            _row_traffic(2),
            lambda s: s[1],
            (3, 4),
        ),
        Op(
            "rms_norm",
            ("M", "N"),
            "weight",
            _row_inputs(1),
            lambda x, w: oracle.rms_norm(x, w, EPS),
            lambda s: 0,
            _row_traffic(1),
            lambda s: s[1],
            (3, 4),
        ),
    )
}


def variant(op: str, setting: str) -> str:
    """What a row's setting says beyond its operation's own: a layout or a residual. Empty for most rows."""
    return "" if op not in OPS or setting in ("", OPS[op].setting) else setting


# The same norms of x + residual; linear without an activation, as the last of a block has none, plus a residual.
RESIDUAL: dict[str, Op] = {
    "linear": replace(
        OPS["linear"],
        setting="bias, residual",
        make=_linear_residual_inputs,
        oracle=lambda x, r, w, b: oracle.linear(x, w, b, None, residual=r),
        traffic=lambda shape, direction: _linear_traffic(shape, direction) + shape[0] * shape[1],
        residual=True,
    ),
    "layer_norm": replace(
        OPS["layer_norm"],
        setting="weight, bias, residual",
        make=_row_inputs(2, matrices=2),
        oracle=lambda x, r, w, b: oracle.layer_norm(x, w, b, EPS, residual=r),
        traffic=_row_traffic(2, matrices=2),
        residual=True,
    ),
    "rms_norm": replace(
        OPS["rms_norm"],
        setting="weight, residual",
        make=_row_inputs(1, matrices=2),
        oracle=lambda x, r, w: oracle.rms_norm(x, w, EPS, residual=r),
        traffic=_row_traffic(1, matrices=2),
        residual=True,
    ),
}
