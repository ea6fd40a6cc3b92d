"""Shapes, strides, offsets and dtypes that nobody thought of, against float64."""

import math

import torch
from bounds import assert_within
from cases import LAYOUTS, LOW, lay, randn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ampkernels as ak
from ampkernels import reference

DTYPE = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
LAYOUT = st.sampled_from(LAYOUTS)
SIZE = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257]))
settings.register_profile(
    "ampkernels", max_examples=120, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("ampkernels")


@given(data=st.data(), m=SIZE, k=SIZE, n=SIZE, dtype=DTYPE, activation=st.sampled_from(ak.ACTIVATIONS))
def test_linear(device, data, m, k, n, dtype, activation):
    x = lay(randn(m, k, dtype=dtype, device=device), data.draw(LAYOUT))
    w = lay(randn(n, k, dtype=dtype, device=device, seed=1, scale=1 / math.sqrt(max(k, 1))), data.draw(LAYOUT))
    b = data.draw(st.one_of(st.none(), DTYPE))
    b = None if b is None else lay(randn(n, dtype=b, device=device, seed=2), data.draw(LAYOUT))
    out_dtype = data.draw(st.one_of(st.none(), DTYPE))
    r = None
    if data.draw(st.booleans()):
        r_dtype = dtype if dtype == torch.float64 else data.draw(st.sampled_from([*LOW, torch.float32]))
        r = lay(randn(m, n, dtype=r_dtype, device=device, seed=5), data.draw(LAYOUT))
    y = ak.linear(x, w, b, activation=activation, residual=r, out_dtype=out_dtype)
    exact = reference.linear(x, w, b, activation=activation, residual=r)
    bound = reference.linear_bound(x, w, b, activation=activation, residual=r, out_dtype=out_dtype)
    if (
        r is None and device == "cpu" and dtype in LOW and activation in ("relu2", "quick_gelu")
    ):  # not in the library's epilogue
        pre = reference.linear(x, w, b)
        bound = bound + reference.rounding(pre, dtype) * (2 * pre.abs() + 2)
    assert_within(y, exact, bound)


@given(data=st.data(), shape=st.lists(SIZE, min_size=1, max_size=4), dtype=DTYPE)
def test_softmax(device, data, shape, dtype):
    if math.prod(shape) > 300_000:
        shape = shape[-2:]
    x = lay(randn(*shape, dtype=dtype, device=device), data.draw(LAYOUT))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    scale = data.draw(st.sampled_from([1.0, 0.125, -3.0]))
    mask = None
    if data.draw(st.booleans()):
        mask_shape = [s if data.draw(st.booleans()) else 1 for s in shape[data.draw(st.integers(0, len(shape))) :]]
        mask = randn(*mask_shape, dtype=torch.float32, device=device, seed=5)
        mask = mask > 0 if data.draw(st.booleans()) else mask
    causal = len(shape) > 1 and dim % len(shape) == len(shape) - 1 and data.draw(st.booleans())
    y = ak.softmax(x, dim, scale=scale, mask=mask, causal=causal)
    exact = reference.softmax(x, dim, scale=scale, mask=mask, causal=causal)
    spread = 20 * abs(scale) + 6
    assert_within(y, exact, reference.softmax_bound(exact, dtype, dtype, length=shape[dim], spread=spread))


@given(data=st.data(), shape=st.lists(SIZE, min_size=1, max_size=4), dtype=DTYPE, rms=st.booleans())
def test_norms(device, data, shape, dtype, rms):
    if math.prod(shape) > 300_000:
        shape = shape[-2:]
    x = lay(randn(*shape, dtype=dtype, device=device), data.draw(LAYOUT))
    normalized = tuple(shape[-data.draw(st.integers(1, len(shape))) :])
    w = b = None
    if data.draw(st.booleans()):
        w = lay(randn(*normalized, dtype=data.draw(DTYPE), device=device, seed=3) + 1, data.draw(LAYOUT))
    if not rms and data.draw(st.booleans()):
        b = lay(randn(*normalized, dtype=data.draw(DTYPE), device=device, seed=4), data.draw(LAYOUT))
    residual = None
    if dtype != torch.float64 and data.draw(st.booleans()):
        residual = lay(
            randn(*shape, dtype=data.draw(st.sampled_from([*LOW, torch.float32])), device=device, seed=5),
            data.draw(LAYOUT),
        )
    args = (w, 1e-3) if rms else (w, b, 1e-3)
    op, oracle = (ak.rms_norm, reference.rms_norm) if rms else (ak.layer_norm, reference.layer_norm)
    y, exact = op(x, normalized, *args, residual=residual), oracle(x, normalized, *args, residual=residual)
    bound = reference.norm_bound(x, normalized, w, b, 1e-3, residual=residual, rms=rms)
    if residual is not None:
        assert_within(y[1], exact[1], 2 * reference.rounding(exact[1], residual.dtype))
        y, exact = y[0], exact[0]
    assert_within(y, exact, bound)
