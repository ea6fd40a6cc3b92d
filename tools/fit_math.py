"""Fits the polynomials of csrc/include/ampkernels/math.h and prints them as C hexadecimal constants.

Each fit is a weighted minimax one (Lawson's iteration on Chebyshev nodes). Coefficients are rounded to fp32 from the
lowest degree up, and the higher ones are fitted again after each rounding, so that the rounded polynomial is as good as
the real one. Needs numpy and mpmath: ``python tools/fit_math.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np

mp.mp.dps = 40


def nodes(low: float, high: float, count: int = 1200) -> np.ndarray:
    """Chebyshev nodes of [low, high]."""
    return low + (1 - np.cos(np.pi * (np.arange(count) + 0.5) / count)) / 2 * (high - low)


def minimax(x: np.ndarray, target: np.ndarray, weight: np.ndarray, powers: range) -> tuple[float, np.ndarray]:
    """Coefficients of sum c_i x^i, i in powers, with the least max(weight * |error|); and that maximum."""
    scale = np.abs(x).max()
    basis = np.stack([(x / scale) ** p for p in powers], axis=1)
    # An orthonormal basis keeps the least squares well conditioned at degree 11.
    q, r = np.linalg.qr(basis)
    lawson = np.full_like(x, 1 / len(x))
    best = (np.inf, np.zeros(len(powers)))
    for _ in range(300):
        root = np.sqrt(lawson) * weight
        c = np.linalg.lstsq(q * root[:, None], target * root, rcond=None)[0]
        error = np.abs(weight * (target - q @ c))
        if error.max() < best[0]:
            best = (error.max(), np.linalg.solve(r, c) / scale ** np.array(powers))
        lawson *= error
        lawson /= lawson.sum()
    return best


def fit(
    x: np.ndarray, target: np.ndarray, weight: np.ndarray, degree: int, fixed: tuple[float, ...] = ()
) -> list[float]:
    """fp32 coefficients, lowest degree first; the first ones are given by `fixed`."""
    done = [float(np.float32(c)) for c in fixed]
    while len(done) <= degree:
        rest = target - sum(c * x**i for i, c in enumerate(done))
        worst, c = minimax(x, rest, weight, range(len(done), degree + 1))
        done.append(float(np.float32(c[0])))
    rest = np.abs(weight * (target - sum(c * x**i for i, c in enumerate(done)))).max()
    print(f"  worst weighted error {rest:.3g} (before the last rounding {worst:.3g})")
    return done


def c_hex(v: float) -> str:
    """A C float literal that is exactly v."""
    mantissa, exponent = v.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f"


def show(name: str, coefficients: list[float]) -> None:
    print(f"{name}: " + ", ".join(c_hex(c) for c in coefficients))


def as_array(f: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    return np.array([float(f(mp.mpf(float(v)))) for v in x])


def main() -> None:
    ln2 = float(mp.log(2))
    r = nodes(-0.5, 0.5)
    exp2 = as_array(lambda v: mp.power(2, v), r)
    print("2^r on [-1/2, 1/2], degree 6, p(0) = 1; weight: relative")
    show("exp2", fit(r, exp2, 1 / exp2, 6, (1.0,)))
    print("(2^r - 1) / r on [-1/2, 1/2], degree 5; weight: relative")
    expm1 = as_array(lambda v: mp.expm1(v * mp.log(2)) / v, r)
    show("expm1", fit(r, expm1, 1 / expm1, 5))

    e = nodes(0, 1)
    print("1 / (1 + e) on [0, 1], degree 3; weight: relative")
    show("reciprocal seed", fit(e, 1 / (1 + e), 1 + e, 3))

    print("log2(erfc(a / sqrt 2)) / a on [0, 13.2], degree 11; weight: the absolute and the relative error of Q(a)")
    a = nodes(1e-6, 13.2)
    log2_2q = as_array(lambda v: mp.log(mp.erfc(v / mp.sqrt(2)), 2) / v, a)
    q = as_array(lambda v: mp.erfc(v / mp.sqrt(2)) / 2, a)
    relative = ln2 * a
    tail = 1e-5 * 30 ** (a / 13.2)  # the relative error asked of Q: 1e-5 at 0, 3e-4 where it underflows
    show("log2_tail", fit(a, log2_2q, np.maximum(np.maximum(a, 1) * q * relative / 2e-8, relative / tail), 11))

    print("\nFor results of 16 bits")
    print("2^r on [-1/2, 1/2], degree 4, p(0) = 1; weight: relative")
    show("exp2", fit(r, exp2, 1 / exp2, 4, (1.0,)))
    print("(2^r - 1) / r on [-1/2, 1/2], degree 3; weight: relative")
    show("expm1", fit(r, expm1, 1 / expm1, 3))
    print("1 / (1 + e) on [0, 1], degree 6; weight: relative")
    show("reciprocal", fit(e, 1 / (1 + e), 1 + e, 6))
    print("1 / (2 + m) on [-1, 0], degree 6; weight: relative")
    show("reciprocal of 2 + m", fit(e - 1, 1 / (1 + e), 1 + e, 6))
    relaxed = 10 ** (-0.35 * np.maximum(a - 5, 0))  # the relative error asked of Q grows from a = 5 on
    print("log2(erfc(a / sqrt 2)) / a on [0, 13.2], degree 7; weight: relative error of Q(a)")
    show("log2_tail", fit(a, log2_2q, relative * relaxed, 7))
    print("Q(a) exp(a^2 / 2) on [0, 6], degree 9; weight: the error of Q(a) - a density(a), relative down to 0.1")
    c = nodes(0, 6)
    mills = as_array(lambda v: mp.erfc(v / mp.sqrt(2)) / 2 * mp.exp(v * v / 2), c)
    show("mills", fit(c, mills, 1 / np.maximum(np.abs(mills - c / np.sqrt(2 * np.pi)), 0.1), 9))

    log2e = mp.log(mp.e, 2)
    hi = float(np.float32(float(log2e)))
    print("log2(e):", c_hex(hi), c_hex(float(np.float32(float(log2e - hi)))))


if __name__ == "__main__":
    main()
