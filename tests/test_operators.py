"""The private operators: torch's own check of schemas, fakes and aliasing, torch.compile, and where errors come from."""

import pytest
import torch
from cases import randn
from torch.library import opcheck

import ampkernels as ak

F32, BF16 = torch.float32, torch.bfloat16
ops = torch.ops.ampkernels
# Differentiation is the Functions' business, not the operators'.
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def t(*shape, device, dtype=BF16, seed=0):
    return randn(*shape, dtype=dtype, device=device, seed=seed)


def samples(device):
    """(operator, arguments) with each optional argument given and not."""
    x, w, b = t(5, 16, device=device), t(8, 16, device=device, seed=1), t(8, device=device, dtype=F32, seed=2)
    dy, pre = t(5, 8, device=device, seed=3), t(5, 8, device=device, seed=4)
    acc = (F32, 0)
    for bias in (None, b):
        for save in (False, True):
            for out in (BF16, F32):
                for residual in (None, dy, dy.float()):
                    yield "linear_fwd", (x, w, bias, residual, 2, *acc, out, save)
                yield "gated_linear_fwd", (x, w, bias, 4, *acc, out, save)
        for residual in (None, t(3, 2, 8, device=device).transpose(0, 1)):
            yield "linear_fwd", (t(2, 3, 16, device=device), w, bias, residual, 2, *acc, BF16, True)
        yield "gated_linear_fwd", (t(16, device=device), w, bias, 4, *acc, BF16, True)
    for residual in (None, dy.double()):
        yield "linear_fwd", (x.double(), w.double(), None, residual, 2, *acc, torch.float64, True)
    for dpre in (None, BF16):
        for dbias in (None, F32):
            if dpre or dbias:
                yield "linear_act_bwd", (dy, pre, 2, False, dpre, dbias)
                yield "linear_act_bwd", (dy, None, 0, False, dpre, dbias)
                yield "gated_linear_act_bwd", (t(5, 4, device=device), pre, 4, dpre, dbias)
    saved = t(5, 16, device=device, seed=6)
    yield "linear_dgrad", (dy, w, None, 0, False, False, *acc, BF16)
    yield "linear_dgrad", (dy, w, saved, 2, False, True, *acc, BF16)
    yield "linear_dgrad", (dy, w, saved, 1, True, False, *acc, F32)
    for transposed in (False, True):
        yield "linear_bwd", (dy, x, w, pre, 2, False, transposed, *acc, BF16, F32, F32)
        yield (
            "linear_bwd",
            (
                t(2, 3, 4, device=device),
                t(2, 3, 16, device=device),
                w,
                pre[:1].expand(6, 8),
                4,
                True,
                transposed,
                *acc,
                F32,
                BF16,
                None,
            ),
        )
    yield "linear_bwd", (dy, None, w, None, 0, False, False, *acc, BF16, None, F32)
    yield "linear_bwd", (dy, x, None, None, 0, False, False, *acc, None, BF16, None)
    yield "linear_wgrad_add", (t(8, 16, device=device, dtype=F32), dy, x, F32, 128)
    z = t(3, 4, 6, device=device)
    for dim in (0, 1, 2):
        yield "softmax_fwd", (z, dim, 0.5, None, False, dim == 1, F32)
        yield "softmax_bwd", (z, z, dim, 0.5, False, dim == 1, BF16)
    yield "softmax_fwd", (z, 2, 1.0, t(4, 6, device=device) > 0, True, False, BF16)
    yield "softmax_fwd", (z, 2, 1.0, t(1, 6, device=device, dtype=F32), False, False, BF16)
    yield "softmax_bwd", (z, z, 2, 1.0, True, False, BF16)
    weight, bias, row = t(6, device=device, dtype=F32), t(6, device=device, seed=9), t(12, device=device, dtype=F32)
    for stats in (False, True):
        yield "layer_norm_fwd", (z, 1, weight, bias, 1e-5, z, BF16, stats)
        yield "layer_norm_fwd", (z, 2, None, None, 1e-5, None, F32, stats)
        yield "rms_norm_fwd", (z, 1, weight, 1e-5, 1.0, z.float(), BF16, stats)
        yield "rms_norm_fwd", (z, 2, None, 1e-5, 0.0, None, F32, stats)
    yield "layer_norm_bwd", (z, z, z, 1, row, row.abs(), weight, BF16, F32, F32)
    yield "layer_norm_bwd", (z, None, z, 1, row, row.abs(), None, BF16, None, None)
    yield "layer_norm_bwd", (z, None, z, 1, row, row.abs(), weight, None, F32, None)
    yield "rms_norm_bwd", (z, z, z, 1, row.abs(), weight, 1.0, BF16, F32)
    yield "rms_norm_bwd", (z, None, z, 1, row.abs(), None, 0.0, None, BF16)


