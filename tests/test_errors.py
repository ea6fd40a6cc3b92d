"""Bad arguments: the exact message, raised before anything is launched, and nothing is changed by the call."""

import re

import pytest
import torch

import ampkernels as ak
from ampkernels import _ops

X = torch.randn(4, 8)
W = torch.randn(6, 8)
B = torch.randn(6)
W2 = torch.randn(3, 6)
G = torch.randn(8)
META = torch.empty(6, 8, device="meta")
FLOATS = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
ACTIVATIONS = "None, 'relu', 'gelu', 'gelu_tanh', 'silu', 'sigmoid', 'tanh', 'quick_gelu', 'relu2'"

# (call, exception, message): argument, requirement, and what it got.
CASES = {
    # rank and inner size
    "linear-0d": (
        lambda: ak.linear(X[0, 0], W),
        ValueError,
        "linear: input must have at least 1 dimension, got shape ()",
    ),
    "linear-weight-inner": (
        lambda: ak.linear(X, W[:, :5]),
        ValueError,
        "linear: weight must have shape (out, in) with in = 8, got (6, 5)",
    ),
    "linear-weight-rank": (
        lambda: ak.linear(X, W[None]),
        ValueError,
        "linear: weight must have shape (out, in) with in = 8, got (1, 6, 8)",
    ),
    "linear-bias-size": (
        lambda: ak.linear(X, W, B[:5]),
        ValueError,
        "linear: bias must have shape (out,) with out = 6, got (5,)",
    ),
    "linear-bias-broadcasts": (
        lambda: ak.linear(X, W, B[:1]),
        ValueError,
        "linear: bias must have shape (out,) with out = 6, got (1,)",
    ),
    "linear-bias-rank": (
        lambda: ak.linear(X, W, B[None]),
        ValueError,
        "linear: bias must have shape (out,) with out = 6, got (1, 6)",
    ),
    "gated-odd": (
        lambda: ak.gated_linear(X, W[:5]),
        ValueError,
        "gated_linear: weight must have shape (2 F, in) with an even 2 F, got (5, 8)",
    ),
    "gated-weight-inner": (
        lambda: ak.gated_linear(X, W[:, :5]),
        ValueError,
        "gated_linear: weight must have shape (2 F, in) with in = 8, got (6, 5)",
    ),
    "gated-bias": (
        lambda: ak.gated_linear(X, W, B[:3]),
        ValueError,
        "gated_linear: bias must have shape (2 F,) with 2 F = 6, got (3,)",
    ),
    "mlp-w1": (
        lambda: ak.mlp(X, W[:, :5], None, W2, None),
        ValueError,
        "mlp: w1 must have shape (hidden, in) with in = 8, got (6, 5)",
    ),
    "mlp-w2": (
        lambda: ak.mlp(X, W, B, W2[:, :5], None),
        ValueError,
        "mlp: w2 must have shape (out, hidden) with hidden = 6, got (3, 5)",
    ),
    "mlp-b1": (
        lambda: ak.mlp(X, W, B[:2], W2, None),
        ValueError,
        "mlp: b1 must have shape (hidden,) with hidden = 6, got (2,)",
    ),
    "mlp-b2": (lambda: ak.mlp(X, W, B, W2, B), ValueError, "mlp: b2 must have shape (out,) with out = 3, got (6,)"),
    # devices
    "linear-mixed-devices": (
        lambda: ak.linear(X, META),
        ValueError,
        "linear: weight must be on input's device cpu, got meta",
    ),
    "linear-mixed-devices-bias": (
        lambda: ak.linear(X, W, META[:, 0]),
        ValueError,
        "linear: bias must be on input's device cpu, got meta",
    ),
    "softmax-mixed-devices": (
        lambda: ak.softmax(X, mask=META[:4]),
        ValueError,
        "softmax: mask must be on input's device cpu, got meta",
    ),
    "layer_norm-mixed-devices": (
        lambda: ak.layer_norm(X, 8, META[0]),
        ValueError,
        "layer_norm: weight must be on input's device cpu, got meta",
    ),
    "rms_norm-mixed-devices": (
        lambda: ak.rms_norm(X, 8, residual=META[:4]),
        ValueError,
        "rms_norm: residual must be on input's device cpu, got meta",
    ),
    "linear-mixed-devices-residual": (
        lambda: ak.linear(X, W, residual=META[:4, :6]),
        ValueError,
        "linear: residual must be on input's device cpu, got meta",
    ),
    # what an argument is
    "linear-integer": (
        lambda: ak.linear(X.int(), W),
        TypeError,
        f"linear: input must have dtype {FLOATS}, got torch.int32",
    ),
    "linear-complex": (
        lambda: ak.linear(X, W.to(torch.complex64)),
        TypeError,
        f"linear: weight must have dtype {FLOATS}, got torch.complex64",
    ),
    "linear-bool-bias": (
        lambda: ak.linear(X, W, B > 0),
        TypeError,
        f"linear: bias must have dtype {FLOATS}, got torch.bool",
    ),
    "linear-no-weight": (lambda: ak.linear(X, None), TypeError, "linear: weight must be a torch.Tensor, got NoneType"),
    "linear-list": (lambda: ak.linear([1.0], W), TypeError, "linear: input must be a torch.Tensor, got list"),
    "linear-number-bias": (lambda: ak.linear(X, W, 0), TypeError, "linear: bias must be a torch.Tensor, got int"),
    "linear-sparse": (
        lambda: ak.linear(X.to_sparse(), W),
        TypeError,
        "linear: input must be a dense tensor (layout torch.strided), got layout torch.sparse_coo",
    ),
    "linear-mix": (
        lambda: ak.linear(X, W.bfloat16()),
        TypeError,
        "linear: weight must have input's dtype torch.float32 outside autocast (which never casts float64), "
        "got torch.bfloat16",
    ),
    "gated-mix": (
        lambda: ak.gated_linear(X.half(), W),
        TypeError,
        "gated_linear: weight must have input's dtype torch.float16 outside autocast (which never casts float64), "
        "got torch.float32",
    ),
    "mlp-mix": (
        lambda: ak.mlp(X, W, B, W2.half(), None),
        TypeError,
        "mlp: w2 must have input's dtype torch.float32 outside autocast (which never casts float64), got torch.float16",
    ),
    "softmax-integer": (
        lambda: ak.softmax(X.long()),
        TypeError,
        f"softmax: input must have dtype {FLOATS}, got torch.int64",
    ),
    "log_softmax-integer": (
        lambda: ak.log_softmax(X.long()),
        TypeError,
        f"log_softmax: input must have dtype {FLOATS}, got torch.int64",
    ),
    "layer_norm-integer": (
        lambda: ak.layer_norm(X.long(), 8),
        TypeError,
        f"layer_norm: input must have dtype {FLOATS}, got torch.int64",
    ),
    "layer_norm-integer-weight": (
        lambda: ak.layer_norm(X, 8, G.int()),
        TypeError,
        f"layer_norm: weight must have dtype {FLOATS}, got torch.int32",
    ),
    "layer_norm-float-weight": (
        lambda: ak.layer_norm(X, 8, 1.0),
        TypeError,
        "layer_norm: weight must be a torch.Tensor, got float",
    ),
    "rms_norm-sparse": (
        lambda: ak.rms_norm(X.to_sparse(), 8),
        TypeError,
        "rms_norm: input must be a dense tensor (layout torch.strided), got layout torch.sparse_coo",
    ),
    # names and ranges
    "linear-activation": (
        lambda: ak.linear(X, W, activation="swish"),
        ValueError,
        f"linear: activation must be one of {ACTIVATIONS}, got 'swish'",
    ),
    "gated-activation": (
        lambda: ak.gated_linear(X, W, activation=torch.relu),
        ValueError,
        f"gated_linear: activation must be one of {ACTIVATIONS}, got <built-in",
    ),
    "mlp-activation": (
        lambda: ak.mlp(X, W, B, W2, None, activation=[]),
        ValueError,
        f"mlp: activation must be one of {ACTIVATIONS}, got []",
    ),
    "module-activation": (
        lambda: ak.FusedLinear(8, 6, activation="GELU"),
        ValueError,
        f"FusedLinear: activation must be one of {ACTIVATIONS}, got 'GELU'",
    ),
    "softmax-dim": (
        lambda: ak.softmax(X, 2),
        ValueError,
        "softmax: dim must be in [-2, 1] for input of shape (4, 8), got 2",
    ),
    "softmax-dim-negative": (
        lambda: ak.softmax(X, -3),
        ValueError,
        "softmax: dim must be in [-2, 1] for input of shape (4, 8), got -3",
    ),
    "softmax-dim-type": (lambda: ak.softmax(X, None), TypeError, "softmax: dim must be an int, got NoneType"),
    "log_softmax-dim-0d": (
        lambda: ak.log_softmax(X[0, 0], 1),
        ValueError,
        "log_softmax: dim must be in [-1, 0] for input of shape (), got 1",
    ),
    "softmax-scale-tensor": (
        lambda: ak.softmax(X, scale=torch.tensor(2.0)),
        TypeError,
        "softmax: scale must be a number, got Tensor",
    ),
    "softmax-mask-shape": (
        lambda: ak.softmax(X, mask=torch.ones(3, 8, dtype=torch.bool)),
        ValueError,
        "softmax: mask must broadcast to input's shape (4, 8), got (3, 8)",
    ),
    "softmax-mask-rank": (
        lambda: ak.softmax(X, mask=torch.ones(1, 4, 8, dtype=torch.bool)),
        ValueError,
        "softmax: mask must broadcast to input's shape (4, 8), got (1, 4, 8)",
    ),
    "softmax-mask-dtype": (
        lambda: ak.softmax(X, mask=torch.ones(4, 8, dtype=torch.int64)),
        TypeError,
        f"softmax: mask must have dtype torch.bool (True = keep) or {FLOATS}, got torch.int64",
    ),
    "softmax-mask-type": (
        lambda: ak.softmax(X, mask=True),
        TypeError,
        "softmax: mask must be a torch.Tensor, got bool",
    ),
    "softmax-causal-dim": (
        lambda: ak.softmax(X, 0, causal=True),
        ValueError,
        "softmax: causal must be used along the last of at least 2 dimensions, got dim 0 of an input of shape (4, 8)",
    ),
    "softmax-causal-rank": (
        lambda: ak.softmax(G, causal=True),
        ValueError,
        "softmax: causal must be used along the last of at least 2 dimensions, got dim 0 of an input of shape (8,)",
    ),
    "layer_norm-shape": (
        lambda: ak.layer_norm(X, (4,)),
        ValueError,
        "layer_norm: normalized_shape must be the last dimensions of input's shape (4, 8), at least one, got (4,)",
    ),
    "layer_norm-shape-too-long": (
        lambda: ak.layer_norm(X, (2, 4, 8)),
        ValueError,
        "layer_norm: normalized_shape must be the last dimensions of input's shape (4, 8), at least one, got (2, 4, 8)",
    ),
    "rms_norm-shape-empty": (
        lambda: ak.rms_norm(X, ()),
        ValueError,
        "rms_norm: normalized_shape must be the last dimensions of input's shape (4, 8), at least one, got ()",
    ),
    "layer_norm-shape-type": (
        lambda: ak.layer_norm(X, None),
        TypeError,
        "layer_norm: normalized_shape must be an int or a sequence of ints, got None",
    ),
    "layer_norm-weight": (
        lambda: ak.layer_norm(X, 8, G[:4]),
        ValueError,
        "layer_norm: weight must have shape normalized_shape = (8,), got (4,)",
    ),
    "layer_norm-bias": (
        lambda: ak.layer_norm(X, 8, G, G[None]),
        ValueError,
        "layer_norm: bias must have shape normalized_shape = (8,), got (1, 8)",
    ),
    "rms_norm-weight": (
        lambda: ak.rms_norm(X, 8, G[:1]),
        ValueError,
        "rms_norm: weight must have shape normalized_shape = (8,), got (1,)",
    ),
    "layer_norm-residual": (
        lambda: ak.layer_norm(X, 8, residual=X[:1]),
        ValueError,
        "layer_norm: residual must have input's shape (4, 8), got (1, 8)",
    ),
    "rms_norm-residual-dtype": (
        lambda: ak.rms_norm(X, 8, residual=X.double()),
        TypeError,
        "rms_norm: residual must have dtype torch.float64 exactly where input has, "
        "got torch.float64 with an input of torch.float32",
    ),
    "linear-residual": (
        lambda: ak.linear(X, W, residual=X),
        ValueError,
        "linear: residual must have the result's shape (4, 6), got (4, 8)",
    ),
    "linear-residual-broadcasts": (
        lambda: ak.linear(X, W, residual=B),
        ValueError,
        "linear: residual must have the result's shape (4, 6), got (6,)",
    ),
    "linear-residual-dtype": (
        lambda: ak.linear(X, W, residual=torch.zeros(4, 6).double()),
        TypeError,
        "linear: residual must have dtype torch.float64 exactly where input has, "
        "got torch.float64 with an input of torch.float32",
    ),
    "linear-residual-of-float64": (
        lambda: ak.linear(X.double(), W.double(), residual=torch.zeros(4, 6)),
        TypeError,
        "linear: residual must have dtype torch.float64 exactly where input has, "
        "got torch.float32 with an input of torch.float64",
    ),
    "linear-residual-integer": (
        lambda: ak.linear(X, W, residual=torch.zeros(4, 6).int()),
        TypeError,
        f"linear: residual must have dtype {FLOATS}, got torch.int32",
    ),
    "linear-residual-number": (
        lambda: ak.linear(X, W, residual=1.0),
        TypeError,
        "linear: residual must be a torch.Tensor, got float",
    ),
    "linear-residual-out_dtype": (
        lambda: ak.linear(X, W, residual=torch.zeros(4, 6), out_dtype=torch.int32),
        TypeError,
        f"linear: out_dtype must be {FLOATS}, got torch.int32",
    ),
    "mlp-residual": (
        lambda: ak.mlp(X, W, B, W2, None, residual=X),
        ValueError,
        "mlp: residual must have the result's shape (4, 3), got (4, 8)",
    ),
    "mlp-residual-dtype": (
        lambda: ak.mlp(X, W, B, W2, None, residual=torch.zeros(4, 3).double()),
        TypeError,
        "mlp: residual must have dtype torch.float64 exactly where input has, "
        "got torch.float64 with an input of torch.float32",
    ),
    "layer_norm-eps": (
        lambda: ak.layer_norm(X, 8, eps=-1e-5),
        ValueError,
        "layer_norm: eps must be at least 0, got -1e-05",
    ),
    "rms_norm-eps-nan": (
        lambda: ak.rms_norm(X, 8, eps=float("nan")),
        ValueError,
        "rms_norm: eps must be at least 0, got nan",
    ),
    "layer_norm-eps-type": (
        lambda: ak.layer_norm(X, 8, eps="1e-5"),
        TypeError,
        "layer_norm: eps must be a number, got str",
    ),
    "rms_norm-offset": (
        lambda: ak.rms_norm(X, 8, weight_offset=1.0),
        ValueError,
        "rms_norm: weight_offset must be 0 without a weight, got 1.0",
    ),
    "linear-out_dtype": (
        lambda: ak.linear(X, W, out_dtype=torch.int32),
        TypeError,
        f"linear: out_dtype must be {FLOATS}, got torch.int32",
    ),
    "linear-out_dtype-autocast": (
        lambda: ak.linear(X, W, out_dtype="autocast"),
        TypeError,
        f"linear: out_dtype must be {FLOATS}, got 'autocast'",
    ),
    "softmax-out_dtype": (
        lambda: ak.softmax(X, out_dtype=torch.complex64),
        TypeError,
        f"softmax: out_dtype must be {FLOATS}, or 'autocast', got torch.complex64",
    ),
    "log_softmax-out_dtype": (
        lambda: ak.log_softmax(X, out_dtype=torch.bool),
        TypeError,
        f"log_softmax: out_dtype must be {FLOATS}, or 'autocast', got torch.bool",
    ),
    "layer_norm-out_dtype": (
        lambda: ak.layer_norm(X, 8, out_dtype=torch.int8),
        TypeError,
        f"layer_norm: out_dtype must be {FLOATS}, or 'autocast', got torch.int8",
    ),
    "rms_norm-out_dtype": (
        lambda: ak.rms_norm(X, 8, out_dtype="float32"),
        TypeError,
        f"rms_norm: out_dtype must be {FLOATS}, or 'autocast', got 'float32'",
    ),
    "explain-op": (
        lambda: ak.explain("conv", X),
        ValueError,
        "explain: op must be one of linear, gated_linear, mlp, softmax, log_softmax, layer_norm, rms_norm, got 'conv'",
    ),
    "explain-residual": (
        lambda: ak.explain("linear", X, W, residual=X),
        ValueError,
        "linear: residual must have the result's shape (4, 6), got (4, 8)",
    ),
    "explain-argument": (
        lambda: ak.explain("linear", X, W[:, :5]),
        ValueError,
        "linear: weight must have shape (out, in) with in = 8, got (6, 5)",
    ),
}

