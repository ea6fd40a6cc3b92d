"""PNG plots of a folder's CSVs: rooflines, speed-ups, whole models, error over K.

Only what was measured is drawn: roofs are the run's own, wrong and partial results are left out of the speed-ups, and
every title names the device. Axes of speed-ups start at zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.ops import OPS, shape_name, variant
from benchmarks.records import Row, finite, read_rows
from benchmarks.suites import GROUPS

# Colour-blind safe (Okabe and Ito); ours in the strongest.
_COLOURS = {
    "ampkernels": "#D55E00",
    "ampkernels_mm": "#F0A070",
    "eager": "#999999",
    "compile": "#0072B2",
    "cublaslt": "#009E73",
    "mm": "#000000",
    "liger": "#CC79A7",
    "quack": "#E69F00",
    "quack_mm": "#8C6D00",
    "apex": "#56B4E9",
    "transformer_engine": "#76B900",
    "ampkernels+compile": "#8B3A00",
}
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo")
GEMMS = ("linear", "gated_linear", "mlp")
ROWS = ("softmax", "layer_norm", "rms_norm")


def load(folder: Path) -> list[Row]:
    """Rows of every CSV in a folder, in the order of the suites and their shapes.

    Times are compared within one run only: of an operation's point that several files hold, the rows of the run that
    measured eager, has today's kernels (those of the newest row of all), and measured the most peers; the newest of those. Of
    anything else, the newest row.

    Raises:
        ValueError: There is no results file in it.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise ValueError(f"no CSV in {folder}")
    runs = [read_rows(path) for path in paths]
    today = max((row.date, row.csrc_digest) for rows in runs for row in rows)[1]
    best: dict[tuple[str, ...], tuple[bool, bool, int, str, int]] = {}
    for number, rows in enumerate(runs):
        points: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            points.setdefault(_point(row), []).append(row)
        for point, of_point in points.items():
            peers = {row.provider for row in of_point if row.status == "ok" and row.provider != "ampkernels"}
            newest_row = max(of_point, key=lambda row: row.date)
            rank = ("eager" in peers, newest_row.csrc_digest == today, len(peers), newest_row.date, number)
            best[point] = max(best.get(point, rank), rank)
    newest: dict[tuple[str, ...], Row] = {}
    for number, rows in enumerate(runs):
        for row in rows:
            key = (*_point(row), row.accumulate, row.provider)
            of_the_run = row.op not in GROUPS or best[_point(row)][-1] == number
            if of_the_run and (key not in newest or row.date >= newest[key].date):
                newest[key] = row
    order = {
        (op, shape_name(shape)): (number, place)
        for number, (op, groups) in enumerate(GROUPS.items())
        for place, shape in enumerate(dict.fromkeys(shape for group in groups for shape in group.shapes))
    }
    last = (len(GROUPS), 0)
    return sorted(newest.values(), key=lambda row: (*order.get((row.op, row.shape), last), row.direction != "fwd"))


def _point(row: Row) -> tuple[str, ...]:
    return (row.op, row.shape, row.dtype, row.direction, row.setting)


def plot_folder(folder: Path) -> list[Path]:
    """Draws what the rows allow, beside them; returns the files written."""
    rows = load(folder)
    plots: dict[str, Callable[[list[Row]], Any]] = {
        "roofline.png": roofline,
        "speedup-gemm.png": lambda r: speedups(r, GEMMS),
        "speedup-rows.png": lambda r: speedups(r, ROWS),
        "models.png": models,
        "accuracy.png": accuracy,
    }
    written = []
    for name, draw in plots.items():
        figure = draw(rows)
        if figure is not None:
            figure.savefig(folder / name, dpi=130, bbox_inches="tight")
            plt.close(figure)
            written.append(folder / name)
    if not written:
        raise ValueError(f"nothing to draw in {folder}")
    return written


def _label(provider: str, accumulate: str) -> str:
    return provider if accumulate in ("", "library") else f"{provider} {accumulate}"


def _device(rows: Sequence[Row]) -> str:
    names = sorted({row.gpu for row in rows if row.gpu})
    versions = sorted({row.torch for row in rows if row.torch})
    return f"{', '.join(names)}, torch {', '.join(versions)}"


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, color="#cccccc")
    axes.set_axisbelow(True)


def _shape(row: Row) -> tuple[int, ...]:
    return tuple(int(part) for part in row.shape.split("x"))


def _is_op(row: Row) -> bool:
    return row.suite in OPS and row.op in OPS and not variant(row.op, row.setting)


def _main_dtype(rows: Iterable[Row]) -> str | None:
    dtypes = [row.dtype for row in rows if row.median_us is not None and row.op in OPS]
    return max(sorted(set(dtypes)), key=dtypes.count, default=None)


