"""Modules: drop-in subclasses of torch's, with the same constructor arguments, parameters and state_dict keys.

Our own options are keyword-only, and are class attributes with defaults, so that a module made by an older version, or
one whose `__class__` was changed, still works. Under `torch.autocast` the parameters stay as they are; see
`autocast.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import functional
from .accumulate import Accumulate
from .functional import OutDtype


def _options(**options: Any) -> str:
    """The part of `extra_repr` that names what differs from the defaults."""
    return "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)


def _text(policy: Accumulate | None) -> str | None:
    return None if policy is None else str(policy)


class FusedLinear(nn.Linear):
    """`nn.Linear` with activation and residual in the same kernel: `activation(input @ weight.T + bias) + residual`.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`.
        activation, accumulate, out_dtype: as for `ampkernels.linear`.
    """

    activation: str | None = None
    accumulate: Accumulate | None = None
    out_dtype: torch.dtype | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        accumulate: Accumulate | str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        functional._activation("FusedLinear", activation)
        self.activation = activation
        self.accumulate = None if accumulate is None else Accumulate.parse(accumulate)
        self.out_dtype = None if out_dtype is None else functional._out_dtype("FusedLinear", out_dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual`: of the result's shape, as for `ampkernels.linear`; the result then has its dtype by default."""
        return functional.linear(
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            residual=residual,
            accumulate=self.accumulate,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + _options(
            activation=self.activation, accumulate=_text(self.accumulate), out_dtype=self.out_dtype
        )


class FusedGatedLinear(nn.Module):
    """`activation(gate) * up` from one weight `(2 * out_features, in_features)`: rows [0, F) gate, rows [F, 2 F) up.

    It is no `nn.Linear` (`isinstance` says False): code that looks for linear layers, such as LoRA, takes a linear's
    weight to be `(out_features, in_features)`. Each half is initialised as an `nn.Linear(in_features, out_features)`
    is.

    Args:
        in_features, out_features: K and F.
        bias, device, dtype: as for `nn.Linear`; the bias is `(2 * out_features,)`.
        activation, accumulate, out_dtype: as for `ampkernels.gated_linear`.
    """

    activation: str | None = "silu"
    accumulate: Accumulate | None = None
    out_dtype: torch.dtype | None = None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "silu",
        accumulate: Accumulate | str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        functional._activation("FusedGatedLinear", activation)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty((2 * out_features, in_features), device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(2 * out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.activation = activation
        self.accumulate = None if accumulate is None else Accumulate.parse(accumulate)
        self.out_dtype = None if out_dtype is None else functional._out_dtype("FusedGatedLinear", out_dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The bound depends on in_features alone, so both halves at once get what two nn.Linear would.
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        return functional.gated_linear(
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            accumulate=self.accumulate,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += f", activation={self.activation!r}"
        return text + _options(accumulate=_text(self.accumulate), out_dtype=self.out_dtype)


class FusedMLP(nn.Module):
    """`fc2(activation(fc1(input))) + residual` by `ampkernels.mlp`, whose backward is fused across the activation.

    `fc1` and `fc2` are `nn.Linear`: the state_dict has the keys of timm's `Mlp`. Where one of them has been replaced
    (by a LoRA layer, say) or has hooks, both are called as the modules they are, and the activation between them and the
    addition of the residual are torch's.

    Args:
        in_features, hidden_features, out_features: out_features None is in_features.
        bias, device, dtype: as for `nn.Linear`, for both layers.
        activation, accumulate: as for `ampkernels.mlp`.
    """

    activation: str | None = "gelu"
    accumulate: Accumulate | None = None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "gelu",
        accumulate: Accumulate | str | None = None,
    ) -> None:
        super().__init__()
        functional._activation("FusedMLP", activation)
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = nn.Linear(
            hidden_features, in_features if out_features is None else out_features, bias, device, dtype
        )
        self.activation = activation
        self.accumulate = None if accumulate is None else Accumulate.parse(accumulate)

    def reset_parameters(self) -> None:
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual`: of the result's shape, as for `ampkernels.mlp`; the result then has its dtype."""
        fc1, fc2 = self.fc1, self.fc2
        if _is_plain(fc1) and _is_plain(fc2):
            return functional.mlp(
                input,
                fc1.weight,
                fc1.bias,
                fc2.weight,
                fc2.bias,
                activation=self.activation,
                residual=residual,
                accumulate=self.accumulate,
            )
        output: Tensor = fc2(_TORCH_ACTIVATIONS[self.activation](fc1(input)))
        return output if residual is None else (output + residual).to(residual.dtype)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" + _options(accumulate=_text(self.accumulate))


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling the module does what its weight and bias alone say."""
    if type(layer) is FusedLinear:
        if (layer.activation, layer.accumulate, layer.out_dtype) != (None, None, None):
            return False
    elif type(layer) is not nn.Linear:
        return False
    return (
        not layer._forward_hooks
        and not layer._forward_pre_hooks
        and not layer._backward_hooks
        and not layer._backward_pre_hooks
        and "forward" not in layer.__dict__
    )


_TORCH_ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: nn.functional.relu(x).square(),
}


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`; parameters may have another dtype than the input, and a residual may be added in the same kernel.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as for `nn.LayerNorm`.
        out_dtype: as for `ampkernels.layer_norm`; "autocast" gives the autocast dtype inside autocast, where the
            default is eager's (float32 on CUDA).
    """

    out_dtype: OutDtype = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: OutDtype = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.out_dtype = functional._check_rows_dtype("FusedLayerNorm", out_dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """The normalised tensor; with a residual `(normalised, input + residual)`."""
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + _options(out_dtype=self.out_dtype)


class FusedRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, with the options of `FusedLayerNorm`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as for `nn.RMSNorm`.
        weight_offset: added to the weight in fp32. The weight is initialised to `1 - weight_offset`, so that a new
            module scales by 1.
        out_dtype: as for `FusedLayerNorm`.
    """

    weight_offset: float = 0.0
    out_dtype: OutDtype = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        out_dtype: OutDtype = None,
    ) -> None:
        if weight_offset and not elementwise_affine:
            raise ValueError(f"FusedRMSNorm: weight_offset must be 0 without a weight, got {weight_offset}")
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.weight_offset = weight_offset
        self.out_dtype = functional._check_rows_dtype("FusedRMSNorm", out_dtype)
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The normalised tensor; with a residual `(normalised, x + residual)`."""
        return functional.rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            residual=residual,
            weight_offset=self.weight_offset,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + _options(weight_offset=self.weight_offset or None, out_dtype=self.out_dtype)


class FusedSoftmax(nn.Softmax):
    """`nn.Softmax` with scale, causal mask and an optional mask in the same kernel.

    Args:
        dim: as for `nn.Softmax`, but the last dimension by default.
        scale, causal, out_dtype: as for `ampkernels.softmax`.
    """

    scale: float = 1.0
    causal: bool = False
    out_dtype: OutDtype = None

    def __init__(self, dim: int = -1, *, scale: float = 1.0, causal: bool = False, out_dtype: OutDtype = None) -> None:
        super().__init__(dim)
        self.scale = functional._number("FusedSoftmax", "scale", scale)
        self.causal = causal
        self.out_dtype = functional._check_rows_dtype("FusedSoftmax", out_dtype)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: bool (True keeps) or additive, as for `ampkernels.softmax`."""
        return functional.softmax(
            input,
            self.dim,  # type: ignore[arg-type]
            scale=self.scale,
            mask=mask,
            causal=self.causal,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        scale = None if self.scale == 1.0 else self.scale
        return super().extra_repr() + _options(scale=scale, causal=self.causal or None, out_dtype=self.out_dtype)
