"""The float64 oracles: `ampkernels.reference`, which widens the rounded inputs it is given."""

from __future__ import annotations

import torch


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    from ampkernels import reference

    return reference.linear(x, w, b, activation=activation, residual=residual)


def gated_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, activation: str) -> torch.Tensor:
    from ampkernels import reference

    return reference.gated_linear(x, w, b, activation=activation)


def mlp(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, activation: str
) -> torch.Tensor:
    from ampkernels import reference

    return reference.mlp(x, w1, b1, w2, b2, activation=activation)


def softmax(x: torch.Tensor) -> torch.Tensor:
    from ampkernels import reference

    return reference.softmax(x)


def layer_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    from ampkernels import reference

    return reference.layer_norm(x, x.shape[-1:], w, b, eps, residual=residual)  # type: ignore[no-any-return]


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    from ampkernels import reference

    return reference.rms_norm(x, x.shape[-1:], w, eps, residual=residual)  # type: ignore[no-any-return]
