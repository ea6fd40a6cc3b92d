"""The CPU kernels' builds (AVX-512 with AVX512_BF16 and without, AVX2, baseline) return the same bits, forward and backward."""

import math

import pytest
import torch
from cases import leaf, name, randn

import ampkernels as ak

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = [1, 2, 15, 31, 32, 33, 65, 768, 4097]
set_isa = torch.ops.ampkernels.set_cpu_isa
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture
def builds():
    """The names of the builds that this machine can run, best first; afterwards the best is in force again."""
    able = [isa for isa in ("avx512_bf16", "avx512", "avx2", "baseline") if set_isa(isa)]
    yield able
    set_isa(able[0])


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of t, every NaN the same: which NaN fp32 arithmetic returns is nobody's promise."""
    return t.contiguous().masked_fill(t.isnan(), math.nan).view(_BITS[t.element_size()])


def assert_same_bits(builds, compute):
    if len(builds) == 1:
        pytest.skip("this machine runs only the baseline build")
    results = []
    for isa in builds:
        assert set_isa(isa)
        results.append(compute())
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert torch.equal(bits(got), bits(expected))


def with_grads(op, *inputs):
    leaves = [leaf(t) for t in inputs]
    y = op(*leaves)
    y.backward(randn(*y.shape, dtype=y.dtype, seed=9))
    return [y.detach(), *(t.grad for t in leaves)]


def test_unknown_builds_are_refused(builds):
    assert not set_isa("avx1024")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_softmax(builds, dtype, length):
    x = randn(5, length, dtype=dtype) * 3
    x[1, 0], x[2, 0], x[3] = math.nan, math.inf, -math.inf
    keep = torch.rand(5, length) > 0.3
    keep[4] = False
    assert_same_bits(builds, lambda: with_grads(lambda t: ak.softmax(t, scale=0.3), x))
    assert_same_bits(builds, lambda: with_grads(lambda t: ak.softmax(t, scale=-2.0, mask=keep), x))
    assert_same_bits(builds, lambda: with_grads(lambda t: ak.softmax(t, mask=randn(length, dtype=dtype)), x))
    assert_same_bits(builds, lambda: with_grads(lambda t: ak.softmax(t, causal=True), x))
    assert_same_bits(builds, lambda: with_grads(ak.log_softmax, x))
    assert_same_bits(builds, lambda: with_grads(lambda t: ak.softmax(t, dim=0), x))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("parameters", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_norms(builds, dtype, parameters, length):
    x = randn(37, length, dtype=dtype) * 2 + 3
    x[1, 0], x[2, 0], x[3], x[4] = math.nan, math.inf, 0.0, 7.0
    weight, bias = (randn(length, dtype=parameters, seed=s) + 1.5 for s in (1, 2))
    assert_same_bits(builds, lambda: with_grads(lambda t, w, b: ak.layer_norm(t, (length,), w, b), x, weight, bias))
    assert_same_bits(
        builds, lambda: with_grads(lambda t, w: ak.rms_norm(t, (length,), w, weight_offset=1.0), x, weight)
    )
    assert_same_bits(builds, lambda: ak.layer_norm(x, (length,), weight, bias, residual=x))
    assert_same_bits(builds, lambda: [ak.rms_norm(x.t(), (37,))])


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_norms_of_rows_that_are_rescaled(builds, scale):
    x = randn(5, 100, dtype=torch.float32) * scale
    assert_same_bits(builds, lambda: [ak.layer_norm(x, (100,), eps=0.0), ak.rms_norm(x, (100,), eps=0.0)])


@pytest.mark.parametrize(
    "activation", [None, "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu", "relu2"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_activations(builds, dtype, activation):
    """The operators under linear's and gated_linear's backward, and gated_linear's forward, whose GEMM is a library's."""
    code = [None, "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "quick_gelu", "relu2"].index(activation)
    dy, saved = randn(19, 77, dtype=dtype), randn(19, 154, dtype=dtype, seed=3) * 3
    saved[0, 0], saved[1, 1], saved[2, 2] = math.nan, math.inf, -math.inf
    ops = torch.ops.ampkernels
    pre = saved[:, :77] if code else None
    assert_same_bits(builds, lambda: ops.linear_act_bwd(dy, pre, code, False, dtype, dtype))
    assert_same_bits(builds, lambda: ops.gated_linear_act_bwd(dy, saved, code, dtype, dtype))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_residuals(builds, dtype, activation):
    """The sum after a library's product, of rows with an odd stride."""
    x, w, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(19, 40), (77, 40), (77,)]))
    for other in DTYPES:
        if (other == torch.float64) != (dtype == torch.float64):
            continue
        residual = randn(19, 79, dtype=other, seed=3)[:, 1:78]
        residual[0, 0], residual[1, 1] = math.nan, math.inf
        assert_same_bits(
            builds,
            lambda residual=residual: with_grads(
                lambda t, r: ak.linear(t, w, bias, activation=activation, residual=r), x, residual
            ),
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_conversions(builds, dtype):
    """Every 16-bit value widened, and fp32 values of every class rounded, as torch does it; a NaN becomes 0x7fff."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(64, -1)
    wild = torch.randint(-(2**31), 2**31 - 1, (64, 1000)).to(torch.int32).view(torch.float32)
    for isa in builds:
        assert set_isa(isa)
        widened, _ = torch.ops.ampkernels.linear_act_bwd(every, None, 0, False, torch.float32, None)
        assert torch.equal(bits(widened), bits(every.float()))
        rounded, _ = torch.ops.ampkernels.linear_act_bwd(wild, None, 0, False, dtype, None)
        assert torch.equal(bits(rounded), bits(wild.to(dtype)))
        assert (rounded.view(torch.int16)[rounded.isnan()] == 0x7FFF).all()


@pytest.mark.parametrize("length", [1024, 1023], ids=["whole lines", "unaligned rows"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=name)
def test_results_large_enough_to_pass_by_the_caches(builds, dtype, length):
    """With subnormal and NaN results, which AVX512_BF16's conversion alone would round otherwise."""
    x = randn(2101, length, dtype=dtype)
    x[1, 0], x[2, :], x[3, 5] = math.nan, 0.0, 1e-39
    weight = randn(length, dtype=dtype, seed=1)
    bias = (randn(length, dtype=torch.float32, seed=2) * 1e-39).to(dtype)
    assert_same_bits(builds, lambda: with_grads(lambda t, w, b: ak.layer_norm(t, (length,), w, b), x, weight, bias))
    assert_same_bits(builds, lambda: with_grads(lambda t, w: ak.rms_norm(t, (length,), w), x, weight))
    assert_same_bits(builds, lambda: with_grads(ak.softmax, x))
