"""What the tests of the harness share: providers made of a function, roofs that need no measuring, a short budget."""

from __future__ import annotations

import torch

from benchmarks.providers import Implementation, Provider
from benchmarks.roofs import Roof, Roofs
from benchmarks.runner import OpRunner, Point
from benchmarks.timing import Budget

CPU = torch.device("cpu")
SHORT = Budget(warmup_s=0.01, min_rounds=5, max_rounds=5, cpu_candidate_s=0.0)
POINT = Point("linear", "linear", (16, 32, 48), torch.bfloat16, "fwd")


class Fake(Provider):
    """A provider made of one function, for every operation."""

    def __init__(self, name, call, **fields):
        self.name, self.call, self.fields = name, call, fields

    def implementations(self, op, dtype, direction, accumulates, device):
        yield Implementation(lambda *tensors: self.call(op.name, *tensors), **self.fields)


class KnownRoofs(Roofs):
    """Roofs that need no measuring: 10 GB/s and 1 TFLOP/s."""

    def _get(self, kind, dtype):
        return Roof(kind, dtype, 1e12 if kind == "gemm" else 1e10, "known", 1.0)


def run(point, *providers):
    rows = OpRunner(CPU, providers, ("fp32",), SHORT, KnownRoofs(CPU)).run(point)
    return {row.provider: row for row in rows}
