"""The README's tables and plots, from the committed CSVs of benchmarks/results/<device>/."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.ops import OPS, shape_name, variant
from benchmarks.plot import load
from benchmarks.records import REPOSITORY, Row, csrc_digest, finite
from benchmarks.suites import QUICK, QUICK_CPU

RESULTS = REPOSITORY / "benchmarks" / "results"
README = REPOSITORY / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
_PLOTS = {
    "speedup-gemm.png": "Speed-up over eager, GEMMs",
    "speedup-rows.png": "Speed-up over eager, softmax and norms",
    "roofline.png": "Achieved rates under the measured roofs",
    "models.png": "Whole models",
    "accuracy.png": "Error over K",
}
_HEADER = (
    "| op | shape | | dtype | eager µs | best peer µs | ours µs | x eager | x peer | of roof | rel. L2: ours | eager |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
_HOST_HEADER = (
    "| call from Python | | dtype | eager µs: forward | with a graph | and backward | ours µs: forward | with a graph | and backward |",
    "|---|---|---|---|---|---|---|---|---|",
)
_MODEL_HEADER = (
    "| model | layers x batch x length | | dtype | eager AMP ms | fused | compile | fused + compile |",
    "|---|---|---|---|---|---|---|---|",
)


_TRAIN_HEADER = (
    "| training | layers x width x batch | dtype | | samples/s | x eager | peak MiB | |",
    "|---|---|---|---|---|---|---|---|",
)


def write(folder: Path, readme: Path) -> list[str]:
    """Replaces what stands between the markers; returns lines for the terminal.

    Args:
        folder: One device's folder of CSVs, or a folder of such folders.

    Raises:
        ValueError: No results, or the README lacks its markers.
    """
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{readme} must hold {BEGIN} and after it {END}, once each")
    folders = sorted({path.parent for path in (*folder.glob("*.csv"), *folder.glob("*/*.csv"))})
    if not folders:
        raise ValueError(f"no CSV in {folder} or its folders")
    sections, messages = [], []
    for one in folders:
        rows = load(one)
        gpu = any(row.cuda for row in rows)
        section, warnings = _section(one, rows, readme.parent, folded=not gpu)
        sections.append((not gpu, section))
        messages += [f"{one}: {warning}" for warning in warnings]
    body = "\n\n".join(section for _, section in sorted(sections, key=lambda s: s[0]))  # GPUs first
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    readme.write_text(f"{head}\n{body}\n{tail}")
    return [*messages, f"{readme}: {len(folders)} device{'s' if len(folders) > 1 else ''}"]


def _section(folder: Path, rows: Sequence[Row], relative_to: Path, folded: bool) -> tuple[str, list[str]]:
    """One device: where it was measured, plots, tables, of which the quick set's shapes are in sight; folded: all of it
    behind a click."""
    warnings = _stale(rows)
    lines = [f"### {' / '.join(sorted({r.gpu for r in rows if r.gpu})) or folder.name}", "", _conditions(rows)]
    lines += [f"\n> **{warning}**" for warning in warnings]
    if folded:
        lines += ["", "<details><summary>tables and plots</summary>"]
    for name, title in _PLOTS.items():
        if (folder / name).exists():
            lines += ["", f"![{title}]({os.path.relpath(folder / name, relative_to)})"]
    main, others = _op_tables(rows)
    if main:
        lines += ["", *_HEADER, *main]
    if others:
        lines += ["", f"<details><summary>{len(others)} more points</summary>", "", *_HEADER, *others, "", "</details>"]
    for header, table in ((_MODEL_HEADER, _model_table(rows)), (_HOST_HEADER, _host_table(rows))):
        if table:
            lines += ["", *header, *table]
    trained = [r for r in rows if r.suite == "train" and r.rounds]
    trained = [r for r in trained if r.rounds == max(r.rounds or 0 for r in trained)]  # not --quick's few steps
    table = _train_table(trained)
    if table:
        lines += ["", *_TRAIN_HEADER, *table]
    advice = [r for r in trained if r.provider == "recommended"]
    lines += [f"\nAfter {r.rounds} steps of training, the harness recommends {r.reason}." for r in advice[-1:]]
    if folded:
        lines += ["", "</details>"]
    return "\n".join(lines), warnings


def _stale(rows: Sequence[Row]) -> list[str]:
    today = csrc_digest()
    found = sorted({row.csrc_digest for row in rows})
    old = [digest for digest in found if digest != today]
    if not old:
        return []
    which = "These figures were" if len(old) == len(found) else "Some of these figures were"
    return [f"{which} measured with other kernels: csrc digest {', '.join(old)}, today's is {today}."]


def _conditions(rows: Sequence[Row]) -> str:
    def names(field: str) -> str:
        return ", ".join(sorted({str(getattr(row, field)) for row in rows if getattr(row, field)}))

    dates = sorted(row.date[:10] for row in rows if row.date)
    parts = [f"torch {names('torch')}"]
    parts += [f"CUDA {names('cuda')}"] if names("cuda") else []
    parts += [f"driver {names('driver')}"] if names("driver") else []
    parts += [f"commit {names('commit')}"]
    parts += [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"] if dates else []
    roofs = [f"{r.roof} {r.rate:.4g} {r.unit} ({r.dtype})" for r in rows if r.op == "roof" and r.rate]
    text = f"Measured with {', '.join(parts)}."
    return f"{text} Roofs of the same run: {', '.join(roofs)}." if roofs else text


def _points(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    points: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.op in OPS and row.suite in OPS and finite(row.median_us):
            extra = variant(row.op, row.setting)
            shape = f"{row.shape}, {extra}" if extra else row.shape
            points.setdefault((row.op, shape, row.direction, row.dtype), []).append(row)
    return points


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min((r for r in rows if r.status == "ok"), key=lambda r: r.median_us or 0.0, default=None)


def _op_tables(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Lines of the quick set's shapes, and of the rest."""
    main: list[str] = []
    others: list[str] = []
    for (op, shape, direction, dtype), point in _points(rows).items():
        eager = next((r for r in point if r.provider == "eager" and r.accumulate == "library"), None)
        ours = _fastest(r for r in point if r.provider == "ampkernels")
        peer = _fastest(r for r in point if r.provider != "ampkernels")
        if eager is None or (ours is None and peer is None):
            continue
        cells = [op, shape, direction, dtype, _time(eager), _time(peer, name=True), _time(ours, policy=True)]
        if ours is None or ours.median_us is None:
            cells += ["", "", "", ""]
        else:
            against = f"{peer.median_us / ours.median_us:.2f}" if peer and peer.median_us else ""
            cells += [_ratio(ours.speedup), against, _ratio(ours.roof_share), _error(ours.rel_l2)]
        foremost = shape in map(shape_name, (*QUICK[op], *QUICK_CPU[op]))
        (main if foremost else others).append(f"| {' | '.join([*cells, _error(eager.rel_l2)])} |")
    return main, others


