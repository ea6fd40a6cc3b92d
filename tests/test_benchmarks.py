"""The benchmark harness: what it measures is what happened, and nothing that is wrong or missing goes unsaid."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
import types

import pytest
import torch

pytest.importorskip("rich")

from benchmark_fakes import CPU, POINT, SHORT, Fake, KnownRoofs, run

from benchmarks import errors, host, runner, timing
from benchmarks.ops import LAYOUTS, OPS, RESIDUAL
from benchmarks.providers import (
    EAGER,
    EAGER_RESIDUAL,
    PROVIDERS,
    Eager,
    Unsupported,
    find_provider,
)
from benchmarks.runner import OpRunner, Point
from benchmarks.timing import Budget, Timing, WallTimer, ratio, rotation

pytestmark = pytest.mark.usefixtures("few_buffers")


# ------------------------------------------------------------------------------------------------------------- timing


def test_a_known_sleep_is_measured():
    result = WallTimer(SHORT).run({"sleep": [lambda: time.sleep(0.01)]})["sleep"]
    assert isinstance(result, Timing)
    assert 0.01 <= min(result.samples) < 0.05
    assert result.method == "wall" and len(result.samples) == 5


def test_calls_rotate_over_every_buffer_set():
    seen = []
    WallTimer(SHORT).run({"a": [lambda i=i: seen.append(i) for i in range(3)]})
    assert seen[:3] == [0, 1, 2]
    assert all((b - a) % 3 == 1 for a, b in itertools.pairwise(seen))


def test_a_call_that_throws_does_not_stop_the_others():
    results = WallTimer(SHORT).run({"bad": [lambda: 1 / 0], "good": [lambda: None]})
    assert isinstance(results["bad"], ZeroDivisionError)
    assert results["bad"].__traceback__ is None  # its frames would keep tensors while the others are measured
    assert isinstance(results["good"], Timing)


def test_candidates_take_turns_in_every_place():
    names = ["a", "b", "c"]
    assert {(name, rotation(names, r).index(name)) for r in range(6) for name in names} == {
        (name, place) for name in names for place in range(3)
    }
    after = {pair for r in range(6) for pair in itertools.pairwise(rotation(names, r))}
    assert len(after) == 6  # everybody has followed everybody


def test_ratios_are_taken_round_by_round():
    # A device that slows down from round to round: every single round says 2.
    base, other = Timing([2.0, 4.0, 8.0, 10.0], 0, "wall"), Timing([1.0, 2.0, 4.0, 5.0], 0, "wall")
    assert ratio(base, other) == 2.0
    # One disturbed round moves the quotient of the medians (6 / 2.5 = 2.4), not the median of the quotients.
    assert ratio(base, Timing([1.0, 2.0, 0.4, 5.0], 0, "wall")) == 2.0


def test_quantiles_are_of_the_samples():
    result = Timing([5.0, 1.0, 2.0, 3.0, 4.0, 6.0], 0, "wall")
    assert (result.quantile(0.2), result.median, result.quantile(0.8)) == (2.0, 3.5, 5.0)


# --------------------------------------------------------------------------------------------------------- work counts


@pytest.mark.parametrize(
    ("op", "shape", "direction", "elements"),
    [
        ("softmax", (8, 32), "fwd", 2 * 8 * 32),
        ("softmax", (8, 32), "bwd", 3 * 8 * 32),
        ("layer_norm", (8, 32), "fwd", 2 * 8 * 32 + 2 * 32),
        ("layer_norm", (8, 32), "bwd", 3 * 8 * 32 + 3 * 32),  # weight read, dweight and dbias written
        ("rms_norm", (8, 32), "bwd", 3 * 8 * 32 + 2 * 32),
        ("linear", (2, 3, 5), "fwd", 2 * 5 + 3 * 5 + 3 + 2 * 3),
        ("gated_linear", (2, 4, 5), "fwd", 2 * 5 + 4 * 5 + 4 + 2 * 2),
        ("mlp", (2, 3, 5), "fwd", 2 * 5 + 3 * 5 + 3 + 5 * 3 + 5 + 2 * 5),
    ],
)
def test_known_byte_counts(op, shape, direction, elements):
    assert OPS[op].bytes(shape, torch.bfloat16, direction) == 2 * elements
    assert OPS[op].bytes(shape, torch.float32, direction) == 4 * elements


@pytest.mark.parametrize("op", list(OPS))
def test_forward_bytes_are_those_of_the_tensors(op):
    shape = (4, 6, 8)[: len(OPS[op].axes)]
    inputs = OPS[op].inputs(shape, torch.float16, CPU, seed=0)
    tensors = (*inputs, EAGER[op](*inputs))
    assert OPS[op].bytes(shape, torch.float16, "fwd") == sum(t.numel() * t.element_size() for t in tensors)


def test_known_operation_counts():
    assert OPS["linear"].work((2, 3, 5), "fwd") == 2 * 2 * 3 * 5
    assert OPS["linear"].work((2, 3, 5), "bwd") == 2 * OPS["linear"].work((2, 3, 5), "fwd")
    assert OPS["mlp"].work((2, 3, 5), "fwd") == 4 * 2 * 3 * 5


def test_share_of_the_roof_follows_from_the_bytes():
    row = run(Point("softmax", "softmax", (64, 64), torch.float32, "fwd"), Eager())["eager"]
    size = OPS["softmax"].bytes((64, 64), torch.float32, "fwd")
    assert row.unit == "GB/s" and row.roof == "copy"
    assert row.rate == pytest.approx(size / row.median_us / 1e3)
    assert row.roof_share == pytest.approx(size / 1e10 / (row.median_us * 1e-6))


# -------------------------------------------------------------------------------------------------------------- errors


def test_error_figures_of_known_values():
    reference = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    exact = errors.compare([reference.float()], [reference])
    assert (exact.rel_l2, exact.max_ulp, exact.shrink) == (0.0, 0.0, 0.0)
    off = torch.tensor([1.0 + 2**-7, 2.0, -4.0], dtype=torch.bfloat16)  # one bf16 number further
    error = errors.compare([off], [reference])
    assert error.max_ulp == 1
    assert error.rel_l2 == pytest.approx(2**-7 / math.sqrt(21))
    assert error.shrink == pytest.approx(-(2**-7) / 7)


def test_ulps_count_across_zero_and_signs():
    tiny = torch.finfo(torch.float16).smallest_normal * 2.0**-10  # the smallest subnormal
    got = torch.tensor([-tiny, 0.0], dtype=torch.float16)
    assert errors.compare([got], [torch.tensor([tiny, -0.0], dtype=torch.float64)]).max_ulp == 2


def test_shrink_is_positive_where_magnitudes_were_lost():
    reference = torch.tensor([-3.0, 5.0], dtype=torch.float64)
    assert errors.compare([torch.tensor([-3.0, 4.0])], [reference]).shrink == pytest.approx(1 / 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_wrong(bad):
    reference = torch.ones(1000, dtype=torch.float64)
    result = torch.ones(1000)
    result[17] = bad
    assert errors.compare([result], [reference]).exceeds(1.0)


def test_one_bad_element_in_a_million_is_wrong():
    reference = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).double()
    result = reference.float()
    result[12345] = 4.0  # what an element that was never written may hold
    error = errors.compare([result], [reference])
    limit = errors.bound(torch.bfloat16, 2, 4096, "fp32")
    assert error.rel_l2 < limit and error.exceeds(limit)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", list(OPS))
def test_eager_is_right_on_every_operation(op, dtype, direction):
    shape = (32, 48, 64)[: len(OPS[op].axes)]
    row = run(Point(op, op, shape, dtype, direction), Eager())["eager"]
    assert row.status == "ok", row.reason
    assert row.rank == 1 and row.speedup == 1.0
    assert row.rel_l2 < 0.02 and row.error_over == "all results"


def test_a_linear_with_a_residual_is_checked_and_named():
    def forgotten(name, x, r, w, b):
        return torch.nn.functional.linear(x, w, b)

    point = Point("linear", "linear", (32, 48, 64), torch.bfloat16, "fwd", residual=True)
    rows = run(point, Eager(), find_provider("ampkernels"), find_provider("mm"), Fake("forgotten", forgotten))
    assert rows["eager"].status == rows["ampkernels"].status == "ok"
    assert rows["forgotten"].status == "wrong"
    assert (rows["mm"].status, rows["mm"].reason) == ("skipped", "mm has no linear with a residual")
    assert rows["ampkernels"].setting == "bias, residual" and rows["ampkernels"].accumulate == "fp32"
    assert RESIDUAL["linear"].work((32, 48, 64), "fwd") == OPS["linear"].work((32, 48, 64), "fwd")
    inputs = RESIDUAL["linear"].inputs((32, 48, 64), torch.float16, CPU, seed=0)
    tensors = (*inputs, EAGER_RESIDUAL["linear"](*inputs))
    assert RESIDUAL["linear"].bytes((32, 48, 64), torch.float16, "fwd") == sum(2 * t.numel() for t in tensors)


def test_some_rows_of_a_linear_with_a_residual_are_checked(monkeypatch):
    monkeypatch.setitem(runner._ORACLE_LIMIT, "cpu", OPS["linear"].work(POINT.shape, "fwd") / 4)
    row = run(Point("linear", "linear", POINT.shape, POINT.dtype, "fwd", residual=True), Eager())["eager"]
    assert row.status == "ok" and row.error_over == "4 of 16 rows"


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_norm_with_a_residual_has_two_results_that_are_checked(op):
    def spoilt(name, *tensors):
        y, total = EAGER_RESIDUAL[name](*tensors)
        return y, total * 1.1

    point = Point(op, op, (32, 48), torch.bfloat16, "fwd", residual=True)
    rows = run(point, Eager(), find_provider("ampkernels"), Fake("spoilt", spoilt))
    assert rows["eager"].status == rows["ampkernels"].status == "ok"
    assert rows["spoilt"].status == "wrong" and rows["eager"].setting == RESIDUAL[op].setting
    assert RESIDUAL[op].bytes((32, 48), torch.bfloat16, "fwd") == (4 * 32 * 48 + 48 * (2 - (op == "rms_norm"))) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_gets_its_rows_in_the_layout(layout):
    seen = []

    def call(op, x):
        seen.append(x)
        return EAGER[op](x)

    row = run(Point("softmax", "softmax", (32, 48), torch.bfloat16, "fwd", layout), Fake("seen", call))["seen"]
    assert row.status == "ok" and row.setting == OPS["softmax"].setting + f", {layout}" * (layout != "contiguous")
    for x in seen:
        if x.shape[0] == 32:  # not the row that the shape of the result is found from
            assert x.stride() == ((56, 1) if layout == "strided" else (48, 1))
            assert (x.data_ptr() % 16 == 2) == (layout == "misaligned")
    assert seen


def test_a_wrong_provider_is_reported_and_not_ranked():
    rows = run(POINT, Eager(), Fake("wrong", lambda op, *tensors: EAGER[op](*tensors) * 1.1))
    assert rows["wrong"].status == "wrong" and rows["wrong"].rank is None
    assert "above the bound" in rows["wrong"].reason
    assert rows["eager"].status == "ok" and rows["eager"].rank == 1


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_gradient_of_any_input_is_found(which):
    def call(op, *tensors):  # the same value, another gradient
        return EAGER[op](*(t * 1.2 - 0.2 * t.detach() if i == which else t for i, t in enumerate(tensors)))

    point = Point("linear", "linear", (16, 32, 48), torch.float32, "bwd")
    assert run(point, Eager(), Fake("wrong", call))["wrong"].status == "wrong"


def test_a_wrong_shape_is_an_error():
    rows = run(POINT, Fake("short", lambda op, *tensors: EAGER[op](*tensors)[1:]))
    assert rows["short"].status == "error" and "shape" in rows["short"].reason


def test_a_partial_provider_is_timed_but_not_ranked():
    rows = run(POINT, Eager(), Fake("mm", lambda op, x, w, b: x @ w.t(), partial=True))
    assert rows["mm"].status == "partial" and rows["mm"].rank is None
    assert rows["mm"].median_us > 0 and rows["mm"].rel_l2 is None


@pytest.mark.parametrize(("direction", "over"), [("fwd", "4 of 16 rows"), ("bwd", "2 of 16 rows, input gradient")])
def test_a_large_point_is_checked_on_some_rows_and_says_so(monkeypatch, direction, over):
    monkeypatch.setitem(runner._ORACLE_LIMIT, "cpu", OPS["linear"].work(POINT.shape, "fwd") / 4)
    row = run(Point("linear", "linear", POINT.shape, POINT.dtype, direction), Eager())["eager"]
    assert row.status == "ok" and row.error_over == over


def test_the_oracle_sees_the_rounded_inputs():
    op, point = OPS["rms_norm"], Point("rms_norm", "rms_norm", (4, 64), torch.bfloat16, "fwd")
    inputs = op.inputs((4, 64), torch.bfloat16, CPU, seed=0)
    x, w = (t.double() for t in inputs)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
    torch.testing.assert_close(runner._Check(op, point, inputs, CPU).references[0], expected)


# ----------------------------------------------------------------------------------------------------------- providers


def test_a_provider_that_throws_says_so_and_the_rest_runs():
    def broken(op, *tensors):
        raise RuntimeError("no kernel image\nand a long traceback")

    rows = run(POINT, Fake("broken", broken), Eager())
    assert (rows["broken"].status, rows["broken"].reason) == ("error", "RuntimeError: no kernel image")
    assert rows["eager"].status == "ok"


def test_a_provider_that_throws_later_says_so():
    calls = []

    def flaky(op, *tensors):
        calls.append(op)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return EAGER[op](*tensors)

    rows = run(POINT, Fake("flaky", flaky), Eager())
    assert rows["flaky"].status == "error" and rows["flaky"].rank is None
    assert rows["eager"].rank == 1


def test_what_threw_at_two_shapes_is_not_tried_at_the_rest():
    calls = []

    def broken(op, *tensors):
        calls.append(op)
        raise RuntimeError("no")

    op_runner = OpRunner(CPU, [Fake("broken", broken)], (), SHORT, KnownRoofs(CPU))
    reasons = [op_runner.run(Point("softmax", "softmax", (4, n), torch.float32, "fwd"))[0].reason for n in (1, 2, 3)]
    third = "not tried: threw at two shapes before this one: RuntimeError: no"
    assert reasons == ["RuntimeError: no", "RuntimeError: no", third]
    assert len(calls) == 2


def test_out_of_memory_is_said_and_skipped():
    def hungry(op, *tensors):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    rows = run(POINT, Fake("hungry", hungry), Eager())
    assert (rows["hungry"].status, rows["hungry"].reason) == ("oom", "out of memory")
    assert rows["eager"].status == "ok"


def test_absent_providers_are_skipped_with_their_reason_once():
    class Absent(Fake):
        modules = ("no_such_module_here",)

    class Unable(Fake):
        def implementations(self, *arguments):
            raise Unsupported("unable has no linear")

    op_runner = OpRunner(CPU, [Absent("absent", None), Unable("unable", None)], (), SHORT, KnownRoofs(CPU))
    rows = {row.provider: row for row in op_runner.run(POINT)}
    assert rows["absent"].reason == "no_such_module_here is not installed"
    assert {row.status for row in rows.values()} == {"skipped"}
    assert op_runner.run(POINT) == []


def test_no_provider_is_imported_before_it_is_asked_for():
    modules = ("liger_kernel", "quack", "apex", "transformer_engine", "transformers", "timm", "matplotlib")
    arguments = ["softmax", "--providers", "eager", "--shapes", "4x8", "--device", "cpu", "--direction", "fwd"]
    code = f"""
