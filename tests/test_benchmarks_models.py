"""The suites of whole models and of training."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import cli
from benchmarks.records import read_rows
from benchmarks.timing import Budget

CPU = torch.device("cpu")
SHORT = Budget(warmup_s=0.01, min_rounds=5, max_rounds=5, cpu_candidate_s=0.0)


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
