"""Golden digests: what bits an op gives, written down on one machine and checked on any other.

    python -m ampkernels.numerics.golden write --device cuda --out tests/golden/h200.json
    python -m ampkernels.numerics.golden check --device cpu tests/golden/h200.json

GEMMs under a policy with a chunk, with every activation, promise their bits on every device; rows (softmax, norms) and
column sums promise them on one kind of GPU only, and are checked only there. Inputs come from `data.generate`; a digest
is the first 16 hex digits of the SHA-256 of an output's bytes, row-major, every NaN replaced by one pattern.

A kernel change that alters bits fails the check until the file is written anew, and `CHANGELOG.md` says so under
*Numerics*.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import functional
from .._build import csrc_digest
from .._ops import ACTIVATIONS
from .data import generate

FORMAT = 1
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call. `any_device`: outputs whose bits every device promises; the others are compared on equal GPUs only."""

    name: str
    run: Callable[[str], Outputs]
    any_device: frozenset[str]


def digest(t: Tensor) -> str:
    t = t.detach().cpu().contiguous()
    t = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    raw = t.view(_INTEGERS[t.element_size()]).numpy().astype(f"<i{t.element_size()}").tobytes()
    header = f"{t.dtype} {tuple(t.shape)}\0".encode()
    return hashlib.sha256(header + raw).hexdigest()[:16]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _policies(dtype: torch.dtype) -> list[str]:
    both = ["fp32/128", "fp32/512"]
    return both if dtype == torch.bfloat16 else [*both, "fp16/64", "fp16/128"]


def forward_and_backward(op: str, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, **options: Any) -> Outputs:
    """y, dx, dw and, with a bias, db of `linear` or `gated_linear`; the operands require grad."""
    y = getattr(functional, op)(x, w, b, **options)
    y.backward(dy.to(y.device, y.dtype))
    grads = {"dx": x.grad, "dw": w.grad, "db": None if b is None else b.grad}
    return {"y": y, **{key: g for key, g in grads.items() if g is not None}}


# (M, N, K): one row, less than a tile, K and N that nothing divides, more than a tile, long K.
SHAPES = [(1, 64, 256), (3, 17, 40), (33, 50, 1000), (70, 136, 520), (150, 264, 768), (16, 48, 4096)]


def _linear(
    op: str,
    dtype: torch.dtype,
    policy: str,
    shape: tuple[int, int, int],
    kind: str,
    activation: str | None,
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype | None = None,
) -> Case:
    m, n, k = shape
    features = 2 * n if op == "gated_linear" else n

    def run(device: str) -> Outputs:
        # Products of two subnormals vanish, and say nothing.
        other = "normal" if kind == "subnormal" else kind
        x, w, dy = (
            generate(kind, (m, k), dtype, 0),
            generate(other, (features, k), dtype, 1),
            generate(other, (m, n), dtype, 2),
        )
        x, w = (t.to(device).requires_grad_() for t in (x, w))
        b = None if bias_dtype is None else generate("normal", (features,), bias_dtype, 3).to(device).requires_grad_()
        options: dict[str, Any] = {"activation": activation, "accumulate": policy, "out_dtype": out_dtype}
        if residual_dtype is not None:
            options["residual"] = generate("normal", (m, n), residual_dtype, 4).to(device)
        return forward_and_backward(op, x, w, b, dy, **options)

    name = (
        f"{op} {_name(dtype)} {policy} m{m} n{n} k{k} {kind} {activation or 'none'} "
        f"bias {'none' if bias_dtype is None else _name(bias_dtype)} "
        f"{'' if residual_dtype is None else f'residual {_name(residual_dtype)} '}-> {_name(out_dtype)}"
    )
    return Case(name, run, frozenset({"y", "dx", "dw"}))


