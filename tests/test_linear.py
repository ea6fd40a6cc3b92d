"""linear, gated_linear and mlp against float64, forward and backward."""

import math

import pytest
import torch
from bounds import assert_within, dpre_bound, linear_grad_bounds
from cases import DTYPES, LAYOUTS, LOW, lay, leaf, name, randn

import ampkernels as ak
from ampkernels import numerics, reference
from ampkernels.reference import UNIT_ROUNDOFF, accumulation, rounding

# (M, K, N): one of each tile, tile +- 1, odd, single, tall, wide; nothing a multiple of anything but the first.
SHAPES = [(64, 64, 64), (1, 1, 1), (1, 65, 3), (3, 1, 5), (17, 33, 65), (129, 127, 130), (5, 513, 8), (200, 16, 257)]
ACTIVATIONS = list(ak.ACTIVATIONS)


def make(m, k, n, dtype, device, bias_dtype="same", seed=0):
    x = randn(m, k, dtype=dtype, device=device, seed=seed)
    w = randn(n, k, dtype=dtype, device=device, seed=seed + 1, scale=1 / math.sqrt(max(k, 1)))
    b = None
    if bias_dtype is not None:
        b = randn(n, dtype=dtype if bias_dtype == "same" else bias_dtype, device=device, seed=seed + 2)
    return x, w, b


def forward_bound(x, w, b, activation, training, device):
    """On the CPU, the pre-activation is rounded to the dtype first in training, and wherever the library's epilogue lacks
    the activation (explain says so)."""
    bound = reference.linear_bound(x, w, b, activation=activation)
    rounded_first = training or activation in ("relu2", "quick_gelu")
    if rounded_first and device == "cpu" and x.dtype in LOW and activation is not None:
        pre = reference.linear(x, w, b)
        slope = 2 * pre.abs() + 1 if activation == "relu2" else reference._SLOPE[activation]
        bound = bound + 2 * slope * rounding(pre, x.dtype)
    return bound


def check_linear(x, w, b, activation, dy, device):
    x, w, b = leaf(x), leaf(w), None if b is None else leaf(b)
    y = ak.linear(x, w, b, activation=activation)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], w.shape[0])
    assert_within(
        y, reference.linear(x, w, b, activation=activation), forward_bound(x, w, b, activation, True, device), "y"
    )
    with torch.no_grad():
        plain = ak.linear(x, w, b, activation=activation)
    assert_within(
        plain,
        reference.linear(x, w, b, activation=activation),
        forward_bound(x, w, b, activation, False, device),
        "y without grad",
    )

    y.backward(dy)
    inputs = [t.detach().double().requires_grad_() for t in (x, w)] + (
        [] if b is None else [b.detach().double().requires_grad_()]
    )
    reference.linear(*inputs, activation=activation).backward(dy.double())
    m = math.prod(x.shape[:-1])
    flat_x, flat_dy = x.detach().reshape(m, x.shape[-1]), dy.reshape(m, w.shape[0])
    bounds = linear_grad_bounds(flat_x, w, b, flat_dy, activation, x.dtype, b_dtype=None if b is None else b.dtype)
    slack = 1.0
    if device == "cpu" and x.dtype in LOW:
        slack = 2.0  # a library rounds the product, and we its factor with act'
    for t, e, bound, what in zip((x, w, b), inputs, bounds, ("dinput", "dweight", "dbias"), strict=False):
        assert (
            t.grad is not None and t.grad.dtype == t.dtype and t.grad.stride() == t.stride()
        ) or not t.is_contiguous()
        assert_within(t.grad, e.grad, slack * bound.reshape(t.shape), what)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_shapes(device, dtype, shape):
    x, w, b = make(*shape, dtype, device)
    check_linear(x, w, b, None, randn(shape[0], shape[2], dtype=dtype, device=device, seed=9), device)
    check_linear(x, w, b, "gelu", randn(shape[0], shape[2], dtype=dtype, device=device, seed=9), device)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_activations(device, dtype, activation):
    x, w, b = make(67, 96, 72, dtype, device)
    check_linear(2 * x, w, b, activation, randn(67, 72, dtype=dtype, device=device, seed=9), device)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8), (2, 0, 8)], ids=str)
