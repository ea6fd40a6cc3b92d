"""Whether two runs agree: speed-ups over eager, point by point."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import Row, finite, read_rows


def _key(row: Row) -> tuple[str, ...]:
    return (row.op, row.shape, row.dtype, row.direction, row.provider, row.accumulate)


def ratios(first: Path, second: Path, within: float, above_us: float) -> tuple[list[str], bool]:
    """Lines for the terminal, largest difference first, and whether every difference is within bounds.

    Only points whose median exceeds `above_us` in both runs count.

    Raises:
        ValueError: The runs have no such point in common.
    """
    before = {_key(row): row for row in read_rows(first)}
    found = []
    for row in read_rows(second):
        other = before.get(_key(row))
        if other is None or not (finite(row.speedup) and finite(other.speedup)):
            continue
        if row.provider == "eager" and row.accumulate == "library":
            continue
        if min(row.median_us or 0.0, other.median_us or 0.0) >= above_us:
            found.append((abs((row.speedup or 0.0) / (other.speedup or 1.0) - 1), other, row))
    if not found:
        raise ValueError(f"no point above {above_us:g} µs in both {first} and {second}")
    found.sort(key=lambda item: -item[0])
    lines = [
        f"{'ok  ' if off <= within else 'OFF '} {off:6.2%}  {a.speedup:.3f}x {b.speedup:.3f}x  {' '.join(_key(b))}"
        for off, a, b in found
    ]
    agree = sum(off <= within for off, _, _ in found)
    lines.append(f"{agree} of {len(found)} ratios above {above_us:g} µs agree within {within:.0%}")
    return lines, agree == len(found)