OPERATORS = [name for name in vars(_ops) if name.endswith(("_fwd", "_bwd", "_dgrad", "_wgrad"))]


@pytest.mark.parametrize("case", CASES)
def test_message(case, monkeypatch):
    def launched(*args):
        raise AssertionError("an operator was called")

    for name in OPERATORS:
        monkeypatch.setattr(_ops, name, launched)
    call, exception, message = CASES[case]
    with pytest.raises(exception, match="^" + re.escape(message)) as caught:
        call()
    assert type(caught.value) is exception
    assert case in ("gated-activation",) or str(caught.value) == message


@pytest.mark.parametrize("case", ["linear-mix", "linear-residual", "softmax-mask-shape", "layer_norm-weight", "mlp-w2"])
def test_message_is_the_same_when_gradients_are_wanted(case):
    call, exception, message = CASES[case]
    X.requires_grad_()
    try:
        with pytest.raises(exception, match="^" + re.escape(message) + "$"):
            call()
    finally:
        X.requires_grad_(False)


def test_operators_were_found():
    assert len(OPERATORS) == 12


def test_mixed_float64_is_refused_under_autocast_too():
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"input's dtype torch.float64 outside autocast .*, got torch.float32"),
    ):
        ak.linear(X.double(), W)


def test_cuda_and_cpu_do_not_mix(cuda):
    with pytest.raises(ValueError, match=r"linear: weight must be on input's device cuda:0, got cpu"):
        ak.linear(X.cuda(), W)
    with pytest.raises(ValueError, match=r"rms_norm: residual must be on input's device cpu, got cuda:0"):
        ak.rms_norm(X, 8, residual=X.cuda())


def test_a_missing_extension_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(_ops, "linear_fwd", _ops._missing("linear_fwd"))
    with pytest.raises(ImportError, match=r"compiled extension ampkernels\._C .*python setup\.py build_ext --inplace"):
        ak.linear(X, W)
