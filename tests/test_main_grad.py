"""weight.main_grad: gradients summed in fp32, by the GEMM where it is ours."""

import pytest
import torch
from cases import DTYPES, LOW, leaf, name, randn

import ampkernels as ak


def call(op, x, w, w2, accumulate):
    if op == "mlp":
        return ak.mlp(x, w, None, w2, None, accumulate=accumulate)
    function = ak.linear if op == "linear" else ak.gated_linear
    return function(x, w, activation="silu", accumulate=accumulate)


@pytest.mark.parametrize("shape", [(70, 136, 40), (5, 17, 24), (150, 72, 264)], ids=str)
@pytest.mark.parametrize("accumulate", ["fp32", "fp32/64"])
@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_the_sum_of_two_backwards(device, dtype, op, accumulate, shape):
    if accumulate != "fp32" and dtype not in LOW:
        pytest.skip("a library computes it")
    m, k, n = shape
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [randn(n, k, dtype=dtype, device=device), randn(k, n, dtype=dtype, device=device)]
    inputs = [randn(m, k, dtype=dtype, device=device, seed=s) for s in (3, 4)]
    expected = [torch.ones(w.shape, dtype=statistics, device=device) for w in weights]
    for x in inputs:  # what a weight of the sums' dtype would get from the same computation
        leaves = [leaf(w) for w in weights]
        for leaf_, sum_ in zip(leaves, expected, strict=True):
            leaf_.main_grad = torch.zeros_like(sum_)
        y = call(op, x, *leaves, accumulate)
        y.backward(torch.ones_like(y))
        for leaf_, sum_ in zip(leaves, expected, strict=True):
            assert leaf_.grad is None
            sum_ += leaf_.main_grad

    leaves = [leaf(w) for w in weights]
    for w in leaves:
        w.main_grad = torch.ones(w.shape, dtype=statistics, device=device)
    for x in inputs:
        y = call(op, x, *leaves, accumulate)
        y.backward(torch.ones_like(y))
    for w, sum_ in zip(leaves, expected, strict=True):
        assert w.grad is None
        assert torch.equal(w.main_grad, sum_)


@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_it_is_the_gradient(device, dtype, op):
    x, w, w2 = (randn(*s, dtype=dtype, device=device) for s in ((33, 64), (48, 64), (64, 48)))
    plain, kept = [leaf(w), leaf(w2)], [leaf(w), leaf(w2)]
    for t in kept:
        t.main_grad = torch.zeros(t.shape, device=device)
    for leaves in (plain, kept):
        y = call(op, x, *leaves, "fp32/64")
        y.backward(torch.ones_like(y))
    for a, b in list(zip(plain, kept, strict=True))[: 2 if op == "mlp" else 1]:
        assert torch.equal(a.grad, b.main_grad.to(dtype))  # rounded once either way


@pytest.mark.parametrize("op", ["linear", "mlp"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_with_a_residual_it_is_the_gradient(device, dtype, op):
    x, w, w2 = (randn(*s, dtype=dtype, device=device) for s in ((33, 64), (48, 64), (64, 48)))
    plain, kept = [leaf(w), leaf(w2)], [leaf(w), leaf(w2)]
    for t in kept:
        t.main_grad = torch.zeros(t.shape, device=device)
    for a, b in (plain, kept):
        if op == "mlp":
            r = leaf(torch.ones(33, 64, device=device))
            y = ak.mlp(x, a, None, b, None, activation="relu", residual=r, accumulate="fp32/64")
        else:
            r = leaf(torch.ones(33, 48, device=device))
            y = ak.linear(x, a, activation="relu", residual=r, accumulate="fp32/64")
        y.backward(randn(*y.shape, dtype=torch.float32, device=device, seed=7))
        assert r.grad is not None
    for a, b in list(zip(plain, kept, strict=True))[: 2 if op == "mlp" else 1]:
        assert a.grad.abs().sum() > 0 and torch.equal(a.grad, b.main_grad.to(dtype))


def test_under_autocast_an_fp32_weight_sums_too(device):
    x, w = randn(33, 64, dtype=torch.float32, device=device), leaf(randn(48, 64, dtype=torch.float32, device=device))
    w.main_grad = torch.zeros_like(w)
    with torch.autocast(device, torch.bfloat16):
        y = ak.linear(x, w)
    y.backward(torch.ones_like(y))
    assert w.grad is None and w.main_grad.abs().sum() > 0


def test_refusals(device):
    x, w = randn(3, 8, dtype=torch.bfloat16, device=device), leaf(randn(4, 8, dtype=torch.bfloat16, device=device))
    for wrong, kind, message in (
        (
            torch.zeros(4, 8, dtype=torch.bfloat16, device=device),
            TypeError,
            "must be a float32 tensor, got torch.bfloat16",
        ),
        (1, TypeError, "must be a float32 tensor, got int"),
        (torch.zeros(8, 4, device=device), ValueError, r"of shape \(4, 8\)"),
        (torch.zeros(8, 4, device=device).t(), ValueError, "must be contiguous"),
    ):
        w.main_grad = wrong
        with pytest.raises(kind, match=f"linear: weight.main_grad {message}" if "must" in message else message):
            ak.linear(x, w)