NAMES = sorted({name for name, _ in samples("cpu")})


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    for op, args in samples(device):
        if op == name:
            opcheck(getattr(ops, op).default, args, test_utils=CHECKS)


def test_every_operator_is_checked():
    schemas = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith("ampkernels::")}
    assert schemas - set(NAMES) <= {"build_config", "set_cpu_isa", "set_gemm_path", "emulate_linear"}


CALLS = {
    "linear": (lambda x, w, b: ak.linear(x, w, b, activation="gelu"), [(6, 16), (8, 16), (8,)]),
    "linear_residual": (
        lambda x, w, b, r: ak.linear(x, w, b, activation="gelu", residual=r),
        [(6, 16), (8, 16), (8,), (6, 8)],
    ),
    "linear_only_residual": (
        lambda x, w, r: ak.linear(x.detach(), w.detach(), activation="relu", residual=r) + 0 * x.sum() + 0 * w.sum(),
        [(6, 16), (8, 16), (6, 8)],
    ),
    "gated_linear": (ak.gated_linear, [(6, 16), (8, 16), (8,)]),
    "mlp": (ak.mlp, [(6, 16), (8, 16), (8,), (16, 8), (16,)]),
    "mlp_residual": (
        lambda x, w1, b1, w2, b2, r: ak.mlp(x, w1, b1, w2, b2, residual=r),
        [(6, 16), (8, 16), (8,), (16, 8), (16,), (6, 16)],
    ),
    "softmax": (lambda x: ak.softmax(x, scale=0.5, causal=True), [(6, 6)]),
    "log_softmax": (ak.log_softmax, [(6, 16)]),
    "layer_norm": (lambda x, w, b: ak.layer_norm(x, (16,), w, b), [(6, 16), (16,), (16,)]),
    "rms_norm": (lambda x, w: ak.rms_norm(x, (16,), w), [(6, 16), (16,)]),
    "residual": (lambda x, r, w: sum(ak.rms_norm(x, (16,), w, residual=r)), [(6, 16), (6, 16), (16,)]),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_compile_fullgraph(device, name, autocast):
    """No graph break, forward and backward, and the values of eager."""
    function, shapes = CALLS[name]
    values = [randn(*shape, dtype=F32, device=device, seed=i) for i, shape in enumerate(shapes)]

    def run(call):
        leaves = [v.clone().requires_grad_() for v in values]
        with torch.autocast(device, BF16, enabled=autocast):
            y = call(*leaves)
        y.float().square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    torch._dynamo.reset()
    eager = run(function)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"))
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_cuda_graph_capture_on_the_first_call(cuda):
    """Nothing allocates outside torch's allocator, nothing synchronises."""
    x, w, b = t(64, 256, device=cuda), t(512, 256, device=cuda, seed=1), t(512, device=cuda, seed=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ak.rms_norm(ak.softmax(ak.linear(x, w, b, activation="gelu")), (512,), b)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, ak.rms_norm(ak.softmax(ak.linear(x, w, b, activation="gelu")), (512,), b))


def test_current_stream_and_device_are_obeyed(cuda):
    x, w = t(512, 512, device=cuda), t(512, 512, device=cuda, seed=1)
    expected = ak.linear(x, w)
    stream = torch.cuda.Stream()
    late = torch.empty_like(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        y = ak.softmax(ak.linear(late, w))
    stream.synchronize()
    assert torch.equal(y, ak.softmax(expected))
    if torch.cuda.device_count() > 1:
        other = ak.linear(x.to("cuda:1"), w.to("cuda:1"))
        assert other.device.index == 1 and torch.cuda.current_device() == 0
        assert torch.equal(other.to(cuda), expected)
