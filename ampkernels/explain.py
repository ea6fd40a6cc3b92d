"""`explain`: what a call would do, without doing it: kernel and plan, the accumulate in force, what is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import autocast, functional
from .accumulate import FP32, Accumulate, resolve

try:
    from . import _plan  # type: ignore[attr-defined]
except ImportError:
    _plan = None


@dataclass
class Explanation:
    """What `explain` found; `str()` gives it as a block of text.

    Attributes:
        op: the op's name.
        device: "cpu", "cuda" or "meta".
        path: the kernels that compute it, in words.
        plan: their launch plans, one a line, from the planner; or why there is none.
        accumulate: the policy in force (GEMMs); None for rows, which always add in fp32 (fp64 for fp64).
        dtypes: the dtype of each tensor, and "computed in" and "output".
        rounding: where values are rounded.
        notes: what else a reader should know about this very call.
        ahead: which library was measured to be faster here, and the committed result, in benchmarks/results/, that shows
            it.
    """

    op: str
    device: str
    path: str
    plan: str
    accumulate: Accumulate | None
    dtypes: dict[str, torch.dtype]
    rounding: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ahead: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        policy = "fp32 (fp64 for fp64), whatever accumulate says" if self.accumulate is None else str(self.accumulate)
        sections: list[tuple[str, Sequence[str]]] = [
            ("accumulate", [policy]),
            ("dtypes", [", ".join(f"{name} {_short(dtype)}" for name, dtype in self.dtypes.items())]),
            ("plan", self.plan.splitlines()),
            ("rounding", self.rounding),
            ("notes", self.notes),
            ("faster", self.ahead),
        ]
        lines = [f"{self.op} on {self.device}: {self.path}"]
        for title, texts in sections:
            lines += [f"  {title if i == 0 else '':<11} {text}" for i, text in enumerate(texts)]
        return "\n".join(lines)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explains the call `ampkernels.<op>(*args, **kwargs)`: same arguments, same checks, nothing is computed.

    Args:
        op: the name of a functional op ("linear", "gated_linear", "mlp", "softmax", "log_softmax", "layer_norm",
            "rms_norm"), or the function itself.

    Raises:
        ValueError: for an unknown op; and whatever the call itself would raise.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _EXPLAINERS:
        raise ValueError(f"explain: op must be one of {', '.join(_EXPLAINERS)}, got {name!r}")
    return _EXPLAINERS[name](*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------- GEMM

_ONEDNN_ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")  # csrc/binding/linear.cpp
_16_BIT = (torch.float16, torch.bfloat16)


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for a 16-bit dtype on this CPU (csrc/binding/linear.cpp asks the same)."""
    if dtype not in _16_BIT:
        return True
    short = "fp16" if dtype == torch.float16 else "bf16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")())


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    accumulate: Accumulate | str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Explanation:
    return _affine("linear", input, weight, bias, activation, residual, accumulate, out_dtype)


def _gated_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    accumulate: Accumulate | str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Explanation:
    return _affine("gated_linear", input, weight, bias, activation, None, accumulate, out_dtype)


def _affine(
    op: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    accumulate: Accumulate | str | None,
    out_dtype: torch.dtype | None,
) -> Explanation:
    device = functional._check_tensors(op, ("input", "weight", "bias"), (input, weight, bias))
    shapes = _shapes(input, weight, bias)
    added = {} if residual is None else {"residual": _shapes(residual)[0]}
    getattr(functional, op)(*shapes, activation=activation, out_dtype=out_dtype, **added)
    if residual is not None:
        functional._check_added(op, residual, input, weight.shape[0])
    dtype = autocast.gemm_dtype(device, input.dtype, weight.dtype) or functional._refuse_mix(op, input, weight=weight)
    policy = resolve(op, accumulate, dtype)
    out = out_dtype or (dtype if residual is None else residual.dtype)
    training = functional._needs_grad(input, weight, bias, residual)
    gated = op == "gated_linear"
    fused = not gated and not (training and activation not in (None, "relu")) and out == dtype
    if residual is not None:  # oneDNN adds one of the operands' dtype, to a product without activation
        fused = fused and activation is None and residual.dtype == dtype
    result = Explanation(
        op,
        device,
        _gemm_path(device, dtype, policy, fused and activation in _ONEDNN_ACTIVATIONS, residual is not None),
        _gemm_plan(input, _operand(input, dtype), weight, dtype, policy, activation, "gated" if gated else "linear"),
        policy,
        _dtypes({"input": input, "weight": weight, "bias": bias, "residual": residual}, dtype, out),
    )
    widened = out != dtype or (residual is not None and not fused)
    _gemm_rounding(result, device, dtype, activation, fused, training, gated, widened)
    _gemm_notes(result, device, dtype, {"input": input, "weight": weight}, training, widened)
    _residual_notes(result, device, dtype, residual)
    m = input.numel() // max(input.shape[-1], 1)
    result.ahead = _gemm_ahead(device, _arch(input), dtype, (m, *weight.shape), policy, None if gated else activation)
    return result