def _linears() -> Iterator[Case]:
    activations = itertools.cycle(ACTIVATIONS)
    gates = itertools.cycle(["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
    biases = itertools.cycle([torch.float32, None, torch.bfloat16, torch.float16])
    outs = itertools.cycle([None, torch.float32, None])
    for dtype in (torch.bfloat16, torch.float16):
        for policy, shape in itertools.product(_policies(dtype), SHAPES):
            for kind in ("normal", "uniform", "wide", "subnormal"):
                if kind == "wide" and dtype == torch.float16:
                    continue  # sums beyond 65504
                out = next(outs) or dtype
                yield _linear("linear", dtype, policy, shape, kind, next(activations), next(biases), out)
            yield _linear("gated_linear", dtype, policy, shape, "normal", next(gates), next(biases), dtype)
        for policy in _policies(dtype):
            yield _linear("linear", dtype, policy, (33, 50, 1000), "special", "gelu", torch.float32, dtype)


def _residuals() -> Iterator[Case]:
    shapes = itertools.cycle(SHAPES[1:])
    for dtype in (torch.bfloat16, torch.float16):
        for policy, activation, wide in itertools.product(_policies(dtype), (None, "gelu"), (False, True)):
            residual = torch.float32 if wide else dtype
            yield _linear("linear", dtype, policy, next(shapes), "normal", activation, dtype, residual, residual)


def _sweep(activation: str, dtype: torch.dtype) -> Case:
    """The activation of every 16-bit value, and of 65,536 fp32 patterns through the bias; and its derivative."""

    def run(device: str) -> Outputs:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        values = bits.view(dtype)
        x = torch.zeros(2**16, 16, dtype=dtype)
        x[:, 0] = values
        w = torch.zeros(8, 16, dtype=dtype)
        w[:, 0] = 1
        x, w = x.to(device).requires_grad_(), w.to(device)
        y = functional.linear(x, w, activation=activation, accumulate="fp32/128", out_dtype=torch.float32)
        one = torch.zeros_like(y)
        one[:, 0] = 1
        y.backward(one)
        stride = torch.arange(2**16, dtype=torch.int64) * 65521 - 2**31
        bias = stride.to(torch.int32).view(torch.float32).to(device)
        zero, zeros = torch.zeros(1, 16, dtype=dtype, device=device), torch.zeros(2**16, 16, dtype=dtype, device=device)
        assert x.grad is not None
        swept = functional.linear(
            zero, zeros, bias, activation=activation, accumulate="fp32/128", out_dtype=torch.float32
        )
        return {"y": y[:, :1], "dx": x.grad[:, :1], "fp32": swept}

    return Case(f"activation {_name(dtype)} {activation}", run, frozenset({"y", "dx", "fp32"}))


def _rows(op: str, dtype: torch.dtype, shape: tuple[int, int]) -> Case:
    def run(device: str) -> Outputs:
        x = generate("normal", shape, dtype, 0).to(device).requires_grad_()
        dy = generate("normal", shape, dtype, 1).to(device)
        w = generate("uniform", shape[1:], torch.float32, 2).to(device).requires_grad_()
        b = generate("normal", shape[1:], torch.float32, 3).to(device).requires_grad_()
        if op in ("softmax", "log_softmax"):
            y = getattr(functional, op)(x)
            parameters = {}
        elif op == "layer_norm":
            y = functional.layer_norm(x, shape[1:], w, b)
            parameters = {"dw": w, "db": b}
        else:
            y = functional.rms_norm(x, shape[1:], w)
            parameters = {"dw": w}
        y.backward(dy.to(y.dtype))
        grads = {key: p.grad for key, p in {"dx": x, **parameters}.items()}
        return {"y": y, **{key: g for key, g in grads.items() if g is not None}}

    return Case(f"{op} {_name(dtype)} {shape[0]}x{shape[1]}", run, frozenset())


def cases() -> Iterator[Case]:
    yield from _linears()
    yield from _residuals()
    for dtype in (torch.bfloat16, torch.float16):
        for activation in ACTIVATIONS:
            if activation is not None:
                yield _sweep(activation, dtype)
    for op in ("softmax", "log_softmax", "layer_norm", "rms_norm"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for shape in ((5, 100), (64, 1024), (3, 20000)):
                yield _rows(op, dtype, shape)


def machine(device: str) -> dict[str, object]:
    cuda = torch.device(device).type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else None,
        "csrc": csrc_digest(),
        "torch": torch.__version__,
    }


def compute(device: str, *, any_device: bool = False, select: Callable[[Case], bool] | None = None) -> dict[str, str]:
    """Digests by "case: output"; with `any_device`, only of outputs that every device promises."""
    found = {}
    for case in cases():
        if (select is not None and not select(case)) or (any_device and not case.any_device):
            continue
        for key, value in case.run(device).items():
            if not any_device or key in case.any_device:
                found[f"{case.name}: {key}"] = digest(value)
    return found


def write(device: str, path: Path) -> int:
    found = compute(device)
    promised = {f"{case.name}: {key}" for case in cases() for key in case.any_device}
    content = {
        "format": FORMAT,
        **machine(device),
        "any_device": {name: value for name, value in found.items() if name in promised},
        "this_gpu": {name: value for name, value in found.items() if name not in promised},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{path}: {len(found)} digests of {content['gpu'] or 'this CPU'}, csrc {content['csrc']}")
    return 0


def differences(device: str, content: dict[str, Any]) -> tuple[list[str], int]:
    """The outputs whose digests are not those of the file (or that it does not have), and how many were compared."""
    here = machine(device)
    same_gpu = here["capability"] is not None and here["capability"] == content["capability"]
    expected = {**content["any_device"], **(content["this_gpu"] if same_gpu else {})}
    found = compute(device, any_device=not same_gpu)
    return [name for name in found if found[name] != expected.get(name)], len(found)


def check(device: str, path: Path) -> int:
    content = json.loads(path.read_text())
    if content["format"] != FORMAT:
        print(f"{path}: format {content['format']}, this is {FORMAT}")
        return 1
    wrong, count = differences(device, content)
    for name in wrong:
        print(f"differs: {name}")
    where = content["gpu"] or "a CPU"
    print(f"{path} ({where}, csrc {content['csrc']}): {count - len(wrong)} of {count} digests are the same on {device}")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ampkernels.numerics.golden", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["write", "check"])
    parser.add_argument("files", nargs="*", type=Path, help="check: golden files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("tests/golden/h200.json"), help="write: the file")
    args = parser.parse_intermixed_args(argv)
    if args.command == "write":
        return write(args.device, args.out)
    files = args.files or sorted(Path("tests/golden").glob("*.json"))
    if not files:
        parser.error("no golden files: tests/golden/*.json")
    return max(check(args.device, path) for path in files)


if __name__ == "__main__":
    sys.exit(main())
