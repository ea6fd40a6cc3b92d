"""The GPU's bits on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _ops
from ..accumulate import Accumulate

_ARCHS = {"sm80": 80, "sm90": 90}


def emulate(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    accumulate: Accumulate | str = "fp32/512",
    out_dtype: torch.dtype | None = None,
    arch: str = "sm90",
) -> Tensor:
    """`linear` (or, with `gated`, `gated_linear`) bit for bit as the tensor cores of `arch` compute it, on the CPU.

    Formula: act(input @ weight.T + bias) + residual, or act(gate) * up with gate and up the two halves of
    input @ weight.T + bias.

    Args:
        input: (..., K), fp16 or bf16, on any device; it is copied to the CPU.
        weight: (N, K), of the same dtype.
        bias: (N,), of any floating-point dtype.
        residual: (..., N), fp16, bf16 or fp32; not with `gated`.
        accumulate: with a chunk, the result is a GPU's under the same policy, whatever the shape. Without one it is one
            chain over all of K, which a GPU that splits K does not follow.
        out_dtype: if None, the residual's if there is one, else the input's.
        arch: "sm90" (checked on an H200) or "sm80" (the published rule of Ampere, not checked).

    Returns:
        (..., N), or (..., N / 2) if gated, on the CPU. No autograd.

    Rounding points: docs/design.md, section 3. Raises ValueError for what a GPU would not compute either.
    """
    if arch not in _ARCHS:
        raise ValueError(f"emulate: arch must be 'sm80' or 'sm90', got {arch!r}")
    if activation not in _ops.ACTIVATION_NUMBERS:
        raise ValueError(f"emulate: activation must be one of {_ops.ACTIVATIONS}, got {activation!r}")
    if input.dtype != weight.dtype:
        raise TypeError(f"emulate: input and weight must share a dtype, got {input.dtype} and {weight.dtype}")
    if input.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"emulate: input must be float16 or bfloat16, got {input.dtype}")
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"emulate: weight must have shape (out, in) with in = {input.shape[-1] if input.dim() else 0}, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"emulate: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    if residual is not None:
        _check_residual(residual, (*input.shape[:-1], weight.shape[0]), gated)
    if gated and weight.shape[0] % 2:
        raise ValueError(f"emulate: weight must have an even number of rows if gated, got {weight.shape[0]}")
    policy = Accumulate.parse(accumulate)
    if policy.dtype == torch.float16 and input.dtype != torch.float16:
        raise ValueError(
            f"emulate: accumulate must be fp32 for inputs of {input.dtype}, got {policy}, which takes float16 "
            "inputs only"
        )
    with torch.no_grad():
        rows = input.detach().cpu().reshape(-1, weight.shape[1])
        result: Tensor = torch.ops.ampkernels.emulate_linear(
            rows,
            weight.detach().cpu(),
            None if bias is None else bias.detach().cpu(),
            None if residual is None else residual.detach().cpu().reshape(rows.shape[0], -1),
            _ops.ACTIVATION_NUMBERS[activation],
            gated,
            policy.dtype,
            policy.chunk or 0,
            out_dtype or (input.dtype if residual is None else residual.dtype),
            _ARCHS[arch],
        )
    return result.reshape(*input.shape[:-1], result.shape[-1])


def _check_residual(residual: Tensor, shape: tuple[int, ...], gated: bool) -> None:
    if gated:
        raise ValueError("emulate: residual must be None if gated")
    if residual.shape != shape:
        raise ValueError(f"emulate: residual must have the result's shape {shape}, got {tuple(residual.shape)}")
    if residual.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"emulate: residual must be float16, bfloat16 or float32, got {residual.dtype}")
