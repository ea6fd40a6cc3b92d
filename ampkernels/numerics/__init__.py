"""Looking at numbers: how far off, of which kind, and whether the bits are the same.

Works on any callable or module, ours or not:

- `ulp_distance`, `error_report`: against float64;
- `forward_bound`: how far a GEMM under an accumulation policy may be off;
- `check_run_to_run`, `check_batch`, `check_layout`: which bits change, when nothing that matters has changed;
- `emulate`: the GPU's bits of a linear, on a CPU;
- `DTYPES`: range and precision of each dtype and where it is used;
- `python -m ampkernels numerics`: the table of policies against float64 and eager;
- `python -m ampkernels.numerics.golden`: digests of output bits, written on one machine and checked on any.
"""

from __future__ import annotations

from .bounds import forward_bound
from .dtypes import DTYPES, DType
from .emulation import emulate
from .error import ErrorReport, error_report, ulp_distance
from .invariance import Difference, check_batch, check_layout, check_run_to_run, compare_bits

__all__ = [
    "DTYPES",
    "DType",
    "Difference",
    "ErrorReport",
    "check_batch",
    "check_layout",
    "check_run_to_run",
    "compare_bits",
    "emulate",
    "error_report",
    "forward_bound",
    "main",
    "ulp_distance",
]


def main(argv: list[str] | None = None) -> int:
    """`python -m ampkernels numerics`."""
    from .table import main as run

    return run(argv)
