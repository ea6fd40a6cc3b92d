"""The autograd Functions: which gradients are computed, what is saved for them, and what they refuse.

Values against the float64 oracle are in test_<op>.py; here float64 and gradcheck, where every combination is cheap.
"""

import gc
import itertools
import weakref

import pytest
import torch
from cases import randn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import ampkernels as ak
from ampkernels import _ops, reference

D = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=D, seed=seed)


# op -> (function of tensors, their shapes by name). `residual` makes two outputs of a norm.
CASES = {
    "linear": (lambda x, w, b: ak.linear(x, w, b, activation="gelu"), {"x": (2, 3, 4), "w": (6, 4), "b": (6,)}),
    "linear-none": (lambda x, w, b: ak.linear(x, w, b), {"x": (3, 4), "w": (6, 4), "b": (6,)}),
    "linear-relu": (lambda x, w, b: ak.linear(x, w, b, activation="relu"), {"x": (4,), "w": (6, 4), "b": (6,)}),
    "linear-residual": (
        lambda x, w, b, r: ak.linear(x, w, b, activation="gelu", residual=r),
        {"x": (2, 3, 4), "w": (6, 4), "b": (6,), "r": (2, 3, 6)},
    ),
    "linear-none-residual": (
        lambda x, w, b, r: ak.linear(x, w, b, residual=r),
        {"x": (3, 4), "w": (6, 4), "b": (6,), "r": (3, 6)},
    ),
    "linear-relu-residual": (
        lambda x, w, b, r: ak.linear(x, w, b, activation="relu", residual=r),
        {"x": (4,), "w": (6, 4), "b": (6,), "r": (6,)},
    ),
    "gated_linear": (lambda x, w, b: ak.gated_linear(x, w, b), {"x": (2, 3, 4), "w": (6, 4), "b": (6,)}),
    "mlp": (
        lambda x, w1, b1, w2, b2: ak.mlp(x, w1, b1, w2, b2),
        {"x": (2, 3, 4), "w1": (6, 4), "b1": (6,), "w2": (5, 6), "b2": (5,)},
    ),
    "mlp-relu": (
        lambda x, w1, b1, w2, b2: ak.mlp(x, w1, b1, w2, b2, activation="relu"),
        {"x": (3, 4), "w1": (6, 4), "b1": (6,), "w2": (5, 6), "b2": (5,)},
    ),
    "mlp-none": (
        lambda x, w1, b1, w2, b2: ak.mlp(x, w1, b1, w2, b2, activation=None),
        {"x": (3, 4), "w1": (6, 4), "b1": (6,), "w2": (5, 6), "b2": (5,)},
    ),
    "mlp-residual": (
        lambda x, w1, b1, w2, b2, r: ak.mlp(x, w1, b1, w2, b2, residual=r),
        {"x": (2, 3, 4), "w1": (6, 4), "b1": (6,), "w2": (4, 6), "b2": (4,), "r": (2, 3, 4)},
    ),
    "softmax": (lambda x, m: ak.softmax(x, 1, scale=0.7, mask=m), {"x": (2, 3, 4), "m": (3, 1)}),
    "softmax-causal": (lambda x, m: ak.softmax(x, scale=0.7, mask=m, causal=True), {"x": (2, 3, 4), "m": (4,)}),
    "log_softmax": (lambda x: ak.log_softmax(x, 1), {"x": (2, 3, 4)}),
    "layer_norm": (lambda x, w, b: ak.layer_norm(x, (3, 4), w, b), {"x": (2, 3, 4), "w": (3, 4), "b": (3, 4)}),
    "layer_norm-residual": (
        lambda x, r, w, b: ak.layer_norm(x, 4, w, b, residual=r),
        {"x": (2, 3, 4), "r": (2, 3, 4), "w": (4,), "b": (4,)},
    ),
    "rms_norm": (lambda x, w: ak.rms_norm(x, 4, w, weight_offset=1.0), {"x": (2, 3, 4), "w": (4,)}),
    "rms_norm-residual": (
        lambda x, r, w: ak.rms_norm(x, 4, w, residual=r),
        {"x": (2, 3, 4), "r": (2, 3, 4), "w": (4,)},
    ),
}


def combinations(case: str) -> list[tuple[bool, ...]]:
    return [c for c in itertools.product((True, False), repeat=len(CASES[case][1])) if any(c)]


