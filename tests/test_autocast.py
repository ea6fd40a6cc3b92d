"""The autocast table of docs/design.md, section 2, on both devices, and the reports that it answers."""

import threading

import pytest
import torch
import torch.nn.functional as F
from bounds import assert_within
from cases import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkernels as ak
from ampkernels import _ops, autocast, reference

LOW = (torch.bfloat16, torch.float16)
ANY = (*LOW, torch.float32, torch.float64)

# op -> (ours, eager's) as functions of (x, w, b): x (4, 8), w (8, 8), b (8,)
GEMMS = {
    "linear": (ak.linear, F.linear),
    "gated_linear": (ak.gated_linear, lambda x, w, b: F.glu(F.linear(x, w, b))),
    "mlp": (lambda x, w, b: ak.mlp(x, w, b, w, b), lambda x, w, b: F.linear(F.gelu(F.linear(x, w, b)), w, b)),
}
ROWS = {
    "softmax": (lambda x, w, b, **kw: ak.softmax(x, **kw), lambda x, w, b: F.softmax(x, -1)),
    "log_softmax": (lambda x, w, b, **kw: ak.log_softmax(x, **kw), lambda x, w, b: F.log_softmax(x, -1)),
    "layer_norm": (
        lambda x, w, b, **kw: ak.layer_norm(x, 8, w[0], b, **kw),
        lambda x, w, b: F.layer_norm(x, (8,), w[0], b),
    ),
    "rms_norm": (lambda x, w, b, **kw: ak.rms_norm(x, 8, w[0], **kw), lambda x, w, b: F.rms_norm(x, (8,), w[0])),
}


def data(device, dtype=torch.float32, parameters=None):
    parameters = parameters or dtype
    x = randn(4, 8, dtype=dtype, device=device, seed=1)
    return x, randn(8, 8, dtype=parameters, device=device, seed=2), randn(8, dtype=parameters, device=device, seed=3)


# ----------------------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("amp", LOW)
@pytest.mark.parametrize("dtype", ANY[:3])
def test_gemms_cast_to_the_autocast_dtype(device, op, amp, dtype):
    ours, eager = GEMMS[op]
    inputs = data(device, dtype, torch.float32)
    with torch.autocast(device, amp):
        assert ours(*inputs).dtype == amp == eager(*inputs).dtype
    # the bits are those of inputs that the caller cast; the bias is used as it is
    x, w, b = inputs
    with torch.autocast(device, amp):
        under = ours(x, w, b)
    assert torch.equal(under, ours(x.to(amp), w.to(amp), b))


@pytest.mark.parametrize("op", ["linear", "mlp"])
@pytest.mark.parametrize("amp", LOW)
@pytest.mark.parametrize("residual_dtype", ANY[:3])
def test_a_residual_is_not_cast(device, op, amp, residual_dtype):
    """An fp32 residual stream stays one, forward and backward: the result has its dtype, and is rounded to no other."""
    x, w, b = data(device)
    r = randn(4, 8, dtype=residual_dtype, device=device, seed=4).requires_grad_()

    def call(*tensors):
        return ak.mlp(*tensors, w, b, residual=r) if op == "mlp" else ak.linear(*tensors, residual=r)

    with torch.autocast(device, amp):
        under = call(x, w, b)
    assert under.dtype == residual_dtype
    with torch.no_grad():
        second = w.to(amp)
        outside = (
            ak.mlp(x.to(amp), second, b, second, b, residual=r)
            if op == "mlp"
            else ak.linear(x.to(amp), second, b, residual=r)
        )
    assert torch.equal(under, outside)
    dy = randn(4, 8, dtype=residual_dtype, device=device, seed=5)
    under.backward(dy)
    assert r.grad.dtype == residual_dtype and torch.equal(r.grad, dy)


def test_a_float64_residual_needs_float64_under_autocast_too(device):
    x, w, b = data(device)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(TypeError, match=r"^linear: residual must have dtype torch.float64 exactly where input has"):
            ak.linear(x, w, b, residual=torch.zeros(4, 8, dtype=torch.float64, device=device))
        wide = [t.double() for t in (x, w, b)]
        assert ak.linear(*wide, residual=wide[0]).dtype == torch.float64


