"""What every op should return: float64 from the textbook formulas, and how far a correct kernel may be from it.

Each function takes the arguments of its namesake in `functional.py`, widens them to float64 (so it sees the *rounded*
inputs that the kernel saw), and computes with plain tensor operations: autograd through it gives the gradients.
Arguments that only choose a kernel or a rounding (`accumulate`, `out_dtype`) are accepted and ignored. A product of
fp64 numbers is rounded here too: with K terms of 16-bit inputs the oracle is off by about K * 2^-53, which the bounds
below do not feel.

The bounds come from the standard model of rounding: a result of n roundings of unit round-off u is off by at most
gamma(n, u) = n u / (1 - n u), relative to the sum of the absolute values of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .accumulate import FP32, Accumulate

# ---------------------------------------------------------------------------------------------------------- activations


def activation(x: Tensor, name: str | None) -> Tensor:
    """The activations of `ampkernels.ACTIVATIONS`, in x's dtype; value and gradient at +-inf are their limits."""
    if name is None:
        return x
    if name == "sigmoid":
        return torch.sigmoid(x)
    if name == "tanh":
        return torch.tanh(x)
    relu = torch.where((x > 0) | x.isnan(), x, torch.zeros_like(x))
    if name == "relu":
        return relu
    if name == "relu2":
        return relu.square()
    # x times a factor between 0 and 1, which is exactly one of them far out: there no inf * 0 may come up.
    far = x.abs() > 1e3
    near = torch.where(far, torch.zeros_like(x), x)
    if name == "gelu":  # erfc: 1 + erf(x) has no digits left where x is far below 0
        factor = 0.5 * torch.erfc(near * -math.sqrt(0.5))
    elif name == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        factor = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (near + 0.044715 * near**3))
    elif name == "silu":
        factor = torch.sigmoid(near)
    elif name == "quick_gelu":
        factor = torch.sigmoid(1.702 * near)
    else:
        raise ValueError(f"reference: activation must be one of ampkernels.ACTIVATIONS, got {name!r}")
    return torch.where(far, relu, near * factor)


# ------------------------------------------------------------------------------------------------------------ forwards


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    **ignored: Any,
) -> Tensor:
    """`activation(input @ weight.T + bias) + residual`."""
    return _sum(_activation(_affine(input, weight, bias), activation), residual)


def gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu", **ignored: Any
) -> Tensor:
    """`activation(gate) * up`, with `gate, up = (input @ weight.T + bias).chunk(2, -1)`."""
    pre = _affine(input, weight, bias)
    half = weight.shape[0] // 2
    return _activation(pre[..., :half], activation) * pre[..., half:]


def mlp(
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str | None = "gelu",
    residual: Tensor | None = None,
    **ignored: Any,
) -> Tensor:
    """`activation(input @ w1.T + b1) @ w2.T + b2 + residual`."""
    return _sum(_affine(_activation(_affine(input, w1, b1), activation), w2, b2), residual)


def softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    **ignored: Any,
) -> Tensor:
    """`softmax(scale * input + mask)`; 0 in a row of which a mask keeps nothing."""
    x = input.double() * scale
    if x.dim() == 0:
        return softmax(input.reshape(1), 0, scale=scale, mask=mask, causal=causal).reshape(())
    keep = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if causal:
        keep = keep.tril()
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    elif mask is not None:
        x = x + mask.double()
    # A dropped element is replaced before anything is computed, so that its value, NaN or not, has no influence.
    x = torch.where(keep, x, torch.full_like(x, -math.inf))
    top = _top(x, dim)
    if mask is not None:
        top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    e = torch.exp(x - top)
    total = e.sum(dim, keepdim=True)
    if mask is not None:
        total = torch.where(total == 0, torch.ones_like(total), total)
    return e / total


