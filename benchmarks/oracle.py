"""The float64 oracles: those of `ampkernels.reference`, called with already-rounded inputs widened to float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
}


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    y = F.linear(x, w, b)
    return _ACTIVATIONS[activation](y) if activation else y


def gated_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, activation: str) -> torch.Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return _ACTIVATIONS[activation](gate) * up


def mlp(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, activation: str
) -> torch.Tensor:
    return F.linear(linear(x, w1, b1, activation), w2, b2)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], w, eps)
