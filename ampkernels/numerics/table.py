"""`python -m ampkernels numerics`: an op's error against float64 under every policy, with eager beside it.

    python -m ampkernels numerics                                     # linear, bf16, K = 4096, on the GPU if there is one
    python -m ampkernels numerics --data uniform --k 256 4096 16384 --plot drift.png
    python -m ampkernels numerics --op layer_norm --k 1024 65536 --dtype float16
    python -m ampkernels numerics --dtypes                            # the dtypes: range, precision, use

Tables are printed by rich if it is installed, the plot needs matplotlib; both come with `pip install ampkernels[bench]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional, reference
from .._ops import ACTIVATIONS
from ..accumulate import Accumulate
from .bounds import forward_bound
from .data import KINDS, generate
from .dtypes import DTYPES
from .emulation import emulate
from .error import ErrorReport, error_report

GEMMS = ("linear", "gated_linear")
ROWS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
POLICIES = ("fp32", "fp32/1024", "fp32/512", "fp32/128", "fp16", "fp16/512", "fp16/128", "fp16/64")


@dataclass(frozen=True)
class Line:
    """One way of computing an op at one length: its error, or why there is none."""

    k: int
    way: str
    out: str
    report: ErrorReport | None
    bound: float | None
    note: str = ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(k: int, way: str, run: Callable[[], Tensor], exact: Tensor, bound: float | None = None) -> Line:
    try:
        result = run()
    except (NotImplementedError, ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        return Line(k, way, "", None, bound, str(error).split("\n")[0])
    return Line(k, way, _name(result.dtype), error_report(result, exact.to(result.device)), bound)


def measure_gemm(
    op: str, k: int, *, rows: int, columns: int, dtype: torch.dtype, data: str, activation: str | None, device: str,
    policies: Sequence[str], arch: str,
) -> list[Line]:  # fmt: skip
    """All ways of computing a GEMM at one K. The results are fp32 where a way can give that, so that what is seen is
    the accumulation and not the rounding of the output."""
    gated = op == "gated_linear"
    x = generate(data, (rows, k), dtype, 1).to(device)
    w = generate(data, (2 * columns if gated else columns, k), dtype, 2).to(device)
    exact = getattr(reference, op)(x, w, activation=activation)
    function = getattr(functional, op)

    def eager(x: Tensor, w: Tensor) -> Tensor:
        pre = F.linear(x, w)
        if not gated:
            return reference.activation(pre, activation)
        gate, up = pre.chunk(2, -1)
        return reference.activation(gate, activation) * up

    def with_fp32_output() -> Tensor:
        pre = torch.mm(x, w.T, out_dtype=torch.float32)
        return reference.activation(pre, activation)

    lines = [
        _line(k, "eager", lambda: eager(x, w), exact),
        _line(k, "eager in fp32", lambda: eager(x.float(), w.float()), exact),
    ]
    if x.is_cuda and not gated:
        lines.append(_line(k, "eager, fp32 output", with_fp32_output, exact))
    for text in policies:
        policy = Accumulate.parse(text)
        if policy.dtype == torch.float16 and dtype != torch.float16:
            continue
        if policy.chunk is not None and policy.chunk >= k:
            continue
        bound = forward_bound(k, policy, arch=arch)

        def ours(policy: Accumulate = policy) -> Tensor:
            result: Tensor = function(x, w, activation=activation, accumulate=policy, out_dtype=torch.float32)
            return result

        def emulated(policy: Accumulate = policy) -> Tensor:
            return emulate(
                x, w, activation=activation, gated=gated, accumulate=policy, out_dtype=torch.float32, arch=arch
            )

        lines.append(_line(k, text, ours, exact, bound))
        # Under a chunk the CPU path is the emulation already.
        if not x.is_cuda and (policy.chunk is None or lines[-1].report is None):
            lines.append(_line(k, f"{text}, {arch} emulated", emulated, exact, bound))
    return lines


def measure_rows(op: str, k: int, *, rows: int, dtype: torch.dtype, data: str, device: str) -> list[Line]:
    """Ours, eager, and eager in fp32 on a row op of length k."""
    x = generate(data, (rows, k), dtype, 1).to(device)
    w = generate("uniform", (k,), torch.float32, 2).to(device) + 0.5
    b = generate("normal", (k,), torch.float32, 3).to(device)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "softmax": (lambda x: functional.softmax(x), lambda x: F.softmax(x, -1), lambda x: reference.softmax(x)),
        "log_softmax": (
            lambda x: functional.log_softmax(x),
            lambda x: F.log_softmax(x, -1),
            lambda x: reference.log_softmax(x),
        ),
        "layer_norm": (
            lambda x: functional.layer_norm(x, (k,), w, b),
            lambda x: F.layer_norm(x, (k,), w.to(x.dtype), b.to(x.dtype)),
            lambda x: reference.layer_norm(x, (k,), w, b),
        ),
        "rms_norm": (
            lambda x: functional.rms_norm(x, (k,), w),
            lambda x: F.rms_norm(x, (k,), w.to(x.dtype)),
            lambda x: reference.rms_norm(x, (k,), w),
        ),
    }
    ours, eager, exact_of = calls[op]
    exact = exact_of(x)
    return [
        _line(k, "ampkernels", lambda: ours(x), exact),
        _line(k, "eager", lambda: eager(x), exact),
        _line(k, "eager in fp32", lambda: eager(x.float()), exact),
    ]


def _print(title: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]
        print(title)
        for row in [header, *body]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*header, title=title, title_justify="left")
    for row in body:
        table.add_row(*row)
    # A pipe or a file has no width of its own: nothing is cut off there.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_lines(title: str, lines: Sequence[Line]) -> None:
    """Prints one table."""
    body = []
    for line in lines:
        bound = "" if line.bound is None else f"{line.bound:.1e}"
        if line.report is None:
            body.append([str(line.k), line.way, "", "", "", "", "", bound, line.note[:60]])
            continue
        r = line.report
        note = f"{r.non_finite} not finite" if r.non_finite else line.note
        body.append(
            [
                *(str(line.k), line.way, line.out, f"{r.relative_l2:.2e}", f"{r.max_abs:.2e}", str(r.max_ulp)),
                *(f"{r.shrink:+.1e}", bound, note),
            ]
        )
    _print(title, ["K", "way", "output", "rel. L2", "max |error|", "max ulp", "shrink", "bound", ""], body)


def print_dtypes() -> None:
    """Prints the table of dtypes."""
    header = ["dtype", "exponent", "fraction", "largest", "smallest normal", "smallest", "round-off", "exact to", "use"]
    body = [
        [
            *(d.name, str(d.exponent_bits), str(d.fraction_bits), f"{d.largest:.6g}", f"{d.smallest_normal:.3g}"),
            *(f"{d.smallest_subnormal:.3g}", f"2^-{d.fraction_bits + 1}", str(d.largest_integer), d.use),
        ]
        for d in DTYPES
    ]
    _print("dtypes", header, body)


def plot(lines: Sequence[Line], title: str, path: Path) -> None:
    """Relative L2 error over K, one curve for each way; dashed, the bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for i, way in enumerate(dict.fromkeys(line.way for line in lines)):
        points = [(line.k, line.report.relative_l2, line.bound) for line in lines if line.way == way and line.report]
        if not points:
            continue
        color, marker = f"C{i % 10}", "osv^D<>pXh"[i % 10]
        k = [p[0] for p in points]
        axes.plot(k, [max(p[1], 1e-9) for p in points], marker=marker, color=color, label=way)
        bounds = [p[2] for p in points if p[2] is not None]
        if bounds:
            axes.plot(k, bounds, color=color, linestyle="--", linewidth=0.8)
    axes.set(yscale="log", xlabel="K", ylabel="relative L2 error against float64", title=title)
    axes.set_xscale("log", base=2)
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small", title="dashed: bound", title_fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ampkernels numerics", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--op", choices=[*GEMMS, *ROWS], default="linear")
    parser.add_argument("--k", type=int, nargs="+", default=[4096], help="lengths of the reduction")
    parser.add_argument("--data", choices=[kind for kind in KINDS if kind != "special"], default="normal")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--activation", choices=[a for a in ACTIVATIONS if a], default=None)
    parser.add_argument("--accumulate", nargs="+", default=list(POLICIES), help="policies")
    parser.add_argument("--arch", choices=["sm90", "sm80"], default="sm90", help="of the emulation")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, help="write the error over K to this PNG")
    parser.add_argument("--dtypes", action="store_true", help="print the table of dtypes and nothing else")
    args = parser.parse_args(argv)
    if args.dtypes:
        print_dtypes()
        return 0
    dtype = getattr(torch, args.dtype)
    activation = args.activation or ("silu" if args.op == "gated_linear" else None)
    common = {"rows": args.rows, "dtype": dtype, "data": args.data, "device": args.device}
    lines: list[Line] = []
    for k in args.k:
        if args.op in GEMMS:
            lines += measure_gemm(
                args.op,
                k,
                columns=args.columns,
                activation=activation,
                policies=args.accumulate,
                arch=args.arch,
                **common,
            )
        else:
            lines += measure_rows(args.op, k, **common)
    where = torch.cuda.get_device_name(args.device) if torch.device(args.device).type == "cuda" else "CPU"
    title = f"{args.op} against float64: {args.dtype}, {args.data} data, {args.rows} rows, {where}"
    print_lines(title, lines)
    if args.plot:
        plot(lines, title, args.plot)
        print(args.plot)
    return 0
