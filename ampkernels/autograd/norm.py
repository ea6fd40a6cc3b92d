"""layer_norm and rms_norm: forward keeps what it normalised (the input, or its sum with the residual) and statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from . import Grads, cast, functions


def _save(
    ctx: Any,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor,
    *statistics: Tensor,
) -> None:
    need_input, need_residual = ctx.needs_input_grad[:2]
    ctx.set_materialize_grads(False)  # one of the two outputs may go unused
    ctx.save_for_backward(
        input if residual is None else total, weight if need_input or need_residual else None, *statistics
    )
    ctx.dtypes = (
        input.dtype,
        None if residual is None else residual.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
    )
    ctx.strides = (_parameter_strides(weight), _parameter_strides(bias))


def _parameter_strides(parameter: Tensor | None) -> tuple[int, ...] | None:
    """The strides of a parameter that is not contiguous (dense ones as they are, others as `empty_like` makes them)."""
    if parameter is None or parameter.is_contiguous():
        return None
    return torch.empty_like(parameter, device="meta").stride()


def _like_parameter(grad: Tensor | None, strides: tuple[int, ...] | None) -> Tensor | None:
    if grad is None or strides is None:
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def _dinput_dtype(ctx: Any) -> torch.dtype | None:
    """The dtype of the one gradient that backward writes for input and residual; None where neither is wanted.

    Where the two differ it is the compute dtype, so that each is rounded once.
    """
    input_dtype, residual_dtype = ctx.dtypes[:2]
    need_input, need_residual = ctx.needs_input_grad[:2]
    if need_input and need_residual and input_dtype != residual_dtype:
        return torch.float32  # float64 inputs have float64 residuals
    return input_dtype if need_input else residual_dtype if need_residual else None


def _arriving(dy: Tensor | None, dsum: Tensor | None, shape: torch.Size) -> Tensor:
    if dy is not None:
        return dy
    assert dsum is not None
    return dsum.new_zeros(()).expand(shape)


def _dinput_dresidual(ctx: Any, grad: Tensor | None) -> Grads:
    input_dtype, residual_dtype = ctx.dtypes[:2]
    if grad is None or residual_dtype is None:
        return grad, None
    need_input, need_residual = ctx.needs_input_grad[:2]
    return cast(grad, input_dtype) if need_input else None, cast(grad, residual_dtype) if need_residual else None


# ---------------------------------------------------------------------------------------------------------- layer_norm


def _layer_norm_forward(
    ctx: Any,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    ndim: int,
    eps: float,
    out_dtype: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    output, total, mean, rstd = _ops.layer_norm_fwd(input, ndim, weight, bias, eps, residual, out_dtype, True)
    _save(ctx, input, residual, weight, bias, total, mean, rstd)
    ctx.ndim = ndim
    return output if residual is None else (output, total)


def _layer_norm_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Grads:
    if dy is None and dsum is None:
        return (None,) * 7
    saved, weight, mean, rstd = ctx.saved_tensors
    need_weight, need_bias = ctx.needs_input_grad[2:4]
    dinput, dweight, dbias = _ops.layer_norm_bwd(
        _arriving(dy, dsum, saved.shape),
        dsum,
        saved,
        ctx.ndim,
        mean,
        rstd,
        weight,
        _ops.DTYPE[_dinput_dtype(ctx)],
        _ops.DTYPE[ctx.dtypes[2]] if need_weight else None,
        _ops.DTYPE[ctx.dtypes[3]] if need_bias else None,
    )
    return (
        *_dinput_dresidual(ctx, dinput),
        _like_parameter(dweight, ctx.strides[0]),
        _like_parameter(dbias, ctx.strides[1]),
        None,
        None,
        None,
    )


# ------------------------------------------------------------------------------------------------------------ rms_norm


def _rms_norm_forward(
    ctx: Any,
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    ndim: int,
    eps: float,
    weight_offset: float,
    out_dtype: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    output, total, rstd = _ops.rms_norm_fwd(input, ndim, weight, eps, weight_offset, residual, out_dtype, True)
    _save(ctx, input, residual, weight, None, total, rstd)
    ctx.ndim, ctx.weight_offset = ndim, weight_offset
    return output if residual is None else (output, total)


def _rms_norm_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Grads:
    if dy is None and dsum is None:
        return (None,) * 7
    saved, weight, rstd = ctx.saved_tensors
    need_weight = ctx.needs_input_grad[2]
    dinput, dweight = _ops.rms_norm_bwd(
        _arriving(dy, dsum, saved.shape),
        dsum,
        saved,
        ctx.ndim,
        rstd,
        weight,
        ctx.weight_offset,
        _ops.DTYPE[_dinput_dtype(ctx)],
        _ops.DTYPE[ctx.dtypes[2]] if need_weight else None,
    )
    return (
        *_dinput_dresidual(ctx, dinput),
        _like_parameter(dweight, ctx.strides[0]),
        None,
        None,
        None,
        None,
    )


LAYER_NORM = functions("layer_norm", _layer_norm_forward, _layer_norm_backward)
RMS_NORM = functions("rms_norm", _rms_norm_forward, _rms_norm_backward)
