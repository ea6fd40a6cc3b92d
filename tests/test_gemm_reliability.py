"""The CUDA GEMMs under what breaks kernels: repetition, thousands of short tiles, streams, graphs, memory full of NaN."""

import contextlib
import itertools
import subprocess
import sys

import pytest
import torch
from bounds import assert_within
from cases import lay, leaf, name, randn

import ampkernels as ak
from ampkernels import _plan, numerics, reference

LOW = [torch.bfloat16, torch.float16]
PATHS = ["auto", "sm80"]  # mma.sync is what other architectures run


@pytest.fixture(params=PATHS)
def path(request, cuda):
    assert torch.ops.ampkernels.set_gemm_path(request.param)
    yield request.param
    torch.ops.ampkernels.set_gemm_path("auto")


@pytest.fixture(params=["auto", "sm80", "sm90", "small"])
def every_path(request, cuda):
    """A path that was asked for refuses what it does not take: "small" more than 64 rows, "sm90" another 16-bit dtype of
    the result than the operands'."""
    if not torch.ops.ampkernels.set_gemm_path(request.param):
        pytest.skip("not in this build")
    yield request.param
    torch.ops.ampkernels.set_gemm_path("auto")


def forward_and_backward(x, w, b, dy, **options):
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = ak.linear(x, w, b, **options)
    return [y.detach(), *torch.autograd.grad(y, [x, w, b], dy)]


def operands(m, n, k, dtype, device="cuda"):
    return (
        randn(m, k, dtype=dtype, device=device),
        randn(n, k, dtype=dtype, device=device, seed=1, scale=k**-0.5),
        randn(n, dtype=torch.float32, device=device, seed=2),
        randn(m, n, dtype=dtype, device=device, seed=3),
    )


@pytest.mark.parametrize("accumulate", ["fp32", "fp32/128"])
def test_the_same_bits_a_thousand_times(path, accumulate):
    args = operands(300, 520, 1032, torch.bfloat16)
    first = forward_and_backward(*args, activation="gelu", accumulate=accumulate)
    other = torch.empty(1 << 20, device="cuda")
    for i in range(1000):
        if i % 8 == 0:
            other[: 1 << (10 + i % 11)].mul_(2)  # blocks do not always begin alike
        again = forward_and_backward(*args, activation="gelu", accumulate=accumulate)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True)), f"repetition {i}"


