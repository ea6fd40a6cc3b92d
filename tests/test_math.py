"""csrc/include/ampkernels/{math,activation}.h on the host: accuracy, limits, and bits that no compiler flag changes.

The header is compiled into a small library by the C++ compiler of this machine. The oracle is float64 on the same fp32
inputs. The device half of the promise (the same bits on a GPU) is tests/test_golden.py's.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", shutil.which("g++") or shutil.which("clang++") or "")
NAMES = ["none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu", "relu2"]
SMOOTH = NAMES[2:8]
U = 2.0**-23

pytestmark = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")


class Library:
    """The functions of native/math_host.cpp over numpy arrays."""

    def __init__(self, path: Path):
        self._lib = ctypes.CDLL(str(path))

    def _call(self, function: str, x: np.ndarray, *args: int) -> np.ndarray:
        x = np.ascontiguousarray(x)
        y = np.empty_like(x)
        pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(x.size))
        getattr(self._lib, function)(*args, *pointers)
        return y

    def activation(self, name: str, x: np.ndarray, *, grad: bool = False, bits16: bool = False) -> np.ndarray:
        if x.dtype == np.float64:
            return self._call("ak_activation_fp64", x, NAMES.index(name), int(grad))
        return self._call("ak_activation", x, NAMES.index(name), int(grad), int(bits16))

    def exp(self, x: np.ndarray) -> np.ndarray:
        return self._call("ak_exp", x)


def build(directory: Path, name: str, *flags: str) -> Library:
    out = directory / f"{name}.so"
    command = [COMPILER, "-std=c++20", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT}/csrc/include", *flags]
    subprocess.run([*command, str(ROOT / "tests/native/math_host.cpp"), "-o", str(out)], check=True)
    return Library(out)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("math"), "native", "-O3", "-march=native")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """No vector instructions and no FMA hardware: libm's fmaf."""
    return build(tmp_path_factory.mktemp("math"), "plain", "-O1")


def patterns(stride: int) -> np.ndarray:
    """Every `stride`-th fp32 bit pattern that is finite, and all finite bf16 and fp16 values."""
    bits = np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32)
    sixteen = np.arange(2**16, dtype=np.uint32)
    fp16 = sixteen.astype(np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate([bits.view(np.float32), (sixteen << 16).view(np.float32), fp16])
    return x[np.isfinite(x)]


def exact(name: str, x: torch.Tensor, grad: bool) -> torch.Tensor:
    """float64 formulas without cancellation in the tails."""
    cdf = 0.5 * torch.special.erfc(-x * 0.5**0.5)
    k = 2 * (2 / torch.pi) ** 0.5
    z = {"gelu_tanh": k * (x + 0.044715 * x**3), "quick_gelu": 1.702 * x}.get(name, x)
    s, t = torch.sigmoid(z), torch.sigmoid(-z)
    if name == "gelu":
        return cdf + x * torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5 if grad else x * cdf
    if name == "sigmoid":
        return s * t if grad else s
    if name == "tanh":
        return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x) if grad else torch.tanh(x)
    xdz = k * (x + 3 * 0.044715 * x**3) if name == "gelu_tanh" else z
    return s * (1 + xdz * t) if grad else x * s


def scaled_error(y: np.ndarray, name: str, x: np.ndarray, grad: bool) -> np.ndarray:
    """|y - exact| / max(|x|, 1), where the float64 formula itself does not overflow."""
    wide = torch.from_numpy(x).double()
    reference = exact(name, wide, grad).numpy()
    usable = np.isfinite(reference)
    error = np.abs(y.astype(np.float64) - reference)[usable]
    return error / np.maximum(np.abs(x[usable].astype(np.float64)), 1)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize("name", SMOOTH)
def test_accuracy(native: Library, name: str, grad: bool) -> None:
    x = patterns(4099)
    y = native.activation(name, x, grad=grad)
    assert np.isfinite(y).all()
    assert scaled_error(y, name, x, grad).max() <= (1.2 if grad else 1.0) * U


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize("name", SMOOTH)
def test_accuracy_of_the_16_bit_forms(native: Library, name: str, grad: bool) -> None:
    """activation16.h's promise: fp16's unit round-off is 2^-11, so an eighth of it at most is added."""
    x = patterns(4099)
    y = native.activation(name, x, grad=grad, bits16=True).astype(np.float64)
    assert np.isfinite(y).all()
    reference = exact(name, torch.from_numpy(x).double(), grad).numpy()
    usable = np.isfinite(reference)
    error, size = np.abs(y - reference)[usable], np.abs(reference[usable])
    if grad:
        assert (error <= 2.0**-14.7 * np.maximum(size, 0.1)).all()
    ordinary = (size > 1e-10) if not grad else (size > 0.1)
    assert (error[ordinary] <= 2.0**-14.2 * size[ordinary]).all()
    tails = (size > 1e-34) & ~ordinary & (grad is False or np.abs(x[usable]) > 4)
    assert (error[tails] <= 0.02 * size[tails]).all()
    assert (error[size <= 1e-34] <= 1e-34).all()


