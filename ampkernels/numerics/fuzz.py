"""Random GEMMs under policies with a chunk: are the bits those of another run, batch, kernel and device?

    python -m ampkernels.numerics.fuzz --cases 10000 --device cuda

Each case draws an op, dtype, policy, shape, activation, bias, residual, output dtype and data, and computes y, dx, dw and
db.
Compared with them, bit by bit:

- run: the same call once more (y, dx, dw, db);
- rows: a part of the batch, and one row of it (y, dx);
- layout: operands one element off their alignment, and with a gap of NaN behind each aligned row (y, dx, dw);
- path: mma.sync where WGMMA is what is used, on CUDA (y, dx, dw);
- cpu: the same call on the CPU, where the device is not it (y, dx, dw).

Exits with 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._ops import ACTIVATIONS
from .data import generate
from .golden import Outputs, forward_and_backward
from .invariance import Difference, compare_bits

POLICIES = {
    torch.bfloat16: ("fp32/128", "fp32/256", "fp32/512", "fp32/1024"),
    torch.float16: ("fp32/128", "fp32/512", "fp16/64", "fp16/128", "fp16/512"),
}
GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


@dataclass
class Case:
    op: str
    dtype: torch.dtype
    policy: str
    shape: tuple[int, int, int]
    activation: str | None
    out_dtype: torch.dtype
    x: Tensor
    w: Tensor
    bias: Tensor | None
    dy: Tensor
    residual: Tensor | None = None

    def __str__(self) -> str:
        m, n, k = self.shape
        bias = "no bias" if self.bias is None else f"bias {self.bias.dtype}"
        if self.residual is not None:
            bias += f" residual {self.residual.dtype}"
        return f"{self.op} {self.dtype} {self.policy} m{m} n{n} k{k} {self.activation} {bias} -> {self.out_dtype}"

    def run(
        self, device: str, rows: slice = slice(None), place: Callable[[Tensor], Tensor] = torch.Tensor.clone
    ) -> Outputs:
        x, w = (place(t.to(device)).requires_grad_() for t in (self.x[rows], self.w))
        bias = None if self.bias is None else self.bias.to(device).requires_grad_()
        options: dict[str, Any] = {
            "activation": self.activation,
            "accumulate": self.policy,
            "out_dtype": self.out_dtype,
        }
        if self.residual is not None:
            options["residual"] = place(self.residual.to(device)[rows])
        return forward_and_backward(self.op, x, w, bias, self.dy[rows], **options)


def one_element_off(t: Tensor) -> Tensor:
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


def padded(t: Tensor) -> Tensor:
    buffer = torch.full((t.shape[0], (t.shape[1] + 15) // 8 * 8), torch.nan, dtype=t.dtype, device=t.device)
    return buffer[:, : t.shape[1]].copy_(t)


def by_mma_sync(case: Case, device: str) -> Outputs:
    set_path = torch.ops.ampkernels.set_gemm_path
    if not set_path("sm80"):
        raise RuntimeError("this build has no mma.sync kernels")
    try:
        return case.run(device)
    finally:
        set_path("auto")


def draw(choose: random.Random) -> Case:
    dtype = choose.choice(list(POLICIES))
    op = choose.choice(("linear", "linear", "gated_linear"))

    def size(most: int) -> int:
        return choose.choice((choose.randint(1, most), 8 * choose.randint(1, most // 8)))

    m, n, k = size(choose.choice((4, 64, 200)) * 2), size(200), size(choose.choice((64, 600, 2000)))
    kind = choose.choice(("normal", "normal", "uniform", "wide" if dtype == torch.bfloat16 else "normal"))
    features, seed = (2 * n if op == "gated_linear" else n), choose.randrange(2**31)
    bias_dtype = choose.choice((None, torch.float32, dtype))
    # By the data's seed: the other draws are those of earlier versions, whose cases had no residual.
    residual_dtype = None if op == "gated_linear" else random.Random(seed).choice((None, None, torch.float32, dtype))
    return Case(
        op,
        dtype,
        choose.choice(POLICIES[dtype]),
        (m, n, k),
        choose.choice(GATES if op == "gated_linear" else ACTIVATIONS),
        choose.choice((dtype, dtype, torch.float32)),
        generate(kind, (m, k), dtype, seed),
        generate(kind, (features, k), dtype, seed + 1),
        None if bias_dtype is None else generate("normal", (features,), bias_dtype, seed + 2),
        generate("normal", (m, n), dtype, seed + 3),
        None if residual_dtype is None else generate("normal", (m, n), residual_dtype, seed + 4),
    )


@dataclass
class Tally:
    comparisons: int = 0
    elements: int = 0
    differing: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, case: Case, found: Difference) -> None:
        self.comparisons += 1
        self.elements += found.count
        self.differing += found.differing
        if found and len(self.examples) < 5:
            self.examples.append(f"{case}: {found}")


def compare(case: Case, device: str, choose: random.Random, tallies: dict[str, Tally]) -> None:
    whole = case.run(device)

    def tally(kind: str, other: Outputs, keys: tuple[str, ...], rows: slice = slice(None)) -> None:
        for key in keys:
            if key in whole:
                expected = whole[key][rows] if key in ("y", "dx") else whole[key]
                tallies[kind].add(case, compare_bits(other[key].to(expected.device), expected, f"{kind} {key} {rows}"))

    m = case.shape[0]
    begin = choose.randrange(m)
    tally("run", case.run(device), ("y", "dx", "dw", "db"))
    for part in (slice(begin, begin + 1), slice(begin, choose.randint(begin + 1, m))):
        tally("rows", case.run(device, part), ("y", "dx"), part)
    for place in (one_element_off, padded):
        tally("layout", case.run(device, place=place), ("y", "dx", "dw"))
    if torch.device(device).type != "cpu":
        tally("path", by_mma_sync(case, device), ("y", "dx", "dw"))
        tally("cpu", case.run("cpu"), ("y", "dx", "dw"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ampkernels.numerics.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="begin no case after that")
    args = parser.parse_args(argv)
    choose = random.Random(args.seed)
    tallies = {kind: Tally() for kind in ("run", "rows", "layout", "path", "cpu")}
    end, done = time.monotonic() + args.limit, 0
    while done < args.cases and time.monotonic() < end:
        compare(draw(choose), args.device, choose, tallies)
        done += 1
        if sys.stderr.isatty() and done % 20 == 0:
            print(f"\r{done} of {args.cases} cases", end="", file=sys.stderr)
    differing = 0
    for kind, t in tallies.items():
        print(f"{kind:<7}{t.comparisons:>8} comparisons {t.elements:>12} elements {t.differing:>8} with other bits")
        differing += t.differing
        for example in t.examples:
            print(f"     {example}")
    left = "" if done == args.cases else f" of {args.cases}, then the limit"
    print(f"{done} cases{left}, seed {args.seed}, {args.device}: {differing} differing bit patterns")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
