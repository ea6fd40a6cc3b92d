"""The harness's command line: what it accepts, what it says, and that nothing measured is lost."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("rich")

from benchmark_fakes import CPU, SHORT, Fake, KnownRoofs

from benchmarks import cli, suites
from benchmarks.ops import OPS
from benchmarks.providers import (
    EAGER,
    PROVIDERS,
    Eager,
)
from benchmarks.records import COLUMNS, environment, read_rows
from benchmarks.roofs import Roofs
from benchmarks.timing import Budget

pytestmark = pytest.mark.usefixtures("few_buffers")


@pytest.fixture
def only(monkeypatch):
    """Makes the given providers the only ones there are, and measuring quick."""

    def install(*providers):
        monkeypatch.setattr(cli, "PROVIDERS", {p.name: p for p in providers})
        monkeypatch.setattr(cli, "Roofs", KnownRoofs)
        monkeypatch.setattr(Budget, "quick", classmethod(lambda cls: SHORT))

    return install


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["softmax", "--residual"], "--residual is for linear, layer_norm, rms_norm, got softmax"),
        (["rms_norm", "--residual", "--direction", "bwd"], "--residual measures the forward alone"),
        (["linear", "--residual", "--direction", "bwd"], "--residual measures the forward alone"),
        (["softmax", "--layout", "odd"], "contiguous"),
        (["softmax", "host", "--layout", "strided"], "--layout is for linear, gated_linear"),
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


def test_residual_measures_forwards_alone(only, tmp_path):
    only(Eager())
    arguments = ["linear", "--shapes", "8x16x32", "--device", "cpu", "--quick", "--residual", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    (row,) = read_rows(tmp_path / "linear-quick.csv")
    assert (row.direction, row.setting, row.status) == ("fwd", "bias, residual", "ok")


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
    assert {task.suite for task in first} == {"roofs", *suites.SUITES} - {"host"}
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