def roofline(rows: list[Row]) -> Any:
    """Achieved rate over arithmetic intensity for GEMMs, over bytes moved for rows, under the run's own roofs."""
    dtype = _main_dtype(rows) or ""
    roofs = {(r.roof, r.dtype): r for r in rows if r.op == "roof"}
    points = [r for r in rows if r.dtype == dtype and finite(r.median_us) and r.status == "ok" and _is_op(r)]
    if not points:
        return None
    figure, (left, *row_axes) = plt.subplots(1, 3, figsize=(16, 4.8), width_ratios=(1.3, 1, 1))
    gemm, read, copy = roofs.get(("gemm", dtype)), roofs.get(("read", "fp32")), roofs.get(("copy", "fp32"))
    gemms = [r for r in points if OPS[r.op].is_gemm]
    if gemms and gemm and read and gemm.rate and read.rate:
        intensities = [2.0**e for e in range(-2, 14)]
        limit = [min(gemm.rate, i * read.rate / 1000) for i in intensities]
        left.plot(intensities, limit, color="#444444", linewidth=1.2)
        left.annotate(
            f"{gemm.provider}: {gemm.rate:.4g} TFLOP/s",
            (intensities[-1], gemm.rate),
            ha="right",
            va="bottom",
            fontsize=8,
        )
        middle = len(intensities) // 4
        left.annotate(
            f"{read.provider}: {read.rate:.4g} GB/s",
            (intensities[middle], limit[middle]),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    for (provider, accumulate), group in _by_candidate(gemms):
        xs, ys = [], []
        for row in group:
            op, shape = OPS[row.op], _shape(row)
            work = op.work(shape, row.direction)
            xs.append(work / (op.traffic(shape, row.direction) * (4 if dtype == "fp32" else 2)))
            ys.append(work / (row.median_us or math.nan) / 1e6)
        _scatter(left, xs, ys, provider, accumulate)
    left.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    left.set_title(f"GEMMs, {dtype}", fontsize=10)
    for axes, direction in zip(row_axes, ("fwd", "bwd"), strict=True):
        if copy and copy.rate:
            axes.axhline(copy.rate, color="#444444", linewidth=1.2)
            corner = ("axes fraction", "data")
            text = f"{copy.provider}: {copy.rate:.4g} GB/s"
            axes.annotate(text, (0.01, copy.rate), xycoords=corner, ha="left", va="bottom", fontsize=8)
        here = [r for r in points if not OPS[r.op].is_gemm and r.direction == direction]
        for (provider, accumulate), group in _by_candidate(here):
            sizes = [OPS[r.op].traffic(_shape(r), direction) * (4 if dtype == "fp32" else 2) for r in group]
            rates = [size / (r.median_us or math.nan) / 1e3 for size, r in zip(sizes, group, strict=True)]
            _scatter(axes, [size / 2**20 for size in sizes], rates, provider, accumulate)
        axes.set(xscale="log", xlabel="MiB that must move", ylabel="GB/s", ylim=(0, None))
        axes.set_title(f"softmax and norms, {dtype}, {direction}", fontsize=10)
    for axes in (left, *row_axes):
        _style(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, frameon=False)
    figure.suptitle(f"Achieved rates under this run's roofs: {_device(rows)}", fontsize=11)
    figure.tight_layout()
    return figure


def _by_candidate(rows: Iterable[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.provider, row.accumulate), []).append(row)
    order = list(_COLOURS)
    return sorted(groups.items(), key=lambda item: (order.index(item[0][0]) if item[0][0] in order else 99, item[0][1]))


def _scatter(axes: Any, xs: Sequence[float], ys: Sequence[float], provider: str, accumulate: str) -> None:
    ours = provider == "ampkernels"
    axes.scatter(
        xs,
        ys,
        s=26 if ours else 16,
        color=_COLOURS.get(provider, "#555555"),
        marker="o" if accumulate in ("", "library", "fp32") else "^" if accumulate.startswith("fp32") else "v",
        alpha=0.9 if ours else 0.6,
        linewidths=0,
        label=_label(provider, accumulate),
        zorder=3 if ours else 2,
    )


def speedups(rows: list[Row], ops: Sequence[str]) -> Any:
    """Bars over eager, one panel per operation and direction, shapes along the axis; the dashed line is eager."""
    dtype = _main_dtype(r for r in rows if r.op in ops)
    chosen = [r for r in rows if r.op in ops and _is_op(r) and r.dtype == dtype]
    chosen = [r for r in chosen if finite(r.speedup) and r.status == "ok"]
    chosen = [r for r in chosen if not (r.provider == "eager" and r.accumulate == "library")]
    panels = [(op, d) for op in ops for d in ("fwd", "bwd") if any(r.op == op and r.direction == d for r in chosen)]
    if not panels:
        return None
    figure, grid = plt.subplots(len(panels), 1, figsize=(13, 2.9 * len(panels)), squeeze=False)
    for axes, (op, direction) in zip(grid[:, 0], panels, strict=True):
        panel = [r for r in chosen if r.op == op and r.direction == direction]
        _bars(axes, panel, lambda r: r.shape)
        axes.set_title(f"{op} ({OPS[op].setting}), {direction}, {dtype}", fontsize=10, loc="left")
        axes.set_ylabel("times as fast as eager")
    figure.suptitle(f"Speed-up over eager PyTorch: {_device(chosen)}", fontsize=11, y=1.0)
    figure.tight_layout()
    return figure


def _bars(axes: Any, rows: Sequence[Row], category: Callable[[Row], str]) -> None:
    categories = list(dict.fromkeys(category(r) for r in rows))
    candidates = _by_candidate(rows)
    width = 0.84 / max(len(candidates), 1)
    seen: dict[str, int] = {}
    for index, ((provider, accumulate), group) in enumerate(candidates):
        at = [categories.index(category(r)) + (index - (len(candidates) - 1) / 2) * width for r in group]
        hatch = _HATCHES[seen.get(provider, 0) % len(_HATCHES)]
        seen[provider] = seen.get(provider, 0) + 1
        axes.bar(
            at,
            [r.speedup for r in group],
            width * 0.95,
            color=_COLOURS.get(provider, "#555555"),
            hatch=hatch,
            edgecolor="white",
            linewidth=0.3,
            label=_label(provider, accumulate),
        )
    axes.axhline(1.0, color="#444444", linewidth=0.9, linestyle="--")
    axes.set_xticks(range(len(categories)), categories, fontsize=7)
    if len(categories) > 8:
        axes.tick_params(axis="x", rotation=25)
        plt.setp(axes.get_xticklabels(), ha="right", rotation_mode="anchor")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False, ncols=min(len(candidates), 8), loc="upper left")
    _, top = axes.get_ylim()
    axes.set_ylim(0, top * 1.18)  # room for the legend
    _style(axes)


