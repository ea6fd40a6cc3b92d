"""The autograd Functions, one body per op and one class per device type, and the plain forward that needs no graph.

The classes are the `forward(ctx, …)` kind, not `setup_context`: `custom_fwd` keeps its state on `ctx`, and this kind
costs a third per call. `torch.func` transforms refuse it with a clear error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from typing import cast as cast_type

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import Function, FunctionMeta

Grads = tuple[Tensor | None, ...]


def functions(op: str, forward: Callable[..., Any], backward: Callable[..., Grads]) -> dict[str, type[Function]]:
    """Function classes for `op` by device type: `custom_fwd` fixes the device type when it decorates."""

    def build(device_type: str) -> type[Function]:
        name = op.title().replace("_", "") + device_type.title()
        body = {
            "__module__": __name__,
            "forward": staticmethod(custom_fwd(forward, device_type=device_type)),
            "backward": staticmethod(_in_forwards_autocast(_first_order_only(op, backward), device_type)),
        }
        return cast_type(type[Function], FunctionMeta(name, (Function,), body))

    cpu = build("cpu")
    return {"cpu": cpu, "cuda": build("cuda"), "meta": cpu}


def _in_forwards_autocast(backward: Callable[..., Grads], device_type: str) -> Callable[..., Grads]:
    """`custom_bwd`, of which only the change of state is left where nothing traces.

    It makes a `torch.autocast` at every call, which costs a multiple of the change itself (docs/design.md, *Facts*) and on
    CUDA asks for the device's properties each time. Nothing here is cast by autocast, so no cache is left to empty.
    """
    traced = custom_bwd(backward, device_type=device_type)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grad_outputs: Tensor | None) -> Grads:
        if torch.compiler.is_compiling():
            return traced(ctx, *grad_outputs)  # type: ignore[no-any-return]
        enabled = torch.is_autocast_enabled(device_type)
        if not (enabled or ctx._fwd_used_autocast):
            return backward(ctx, *grad_outputs)
        dtype = torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, ctx._fwd_used_autocast)
        torch.set_autocast_dtype(device_type, ctx._dtype)
        try:
            return backward(ctx, *grad_outputs)
        finally:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)

    return wrapper


def _first_order_only(op: str, backward: Callable[..., Grads]) -> Callable[..., Grads]:
    """Gradients that raise, naming `op`, when something differentiates them.

    `torch.autograd.function.once_differentiable` is not enough: where dy itself needs no grad (a plain `.sum()`), it
    returns constants, and a gradient penalty is silently dropped.
    """
    message = f"{op}: double backward is not supported yet, use the torch operation where gradients are differentiated"

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grad_outputs: Tensor | None) -> Grads:
        if not torch.is_grad_enabled():  # no graph of the gradients is wanted: the common case, without two contexts
            return backward(ctx, *grad_outputs)
        with torch.no_grad():
            grads = backward(ctx, *grad_outputs)
        if torch.compiler.is_compiling():
            return grads
        present = [grad.detach().requires_grad_() for grad in grads if grad is not None]
        raising = iter(_RaiseOnBackward.apply(message, *present))
        return tuple(None if grad is None else next(raising) for grad in grads)

    return wrapper


class _RaiseOnBackward(Function):
    @staticmethod
    def forward(ctx: Any, message: str, *grads: Tensor) -> Grads:
        ctx.message = message
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.message)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