def test_ranks(device, shape):
    x, w, b = randn(*shape, dtype=torch.bfloat16, device=device), *make(1, 8, 5, torch.bfloat16, device)[1:]
    check_linear(x, w, b, "silu", randn(*shape[:-1], 5, dtype=torch.bfloat16, device=device, seed=3), device)


@pytest.mark.parametrize("empty", ["m", "k", "n"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_empty(device, dtype, activation, empty):
    m, k, n = (0 if empty == d else 3 for d in "mkn")
    x, w, b = make(m, k, n, dtype, device)
    check_linear(x, w, b, activation, randn(m, n, dtype=dtype, device=device), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["input", "weight", "bias", "dy", "all"])
@pytest.mark.parametrize("shape", [(33, 40, 24), (150, 77, 68)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name)
def test_layouts(device, dtype, shape, which, layout):
    m, k, n = shape
    x, w, b = make(m, k, n, dtype, device)
    dy = randn(m, n, dtype=dtype, device=device, seed=5)
    if which in ("input", "all"):
        x = lay(x, layout)
    if which in ("weight", "all"):
        w = lay(w, layout)
    if which in ("bias", "all"):
        b = lay(b, layout)
    if which in ("dy", "all"):
        dy = lay(dy, layout)
    check_linear(x, w, b, "gelu_tanh", dy, device)


@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=lambda d: "none" if d is None else name(d))
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_bias_of_any_dtype(device, dtype, bias_dtype):
    x, w, b = make(20, 24, 40, dtype, device, bias_dtype)
    check_linear(x, w, b, "relu", randn(20, 40, dtype=dtype, device=device, seed=5), device)
    check_linear(x, w, b, None, randn(20, 40, dtype=dtype, device=device, seed=5), device)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_out_dtype(device, dtype, out_dtype, activation):
    x, w, b = make(20, 1000, 24, dtype, device)
    y = ak.linear(x, w, b, activation=activation, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    bound = reference.linear_bound(x, w, b, activation=activation, out_dtype=out_dtype)
    assert_within(y, reference.linear(x, w, b, activation=activation), bound)  # rounded once: not through `dtype`
    xg, wg = leaf(x), leaf(w)
    y = ak.linear(xg, wg, b, activation=activation, out_dtype=out_dtype)
    dy = randn(20, 24, dtype=out_dtype, device=device, seed=8)
    y.backward(dy)
    dx, dw, _ = linear_grad_bounds(x, w, b, dy, activation, dtype)
    xe, we = x.double().requires_grad_(), w.double().requires_grad_()
    reference.linear(xe, we, b, activation=activation).backward(dy.double())
    assert_within(xg.grad, xe.grad, 2 * dx, "dinput")
    assert_within(wg.grad, we.grad, 2 * dw, "dweight")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_special_values(device, dtype, activation):
    """NaN stays NaN, inf goes to the limit, on the path that saves the pre-activation."""
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0, -3.0, torch.finfo(dtype).max, torch.finfo(dtype).min]
    x = torch.tensor(values, dtype=dtype, device=device)[:, None]
    w = torch.ones(8, 1, dtype=dtype, device=device)
    xg = leaf(x)
    y = ak.linear(xg, w, activation=activation)
    expected = reference.linear(x, w, activation=activation)
    assert_within(
        y,
        expected.to(dtype),
        forward_bound(x.nan_to_num(0, 0, 0), w, None, activation, True, device) * 2
        + (expected.nan_to_num(0, 0, 0).abs() * UNIT_ROUNDOFF[dtype]),
    )
    y.backward(torch.ones_like(y))
    grad = xg.grad[:, 0].double().cpu()
    assert grad[0].isnan() or activation is None
    limit = {None: (8, 8), "sigmoid": (0, 0), "tanh": (0, 0)}.get(activation, (8, 0))
    if activation == "relu2":
        assert grad[1] == math.inf and grad[2] == 0
    else:
        assert (grad[1], grad[2]) == limit
    assert grad[3:].isfinite().all() or activation == "relu2"


def test_nan_reaches_the_gradients(device):
    x, w, b = (leaf(t) for t in make(4, 8, 8, torch.bfloat16, device))
    dy = torch.ones(4, 8, dtype=torch.bfloat16, device=device)
    dy[1, 2], dy[2, 3] = math.nan, math.inf
    ak.linear(x, w, b, activation="gelu").backward(dy)
    assert x.grad[1].isnan().all() and not x.grad[0].isnan().any()
    assert w.grad[2].isnan().all() and b.grad[2].isnan() and not b.grad[3].isfinite()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu", "relu"])
def test_fp16_overflow_of_the_preactivation_keeps_gradients_finite(device, activation):
    x = leaf(torch.full((3, 64), 60000.0, dtype=torch.float16, device=device))
    w = leaf(torch.full((8, 64), 2.0, dtype=torch.float16, device=device))
    w.data[1] = -2.0
    dy = randn(3, 8, dtype=torch.float16, device=device)
    ak.linear(x, w, activation=activation, out_dtype=torch.float32).backward(dy.float())
    assert x.grad.isfinite().all()


def test_sum_is_not_rounded_on_the_way(device):
    """Zero-mean products that cancel: a partial sum rounded to bf16 anywhere would be seen."""
    k = 14336
    x, w, _ = make(64, k, 32, torch.bfloat16, device, None)
    y = ak.linear(x, w, out_dtype=torch.float32)
    assert_within(y, reference.linear(x, w), reference.linear_bound(x, w, out_dtype=torch.float32))


def test_many_rows(device):
    m = 65537
    x, w, b = make(m, 8, 8, torch.bfloat16, device)
    check_linear(x, w, b, "gelu", randn(m, 8, dtype=torch.bfloat16, device=device, seed=3), device)


def test_beyond_2_to_31_elements(cuda):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    m, k = 2**20 + 1, 2048
    x = torch.randn(m, k, device=cuda, dtype=torch.bfloat16)
    w = randn(8, k, dtype=torch.bfloat16, device=cuda, scale=1 / math.sqrt(k))
    y = ak.linear(x, w)
    last = slice(m - 5, m)
    assert_within(y[last], reference.linear(x[last], w), reference.linear_bound(x[last], w))
    w2 = randn(2049, k, dtype=torch.bfloat16, device=cuda, scale=1 / math.sqrt(k))
    y = ak.linear(x, w2)  # 2^31 outputs and more
    assert_within(y[last], reference.linear(x[last], w2), reference.linear_bound(x[last], w2))


# ------------------------------------------------------------------------------------------------------------ residual


RESIDUALS = [(d, r) for d in DTYPES for r in DTYPES if (d == torch.float64) == (r == torch.float64)]
with_residuals = pytest.mark.parametrize(("dtype", "residual_dtype"), RESIDUALS, ids=name)


def check_residual(x, w, b, r, activation, dy, device, accumulate=None):
    """Nothing is rounded before the sum, on the CPU either: the bound is that of one rounding."""
    options = {"activation": activation, "accumulate": accumulate}
    policy = ak.Accumulate.parse(accumulate or "fp32")
    leaves = x, w, b, r = [None if t is None else leaf(t) for t in (x, w, b, r)]
    y = ak.linear(x, w, b, residual=r, **options)
    assert y.dtype == r.dtype and y.shape == r.shape
    exact = reference.linear(x, w, b, activation=activation, residual=r)
    bound = reference.linear_bound(x, w, b, activation=activation, residual=r, accumulate=policy)
    assert_within(y, exact, bound, "y")
    with torch.no_grad():
        assert_within(ak.linear(x, w, b, residual=r, **options), exact, bound, "y without grad")

    y.backward(dy)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    reference.linear(*wide[:3], activation=activation, residual=wide[3]).backward(dy.double())
    m = math.prod(x.shape[:-1])
    rows, flat_dy = x.detach().reshape(m, x.shape[-1]), dy.reshape(m, w.shape[0])
    bounds = linear_grad_bounds(rows, w, b, flat_dy, activation, x.dtype, b_dtype=None if b is None else b.dtype)
    for t, e, bound, what in zip(leaves, wide, bounds, ("dinput", "dweight", "dbias"), strict=False):
        if t is not None:
            assert t.grad.dtype == t.dtype
            assert_within(t.grad, e.grad, (2.0 if device == "cpu" else 1.0) * bound.reshape(t.shape), what)
    assert r.grad.dtype == r.dtype and torch.equal(r.grad, dy)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@with_residuals
def test_residual(device, dtype, residual_dtype, activation):
    x, w, b = make(67, 96, 72, dtype, device)
    r, dy = (randn(67, 72, dtype=residual_dtype, device=device, seed=s) for s in (8, 9))
    check_residual(2 * x, w, b, r, activation, dy, device)


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8, 5), (4, 0, 5), (4, 8, 0)], ids=lambda s: "x".join(map(str, s)))
@with_residuals
def test_shapes_with_a_residual(device, dtype, residual_dtype, shape, bias_dtype):
    m, k, n = shape
    x, w, b = make(m, k, n, dtype, device, bias_dtype)
    r, dy = (randn(m, n, dtype=residual_dtype, device=device, seed=s) for s in (8, 9))
    check_residual(x, w, b, r, None, dy, device)
    check_residual(x, w, b, r, "gelu", dy, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(24,), (33, 24), (150, 68), (3, 50, 65)], ids=str)