def log_softmax(input: Tensor, dim: int = -1, **ignored: Any) -> Tensor:
    """`x - max - log(sum(exp(x - max)))`."""
    x = input.double()
    if x.dim() == 0:
        return log_softmax(input.reshape(1), 0).reshape(())
    shifted = x - _top(x, dim)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    **ignored: Any,
) -> Any:
    """`(s - mean(s)) / sqrt(var(s) + eps) * weight + bias`, with `s = input + residual`; returns s too if given one."""
    s, dims = _sum(input, residual), _dims(normalized_shape)
    centred = s - s.mean(dims, keepdim=True)
    y = centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    y = y if bias is None else y + bias.double()
    return y if residual is None else (y, s)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    **ignored: Any,
) -> Any:
    """`s / sqrt(mean(s^2) + eps) * (weight + weight_offset)`, with `s = input + residual`, which is returned too."""
    if eps is None:
        eps = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
    s, dims = _sum(input, residual), _dims(normalized_shape)
    y = s / (s.square().mean(dims, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (weight.double() + weight_offset)
    return y if residual is None else (y, s)


_activation = activation  # `activation` is an argument's name below


def _affine(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = input.double() @ weight.double().mT
    return y if bias is None else y + bias.double()


def _top(x: Tensor, dim: int) -> Tensor:
    """The row maxima, a constant shift; rows of no elements have none to take."""
    return x.detach().amax(dim, keepdim=True) if x.shape[dim] else x.detach().sum(dim, keepdim=True)


def _sum(input: Tensor, residual: Tensor | None) -> Tensor:
    return input.double() if residual is None else input.double() + residual.double()


def _dims(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    ndim = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return tuple(range(-ndim, 0))


# -------------------------------------------------------------------------------------------------------------- bounds

UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
_SMALLEST = {dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in UNIT_ROUNDOFF}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that rows and epilogues are computed in: fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gamma(n: float, u: float) -> float:
    """n roundings of unit round-off u: n u / (1 - n u), infinite where the model says nothing any more."""
    return n * u / (1 - n * u) if n * u < 1 else math.inf


def rounding(y: Tensor, dtype: torch.dtype) -> Tensor:
    """|error| of rounding y once to `dtype`: u |y|, and half the spacing of the subnormals."""
    return UNIT_ROUNDOFF[dtype] * y.detach().double().abs() + 0.5 * _SMALLEST[dtype]


def accumulation(length: int, dtype: torch.dtype, policy: Accumulate = FP32) -> float:
    """Relative error of a sum of `length` products of `dtype` numbers, relative to the sum of their absolute values.

    16-bit products are exact in fp32. One step of a tensor core takes 16 k: it truncates the products and the accumulator
    where it aligns them (one unit of 2^-25 of the largest, for each of up to 17 terms) and then rounds the sum to the
    accumulator: below 2^-20 in all for fp32, 2^-10 for fp16. Chunk sums are added in fp32. Without a chunk there is one
    chain, or a library that adds element by element, each product and each sum rounded to nearest, in any order
    (length + 1 roundings): the larger of the two counts.
    """
    if dtype == torch.float64:
        return gamma(length + 2, UNIT_ROUNDOFF[dtype])
    step = 2.0**-10 if policy.dtype == torch.float16 else 2.0**-20
    chunk = max(1, min(policy.chunk or length, length))
    chained = gamma(math.ceil(chunk / 16) + 1, step) + gamma(math.ceil(length / chunk), 2.0**-24)
    return chained if policy.chunk else max(chained, gamma(length + 2, 2.0**-24))


# Largest slopes |activation'| and, for the composed functions, a bound of the roundings inside them: exp, erf, tanh and
# division of the host and the device libraries are each within 4 units in the last place.
_SLOPE: dict[str | None, float] = {
    None: 1.0,
    "relu": 1.0,
    "gelu": 1.13,
    "gelu_tanh": 1.13,
    "silu": 1.1,
    "sigmoid": 0.25,
    "tanh": 1.0,
    "quick_gelu": 1.1,
}
_INNER_ROUNDINGS = 24
# What the shorter forms of csrc/include/ampkernels/activation16.h may add, for a result of 16 bits: of a value; of a
# derivative, times its magnitude or 0.1.
ACTIVATION16 = 2.0**-14.2


def linear_bound(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = FP32,
) -> Tensor:
    """Elementwise bound on |linear - reference.linear|.

    |pre error| <= accumulation(K) * (|input| @ |weight|.T) + 2 u |pre|, times the activation's slope, plus the
    roundings inside the activation (its longer form if a residual follows) and of the addition, plus one rounding of the
    result. Where the residual cancels the rest, what is left is the error before it, which is absolute.
    """
    with torch.no_grad():
        compute = compute_dtype(input.dtype)
        out = out_dtype or (input.dtype if residual is None else residual.dtype)
        pre, pre_error = _pre(input, weight, bias, accumulate)
        y = _activation(pre, activation)
        slope = 2 * (pre.abs() + pre_error) if activation == "relu2" else _SLOPE[activation]
        error = pre_error * slope + _inner_error(activation, pre, y, compute, out if residual is None else compute)
        if residual is not None:
            y = y + residual.detach().double()
            error = error + UNIT_ROUNDOFF[compute] * (y.abs() + error)
        return error + rounding(y.abs() + error, out)


def gated_linear_bound(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    out_dtype: torch.dtype | None = None,
    accumulate: Accumulate = FP32,
) -> Tensor:
    """Elementwise bound on |gated_linear - reference.gated_linear|: the two errors, each times the other factor."""
    with torch.no_grad():
        pre, pre_error = _pre(input, weight, bias, accumulate)
        half = weight.shape[0] // 2
        gate, up = pre[..., :half], pre[..., half:]
        gate_error, up_error = pre_error[..., :half], pre_error[..., half:]
        u = UNIT_ROUNDOFF[compute_dtype(input.dtype)]
        act = _activation(gate, activation)
        slope = 2 * (gate.abs() + gate_error) if activation == "relu2" else _SLOPE[activation]
        act_error = gate_error * slope + _inner_error(
            activation, gate, act, compute_dtype(input.dtype), out_dtype or input.dtype
        )
        error = act_error * (up.abs() + up_error) + act.abs() * up_error + u * (act * up).abs()
        return error + rounding((act * up).abs() + error, out_dtype or input.dtype)


def _inner_error(
    activation: str | None, pre: Tensor, y: Tensor, compute: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """Of y = activation(pre), of an exact `pre`, before y is rounded to `out_dtype`."""
    if activation in (None, "relu"):
        return torch.zeros_like(y)
    short = ACTIVATION16 if out_dtype.itemsize == 2 and activation != "relu2" else 0.0
    return gamma(_INNER_ROUNDINGS, UNIT_ROUNDOFF[compute]) * (pre.abs() + 1) + short * y.abs()


def _pre(input: Tensor, weight: Tensor, bias: Tensor | None, policy: Accumulate) -> tuple[Tensor, Tensor]:
    pre = _affine(input.detach(), weight.detach(), None if bias is None else bias.detach())
    terms = input.detach().double().abs() @ weight.detach().double().abs().mT
    u = UNIT_ROUNDOFF[compute_dtype(input.dtype)]
    error = accumulation(input.shape[-1], input.dtype, policy) * terms + 2 * u * pre.abs()
    return (pre, error) if bias is None else (pre, error + 2 * u * bias.detach().double().abs())


def product_bound(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, *, rounded: float = 0.0, policy: Accumulate = FP32
) -> Tensor:
    """Elementwise bound for a @ b, of 16-bit or wider operands: what dinput = dpre @ W and dweight = dpre.T @ x are.

    `rounded`: relative error that the operands arrive with (dpre is rounded to the dtype computed in, and so is the
    saved pre-activation that it comes from).
    """
    with torch.no_grad():
        terms = a.double().abs() @ b.double().abs()
        error = (accumulation(a.shape[-1], a.dtype, policy) + rounded) * terms
        return error + rounding(a.double() @ b.double(), out_dtype) + UNIT_ROUNDOFF[out_dtype] * error


def softmax_bound(y: Tensor, dtype: torch.dtype, out_dtype: torch.dtype, *, length: int, spread: float = 0.0) -> Tensor:
    """Elementwise bound for softmax from its exact value y.

    The argument of exp is off by a few units of its size (`spread`: the largest |scale * x + mask| that counts), exp by
    4, the sum of positives by gamma(length) at worst and a division and a rounding at the end.
    """
    u = UNIT_ROUNDOFF[compute_dtype(dtype)]
    y = y.detach().double().abs()
    # An exp below the smallest normal number may be flushed to 0.
    flush = torch.finfo(compute_dtype(dtype)).smallest_normal
    return (gamma(length + 16, u) + 8 * u * spread) * y + rounding(y, out_dtype) + flush


def log_softmax_bound(y: Tensor, dtype: torch.dtype, out_dtype: torch.dtype, *, length: int, spread: float) -> Tensor:
    """Elementwise bound for log_softmax: errors of x - max, of the sum (relative) and of the last subtraction."""
    u = UNIT_ROUNDOFF[compute_dtype(dtype)]
    y = y.detach().double().abs()
    return gamma(length + 16, u) + 8 * u * (spread + y) + rounding(y, out_dtype)


def norm_bound(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    rms: bool = False,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Elementwise bound for layer_norm and rms_norm with two-pass statistics in the compute type.

    With h = (s - mean) / sqrt(var + eps): s and mean are off by gamma(n) of mean(|s|), so s - mean is off by that much
    however small it is itself (rows with mean >> std lose digits in *any* fp32 arithmetic: the input's own resolution);
    var is off by twice that, relative to its size, plus gamma(n); the affine step adds a few units.
    """
    with torch.no_grad():
        u = UNIT_ROUNDOFF[compute_dtype(input.dtype)]
        s, dims = _sum(input.detach(), None if residual is None else residual.detach()), _dims(normalized_shape)
        n = math.prod(s.shape[d] for d in dims)
        mean = torch.zeros_like(s[..., :1]) if rms else s.mean(dims, keepdim=True)
        size = s.abs().mean(dims, keepdim=True)
        absolute = 2 * u * s.abs() + (0.0 if rms else gamma(n + 2, u) * size)
        centred = s - mean
        rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
        h = centred * rstd
        h_error = absolute * rstd
        of_variance = (h_error * h.abs() + h_error.square()).mean(dims, keepdim=True)
        relative = gamma(n + 8, u) + of_variance
        h_error = h_error + relative * (h.abs() + h_error)
        scale = 1.0 if weight is None else (weight.detach().double() + weight_offset).abs()
        shift = 0.0 if bias is None else bias.detach().double().abs()
        error = h_error * scale + 4 * u * (h.abs() * scale + shift)
        signed = h if weight is None else h * (weight.detach().double() + weight_offset)
        y = (signed if bias is None else signed + bias.detach().double()).abs()
        return error + rounding(y + error, out_dtype or input.dtype)


def bound(op: str, dtype: torch.dtype, length: int, policy: Accumulate = FP32) -> float:
    """A relative error that `op` stays within on well-scaled data: for tables, and for tests that need one number.

    GEMMs: relative to sum |a| |b|; rows: relative to the row's largest value. `length` is the length of the reduction.
    """
    u = UNIT_ROUNDOFF[dtype]
    if op in ("linear", "gated_linear", "mlp"):
        return u + accumulation(length, dtype, policy)
    return u + gamma(length + 16, UNIT_ROUNDOFF[compute_dtype(dtype)])
