"""linear, gated_linear and mlp: what forward saves, and backward as GEMMs with fused epilogues.

Under autocast the operands are cast here, inside the Function, and not by autograd's `.to`: dinput and dweight are then
written once, straight from the accumulators, in the dtype of the input and of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from . import Grads, cast, functions

Dtype = Any  # a number of `_ops.DTYPE`, or None

# ------------------------------------------------------------------------------------------------------ linear, gated


def linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: Dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: Dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """linear without a graph; `dtype` is the one computed in; `acc` and `out_dtype` are numbers, as in `_ops.DTYPE`."""
    x, w = cast(input, dtype), cast(weight, dtype)
    return _ops.linear_fwd(x, w, bias, residual, activation, acc, chunk, out_dtype, False)[0]


def gated_linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: Dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: Dtype,
) -> Tensor:
    """gated_linear without a graph."""
    x, w = cast(input, dtype), cast(weight, dtype)
    return _ops.gated_linear_fwd(x, w, bias, activation, acc, chunk, out_dtype, False)[0]


Weight = tuple[Dtype, bool, Tensor | None]


def _weight(weight: Tensor) -> Weight:
    """What backward needs to know of a weight for its gradient: dtype, whether it is transposed, `main_grad`."""
    main_grad = None if torch.compiler.is_compiling() else getattr(weight, "main_grad", None)
    return _ops.DTYPE[weight.dtype], is_transposed(weight), main_grad


def is_transposed(weight: Tensor) -> bool:
    """Whether the parameter, and so its gradient, has strides (1, out); a layout with gaps gets a contiguous one."""
    return not weight.is_contiguous() and weight.t().is_contiguous()


def _save(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, w: Tensor, saved: Tensor | None
) -> None:
    """x for dweight, w for dinput, and for the activation's derivative what forward kept of the pre-activation."""
    need_input, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, w if need_input else None, saved)
    ctx.dtypes = (_ops.DTYPE[input.dtype], None if bias is None else _ops.DTYPE[bias.dtype])
    ctx.weight = _weight(weight)


def _linear_function_forward(
    ctx: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: Dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: Dtype,
    residual: Tensor | None = None,
) -> Tensor:
    x, w = cast(input, dtype), cast(weight, dtype)
    # relu's derivative can be read off its output, which the next layer keeps anyway; not off a sum with a residual.
    if residual is None:
        save_pre = activation not in (_ops.NONE, _ops.RELU)
    else:
        save_pre = activation != _ops.NONE and any(ctx.needs_input_grad[:3])
        ctx.residual_dtype = residual.dtype
    output, pre = _ops.linear_fwd(x, w, bias, residual, activation, acc, chunk, out_dtype, save_pre)
    _save(ctx, input, weight, bias, x, w, output if activation == _ops.RELU and residual is None else pre)
    ctx.policy = (activation, False, acc, chunk)
    return output


def _gated_function_forward(
    ctx: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: Dtype,
    chunk: int,
    dtype: torch.dtype,
    out_dtype: Dtype,
) -> Tensor:
    x, w = cast(input, dtype), cast(weight, dtype)
    output, pre = _ops.gated_linear_fwd(x, w, bias, activation, acc, chunk, out_dtype, True)
    _save(ctx, input, weight, bias, x, w, pre)
    ctx.policy = (activation, True, acc, chunk)
    return output


def _backward(ctx: Any, dy: Tensor) -> Grads:
    """Of linear and of gated_linear."""
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    activation, gated, acc, chunk = ctx.policy
    weight_dtype, transposed, main_grad = ctx.weight
    x, w, saved = ctx.saved_tensors
    input_dtype, bias_dtype = ctx.dtypes[0] if need_input else None, ctx.dtypes[1] if need_bias else None
    if need_weight and main_grad is not None:
        # The gradient of the pre-activation is a tensor of its own: one of the products that read it is not linear_bwd's.
        dpre, dbias = dy, None
        fresh = gated or activation != _ops.NONE or dy.dtype != x.dtype  # else it is dy
        if fresh or need_bias:
            dtype = x.dtype if fresh else None
            if gated:
                new_dpre, dbias = _ops.gated_linear_act_bwd(dy, saved, activation, dtype, bias_dtype)
            else:
                relu = activation == _ops.RELU
                new_dpre, dbias = _ops.linear_act_bwd(dy, saved, activation, relu, dtype, bias_dtype)
            dpre = new_dpre if fresh else dy
        dinput, dweight, _ = _plain_backward(dpre, x, w, ctx.weight, acc, chunk, input_dtype, True, None)
    else:
        weight_dtype = weight_dtype if need_weight else None
        dinput, dweight, dbias = _ops.linear_bwd(
            dy, x, w, saved, activation, gated, transposed, acc, chunk, input_dtype, weight_dtype, bias_dtype
        )
    return dinput, dweight, dbias, None, None, None, None, None


def _plain_backward(
    dpre: Tensor,
    x: Tensor | None,
    w: Tensor | None,
    weight: Weight,
    acc: Dtype,
    chunk: int,
    input_dtype: Dtype,
    need_weight: bool,
    bias_dtype: Dtype,
) -> Grads:
    """(dinput, dweight, dbias) of a linear without activation; dweight goes to `main_grad` where the weight has one."""
    weight_dtype, transposed, main_grad = weight
    if need_weight and main_grad is not None:
        assert x is not None
        _add_to_main_grad(main_grad, dpre, x, acc, chunk)
        need_weight = False
    weight_dtype = weight_dtype if need_weight else None
    return _ops.linear_bwd(
        dpre, x, w, None, _ops.NONE, False, transposed, acc, chunk, input_dtype, weight_dtype, bias_dtype
    )


