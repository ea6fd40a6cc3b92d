"""Rows as a table on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby

from rich.console import Console, JustifyMethod
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


# Heading, justification and cell of each column; a column that is empty in a whole table is left out of it.
_COLUMNS: tuple[tuple[str, JustifyMethod, Callable[[Row], str]], ...] = (
    ("provider", "left", lambda r: r.provider),
    ("accumulate", "left", lambda r: r.accumulate),
    ("kernel", "right", lambda r: "" if r.timing == "host" else microseconds(r.median_us)),
    ("p20-p80", "right", lambda r: "" if r.p20_us is None else f"{microseconds(r.p20_us)}-{microseconds(r.p80_us)}"),
    ("call", "right", lambda r: microseconds(r.call_us)),
    ("rate", "right", lambda r: "" if r.rate is None else f"{r.rate:.4g} {r.unit}"),
    ("of roof", "right", lambda r: "" if r.roof_share is None else f"{r.roof_share:.2f} {r.roof}"),
    ("vs eager", "right", lambda r: "" if r.speedup is None else f"{r.speedup:.2f}x"),
    ("#", "right", lambda r: "" if r.rank is None else str(r.rank)),
    ("rel L2", "right", lambda r: error_figure(r.rel_l2)),
    ("max ulp", "right", lambda r: ulp_figure(r.max_ulp)),
    ("shrink", "right", lambda r: error_figure(r.shrink)),
    ("peak", "right", lambda r: "" if r.peak_mib is None else f"{r.peak_mib:.4g} MiB"),
    ("status", "left", _status),
)
_STYLES = {"wrong": "red", "error": "red", "oom": "red", "skipped": "dim"}


def print_rows(console: Console, rows: Iterable[Row]) -> None:
    """One table per point, fastest first; what was not measured comes last with its reason."""
    rows = sorted(rows, key=lambda row: row.op == "roof")  # stable: the roofs come together, last
    for key, group in groupby(rows, lambda r: (r.op, r.shape, r.dtype, r.direction, _data(r))):
        point = sorted(group, key=_sort_key)
        table = Table(title=" ".join(filter(None, key)), title_justify="left", box=None)
        columns = [column for column in _COLUMNS if any(column[2](row) for row in point)]
        for name, justify, _ in columns:
            table.add_column(name, justify=justify, no_wrap=name != "status", overflow="fold")
        for row in point:
            table.add_row(*(cell(row) for _, _, cell in columns), style=_STYLES.get(row.status))
        console.print(table)


def _data(row: Row) -> str:
    """What tells points of one shape apart in the numerics suite."""
    return row.setting.partition(",")[0] if row.suite == "numerics" else ""