def _mlp(
    input: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str | None = "gelu",
    residual: Tensor | None = None,
    accumulate: Accumulate | str | None = None,
) -> Explanation:
    device = functional._check_tensors("mlp", ("input", "w1", "b1", "w2", "b2"), (input, w1, b1, w2, b2))
    functional.mlp(*_shapes(input, w1, b1, w2, b2), activation=activation, residual=_shapes(residual)[0])
    if residual is not None:
        functional._check_added("mlp", residual, input, w2.shape[0])
    dtype = autocast.gemm_dtype(device, input.dtype, w1.dtype, w2.dtype) or functional._refuse_mix(
        "mlp", input, w1=w1, w2=w2
    )
    policy = resolve("mlp", accumulate, dtype)
    out = dtype if residual is None else residual.dtype
    training = functional._needs_grad(input, w1, b1, w2, b2, residual)
    fused = not (training and activation not in (None, "relu"))
    hidden = (True, w1.shape[0] % 8 == 0)
    plans = [
        "w1: " + _gemm_plan(input, _operand(input, dtype), w1, dtype, policy, activation),
        "w2: " + _gemm_plan(input, hidden, w2, dtype, policy),
    ]
    result = Explanation(
        "mlp",
        device,
        _gemm_path(device, dtype, policy, fused and activation in _ONEDNN_ACTIVATIONS) + ", twice",
        "\n".join(plans),
        policy,
        _dtypes({"input": input, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "residual": residual}, dtype, out),
    )
    if residual is not None:
        result.path += ", the second time with the residual"
    _gemm_rounding(result, device, dtype, activation, fused, training, False)
    result.rounding.insert(-1, f"the hidden activations are rounded once to {_short(dtype)}")
    if training and dtype in _16_BIT and out != dtype:
        result.rounding.append(f"backward: dy is rounded once to {_short(dtype)}, but for b2's gradient")
    _gemm_notes(result, device, dtype, {"input": input, "w1": w1, "w2": w2}, training, out != dtype)
    _residual_notes(result, device, dtype, residual)
    m = input.numel() // max(input.shape[-1], 1)
    for name, weight, act in (("w1", w1, activation), ("w2", w2, None)):
        ahead = _gemm_ahead(device, _arch(input), dtype, (m, *weight.shape), policy, act)
        result.ahead += [f"{name}: {text}" for text in ahead]
    return result


def _gemm_path(device: str, dtype: torch.dtype, policy: Accumulate, fused: bool, residual: bool = False) -> str:
    if device == "cpu" and policy != FP32:
        return "our emulation of the GPU's sums, with the whole epilogue fused"
    if device == "cuda" and dtype in _16_BIT:
        return "our tensor-core GEMM with the whole epilogue fused"
    if device == "cuda":
        return "cuBLAS (through ATen), then our epilogue kernel"
    if device == "cpu" and not _onednn_takes(dtype):
        return (
            "oneDNN's linear in float32 on widened operands (no kernels for this dtype on this CPU), then our epilogue"
        )
    if device == "cpu" and dtype != torch.float64:
        what = "residual" if residual else "activation"
        return f"oneDNN's linear with the {what} fused" if fused else "oneDNN's linear, then our epilogue"
    return "ATen's product, then our epilogue" if device == "cpu" else "shapes only"


