"""The private operators `torch.ops.ampkernels.*`: one typed caller and one fake kernel each.

A function below is three things at once: the signature of the operator (as in csrc/binding/schema.cpp), its fake kernel
(shapes, dtypes and strides without data, for `torch.compile`), and, after `@_operator` has replaced it, the operator's
`OpOverload` itself: calling it costs nothing on top of torch's dispatch.

Outputs that were not asked for are None. Arguments are not checked here: `functional.py` does.
The operators have no autograd; the public way to them is `functional.py`, through `autograd/`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch  # before _C: the extension resolves its symbols against torch's libraries
from torch import Tensor

_load_error: ImportError | None = None
try:
    importlib.import_module("ampkernels._C")  # registers the operators; by name, as type checkers may not find it
except ImportError as error:
    _load_error = error

ACTIVATION_NUMBERS: dict[str | None, int] = {  # ampkernels::Activation in csrc/include/ampkernels/types.h
    None: 0,
    "relu": 1,
    "gelu": 2,
    "gelu_tanh": 3,
    "silu": 4,
    "sigmoid": 5,
    "tanh": 6,
    "quick_gelu": 7,
    "relu2": 8,
}
ACTIVATIONS: tuple[str | None, ...] = tuple(ACTIVATION_NUMBERS)
NONE, RELU = ACTIVATION_NUMBERS[None], ACTIVATION_NUMBERS["relu"]

# torch's numbers of the dtypes (torch/headeronly/core/ScalarType.h). Operators take either; a number costs less,
# as torch looks for `__torch_function__` on a torch.dtype and formats an AttributeError each time.
DTYPE: dict[torch.dtype | None, Any] = {
    None: None,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}

Wanted: TypeAlias = Any  # a Tensor, or None where it was not asked for
_Signature = TypeVar("_Signature", bound=Callable[..., Any])


def _operator(fake: _Signature) -> _Signature:
    """The operator named like `fake`, with `fake` registered as its fake kernel."""
    name = fake.__name__
    if _load_error is not None:
        return _missing(name)  # type: ignore[return-value]
    torch.library.register_fake(f"ampkernels::{name}", fake)
    return getattr(torch.ops.ampkernels, name).default  # type: ignore[no-any-return]


def _missing(name: str) -> Callable[..., Any]:
    def raise_import_error(*args: object, **kwargs: object) -> Any:
        raise ImportError(
            f"ampkernels: the operator {name!r} is not available because the compiled extension ampkernels._C did not "
            f"load ({_load_error}). Build it with `pip install --no-build-isolation .`, or in place with "
            "`python setup.py build_ext --inplace`, against the torch that is now running "
            f"({torch.__version__})."
        ) from _load_error

    return raise_import_error


def _wanted(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else like.new_empty(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------- GEMM


def _rows(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


@_operator
def linear_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    out_dtype: torch.dtype,
    save_pre: bool,
) -> tuple[Tensor, Wanted]:
    n = weight.shape[0]
    return (
        input.new_empty((*input.shape[:-1], n), dtype=out_dtype),
        input.new_empty((_rows(input), n)) if save_pre else None,
    )


@_operator
def gated_linear_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    acc: torch.dtype,
    chunk: int,
    out_dtype: torch.dtype,
    save_pre: bool,
) -> tuple[Tensor, Wanted]:
    n = weight.shape[0]
    return (
        input.new_empty((*input.shape[:-1], n // 2), dtype=out_dtype),
        input.new_empty((_rows(input), n)) if save_pre else None,
    )


@_operator
def linear_act_bwd(
    dy: Tensor,
    saved: Tensor | None,
    activation: int,
    saved_is_output: bool,
    dpre_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Wanted, Wanted]:
    n = dy.shape[-1]
    return _wanted(dy, dy.shape, dpre_dtype), _wanted(dy, (n,), dbias_dtype)


@_operator
def gated_linear_act_bwd(
    dy: Tensor, saved: Tensor, activation: int, dpre_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None
) -> tuple[Wanted, Wanted]:
    n = 2 * dy.shape[-1]
    return _wanted(dy, (*dy.shape[:-1], n), dpre_dtype), _wanted(dy, (n,), dbias_dtype)


@_operator
def linear_dgrad(
    dpre: Tensor,
    weight: Tensor,
    saved: Tensor | None,
    activation: int,
    saved_is_output: bool,
    want_act: bool,
    acc: torch.dtype,
    chunk: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Wanted]:
    shape = (*dpre.shape[:-1], weight.shape[1])
    return dpre.new_empty(shape, dtype=out_dtype), dpre.new_empty(shape) if want_act else None


@_operator
def linear_bwd(
    dy: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    saved: Tensor | None,
    activation: int,
    gated: bool,
    transposed: bool,
    acc: torch.dtype,
    chunk: int,
    dinput_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Wanted, Wanted, Wanted]:
    n = 2 * dy.shape[-1] if gated else dy.shape[-1]
    dinput = dweight = None
    if dinput_dtype is not None:
        assert weight is not None
        dinput = dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=dinput_dtype)
    if dweight_dtype is not None:
        assert input is not None
        k = input.shape[-1]
        dweight = dy.new_empty((k, n) if transposed else (n, k), dtype=dweight_dtype)
    return dinput, dweight.t() if dweight is not None and transposed else dweight, _wanted(dy, (n,), dbias_dtype)


@_operator
def linear_wgrad_add(grad: Tensor, dpre: Tensor, input: Tensor, acc: torch.dtype, chunk: int) -> None:
    return None


# ---------------------------------------------------------------------------------------------------------------- rows


@_operator
def softmax_fwd(
    input: Tensor, dim: int, scale: float, mask: Tensor | None, causal: bool, log: bool, out_dtype: torch.dtype
) -> Tensor:
    return input.new_empty(input.shape, dtype=out_dtype)


@_operator
def softmax_bwd(
    dy: Tensor, output: Tensor, dim: int, scale: float, causal: bool, log: bool, dinput_dtype: torch.dtype
) -> Tensor:
    return output.new_empty(output.shape, dtype=dinput_dtype)


def _statistics(input: Tensor, ndim: int, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    rows = math.prod(input.shape[: input.dim() - ndim])
    return input.new_empty((rows,), dtype=torch.float64 if input.dtype == torch.float64 else torch.float32)


@_operator
def layer_norm_fwd(
    input: Tensor,
    ndim: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    save_stats: bool,
) -> tuple[Tensor, Wanted, Wanted, Wanted]:
    return (
        input.new_empty(input.shape, dtype=out_dtype),
        None if residual is None else residual.new_empty(input.shape),
        _statistics(input, ndim, save_stats),
        _statistics(input, ndim, save_stats),
    )


@_operator
def rms_norm_fwd(
    input: Tensor,
    ndim: int,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    save_stats: bool,
) -> tuple[Tensor, Wanted, Wanted]:
    return (
        input.new_empty(input.shape, dtype=out_dtype),
        None if residual is None else residual.new_empty(input.shape),
        _statistics(input, ndim, save_stats),
    )


@_operator
def layer_norm_bwd(
    dy: Tensor,
    dsum: Tensor | None,
    saved: Tensor,
    ndim: int,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dinput_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Wanted, Wanted, Wanted]:
    shape = saved.shape[saved.dim() - ndim :]
    return (
        _wanted(saved, saved.shape, dinput_dtype),
        _wanted(saved, shape, dweight_dtype),
        _wanted(saved, shape, dbias_dtype),
    )


@_operator
def rms_norm_bwd(
    dy: Tensor,
    dsum: Tensor | None,
    saved: Tensor,
    ndim: int,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    dinput_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
) -> tuple[Wanted, Wanted]:
    shape = saved.shape[saved.dim() - ndim :]
    return _wanted(saved, saved.shape, dinput_dtype), _wanted(saved, shape, dweight_dtype)
