"""linear, gated_linear and mlp: what forward saves, and backward as GEMMs with fused epilogues.

Under autocast the operands are cast here, inside the Function, and not by autograd's `.to`: dinput and dweight are then
written once, straight from the accumulators, in the dtype of the input and of the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from . import Grads, cast, functions, rows, unrows

# ------------------------------------------------------------------------------------------------------ linear, gated


def linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """linear without a graph; `dtype` is the one computed in."""
    x, w = cast(input, dtype), cast(weight, dtype)
    return unrows(_ops.linear_fwd(rows(x), w, bias, activation, acc, chunk, out_dtype, False)[0], input)


def gated_linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """gated_linear without a graph."""
    x, w = cast(input, dtype), cast(weight, dtype)
    return unrows(_ops.gated_linear_fwd(rows(x), w, bias, activation, acc, chunk, out_dtype, False)[0], input)


def _save(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, w: Tensor, saved: Tensor | None
) -> None:
    """x for dweight, w for dinput, and for the activation's derivative what forward kept of the pre-activation."""
    need_input, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, w if need_input else None, saved)
    ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.weight = _WeightGrad(weight)


def _linear_function_forward(
    ctx: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    x, w = cast(input, dtype), cast(weight, dtype)
    save_pre = activation not in (_ops.NONE, _ops.RELU)
    output, pre = _ops.linear_fwd(rows(x), w, bias, activation, acc, chunk, out_dtype, save_pre)
    output = unrows(output, input)
    # relu's derivative can be read off its output, which the next layer keeps anyway.
    _save(ctx, input, weight, bias, x, w, pre if save_pre else output if activation == _ops.RELU else None)
    ctx.policy = (activation, acc, chunk, dtype)
    return output


def _linear_function_backward(ctx: Any, dy: Tensor) -> Grads:
    activation, _, _, dtype = ctx.policy
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    x, w, saved = ctx.saved_tensors
    dpre, dbias = rows(dy), None
    fresh = activation != _ops.NONE or dy.dtype != dtype  # else dpre is dy
    if fresh or need_bias:
        relu = activation == _ops.RELU
        new_dpre, dbias = _ops.linear_act_bwd(
            dpre,
            rows(saved) if relu else saved,
            activation,
            relu,
            dtype if fresh and (need_input or need_weight) else None,
            ctx.dtypes[2] if need_bias else None,
        )
        dpre = new_dpre if fresh else dpre
    dinput, dweight = _matrix_grads(ctx, dy, dpre, x, w)
    return dinput, dweight, dbias if need_bias else None, None, None, None, None, None


def _gated_function_forward(
    ctx: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    x, w = cast(input, dtype), cast(weight, dtype)
    output, pre = _ops.gated_linear_fwd(rows(x), w, bias, activation, acc, chunk, out_dtype, True)
    _save(ctx, input, weight, bias, x, w, pre)
    ctx.policy = (activation, acc, chunk, dtype)
    return unrows(output, input)


def _gated_function_backward(ctx: Any, dy: Tensor) -> Grads:
    activation, _, _, dtype = ctx.policy
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    x, w, pre = ctx.saved_tensors
    dpre, dbias = _ops.gated_linear_act_bwd(
        rows(dy),
        pre,
        activation,
        dtype if need_input or need_weight else None,
        ctx.dtypes[2] if need_bias else None,
    )
    dinput, dweight = _matrix_grads(ctx, dy, dpre, x, w)
    return dinput, dweight, dbias if need_bias else None, None, None, None, None, None


def _matrix_grads(
    ctx: Any, dy: Tensor, dpre: Tensor, x: Tensor | None, w: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(dinput, dweight) from the gradient of the pre-activation, in the dtypes of input and weight."""
    need_input, need_weight = ctx.needs_input_grad[:2]
    _, acc, chunk, _ = ctx.policy
    dinput = dweight = None
    if need_input:
        assert w is not None
        dinput = _ops.linear_dgrad(dpre, w, None, _ops.NONE, False, False, acc, chunk, ctx.dtypes[0])[0]
        dinput = unrows(dinput, dy)
    if need_weight:
        assert x is not None
        dweight = ctx.weight.of(dpre, rows(x), acc, chunk)
    return dinput, dweight


class _WeightGrad:
    """Where a weight's gradient goes: into `weight.main_grad` where there is one, else into a new tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.main_grad: Tensor | None = None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)
        self.dtype = weight.dtype
        self.transposed = is_transposed(weight)

    def of(self, dpre: Tensor, input: Tensor, acc: torch.dtype, chunk: int) -> Tensor | None:
        if self.main_grad is None:
            return _ops.linear_wgrad(dpre, input, self.transposed, acc, chunk, self.dtype)
        if dpre.is_cuda and dpre.dtype in (torch.float16, torch.bfloat16):
            _ops.linear_wgrad_add(self.main_grad, dpre, input, acc, chunk)
        else:
            self.main_grad += _ops.linear_wgrad(dpre, input, False, acc, chunk, self.main_grad.dtype)
        return None


def is_transposed(weight: Tensor) -> bool:
    """Whether the parameter, and so its gradient, has strides (1, out); a layout with gaps gets a contiguous one."""
    return not weight.is_contiguous() and weight.t().is_contiguous()


LINEAR = functions("linear", _linear_function_forward, _linear_function_backward)
GATED_LINEAR = functions("gated_linear", _gated_function_forward, _gated_function_backward)

# ----------------------------------------------------------------------------------------------------------------- mlp


def mlp_forward(
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    """mlp without a graph."""
    hidden, _ = _ops.linear_fwd(rows(cast(input, dtype)), cast(w1, dtype), b1, activation, acc, chunk, dtype, False)
    return unrows(_ops.linear_fwd(hidden, cast(w2, dtype), b2, _ops.NONE, acc, chunk, dtype, False)[0], input)


def _mlp_function_forward(
    ctx: Any,
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    need_input, need_w1, need_b1, need_w2, _ = ctx.needs_input_grad[:5]
    need_first = need_input or need_w1 or need_b1
    x, w1_cast, w2_cast = cast(input, dtype), cast(w1, dtype), cast(w2, dtype)
    # One tensor of the hidden layer is kept: the pre-activation, from which backward's first GEMM also makes the hidden
    # activations again; or those themselves, where they tell the derivative (relu) or where no derivative is needed.
    save_pre = need_first and activation not in (_ops.NONE, _ops.RELU)
    hidden, pre = _ops.linear_fwd(rows(x), w1_cast, b1, activation, acc, chunk, dtype, save_pre)
    output, _ = _ops.linear_fwd(hidden, w2_cast, b2, _ops.NONE, acc, chunk, dtype, False)
    keep_hidden = need_w2 or (need_first and activation == _ops.RELU)
    ctx.save_for_backward(
        x if need_w1 else None,
        w1_cast if need_input else None,
        w2_cast if need_first else None,
        pre if save_pre else hidden if keep_hidden else None,
    )
    ctx.saved_pre = save_pre
    ctx.policy = (activation, acc, chunk, dtype)
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (input, b1, b2))
    ctx.weights = (_WeightGrad(w1), _WeightGrad(w2))
    return unrows(output, input)


def _mlp_function_backward(ctx: Any, dy: Tensor) -> Grads:
    activation, acc, chunk, dtype = ctx.policy
    input_dtype, b1_dtype, b2_dtype = ctx.dtypes
    need_input, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
    x, w1, w2, saved = ctx.saved_tensors
    dinput = dw1 = db1 = dw2 = db2 = None
    dout, hidden = rows(dy), saved
    if need_b2:
        _, db2 = _ops.linear_act_bwd(dout, None, _ops.NONE, False, None, b2_dtype)
    if need_input or need_w1 or need_b1:
        dpre, activated = _ops.linear_dgrad(
            dout,
            w2,
            None if activation == _ops.NONE else saved,
            activation,
            activation == _ops.RELU,
            ctx.saved_pre and need_w2,
            acc,
            chunk,
            dtype,
        )
        hidden = activated if ctx.saved_pre else saved
        if need_b1:
            _, db1 = _ops.linear_act_bwd(dpre, None, _ops.NONE, False, None, b1_dtype)
        if need_w1:
            dw1 = ctx.weights[0].of(dpre, rows(x), acc, chunk)
        if need_input:
            dinput = _ops.linear_dgrad(dpre, w1, None, _ops.NONE, False, False, acc, chunk, input_dtype)[0]
            dinput = unrows(dinput, dy)
    if need_w2:
        dw2 = ctx.weights[1].of(dout, hidden, acc, chunk)
    return dinput, dw1, db1, dw2, db2, None, None, None, None


MLP = functions("mlp", _mlp_function_forward, _mlp_function_backward)
