"""softmax and log_softmax: backward needs the output alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from . import Grads, cast, functions


def _forward(
    ctx: Any,
    input: Tensor,
    mask: Tensor | None,
    dim: int,
    scale: float,
    causal: bool,
    log: bool,
    out_dtype: Any,
) -> Tensor:
    output = _ops.softmax_fwd(input, dim, scale, mask, causal, log, out_dtype)
    ctx.save_for_backward(output)
    ctx.options = (dim, scale, causal, log, input.dtype)
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    return output


def _backward(ctx: Any, dy: Tensor) -> Grads:
    (output,) = ctx.saved_tensors
    dim, scale, causal, log, input_dtype = ctx.options
    dinput = dmask = None
    if ctx.needs_input_grad[0]:
        dinput = _ops.softmax_bwd(dy, output, dim, scale, causal, log, _ops.DTYPE[input_dtype])
    if ctx.needs_input_grad[1]:  # an additive mask: the gradient before scale, summed over what it broadcast along
        shape, dtype = ctx.mask
        statistics = torch.float64 if input_dtype == torch.float64 else torch.float32
        dmask = cast(_ops.softmax_bwd(dy, output, dim, 1.0, causal, log, statistics).sum_to_size(shape), dtype)
    return dinput, dmask, None, None, None, None, None


SOFTMAX = functions("softmax", _forward, _backward)
LOG_SOFTMAX = functions("log_softmax", _forward, _backward)
