"""ampkernels.numerics: the instruments measure what they say, and see what they are for."""

import math

import pytest
import torch

import ampkernels as ak
from ampkernels import numerics, reference
from ampkernels.numerics import data, fuzz, golden, table

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

needs_emulation = pytest.mark.skipif(
    not hasattr(torch.ops.ampkernels, "emulate_linear"), reason="the operator emulate_linear is not built"
)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance(dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([1.0, -1.0, 0.0, info.tiny, info.max, 2.0], dtype=dtype)
    up = torch.nextafter(x, torch.full_like(x, math.inf)) if dtype not in (torch.float16, torch.bfloat16) else None
    assert numerics.ulp_distance(x, x).tolist() == [0] * 6
    if up is not None:
        assert numerics.ulp_distance(up, x).tolist() == [1] * 6
    one = torch.tensor([1.0], dtype=dtype)
    assert numerics.ulp_distance(one + info.eps, one).item() == 1
    assert numerics.ulp_distance(one * 2, one).item() == round(1 / info.eps)
    smallest = torch.tensor([info.tiny * info.eps], dtype=dtype)
    assert numerics.ulp_distance(smallest, -smallest).item() == 2
    assert numerics.ulp_distance(torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)).item() == 0
    inf, nan = torch.tensor([math.inf], dtype=dtype), torch.tensor([math.nan], dtype=dtype)
    assert numerics.ulp_distance(inf, torch.tensor([info.max], dtype=dtype)).item() == 1
    assert numerics.ulp_distance(nan, nan).item() == 0
    assert numerics.ulp_distance(nan, one).item() == torch.iinfo(torch.int64).max
    far = numerics.ulp_distance(torch.tensor([info.max], dtype=dtype), torch.tensor([-info.max], dtype=dtype)).item()
    assert far > 2**14


def test_ulp_distance_refuses():
    with pytest.raises(ValueError, match="share a floating-point dtype"):
        numerics.ulp_distance(torch.zeros(2), torch.zeros(2).double())
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        numerics.ulp_distance(torch.zeros(2), torch.zeros(3))


def test_error_report():
    expected = torch.tensor([1.0, 2.0, -4.0, 8.0], dtype=torch.float64)
    actual = expected.float()
    actual[0] = 1 + 2**-23
    actual[1] = 2 + 3 * 2**-22
    actual[2] = -4 + 5 * 2.0**-22  # below 4 the spacing halves
    report = numerics.error_report(actual, expected)
    assert report.max_ulp == 5
    assert report.histogram == {0: 1, 1: 1, 2: 0, 4: 1, 8: 1}
    assert report.max_abs == 5 * 2.0**-22
    assert report.correctly_rounded == 0.25
    assert report.shrink == pytest.approx((-(2.0**-23) - 3 * 2.0**-22 + 5 * 2.0**-22) / 15)
    assert report.relative_l2 == pytest.approx(2.0**-23 * math.sqrt(1 + 36 + 100) / math.sqrt(85))
    assert "max 5 ulp" in str(report)


