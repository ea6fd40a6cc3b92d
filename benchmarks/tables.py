"""Rows as a table on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from benchmarks.records import Row


def microseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1000:.2f} ms" if value >= 10_000 else f"{value:.0f} µs" if value >= 1000 else f"{value:.1f} µs"


def error_figure(value: float | None) -> str:
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.1e}"


def ulp_figure(value: float | None) -> str:
    return "" if value is None else "NaN" if math.isnan(value) else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def _sort_key(row: Row) -> tuple[int, float]:
    return (0 if row.median_us is not None else 1, row.median_us or 0.0)


def _status(row: Row) -> str:
    if row.status == "ok":
        return row.reason
    return f"{row.status}: {row.reason}" if row.reason else row.status


def _cells(row: Row) -> Sequence[str]:
    return (
        row.provider,
        row.accumulate,
        microseconds(row.median_us),
        "" if row.p20_us is None else f"{microseconds(row.p20_us)}-{microseconds(row.p80_us)}",
        microseconds(row.call_us),
        "" if row.rate is None else f"{row.rate:.4g} {row.unit}",
        "" if row.roof_share is None else f"{row.roof_share:.2f} {row.roof}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        "" if row.rank is None else str(row.rank),
        error_figure(row.rel_l2),
        ulp_figure(row.max_ulp),
        error_figure(row.shrink),
        _status(row),
    )


def print_rows(console: Console, rows: Iterable[Row]) -> None:
    """One table per point, fastest first; what was not measured comes last with its reason."""
    header = ("provider", "accumulate", "kernel", "p20-p80", "call", "rate", "of roof", "vs eager", "#")
    for (op, shape, dtype, direction), group in groupby(rows, lambda r: (r.op, r.shape, r.dtype, r.direction)):
        table = Table(title=" ".join(filter(None, (op, shape, dtype, direction))), title_justify="left", box=None)
        for name in (*header, "rel L2", "max ulp", "shrink"):
            left = name in ("provider", "accumulate")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        table.add_column("status", overflow="fold")
        for row in sorted(group, key=_sort_key):
            style = "red" if row.status in ("wrong", "error", "oom") else "dim" if row.status == "skipped" else None
            table.add_row(*_cells(row), style=style)
        console.print(table)
