"""The public operations: `torch.nn.functional`'s names and argument order, then ours, keyword-only.

Every check of an argument is here, before anything is launched, with one form of message:
`linear: weight must have shape (out, in) with in = 768, got (3072, 512)`. TypeError for what an argument is (type,
dtype, layout), ValueError for its value (shape, device, range, name).

Where nothing needs a gradient the autograd Function is skipped: it costs more than the checks and the launch together.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops, autocast
from .accumulate import Accumulate, resolve
from .autograd.linear import (
    GATED_LINEAR,
    LINEAR,
    LINEAR_RESIDUAL,
    MLP,
    MLP_RESIDUAL,
    gated_linear_forward,
    linear_forward,
    mlp_forward,
)
from .autograd.norm import LAYER_NORM, RMS_NORM
from .autograd.softmax import LOG_SOFTMAX, SOFTMAX

OutDtype = torch.dtype | Literal["autocast"] | None

# ---------------------------------------------------------------------------------------------------------------- GEMM


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    accumulate: Accumulate | str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`y = activation(input @ weight.T + bias) + residual` in one kernel.

    Args:
        input: `(…, in)`, any rank from 1, fp16, bf16, fp32 or fp64.
        weight: `(out, in)`, of input's dtype; under autocast both are cast to its dtype (float64 never is).
        bias: `(out,)`, of any of the four dtypes; it is never cast.
        activation: one of `ampkernels.ACTIVATIONS`; "gelu" is the erf form.
        residual: `(…, out)`, of any dtype (float64 with float64 only) and any strides; it is never cast.
        accumulate: an `Accumulate`, or "fp32", "fp32/512", …; None takes the policy in force.
        out_dtype: dtype of the result; None is the residual's if there is one, else the dtype computed in.

    Returns:
        `(…, out)`.

    Rounding points: products are exact; sums as `accumulate` says; bias, activation and residual in fp32, in that order;
    y rounded once. Where backward needs it, the pre-activation is rounded to the dtype computed in. Backward: dy *
    activation' in fp32, rounded once to that dtype; dinput and dweight each rounded once, from the accumulators, to
    input's and weight's dtype; dbias from the unrounded fp32 products in a fixed order; dresidual is dy, rounded once to
    residual's dtype where y has another.

    `weight.main_grad`: if the weight has this attribute, a contiguous fp32 tensor of its shape, backward adds dweight to
    it (the sums as `accumulate` says, then one fp32 addition, nothing rounded to 16 bits) and gives `weight.grad`
    nothing. The same for `gated_linear` and for both weights of `mlp`.

    Raises:
        TypeError: for a dtype that is not one of the four, or weight and input differing outside autocast, or a
            `main_grad` that is not fp32 (fp64 for fp64 weights), or a residual that is float64 where input is not.
        ValueError: for shapes that do not fit, devices that differ or are neither CPU nor CUDA, an unknown activation,
            or fp16 accumulators with inputs that are not fp16.
        NotImplementedError: for a policy other than fp32 with fp32 or fp64 inputs, whose products are a library's.
    """
    device = _check_tensors("linear", ("input", "weight", "bias"), (input, weight, bias))
    _check_affine("linear", "in", _inner("linear", input), "weight", "out", weight, "bias", bias)
    dtype = autocast.gemm_dtype(device, input.dtype, weight.dtype) or _refuse_mix("linear", input, weight=weight)
    number = _activation("linear", activation)
    policy = resolve("linear", accumulate, dtype)
    if residual is not None:
        _check_added("linear", residual, input, weight.shape[0])
        if out_dtype is None:
            out_dtype = residual.dtype
    out = _ops.DTYPE[dtype if out_dtype is None else _out_dtype("linear", out_dtype)]
    arguments = (input, weight, bias, number, _ops.DTYPE[policy.dtype], policy.chunk or 0, dtype, out)
    if residual is None:
        if _needs_grad(input, weight, bias):
            return LINEAR[device].apply(*arguments)  # type: ignore[no-any-return]
        return linear_forward(*arguments)
    if _needs_grad(input, weight, bias, residual):
        return LINEAR_RESIDUAL[device].apply(*arguments, residual)  # type: ignore[no-any-return]
    return linear_forward(*arguments, residual)


