"""The modules: drop-in for torch's in isinstance, state_dict, repr, copying and saving; and their options."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampkernels as ak

PAIRS = {
    "linear": (lambda: nn.Linear(8, 6), lambda **kw: ak.FusedLinear(8, 6, **kw)),
    "linear-no-bias": (lambda: nn.Linear(8, 6, bias=False), lambda **kw: ak.FusedLinear(8, 6, bias=False, **kw)),
    "layer_norm": (lambda: nn.LayerNorm(8), lambda **kw: ak.FusedLayerNorm(8, **kw)),
    "layer_norm-2d": (lambda: nn.LayerNorm((4, 8), eps=1e-3), lambda **kw: ak.FusedLayerNorm((4, 8), eps=1e-3, **kw)),
    "layer_norm-no-bias": (lambda: nn.LayerNorm(8, bias=False), lambda **kw: ak.FusedLayerNorm(8, bias=False, **kw)),
    "layer_norm-plain": (
        lambda: nn.LayerNorm(8, elementwise_affine=False),
        lambda **kw: ak.FusedLayerNorm(8, elementwise_affine=False, **kw),
    ),
    "rms_norm": (lambda: nn.RMSNorm(8), lambda **kw: ak.FusedRMSNorm(8, **kw)),
    "rms_norm-plain": (
        lambda: nn.RMSNorm(8, eps=1e-6, elementwise_affine=False),
        lambda **kw: ak.FusedRMSNorm(8, eps=1e-6, elementwise_affine=False, **kw),
    ),
    "softmax": (lambda: nn.Softmax(-1), lambda **kw: ak.FusedSoftmax(-1, **kw)),
}
OURS = {
    "linear": lambda: ak.FusedLinear(8, 6, activation="gelu", accumulate="fp32", out_dtype=torch.float32),
    "gated": lambda: ak.FusedGatedLinear(8, 6, activation="gelu_tanh"),
    "mlp": lambda: ak.FusedMLP(8, 16, 6, activation="relu2"),
    "layer_norm": lambda: ak.FusedLayerNorm(8, out_dtype="autocast"),
    "rms_norm": lambda: ak.FusedRMSNorm(8, weight_offset=1.0, out_dtype=torch.bfloat16),
    "softmax": lambda: ak.FusedSoftmax(-1, scale=0.5, causal=True),
}
X = torch.randn(2, 4, 8)


def randomise(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("name", PAIRS)
def test_is_a_drop_in(name, device):
    torchs, ours = (make() for make in PAIRS[name])
    assert isinstance(ours, type(torchs))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    randomise(torchs)
    ours.load_state_dict(torchs.state_dict(), strict=True)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    torchs, ours, x = torchs.to(device), ours.to(device), X.to(device)
    torch.testing.assert_close(ours(x), torchs(x))
    assert repr(ours) == repr(torchs).replace(type(torchs).__name__, type(ours).__name__, 1)


@pytest.mark.parametrize("name", PAIRS)
def test_initial_values_are_torchs(name):
    torch.manual_seed(0)
    torchs = PAIRS[name][0]()
    torch.manual_seed(0)
    ours = PAIRS[name][1]()
    for a, b in zip(torchs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "save-weights"])
def test_copies_are_equal(name, how):
    module = randomise(OURS[name]())
    if how == "deepcopy":
        copied = copy.deepcopy(module)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(module))
    else:
        buffer = io.BytesIO()
        torch.save(module if how == "save" else module.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=how == "save-weights")
        copied = loaded if how == "save" else OURS[name]()
        if how == "save-weights":
            copied.load_state_dict(loaded, strict=True)
    assert repr(copied) == repr(module)
    x = torch.randn(2, 8, 8)
    assert torch.equal(copied(x), module(x))


@pytest.mark.parametrize("name", OURS)
def test_options_are_in_the_repr(name):
    expected = {
        "linear": "FusedLinear(in_features=8, out_features=6, bias=True, activation='gelu', accumulate='fp32', "
        "out_dtype=torch.float32)",
        "gated": "FusedGatedLinear(in_features=8, out_features=6, bias=True, activation='gelu_tanh')",
        "layer_norm": "FusedLayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True, out_dtype='autocast')",
        "rms_norm": "FusedRMSNorm((8,), eps=None, elementwise_affine=True, weight_offset=1.0, out_dtype=torch.bfloat16)",
        "softmax": "FusedSoftmax(dim=-1, scale=0.5, causal=True)",
    }
    if name in expected and name != "layer_norm":
        assert repr(OURS[name]()) == expected[name]
    elif name == "layer_norm":  # releases of torch differ in whether they show the bias
        assert repr(OURS[name]()).endswith(", out_dtype='autocast')")
    else:
        assert "activation='relu2'" in repr(OURS[name]())


@pytest.mark.parametrize("name", OURS)
def test_half_module_and_device_moves(name, device):
    module = OURS[name]().to(device, torch.bfloat16)
    module.out_dtype = None
    y = module(torch.randn(2, 8, 8, dtype=torch.bfloat16, device=device))
    assert y.dtype == torch.bfloat16 and y.device.type == device


def test_a_changed_class_works():
    """What `fuse` does: no constructor of ours has run."""
    layer = nn.Linear(8, 6)
    expected = layer(X)
    layer.__class__ = ak.FusedLinear
    torch.testing.assert_close(layer(X), expected)
    norm = nn.RMSNorm(8)
    norm.__class__ = ak.FusedRMSNorm
    torch.testing.assert_close(norm(X), nn.RMSNorm(8)(X))


def test_meta_device_and_reset():
    with torch.device("meta"):
        modules = [make() for make in OURS.values()]
    for module in modules:
        module.to_empty(device="cpu")
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        assert all(p.isfinite().all() for p in module.parameters())


# ------------------------------------------------------------------------------------------------------------------ gated


def test_gated_linear_is_no_nn_linear():
    module = ak.FusedGatedLinear(8, 6)
    assert not isinstance(module, nn.Linear)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert module.weight.shape == (12, 8) and module.bias.shape == (12,)
    assert list(ak.FusedGatedLinear(8, 6, bias=False).state_dict()) == ["weight"]


def test_gated_linear_is_gate_then_up(device):
    module = randomise(ak.FusedGatedLinear(8, 6)).to(device)
    x = X.to(device)
    gate, up = F.linear(x, module.weight, module.bias).chunk(2, -1)
    torch.testing.assert_close(module(x), F.silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_gated_linear_is_initialised_like_two_linears():
    module = ak.FusedGatedLinear(400, 300)
    bound = 400**-0.5
    for half in module.weight.chunk(2):
        assert half.abs().max() <= bound and abs(half.std().item() / (bound / 3**0.5) - 1) < 0.02
    assert ak.FusedGatedLinear(0, 3)(torch.empty(2, 0)).shape == (2, 3)


# -------------------------------------------------------------------------------------------------------------------- mlp


def test_mlp_keys_and_value(device):
    module = randomise(ak.FusedMLP(8, 16, 6, activation="gelu_tanh")).to(device)
    assert list(module.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    x = X.to(device)
    expected = module.fc2(F.gelu(module.fc1(x), approximate="tanh"))
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
    assert ak.FusedMLP(8, 16).fc2.out_features == 8


def test_mlp_is_one_function():
    assert ak.FusedMLP(8, 16)(X).grad_fn.name() == "MlpCpuBackward"


@pytest.mark.parametrize("activation", ak.ACTIVATIONS, ids=str)
def test_mlp_calls_layers_that_are_more_than_their_weights(activation):
    """A hook, or a replaced layer (LoRA), is not silently passed by."""
    module = randomise(ak.FusedMLP(8, 16, activation=activation))
    fused = module(X)
    calls = []
    handle = module.fc1.register_forward_hook(lambda *_: calls.append("fc1"))
    torch.testing.assert_close(module(X), fused, rtol=1e-4, atol=1e-4)
    assert calls == ["fc1"]
    handle.remove()
    module(X)
    assert calls == ["fc1"]

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        weight = property(lambda self: self.base.weight)
        bias = property(lambda self: self.base.bias)

        def forward(self, x):
            return self.base(x) + 1

    module.fc2 = Adapter(module.fc2)
    torch.testing.assert_close(module(X), fused + 1, rtol=1e-4, atol=1e-4)


def test_mlp_whose_layers_were_fused_stays_fused():
    module = ak.FusedMLP(8, 16)
    for layer in (module.fc1, module.fc2):
        layer.__class__ = ak.FusedLinear
    assert module(X).grad_fn.name() == "MlpCpuBackward"
    module.fc1.activation = "relu"  # now it says something else than its weight and bias
    assert module(X).grad_fn.name() == "LinearCpuBackward"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_and_mlp_take_a_residual(device, dtype):
    x, residual = X.to(device), torch.randn(2, 4, 6, device=device).to(dtype)
    linear = randomise(ak.FusedLinear(8, 6, activation="gelu")).to(device)
    y = linear(x, residual)
    assert y.dtype == dtype
    torch.testing.assert_close(y, (F.gelu(F.linear(x, linear.weight, linear.bias)) + residual).to(dtype))
    assert ak.FusedLinear(8, 6, out_dtype=torch.float64).to(device)(x, residual).dtype == torch.float64
    mlp = randomise(ak.FusedMLP(8, 16, 6)).to(device)
    fused = mlp(x, residual)
    assert fused.dtype == dtype and fused.grad_fn.name().startswith("Mlp")
    expected = (mlp.fc2(F.gelu(mlp.fc1(x))) + residual).to(dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(fused, expected, **tolerance)
    calls = []
    mlp.fc2.register_forward_hook(lambda *_: calls.append("fc2"))
    torch.testing.assert_close(mlp(x, residual), fused, **tolerance)  # and has the residual's dtype there, too
    assert calls == ["fc2"]


# ------------------------------------------------------------------------------------------------------------------- rows


def test_norms_take_a_residual(device):
    x, residual = X.to(device), torch.randn(2, 4, 8, device=device)
    for module, torchs in ((ak.FusedLayerNorm(8), nn.LayerNorm(8)), (ak.FusedRMSNorm(8), nn.RMSNorm(8))):
        normed, total = module.to(device)(x, residual)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(normed, torchs.to(device)(x + residual))


def test_weight_offset_starts_at_scale_one():
    module = ak.FusedRMSNorm(8, weight_offset=1.0)
    assert torch.equal(module.weight, torch.zeros(8))
    torch.testing.assert_close(module(X), nn.RMSNorm(8)(X))
    with pytest.raises(ValueError, match=r"FusedRMSNorm: weight_offset must be 0 without a weight, got 1.0"):
        ak.FusedRMSNorm(8, elementwise_affine=False, weight_offset=1.0)


def test_softmax_options(device):
    x, mask = torch.randn(2, 4, 4, device=device), torch.rand(4, 4, device=device) > 0.3
    y = ak.FusedSoftmax(scale=0.5, causal=True)(x, mask)
    assert torch.equal(y, ak.softmax(x, scale=0.5, causal=True, mask=mask))


@pytest.mark.parametrize("make", [ak.FusedLayerNorm, ak.FusedRMSNorm])
def test_norm_in_the_autocast_dtype(make, device):
    x = X.to(device)
    module = make(8, out_dtype="autocast").to(device)
    with torch.autocast(device, torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    assert module(x).dtype == torch.float32


@pytest.mark.parametrize("make", [ak.FusedLayerNorm, ak.FusedRMSNorm, lambda n, **kw: ak.FusedSoftmax(**kw)])
def test_a_bad_out_dtype_is_refused_when_the_module_is_made(make):
    with pytest.raises(TypeError, match=r"out_dtype must be .*, got torch.int32"):
        make(8, out_dtype=torch.int32)