@pytest.mark.parametrize("op", GEMMS)
def test_gemms_leave_float64_alone(device, op):
    with torch.autocast(device, torch.bfloat16):
        inputs = data(device, torch.float64)
        assert GEMMS[op][0](*inputs).dtype == torch.float64
        assert GEMMS[op][1](*inputs).dtype == torch.float64


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("amp", LOW)
@pytest.mark.parametrize("dtype", ANY)
def test_rows_have_eagers_output_dtype(device, op, amp, dtype):
    ours, eager = ROWS[op]
    inputs = data(device, dtype)
    assert ours(*inputs).dtype == dtype
    with torch.autocast(device, amp):
        assert ours(*inputs).dtype == eager(*inputs).dtype


@pytest.mark.parametrize("op", ROWS)
def test_rows_do_not_cast_the_input_first(device, op):
    """fp32 input under bf16 autocast: the fp32 result, not that of a bf16 input."""
    ours, _ = ROWS[op]
    inputs = data(device)
    with torch.autocast(device, torch.bfloat16):
        under = ours(*inputs, out_dtype=torch.float32)
    assert torch.equal(under, ours(*inputs))


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("amp", LOW)
def test_out_dtype_autocast(device, op, amp):
    ours, _ = ROWS[op]
    x, w, b = data(device)
    assert ours(x, w, b, out_dtype="autocast").dtype == torch.float32
    with torch.autocast(device, amp):
        y = ours(x, w, b, out_dtype="autocast")
        assert y.dtype == amp
        assert ours(x.double(), w, b, out_dtype="autocast").dtype == torch.float64
    assert torch.equal(y, ours(x, w, b).to(amp))  # rounded once: fp32 to fp32 rounds nothing


def test_the_cuda_rows_of_the_table_without_a_gpu():
    """The table is a function of flags that exist without a GPU."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        for low in (*LOW, torch.float32):
            assert autocast.rows_dtype("layer_norm", "cuda", low, None) == torch.float32
            assert autocast.rows_dtype("layer_norm", "cuda", low, "autocast") == torch.bfloat16
            assert autocast.rows_dtype("layer_norm", "cuda", low, torch.float16) == torch.float16
            assert autocast.rows_dtype("layer_norm", "cpu", low, None) == low
            assert autocast.gemm_dtype("cuda", low, torch.float32) == torch.bfloat16
        assert autocast.rows_dtype("layer_norm", "cuda", torch.float64, None) == torch.float64
        assert autocast.gemm_dtype("cuda", torch.float64, torch.float64) == torch.float64
        assert autocast.gemm_dtype("cuda", torch.float64, torch.float32) is None
        assert autocast.gemm_dtype("cpu", torch.float32, torch.bfloat16) is None
        assert autocast.gemm_dtype("meta", torch.float32, torch.float32) == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)


def test_eagers_own_table_is_the_one_in_the_docs():
    """torch decides what eager does; if a release changes it, design.md's table has to follow."""
    for op in ("softmax.int", "log_softmax.int", "layer_norm", "rms_norm", "linear"):
        table = torch._C._dispatch_dump_table(f"aten::{op}").splitlines()
        kernels = {line.split(":")[0] for line in table if "fallthrough" not in line}
        assert "AutocastCUDA" in kernels
        assert ("AutocastCPU" in kernels) == (op == "linear")


# --------------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("amp", LOW)
@pytest.mark.parametrize("op", [*GEMMS, *ROWS])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_gradients_come_in_the_dtypes_of_their_tensors(device, op, amp, x_dtype):
    ours = {**GEMMS, **ROWS}[op][0]
    inputs = [t.requires_grad_() for t in data(device, x_dtype, torch.float32)]
    with torch.autocast(device, amp):
        y = ours(*inputs)
    y.sum().backward()
    for t in inputs:
        assert t.grad is None or t.grad.dtype == t.dtype
    assert inputs[0].grad is not None