def _gemm_plan(
    input: Tensor,
    a: tuple[bool, bool],
    weight: Tensor,
    dtype: torch.dtype,
    policy: Accumulate,
    activation: str | None = None,
    epilogue: str = "linear",
) -> str:
    """The plan of the GEMM of `input`'s rows, an operand that lies as `a` says, and `weight`."""
    m = input.numel() // max(input.shape[-1], 1)
    n, k = weight.shape
    problem = f"M = {m}, N = {n}, K = {k}: "
    if not (input.is_cuda and dtype in _16_BIT):
        return problem + "the library's"
    if _plan is None or not hasattr(_plan, "gemm_plan"):
        return problem + "plan not built"
    (a_kmajor, a_aligned), (b_kmajor, b_aligned) = a, _operand(weight, dtype)
    arch = _arch(input)
    text = _plan.gemm_plan(
        m=m,
        n=n,
        k=k,
        dtype=_short(dtype),
        acc=_short(policy.dtype),
        chunk=policy.chunk or 0,
        a_kmajor=a_kmajor,
        b_kmajor=b_kmajor,
        aligned=a_aligned and b_aligned,
        epilogue=epilogue,
        arch=arch,
        sms=torch.cuda.get_device_properties(input.device).multi_processor_count,
        activated=activation not in (None, "relu"),
    )
    return problem + ("the sm_90a kernel where it takes these operands, else " if arch == 90 else "") + str(text)


def _gemm_ahead(
    device: str, arch: int, dtype: torch.dtype, mnk: tuple[int, ...], policy: Accumulate, activation: str | None
) -> list[str]:
    """Where a committed result shows a library, or a plainer policy, ahead of the GEMM that this call would take. Those of
    fp32 accumulators are of bf16, which says enough of fp16 on a GPU, where the kernels are the same. `activation`: of a
    plain linear."""
    m, n, k = mnk
    if device == "cpu":
        few = policy == FP32 and m == 1 and dtype == torch.bfloat16
        return ["eager takes 0.9 of the time at one row (cpu-amd-epyc/ops.csv)"] if few else []
    if device != "cuda" or arch != 90 or dtype not in _16_BIT:
        return []
    if policy.dtype == torch.float16:
        if 64 < m <= 512:  # not measured
            return []
        times = "1.2 to 1.3 times" if m <= 64 else "1.01 to 1.2 times" if policy.chunk else "0.95 to 1.05 times"
        rows = "64 rows" if m <= 64 else "3072 rows and more"
        return [f"fp16 accumulators take {times} as long as fp32 ones at {rows} (h200/fp16.csv)"]
    if not policy.chunk and 512 <= m <= 4096 and max(n, k) <= 1024 and activation is not None:
        return ["eager is 1.06 to 1.8 times as fast at 768 x 768 to 1024 x 1024 with GELU (h200/few.csv)"]
    if 64 < m <= 512:
        times = "1.9 to 2.4" if policy.chunk else "1.2"
        return [f"cuBLAS's plain product is {times} times as fast at 256 rows (h200/decode.csv)"]
    if policy.chunk and m > 512:
        return ["a chunk takes 1.04 to 1.34 times as long as fp32 (h200/providers-gemm.csv)"]
    if policy.chunk and policy.chunk < 512 and k >= 32 * policy.chunk:
        return ["cuBLAS is 1.3 to 1.4 times as fast at K = 14336 in chunks of 128 (h200/decode.csv)"]
    if m > 512 and k < 1024 and activation == "gelu_tanh":
        return ["cublasLt's product with GELU is 1.1 times as fast at K = 768 (h200/providers-gemm.csv)"]
    return []


def _rows_ahead(op: str, device: str, arch: int, dtype: torch.dtype, cols: int) -> list[str]:
    """The same for softmax and norms."""
    if device != "cuda" or arch != 90 or dtype not in _16_BIT or cols > 131072:
        return []
    if op == "log_softmax":
        return []
    if op == "softmax":
        return ["Liger is 1.02 times as fast in forward at 8192 columns (h200/providers-rows.csv)"]
    times = "1.12" if op == "layer_norm" else "1.06"
    return [f"QuACK or torch.compile are up to {times} times as fast in forward (h200/providers-rows.csv)"]


