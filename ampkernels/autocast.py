"""The autocast table of docs/design.md, section 2: the one place that asks torch about autocast.

GEMMs (`linear`, `gated_linear`, `mlp`): under autocast every input is cast to the autocast dtype, which is the
output's. Rows (`softmax`, `log_softmax`, `layer_norm`, `rms_norm`): computed in fp32 from the input as it is; under
autocast the output's dtype is eager's on that device, which is float32 on CUDA and the input's own on the CPU. float64
is never cast.

There is no cache of cast weights. torch's keeps a parameter's cast copy until the outermost autocast block is left: a
weight that is written through `.data` meanwhile is then stale, a CUDA graph captured inside the block holds a copy that
is freed behind its back, and a checkpointed forward saves other tensors than its recomputation. A cast per call costs 6
bytes of traffic per weight element, as much as torch's cache costs in a training step, where every weight is used once
per autocast block; for inference, cast the model once: `model.to(torch.bfloat16)`.
"""

from __future__ import annotations

from typing import Literal

import torch


def _enabled(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def gemm_dtype(device_type: str, input: torch.dtype, *weights: torch.dtype) -> torch.dtype | None:
    """The dtype that a GEMM of these operands computes in; None where they differ and nothing may cast them."""
    if _enabled(device_type) and input != torch.float64 and torch.float64 not in weights:
        return torch.get_autocast_dtype(device_type)
    for weight in weights:
        if weight != input:
            return None
    return input


# rms_norm came to CUDA autocast's fp32 list after torch 2.11; before, eager's result has the input's dtype.
_NOT_FP32 = frozenset(
    op for op in ("rms_norm",) if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCUDA")
)


def rows_dtype(
    op: str, device_type: str, input: torch.dtype, out_dtype: torch.dtype | Literal["autocast"] | None
) -> torch.dtype:
    """The output dtype of a row op; `"autocast"` means the autocast dtype, and the input's own outside autocast."""
    if out_dtype is None:
        on_cuda = device_type == "cuda" and input != torch.float64 and _enabled("cuda")
        return torch.float32 if on_cuda and op not in _NOT_FP32 else input
    if out_dtype == "autocast":
        return torch.get_autocast_dtype(device_type) if _enabled(device_type) and input != torch.float64 else input
    return out_dtype
