"""What the harness does with results: the CSV, comparisons, tables and plots."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("rich")

from benchmarks import cli, compare, report, suites
from benchmarks.providers import PROVIDERS
from benchmarks.records import CsvWriter, Row, environment, read_rows


def test_rows_survive_the_csv(tmp_path):
    row = Row("s", "linear", "1x2x3", "bf16", "fp32/512", "fwd", "ampkernels", median_us=1.5, rank=2, rel_l2=math.nan)
    row.reason = 'said "no", twice'
    with CsvWriter(tmp_path / "r.csv") as writer:
        writer.write([environment(torch.device("cpu"), "abc").stamp(row)])
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


def test_the_run_with_most_peers_is_shown(tmp_path):
    """Of the runs of today's kernels: a short one that is newer must not hide a peer that was faster."""
    from benchmarks import plot

    def run(day, digest, **medians):
        what = ("linear", "linear", "1x2x3", "bf16")
        date = f"2026-01-{day:02}T00:00:00Z"
        return [
            Row(*what, "", "fwd", provider, median_us=us, date=date, csrc_digest=digest)
            for provider, us in medians.items()
        ]

    runs = {
        "old": run(1, "yesterday", eager=10.0, ampkernels=9.0, quack=5.0, liger=6.0, compile=6.5),
        "peers": run(2, "today", eager=10.0, ampkernels=8.0, quack=5.0),
        "quick": run(3, "today", eager=10.0, ampkernels=7.0),
    }
    for name, rows in runs.items():
        with CsvWriter(tmp_path / f"{name}.csv") as writer:
            writer.write(rows)
    assert {r.provider: r.median_us for r in plot.load(tmp_path)} == {"eager": 10.0, "ampkernels": 8.0, "quack": 5.0}


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