@pytest.mark.parametrize("accumulate", [None, "fp32/64"])
@pytest.mark.parametrize("residual_dtype", DTYPES[:3], ids=name)
def test_layouts_of_a_residual(device, residual_dtype, accumulate, shape, layout):
    x, w, b = (
        randn(*shape[:-1], 40, dtype=torch.bfloat16, device=device),
        *make(1, 40, shape[-1], torch.bfloat16, device)[1:],
    )
    r = lay(randn(*shape, dtype=residual_dtype, device=device, seed=8), layout)
    dy = randn(*shape, dtype=residual_dtype, device=device, seed=9)
    for activation in (None, "silu"):
        check_residual(x, w, b, r, activation, dy, device, accumulate)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@with_residuals
def test_out_dtype_with_a_residual(device, dtype, residual_dtype, out_dtype, activation):
    x, w, b = make(20, 1000, 24, dtype, device)
    r = randn(20, 24, dtype=residual_dtype, device=device, seed=8)
    leaves = xg, wg, rg = leaf(x), leaf(w), leaf(r)
    y = ak.linear(xg, wg, b, activation=activation, residual=rg, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    bound = reference.linear_bound(x, w, b, activation=activation, residual=r, out_dtype=out_dtype)
    assert_within(y, reference.linear(x, w, b, activation=activation, residual=r), bound)
    dy = randn(20, 24, dtype=out_dtype, device=device, seed=9)
    y.backward(dy)
    dx, dw, _ = linear_grad_bounds(x, w, b, dy, activation, dtype)
    wide = [t.double().requires_grad_() for t in (x, w, r)]
    reference.linear(wide[0], wide[1], b, activation=activation, residual=wide[2]).backward(dy.double())
    for t, e, bound in zip(leaves, wide, (2 * dx, 2 * dw), strict=False):
        assert_within(t.grad, e.grad, bound)
    assert torch.equal(rg.grad, dy.to(residual_dtype))  # rounded once


@pytest.mark.parametrize("accumulate", [None, "fp32/64"])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "relu2"], ids=str)
@pytest.mark.parametrize("residual_dtype", [*LOW, torch.float32], ids=name)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_residual_that_cancels(device, dtype, residual_dtype, activation, accumulate):
    """What is left of a sum that cancels shows every rounding before it, of the product or of the activation. The products
    of one sum have one sign: its bound is then small beside it."""
    x, w, b = make(150, 16, 136, dtype, device)
    x, w = x.abs(), w.abs() * w[:, :1].sign()
    act = reference.linear(x, w, b, activation=activation)
    r = (-act).to(residual_dtype)
    y = ak.linear(x, w, b, activation=activation, residual=r, accumulate=accumulate, out_dtype=torch.float32)
    exact = act + r.double()
    policy = ak.Accumulate.parse(accumulate or "fp32")
    bound = reference.linear_bound(
        x, w, b, activation=activation, residual=r, out_dtype=torch.float32, accumulate=policy
    )
    assert_within(y, exact, bound)
    rounded_first = act.to(dtype).double() + r.double()
    assert ((rounded_first - exact).abs() > bound).double().mean() > 0.2  # which would be seen
    same = ak.linear(x, w, b, activation=activation, residual=r, accumulate=accumulate)
    assert same.dtype == residual_dtype
    assert_within(same, exact, reference.linear_bound(x, w, b, activation=activation, residual=r, accumulate=policy))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "relu2"])