@pytest.mark.parametrize("name", SMOOTH)
def test_limits_of_the_16_bit_forms(native: Library, name: str) -> None:
    """Rounded to either format: the limits, and the values that a shorter polynomial could miss at 0."""
    x = np.array([np.inf, -np.inf, 7e4, -7e4, 3e38, -3e38, 0.0], dtype=np.float32)
    y = torch.from_numpy(native.activation(name, x, bits16=True))
    slope = torch.from_numpy(native.activation(name, x, grad=True, bits16=True))
    low, high = {"sigmoid": (0, 1), "tanh": (-1, 1)}.get(name, (0, None))
    zero = {"sigmoid": 0.5}.get(name, 0)
    slope_limit, slope_zero = {"sigmoid": (0, 0.25), "tanh": (0, 1)}.get(name, (1, 0.5))
    for dtype in (torch.bfloat16, torch.float16):
        want = [high if high is not None else v for v in x[::2].tolist()[:3]]
        assert y.to(dtype)[:6:2].tolist() == torch.tensor(want).to(dtype).tolist()
        assert y.to(dtype)[1:6:2].tolist() == [low] * 3
        assert y.to(dtype)[6] == zero
        assert slope.to(dtype).tolist() == [slope_limit, 0] * 3 + [slope_zero]


def test_gelu_is_no_worse_than_the_textbook_formula(native: Library) -> None:
    x = patterns(4099)
    t = torch.from_numpy(x)
    textbook = (0.5 * t * (1 + torch.erf(t * 0.5**0.5))).numpy()
    ours = scaled_error(native.activation("gelu", x), "gelu", x, False)
    assert ours.max() <= scaled_error(textbook, "gelu", x, False).max()


def test_gelu_keeps_relative_accuracy_in_the_lower_tail(native: Library) -> None:
    x = np.linspace(-12, -1, 100_001, dtype=np.float32)
    wide = torch.from_numpy(x).double()
    reference = exact("gelu", wide, False).numpy()
    relative = np.abs(native.activation("gelu", x) / reference - 1)
    assert relative[x > -4].max() <= 1.5e-5
    assert relative.max() <= 6e-4  # below a third of a bfloat16 ulp


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "grad"])
@pytest.mark.parametrize("bits16", [False, True], ids=["fp32", "16-bit"])
def test_same_bits_with_any_instruction_set(
    native: Library, plain: Library, name: str, grad: bool, bits16: bool
) -> None:
    x = patterns(104729)
    a, b = (lib.activation(name, x, grad=grad, bits16=bits16).view(np.uint32) for lib in (native, plain))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_limits(native: Library, dtype: type) -> None:
    inf = np.array([np.inf, -np.inf], dtype=dtype)
    limits = {"none": (np.inf, -np.inf), "sigmoid": (1, 0), "tanh": (1, -1)}
    grads = {"none": (1, 1), "sigmoid": (0, 0), "tanh": (0, 0), "relu2": (np.inf, 0)}
    for name in NAMES:
        np.testing.assert_array_equal(native.activation(name, inf), limits.get(name, (np.inf, 0)), err_msg=name)
        np.testing.assert_array_equal(native.activation(name, inf, grad=True), grads.get(name, (1, 0)), err_msg=name)
        huge = np.array([7e4, -7e4, 3e38, -3e38], dtype=dtype)
        assert name == "relu2" or np.isfinite(native.activation(name, huge, grad=True)).all(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_nan_propagates(native: Library, plain: Library, name: str, dtype: type) -> None:
    x = np.array([np.nan] * 20 + [1.0], dtype=dtype)
    for lib in (native, plain):
        for bits16 in (False, True):
            assert np.isnan(lib.activation(name, x, bits16=bits16)[:20]).all()
            if name != "none":
                assert np.isnan(lib.activation(name, x, grad=True, bits16=bits16)[:20]).all()


def test_exp(native: Library) -> None:
    x = patterns(1009)
    y = native.exp(x).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        reference = np.exp(x.astype(np.float64))
        rounded = reference.astype(np.float32)
        spacing = np.spacing(rounded).astype(np.float64)
    finite = np.isfinite(rounded)
    assert (np.abs(y[finite] - reference[finite]) <= spacing[finite]).all()
    np.testing.assert_array_equal(y[~finite], np.inf)
    special = np.array([np.inf, -np.inf, np.nan, 0.0], dtype=np.float32)
    np.testing.assert_array_equal(native.exp(special), [np.inf, 0, np.nan, 1])


def test_tanh_of_small_arguments(native: Library) -> None:
    x = patterns(4099)
    x = x[np.abs(x) >= 2.0**-126]
    reference = np.tanh(x.astype(np.float64))
    assert (np.abs(native.activation("tanh", x) / reference - 1)).max() <= 4 * U


@pytest.mark.skipif("g++" not in COMPILER, reason="GCC's vectorisation report")
@pytest.mark.parametrize("target", ["-mavx2 -mfma", "-march=x86-64-v4"])
def test_loops_vectorise(target: str, tmp_path: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86 targets")
    source = ROOT / "tests/native/math_host.cpp"
    command = [COMPILER, "-std=c++20", "-O3", "-ffp-contract=off", f"-I{ROOT}/csrc/include", *target.split()]
    run = subprocess.run(
        [*command, "-fopt-info-vec-optimized", "-c", str(source), "-o", str(tmp_path / "x.o")],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = source.read_text().splitlines()
    loops = {i + 1 for i, line in enumerate(lines) if "for (int64_t" in line and "fp64" not in line and "?" not in line}
    report = [line for line in run.stderr.splitlines() if "loop vectorized" in line]
    vectorised = {line.split(":")[1] for line in report}
    assert {str(line) for line in loops} <= vectorised
    # Both loops of ak_activation once per smooth activation and form at least.
    assert len(report) >= 4 * len(SMOOTH) + 2
