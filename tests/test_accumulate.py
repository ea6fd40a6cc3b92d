"""`Accumulate`: its forms, which policy is in force, and what is refused until kernels exist."""

import copy
import importlib
import pickle
import re
import threading
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
from bounds import assert_within
from cases import randn

import ampkernels as ak
from ampkernels import reference
from ampkernels.accumulate import FP32, resolve

X, W = torch.randn(4, 8), torch.randn(8, 8)


@pytest.mark.parametrize(
    ("text", "dtype", "chunk"),
    [
        ("fp32", torch.float32, None),
        ("fp32/512", torch.float32, 512),
        ("fp16", torch.float16, None),
        ("fp16/128", torch.float16, 128),
        ("fp32/16", torch.float32, 16),
    ],
)
def test_text_form_round_trips(text, dtype, chunk):
    policy = ak.Accumulate.parse(text)
    assert policy == ak.Accumulate(dtype, chunk) and str(policy) == text
    assert ak.Accumulate.parse(policy) is policy
    assert hash(policy) == hash(ak.Accumulate(dtype, chunk))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


def test_default():
    assert ak.Accumulate() == ak.Accumulate.parse("fp32") == FP32


@pytest.mark.parametrize(
    "text", ["", "fp8", "FP32", "fp32/", "fp32/x", "fp32/-16", "fp32/1.5", "/512", "fp32/512/16", "fp32 ", "fp32/²"]
)
def test_text_that_names_nothing(text):
    with pytest.raises(
        ValueError, match=r"^Accumulate: must be 'fp32', 'fp16', 'fp32/<chunk>' or 'fp16/<chunk>', got "
    ):
        ak.Accumulate.parse(text)


@pytest.mark.parametrize("chunk", [0, 8, 17, -16, 16.0, True, "16"])
def test_chunk_is_a_positive_multiple_of_16(chunk):
    with pytest.raises(ValueError, match=r"^Accumulate: chunk must be a positive multiple of 16 or None, got "):
        ak.Accumulate(torch.float32, chunk)


def test_chunk_in_text_is_checked_too():
    with pytest.raises(ValueError, match="chunk must be a positive multiple of 16 or None, got 100"):
        ak.Accumulate.parse("fp32/100")


def test_dtype_is_fp32_or_fp16():
    with pytest.raises(
        ValueError, match=r"^Accumulate: dtype must be torch.float32 or torch.float16, got torch.bfloat16"
    ):
        ak.Accumulate(torch.bfloat16)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"^Accumulate: must be an Accumulate or a string such as 'fp32/512', got int"):
        ak.linear(X, W, accumulate=512)


def test_frozen():
    with pytest.raises(AttributeError):
        ak.Accumulate().chunk = 16  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------------ which is in force


def in_force(argument=None) -> str:
    """The policy that a call would be refused for, or "fp32"."""
    return str(resolve("linear", argument, torch.float16))


def test_argument_beats_context_beats_default():
    assert in_force() == "fp32"
    with ak.accumulate("fp32/512") as policy:
        assert policy == ak.Accumulate(torch.float32, 512)
        assert in_force() == "fp32/512"
        assert in_force("fp16/128") == "fp16/128"
        assert in_force("fp32") == "fp32"
        with ak.accumulate(ak.Accumulate(torch.float16)):
            assert in_force() == "fp16"
        assert in_force() == "fp32/512"
    assert in_force() == "fp32"


def test_module_attribute_beats_context():
    module = ak.FusedLinear(8, 8, accumulate="fp32/256")
    with ak.accumulate("fp32/512"), pytest.raises(NotImplementedError, match="'fp32/256'"):
        module(X)
    plain = ak.FusedLinear(8, 8)
    with ak.accumulate("fp32/512"), pytest.raises(NotImplementedError, match="'fp32/512'"):
        plain(X)
    explicit = ak.FusedLinear(8, 8, accumulate="fp32")
    with ak.accumulate("fp32/512"):
        assert torch.equal(explicit(X), explicit(X))


def test_context_is_left_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), ak.accumulate("fp32/512"):
        raise RuntimeError("inside")
    assert in_force() == "fp32"


def test_a_bad_policy_does_not_enter():
    with pytest.raises(ValueError, match="Accumulate"), ak.accumulate("fp8"):
        pass
    assert in_force() == "fp32"


def test_context_is_per_thread_and_per_task():
    seen = {}
    with ak.accumulate("fp32/512"):
        thread = threading.Thread(target=lambda: seen.update(thread=in_force()))
        thread.start()
        thread.join()
        inherited = copy_context()
    assert seen == {"thread": "fp32"}
    assert inherited.run(in_force) == "fp32/512"


