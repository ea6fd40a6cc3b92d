"""Bits: the same from run to run; of a row, whatever the other rows are and wherever it lies; of a sum over rows, at any
number of threads."""

import pytest
import torch
from cases import leaf, name, randn

import ampkernels as ak

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LENGTHS = [7, 64, 1000, 4096, 20001]

ROW_OPS = {
    "softmax": lambda x: ak.softmax(x, scale=0.3),
    "log_softmax": ak.log_softmax,
    "layer_norm": lambda x: ak.layer_norm(x, x.shape[-1:], *affine(x)),
    "rms_norm": lambda x: ak.rms_norm(x, x.shape[-1:], affine(x)[0]),
    "residual": lambda x: torch.cat(ak.rms_norm(x, x.shape[-1:], residual=x)),
}


def affine(x):
    n = x.shape[-1]
    return tuple(randn(n, dtype=torch.float32, device=x.device.type, seed=s) + 1.5 for s in (1, 2))


def grads(op, x, dy):
    x = leaf(x)
    y = ROW_OPS[op](x)
    y.backward(dy if y.shape == dy.shape else torch.cat([dy, dy]))
    return x.grad


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_rows_do_not_see_each_other(device, op, dtype, length):
    rows = 300 if length < 5000 else 40
    x = randn(rows, length, dtype=dtype, device=device)
    dy = randn(rows, length, dtype=dtype, device=device, seed=5)
    y, dx = ROW_OPS[op](x), grads(op, x, dy)
    for subset in (slice(0, 1), slice(1, 4), slice(rows - 33, rows), slice(None, None, 2)):
        assert torch.equal(ROW_OPS[op](x[subset]), y[subset])
        assert torch.equal(grads(op, x[subset], dy[subset]), dx[subset])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", sorted(ROW_OPS))
def test_alignment_does_not_matter(device, op, dtype, length):
    x = randn(9, length, dtype=dtype, device=device)
    y = ROW_OPS[op](x)
    for offset in (1, 2, 3, 7):
        buffer = torch.empty(9 * length + offset, dtype=dtype, device=device)
        moved = buffer[offset:].view(9, length).copy_(x)
        assert torch.equal(ROW_OPS[op](moved), y)
    gap = torch.empty(9, length + 5, dtype=dtype, device=device)
    assert torch.equal(ROW_OPS[op](gap[:, 3 : 3 + length].copy_(x)), y)


@pytest.mark.parametrize(
    "length", [32, 200, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8192, 12288, 16384]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
@pytest.mark.parametrize("op", ["softmax", "layer_norm", "rms_norm"])
def test_kernels_for_many_aligned_rows_have_the_same_bits(device, op, dtype, length):
    """Rows on 16 bytes with parameters of their dtype have kernels of their own, some of them from so many rows on; rows
    off 16 bytes have none of these."""
    rows = max(3_400_000 // length, 530) if device == "cuda" else 37
    x = randn(rows, length, dtype=dtype, device=device)
    x[2::5] += 100.0
    if dtype == torch.bfloat16:
        x[1::5] *= 1e30  # the squares overflow: such a row is taken again, the others of its warp are not
    w, b = (t.to(dtype) for t in affine(x))
    run = {
        "softmax": lambda x: torch.cat([ak.softmax(x), ak.softmax(x, scale=0.3)]),
        "layer_norm": lambda x: ak.layer_norm(x, (length,), w, b),
        "rms_norm": lambda x: ak.rms_norm(x, (length,), w),
    }[op]
    y = run(x)
    moved = torch.empty(rows * length + 1, dtype=dtype, device=device)[1:].view(rows, length).copy_(x)
    assert torch.equal(run(moved), y)
    few = slice(rows - 7, rows)
    parts = y.view(-1, rows, length)
    assert torch.equal(run(x[few]).view(-1, 7, length), parts[:, few])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_run_to_run(device, dtype):
    x = leaf(randn(777, 384, dtype=dtype, device=device))
    w = [
        leaf(randn(*s, dtype=dtype, device=device, seed=i, scale=0.05))
        for i, s in enumerate([(512, 384), (512,), (384, 512), (384,)])
    ]
    g, b = (leaf(t) for t in affine(x))

    def run():
        y = ak.layer_norm(ak.mlp(x, *w), (384,), g, b)
        y = ak.gated_linear(y, w[0], w[1], activation="gelu") @ w[2][:, :256].t()
        return [y, *torch.autograd.grad(ak.softmax(y).float().square().sum(), [x, *w, g, b])]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_sums_over_rows_do_not_depend_on_threads():
    x, dy = randn(3000, 96, dtype=torch.bfloat16), randn(3000, 96, dtype=torch.bfloat16, seed=1)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            w, b = (leaf(t) for t in affine(x))
            bias = leaf(torch.zeros(96))
            ak.layer_norm(x, (96,), w, b).backward(dy)
            ak.linear(x, torch.eye(96, dtype=torch.bfloat16), bias, activation="gelu").backward(dy)
            results.append((w.grad, b.grad, bias.grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