@pytest.mark.parametrize("residual_dtype", [*LOW, torch.float32], ids=name)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_residual_changes_no_other_gradient(device, dtype, residual_dtype, activation):
    """Bit for bit: the saved pre-activation is the same, and so is relu's derivative, which no output tells any more."""
    x, w, b = make(70, 96, 136, dtype, device, torch.float32)
    r, dy = (randn(70, 136, dtype=residual_dtype, device=device, seed=s) for s in (8, 9))
    plain, added = ([leaf(t) for t in (x, w, b)] for _ in range(2))
    options = {"activation": activation, "accumulate": "fp32/64", "out_dtype": residual_dtype}
    ak.linear(*plain, **options).backward(dy)
    ak.linear(*added, residual=r, **options).backward(dy)
    for a, p in zip(added, plain, strict=True):
        assert torch.equal(a.grad, p.grad)


@pytest.mark.parametrize("accumulate", ["fp32/64", "fp32/512"])
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
@pytest.mark.parametrize("residual_dtype", [*LOW, torch.float32], ids=name)
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_bits_of_a_sum_with_a_residual(device, dtype, residual_dtype, activation, accumulate):
    """Those of fp32 arithmetic on the fp32 result, of any part of the batch, of the emulation, and with a graph."""
    x, w, b = make(70, 600, 136, dtype, device, torch.float32)
    r = randn(70, 136, dtype=residual_dtype, device=device, seed=8)
    options = {"activation": activation, "accumulate": accumulate}
    y = ak.linear(x, w, b, residual=r, **options)
    act = ak.linear(x, w, b, out_dtype=torch.float32, **options)
    assert torch.equal(y, (act + r.float()).to(residual_dtype))
    wide = ak.linear(x, w, b, residual=r, out_dtype=torch.float32, **options)
    assert torch.equal(wide, act + r.float())
    for rows in (slice(3, 4), slice(10, 67)):
        assert torch.equal(ak.linear(x[rows], w, b, residual=r[rows], **options), y[rows])
    assert torch.equal(numerics.emulate(x, w, b, residual=r, **options), y.cpu())
    assert torch.equal(ak.linear(leaf(x), w, b, residual=r, **options), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_special_values_of_a_residual(device, dtype):
    x, w, _ = make(4, 8, 8, dtype, device, None)
    r = torch.zeros(4, 8, dtype=dtype, device=device)
    r[0, 0], r[1, 1], r[2, 2] = math.nan, math.inf, -math.inf
    y = ak.linear(x, w, activation="gelu", residual=r)
    assert y[0, 0].isnan() and y[1, 1] == math.inf and y[2, 2] == -math.inf
    assert y.isfinite().sum() == 4 * 8 - 3


# -------------------------------------------------------------------------------------------------------------- gated


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(37, 48, 40), (5, 33, 17), (130, 64, 136), (150, 72, 132), (1, 16, 4)], ids=str)
def test_gated(device, dtype, activation, shape):
    m, k, f = shape
    x, w, b = make(m, k, 2 * f, dtype, device, torch.float32)
    dy = randn(m, f, dtype=dtype, device=device, seed=4)
    xg, wg, bg = leaf(x), leaf(w), leaf(b)
    y = ak.gated_linear(xg, wg, bg, activation=activation)
    bound = reference.gated_linear_bound(x, w, b, activation=activation)
    pre = reference.linear(x, w, b).abs()
    cpu = device == "cpu" and dtype in LOW  # the product is rounded to the dtype before the gate
    if cpu:
        bound = bound + 4 * UNIT_ROUNDOFF[dtype] * (pre[:, :f] + 1) * (pre[:, f:] + 1) * (1 + pre[:, :f])
    exact = reference.gated_linear(x, w, b, activation=activation)
    assert_within(y, exact, bound, "y")
    with torch.no_grad():
        assert_within(ak.gated_linear(x, w, b, activation=activation), exact, bound, "y without grad")

    y.backward(dy)
    xe, we, be = (t.double().requires_grad_() for t in (x, w, b))
    reference.gated_linear(xe, we, be, activation=activation).backward(dy.double())
    # dgate = dy up act'(gate), dup = dy act(gate): each from gate and up rounded to the dtype
    full, full_error = reference._pre(x, w, b, reference.FP32)
    gate, up = full[:, :f], full[:, f:]
    saved = UNIT_ROUNDOFF[dtype]
    dgate, gate_error = dpre_bound(dy.double() * up, gate, full_error[:, :f], activation, dtype)
    slope = 2 * gate.abs() + 1 if activation == "relu2" else reference._SLOPE[activation]
    gate_error = gate_error * (1 + saved) + saved * dgate.abs() + full_error[:, f:] * dy.double().abs() * slope
    act = reference.activation(gate, activation)
    up_error = dy.double().abs() * (slope * (full_error[:, :f] + saved * gate.abs()) + 1e-6 * (1 + gate.abs()))
    dpre = torch.cat([dgate, dy.double() * act], -1)
    error = torch.cat([gate_error, up_error], -1)
    rounded = error + saved * (dpre.abs() + error) + 0.5 * reference._SMALLEST[dtype]
    wa, xa = w.double().abs(), x.double().abs()
    dx = rounded @ wa + accumulation(2 * f, dtype) * (dpre.abs() @ wa)
    dw = rounded.mT @ xa + accumulation(m, dtype) * (dpre.abs().mT @ xa)
    db = error.sum(0) + 1e-5 * dpre.abs().sum(0)
    assert_within(xg.grad, xe.grad, dx + 2 * rounding(xe.grad.abs() + dx, dtype), "dinput")
    assert_within(wg.grad, we.grad, dw + 2 * rounding(we.grad.abs() + dw, dtype), "dweight")
    assert_within(bg.grad, be.grad, db + rounding(be.grad.abs() + db, torch.float32), "dbias")


