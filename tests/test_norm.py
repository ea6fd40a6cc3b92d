"""layer_norm and rms_norm against float64, forward and backward."""

import math

import pytest
import torch
from bounds import assert_within, norm_grad_bounds
from cases import DTYPES, LAYOUTS, LOW, lay, leaf, name, randn

import ampkernels as ak
from ampkernels import reference
from ampkernels.reference import UNIT_ROUNDOFF, rounding

LENGTHS = [
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    257,
    768,
    1000,
    1024,
    2049,
    4097,
    8193,
    12288,
    16385,
]
NORMS = ["layer_norm", "rms_norm"]


def parameters(op, shape, dtype, device):
    """weight != 1, bias != 0."""
    w = (randn(*shape, dtype=torch.float32, device=device, seed=21) + 1.5).to(dtype)
    b = randn(*shape, dtype=dtype, device=device, seed=22) if op == "layer_norm" else None
    return w, b


def call(module, op, x, shape, w, b, eps, **kw):
    if op == "layer_norm":
        return module.layer_norm(x, shape, w, b, eps, **kw)
    return module.rms_norm(x, shape, w, eps, **kw)


def check(op, x, shape, w=None, b=None, eps=1e-5, *, dy=None, **kw):
    """Forward and backward, with a residual and a gradient of the sum where one is given."""
    dims = tuple(range(-len(shape), 0))
    residual = kw.get("residual")
    mine = {k: leaf(t) for k, t in (("x", x), ("w", w), ("b", b), ("r", residual)) if t is not None}
    exact = {k: t.detach().double().requires_grad_() for k, t in mine.items()}
    extra = {k: v for k, v in kw.items() if k != "residual"}

    def run(module, t):
        more = {**extra, "residual": t["r"]} if "r" in t else extra
        out = call(module, op, t["x"], shape, t.get("w"), t.get("b"), eps, **more)
        return out if "r" in t else (out, None)

    y, total = run(ak, mine)
    y_exact, total_exact = run(reference, exact)
    out = kw.get("out_dtype") or x.dtype
    assert y.dtype == out and y.shape == x.shape
    s = x.detach().double() if residual is None else x.detach().double() + residual.detach().double()
    forward = reference.norm_bound(
        x,
        shape,
        w,
        b,
        eps,
        residual=residual,
        rms=op == "rms_norm",
        weight_offset=kw.get("weight_offset", 0.0),
        out_dtype=out,
    )
    assert_within(y, y_exact, forward, "y")
    if residual is not None:
        assert total.dtype == residual.dtype
        assert_within(
            total, s, rounding(s, residual.dtype) + 2 * UNIT_ROUNDOFF[reference.compute_dtype(x.dtype)] * s.abs(), "sum"
        )
    with torch.no_grad():
        again = run(ak, {k: t.detach() for k, t in mine.items()})[0]
    assert torch.equal(again, y), "grad mode changed the bits"

    dy = randn(*x.shape, dtype=out, device=x.device.type, seed=31) if dy is None else dy
    dsum = None if residual is None else randn(*x.shape, dtype=residual.dtype, device=x.device.type, seed=32)
    if residual is None:
        y.backward(dy)
        y_exact.backward(dy.double())
    else:
        torch.autograd.backward([y, total], [dy, dsum])
        torch.autograd.backward([y_exact, total_exact], [dy.double(), dsum.double()])
    dx, dw, db = norm_grad_bounds(
        s, dims, w, dy, eps, rms=op == "rms_norm", dtype=x.dtype, saved_dtype=None if residual is None else residual.dtype,
        weight_offset=kw.get("weight_offset", 0.0), w_dtype=None if w is None else w.dtype, b_dtype=None if b is None else b.dtype,
    )  # fmt: skip
    if residual is not None:
        dx = dx + 2 * (UNIT_ROUNDOFF[x.dtype] + UNIT_ROUNDOFF[residual.dtype]) * (
            dsum.double().abs() + exact["x"].grad.abs()
        )
    for key, bound in (("x", dx), ("r", dx), ("w", dw), ("b", db)):
        if key in mine:
            assert mine[key].grad.dtype == mine[key].dtype, key
            assert_within(mine[key].grad, exact[key].grad, bound.reshape(mine[key].shape), f"gradient of {key}")
    return y


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", NORMS)
def test_row_lengths(device, op, dtype, length):
    check(op, randn(7, length, dtype=dtype, device=device), (length,), *parameters(op, (length,), dtype, device))