@pytest.mark.parametrize("bias", [True, False])
def test_fp32_parameters_under_autocast(device, bias):
    """Reports 4 and 62: half activations meet fp32 parameters, in linear and in the norms, with and without a bias."""
    norm, linear = ak.FusedLayerNorm(8, bias=bias).to(device), ak.FusedLinear(8, 8, bias=bias).to(device)
    x = randn(4, 8, dtype=torch.float32, device=device)
    with torch.autocast(device, torch.float16):
        norm(linear(x)).float().square().sum().backward()
    for parameter in (*norm.parameters(), *linear.parameters()):
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()


def test_an_fp32_weights_gradient_is_not_rounded_on_the_way(cuda):
    x, w, _ = data(cuda)
    w.requires_grad_()
    with torch.autocast(cuda, torch.bfloat16):
        y = ak.linear(x, w)
    dy = randn(4, 8, dtype=torch.bfloat16, device=cuda, seed=9)
    y.backward(dy)
    exact = dy.double().mT @ x.bfloat16().double()
    bound = reference.product_bound(dy.mT.contiguous(), x.bfloat16(), torch.float32)
    assert_within(w.grad, exact, bound)


def test_an_fp32_weights_gradient_is_that_of_the_cast_weight(device):
    """The formula of the CPU too, whose library may round dweight to its output dtype."""
    x, w, b = data(device)
    w.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = ak.linear(x, w, b)
    dy = randn(4, 8, dtype=torch.bfloat16, device=device, seed=9)
    y.backward(dy)
    exact = dy.double().mT @ x.bfloat16().double()
    bound = reference.product_bound(dy.mT.contiguous(), x.bfloat16(), torch.bfloat16)
    assert_within(w.grad, exact, bound)


def test_inf_reaches_grad_scaler(device):
    linear = ak.FusedLinear(8, 8).to(device)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20)
    before = linear.weight.detach().clone()
    with torch.autocast(device, torch.float16):
        loss = linear(randn(4, 8, dtype=torch.float32, device=device, scale=100.0)).square().mean()
    scaler.scale(loss.float()).backward()  # 2^20 does not fit fp16
    assert not linear.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(linear.weight, before)
    assert scaler.get_scale() < 2.0**20


@pytest.mark.parametrize("op", [*GEMMS, *ROWS])
@pytest.mark.parametrize("amp", [*LOW, None])
def test_backward_runs_in_forwards_autocast_state(device, op, amp, monkeypatch):
    """Report 87: whatever state surrounds the call of backward."""
    seen = []
    backward = {
        "linear": "linear_bwd",
        "mlp": "linear_bwd",
        "gated_linear": "linear_bwd",
        "layer_norm": "layer_norm_bwd",
        "rms_norm": "rms_norm_bwd",
    }.get(op, "softmax_bwd")
    original = getattr(_ops, backward)

    def spy(*args):
        seen.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        return original(*args)

    monkeypatch.setattr(_ops, backward, spy)
    inputs = [t.requires_grad_() for t in data(device)]
    ours = {**GEMMS, **ROWS}[op][0]
    with torch.autocast(device, amp or torch.bfloat16, enabled=amp is not None):
        y = ours(*inputs)
    other = torch.float16 if amp == torch.bfloat16 else torch.bfloat16
    with torch.autocast(device, other, enabled=amp is None):
        y.sum().backward()
    assert seen and all(enabled == (amp is not None) for enabled, _ in seen)
    assert amp is None or all(dtype == amp for _, dtype in seen)


# ------------------------------------------------------------------------------------------------------- threads and caches


