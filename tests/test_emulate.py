"""csrc/cpu/emulate.cpp, the tensor core on a CPU, against the rule of docs/design.md section 3 in exact integers.

The model in this file is written from the rule, apart from accumulate.h: Python integers, one product at a time. That the
rule is the GPU's is what tests/test_golden.py and the probes show.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", shutil.which("g++") or shutil.which("clang++") or "")
CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu", "relu2"]
LINEAR, GATED, ACT_GRAD, RESIDUAL = range(4)

pytestmark = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")


class Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride_outer", ctypes.c_int64), ("stride_inner", ctypes.c_int64)]

    @staticmethod
    def of(t: torch.Tensor | None) -> Matrix | None:
        return None if t is None else ctypes.byref(Matrix(t.data_ptr(), t.stride(0), t.stride(1)))


class Library:
    def __init__(self, path: Path):
        self._lib = ctypes.CDLL(str(path))
        self._lib.ak_scalar_dot.restype = ctypes.c_float

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        arch: int = 90,
        accumulate: torch.dtype = torch.float32,
        chunk: int = 0,
        kind: int = LINEAR,
        activation: str = "none",
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
        residual: torch.Tensor | None = None,
        pre: torch.Tensor | None = None,
        saved: torch.Tensor | None = None,
        act_out: torch.Tensor | None = None,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[0]
        if out is None:
            out = torch.zeros(m, n // 2 if kind == GATED else n, dtype=out_dtype)
        begin, end = rows or (0, m)
        i64 = ctypes.c_int64
        self._lib.ak_emulate(
            *(arch, i64(m), i64(n), i64(k), CODES[a.dtype], CODES[accumulate], i64(chunk), Matrix.of(a), Matrix.of(b)),
            *(kind, ACTIVATIONS.index(activation), None if bias is None else ctypes.c_void_p(bias.data_ptr())),
            *(0 if bias is None else CODES[bias.dtype], Matrix.of(out), CODES[out.dtype], Matrix.of(residual)),
            *(
                0 if residual is None else CODES[residual.dtype],
                Matrix.of(pre),
                Matrix.of(saved),
                0,
                Matrix.of(act_out),
                i64(begin),
                i64(end),
            ),
        )
        return out

    def activation(self, name: str, x: torch.Tensor, result: torch.dtype, *, grad: bool = False) -> torch.Tensor:
        """act(x) or act'(x) in fp32, in the form for a result of that dtype (csrc/include/ampkernels/activation16.h)."""
        x = x.float().contiguous()
        y = torch.empty_like(x)
        pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
        self._lib.ak_activation(ACTIVATIONS.index(name), int(grad), int(result.itemsize == 2), *pointers)
        return y

    def scalar_dot(self, a: torch.Tensor, b: torch.Tensor, arch: int, accumulate: torch.dtype, chunk: int) -> float:
        wide = [t.float().contiguous() for t in (a, b)]
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in wide)
        k = a.numel()
        args = (arch, CODES[a.dtype], CODES[accumulate], ctypes.c_int64(chunk or k), *pointers, ctypes.c_int64(k))
        return self._lib.ak_scalar_dot(*args)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Library:
    out = tmp_path_factory.mktemp("emulate") / "emulate.so"
    flags = [
        "-std=c++20",
        "-O2",
        "-ftree-vectorize",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-shared",
        "-fPIC",
        "-w",
    ]
    names = ("csrc/cpu/emulate.cpp", "tests/native/emulate_host.cpp", "tests/native/math_host.cpp")
    sources = [str(ROOT / name) for name in names]
    include = [f"-I{ROOT}/csrc/include", f"-I{ROOT}/csrc"]
    subprocess.run([COMPILER, *flags, *include, *sources, "-o", str(out)], check=True)
    return Library(out)


# ------------------------------------------------------------------------------------------ the rule in exact integers


def exponent(v: float, smallest: int) -> int:
    return max(math.frexp(v)[1] - 1, smallest)


def units(v: float, w: float, unit: int) -> int:
    """v * w in units of 2^unit, toward zero."""
    (n, d), (p, q) = v.as_integer_ratio(), w.as_integer_ratio()
    n, d = n * p, d * q
    n, d = (n << -unit, d) if unit < 0 else (n, d << unit)
    return n // d if n >= 0 else -(-n // d)


def step(c: float, a: list[float], b: list[float], fraction: int, operands: torch.dtype, fp16: bool) -> float:
    if not all(map(math.isfinite, [c, *a, *b])):
        total = c
        for x, y in zip(a, b, strict=True):
            total += x * y
        return total
    smallest = -14 if operands == torch.float16 else -126
    exponents = [exponent(x, smallest) + exponent(y, smallest) for x, y in zip(a, b, strict=True) if x != 0 and y != 0]
    if c != 0:
        exponents.append(exponent(c, -14 if fp16 else -126))
    if not exponents:
        return 0.0
    unit = max(exponents) - fraction
    total = units(c, 1.0, unit) + sum(units(x, y, unit) for x, y in zip(a, b, strict=True))
    if total == 0:
        return 0.0
    if fp16:
        with np.errstate(over="ignore"):
            return float(np.float16(math.ldexp(total, unit)))
    drop = max(abs(total).bit_length() - 24, -149 - unit, 0)
    magnitude = abs(total) >> drop
    if magnitude.bit_length() + drop + unit > 128:
        return math.copysign(math.inf, total)
    return math.copysign(math.ldexp(magnitude, drop + unit), total)