@pytest.mark.parametrize("length", [65536, 131072, 300001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
@pytest.mark.parametrize("op", NORMS)
def test_long_rows(device, op, dtype, length):
    check(op, randn(3, length, dtype=dtype, device=device), (length,), *parameters(op, (length,), dtype, device))


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 70, 129, 1000])
@pytest.mark.parametrize("length", [17, 33, 63, 65, 127, 256])
@pytest.mark.parametrize("op", NORMS)
def test_row_counts(device, op, rows, length):
    check(
        op,
        randn(rows, length, dtype=torch.bfloat16, device=device),
        (length,),
        *parameters(op, (length,), torch.bfloat16, device),
    )


@pytest.mark.parametrize("which", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_layer_norm_optional_parameters(device, dtype, which):
    w, b = parameters("layer_norm", (48,), dtype, device)
    check("layer_norm", randn(9, 48, dtype=dtype, device=device), (48,), w if which in ("both", "weight") else None,
          b if which in ("both", "bias") else None)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_norm_without_weight(device, dtype):
    check("rms_norm", randn(9, 48, dtype=dtype, device=device), (48,))


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", NORMS)
def test_parameters_of_any_dtype(device, op, dtype, parameter_dtype):
    check(op, randn(9, 72, dtype=dtype, device=device), (72,), *parameters(op, (72,), parameter_dtype, device))


def test_parameters_of_two_dtypes_in_turn(device):
    """The same shape again with other dtypes: nothing may be remembered by shape alone."""
    x = randn(9, 72, dtype=torch.bfloat16, device=device)
    for w_dtype, b_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float64, torch.bfloat16),
    ):
        w, _ = parameters("layer_norm", (72,), w_dtype, device)
        check("layer_norm", x, (72,), w, randn(72, dtype=b_dtype, device=device, seed=2))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", NORMS)
def test_out_dtype(device, op, dtype, out_dtype):
    check(
        op, randn(9, 72, dtype=dtype, device=device), (72,), *parameters(op, (72,), dtype, device), out_dtype=out_dtype
    )