def _model_table(rows: Sequence[Row]) -> list[str]:
    points: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row.suite == "model" and row.status == "ok" and finite(row.median_us):
            points.setdefault((row.op, row.shape, row.direction, row.dtype), {})[row.provider] = row
    lines = []
    for key, point in points.items():
        cells = [*key]
        for provider in ("eager", "ampkernels", "compile", "ampkernels+compile"):
            found = point.get(provider)
            if found is None or found.median_us is None:
                cells.append("")
            elif provider == "eager":
                cells.append(f"{found.median_us / 1000:.2f}")
            else:
                cells.append(f"{found.median_us / 1000:.2f} ({_ratio(found.speedup)}x)")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _host_table(rows: Sequence[Row]) -> list[str]:
    points: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row.suite == "host" and row.status == "ok" and finite(row.median_us):
            points.setdefault((row.op, row.shape, row.dtype), {})[row.provider, row.direction] = row
    kinds = ("fwd", "fwd+graph", "fwd+bwd")
    return [
        f"| {' | '.join([*key, *(_time(point.get((name, k))) for name in ('eager', 'ampkernels') for k in kinds)])} |"
        for key, point in points.items()
    ]


def _train_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.status == "ok" and row.rate is not None:
            peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
            cells = [
                row.op,
                row.shape,
                row.dtype,
                row.provider,
                f"{row.rate:.4g}",
                _ratio(row.speedup),
                peak,
                row.reason,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _time(row: Row | None, name: bool = False, policy: bool = False) -> str:
    if row is None or row.median_us is None:
        return ""
    text = f"{row.median_us:.0f}" if row.median_us >= 100 else f"{row.median_us:.1f}"
    if name:
        return f"{text} {row.provider}"
    return f"{text} {row.accumulate}" if policy else text


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