def _operand(tensor: Tensor, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a GEMM operand is K-major, and whether its 16-byte pieces are aligned; a cast one is a new tensor."""
    if tensor.dim() == 1 or tensor.dtype != dtype:
        return True, tensor.dim() == 1 or tensor.shape[-1] % 8 == 0
    kmajor = tensor.stride(-1) == 1
    return kmajor, tensor.data_ptr() % 16 == 0 and tensor.stride(-2 if kmajor else -1) % 8 == 0


def _gemm_rounding(
    result: Explanation,
    device: str,
    dtype: torch.dtype,
    activation: str | None,
    fused: bool,
    training: bool,
    gated: bool,
    widened: bool = False,
) -> None:
    wide = "fp64" if dtype == torch.float64 else "fp32"
    policy = result.accumulate
    sums = "fp64" if dtype == torch.float64 else str(policy)
    result.rounding.append(f"products exact, sums in {sums}" if dtype in _16_BIT else f"products and sums in {sums}")
    by_library = device == "cpu" and policy == FP32 and not (fused and activation in _ONEDNN_ACTIVATIONS)
    if by_library and dtype in _16_BIT and _onednn_takes(dtype) and not widened and (activation or gated):
        result.rounding.append(f"the pre-activation is rounded to {_short(dtype)} before the activation")
    epilogue = "bias, activation and residual" if "residual" in result.dtypes else "bias and activation"
    result.rounding.append(f"{epilogue} in {wide}, output rounded once to {_short(result.dtypes['output'])}")
    if training:
        kept = "" if activation is None and not gated else f"dy * {activation or 'gate'}' in {wide}, "
        result.rounding.append(f"backward: {kept}rounded once to {_short(dtype)} for the two GEMMs")


def _gemm_notes(
    result: Explanation,
    device: str,
    dtype: torch.dtype,
    operands: dict[str, Tensor],
    training: bool,
    widened: bool,
) -> None:
    for name, tensor in operands.items():
        if tensor.dtype != dtype:
            result.notes.append(f"{name} is cast to {_short(dtype)} in every call (autocast; no cache)")
        elif tensor.dim() > 1 and tensor.stride(-1) != 1 and not (tensor.dim() == 2 and tensor.stride(0) == 1):
            result.notes.append(f"{name} has no unit stride: copied once")
    by_library = device == "cpu" and dtype in _16_BIT and result.accumulate == FP32
    if by_library and widened:
        what = "output is not of the operands' dtype: they" if result.dtypes["output"] != dtype else "the operands"
        result.notes.append(f"{what} are widened to fp32 (exact) for the library")
    if by_library and training:
        result.notes.append(
            f"dinput and dweight are in the library's output dtype, {_short(dtype)}, before any widening"
        )
    if device == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        result.notes.append("torch.backends.cuda.matmul.allow_tf32 is set: cuBLAS rounds the operands to TF32")


def _residual_notes(result: Explanation, device: str, dtype: torch.dtype, residual: Tensor | None) -> None:
    if residual is None or dtype not in _16_BIT or (device != "cuda" and result.accumulate == FP32):
        return
    if residual.dtype not in (dtype, torch.float32):
        result.notes.append("residual is widened to float32 (exact) in every call")
    elif residual.dim() > 1 and residual.stride(-1) != 1:
        result.notes.append("residual has no unit stride: copied once")


# ---------------------------------------------------------------------------------------------------------------- rows


def _softmax(
    input: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    out_dtype: functional.OutDtype = None,
) -> Explanation:
    functional._check_tensors("softmax", ("input",), (input,))
    if mask is not None:
        functional._check_mask(mask, input)
    functional.softmax(_shapes(input)[0], dim, scale=scale, causal=causal, out_dtype=out_dtype)
    dim = functional._dim("softmax", input, dim)
    result = _rows("softmax", input, input.shape[dim] if input.dim() else 1, {"input": input, "mask": mask}, out_dtype)
    if mask is not None:
        result.notes.append("a row of which the mask keeps nothing is 0")
    return result


def _log_softmax(input: Tensor, dim: int = -1, *, out_dtype: functional.OutDtype = None) -> Explanation:
    functional._check_tensors("log_softmax", ("input",), (input,))
    functional.log_softmax(_shapes(input)[0], dim, out_dtype=out_dtype)
    dim = functional._dim("log_softmax", input, dim)
    return _rows("log_softmax", input, input.shape[dim] if input.dim() else 1, {"input": input}, out_dtype)


def _layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    out_dtype: functional.OutDtype = None,
) -> Explanation:
    tensors = {"input": input, "weight": weight, "bias": bias, "residual": residual}
    functional._check_tensors("layer_norm", tuple(tensors), tuple(tensors.values()))
    x, w, b, r = _shapes(*tensors.values())
    functional.layer_norm(x, normalized_shape, w, b, eps, residual=r, out_dtype=out_dtype)
    return _norm("layer_norm", input, normalized_shape, tensors, residual, out_dtype)


def _rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    out_dtype: functional.OutDtype = None,
) -> Explanation:
    tensors = {"input": input, "weight": weight, "residual": residual}
    functional._check_tensors("rms_norm", tuple(tensors), tuple(tensors.values()))
    x, w, r = _shapes(*tensors.values())
    functional.rms_norm(x, normalized_shape, w, eps, residual=r, weight_offset=weight_offset, out_dtype=out_dtype)
    return _norm("rms_norm", input, normalized_shape, tensors, residual, out_dtype)


def _norm(
    op: str,
    input: Tensor,
    normalized_shape: int | Sequence[int],
    tensors: dict[str, Tensor | None],
    residual: Tensor | None,
    out_dtype: functional.OutDtype,
) -> Explanation:
    if residual is not None:
        functional._check_residual(op, residual, input)
    cols = normalized_shape if isinstance(normalized_shape, int) else math.prod(normalized_shape)
    result = _rows(op, input, cols, tensors, out_dtype)
    result.rounding.insert(0, "mean and variance in two passes over the row" if op == "layer_norm" else "mean square")
    if residual is not None:
        result.rounding.append(
            f"the norm is of the unrounded sum, which is returned rounded to {_short(residual.dtype)}"
        )
    return result


def _rows(
    op: str, input: Tensor, cols: int, tensors: dict[str, Tensor | None], out_dtype: functional.OutDtype
) -> Explanation:
    device = functional._check_tensors(op, ("input",), (input,))
    out = functional._rows_dtype(op, device, input, out_dtype)
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    if device == "cuda" and _plan is not None and hasattr(_plan, "rows_plan"):
        plan = str(_plan.rows_plan(op, cols, _short(input.dtype), _arch(input)))
    else:
        plan = f"rows of {cols}: " + ("plan not built" if device == "cuda" else "rows shared among threads")
    return Explanation(
        op,
        device,
        "shapes only" if device == "meta" else "our row kernel",
        plan,
        None,
        _dtypes(tensors, wide, out),
        [f"everything in {_short(wide)}, output rounded once to {_short(out)}"],
        ahead=_rows_ahead(op, device, _arch(input), input.dtype, cols),
    )


# -------------------------------------------------------------------------------------------------------------- shared


def _shapes(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Tensors of the same shapes without data: the op itself, called with them, checks all that is not a dtype."""
    return tuple(torch.empty(t.shape, device="meta") if isinstance(t, Tensor) else t for t in tensors)


def _dtypes(tensors: dict[str, Tensor | None], computed: torch.dtype, out: torch.dtype) -> dict[str, torch.dtype]:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    return {**dtypes, "computed in": computed, "output": out}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _arch(tensor: Tensor) -> int:
    """10 times the compute capability; 0 where there is none."""
    if not tensor.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


_EXPLAINERS: dict[str, Callable[..., Explanation]] = {
    "linear": _linear,
    "gated_linear": _gated_linear,
    "mlp": _mlp,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}