def dot(a: torch.Tensor, b: torch.Tensor, arch: int, accumulate: torch.dtype, chunk: int) -> float:
    fraction, count = (25, 16) if arch == 90 else (24, 8)
    pad = -a.numel() % 16
    x, y = ([float(v) for v in t] + [0.0] * pad for t in (a, b))
    chunk = chunk or len(x)
    total = np.float32(0)
    for begin in range(0, len(x), chunk):
        c = 0.0
        for i in range(begin, min(begin + chunk, len(x)), count):
            c = step(c, x[i : i + count], y[i : i + count], fraction, a.dtype, accumulate == torch.float16)
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.float32(total + np.float32(c))
    return float(total)


def make(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    spread = torch.randint(0, 17, shape, generator=g).double()
    few = torch.rand(shape, generator=g)
    bf16 = dtype == torch.bfloat16
    if kind == "uniform":
        x = torch.rand(shape, generator=g, dtype=torch.float64)
    elif kind == "wide":
        x = x * 2.0 ** (spread - 8)
    elif kind == "cancelling":
        x = torch.where(few < 0.5, x, -x.roll(1, -1)) * 2.0**spread
    elif kind == "subnormal":
        x = x * 2.0 ** ((-134 if bf16 else -22) + spread / 2).floor()
    elif kind == "tiny":
        x = x * 2.0 ** ((-70 if bf16 else -13) + spread / 2).floor()
    elif kind == "largest":
        x = torch.full(shape, 2 - (2.0**-7 if bf16 else 2.0**-10), dtype=torch.float64)
    elif kind == "zeros":
        x = torch.where(few < 0.9, 0.0, x)
    elif kind == "special":
        x = torch.where(few < 0.01, math.inf, x)
        x = torch.where((few > 0.01) & (few < 0.02), -math.inf, x)
        x = torch.where((few > 0.02) & (few < 0.025), math.nan, x)
        x = torch.where(few > 0.9, 0.0, x)
    elif kind == "huge":
        x = x * (2.0 ** (55 + spread / 2).floor() if bf16 else 6000.0)
    return x.to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN against NaN counts as equal: a NaN's payload is not part of the contract."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(nan, actual.isnan())
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    different = (actual.view(integer) != expected.view(integer)) & ~nan
    assert not different.any(), f"{int(different.sum())} of {different.numel()} differ"


PAIRS = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16)]
KINDS = ["normal", "uniform", "wide", "cancelling", "subnormal", "tiny", "largest", "zeros", "special", "huge"]


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "accumulate"), PAIRS, ids=lambda d: str(d).split(".")[1])
def test_same_bits_as_exact_integers(
    native: Library, dtype: torch.dtype, accumulate: torch.dtype, kind: str, arch: int
) -> None:
    for seed, (m, n, k, chunk) in enumerate([(3, 17, 200, 64), (2, 5, 96, 0), (1, 16, 37, 16)]):
        a, b = make(kind, (m, k), dtype, seed), make(kind, (n, k), dtype, seed + 100)
        actual = native.gemm(a, b, arch=arch, accumulate=accumulate, chunk=chunk)
        expected = torch.tensor([[dot(x, y, arch, accumulate, chunk) for y in b] for x in a], dtype=torch.float32)
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "accumulate"), PAIRS, ids=lambda d: str(d).split(".")[1])
def test_same_bits_as_the_scalar_rule(
    native: Library, dtype: torch.dtype, accumulate: torch.dtype, kind: str, arch: int
) -> None:
    a, b = make(kind, (9, 2048), dtype, 1), make(kind, (40, 2048), dtype, 2)
    for chunk in (0, 128, 512):
        actual = native.gemm(a, b, arch=arch, accumulate=accumulate, chunk=chunk)
        values = [[native.scalar_dot(x, y, arch, accumulate, chunk) for y in b] for x in a]
        assert_same_bits(actual, torch.tensor(values, dtype=torch.float32))


def test_the_architectures_differ(native: Library) -> None:
    """2^25 leaves of 1 + 2^-1 what 25 bits keep and 24 do not: a test that cannot tell the rules apart is no test."""
    a = torch.tensor([[2.0**12, 1.0, -(2.0**12), 0.5]], dtype=torch.bfloat16)
    b = torch.tensor([[2.0**12, 1.0, 2.0**12, 1.0]], dtype=torch.bfloat16)
    assert native.gemm(a, b, arch=90).item() == 1.5
    assert native.gemm(a, b, arch=80).item() == 1.0


