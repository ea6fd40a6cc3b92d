"""Inputs that the value tests share: data, and every way a tensor can lie in memory."""

import torch
from torch import Tensor

LOW = (torch.float16, torch.bfloat16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# How a tensor lies: name -> function of a contiguous tensor, giving an equal tensor with other strides or offset.
LAYOUTS = (
    "contiguous",
    "offset",
    "sliced_rows",
    "padded_rows",
    "strided_cols",
    "transposed",
    "reversed_dims",
    "expanded",
)


def lay(t: Tensor, layout: str) -> Tensor:
    """`t`'s values in another layout ("expanded" repeats the first slice, so its values differ)."""
    poison = float("nan") if t.is_floating_point() else 1  # in the gaps: nothing may read them
    if layout == "contiguous" or t.dim() == 0 or t.numel() == 0:
        return t
    if layout == "offset":  # a storage offset of one element: misaligned for every vector access
        buffer = t.new_empty(t.numel() + 1)
        return buffer[1:].view(t.shape).copy_(t)
    if layout == "sliced_rows":  # a gap after every row, and an odd one
        buffer = t.new_full((*t.shape[:-1], t.shape[-1] + 3), poison)
        return buffer[..., 1 : t.shape[-1] + 1].copy_(t)
    if layout == "padded_rows":  # a gap after every row, all rows on 16 bytes: what TMA can address
        width = (t.shape[-1] + 15) // 8 * 8
        return t.new_full((*t.shape[:-1], width), poison)[..., : t.shape[-1]].copy_(t)
    if layout == "strided_cols":
        buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), poison)
        return buffer[..., ::2].copy_(t)
    if layout == "transposed" and t.dim() >= 2:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "reversed_dims":
        dims = tuple(reversed(range(t.dim())))
        return t.permute(dims).contiguous().permute(dims)
    if layout == "expanded":
        return t[:1].expand(t.shape)
    return t


def randn(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal data, the same on every device: made on the CPU in float64, rounded once."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape) * 31 + len(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def leaf(t: Tensor) -> Tensor:
    """A leaf that needs a gradient, with t's own strides and offset."""
    return t.detach().requires_grad_()


def name(dtype: torch.dtype) -> str:
    """float16 and so on, for test ids."""
    return str(dtype).removeprefix("torch.")