# ---------------------------------------------------------------------------------------------------------------- mlp


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_mlp(device, dtype, activation):
    """mlp is two linears and one fused backward: each stage is held to the bounds of a linear on what it was given."""
    x, w1, b1 = make(45, 24, 56, dtype, device, torch.float32)
    _, w2, b2 = make(45, 56, 24, dtype, device, seed=5)
    dy = randn(45, 24, dtype=dtype, device=device, seed=8)
    ours = [leaf(t) for t in (x, w1, b1, w2, b2)]
    y = ak.mlp(*ours, activation=activation)
    hidden = ak.linear(x, w1, b1, activation=activation)
    u = UNIT_ROUNDOFF[dtype]
    h = reference.linear(x, w1, b1, activation=activation)
    h_error = forward_bound(x, w1, b1, activation, True, device)
    bound = reference.linear_bound(hidden, w2, b2) + (2 * h_error) @ w2.double().abs().mT * (1 + u)
    exact = reference.mlp(x, w1, b1, w2, b2, activation=activation)
    assert_within(y, exact, bound, "y")
    y.backward(dy)
    oracle = [t.double().requires_grad_() for t in (x, w1, b1, w2, b2)]
    reference.mlp(*oracle, activation=activation).backward(dy.double())
    dh = dy.double() @ w2.double()
    dh_error = (accumulation(24, dtype) + (2 * u if device == "cpu" else 0)) * (dy.double().abs() @ w2.double().abs())
    pre, pre_error = reference._pre(x, w1, b1, reference.FP32)
    dpre, error = dpre_bound(dh, pre, pre_error, activation, dtype)
    slope = 2 * pre.abs() + 1 if activation == "relu2" else reference._SLOPE[activation]
    error = error + dh_error * slope
    rounded = error + u * (dpre.abs() + error) + 0.5 * reference._SMALLEST[dtype]
    wa, xa = w1.double().abs(), x.double().abs()
    dx = rounded @ wa + accumulation(56, dtype) * (dpre.abs() @ wa)
    dw1 = rounded.mT @ xa + accumulation(45, dtype) * (dpre.abs().mT @ xa)
    db1 = rounded.sum(0) + 1e-5 * dpre.abs().sum(0)
    hidden_error = h_error + slope * (u * pre.abs() + pre_error) + rounding(h, dtype)
    dw2 = dy.double().abs().mT @ hidden_error + accumulation(45, dtype) * (dy.double().abs().mT @ h.abs())
    db2 = 1e-5 * dy.double().abs().sum(0)
    for t, e, b, what in zip(
        ours, oracle, (dx, dw1, db1, dw2, db2), ("dinput", "dw1", "db1", "dw2", "db2"), strict=True
    ):
        assert t.grad.dtype == t.dtype
        assert_within(t.grad, e.grad, b + 2 * rounding(e.grad.abs() + b, t.dtype), what)