def gated_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    accumulate: Accumulate | str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`y = activation(gate) * up`, with `gate, up = (input @ weight.T + bias).chunk(2, -1)`, in one kernel.

    "silu" is SwiGLU, "gelu" and "gelu_tanh" GEGLU, "relu" ReGLU, "sigmoid" GLU, None the bilinear product.

    Args:
        input: `(…, in)`.
        weight: `(2 F, in)`: rows [0, F) make the gate, rows [F, 2 F) up.
        bias: `(2 F,)`.
        activation, accumulate, out_dtype: as for `linear`, which also lists the dtypes.

    Returns:
        `(…, F)`.

    Rounding points and errors: as for `linear`. Gate, up and their product are fp32, y is rounded once; backward keeps
    gate and up, rounded to the dtype computed in.
    """
    device = _check_tensors("gated_linear", ("input", "weight", "bias"), (input, weight, bias))
    _check_affine("gated_linear", "in", _inner("gated_linear", input), "weight", "2 F", weight, "bias", bias)
    if weight.shape[0] % 2:
        raise ValueError(f"gated_linear: weight must have shape (2 F, in) with an even 2 F, got {_shape(weight)}")
    dtype = autocast.gemm_dtype(device, input.dtype, weight.dtype) or _refuse_mix("gated_linear", input, weight=weight)
    number = _activation("gated_linear", activation)
    policy = resolve("gated_linear", accumulate, dtype)
    out = _ops.DTYPE[dtype if out_dtype is None else _out_dtype("gated_linear", out_dtype)]
    arguments = (input, weight, bias, number, _ops.DTYPE[policy.dtype], policy.chunk or 0, dtype, out)
    if _needs_grad(input, weight, bias):
        return GATED_LINEAR[device].apply(*arguments)  # type: ignore[no-any-return]
    return gated_linear_forward(*arguments)


def mlp(
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str | None = "gelu",
    residual: Tensor | None = None,
    accumulate: Accumulate | str | None = None,
) -> Tensor:
    """`y = activation(input @ w1.T + b1) @ w2.T + b2 + residual`; the fused backward keeps one hidden tensor, not two.

    Args:
        input: `(…, in)`.
        w1: `(hidden, in)`; w2: `(out, hidden)`: of input's dtype, or cast by autocast, as in `linear`.
        b1: `(hidden,)` or None; b2: `(out,)` or None: any of the four dtypes.
        activation, accumulate: as for `linear`.
        residual: `(…, out)`, as for `linear`: the second of the two adds it.

    Returns:
        `(…, out)`, of the residual's dtype if there is one, else of the dtype computed in.

    Rounding points: those of two `linear` calls; the hidden activations are rounded once to the dtype computed in.
    Backward makes them again from the saved pre-activation, in the epilogue of the GEMM that makes its gradient; from
    that saved (rounded) value, they are the activation of it, rounded once. A dy of another dtype than the one computed
    in, which a residual brings, is rounded once to it for the GEMMs, not for b2's gradient. Errors as for `linear`.
    """
    device = _check_tensors("mlp", ("input", "w1", "b1", "w2", "b2"), (input, w1, b1, w2, b2))
    _check_affine("mlp", "in", _inner("mlp", input), "w1", "hidden", w1, "b1", b1)
    _check_affine("mlp", "hidden", w1.shape[0], "w2", "out", w2, "b2", b2)
    dtype = autocast.gemm_dtype(device, input.dtype, w1.dtype, w2.dtype) or _refuse_mix("mlp", input, w1=w1, w2=w2)
    number = _activation("mlp", activation)
    policy = resolve("mlp", accumulate, dtype)
    arguments = (input, w1, b1, w2, b2, number, _ops.DTYPE[policy.dtype], policy.chunk or 0, dtype)
    if residual is None:
        if _needs_grad(input, w1, b1, w2, b2):
            return MLP[device].apply(*arguments)  # type: ignore[no-any-return]
        return mlp_forward(*arguments)
    _check_added("mlp", residual, input, w2.shape[0])
    if _needs_grad(input, w1, b1, w2, b2, residual):
        return MLP_RESIDUAL[device].apply(*arguments, residual)  # type: ignore[no-any-return]
    return mlp_forward(*arguments, residual)


# ---------------------------------------------------------------------------------------------------------------- rows


def softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    out_dtype: OutDtype = None,
) -> Tensor:
    """`softmax(scale * input + mask)` along `dim`.

    Args:
        input: any shape, fp16, bf16, fp32 or fp64.
        dim: the dimension that sums to 1.
        scale: multiplies the input, before the mask.
        mask: broadcasts to input's shape. bool: True keeps, and what False drops is never read, NaN or not. Floating,
            any of the four dtypes: added in fp32; it may need a gradient.
        causal: query i of `input.shape[-2]` keeps columns 0 … i (top-left aligned); `dim` must be the last.
        out_dtype: dtype of the result. None: input's, and under autocast eager's (float32 on CUDA). "autocast": the
            autocast dtype inside autocast, input's outside.

    Returns:
        Input's shape. With a mask, a row with nothing kept is 0 and has gradient 0; without one, a row of -inf is NaN,
        as in torch.

    Rounding points: fp32 inside (fp64 for fp64), y rounded once; in fp32 an exponential
    below 2^-126 of the row's largest may become 0. Backward reads y as it was rounded; dinput rounded
    once to input's dtype; a floating mask's gradient is summed in fp32 and rounded once to the mask's.

    Raises:
        TypeError: for dtypes outside the above.
        ValueError: for a `dim` out of range, a mask that does not broadcast, causal along another dimension.
    """
    device = _check_tensors("softmax", ("input",), (input,))
    dim = _dim("softmax", input, dim)
    if type(scale) is not float:
        scale = _number("softmax", "scale", scale)
    if mask is not None:
        _check_mask(mask, input)
    if causal and (input.dim() < 2 or dim != input.dim() - 1):
        raise ValueError(
            "softmax: causal must be used along the last of at least 2 dimensions, "
            f"got dim {dim} of an input of shape {_shape(input)}"
        )
    out = _ops.DTYPE[_rows_dtype("softmax", device, input, out_dtype)]
    if _needs_grad(input, mask):
        return SOFTMAX[device].apply(input, mask, dim, scale, causal, False, out)  # type: ignore[no-any-return]
    return _ops.softmax_fwd(input, dim, scale, mask, causal, False, out)


def log_softmax(input: Tensor, dim: int = -1, *, out_dtype: OutDtype = None) -> Tensor:
    """`log(softmax(input))` along `dim`: `x - max - log(sum(exp(x - max)))`.

    Args:
        input, dim, out_dtype: as for `softmax`.

    Rounding points: fp32 inside (fp64 for fp64), y rounded once; backward reads y as it was rounded; dinput rounded
    once to input's dtype. Errors as for `softmax`.
    """
    device = _check_tensors("log_softmax", ("input",), (input,))
    dim = _dim("log_softmax", input, dim)
    out = _ops.DTYPE[_rows_dtype("log_softmax", device, input, out_dtype)]
    if _needs_grad(input):
        return LOG_SOFTMAX[device].apply(input, None, dim, 1.0, False, True, out)  # type: ignore[no-any-return]
    return _ops.softmax_fwd(input, dim, 1.0, None, False, True, out)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    out_dtype: OutDtype = None,
) -> Any:
    """`(s - mean(s)) / sqrt(var(s) + eps) * weight + bias`, with `s = input + residual`, over the last dimensions.

    Args:
        input: `(…, *normalized_shape)`, fp16, bf16, fp32 or fp64.
        normalized_shape: the last dimensions, as an int or a sequence.
        weight, bias: of shape normalized_shape, any of the four dtypes, whatever input's.
        eps: at least 0; it is used in fp32, inside the root.
        residual: of input's shape and any dtype (float64 with float64 only); see Returns.
        out_dtype: dtype of the normalised result; as for `softmax`.

    Returns:
        The normalised tensor; with a residual `(normalised, s)`, where s is rounded once, to residual's dtype. What is
        normalised is the sum before that rounding.

    Rounding points: s, mean and variance (two passes over the row) and the affine step in fp32 (fp64 for fp64), y
    rounded once. Backward reads the input, or s as it was rounded, and fp32 statistics; dinput is rounded once to
    input's dtype; dweight and dbias are fp32 sums in a fixed order, rounded once to the parameters' dtypes.

    Raises:
        TypeError: for dtypes outside the above.
        ValueError: for shapes or devices that do not fit, or a negative or NaN eps.
    """
    device = _check_tensors("layer_norm", ("input", "weight", "bias", "residual"), (input, weight, bias, residual))
    ndim = _normalized_ndim("layer_norm", input, normalized_shape, weight, bias)
    if residual is not None:
        _check_residual("layer_norm", residual, input)
    eps = _eps("layer_norm", eps)
    out = _ops.DTYPE[_rows_dtype("layer_norm", device, input, out_dtype)]
    if _needs_grad(input, weight, bias, residual):
        return LAYER_NORM[device].apply(input, residual, weight, bias, ndim, eps, out)
    output, total, _, _ = _ops.layer_norm_fwd(input, ndim, weight, bias, eps, residual, out, False)
    return output if residual is None else (output, total)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    out_dtype: OutDtype = None,
) -> Any:
    """`s / sqrt(mean(s^2) + eps) * (weight + weight_offset)`, with `s = input + residual`, over the last dimensions.

    Args:
        input, normalized_shape, weight, residual, out_dtype: as for `layer_norm`.
        eps: at least 0. None: torch's rule, the machine epsilon of the type computed in: `finfo(torch.float32).eps` for
            16-bit and fp32 inputs, `finfo(torch.float64).eps` for fp64.
        weight_offset: added to the weight in fp32 (1.0 for Gemma's zero-centred weights).

    Returns, rounding points, errors: as for `layer_norm`.
    """
    device = _check_tensors("rms_norm", ("input", "weight", "residual"), (input, weight, residual))
    ndim = _normalized_ndim("rms_norm", input, normalized_shape, weight, None)
    if residual is not None:
        _check_residual("rms_norm", residual, input)
    eps = _EPSILON[input.dtype] if eps is None else _eps("rms_norm", eps)
    if type(weight_offset) is not float:
        weight_offset = _number("rms_norm", "weight_offset", weight_offset)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"rms_norm: weight_offset must be 0 without a weight, got {weight_offset}")
    out = _ops.DTYPE[_rows_dtype("rms_norm", device, input, out_dtype)]
    if _needs_grad(input, weight, residual):
        return RMS_NORM[device].apply(input, residual, weight, ndim, eps, weight_offset, out)
    output, total, _ = _ops.rms_norm_fwd(input, ndim, weight, eps, weight_offset, residual, out, False)
    return output if residual is None else (output, total)


# -------------------------------------------------------------------------------------------------------------- checks

_FLOATING = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_FLOATING_TEXT = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
_DEVICES = frozenset(("cpu", "cuda", "meta"))
_STRIDED = torch.strided
_EPSILON = {dtype: torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps for dtype in _FLOATING}


def _needs_grad(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    # Forward-mode AD has no formula here: the Function says so, where the plain operator would drop tangents in
    # silence.
    return forward_ad._current_level >= 0


def _check_tensors(op: str, names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> str:
    """One quick pass over the tensors that an op reads as numbers; returns their device type (cpu, cuda or meta)."""
    try:
        input: Tensor = tensors[0]  # type: ignore[assignment]
        device = input.device
        for tensor in tensors:
            if tensor is not None and (
                tensor.dtype not in _FLOATING or tensor.device != device or tensor.layout is not _STRIDED
            ):
                break
        else:
            if input.is_cuda:  # `device.type` makes a str at every call
                return "cuda"
            if input.is_cpu:
                return "cpu"
            device_type = device.type
            if device_type in _DEVICES:
                return device_type
    except AttributeError:
        pass
    raise _tensor_error(op, names, tensors)


def _tensor_error(op: str, names: tuple[str, ...], tensors: tuple[Any, ...]) -> Exception:
    """What `_check_tensors` did not like."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None and name != "input":
            continue
        if not isinstance(tensor, Tensor):
            return TypeError(f"{op}: {name} must be a torch.Tensor, got {_typename(tensor)}")
        if tensor.dtype not in _FLOATING:
            return TypeError(f"{op}: {name} must have dtype {_FLOATING_TEXT}, got {tensor.dtype}")
        if tensor.layout is not _STRIDED:
            return TypeError(f"{op}: {name} must be a dense tensor (layout torch.strided), got layout {tensor.layout}")
        if tensor.device.type not in _DEVICES:
            return ValueError(f"{op}: {name} must be on a cpu or cuda device, got {tensor.device}")
        if tensor.device != tensors[0].device:
            return ValueError(f"{op}: {name} must be on input's device {tensors[0].device}, got {tensor.device}")
    raise AssertionError(f"{op}: tensors are as they should be")


def _inner(op: str, input: Tensor) -> int:
    shape = input.shape
    if not shape:
        raise ValueError(f"{op}: input must have at least 1 dimension, got shape ()")
    return shape[-1]


def _check_affine(
    op: str, inner: str, k: int, weight_name: str, outer: str, weight: Tensor, bias_name: str, bias: Tensor | None
) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{op}: {weight_name} must be a torch.Tensor, got {_typename(weight)}")
    shape = weight.shape
    if len(shape) != 2 or shape[1] != k:
        raise ValueError(
            f"{op}: {weight_name} must have shape ({outer}, {inner}) with {inner} = {k}, got {_shape(weight)}"
        )
    if getattr(weight, "main_grad", None) is not None:
        _check_main_grad(op, weight_name, weight)
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != shape[0]):
        raise ValueError(f"{op}: {bias_name} must have shape ({outer},) with {outer} = {shape[0]}, got {_shape(bias)}")