@pytest.mark.parametrize(
    ("case", "needs"),
    [(case, needs) for case in CASES for needs in combinations(case)],
    ids=lambda v: v if isinstance(v, str) else "".join("gn"[not b] for b in v),
)
def test_each_combination_of_needed_gradients(case, needs, device):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).to(device) for i, shape in enumerate(shapes.values())]
    everything = [t.clone().requires_grad_() for t in inputs]
    some = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    outputs = [out if isinstance(out, tuple) else (out,) for out in (function(*everything), function(*some))]
    dys = [normal(*out.shape, seed=99 + i).to(device) for i, out in enumerate(outputs[0])]
    for out in outputs:
        torch.autograd.backward(out, dys)
    for full, part, need in zip(everything, some, needs, strict=True):
        assert full.grad is not None
        assert (part.grad is not None) == need
        if need:  # the others' need for a gradient must not change this one's bits
            assert torch.equal(part.grad, full.grad)


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]
    assert gradcheck(function, inputs)


@pytest.mark.parametrize("op", ["linear", "gated_linear", "mlp"])
@pytest.mark.parametrize("activation", ak.ACTIVATIONS, ids=str)
def test_gradcheck_activations(op, activation):
    x, w, w2 = normal(3, 4).requires_grad_(), normal(6, 4, seed=1).requires_grad_(), normal(5, 6, seed=2)
    if op == "mlp":
        assert gradcheck(
            lambda x, w, w2: ak.mlp(x, w, None, w2, None, activation=activation), (x, w, w2.requires_grad_())
        )
    else:
        assert gradcheck(lambda x, w: getattr(ak, op)(x, w, activation=activation), (x, w))
    if op == "linear":
        r = normal(3, 6, seed=3).requires_grad_()
        assert gradcheck(lambda x, w, r: ak.linear(x, w, activation=activation, residual=r), (x, w, r))


# ---------------------------------------------------------------------------------------------------------- what is saved