def test_error_report_counts_what_is_not_finite():
    expected = torch.tensor([math.inf, 1e6, 1.0, math.nan], dtype=torch.float64)
    report = numerics.error_report(torch.tensor([math.inf, math.inf, math.inf, math.nan]).half(), expected)
    assert report.non_finite == 1  # 1e6 rounds to infinity in fp16; 1.0 does not
    assert numerics.error_report(torch.zeros(0), torch.zeros(0).double()).max_ulp == 0
    with pytest.raises(ValueError, match="float64"):
        numerics.error_report(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("d", [d for d in numerics.DTYPES if d.dtype is not None], ids=lambda d: d.name)
def test_dtypes(d):
    info = torch.finfo(d.dtype)
    assert (d.largest, d.smallest_normal, 2 * d.unit_roundoff) == (info.max, info.tiny, info.eps)
    if d.dtype in FLOATS:
        n = d.largest_integer
        assert torch.tensor(float(n + 1), dtype=torch.float64).to(d.dtype).item() in (n, n + 2)
        assert torch.tensor(float(n), dtype=torch.float64).to(d.dtype).item() == n
    smallest = torch.tensor(d.smallest_subnormal, dtype=torch.float64)
    assert smallest.to(d.dtype).double() == smallest
    assert (smallest / 2).to(d.dtype).double() == 0


# --------------------------------------------------------------------------------------------------------------- bounds


@needs_emulation
@pytest.mark.parametrize("kind", ["normal", "uniform", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_emulation_stays_within_its_bound(dtype, kind):
    policies = ["fp32", "fp32/512", "fp32/128"] + (["fp16", "fp16/128"] if dtype == torch.float16 else [])
    for k in (16, 200, 4096):
        x, w = (data.generate(kind, (8, k), dtype, seed) for seed in (1, 2))
        size = x.double().abs() @ w.double().abs().T
        for policy in policies:
            if policy.startswith("fp16") and (kind == "wide" or k > 2000):
                continue  # beyond 65504
            for arch in ("sm90", "sm80"):
                y = numerics.emulate(x, w, accumulate=policy, out_dtype=torch.float32, arch=arch).double()
                error = ((y - x.double() @ w.double().T).abs() / size).max()
                assert error <= numerics.forward_bound(k, policy, arch=arch)


def test_bounds_order():
    assert numerics.forward_bound(16384, "fp32/128") < numerics.forward_bound(16384, "fp32/512")
    assert numerics.forward_bound(16384, "fp32/512") < numerics.forward_bound(16384, "fp32") / 10
    assert numerics.forward_bound(65536, "fp16/128") < 9 * 2.0**-11
    assert numerics.forward_bound(0, "fp32") == 0
    with pytest.raises(ValueError, match="arch"):
        numerics.forward_bound(16, arch="sm70")


# ----------------------------------------------------------------------------------------------------------- invariance


def test_compare_bits():
    a = torch.tensor([1.0, 0.0, math.nan])
    assert not numerics.compare_bits(a, a.clone())
    assert numerics.compare_bits(a, torch.tensor([1.0, -0.0, math.nan])).differing == 1
    assert numerics.compare_bits(a, a.half())
    difference = numerics.compare_bits(a, torch.tensor([1 + 2**-23, 0.0, math.nan]), "here")
    assert str(difference) == "here: 1 of 3 differ, by up to 1 ulp"


def test_check_run_to_run_sees_a_difference():
    x = torch.randn(4, 5)
    calls = []

    def drifting(x):
        calls.append(1)
        return {"y": x + (1e-7 if len(calls) == 3 else 0.0)}

    found = numerics.check_run_to_run(drifting, x, runs=5)
    assert [d.what for d in found] == ["run 3 against the first"]
    assert numerics.check_run_to_run(torch.nn.Linear(5, 3), x) == []


def test_check_batch_sees_a_difference():
    x = torch.randn(50, 5)
    assert numerics.check_batch(lambda x: x * 2, x) == []
    found = numerics.check_batch(lambda x: x * (1 + 2**-20 * (x.shape[0] == 3)), x)
    assert found and all(" of 50" in d.what for d in found)
    assert numerics.check_batch(lambda x: x - x.mean(0), x)


def test_check_layout_sees_a_difference():
    x = torch.randn(6, 10)
    assert numerics.check_layout(lambda x: x.exp(), x) == []
    found = numerics.check_layout(lambda x: x + float(not x.is_contiguous()), x)
    assert "transposed strides" in [d.what for d in found]


def test_row_ops_are_invariant():
    x = torch.randn(40, 300).bfloat16()
    norm = ak.FusedLayerNorm(300)
    for check in (numerics.check_batch, numerics.check_layout, numerics.check_run_to_run):
        assert check(norm, x) == []


# ------------------------------------------------------------------------------------------------------------ emulation


@needs_emulation
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_emulate(activation, gated):
    x, w = torch.randn(2, 3, 100).bfloat16(), torch.randn(36, 100).bfloat16()
    bias = torch.randn(36)
    y = numerics.emulate(x, w, bias, activation=activation, gated=gated, accumulate="fp32/64")
    op, bound = ("gated_linear", reference.gated_linear_bound) if gated else ("linear", reference.linear_bound)
    exact = getattr(reference, op)(x, w, bias, activation=activation)
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= bound(x, w, bias, activation=activation)).all()


@needs_emulation
@pytest.mark.parametrize("residual_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_emulate_adds_a_residual(activation, residual_dtype):
    x, w, bias = torch.randn(2, 3, 100).bfloat16(), torch.randn(36, 100).bfloat16(), torch.randn(36)
    residual = torch.randn(3, 36, 2).to(residual_dtype).permute(2, 0, 1)
    options = {"activation": activation, "accumulate": "fp32/64"}
    y = numerics.emulate(x, w, bias, residual=residual, **options)
    act = numerics.emulate(x, w, bias, out_dtype=torch.float32, **options)
    assert torch.equal(y, (act + residual.float()).to(residual_dtype))


def test_emulate_refuses():
    x, w = torch.randn(2, 8).half(), torch.randn(5, 8).half()
    for kwargs, message in [
        ({"arch": "sm70"}, "arch must be"),
        ({"activation": "swish"}, "activation must be"),
        ({"gated": True}, "even number of rows"),
        ({"bias": torch.zeros(4)}, r"bias must have shape \(5,\)"),
        ({"residual": torch.zeros(5)}, r"residual must have the result's shape \(2, 5\), got \(5,\)"),
        ({"residual": torch.zeros(2, 5).double()}, "residual must be float16, bfloat16 or float32, got torch.float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            numerics.emulate(x, w, **kwargs)
    with pytest.raises(ValueError, match="residual must be None if gated"):
        numerics.emulate(x, w[:4], residual=torch.zeros(2, 2), gated=True)
    with pytest.raises(TypeError, match="share a dtype"):
        numerics.emulate(x, w.bfloat16())
    with pytest.raises(ValueError, match="in = 8"):
        numerics.emulate(x, w.T)
    with pytest.raises(ValueError, match=r"fp16.*float16"):
        numerics.emulate(x.bfloat16(), w.bfloat16(), accumulate="fp16/64")


# ------------------------------------------------------------------------------------------------- data, golden, command


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("normal", "e858eb0a94fcb51f"),
        ("uniform", "d25c998b908fc380"),
        ("wide", "20394264bdd8a0d0"),
        ("subnormal", "02fc96ebff5d7ed5"),
        ("special", "fb4d517542bcd793"),
    ],
)
def test_data_never_changes(kind, expected):
    """Golden files would be worthless if their inputs moved."""
    x = data.generate(kind, (33, 65), torch.bfloat16, 7)
    assert golden.digest(x) == expected
    assert torch.equal(x[:3].nan_to_num(), data.generate(kind, (3, 65), torch.bfloat16, 7).nan_to_num())


def test_data_is_what_it_says():
    x = data.generate("normal", (100_000,), torch.float32, 0).double()
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1.155) < 0.01
    u = data.generate("uniform", (100_000,), torch.float32, 1).double()
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack([x, u]))[0, 1]) < 0.02
    for dtype in (torch.float16, torch.bfloat16):
        s = data.generate("subnormal", (1000,), dtype, 0).abs()
        assert ((s < torch.finfo(dtype).tiny).float().mean()) > 0.8 and (s > 0).float().mean() > 0.9
    special = data.generate("special", (100_000,), torch.float16, 0)
    assert special.isnan().any() and (special == math.inf).any() and (special == -math.inf).any()
    with pytest.raises(ValueError, match="kind"):
        data.generate("cauchy", (1,), torch.float32, 0)