def _check_main_grad(op: str, name: str, weight: Tensor) -> None:
    grad = weight.main_grad  # type: ignore[attr-defined]
    fp64 = weight.dtype == torch.float64
    if not isinstance(grad, Tensor) or grad.dtype != (torch.float64 if fp64 else torch.float32):
        wanted = "float64" if fp64 else "float32"
        found = grad.dtype if isinstance(grad, Tensor) else _typename(grad)
        raise TypeError(f"{op}: {name}.main_grad must be a {wanted} tensor, got {found}")
    if grad.shape != weight.shape or not grad.is_contiguous() or grad.device != weight.device or grad.requires_grad:
        raise ValueError(
            f"{op}: {name}.main_grad must be contiguous, of shape {_shape(weight)} on {weight.device}, without "
            f"requires_grad, got {_shape(grad)} with strides {grad.stride()} on {grad.device}"
        )
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{op}: {name}.main_grad is not supported under torch.compile")


def _refuse_mix(op: str, input: Tensor, **weights: Tensor) -> NoReturn:
    name, weight = next((name, weight) for name, weight in weights.items() if weight.dtype != input.dtype)
    raise TypeError(
        f"{op}: {name} must have input's dtype {input.dtype} outside autocast (which never casts float64), "
        f"got {weight.dtype}"
    )