def saved_by(function, *inputs):
    """The tensors that the graph of function(*inputs) keeps, as (shape, dtype), and whether each is an input's storage."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = function(*inputs)
    owned = {t.untyped_storage().data_ptr() for t in (*inputs, *(output if isinstance(output, tuple) else (output,)))
             if isinstance(t, torch.Tensor)}  # fmt: skip
    return sorted((tuple(t.shape), t.untyped_storage().data_ptr() in owned) for t in saved)


def needing(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


def linear_residual(activation):
    return lambda x, w, b, r: ak.linear(x, w, b, activation=activation, residual=r)


X, W, B, W2 = normal(2, 3, 4), normal(6, 4, seed=1), normal(6, seed=2), normal(5, 6, seed=3)
R = normal(2, 3, 6, seed=4)
MINE, NEW = True, False  # an input or output, kept at no cost; or a tensor that exists for backward alone
x, w, pre, y = ((2, 3, 4), MINE), ((6, 4), MINE), ((6, 6), NEW), ((2, 3, 6), MINE)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (ak.linear, (needing(X), needing(W), needing(B)), [x, w]),
        (ak.linear, (needing(X), W, B), [w]),
        (ak.linear, (X, needing(W), B), [x]),
        (ak.linear, (X, W, needing(B)), []),
        (lambda *a: ak.linear(*a, activation="relu"), (needing(X), needing(W), needing(B)), [x, y, w]),
        (lambda *a: ak.linear(*a, activation="relu"), (X, W, needing(B)), [y]),
        (lambda *a: ak.linear(*a, activation="gelu"), (needing(X), needing(W), needing(B)), [x, w, pre]),
        (lambda *a: ak.linear(*a, activation="gelu"), (X, W, needing(B)), [pre]),
        (linear_residual(None), (needing(X), needing(W), needing(B), needing(R)), [x, w]),
        (linear_residual("gelu"), (needing(X), needing(W), needing(B), R), [x, w, pre]),
        (linear_residual("relu"), (needing(X), needing(W), needing(B), R), [x, w, pre]),  # the output does not tell
        (linear_residual("relu"), (X, W, needing(B), R), [pre]),
        (linear_residual("gelu"), (X, W, B, needing(R)), []),
        (linear_residual("relu"), (X, W, B, needing(R)), []),
        (ak.gated_linear, (needing(X), needing(W), needing(B)), [x, w, pre]),
        (ak.mlp, (needing(X), needing(W), B, needing(W2), None), [x, w, pre, ((5, 6), MINE)]),
        (ak.mlp, (X, W, B, needing(W2), None), [((2, 3, 6), NEW)]),  # the hidden activations
        (ak.mlp, (needing(X), W, B, W2, None), [w, pre, ((5, 6), MINE)]),
        (ak.mlp, (X, W, B, W2, needing(normal(5))), []),
        (lambda *a: ak.mlp(*a[:5], residual=a[5]), (X, W, B, W2, None, needing(normal(2, 3, 5))), []),
        (ak.softmax, (needing(X),), [x]),
        (ak.log_softmax, (needing(X),), [x]),
        (lambda x, w: ak.layer_norm(x, 4, w), (needing(X), needing(W[0])), [x, ((4,), MINE), ((6,), NEW), ((6,), NEW)]),
        (lambda x, w: ak.layer_norm(x, 4, w), (X, needing(W[0])), [x, ((6,), NEW), ((6,), NEW)]),
        (lambda x, w: ak.rms_norm(x, 4, w), (needing(X), needing(W[0])), [x, ((4,), MINE), ((6,), NEW)]),
        (lambda x, r: ak.rms_norm(x, 4, residual=r), (needing(X), X), [x, ((6,), NEW)]),
    ],
)  # fmt: skip
def test_saved_tensors_are_the_fewest(function, inputs, expected):
    assert saved_by(function, *inputs) == sorted(expected)


def test_the_sum_is_what_a_norm_with_a_residual_keeps():
    function = lambda a, r: ak.layer_norm(a, 4, residual=r)  # noqa: E731
    normed, total = function(needing(X), X)
    assert any(t is not None and t.data_ptr() == total.data_ptr() for t in normed.grad_fn.saved_tensors)


@pytest.mark.parametrize("case", CASES)
def test_no_graph_without_need(case):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes.values())]
    outputs = function(*inputs)
    with torch.no_grad():
        again = function(*[t.clone().requires_grad_() for t in inputs])
    with torch.inference_mode():
        function(*inputs)
    for out, same in zip(*(o if isinstance(o, tuple) else (o,) for o in (outputs, again)), strict=True):
        assert out.grad_fn is None and not out.requires_grad
        assert torch.equal(out, same)


@pytest.mark.parametrize("case", CASES)
def test_graph_is_freed(case):
    """A saved output must not keep its own graph alive."""
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]
    gc.disable()
    try:
        outputs = function(*inputs)
        dead = weakref.ref(outputs[0] if isinstance(outputs, tuple) else outputs)
        del outputs
        assert dead() is None
    finally:
        gc.enable()


def test_changing_what_was_saved_is_an_error():
    a, weight = normal(3, 4), normal(6, 4, seed=1).requires_grad_()
    y = ak.linear(a, weight)
    a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------------------ what arrives


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["expanded", "transposed", "strided"])
def test_any_strides_of_dy(case, how, device):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).to(device).requires_grad_() for i, shape in enumerate(shapes.values())]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for out in outputs:
        dy = normal(*out.shape, seed=7).to(device)
        if how == "expanded":
            dy = torch.tensor(1.5, dtype=D, device=device).expand(out.shape)
        elif how == "transposed" and dy.dim() > 1:
            dy = dy.mT.contiguous().mT
        elif how == "strided":
            dy = dy.repeat_interleave(2, -1)[..., ::2]
        got = torch.autograd.grad(out, inputs, dy, retain_graph=True, allow_unused=True)
        want = torch.autograd.grad(out, inputs, dy.contiguous(), retain_graph=True, allow_unused=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_backward_twice_over_a_retained_graph(case):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]
    out = function(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    dy = normal(*out.shape, seed=5)
    kept = dy.clone()
    first = torch.autograd.grad(out, inputs, dy, retain_graph=True)
    second = torch.autograd.grad(out, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("case", [c for c in CASES if "residual" not in c or c in ("linear-residual", "mlp-residual")])
def test_inf_and_nan_of_dy_reach_the_gradients(case, value, device):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).float().to(device).requires_grad_() for i, shape in enumerate(shapes.values())]
    out = function(*inputs)
    dy = torch.ones_like(out)
    dy[(0,) * dy.dim()] = value
    out.backward(dy)
    for name, t in zip(shapes, inputs, strict=True):
        if "relu" in case and out.dim() < 3 and name in ("x", "w", "b") and not out.flatten()[0] > 0:
            continue  # relu passes nothing there
        assert not t.grad.isfinite().all(), name


# ------------------------------------------------------------------------------------------------------ parameters' layout


@pytest.mark.parametrize("out, inner", [(6, 4), (1, 4), (6, 1), (1, 1)])
def test_dweight_has_the_weights_dtype_and_strides(out, inner, device):
    base = normal(out, inner).to(device)
    a = normal(5, inner, seed=1).to(device)
    grads = []
    for weight in (base, base.t().contiguous().t(), base.repeat_interleave(2, 1)[:, ::2]):
        weight = weight.detach().requires_grad_()
        (grad,) = torch.autograd.grad(ak.linear(a, weight).sum(), weight)
        grads.append(grad)
        if weight.is_contiguous() or weight.t().is_contiguous():
            for size, mine, theirs in zip(weight.shape, grad.stride(), weight.stride(), strict=True):
                assert size == 1 or mine == theirs
        else:
            assert grad.is_contiguous()
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(grads[2], grads[0], rtol=1e-13, atol=1e-13)


def test_norm_weight_gradient_has_the_weights_strides(device):
    a = normal(5, 3, 4).to(device)
    weight = normal(4, 3, seed=1).to(device).t().requires_grad_()
    bias = normal(4, 3, seed=2).to(device).t().requires_grad_()
    dw, db = torch.autograd.grad((ak.layer_norm(a, (3, 4), weight, bias) * a).sum(), (weight, bias))
    assert dw.stride() == weight.stride() and db.stride() == bias.stride()
    rw, rb = torch.autograd.grad((reference.layer_norm(a, (3, 4), weight, bias) * a).sum(), (weight, bias))
    torch.testing.assert_close(dw, rw)
    torch.testing.assert_close(db, rb)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_outputs_can_be_used_in_place(activation, device):
    """As nn.ReLU(inplace=True) does after a layer: a view made inside a Function would refuse."""
    a, weight = normal(2, 3, 4).to(device).requires_grad_(), normal(6, 4, seed=1).to(device)
    ak.linear(a, weight).relu_().sum().backward()
    expected = a.grad.clone()
    a.grad = None
    torch.relu(ak.linear(a, weight)).sum().backward()
    assert torch.equal(a.grad, expected)
    if activation == "relu":  # its output is what backward reads
        y = ak.linear(a, weight, activation="relu").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    residual = normal(2, 3, 6, seed=2).to(device)
    ak.linear(a, weight, activation=activation, residual=residual).mul_(
        2
    ).sum().backward()  # what a residual leaves free
    with torch.no_grad():
        y = ak.linear(a, weight, activation=activation)
    y.mul_(torch.ones((), dtype=D, device=device, requires_grad=True))
    assert y.requires_grad


# -------------------------------------------------------------------------------------------------------- double backward


@pytest.mark.parametrize("case", CASES)
def test_double_backward_is_refused_by_name(case, device):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).to(device).requires_grad_() for i, shape in enumerate(shapes.values())]

    def loss():
        out = function(*inputs)
        return sum(o.square().sum() for o in out) if isinstance(out, tuple) else out.square().sum()

    plain = torch.autograd.grad(loss(), inputs)
    graphed = torch.autograd.grad(loss(), inputs, create_graph=True)
    for a, b in zip(plain, graphed, strict=True):
        assert torch.equal(a, b)  # first-order values are the same in both modes
        assert b.requires_grad
    op = case.split("-")[0]
    for grad in graphed:
        with pytest.raises(RuntimeError, match=f"^{op}: double backward is not supported yet"):
            grad.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_penalty_is_never_dropped(case):
    """dy of a plain sum needs no gradient; torch's once_differentiable then returns constants in silence."""
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]
    out = function(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    (grad,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported yet"):
        (out.sum() + grad.square().sum()).backward()


@pytest.mark.parametrize("case", CASES)
def test_forward_mode_and_functorch_are_refused(case):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes.values())]

    def first(*tensors):
        out = function(*tensors)
        return out[0] if isinstance(out, tuple) else out

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(NotImplementedError, match="jvp"):
            first(dual, *inputs[1:])
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: first(t, *inputs[1:]).sum())(inputs[0])