def test_each_thread_has_its_own_state(device):
    """Report 90: a new thread does not inherit autocast, and a thread's autocast does not leak."""
    x, w, b = data(device)
    results = {}

    def work(name, amp):
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            results[name] = ak.linear(x, w, b).dtype

    with torch.autocast(device, torch.float16):
        threads = [threading.Thread(target=work, args=(amp, amp)) for amp in (False, True)]
        bare = threading.Thread(target=lambda: results.update(bare=ak.linear(x, w, b).dtype))
        for thread in (*threads, bare):
            thread.start()
        for thread in (*threads, bare):
            thread.join()
        assert ak.linear(x, w, b).dtype == torch.float16
    assert results == {False: torch.float32, True: torch.bfloat16, "bare": torch.float32}


@pytest.mark.parametrize("write", ["data", "no_grad"])
@pytest.mark.parametrize("op", GEMMS)
def test_weights_written_inside_the_block_are_seen(device, op, write):
    """Report 92: there is no cache of cast weights to go stale."""
    x, w, b = data(device)
    parameter = nn.Parameter(w)
    with torch.autocast(device, torch.bfloat16):
        GEMMS[op][0](x, parameter, b)
        if write == "data":
            parameter.data.mul_(2)
        else:
            with torch.no_grad():
                parameter.mul_(2)
        second = GEMMS[op][0](x, parameter, b)
        fresh = GEMMS[op][0](x, parameter.detach().clone().requires_grad_(), b)
    assert torch.equal(second, fresh)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_over_layers_that_share_a_weight(device, reentrant):
    """Report 95: the recomputation must save the same tensors as the first forward did."""
    first, second, norm = (
        ak.FusedLinear(8, 8).to(device),
        ak.FusedLinear(8, 8).to(device),
        ak.FusedLayerNorm(8).to(device),
    )
    second.weight = first.weight
    x = randn(4, 8, dtype=torch.float32, device=device)

    def block(t):
        return second(norm(first(t)))

    grads = []
    for run in (block, lambda t: checkpoint(block, t, use_reentrant=reentrant)):
        leaf = x.clone().requires_grad_()
        first.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            y = run(leaf)
        y.float().square().sum().backward()
        grads.append((leaf.grad, first.weight.grad.clone()))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("op", GEMMS)
def test_no_grad_then_grad_inside_one_block(device, op):
    inputs = [t.requires_grad_() for t in data(device)]
    with torch.autocast(device, torch.bfloat16):
        with torch.no_grad():
            first = GEMMS[op][0](*inputs)
        second = GEMMS[op][0](*inputs)
    assert first.grad_fn is None and second.grad_fn is not None
    second.sum().backward()
    assert all(t.grad is not None for t in inputs)


def test_no_grad_and_grad_agree_on_dtype_and_bits_of_rows(device):
    x, w, b = (t.requires_grad_() for t in data(device, torch.bfloat16, torch.float32))
    for ours, _ in ROWS.values():
        with torch.autocast(device, torch.bfloat16):
            with_graph = ours(x, w, b)
            with torch.no_grad():
                without = ours(x, w, b)
        assert with_graph.dtype == without.dtype and torch.equal(with_graph, without)


def test_nested_blocks(device):
    x, w, b = data(device)
    with torch.autocast(device, torch.bfloat16):
        with torch.autocast(device, enabled=False):
            assert ak.linear(x, w, b).dtype == torch.float32
        with torch.autocast(device, torch.float16):
            assert ak.linear(x, w, b).dtype == torch.float16
        assert ak.linear(x, w, b).dtype == torch.bfloat16


def test_the_other_devices_autocast_changes_nothing():
    """A CUDA block around CPU tensors: report 97's other half."""
    x, w, b = data("cpu")
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert ak.linear(x, w, b).dtype == torch.float32
        assert ak.softmax(x).dtype == torch.float32


@pytest.mark.parametrize("op", [*GEMMS, *ROWS])
def test_autocast_arguments_are_not_changed(device, op):
    inputs = data(device)
    copies = [t.clone() for t in inputs]
    with torch.autocast(device, torch.bfloat16):
        {**GEMMS, **ROWS}[op][0](*inputs)
    for t, copy in zip(inputs, copies, strict=True):
        assert torch.equal(t, copy) and t.dtype == torch.float32 and set(vars(t)) == set()