def test_truncation_drifts_and_chunks_stop_it(native: Library) -> None:
    a, b = make("uniform", (8, 16384), torch.bfloat16, 1), make("uniform", (8, 16384), torch.bfloat16, 2)
    exact = a.double() @ b.double().T

    def drift(chunk: int) -> float:
        return float((exact - native.gemm(a, b, chunk=chunk)).sum() / exact.sum())

    assert 6e-5 < drift(0) < 9e-5  # an H200's one chain: 7.2e-5
    assert abs(drift(512)) < 1e-6
    assert abs(drift(128)) < 2e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_strides_and_any_rows(native: Library, dtype: torch.dtype) -> None:
    m, n, k = 70, 37, 130
    a, b = make("normal", (m, k), dtype, 1), make("normal", (n, k), dtype, 2)
    whole = native.gemm(a, b, chunk=64)
    wide = torch.zeros(m, 3 * k, dtype=dtype)
    wide[:, ::3] = a
    for other_a, other_b in (
        (a.T.contiguous().T, b),
        (a, b.T.contiguous().T),
        (wide[:, ::3], b),
        (a[:1].expand(m, k), b),
    ):
        expected = whole if other_a.stride(0) != 0 else whole[:1].expand(m, n)
        assert_same_bits(native.gemm(other_a, other_b, chunk=64), expected.contiguous())
    pieces = torch.zeros(m, n)
    for begin, end in ((0, 1), (1, 2), (2, 66), (66, m)):
        native.gemm(a, b, chunk=64, out=pieces, rows=(begin, end))
    assert_same_bits(pieces, whole)
    for row in (0, 69):  # batch invariance
        assert_same_bits(native.gemm(a[row : row + 1], b, chunk=64), whole[row : row + 1])


def test_empty(native: Library) -> None:
    assert native.gemm(torch.zeros(0, 8).half(), torch.zeros(4, 8).half()).shape == (0, 4)
    assert native.gemm(torch.zeros(3, 8).half(), torch.zeros(0, 8).half()).shape == (3, 0)
    bias = torch.arange(4.0)
    out = native.gemm(torch.zeros(3, 0).half(), torch.zeros(4, 0).half(), bias=bias)
    assert torch.equal(out, bias.expand(3, 4))


# ------------------------------------------------------------------------------------------------------------ epilogue


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_epilogue(native: Library, dtype: torch.dtype, name: str, out_dtype: torch.dtype) -> None:
    m, n, k = 5, 38, 96
    a, b = make("normal", (m, k), dtype, 1), make("normal", (n, k), dtype, 2)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3))
    acc = native.gemm(a, b, chunk=32)

    pre = torch.zeros(m, n, dtype=dtype)
    out = native.gemm(a, b, chunk=32, bias=bias, activation=name, pre=pre, out_dtype=out_dtype)
    assert_same_bits(pre, (acc + bias).to(dtype))
    assert_same_bits(out, native.activation(name, acc + bias, out_dtype).to(out_dtype))

    pre.zero_()
    out = native.gemm(a, b, chunk=32, kind=GATED, bias=bias, activation=name, pre=pre, out_dtype=out_dtype)
    gate, up = (acc + bias).chunk(2, -1)
    assert_same_bits(pre, (acc + bias).to(dtype))
    assert_same_bits(out, (native.activation(name, gate, out_dtype) * up).to(out_dtype))

    saved, act_out = make("normal", (m, n), dtype, 4), torch.zeros(m, n, dtype=dtype)
    out = native.gemm(a, b, chunk=32, kind=ACT_GRAD, activation=name, saved=saved, act_out=act_out, out_dtype=out_dtype)
    assert_same_bits(act_out, native.activation(name, saved, dtype).to(dtype))
    assert_same_bits(out, (acc * native.activation(name, saved, dtype, grad=True)).to(out_dtype))


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bias_dtypes_and_a_residual_that_is_the_result(native: Library, bias_dtype: torch.dtype) -> None:
    a, b = make("normal", (3, 64), torch.bfloat16, 1), make("normal", (20, 64), torch.bfloat16, 2)
    bias = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(bias_dtype)
    acc = native.gemm(a, b)
    assert_same_bits(native.gemm(a, b, bias=bias), acc + bias.float())
    grad = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    expected = grad + acc
    native.gemm(a, b, kind=RESIDUAL, residual=grad, out=grad)
    assert_same_bits(grad, expected)


def test_fp16_overflow_is_infinity(native: Library) -> None:
    a = torch.full((1, 64), 64.0).half()
    b = torch.full((1, 64), 64.0).half()
    assert native.gemm(a, b, accumulate=torch.float16).item() == math.inf  # 2^18 > 65504
    assert native.gemm(a, b, accumulate=torch.float16, chunk=16).item() == math.inf  # 16 * 2^12 = 65536
    assert (
        native.gemm(a / 2, b, accumulate=torch.float16, chunk=16).item() == 2.0**17
    )  # a chunk fits; fp32 holds the sum
    assert native.gemm(a, b, out_dtype=torch.float16).item() == math.inf  # rounded once, at the end