def test_mlp_equals_two_linears_in_fp64(device):
    x, w1, b1 = make(7, 8, 12, torch.float64, device)
    _, w2, b2 = make(7, 12, 5, torch.float64, device, seed=3)
    args = [leaf(t) for t in (x, w1, b1, w2, b2)]
    y = ak.mlp(*args)
    expected = torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(x, w1, b1)), w2, b2)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@with_residuals
def test_mlp_with_a_residual(device, dtype, residual_dtype, activation):
    """The second linear adds it. Backward is that without one, of a dy rounded to the dtype computed in, but for db2."""
    x, w1, b1 = make(45, 24, 56, dtype, device, torch.float32)
    _, w2, b2 = make(45, 56, 24, dtype, device, torch.float32, seed=5)
    r, dy = (randn(45, 24, dtype=residual_dtype, device=device, seed=s) for s in (8, 9))
    leaves = [leaf(t) for t in (x, w1, b1, w2, b2, r)]
    y = ak.mlp(*leaves[:5], activation=activation, residual=leaves[5])
    assert y.dtype == residual_dtype
    hidden = ak.linear(leaf(x), w1, b1, activation=activation).detach()
    bound = reference.linear_bound(hidden, w2, b2, residual=r)
    assert_within(y, reference.linear(hidden, w2, b2, residual=r), bound, "y from the hidden tensor")
    exact = reference.mlp(x, w1, b1, w2, b2, activation=activation, residual=r)
    h_error = 2 * forward_bound(x, w1, b1, activation, True, device)
    bound = bound + h_error @ w2.double().abs().mT * (1 + UNIT_ROUNDOFF[dtype])
    assert_within(y, exact, bound, "y")
    with torch.no_grad():
        assert_within(ak.mlp(*leaves[:5], activation=activation, residual=r), exact, bound, "y without grad")

    y.backward(dy)
    plain = [leaf(t) for t in (x, w1, b1, w2, b2)]
    ak.mlp(*plain, activation=activation).backward(dy.to(dtype))
    for ours, theirs in zip(leaves[:4], plain, strict=False):
        assert torch.equal(ours.grad, theirs.grad)
    sums = dy.double().sum(0)
    u = UNIT_ROUNDOFF[reference.compute_dtype(dtype)]
    assert_within(
        leaves[4].grad, sums, reference.gamma(60, u) * dy.double().abs().sum(0) + rounding(sums, torch.float32)
    )
    assert torch.equal(leaves[5].grad, dy) and leaves[5].grad.dtype == residual_dtype