def _add_to_main_grad(main_grad: Tensor, dpre: Tensor, x: Tensor, acc: Dtype, chunk: int) -> None:
    if dpre.is_cuda and dpre.dtype in (torch.float16, torch.bfloat16):
        _ops.linear_wgrad_add(main_grad, dpre, x, acc, chunk)
    else:
        main_grad += _ops.linear_bwd(
            dpre, x, None, None, _ops.NONE, False, False, acc, chunk, None, main_grad.dtype, None
        )[1]


def _and_dresidual(backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """`backward`, and the gradient of the residual, which is forward's last argument: dy itself."""

    def wrapper(ctx: Any, dy: Tensor) -> Grads:
        needs = ctx.needs_input_grad
        grads = backward(ctx, dy) if any(needs[:-1]) else (None,) * (len(needs) - 1)
        return *grads, cast(dy, ctx.residual_dtype) if needs[-1] else None

    return wrapper


# With a residual they are classes of their own, so that a call without one does nothing for it.
LINEAR = functions("linear", _linear_function_forward, _backward)
LINEAR_RESIDUAL = functions("linear", _linear_function_forward, _and_dresidual(_backward))
GATED_LINEAR = functions("gated_linear", _gated_function_forward, _backward)

# ----------------------------------------------------------------------------------------------------------------- mlp


def mlp_forward(
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: int,
    acc: Dtype,
    chunk: int,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """mlp without a graph."""
    out = _ops.DTYPE[dtype]
    hidden, _ = _ops.linear_fwd(cast(input, dtype), cast(w1, dtype), b1, None, activation, acc, chunk, out, False)
    if residual is not None:
        out = _ops.DTYPE[residual.dtype]
    return _ops.linear_fwd(hidden, cast(w2, dtype), b2, residual, _ops.NONE, acc, chunk, out, False)[0]


def _mlp_function_forward(
    ctx: Any,
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: int,
    acc: Dtype,
    chunk: int,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    need_input, need_w1, need_b1, need_w2, _ = ctx.needs_input_grad[:5]
    need_first = need_input or need_w1 or need_b1
    x, w1_cast, w2_cast = cast(input, dtype), cast(w1, dtype), cast(w2, dtype)
    # One tensor of the hidden layer is kept: the pre-activation, from which backward's first GEMM also makes the hidden
    # activations again; or those themselves, where they tell the derivative (relu) or where no derivative is needed.
    save_pre = need_first and activation not in (_ops.NONE, _ops.RELU)
    out = output_dtype = _ops.DTYPE[dtype]
    if residual is not None:
        ctx.residual_dtype = residual.dtype
        output_dtype = _ops.DTYPE[residual.dtype]
    hidden, pre = _ops.linear_fwd(x, w1_cast, b1, None, activation, acc, chunk, out, save_pre)
    output, _ = _ops.linear_fwd(hidden, w2_cast, b2, residual, _ops.NONE, acc, chunk, output_dtype, False)
    keep_hidden = need_w2 or (need_first and activation == _ops.RELU)
    ctx.save_for_backward(
        x if need_w1 else None,
        w1_cast if need_input else None,
        w2_cast if need_first else None,
        pre if save_pre else hidden if keep_hidden else None,
    )
    ctx.saved_pre = save_pre
    ctx.policy = (activation, acc, chunk, out)
    ctx.dtypes = tuple(None if t is None else _ops.DTYPE[t.dtype] for t in (input, b1, b2))
    ctx.weights = (_weight(w1), _weight(w2))
    return output


def _mlp_function_backward(ctx: Any, dy: Tensor, db2: Tensor | None = None) -> Grads:
    activation, acc, chunk, dtype = ctx.policy
    input_dtype, b1_dtype, b2_dtype = ctx.dtypes
    need_input, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
    x, w1, w2, saved = ctx.saved_tensors
    dinput = dw1 = db1 = None
    hidden = saved
    if need_input or need_w1 or need_b1:
        dpre, activated = _ops.linear_dgrad(
            dy,
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
        first = (input_dtype if need_input else None, need_w1, b1_dtype if need_b1 else None)
        dinput, dw1, db1 = _plain_backward(dpre, x, w1, ctx.weights[0], acc, chunk, *first)
    second = (None, need_w2, b2_dtype if need_b2 and db2 is None else None)
    _, dw2, dbias = _plain_backward(dy, hidden, None, ctx.weights[1], acc, chunk, *second)
    return dinput, dw1, db1, dw2, dbias if db2 is None else db2, None, None, None, None


def _mlp_residual_backward(ctx: Any, dy: Tensor) -> Grads:
    """dy has the residual's dtype: for the GEMMs it is rounded once to the one computed in, and b2's sum made before."""
    dtype, b2_dtype = ctx.policy[3], ctx.dtypes[2]
    if _ops.DTYPE[dy.dtype] == dtype:
        return _mlp_function_backward(ctx, dy)
    need_b2 = ctx.needs_input_grad[4]
    dpre, db2 = _ops.linear_act_bwd(dy, None, _ops.NONE, False, dtype, b2_dtype if need_b2 else None)
    return _mlp_function_backward(ctx, dpre, db2)


MLP = functions("mlp", _mlp_function_forward, _mlp_function_backward)
MLP_RESIDUAL = functions("mlp", _mlp_function_forward, _and_dresidual(_mlp_residual_backward))
