"""Whether two runs agree: their speed-ups over eager, point by point; or a run's times with those measured earlier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.ops import variant
from benchmarks.records import Row, finite, read_rows

# Times measured earlier on an H200 (torch 2.11, CUDA 13.0, driver 580.159), by another harness: what a run on such a
# card should find again. Where there is no time, the call threw.
BASELINES = Path(__file__).resolve().parent / "baselines" / "h200.csv"


def _key(row: Row) -> tuple[str, ...]:
    return (row.op, row.shape, row.dtype, row.direction, row.provider, row.accumulate, variant(row.op, row.setting))


def _rows(paths: Iterable[Path]) -> dict[tuple[str, ...], Row]:
    """Rows of CSVs, and of those in folders, by what they measured; the newest of several, with a time if one has."""
    found: dict[tuple[str, ...], Row] = {}
    for path in paths:
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"no CSV in {path}")
        for file in files:
            for row in read_rows(file):
                other = found.get(_key(row))
                if other is None or (finite(row.median_us), row.date) >= (finite(other.median_us), other.date):
                    found[_key(row)] = row
    return found


def ratios(first: Path, second: Path, within: float, above_us: float) -> tuple[list[str], bool]:
    """Lines for the terminal, largest difference first, and whether every difference is within bounds.

    Only points whose median exceeds `above_us` in both runs count.

    Raises:
        ValueError: The runs have no such point in common.
    """
    before = _rows([first])
    found = []
    for key, row in _rows([second]).items():
        other = before.get(key)
        if other is None or not (finite(row.speedup) and finite(other.speedup)):
            continue
        if row.provider == "eager" and row.accumulate != "fp16":  # 1 by definition
            continue
        if min(row.median_us or 0.0, other.median_us or 0.0) >= above_us:
            found.append((abs((row.speedup or 0.0) / (other.speedup or 1.0) - 1), other, row))
    if not found:
        raise ValueError(f"no point above {above_us:g} µs in both {first} and {second}")
    found.sort(key=lambda item: -item[0])
    lines = [
        f"{'ok  ' if off <= within else 'OFF '} {off:6.2%}  {a.speedup:.3f}x {b.speedup:.3f}x  {' '.join(filter(None, _key(b)))}"
        for off, a, b in found
    ]
    agree = sum(off <= within for off, _, _ in found)
    lines.append(f"{agree} of {len(found)} ratios above {above_us:g} µs agree within {within:.0%}")
    return lines, agree == len(found)


def baselines(results: Sequence[Path], against: Path, within: float) -> tuple[list[str], bool]:
    """Lines for the terminal, in the order of the baselines, and whether each was measured and is within bounds."""
    measured = _rows(results)
    lines, right, missing = [], 0, 0
    expected = _rows([against])
    for key, before in expected.items():
        row, name = measured.get(key), " ".join(filter(None, key))
        if row is None:
            missing += 1
            lines.append(f"MISSING                                {name}")
        elif before.median_us is None or row.median_us is None:
            same = before.median_us is None and row.median_us is None and row.status in ("error", "oom")
            right += same
            texts = [f"{r.median_us:.1f} µs" if r.median_us is not None else r.status for r in (before, row)]
            lines.append(f"{'ok  ' if same else 'OFF '}          {texts[0]:>12} {texts[1]:>12}  {name} {row.reason}")
        else:
            off = row.median_us / before.median_us - 1
            right += abs(off) <= within
            times = f"{before.median_us:9.1f} µs {row.median_us:9.1f} µs"
            lines.append(f"{'ok  ' if abs(off) <= within else 'OFF '} {off:+7.1%}  {times}  {name}")
    summary = f"{right} of {len(expected)} times are within {within:.0%} of those measured before"
    lines.append(f"{summary}; {missing} were not measured" if missing else summary)
    return lines, right == len(expected)