@pytest.mark.parametrize("shape", [(8, 6), (4, 8, 6), (6,), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_several_trailing_dims_and_ranks(device, op, shape):
    for lead in ((), (3,), (2, 3), (2, 1, 3)):
        check(
            op,
            randn(*lead, *shape, dtype=torch.float32, device=device),
            shape,
            *parameters(op, shape, torch.float32, device),
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["input", "dy", "parameters", "residual"])
@pytest.mark.parametrize("shape", [(6, 37), (3, 4, 64), (2, 3, 5, 24)], ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_layouts(device, op, shape, which, layout):
    dtype, n = torch.bfloat16, shape[-1:]
    x, dy, r = (randn(*shape, dtype=dtype, device=device, seed=i) for i in range(3))
    w, b = parameters(op, n, dtype, device)
    if which == "input":
        laid = lay(x, layout)
        y = check(op, laid, n, w, b, dy=dy)
        assert torch.equal(call(ak, op, laid.contiguous(), n, w, b, 1e-5), y), "the layout changed the bits"
    elif which == "dy":
        check(op, x, n, w, b, dy=lay(dy, layout))
    elif which == "parameters":
        check(op, x, n, lay(w, layout), None if b is None else lay(b, layout), dy=dy)
    else:
        check(op, x, n, w, b, residual=lay(r, layout))


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
@pytest.mark.parametrize("op", NORMS)
def test_normalised_dims_that_are_not_one_stride(device, op, layout):
    x = randn(4, 4, 6, 5, dtype=torch.float32, device=device)
    x = (
        x.contiguous(memory_format=torch.channels_last)
        if layout == "channels_last"
        else x.transpose(0, 3).contiguous().transpose(0, 3)
    )
    check(op, x, (4, 6, 5), *parameters(op, (4, 6, 5), torch.float32, device))
    w, b = parameters(op, (6, 5), torch.float32, device)
    check(op, x, (6, 5), w.t().contiguous().t(), b)


@pytest.mark.parametrize("residual_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=name)
@pytest.mark.parametrize("op", NORMS)
def test_residual(device, op, dtype, residual_dtype):
    for length in (64, 77, 5000):
        x = randn(6, length, dtype=dtype, device=device)
        r = randn(6, length, dtype=residual_dtype, device=device, seed=6)
        check(op, x, (length,), *parameters(op, (length,), torch.float32, device), residual=r)


def test_residual_fp64(device):
    x, r = randn(6, 33, dtype=torch.float64, device=device), randn(6, 33, dtype=torch.float64, device=device, seed=6)
    for op in NORMS:
        check(op, x, (33,), *parameters(op, (33,), torch.float64, device), residual=r)


@pytest.mark.parametrize("unused", ["y", "sum"])
@pytest.mark.parametrize("op", NORMS)
def test_only_one_output_is_used(device, op, unused):
    x, r = (
        leaf(randn(5, 16, dtype=torch.float32, device=device)),
        leaf(randn(5, 16, dtype=torch.float32, device=device, seed=1)),
    )
    w, b = parameters(op, (16,), torch.float32, device)
    y, total = call(ak, op, x, (16,), w, b, 1e-5, residual=r)
    xe, re = (t.detach().double().requires_grad_() for t in (x, r))
    ye, te = call(reference, op, xe, (16,), w, b, 1e-5, residual=re)
    (total if unused == "y" else y).square().sum().backward()
    (te if unused == "y" else ye).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), xe.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(r.grad.double(), re.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_weight_offset(device, dtype, offset):
    w, _ = parameters("rms_norm", (40,), dtype, device)
    check("rms_norm", randn(9, 40, dtype=dtype, device=device), (40,), w, weight_offset=offset)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty(device, op, shape):
    x = leaf(randn(*shape, dtype=torch.bfloat16, device=device))
    w, b = parameters(op, shape[-1:], torch.bfloat16, device)
    w, b = leaf(w), None if b is None else leaf(b)
    y = call(ak, op, x, shape[-1:], w, b, 1e-5)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape
    assert (w.grad == 0).all() and (b is None or (b.grad == 0).all())


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("length", [16, 768, 5000, 32768])
def test_mean_much_larger_than_deviation(device, mean, length):
    x = randn(8, length, dtype=torch.float64, device=device).mul(1.0).add(mean).float()
    y = ak.layer_norm(x, (length,))
    exact = reference.layer_norm(x, (length,))
    assert_within(y, exact, reference.norm_bound(x, (length,)))
    # what E[x^2] - E[x]^2 would fail: the mean of fp32 numbers near 1e4 is known to about 1e-3 of their deviation
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3 if mean >= 1e4 else 2e-4)


def test_tiny_deviation(device):
    x = (randn(4, 32768, dtype=torch.float64, device=device) * 0.01 + 100).float()
    y = ak.layer_norm(x, (32768,), eps=0.0)
    assert ((y.double().var(-1, unbiased=False) - 1).abs() < 0.01).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -6e4, 1e34])  # the last, times rstd, is infinite in fp32
@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("length", [10, 768, 4099, 4100, 4104])
def test_constant_rows(device, dtype, value, length):
    value = min(value, torch.finfo(dtype).max)
    x = leaf(torch.full((4, length), value, dtype=dtype, device=device))
    w, b = parameters("layer_norm", (length,), dtype, device)
    y = ak.layer_norm(x, (length,), w, b, 1e-12)
    y.backward(randn(4, length, dtype=dtype, device=device, seed=3))
    assert torch.equal(y, b.expand_as(y)) and not x.grad.isnan().any()
    x = leaf(torch.zeros(4, length, dtype=dtype, device=device))
    y = ak.rms_norm(x, (length,), w, 1e-12)
    y.backward(torch.ones_like(y))
    assert (y == 0).all() and not x.grad.isnan().any()


@pytest.mark.parametrize("length", [8, 64, 1000, 5000, 40000])
def test_huge_values_do_not_overflow(device, length):
    signs = torch.ones(length, device=device)
    signs[::2] = -1
    y = ak.rms_norm(signs * 1e30, (length,), eps=1e-6)
    torch.testing.assert_close(y, signs, rtol=1e-5, atol=0)
    y = ak.rms_norm((signs * 4000).half(), (length,), eps=1e-6)
    assert torch.equal(y, signs.half())
    x = randn(3, length, dtype=torch.float64, device=device).mul(1e30).float()
    for op in NORMS:
        ours = leaf(x)
        y = call(ak, op, ours, (length,), None, None, 1e-6)
        torch.testing.assert_close(
            y.double(), call(reference, op, x, (length,), None, None, 1e-6), rtol=1e-4, atol=1e-4
        )
        y.backward(torch.ones_like(y))
        assert ours.grad.isfinite().all()
    x = randn(3, length, dtype=torch.float16, device=device) * 2e4
    for op in NORMS:
        y = call(ak, op, x, (length,), None, None, 1e-6)
        assert_within(
            y,
            call(reference, op, x, (length,), None, None, 1e-6),
            reference.norm_bound(x, (length,), eps=1e-6, rms=op == "rms_norm"),
        )


@pytest.mark.parametrize("op", NORMS)
def test_nan_and_inf_stay_in_their_row(device, op):
    x = randn(4, 100, dtype=torch.float32, device=device)
    x[1, 3], x[2, 5] = math.nan, math.inf
    y = call(ak, op, x, (100,), None, None, 1e-5)
    assert y[1].isnan().all() and y[2].isnan().any() and y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("op", NORMS)
def test_zero_weight_has_a_gradient(device, op):
    w, b = parameters(op, (24,), torch.float32, device)
    w[3] = 0.0
    check(op, randn(9, 24, dtype=torch.float32, device=device), (24,), w, b)


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("length", [64, 768, 4096])
def test_within_one_ulp_of_the_once_rounded_result(device, op, dtype, length):
    """Ordinary rows. An element that lies next to its row's mean keeps the absolute error of the mean: 2^-21 of 1."""
    x = randn(64, length, dtype=dtype, device=device)
    w, _ = parameters(op, (length,), torch.float32, device)
    y = call(ak, op, x, (length,), w, None, 1e-5)
    exact = call(reference, op, x, (length,), w, None, 1e-5)
    distance = (y.view(torch.int16).int() - exact.to(dtype).view(torch.int16).int()).abs()
    assert ((distance <= 1) | ((y.double() - exact).abs() <= 2.0**-21)).all()
    assert (distance > 1).sum() <= 8


@pytest.mark.parametrize("op", NORMS)
def test_weight_gradient_of_many_rows(device, op):
    """Sums over rows are fp32 to the end: as right over 40000 rows as over 4000."""
    for rows in (4000, 40000):
        x, dy = (
            randn(rows, 128, dtype=torch.bfloat16, device=device),
            randn(rows, 128, dtype=torch.bfloat16, device=device, seed=1),
        )
        w, b = parameters(op, (128,), torch.float32, device)
        check(op, x, (128,), w, b, dy=dy)


@pytest.mark.parametrize("op", NORMS)
def test_many_rows(device, op):
    check(op, randn(65537, 8, dtype=torch.bfloat16, device=device), (8,), *parameters(op, (8,), torch.bfloat16, device))
    check(
        op,
        randn(70000, 128, dtype=torch.bfloat16, device=device),
        (128,),
        *parameters(op, (128,), torch.bfloat16, device),
    )


@pytest.mark.parametrize("op", NORMS)
def test_beyond_2_to_31_elements(cuda, op):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = leaf(torch.randn(2**21 + 1, 1024, device=cuda, dtype=torch.float16))
    w, b = parameters(op, (1024,), torch.float32, cuda)
    y = call(ak, op, x, (1024,), w, b, 1e-5)
    last = x.detach()[-4:]
    assert_within(
        y[-4:],
        call(reference, op, last, (1024,), w, b, 1e-5),
        reference.norm_bound(last, (1024,), w, b, rms=op == "rms_norm"),
    )
    dy = torch.zeros_like(y)
    dy[-4:] = randn(4, 1024, dtype=torch.float16, device=cuda)
    y.backward(dy)
    small = last.double().requires_grad_()
    call(reference, op, small, (1024,), w, b, 1e-5).backward(dy[-4:].double())
    torch.testing.assert_close(x.grad[-4:].double(), small.grad, rtol=4e-3, atol=4e-3)
    assert (x.grad[0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rms_norm_default_eps_is_torchs(device, dtype):
    x = randn(4, 32, dtype=dtype, device=device) * 1e-3
    expected = torch.nn.functional.rms_norm(x, (32,))
    torch.testing.assert_close(ak.rms_norm(x, (32,)), expected, rtol=4 * UNIT_ROUNDOFF[dtype] + 1e-6, atol=0)