def _activation(op: str, activation: str | None) -> int:
    try:
        return _ops.ACTIVATION_NUMBERS[activation]
    except (KeyError, TypeError):
        pass
    names = ", ".join(map(repr, _ops.ACTIVATIONS))
    raise ValueError(f"{op}: activation must be one of {names}, got {activation!r}")


def _out_dtype(op: str, out_dtype: torch.dtype) -> torch.dtype:
    if out_dtype not in _FLOATING:
        raise TypeError(f"{op}: out_dtype must be {_FLOATING_TEXT}, got {out_dtype!r}")
    return out_dtype


def _check_rows_dtype(op: str, out_dtype: OutDtype) -> OutDtype:
    if out_dtype is not None and out_dtype != "autocast" and out_dtype not in _FLOATING:
        raise TypeError(f"{op}: out_dtype must be {_FLOATING_TEXT}, or 'autocast', got {out_dtype!r}")
    return out_dtype


def _rows_dtype(op: str, device: str, input: Tensor, out_dtype: OutDtype) -> torch.dtype:
    return autocast.rows_dtype(op, device, input.dtype, _check_rows_dtype(op, out_dtype))


def _dim(op: str, input: Tensor, dim: int) -> int:
    """`dim` counted from the front; a tensor without dimensions has one, of size 1."""
    ndim = input.dim() or 1
    if type(dim) is not int:
        try:
            dim = operator.index(dim)
        except TypeError:
            raise TypeError(f"{op}: dim must be an int, got {_typename(dim)}") from None
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: dim must be in [{-ndim}, {ndim - 1}] for input of shape {_shape(input)}, got {dim}")
    return dim % ndim