import sys, tempfile
from benchmarks import cli, roofs
roofs.Roofs._buffer_bytes = lambda self: 1 << 20
assert cli.main(["--list"]) == 0
assert cli.main([*{arguments!r}, "--quick", "--out", tempfile.mkdtemp()]) == 0
print([m for m in {modules!r} if m in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_way_of_a_provider_is_told_apart_by_its_name():
    rows = run(POINT, Eager(), Fake("compile", lambda op, *tensors: EAGER[op](*tensors), variant="max-autotune"))
    assert rows["compile max-autotune"].status == "ok"


def test_policies_that_do_not_suit_the_dtype_are_said_to_be_left_out():
    pytest.importorskip("ampkernels")
    rows = OpRunner(CPU, [PROVIDERS["ampkernels"]], ("fp16", "fp16/128"), SHORT, KnownRoofs(CPU)).run(POINT)
    assert [(r.status, r.reason) for r in rows] == [("skipped", "accumulate fp16, fp16/128 needs fp16 inputs")]


@pytest.fixture
def fake_module(monkeypatch):
    """Installs a module of the given functions under a dotted name, for as long as a test runs."""

    def install(name, **contents):
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = types.ModuleType(".".join(parts[:end]))
            parent.__path__ = []
            monkeypatch.setitem(sys.modules, parent.__name__, parent)
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        if len(parts) > 1:
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)

    return install


def _gradients_are_right(op, implementation, shape=(16, 64)):
    inputs = OPS[op].inputs(shape, torch.float32, CPU, seed=0)
    leaves = [t.requires_grad_() for t in (implementation.prepare(inputs) if implementation.prepare else inputs)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    dy = torch.randn(shape)
    found = torch.autograd.grad(implementation.call(*leaves), leaves, dy)
    for got, expected in zip(found, torch.autograd.grad(OPS[op].oracle(*wide), wide, dy.double()), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_quacks_two_layer_norm_functions_become_one_that_autograd_knows(fake_module):
    # With the signatures of quack-kernels 0.6.5.
    def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return (y, rstd.squeeze(-1), mean.squeeze(-1)) if return_rstd and return_mean else y

    def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        arguments = (x.shape[-1:], mean.unsqueeze(-1), rstd.unsqueeze(-1), weight, torch.zeros_like(weight))
        return torch.ops.aten.native_layer_norm_backward(dout, x, *arguments, [True, True, has_bias])

    fake_module("quack.rmsnorm", layernorm_fwd=layernorm_fwd, layernorm_bwd=layernorm_bwd)
    implementation = PROVIDERS["quack"].layer_norm(torch.float32, "bwd")
    _gradients_are_right("layer_norm", implementation)
    x, w, b = OPS["layer_norm"].inputs((4, 64), torch.bfloat16, CPU, seed=0)
    prepared = implementation.prepare((x, w, b))
    assert [t.dtype for t in prepared] == [torch.bfloat16, torch.float32, torch.float32]


def test_transformer_engines_norms_are_fed_our_parameters(fake_module):
    class RMSNorm(torch.nn.Module):
        def __init__(self, shape, *, eps, device, dtype):
            super().__init__()
            self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(shape, device=device, dtype=dtype))

        def forward(self, x):
            assert len(list(self.parameters())) == 1
            return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    fake_module("transformer_engine.pytorch.ops", RMSNorm=RMSNorm)
    implementation = PROVIDERS["transformer_engine"].rms_norm(torch.float32, "fwd")
    for seed in (0, 1):
        x, w = OPS["rms_norm"].inputs((4, 64), torch.float32, CPU, seed=seed)
        torch.testing.assert_close(implementation.call(x, w), EAGER["rms_norm"](x, w))
    with pytest.raises(Unsupported, match="cannot be repeated"):
        PROVIDERS["transformer_engine"].rms_norm(torch.float32, "bwd")


def test_aliases_and_unknown_providers():
    assert find_provider("ours").name == "ampkernels"
    assert find_provider("torch.compile").name == "compile"
    with pytest.raises(ValueError, match=r"unknown provider 'nobody'; valid: ampkernels, eager, compile"):
        find_provider("nobody")


def test_host_time_is_measured_for_three_kinds_of_call():
    def broken(op, *tensors):
        raise RuntimeError("no")

    def slow(op, *tensors):
        time.sleep(1e-3)
        return EAGER[op](*tensors)

    providers = [Eager(), Fake("slow", slow), Fake("broken", broken), PROVIDERS["mm"], PROVIDERS["cublaslt"]]
    named = dict(host.tasks(CPU, [torch.bfloat16], ("fwd", "bwd"), providers, SHORT))
    assert len(named) == 3 * len(OPS)
    assert len(dict(host.tasks(CPU, [torch.bfloat16], ("fwd",), providers, SHORT))) == 2 * len(OPS)
    for kind in host.KINDS:
        rows = {row.provider: row for row in named[f"host linear bf16 {kind}"]()}
        assert rows.keys() == {"eager", "slow", "broken"} and {row.direction for row in rows.values()} == {kind}
        assert rows["broken"].status == "error" and rows["broken"].median_us is None
        assert 1000 < rows["slow"].median_us < 50_000 and rows["slow"].rank == 2
        assert rows["eager"].speedup == 1 > rows["slow"].speedup and rows["eager"].rank == 1


# ---------------------------------------------------------------------------------------------------------------- CUDA

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_cuda_graph_and_events_agree_on_a_long_kernel():
    device = torch.device("cuda", 0)
    a, b = torch.randn(1 << 28, device=device), torch.empty(1 << 28, device=device)
    budget = Budget(warmup_s=0.1, min_rounds=9, max_rounds=9)
    calls = {"mul": [lambda: torch.mul(a, 2.0, out=b)]}
    graph = timing.CudaTimer(device, budget).run(calls)["mul"]
    events = timing.CudaTimer(device, budget, capture=False).run(calls)["mul"]
    assert (graph.method, events.method) == ("graph", "events")
    assert graph.median == pytest.approx(events.median, rel=0.05)


@needs_cuda
def test_cuda_falls_back_to_events_where_a_call_synchronises():
    x = torch.randn(1000, device="cuda")
    timer = timing.CudaTimer(torch.device("cuda", 0), Budget(warmup_s=0.05, min_rounds=3))
    result = timer.run({"sync": [lambda: float(x.sum())]})["sync"]
    assert result.method == "events" and "not captured" in result.note