def test_backward_follows_its_forward():
    """The policy is that of the forward, whatever block backward is called in."""
    x = X.clone().requires_grad_()
    y = ak.linear(x, W)
    with ak.accumulate("fp32/512"):
        y.sum().backward()
    assert x.grad is not None


# ---------------------------------------------------------------------------------------------------------- what is refused

CALLS = {
    "linear": lambda x, w, a: ak.linear(x, w, accumulate=a),
    "gated_linear": lambda x, w, a: ak.gated_linear(x, w, accumulate=a),
    "mlp": lambda x, w, a: ak.mlp(x, w, None, w, None, accumulate=a),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_library_keeps_its_own_tree(op, dtype):
    x, w = X.to(dtype), W.to(dtype)
    message = rf"^{op}: accumulate must be 'fp32' for inputs of {dtype}, got 'fp32/512'$"
    with pytest.raises(NotImplementedError, match=message):
        CALLS[op](x, w, "fp32/512")
    with ak.accumulate("fp32/512"), pytest.raises(NotImplementedError, match=message):
        CALLS[op](x, w, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["fp32/16", "fp32/512", "fp16", "fp16/128"])
def test_the_cpu_computes_by_the_policy(policy, dtype):
    if policy.startswith("fp16") and dtype == torch.bfloat16:
        return
    x, w = randn(5, 100, dtype=dtype, seed=1), randn(8, 100, dtype=dtype, seed=2)
    y = ak.linear(x, w, accumulate=policy, out_dtype=torch.float32)
    bound = reference.linear_bound(x, w, out_dtype=torch.float32, accumulate=ak.Accumulate.parse(policy))
    assert_within(y, reference.linear(x, w), bound)
    with ak.accumulate(policy):
        assert torch.equal(ak.linear(x, w, out_dtype=torch.float32), y)
        assert torch.equal(ak.linear(x[2:3], w, out_dtype=torch.float32), y[2:3])
    assert ak.explain("linear", x, w, accumulate=policy).accumulate == ak.Accumulate.parse(policy)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp16_accumulators_take_fp16_inputs_only(op, dtype):
    message = f"^{op}: accumulate must be fp32 for inputs of {dtype}, got fp16/128, which takes float16 inputs only$"
    with pytest.raises(ValueError, match=message):
        CALLS[op](X.to(dtype), W.to(dtype), "fp16/128")


def test_fp16_accumulators_under_bf16_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"inputs of torch\.bfloat16, got fp16"):
        ak.linear(X, W, accumulate="fp16")


@pytest.mark.parametrize("op", CALLS)
def test_fp32_is_the_default(op):
    assert torch.equal(CALLS[op](X, W, "fp32"), CALLS[op](X, W, None))
    assert torch.equal(CALLS[op](X, W, ak.Accumulate()), CALLS[op](X, W, None))


def test_rows_do_not_ask():
    with ak.accumulate("fp32/512"):
        assert ak.softmax(X).shape == X.shape
        assert ak.layer_norm(X, 8).shape == X.shape


# ------------------------------------------------------------------------------------------------------------------ explain


def test_explain_names_the_policy_in_force():
    text = str(ak.explain("linear", X, W, activation="gelu"))
    assert text.startswith("linear on cpu: ") and "accumulate  fp32" in text
    with ak.accumulate("fp32/512"), pytest.raises(NotImplementedError, match="'fp32/512'"):
        ak.explain("linear", X, W)


@pytest.mark.parametrize(
    "explanation",
    [
        lambda: ak.explain("gated_linear", X.bfloat16(), W.bfloat16(), accumulate="fp32"),
        lambda: ak.explain("mlp", X, W, W[0], W, None, activation="relu"),
        lambda: ak.explain("linear", X.bfloat16(), W.bfloat16(), residual=X, activation="gelu"),
        lambda: ak.explain("mlp", X.bfloat16(), W.bfloat16(), None, W.bfloat16(), None, residual=X),
        lambda: ak.explain(ak.softmax, X, 0, scale=2.0, mask=X > 0),
        lambda: ak.explain("log_softmax", X, dim=0),
        lambda: ak.explain("layer_norm", X, 8, W[0], residual=X.half()),
        lambda: ak.explain("rms_norm", X.bfloat16(), (8,), W[0], weight_offset=1.0),
    ],
)
def test_explain_takes_the_arguments_of_the_call(explanation):
    result = explanation()
    assert str(result).splitlines()[0] == f"{result.op} on cpu: {result.path}"
    assert "fp32" in str(result) and result.dtypes["output"] in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("by_onednn", [True, False])