def _check_mask(mask: Tensor, input: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"softmax: mask must be a torch.Tensor, got {_typename(mask)}")
    if mask.dtype != torch.bool and mask.dtype not in _FLOATING:
        raise TypeError(f"softmax: mask must have dtype torch.bool (True = keep) or {_FLOATING_TEXT}, got {mask.dtype}")
    if mask.layout is not _STRIDED:
        raise TypeError(f"softmax: mask must be a dense tensor (layout torch.strided), got layout {mask.layout}")
    if mask.device != input.device:
        raise ValueError(f"softmax: mask must be on input's device {input.device}, got {mask.device}")
    shape = input.shape
    lead = len(shape) - mask.dim()
    if lead < 0 or any(size != 1 and size != shape[lead + i] for i, size in enumerate(mask.shape)):
        raise ValueError(f"softmax: mask must broadcast to input's shape {_shape(input)}, got {_shape(mask)}")


def _normalized_ndim(
    op: str, input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> int:
    try:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    except TypeError:
        raise TypeError(
            f"{op}: normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}"
        ) from None
    ndim = len(shape)
    if ndim == 0 or input.shape[-ndim:] != shape:
        raise ValueError(
            f"{op}: normalized_shape must be the last dimensions of input's shape {_shape(input)}, at least one, "
            f"got {shape}"
        )
    if weight is not None and weight.shape != shape:
        raise ValueError(f"{op}: weight must have shape normalized_shape = {shape}, got {_shape(weight)}")
    if bias is not None and bias.shape != shape:
        raise ValueError(f"{op}: bias must have shape normalized_shape = {shape}, got {_shape(bias)}")
    return ndim


def _check_residual(op: str, residual: Tensor, input: Tensor) -> None:
    if residual.shape != input.shape:
        raise ValueError(f"{op}: residual must have input's shape {_shape(input)}, got {_shape(residual)}")
    _check_residual_dtype(op, residual, input)


def _check_added(op: str, residual: Tensor, input: Tensor, out: int) -> None:
    """What a GEMM adds to its result of shape (…, out)."""
    _check_tensors(op, ("input", "residual"), (input, residual))
    shape = (*input.shape[:-1], out)
    if residual.shape != shape:
        raise ValueError(f"{op}: residual must have the result's shape {shape}, got {_shape(residual)}")
    _check_residual_dtype(op, residual, input)


def _check_residual_dtype(op: str, residual: Tensor, input: Tensor) -> None:
    if residual.dtype != input.dtype and torch.float64 in (residual.dtype, input.dtype):
        raise TypeError(
            f"{op}: residual must have dtype torch.float64 exactly where input has, "
            f"got {residual.dtype} with an input of {input.dtype}"
        )


def _eps(op: str, eps: float) -> float:
    if type(eps) is not float:
        eps = _number(op, "eps", eps)
    if not eps >= 0.0:
        raise ValueError(f"{op}: eps must be at least 0, got {eps}")
    return eps


def _number(op: str, name: str, value: Any) -> float:
    if isinstance(value, (Tensor, str, bytes, complex)):
        raise TypeError(f"{op}: {name} must be a number, got {_typename(value)}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a number, got {_typename(value)}") from None


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _typename(value: object) -> str:
    return type(value).__name__
