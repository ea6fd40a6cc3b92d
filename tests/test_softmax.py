"""softmax and log_softmax against float64, forward and backward."""

import math

import pytest
import torch
from bounds import assert_within, softmax_grad_bound
from cases import DTYPES, LAYOUTS, LOW, lay, leaf, name, randn

import ampkernels as ak
from ampkernels import _ops, reference

# Every tier of row length and its edges, powers of two and not.
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
    50,
    63,
    64,
    100,
    127,
    128,
    255,
    257,
    1000,
    1024,
    2049,
    4097,
    8193,
    16385,
]


def spread_of(x, scale=1.0, mask=None):
    finite = torch.where(x.isfinite(), x.double(), 0).abs() * abs(scale)
    if mask is not None and mask.dtype != torch.bool:
        finite = finite + torch.where(mask.isfinite(), mask.double(), 0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def check(x, dim=-1, *, log=False, dy=None, **kw):
    ours = leaf(x)
    function, oracle = (ak.log_softmax, reference.log_softmax) if log else (ak.softmax, reference.softmax)
    y = function(ours, dim, **kw)
    exact_x = x.detach().double().requires_grad_()
    exact = oracle(exact_x, dim, **kw)
    length, spread = x.shape[dim] if x.dim() else 1, spread_of(x, kw.get("scale", 1.0), kw.get("mask"))
    out = kw.get("out_dtype") or x.dtype
    assert y.dtype == out and y.shape == x.shape
    bound = (reference.log_softmax_bound if log else reference.softmax_bound)(
        exact, x.dtype, out, length=length, spread=spread
    )
    assert_within(y, exact, bound, "y")
    with torch.no_grad():
        assert torch.equal(function(x, dim, **kw), y), "grad mode changed the bits"
    dy = randn(*x.shape, dtype=out, device=x.device.type, seed=77) if dy is None else dy
    y.backward(dy)
    exact.backward(dy.double())
    clean = exact.detach().nan_to_num(0, 0, 0)
    grad = softmax_grad_bound(clean, dy, dim, kw.get("scale", 1.0), log, x.dtype, out, spread)
    assert ours.grad.dtype == x.dtype
    assert_within(ours.grad, exact_x.grad, grad, "dinput")
    return y


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_row_lengths(device, dtype, length, log):
    check(randn(5, length, dtype=dtype, device=device, scale=3), log=log)


@pytest.mark.parametrize("length", [65537, 131072, 300001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_long_rows(device, dtype, length):
    check(randn(2, length, dtype=dtype, device=device, scale=3))
    check(randn(2, length, dtype=dtype, device=device, scale=3), log=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(6, 37), (3, 4, 64), (2, 3, 5, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
@pytest.mark.parametrize("which", ["input", "dy"])
def test_layouts(device, dtype, shape, layout, which):
    x, dy = randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device, seed=4)
    if which == "input":
        laid = lay(x, layout)
        y = check(laid, dy=dy)
        assert torch.equal(ak.softmax(laid.contiguous()), y), "the layout changed the bits"
    else:
        check(x, dy=lay(dy, layout))
        check(x, dy=lay(dy, layout), log=True)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -4])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("log", [False, True])
def test_any_dim(device, dtype, dim, log):
    check(randn(3, 20, 5, 18, dtype=dtype, device=device), dim, log=log)


def bits_of(x, dim, dy, log=False, **kw):
    """y and dx over `dim`, moved to the end."""
    ours = leaf(x)
    y = ak.log_softmax(ours, dim, **kw) if log else ak.softmax(ours, dim, **kw)
    y.backward(dy)
    return y.detach().movedim(dim, -1), ours.grad.movedim(dim, -1)


@pytest.mark.parametrize("length", [1, 7, 33, 300, 1000, 5000, 20000, 40000])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=["same", "float32", "bfloat16"])
def test_a_row_has_its_bits_along_any_dim(device, dtype, length, out_dtype):
    """(2, length, 17): 34 rows, adjacent 17 by 17, against the same rows made contiguous."""
    shape, out = (2, length, 17), out_dtype or dtype
    x, dy = randn(*shape, dtype=dtype, device=device, scale=3), randn(*shape, dtype=out, device=device, seed=4)
    additive = randn(*shape, dtype=torch.float32, device=device, seed=5)
    drop = randn(*shape, dtype=torch.float32, device=device, seed=6) < 0
    drop[0, :, 3] = True  # an empty row
    options = [
        {},
        {"log": True},
        {"scale": -0.3},
        {"mask": ~drop},
        {"mask": additive.masked_fill(drop, -math.inf), "scale": 0.5},
        {"mask": additive[:, :1].to(dtype)},
    ]
    for kw in options:
        rows = {k: v.movedim(1, -1).contiguous() if isinstance(v, torch.Tensor) else v for k, v in kw.items()}
        x_rows, dy_rows = x.movedim(1, -1).contiguous(), dy.movedim(1, -1).contiguous()
        y, dx = bits_of(x, 1, dy, out_dtype=out_dtype, **kw)
        expected_y, expected_dx = bits_of(x_rows, -1, dy_rows, out_dtype=out_dtype, **rows)
        assert torch.equal(y, expected_y), (kw.keys(), "y")
        assert torch.equal(dx, expected_dx), (kw.keys(), "dx")


@pytest.mark.parametrize("shape", [(9, 7), (40, 33), (300, 300), (1100, 1000), (40, 20000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_a_causal_row_has_its_bits_in_any_layout(device, dtype, shape, log):
    """Rows that are adjacent in memory: x in forward, and y, which backward reads, too."""
    x, dy = randn(*shape, dtype=dtype, device=device, scale=3), randn(*shape, dtype=dtype, device=device, seed=4)
    y = _ops.softmax_fwd(x, 1, 0.5, None, True, log, dtype)
    assert torch.equal(_ops.softmax_fwd(lay(x, "transposed"), 1, 0.5, None, True, log, dtype), y)
    dx = _ops.softmax_bwd(dy, y, 1, 0.5, True, log, dtype)
    for which in (
        (lay(dy, "transposed"), y),
        (dy, lay(y, "transposed")),
        (lay(dy, "transposed"), lay(y, "transposed")),
    ):
        assert torch.equal(_ops.softmax_bwd(*which, 1, 0.5, True, log, dtype), dx)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(1000, 3), (3, 1000), (129, 257), (1, 7), (7, 1)], ids=str)
def test_dims_of_uneven_shapes(device, dim, shape):
    check(randn(*shape, dtype=torch.bfloat16, device=device), dim)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_no_or_one_element(device, shape, log):
    check(randn(*shape, dtype=torch.float32, device=device), -1, log=log)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_out_dtype(device, dtype, out_dtype):
    check(randn(4, 70, dtype=dtype, device=device), out_dtype=out_dtype)
    check(randn(4, 70, dtype=dtype, device=device), log=True, out_dtype=out_dtype)


@pytest.mark.parametrize("scale", [0.125, -2.0, 0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=name)
def test_scale(device, dtype, scale):
    check(randn(4, 70, dtype=dtype, device=device), scale=scale)


# --------------------------------------------------------------------------------------------------------------- masks

MASK_SHAPES = [(2, 3, 9, 40), (2, 1, 9, 40), (1, 1, 9, 40), (2, 1, 1, 40), (9, 40), (40,), (1,), (2, 3, 9, 1), ()]


@pytest.mark.parametrize("mask_shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_mask(device, dtype, kind, mask_shape):
    x = randn(2, 3, 9, 40, dtype=dtype, device=device)
    if kind == "bool":
        mask = randn(*mask_shape, dtype=torch.float32, device=device, seed=3) > -0.5
    else:
        mask = randn(*mask_shape, dtype=getattr(torch, kind), device=device, seed=3)
    check(x, mask=mask)
    check(x, mask=mask, causal=True, scale=0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_mask_layouts(device, kind, layout):
    x = randn(4, 6, 33, dtype=torch.bfloat16, device=device)
    mask = randn(4, 6, 33, dtype=torch.float32, device=device, seed=3)
    if kind == "bool":
        mask = (mask > 0).to(torch.uint8)
    mask = lay(mask, layout)
    check(x, mask=mask.view(torch.bool) if kind == "bool" else mask)


@pytest.mark.parametrize("dim", [0, 1])
def test_mask_along_another_dim(device, dim):
    x = randn(5, 12, 7, dtype=torch.float32, device=device)
    check(x, dim, mask=randn(5, 12, 7, dtype=torch.float32, device=device, seed=3) > -1)
    check(x, dim, mask=randn(12, 1, dtype=torch.float32, device=device, seed=3))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16, 31, 33, 64, 100, 127, 300, 2049, 4100])
def test_mask_of_any_length(device, length):
    x = randn(2, 2, 3, length, dtype=torch.float16, device=device)
    check(x, mask=randn(2, 1, 3, length, dtype=torch.float32, device=device, seed=3) > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("length", [7, 64, 1500, 40000])
def test_what_a_mask_drops_is_never_read(device, value, length):
    x = randn(3, length, dtype=torch.bfloat16, device=device)
    mask = torch.ones(3, length, dtype=torch.bool, device=device)
    mask[:, ::3] = False
    clean = ak.softmax(x, mask=mask)
    x[:, ::3] = value
    assert torch.equal(ak.softmax(x, mask=mask), clean)
    assert (clean[:, ::3] == 0).all()


@pytest.mark.parametrize("length", [1, 6, 64, 2000, 40000])
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_empty_row_is_zero_with_zero_gradient(device, length, kind):
    x = leaf(randn(3, length, dtype=torch.bfloat16, device=device))
    mask = torch.ones(3, length, dtype=torch.bool, device=device)
    mask[1] = False
    if kind == "-inf":
        mask = torch.zeros(3, length, device=device).masked_fill(~mask, -math.inf)
    y = ak.softmax(x, mask=mask)
    y.backward(randn(3, length, dtype=torch.bfloat16, device=device, seed=5))
    assert (y[1] == 0).all() and (x.grad[1] == 0).all()
    assert y[0].isfinite().all() and x.grad.isfinite().all()


def test_row_of_minus_inf_without_a_mask_is_nan(device):
    x = torch.full((2, 6), -math.inf, device=device)
    x[0, 0] = 1.0
    y = ak.softmax(x)
    assert y[1].isnan().all() and y[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert ak.log_softmax(x)[1].isnan().all()


def test_additive_lowest_is_not_empty(device):
    """finfo.min everywhere keeps every element alike: torch gives a uniform row, and so do we."""
    x = torch.zeros(1, 8, device=device)
    y = ak.softmax(x, mask=torch.full((1, 8), torch.finfo(torch.float32).min, device=device))
    assert torch.equal(y, torch.full_like(y, 0.125))


@pytest.mark.parametrize("length", [5, 300, 5000])
def test_nan_and_inf_propagate(device, length):
    x = randn(4, length, dtype=torch.float32, device=device)
    x[1, length // 2], x[2, 1] = math.nan, math.inf
    for ours, torchs in ((ak.softmax, torch.softmax), (ak.log_softmax, torch.log_softmax)):
        y, expected = ours(x), torchs(x.double(), -1)
        assert torch.equal(y.isnan(), expected.isnan())
        assert y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("shape", [(5, 5), (2, 3, 7, 7), (3, 8), (8, 3), (1, 9), (130, 130), (6, 2000)], ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_causal(device, dtype, shape):
    y = check(randn(*shape, dtype=dtype, device=device), causal=True)
    assert (y.triu(1) == 0).all()


def test_causal_never_reads_past_the_diagonal(device):
    x = randn(2, 40, 40, dtype=torch.float32, device=device)
    clean = ak.softmax(x, causal=True)
    poisoned = x.masked_fill(torch.ones(40, 40, dtype=torch.bool, device=device).triu(1), math.nan)
    assert torch.equal(ak.softmax(poisoned, causal=True), clean)
    dy = leaf(poisoned)
    ak.softmax(dy, causal=True).backward(torch.ones_like(x).masked_fill(x.triu(1) != 0, math.nan))
    assert dy.grad.isfinite().all()


@pytest.mark.parametrize("mask_shape", [(2, 3, 9, 40), (9, 40), (2, 1, 1, 40), (1,)], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32], ids=name)
def test_gradient_of_an_additive_mask(device, mask_dtype, mask_shape):
    x = leaf(randn(2, 3, 9, 40, dtype=torch.float32, device=device))
    mask = leaf(randn(*mask_shape, dtype=mask_dtype, device=device, seed=3))
    dy = randn(2, 3, 9, 40, dtype=torch.float32, device=device, seed=5)
    ak.softmax(x, mask=mask, scale=0.3).backward(dy)
    exact = mask.detach().double().requires_grad_()
    xe = x.detach().double().requires_grad_()
    reference.softmax(xe, mask=exact, scale=0.3).backward(dy.double())
    torch.testing.assert_close(
        mask.grad.double(), exact.grad, rtol=2 * reference.UNIT_ROUNDOFF[mask_dtype] + 1e-5, atol=1e-5
    )
    torch.testing.assert_close(x.grad.double(), xe.grad, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("length", [64, 768, 4096])
def test_within_one_ulp_of_the_once_rounded_result(device, dtype, length):
    x = randn(64, length, dtype=dtype, device=device, scale=2)
    for y, exact in ((ak.softmax(x), reference.softmax(x)), (ak.log_softmax(x), reference.log_softmax(x))):
        rounded = exact.to(dtype)
        distance = (y.view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
        assert int(distance.max()) <= 1


def test_large_logits(device):
    x = torch.tensor([[6e4, 6e4, -6e4], [1e30, 1e30, 0.0], [-3e38, 0.0, 3e38]], device=device)
    check(x)
    check(torch.tensor([[65504.0, 65504.0, -65504.0]], device=device, dtype=torch.float16))


def test_many_rows(device):
    check(randn(65537, 8, dtype=torch.bfloat16, device=device))


def test_beyond_2_to_31_elements(cuda):
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    x = torch.randn(1_100_000_000, 2, device=cuda, dtype=torch.float16)
    assert_within(ak.softmax(x)[-4:], reference.softmax(x[-4:]), torch.tensor(1e-3))
    assert_within(ak.log_softmax(x)[-4:], reference.log_softmax(x[-4:]), torch.tensor(4e-3))
    big = torch.randn(2**21 + 1, 1024, device=cuda, dtype=torch.bfloat16)
    assert_within(ak.softmax(big)[-2:], reference.softmax(big[-2:]), torch.tensor(1e-3))


def test_row_of_2_to_31_elements_with_stride_0(cuda):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    x = torch.zeros(1, dtype=torch.float16, device=cuda).expand(2**31 - 1)
    y = ak.softmax(x, out_dtype=torch.float32)
    assert torch.equal(y[[0, -1]], torch.full((2,), 2.0**-31, device=cuda))