@pytest.mark.parametrize("rows", [128, 4096])
@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp"])
@pytest.mark.parametrize("accumulate", ["fp32", "fp32/512"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_k_is_split_where_the_tiles_are_few(cuda, dtype, accumulate, op, rows):
    """128 rows: the forward, and mlp's gradient of the activation, sum over 4096; 4096 rows: the weights' gradients."""
    m, n, k = rows, 192, 4096 if rows == 128 else 128
    plan = _plan.gemm_plan_dict(*sorted((m, n, k)), arch=90, chunk=512 * (accumulate != "fp32"))
    assert plan["split"] > 1
    w1 = randn(n * (2 if op == "gated_linear" else 1), k, dtype=dtype, device=cuda, seed=1, scale=k**-0.5)
    args = [randn(m, k, dtype=dtype, device=cuda), w1]
    if op == "mlp":
        args += [None, randn(k, n, dtype=dtype, device=cuda, seed=2, scale=n**-0.5), None]
    function = getattr(ak, op)

    def run(path, operands):
        assert torch.ops.ampkernels.set_gemm_path(path)
        leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
        y = function(*leaves, accumulate=accumulate)
        dy = randn(*y.shape, dtype=dtype, device=cuda, seed=3)
        return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]

    try:
        once, again, other = run("auto", args), run("auto", args), run("sm80", args)
    finally:
        torch.ops.ampkernels.set_gemm_path("auto")
    for a, b, c in zip(once, again, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) or accumulate == "fp32"
        assert (a.double() - c.double()).norm() <= 2.0**-7 * c.double().norm()


@pytest.mark.parametrize("k", [16, 40, 64, 72, 128, 256])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_thousands_of_short_tiles(path, dtype, activation, k):
    """A persistent kernel changes tiles every few steps: barriers, phases and buffers that are off by one show here."""
    m, n = 16384 + 40, 3072 + 24
    x, w, b, _ = operands(m, n, k, dtype)
    y = ak.linear(x, w, b, activation=activation)
    exact = torch.nn.functional.linear(x.double(), w.double(), b.double())
    if activation:
        exact = torch.nn.functional.gelu(exact)
    u = torch.finfo(dtype).eps / 2
    error = (y.double() - exact).abs()
    assert bool((error <= 1.01 * u * exact.abs() + 1e-5 * k**0.5).all()), float(error.max())


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_memory_full_of_nan(path, dtype):
    """What lies around the operands is not read into results, and results are written whole, and nothing else."""
    m, n, k = 150, 264, 776
    x, w, b, dy = operands(m, n, k, dtype)
    expected = forward_and_backward(x, w, b, dy, activation="silu")
    wide = torch.full((m + 2, k + 16), torch.nan, dtype=dtype, device="cuda")
    wide_w = torch.full((n + 2, k + 8), torch.nan, dtype=dtype, device="cuda")
    wide[1:-1, 8:-8], wide_w[1:-1, :k] = x, w
    for _ in range(3):  # freed NaNs are what the allocator hands out next
        torch.full((8 << 20,), torch.nan, device="cuda")
        found = forward_and_backward(wide[1:-1, 8:-8], wide_w[1:-1, :k], b, dy, activation="silu")
        assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


RESIDUAL_LAYOUTS = ["contiguous", "offset", "sliced_rows", "padded_rows", "strided_cols", "transposed", "expanded"]


# Whole tiles and ragged ones, few rows, columns that no 16 bytes divide, a split of K.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (256, 384, 200),
        (150, 264, 776),
        (70, 137, 520),
        (33, 50, 1000),
        (5, 1000, 512),
        (64, 520, 136),
        (128, 192, 4096),
    ],
)
@pytest.mark.parametrize("accumulate", ["fp32", "fp32/128"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_residual_on_every_path(every_path, dtype, accumulate, m, n, k):
    """Of every dtype and layout, with and without a saved pre-activation: within the bound of one rounding, and under a
    chunk the bits of the CPU's emulation. What lies between the residual's rows is NaN, and so is freed memory."""
    m = min(m, 64) if every_path == "small" else m
    x, w, b, _ = operands(m, n, k, dtype)
    torch.full((4 << 20,), torch.nan, device="cuda")
    chunked = accumulate != "fp32"
    policy = ak.Accumulate.parse(accumulate)
    if (m, n, k) == (128, 192, 4096):
        assert _plan.gemm_plan_dict(m, n, k, arch=90, chunk=policy.chunk or 0)["split"] > 1
    for activation, residual_dtype in itertools.product((None, "gelu"), (*LOW, torch.float32)):
        exact = reference.linear(x, w, b, activation=activation)
        if chunked:
            emulated, sums = (
                numerics.emulate(x, w, b, activation=a, accumulate=accumulate, out_dtype=torch.float32).cuda()
                for a in (activation, None)
            )
        for layout in RESIDUAL_LAYOUTS:
            r = lay(randn(m, n, dtype=residual_dtype, device="cuda", seed=4), layout)
            what = f"{activation}, residual {residual_dtype} {layout}"
            options = {"activation": activation, "residual": r, "accumulate": accumulate}
            out_dtypes = {dtype, torch.float32} | (set() if every_path == "sm90" else {residual_dtype})
            for out_dtype in out_dtypes:
                y = ak.linear(x, w, b, out_dtype=out_dtype, **options)
                bound = reference.linear_bound(
                    x, w, b, activation=activation, residual=r, out_dtype=out_dtype, accumulate=policy
                )
                assert_within(y, exact + r.double(), bound, what)
                if chunked:
                    assert torch.equal(y, (emulated + r.float()).to(out_dtype)), what
            for relu in (False, True) if chunked and activation else ():
                graphed = ak.linear(
                    leaf(x), w, b, out_dtype=dtype, **(options | {"activation": "relu"} if relu else options)
                )
                act = sums.relu() if relu else emulated
                assert torch.equal(graphed, (act + r.float()).to(dtype)), what
                assert torch.equal(graphed.grad_fn.saved_tensors[-1], sums.to(dtype)), what


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_a_residual_that_cancels_on_every_path(every_path, dtype, activation):
    """The rest of the sum shows a rounding of the product or of the activation, which nothing else would."""
    for m, n, k in ((256, 384, 16), (70, 137, 16), (40, 264, 16)):
        x, w, b, _ = operands(min(m, 64) if every_path == "small" else m, n, k, dtype)
        x, w = x.abs(), w.abs() * w[:, :1].sign()  # sums as large as their terms: a small bound beside them
        act = reference.linear(x, w, b, activation=activation)
        for residual_dtype in (dtype, torch.float32):
            r = (-act).to(residual_dtype)
            for accumulate in ("fp32", "fp32/64"):
                y = ak.linear(x, w, b, activation=activation, residual=r, accumulate=accumulate)
                policy = ak.Accumulate.parse(accumulate)
                bound = reference.linear_bound(x, w, b, activation=activation, residual=r, accumulate=policy)
                assert_within(y, act + r.double(), bound, f"{m}x{n}, {accumulate}")
                rounded_first = act.to(dtype).double() + r.double()
                assert ((rounded_first - act - r.double()).abs() > bound).double().mean() > 0.2


@pytest.mark.parametrize("k", [16, 72, 256])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_thousands_of_short_tiles_with_a_residual(path, dtype, wide, activation, k):
    m, n = 16384 + 40, 3072 + 24
    x, w, b, _ = operands(m, n, k, dtype)
    r = randn(m, n, dtype=torch.float32 if wide else dtype, device="cuda", seed=4)
    first = ak.linear(x, w, b, activation=activation, residual=r)
    exact = torch.nn.functional.linear(x.double(), w.double(), b.double())
    if activation:
        exact = torch.nn.functional.gelu(exact)
    exact += r
    u = torch.finfo(r.dtype).eps / 2
    error = (first.double() - exact).abs()
    assert bool((error <= 1.01 * u * exact.abs() + 1e-5 * k**0.5).all()), float(error.max())
    for _ in range(20):
        assert torch.equal(ak.linear(x, w, b, activation=activation, residual=r), first)


@contextlib.contextmanager
def few_rows():
    """The kernel for 1 to 64 rows, which takes forward products."""
    if not torch.ops.ampkernels.set_gemm_path("small") or torch.cuda.get_device_capability() != (9, 0):
        torch.ops.ampkernels.set_gemm_path("auto")
        pytest.skip("for Hopper")
    try:
        yield
    finally:
        torch.ops.ampkernels.set_gemm_path("auto")


@pytest.mark.parametrize(("n", "k"), [(136, 200), (520, 1032), (1096, 4104), (1000, 64), (3, 8)])
@pytest.mark.parametrize("accumulate", ["fp32/64", "fp32/128", "fp32/512", "fp32"])
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_few_rows_have_the_bits_of_many(cuda, dtype, accumulate, n, k):
    """Every m from 1 to 64: under a policy the bits of the kernel for many rows, without one those of 64 rows."""
    x, w, b, _ = operands(200, n, k, dtype)

    def results(rows):
        leaf = rows.detach().requires_grad_()
        y = ak.linear(leaf, w, b, activation="gelu", accumulate=accumulate)
        found = [
            y.detach(),
            y.grad_fn.saved_tensors[-1],  # whatever forward keeps; the pre-activation among it
            ak.linear(rows, w, b, accumulate=accumulate),
            ak.linear(rows, w, out_dtype=torch.float32, accumulate=accumulate),
        ]
        return found if n % 2 else [*found, ak.gated_linear(rows, w, b, accumulate=accumulate)]

    if accumulate == "fp32":
        x = x[:64]
        with few_rows():
            right = results(x)
        exact = torch.nn.functional.linear(x.double(), w.double())
        assert torch.allclose(right[3].double(), exact, rtol=0, atol=1e-5 * k**0.5)
    else:
        right = results(x)
    with few_rows():
        for m in range(1, 65):
            first = (m * 5) % (len(x) - m + 1)
            for found, expected in zip(results(x[first : first + m]), right, strict=True):
                if found.shape[0] == m and expected.shape[0] == len(x):
                    assert torch.equal(found, expected[first : first + m]), f"{m} rows from {first}"


@pytest.mark.parametrize(("n", "k"), [(136, 200), (1096, 4104), (1000, 64), (3, 8)])
@pytest.mark.parametrize("accumulate", ["fp32/64", "fp32/512", "fp32"])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=name)
def test_few_rows_with_a_residual_have_the_bits_of_many(cuda, residual_dtype, accumulate, n, k):
    x, w, b, _ = operands(64 if accumulate == "fp32" else 200, n, k, torch.bfloat16)
    r = randn(len(x), n, dtype=residual_dtype, device=cuda, seed=4)

    def results(rows):
        options = {"residual": r[rows], "accumulate": accumulate}
        return ak.linear(x[rows], w, b, activation="gelu", **options), ak.linear(x[rows], w, **options)

    if accumulate == "fp32":
        with few_rows():
            right = results(slice(None))
    else:
        right = results(slice(None))
    with few_rows():
        for m in range(1, 65):
            first = (m * 5) % (len(x) - m + 1)
            rows = slice(first, first + m)
            for found, expected in zip(results(rows), right, strict=True):
                assert torch.equal(found, expected[rows]), f"{m} rows from {first}"


@pytest.mark.parametrize("residual", [False, True])
def test_few_rows_many_times_over(cuda, residual):
    """Launched as dependents of one another: each reads what the one before it wrote, as its rows and as its residual."""
    x, w, _, _ = operands(48, 1024, 1024, torch.bfloat16)

    def chain():
        y = before = x
        for i in range(40):
            options = {"activation": "tanh" if i % 3 else None, "accumulate": "fp32/128" if i % 2 else None}
            if residual:
                options["residual"] = before if i % 5 else y
            before, y = y, ak.linear(y, w, **options)
        return y

    with few_rows():
        first = chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(50):
            assert torch.equal(chain(), first)
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, first)