def models(rows: list[Row]) -> Any:
    chosen = [
        r for r in rows if r.suite == "model" and finite(r.speedup) and r.status == "ok" and r.provider != "eager"
    ]
    if not chosen:
        return None
    figure, axes = plt.subplots(figsize=(13, 3.6))
    _bars(axes, chosen, lambda r: f"{r.op} {r.direction}\n{r.shape} {r.dtype}")
    axes.set_ylabel("times as fast as eager AMP")
    axes.set_title(f"Whole models (layers x batch x length): {_device(chosen)}", fontsize=10, loc="left")
    figure.tight_layout()
    return figure


def accuracy(rows: list[Row]) -> Any:
    """Relative L2 error and total shrink over K, per policy, on both kinds of data."""
    chosen = [r for r in rows if r.suite == "numerics" and finite(r.rel_l2)]
    dtypes = sorted({r.dtype for r in chosen})
    if not chosen:
        return None
    figure, grid = plt.subplots(len(dtypes), 2, figsize=(12, 4.2 * len(dtypes)), squeeze=False, sharey="row")
    for row_axes, dtype in zip(grid, dtypes, strict=True):
        for axes, data in zip(row_axes, ("normal", "uniform"), strict=True):
            panel = [r for r in chosen if r.dtype == dtype and r.setting.startswith(data)]
            for index, ((provider, accumulate), group) in enumerate(_by_candidate(panel)):
                curve = sorted((_shape(r)[2], max(r.rel_l2 or 0.0, 1e-9)) for r in group)
                out = group[0].setting.partition(", ")[2]
                axes.plot(
                    [k for k, _ in curve],
                    [e for _, e in curve],
                    marker="osv^Dx+"[index % 7],
                    markersize=4,
                    linewidth=1.3,
                    linestyle="-" if provider == "ampkernels" else "--",
                    color=plt.get_cmap("tab10")(index % 10),
                    label=f"{_label(provider, accumulate)} ({out})",
                )
            axes.set(xscale="log", yscale="log", xlabel="K")
            axes.set_xscale("log", base=2)
            axes.set_title(f"{dtype} inputs, {data} data", fontsize=10, loc="left")
            _style(axes)
        row_axes[0].set_ylabel("relative L2 error against float64")
        row_axes[1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(f"Error of a product over K: {_device(chosen)}", fontsize=11)
    figure.tight_layout()
    return figure