# ------------------------------------------------------------------------------------------------------------ composition


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_checkpoint(case, reentrant):
    function, shapes = CASES[case]
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]

    def total(out):
        return sum(o.square().sum() for o in out) if isinstance(out, tuple) else out.square().sum()

    plain = torch.autograd.grad(total(function(*inputs)), inputs)
    total(checkpoint(function, *inputs, use_reentrant=reentrant)).backward()
    for t, expected in zip(inputs, plain, strict=True):
        assert torch.equal(t.grad, expected)


def test_names_in_the_graph():
    y = ak.linear(X.clone().requires_grad_(), W)
    assert y.grad_fn.name() == "LinearCpuBackward"


def test_activation_numbers():
    assert _ops.ACTIVATION_NUMBERS[None] == 0 and sorted(_ops.ACTIVATION_NUMBERS.values()) == list(range(9))


def test_meta_tensors():
    a, weight = torch.empty(2, 3, 4, device="meta", requires_grad=True), torch.empty(6, 4, device="meta")
    y = ak.linear(a, weight, activation="gelu")
    y.sum().backward()
    assert y.shape == (2, 3, 6) and a.grad.shape == a.shape
    residual = torch.empty(2, 3, 6, device="meta", dtype=torch.bfloat16, requires_grad=True)
    y = ak.linear(a, weight, activation="gelu", residual=residual)
    y.sum().backward()
    assert y.shape == (2, 3, 6) and y.dtype == residual.grad.dtype == torch.bfloat16