def test_golden_names_are_unique():
    names = [case.name for case in golden.cases()]
    assert len(set(names)) == len(names)


def test_golden_digest_sees_one_bit_and_no_nan_payload():
    x = torch.randn(5, 7)
    y = x.clone()
    y[2, 3] = torch.nextafter(y[2, 3], torch.tensor(9.0))
    assert golden.digest(x) == golden.digest(x.T.contiguous().T) != golden.digest(y)
    assert golden.digest(x) != golden.digest(x.reshape(7, 5))
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    assert golden.digest(nans[:1]) == golden.digest(nans[1:2]) == golden.digest(nans[2:])


def test_golden_round_trip(tmp_path, monkeypatch, capsys):
    """write, check, and a check that fails, on a few cases of the machine that runs the tests."""
    few = [case for case in golden.cases() if case.name.startswith("softmax bfloat16")]
    promised = [golden.Case(c.name, c.run, frozenset({"y"})) for c in few]
    monkeypatch.setattr(golden, "cases", lambda: iter(promised))
    path = tmp_path / "cpu.json"
    assert golden.main(["write", "--device", "cpu", "--out", str(path)]) == 0
    assert golden.main(["check", "--device", "cpu", str(path)]) == 0
    assert "3 of 3 digests are the same" in capsys.readouterr().out
    path.write_text(path.read_text().replace('y": "', 'y": "0', 1))
    assert golden.main(["check", "--device", "cpu", str(path)]) == 1
    assert "differs: softmax" in capsys.readouterr().out


@pytest.mark.parametrize("op", [*table.GEMMS, *table.ROWS])
def test_command(op, capsys):
    assert numerics.main(["--op", op, "--k", "32", "--rows", "4", "--columns", "4", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "eager" in out and "shrink" in out


def test_command_dtypes_and_plot(tmp_path, capsys):
    assert numerics.main(["--dtypes"]) == 0
    assert "65504" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    path = tmp_path / "error.png"
    numerics.main(["--k", "32", "64", "--rows", "4", "--columns", "4", "--device", "cpu", "--plot", str(path)])
    assert path.stat().st_size > 1000


def test_the_fuzz_finds_nothing_and_says_how_far_it_got(device, capsys):
    assert fuzz.main(["--cases", "4", "--seed", "1", "--device", device]) == 0
    printed = capsys.readouterr().out
    assert f"4 cases, seed 1, {device}: 0 differing bit patterns" in printed and "rows" in printed
    assert fuzz.main(["--cases", "4", "--limit", "0", "--device", device]) == 0
    assert "0 cases of 4, then the limit" in capsys.readouterr().out


def test_the_fuzz_fails_where_a_bit_differs(monkeypatch, capsys):
    def spoilt(case, device, choose, tallies):
        tallies["rows"].differing += 1

    monkeypatch.setattr(fuzz, "compare", spoilt)
    assert fuzz.main(["--cases", "1", "--device", "cpu"]) == 1
    assert "1 differing bit patterns" in capsys.readouterr().out
