"""The benchmark harness: what it measures is what happened, and nothing that is wrong or missing goes unsaid."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
import types

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import cli, compare, errors, report, runner, suites, timing
from benchmarks.ops import OPS
from benchmarks.providers import EAGER, PROVIDERS, Eager, Implementation, Provider, Unsupported, find_provider
from benchmarks.records import COLUMNS, CsvWriter, Row, environment, read_rows
from benchmarks.roofs import Roof, Roofs
from benchmarks.runner import OpRunner, Point
from benchmarks.timing import Budget, Timing, WallTimer, ratio, rotation

CPU = torch.device("cpu")
SHORT = Budget(warmup_s=0.01, min_rounds=5, max_rounds=5, cpu_candidate_s=0.0)
POINT = Point("linear", "linear", (16, 32, 48), torch.bfloat16, "fwd")


class Fake(Provider):
    """A provider made of one function, for every operation."""

    def __init__(self, name, call, **fields):
        self.name, self.call, self.fields = name, call, fields

    def implementations(self, op, dtype, direction, accumulates, device):
        yield Implementation(lambda *tensors: self.call(op.name, *tensors), **self.fields)


class KnownRoofs(Roofs):
    """Roofs that need no measuring: 10 GB/s and 1 TFLOP/s."""

    def _get(self, kind, dtype):
        return Roof(kind, dtype, 1e12 if kind == "gemm" else 1e10, "known", 1.0)


def run(point, *providers):
    rows = OpRunner(CPU, providers, ("fp32",), SHORT, KnownRoofs(CPU)).run(point)
    return {row.provider: row for row in rows}


@pytest.fixture(autouse=True)
def few_buffers(monkeypatch):
    """Two sets of inputs instead of as many as overflow the cache: these tests are about what is said, not how fast."""
    monkeypatch.setattr(runner, "cache_bytes", lambda device: 0)


@pytest.fixture
def only(monkeypatch):
    """Makes the given providers the only ones there are, and measuring quick."""

    def install(*providers):
        monkeypatch.setattr(cli, "PROVIDERS", {p.name: p for p in providers})
        monkeypatch.setattr(cli, "Roofs", KnownRoofs)
        monkeypatch.setattr(Budget, "quick", classmethod(lambda cls: SHORT))

    return install


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


def test_out_of_memory_for_a_whole_point_is_said_and_the_next_point_runs(only, tmp_path, monkeypatch):
    inputs = type(OPS["softmax"]).inputs

    def hungry(self, shape, *arguments, **options):
        if shape == (8, 64):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        return inputs(self, shape, *arguments, **options)

    monkeypatch.setattr(type(OPS["softmax"]), "inputs", hungry)
    only(Eager())
    options = ["softmax", "--shapes", "8x64,4x64", "--quick", "--direction", "fwd", "--device", "cpu"]
    assert cli.main([*options, "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "softmax-quick.csv")
    assert [(r.shape, r.status) for r in rows] == [("8x64", "oom"), ("4x64", "ok")]


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


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lniear"], "unknown suite 'lniear'; valid: linear, gated_linear, mlp, softmax"),
        (["linear", "--providers", "cudnn"], "unknown provider 'cudnn'; valid: ampkernels, eager"),
        (
            ["linear", "--shapes", "12x34"],
            "unknown shape '12x34'; valid: a shape MxNxK, or one of nine: 4096x4096x4096",
        ),
        (["softmax", "--shapes", "nine"], "unknown shape 'nine'; valid: a shape MxN, or one of rows: 65536x256"),
        (["linear", "--dtype", "int8"], "unknown dtype 'int8'; valid: bf16, fp16, fp32"),
        (["linear", "--device", "tpu"], "unknown device 'tpu'; valid: cpu, cuda"),
        (["linear", "--accumulate", "fp8"], "unknown accumulate 'fp8'; valid: fp32, fp16, each with /CHUNK"),
        (["model", "--shapes", "gpt5"], "unknown shape 'gpt5'; valid: gpt2-small, llama-8-layers, vit-b, bert-base"),
        (["linear", "--direction", "up"], "invalid choice: 'up'"),
        (["linear", "--dtype", ","], "argument --dtype: names nothing"),
        (["linear", "--compile-mode", "fast"], "invalid choice: 'fast' (choose from"),
        (["linear", "--out", "/dev/null/folder"], "Not a directory: '/dev/null/folder'"),
        (["linear", "softmax", "--shapes", "nine"], "softmax: unknown shape 'nine'; valid: a shape MxN"),
        (["model", "--providers", "liger"], "none of the providers liger; valid: eager, ampkernels, compile"),
        (["train", "--providers", "liger"], "none of the providers liger; valid: eager, ampkernels"),
    ],
)
def test_bad_arguments_list_the_valid_ones(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments if "--device" in arguments else [*arguments, "--device", "cpu"])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_nothing_is_measured_before_every_argument_is_checked(only, tmp_path):
    only(Fake("never", lambda *_: pytest.fail("measured")))
    with pytest.raises(SystemExit):
        cli.main(["linear", "softmax", "--shapes", "4x4x4", "--device", "cpu", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_every_column(only, tmp_path, capsys):
    only(Eager())
    arguments = ["rms_norm", "softmax", "--shapes", "8x64", "--device", "cpu", "--quick", "--commit", "abc123"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    path = tmp_path / "rms_norm-softmax-quick.csv"
    rows = read_rows(path)
    assert path.read_text().splitlines()[0].split(",") == COLUMNS
    assert [(r.op, r.direction) for r in rows] == [
        ("rms_norm", "fwd"), ("rms_norm", "bwd"), ("softmax", "fwd"), ("softmax", "bwd"),
    ]  # fmt: skip
    for row in rows:
        assert row.status == "ok" and row.commit == "abc123" and row.torch == torch.__version__
        assert row.p20_us <= row.median_us <= row.p80_us and row.call_us > 0
        assert row.gpu and row.date and row.csrc_digest and row.version
    assert "4 rows in" in capsys.readouterr().out


def test_interrupting_saves_what_was_measured(only, tmp_path, capsys):
    def interrupted(op, *tensors):
        if op == "softmax":
            raise KeyboardInterrupt
        return EAGER[op](*tensors)

    only(Fake("fake", interrupted))
    arguments = ["rms_norm", "softmax", "--shapes", "8x64", "--device", "cpu", "--quick", "--direction", "fwd"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 130
    rows = read_rows(tmp_path / "rms_norm-softmax-quick.csv")
    assert [(r.op, r.status) for r in rows] == [("rms_norm", "ok")]
    assert "interrupted after" in capsys.readouterr().out


def test_interrupting_a_step_saves_the_rows_that_it_has_measured(tmp_path, monkeypatch, capsys):
    from benchmarks import training

    def interrupted(task, device, mode, providers):
        if mode == "fp16":
            raise KeyboardInterrupt
        result = training.Result(mode, "eager", task, "cpu", False, None, None, [1.0], step_s=[1.0], samples_per_s=1.0)
        return {"eager": result}

    monkeypatch.setattr(training, "train", interrupted)
    assert cli.main(["train", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 130
    assert [(r.dtype, r.status) for r in read_rows(tmp_path / "train-quick.csv")] == [
        ("fp32", "ok"),
        ("tf32", "skipped"),
    ]


def test_interrupting_before_anything_is_measured_ends_quietly(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "precompile", interrupted)
    assert cli.main(["softmax", "--device", "cpu", "--precompile", "2"]) == 130
    assert "interrupted before anything was measured" in capsys.readouterr().err


def test_list_names_everything(capsys):
    assert cli.main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*suites.SUITES, *PROVIDERS, "8192x28672x4096", "1024x131072", "llama-8-layers", "width=4096"):
        assert name in out


def test_shapes_go_to_the_suites_that_know_them():
    shares = suites.share_shapes(["nine", "rows", "8x64"], ["linear", "softmax", "train"], ["vit-b"])
    assert shares == {"linear": ["nine"], "softmax": ["rows", "8x64"]}


def test_the_csv_can_be_named(only, tmp_path):
    only(Eager())
    options = ["softmax", "--shapes", "8x64", "--quick", "--device", "cpu", "--name", "mine", "--out", str(tmp_path)]
    assert cli.main(options) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]


def test_every_roof_is_measured_whether_or_not_a_row_needs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "PROVIDERS", {"eager": Eager()})
    monkeypatch.setattr(Budget, "quick", classmethod(lambda cls: SHORT))
    monkeypatch.setattr(Roofs, "_buffer_bytes", lambda self: 1 << 20)
    monkeypatch.setattr(Roofs, "_sustained", lambda self, call: float(call() is not None))
    options = [
        "linear",
        "--shapes",
        "8x8x8",
        "--direction",
        "fwd",
        "--quick",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(options) == 0
    rows = read_rows(tmp_path / "linear-quick.csv")
    assert {r.roof for r in rows if r.op == "roof"} == {"copy", "read", "read2write1", "gemm"}


def test_a_time_limit_begins_only_what_its_like_says_will_fit():
    now = time.perf_counter()
    assert cli.Deadline(None).fits("linear")
    deadline = cli.Deadline(100.0, started=now)
    assert deadline.fits("linear")
    deadline.record("linear", 200.0)
    assert not deadline.fits("linear") and deadline.fits("softmax")
    deadline.record("linear", 1.0)  # the first one compiled, say: half of what it took is still expected
    assert not deadline.fits("linear")
    deadline.record("linear", 1.0)
    assert deadline.fits("linear")
    assert not cli.Deadline(10.0, started=now).fits("model")


def test_what_a_time_limit_leaves_out_is_named(only, tmp_path, capsys):
    only(Fake("never", lambda *_: pytest.fail("measured")))
    options = ["softmax", "--shapes", "8x64", "--device", "cpu", "--limit", "0.001", "--out", str(tmp_path)]
    assert cli.main(options) == 0
    assert "left out for the limit of 0.001 s: roofs, softmax 8x64 bf16 fwd, softmax 8x64 bf16 bwd" in " ".join(
        capsys.readouterr().out.split()
    )
    assert read_rows(tmp_path / "softmax.csv") == []


def test_the_quick_set_reaches_every_suite_before_any_second_shape(monkeypatch, tmp_path):
    monkeypatch.setattr(suites, "QUICK_CPU", suites.QUICK)
    options = cli._parser().parse_args(["all", "--quick", "--device", "cpu", "--out", str(tmp_path)])
    run = cli.Run(options)
    tasks = list(run.tasks())
    first = [task for task in tasks if not task.extra]
    assert {task.suite for task in first} == {"roofs", *suites.SUITES}
    for suite in suites.OP_SUITES:
        names = [task.name for task in first if task.suite == suite]
        assert [name.split()[-1] for name in names] == ["fwd", "bwd"]
    assert any(task.extra for task in tasks)
    notes = " ".join(run.notes())
    assert all(name in notes for name in ("compile", "quack", "quack_mm", "python -m benchmarks all"))
    assert {p.name for p in run.providers} >= {"ampkernels", "eager", "liger"}


def test_a_quick_run_on_a_gpu_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(cli, "_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(cli, "environment", lambda device, commit: environment(CPU, commit))
    assert cli.Run(cli._parser().parse_args(["--quick"])).deadline.seconds == cli.QUICK_S < 60
    assert cli.Run(cli._parser().parse_args(["softmax"])).deadline.seconds is None


def test_the_nine_shapes_and_the_sweep_are_there():
    points = suites.op_points("linear", torch.device("cuda"), [torch.bfloat16])
    forward = {p.shape for p in points if p.direction == "fwd"}
    assert set(suites.NINE) <= forward
    assert {m for m, n, k in forward if (n, k) == (14336, 4096)} >= {1, 16, 64, 1024, 16384}
    assert any(n % 8 and k % 8 for _, n, k in forward)
    assert len(points) == len(set(points))


# --------------------------------------------------------------------------------------------------- results and report


def test_rows_survive_the_csv(tmp_path):
    row = Row("s", "linear", "1x2x3", "bf16", "fp32/512", "fwd", "ampkernels", median_us=1.5, rank=2, rel_l2=math.nan)
    row.reason = 'said "no", twice'
    with CsvWriter(tmp_path / "r.csv") as writer:
        writer.write([environment(CPU, "abc").stamp(row)])
    (back,) = read_rows(tmp_path / "r.csv")
    assert math.isnan(back.rel_l2)
    row.rel_l2 = back.rel_l2 = None
    assert back == row


def results_folder(path, digest):
    rows = []
    for provider, accumulate, us in (
        ("eager", "library", 10.0),
        ("quack", "library", 6.0),
        ("ampkernels", "fp32", 5.0),
    ):
        row = Row("softmax", "softmax", "65536x256", "bf16", accumulate, "fwd", provider, median_us=us)
        row.speedup, row.rel_l2, row.roof_share = 10.0 / us, 1.7e-3, 0.9
        row.gpu, row.torch, row.commit, row.date, row.csrc_digest = "Test GPU", "2.x", "abc", "2026-01-02T", digest
        rows.append(row)
    path.mkdir(parents=True)
    with CsvWriter(path / "softmax.csv") as writer:
        writer.write(rows)


def test_two_runs_are_compared_by_their_ratios(tmp_path, capsys):
    for name, speedup in (("a", 1.50), ("b", 1.53), ("c", 1.60)):
        slow = Row("linear", "linear", "1x2x3", "bf16", "fp32", "fwd", "ampkernels", median_us=2000.0, speedup=speedup)
        quick = Row(
            "linear", "linear", "4x5x6", "bf16", "fp32", "fwd", "ampkernels", median_us=2.0, speedup=9 * speedup
        )
        with CsvWriter(tmp_path / f"{name}.csv") as writer:
            writer.write([slow, quick])
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]) == 0
    assert "1 of 1 ratios above 1000 µs agree within 3%" in capsys.readouterr().out
    assert cli.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "c.csv")]) == 1
    assert "OFF" in capsys.readouterr().out


def test_a_run_is_compared_with_times_measured_before(tmp_path, capsys):
    def write(name, *times):
        rows = []
        for place, time_us in enumerate(times):
            row = Row("softmax", "softmax", f"8x{place}", "bf16", "library", "fwd", "quack", median_us=time_us)
            row.status = "ok" if time_us is not None else "error"
            rows.append(row)
        with CsvWriter(tmp_path / f"{name}.csv") as writer:
            writer.write(rows)
        return str(tmp_path / f"{name}.csv")

    before = write("before", 100.0, 200.0, None)
    assert cli.main(["baselines", write("near", 109.0, 181.0, None), "--against", before]) == 0
    assert "3 of 3 times are within 10% of those measured before" in capsys.readouterr().out
    assert cli.main(["baselines", write("far", 111.0, 200.0, 5.0), "--against", before]) == 1
    out = capsys.readouterr().out
    assert out.count("OFF") == 2 and "+11.0%" in out and "1 of 3" in out
    assert cli.main(["baselines", write("part", 100.0), "--against", before]) == 1
    assert "1 of 3 times are within 10% of those measured before; 2 were not measured" in capsys.readouterr().out
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(SystemExit):
        cli.main(["baselines", str(folder), "--against", before])
    assert "no CSV" in capsys.readouterr().err


def test_one_full_run_measures_every_baseline():
    points = {
        (op, "x".join(map(str, p.shape)), p.direction)
        for op in suites.OP_SUITES
        for p in suites.op_points(op, torch.device("cuda"), [torch.bfloat16])
    }
    expected = [row for row in read_rows(compare.BASELINES) if row.op != "roof"]
    assert len(expected) == 158 and sum(row.median_us is None for row in expected) == 2
    assert {(row.op, row.shape, row.direction) for row in expected} <= points
    assert {row.provider.split()[0] for row in expected} <= set(PROVIDERS)
    linear = next(r for r in expected if (r.op, r.shape, r.provider) == ("linear", "16384x3072x768", "cublaslt"))
    assert linear.median_us == 150.0


def test_report_writes_between_the_markers_only(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "csrc_digest", lambda: "today")
    results_folder(tmp_path / "results" / "test-gpu", "today")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    messages = report.write(tmp_path / "results", readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text and "### Test GPU" in text
    cells = "10.0 | 6.0 quack | 5.0 fp32 | 2.00 | 1.20 | 0.90 | 1.7e-03 | 1.7e-03 |"
    assert f"| softmax | 65536x256 | fwd | bf16 | {cells}" in text
    assert not any("digest" in m for m in messages) and "digest" not in text
    report.write(tmp_path / "results", readme)
    assert readme.read_text() == text


def test_report_shows_models_and_the_longest_training(tmp_path):
    def row(suite, op, shape, dtype, provider, **fields):
        return Row(suite, op, shape, dtype, "", "step", provider, **fields)

    advice = {"provider": "recommended", "op": "train-mlp", "shape": "", "dtype": "", "suite": "train"}
    rows = [
        row("model", "vit-b", "12x64x224", "bf16", "eager", median_us=8000.0, speedup=1.0),
        row("model", "vit-b", "12x64x224", "bf16", "ampkernels", median_us=4000.0, speedup=2.0),
        row("model", "vit-b", "12x64x224", "bf16", "compile", median_us=1.0, speedup=8000.0, status="wrong"),
        row("train", "train-mlp", "8x4x4", "bf16", "eager", rate=5.0, rounds=80, setting="80", reason="last loss 1"),
        row("train", "train-mlp", "8x4x4", "bf16", "eager", rate=7.0, rounds=10, setting="10"),
        row(**advice, rounds=80, setting="80 steps", reason="bf16: why"),
        row(**advice, rounds=10, setting="10 steps", reason="fp16: why"),
    ]
    with CsvWriter(tmp_path / "all.csv") as writer:
        writer.write(rows)
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    report.write(tmp_path, readme)
    text = readme.read_text()
    assert "| vit-b | 12x64x224 | step | bf16 | 8.00 | 4.00 (2.00x) |  |  |" in text
    assert "| train-mlp | 8x4x4 | bf16 | eager | 5 |" in text and "| 7 |" not in text
    assert "After 80 steps of training, the harness recommends bf16: why." in text and "fp16" not in text


def test_times_of_two_runs_are_not_mixed(tmp_path):
    """A newer run without eager does not replace the point of one with it; where no run has eager, it is taken."""
    from benchmarks import plot

    def row(shape, provider, median, day):
        return Row(
            "linear", "linear", shape, "bf16", "", "fwd", provider, median_us=median, date=f"2026-01-{day:02}T00:00:00Z"
        )

    runs = {
        "all.csv": [row("1x2x3", "eager", 10.0, 1), row("1x2x3", "ampkernels", 8.0, 1)],
        "decode.csv": [row("1x2x3", "ampkernels", 5.0, 2), row("1x5x7", "ampkernels", 4.0, 2)],
    }
    for name, rows in runs.items():
        with CsvWriter(tmp_path / name) as writer:
            writer.write(rows)
    found = {(r.shape, r.provider): r.median_us for r in plot.load(tmp_path)}
    assert found == {("1x2x3", "eager"): 10.0, ("1x2x3", "ampkernels"): 8.0, ("1x5x7", "ampkernels"): 4.0}


def test_report_says_when_the_kernels_have_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "csrc_digest", lambda: "today")
    results_folder(tmp_path / "gpu", "yesterday")
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    messages = report.write(tmp_path / "gpu", readme)
    assert "csrc digest yesterday, today's is today" in messages[0]
    assert "measured with other kernels" in readme.read_text()


def test_report_needs_its_markers_and_results(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must hold <!-- benchmarks:begin -->"):
        report.write(tmp_path, readme)
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    with pytest.raises(ValueError, match="no CSV"):
        report.write(tmp_path, readme)


def test_plots_are_drawn_from_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    results_folder(tmp_path / "gpu", "today")
    written = plot.plot_folder(tmp_path / "gpu")
    assert {path.name for path in written} == {"roofline.png", "speedup-rows.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


# ------------------------------------------------------------------------------------------------------------ training


def test_training_records_what_the_scaler_did():
    from benchmarks import training

    task = training.Task(layers=2, width=16, batch=8, steps=25)
    result = training.train(task, CPU, "fp16", ["eager"])["eager"]
    assert len(result.losses) == len(result.step_s) == 25 and result.nonfinite_losses == 0
    assert result.scales[0][0] == 0
    grown = [scale for _, scale in result.scales]
    assert grown[-1] > grown[0] or result.skipped_steps > 0  # growth_interval is 20
    again = training.train(task, CPU, "fp16", ["eager"])["eager"]
    assert again.losses == result.losses  # however many steps the warm-up took


def test_skipped_steps_and_their_infinities_are_counted(monkeypatch):
    from benchmarks import training

    monkeypatch.setitem(training.SCALER, "init_scale", 2.0**40)
    task = training.Task(layers=2, width=16, batch=8, steps=6)
    result = training.train(task, CPU, "fp16", ["eager"])["eager"]
    assert result.skipped_steps == result.nonfinite_gradients == 6
    assert result.scales == [(step, 2.0 ** (39 - step)) for step in range(6)]
    assert result.losses == [result.losses[0]] * 6 and result.nonfinite_losses == 0


def test_what_throws_while_training_takes_only_itself_out(monkeypatch, tmp_path, capsys):
    ak = pytest.importorskip("ampkernels")
    from benchmarks import training

    def broken(model):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(ak, "fuse", broken)
    monkeypatch.setattr(training, "WARM_UP_S", 0.0)
    monkeypatch.setattr(training.Task, "of", classmethod(lambda cls, device, quick: cls(2, 16, 8, 3)))
    assert cli.main(["train", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "train.csv")
    found = {(r.dtype, r.provider): (r.status, r.reason) for r in rows}
    for mode in ("fp32", "fp16", "bf16"):
        assert found[mode, "ampkernels"] == ("error", "RuntimeError: no kernel image")
        assert found[mode, "eager"][0] == "ok"
    assert found["tf32", ""] == ("skipped", "a CPU has no TF32")


def test_training_prints_what_it_takes_to_do_it_again(monkeypatch, tmp_path, capsys):
    pytest.importorskip("ampkernels")
    from benchmarks import training

    before = torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(training, "WARM_UP_S", 0.0)
    monkeypatch.setattr(training.Task, "of", classmethod(lambda cls, device, quick: cls(2, 16, 8, 3)))
    assert cli.main(["train", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert torch.backends.cuda.matmul.allow_tf32 == before
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "samples/s", "last loss", "loss scale", "skipped", "inf/NaN loss, grad",
        "Task(layers=2, width=16, batch=8, steps=3, lr=0.0001, seed=0), AdamW, on cpu, torch",
        "fp32: no autocast, TF32 off", "bf16: autocast bfloat16",
        "fp16: autocast float16, TF32 off, GradScaler(init_scale=65536, growth_factor=2", "recommended here:",
    ):  # fmt: skip
        assert text in out
    rows = [r for r in read_rows(tmp_path / "train.csv") if r.status == "ok" and r.median_us]
    assert {(r.dtype, r.provider) for r in rows} == {
        (mode, provider) for mode in ("fp32", "fp16", "bf16") for provider in ("eager", "ampkernels")
    }
    for row in rows:
        assert row.p20_us <= row.median_us <= row.p80_us and row.speedup > 0 and "TF32 off" in row.setting
    record = json.loads((tmp_path / "train.json").read_text())
    assert [len(run["losses"]) for run in record["runs"]] == [3] * 6 and record["recommended"]


@pytest.mark.parametrize(
    ("bf16_rate", "bf16_loss", "expected"),
    [(99.0, 0.1, "bf16"), (50.0, 0.1, "fp16"), (200.0, 0.2, "fp16"), (200.0, 0.1, "bf16")],
)
def test_the_recommended_dtype_is_the_fastest_that_loses_nothing(bf16_rate, bf16_loss, expected):
    from benchmarks import training

    task = training.Task(1, 1, 1, 1)

    def result(mode, rate, loss):
        return training.Result(mode, "eager", task, "cpu", False, None, None, losses=[loss], samples_per_s=rate)

    assert training.recommend([]).startswith("no recommendation")

    results = [result("fp32", 10.0, 0.1), result("fp16", 100.0, 0.101), result("bf16", bf16_rate, bf16_loss)]
    assert training.recommend(results).startswith(expected)


# -------------------------------------------------------------------------------------------------------------- models


def model_rows(name, kinds):
    from benchmarks import models

    size = models.Size(1, 1, 224 if name == "vit-b" else 16)
    run = models._Run(models.MODELS[name], size, CPU, torch.bfloat16, SHORT)
    return list(run.rows(kinds, ("eager", "ampkernels")))


@pytest.mark.parametrize("name", ["gpt2-small", "llama-8-layers", "vit-b", "bert-base"])
def test_models_are_built_checked_and_timed(name):
    from benchmarks import models

    pytest.importorskip("ampkernels")
    pytest.importorskip(models.MODELS[name].module)
    kinds = ("fwd", "step") if name == "bert-base" else ("fwd",)  # a step takes a CPU seconds
    rows = model_rows(name, kinds)
    assert [(r.direction, r.provider) for r in rows] == list(itertools.product(kinds, ("eager", "ampkernels")))
    for row in rows:
        assert row.status == "ok", row.reason
        assert row.median_us > 0 and row.rel_l2 < 0.05 and row.max_ulp > 0 and row.speedup > 0 and row.rank in (1, 2)
        assert row.unit == ("images/s" if name == "vit-b" else "tokens/s")
    assert "fused" in rows[1].reason


class Block(torch.nn.Module):
    """A model of one block."""

    def __init__(self):
        super().__init__()
        self.linear, self.compiled = torch.nn.Linear(8, 8), {}

    def compile(self, **options):
        self.compiled = options

    def forward(self, x):
        return self.linear(x)


def tiny_model(**changes):
    from benchmarks import models

    fields = {
        "name": "tiny",
        "module": "torch",
        "build": lambda size: Block(),
        "input": lambda size, device: torch.randn(size.batch, size.length, 8, device=device),
        "forward": lambda model, x: model(x),
        "blocks": lambda model: [model],
    }
    size = models.Size(1, 2, 4)
    model = models.Model(**{**fields, **changes}, full=size, quick=size, small=size)
    return models._Run(model, size, CPU, torch.bfloat16, SHORT)


def test_a_model_that_throws_says_so_in_each_row(monkeypatch):
    ak = pytest.importorskip("ampkernels")

    def broken(*arguments):
        raise TypeError("unexpected keyword argument 'use_cache'")

    monkeypatch.setattr(ak, "fuse", broken)
    rows = {
        (r.provider, r.direction): r for r in tiny_model().rows(("fwd", "step"), ("eager", "ampkernels", "compile"))
    }
    for direction in ("fwd", "step"):
        assert rows["eager", direction].status == rows["compile", direction].status == "ok"
        fused = rows["ampkernels", direction]
        assert (fused.status, fused.reason) == ("error", "TypeError: unexpected keyword argument 'use_cache'")
    assert rows["compile", "fwd"].reason == "each block compiled"
    every = list(tiny_model(build=broken).rows(("fwd",), ("eager", "compile")))
    assert [(r.provider, r.status) for r in every] == [("eager", "error"), ("compile", "error")]
    assert "use_cache" in every[0].reason


def test_a_model_that_runs_out_of_memory_says_so():
    calls = []

    def hungry(model, x):
        calls.append(model)
        if isinstance(model, Block) and model.compiled:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x)

    rows = list(tiny_model(forward=hungry).rows(("fwd",), ("eager", "compile")))
    assert [(r.provider, r.status) for r in rows] == [("eager", "ok"), ("compile", "oom")]


def test_a_wrong_model_is_not_ranked():
    def forward(model, x):
        return model(x) * (1.5 if model.compiled else 1.0)

    rows = list(tiny_model(forward=forward).rows(("fwd",), ("eager", "compile")))
    assert [(r.status, r.rank) for r in rows] == [("ok", 1), ("wrong", None)]


def test_a_model_whose_package_is_absent_or_whose_dtype_has_no_amp_is_skipped():
    rows = list(tiny_model(module="no_such_module_here").rows(("fwd", "step"), ("eager",)))
    assert [(r.status, r.reason) for r in rows] == [("skipped", "no_such_module_here is not installed")] * 2
    run = tiny_model()
    run.dtype = torch.float32
    assert {(r.status, r.reason) for r in run.rows(("fwd",), ("eager",))} == {
        ("skipped", "automatic mixed precision has no fp32 mode")
    }


def test_model_variants_follow_the_providers():
    from benchmarks import models

    assert models._variants(["eager", "compile", "liger"]) == ["eager", "compile"]
    assert models._variants(["ampkernels", "eager", "compile"]) == list(models.VARIANTS)
    jobs = models.compilations(CPU, [torch.bfloat16], ["fwd", "bwd"], ["vit-b"], ["eager", "compile"], quick=False)
    assert len(jobs) == 2  # forward and step of the one variant that compiles


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