def test_two_streams(path):
    jobs = [operands(1000, 768, 520, torch.bfloat16), operands(333, 1544, 1032, torch.bfloat16)]
    expected = [forward_and_backward(*job, activation="gelu") for job in jobs]
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    found = [[] for _ in jobs]
    for _ in range(50):
        for job, stream, results in zip(jobs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(forward_and_backward(*job, activation="gelu"))
    torch.cuda.synchronize()
    for results, right in zip(found, expected, strict=True):
        for result in results:
            assert all(torch.equal(a, e) for a, e in zip(result, right, strict=True))


def test_a_slow_producer_on_a_side_stream(path):
    x, w, b, dy = operands(256, 512, 1024, torch.bfloat16)
    expected = forward_and_backward(x, w, b, dy, activation="gelu")
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 30 ms
        late.copy_(x)
        found = forward_and_backward(late, w, b, dy, activation="gelu")
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


FIRST_CALL = """
import torch, ampkernels as ak
torch.manual_seed(0)
x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
w = torch.randn(520, 1024, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    y = ak.linear(x, w, activation="gelu")
    z = ak.softmax(ak.layer_norm(y, (520,)))
graph.replay()
x.normal_()
graph.replay()
torch.cuda.synchronize()
again = ak.linear(x, w, activation="gelu")
assert torch.equal(y, again) and torch.equal(z, ak.softmax(ak.layer_norm(again, (520,))))
"""


def test_the_first_call_of_a_process_may_be_captured(cuda):
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, timeout=120)