def test_explain_says_what_is_rounded_in_training_on_the_cpu(monkeypatch, by_onednn):
    """A CPU for whose bf16 oneDNN has no kernels multiplies in fp32, and rounds nothing on the way."""
    monkeypatch.setattr(importlib.import_module("ampkernels.explain"), "_onednn_takes", lambda dtype: by_onednn)
    x, w = X.bfloat16(), W.bfloat16()
    inference = ak.explain("linear", x, w, activation="gelu")
    training = ak.explain("linear", x, w.requires_grad_(), activation="gelu")
    assert not any("before the activation" in line for line in inference.rounding)
    before = any("pre-activation is rounded to bfloat16 before the activation" in line for line in training.rounding)
    assert before == by_onednn
    assert any("library's output dtype" in note for note in training.notes)


def test_explain_says_what_a_residual_changes():
    x, w = X.bfloat16(), W.bfloat16()
    fused = ak.explain("linear", x, w, residual=x)
    assert "bias, activation and residual in fp32, output rounded once to bfloat16" in fused.rounding
    assert not any("widened" in note for note in fused.notes)
    wide = ak.explain("linear", x, w.requires_grad_(), activation="gelu", residual=X)
    assert wide.dtypes["residual"] == wide.dtypes["output"] == torch.float32
    assert any("widened to fp32" in note for note in wide.notes)
    narrow = ak.explain("linear", x, w, activation="gelu", residual=X, out_dtype=torch.bfloat16)
    assert any("the operands are widened to fp32" in note for note in narrow.notes)
    assert not any("before the activation" in line for line in narrow.rounding)
    chunked = ak.explain("linear", x, w, residual=x.half(), accumulate="fp32/512")
    assert "residual is widened to float32 (exact) in every call" in chunked.notes
    mlp = ak.explain("mlp", x, w, None, w, None, residual=X)
    assert mlp.path.endswith("the second time with the residual")
    assert mlp.rounding[-1] == "backward: dy is rounded once to bfloat16, but for b2's gradient"


def test_explain_says_where_a_library_was_faster_and_which_result_shows_it():
    explain = importlib.import_module("ampkernels.explain")  # the module, not the function
    bf16, plain, chunked = torch.bfloat16, ak.Accumulate(), ak.Accumulate(chunk=512)
    cases = [
        explain._gemm_ahead("cpu", 0, bf16, (1, 768, 768), plain, None),
        *([text] for op in ("softmax", "layer_norm") for text in explain._rows_ahead(op, "cuda", 90, bf16, 4095)),
    ]
    cases += [explain._gemm_ahead("cuda", 90, bf16, (m, 3072, 768), plain, "gelu_tanh") for m in (256, 4096)]
    cases += [explain._gemm_ahead("cuda", 90, bf16, (m, 1000, 1000), plain, "gelu") for m in (512, 4096)]
    cases += [explain._gemm_ahead("cuda", 90, bf16, (m, 4096, 4096), chunked, None) for m in (256, 4096)]
    cases += [explain._gemm_ahead("cuda", 90, bf16, (16, 4096, 14336), ak.Accumulate(chunk=128), None)]
    for policy in (ak.Accumulate(torch.float16), ak.Accumulate(torch.float16, 128)):
        cases += [explain._gemm_ahead("cuda", 90, torch.float16, (m, 4096, 4096), policy, None) for m in (64, 4096)]
    results = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
    for (text,) in cases:
        assert (results / re.search(r"\((\S+\.csv)\)", text)[1]).is_file()
    assert explain._gemm_ahead("cuda", 90, bf16, (8192, 4096, 4096), plain, "gelu_tanh") == []
    assert explain._gemm_ahead("cuda", 90, bf16, (2048, 2048, 2048), plain, "gelu") == []
    fp16 = ak.Accumulate(torch.float16)
    assert explain._gemm_ahead("cuda", 90, torch.float16, (256, 4096, 4096), fp16, None) == []  # not measured
    assert explain._rows_ahead("softmax", "cpu", 0, bf16, 4096) == []
    assert explain._rows_ahead("log_softmax", "cuda", 90, bf16, 4096) == []  # no peer's measured
    x, w = torch.ones(1, 64).bfloat16(), torch.ones(8, 64).bfloat16()
    assert "faster      eager takes 0.9" in str(ak.explain("linear", x, w))


def test_explain_under_autocast_says_what_is_cast():
    with torch.autocast("cpu", torch.bfloat16):
        result = ak.explain("linear", X, W)
    assert result.dtypes["computed in"] == torch.bfloat16
    assert any(note.startswith("weight is cast to bfloat16 in every call") for note in result.notes)
