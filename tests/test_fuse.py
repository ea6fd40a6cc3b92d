"""fuse and unfuse: the same parameters, keys, hooks and values; what is left alone, and said to be."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import ampkernels as ak


def block(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width), nn.RMSNorm(width), nn.Softmax(-1)
    )


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Block(nn.Module):
    """What MLP blocks of model libraries look like."""

    def __init__(self, activation: nn.Module, between: nn.Module | None = None):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.act = activation
        self.between = between
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x):
        x = self.fc1(x)
        if self.between is not None:
            x = self.between(x)
        return self.fc2(self.act(x))


def kinds(model: nn.Module) -> list[str]:
    return [type(m).__name__ for m in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_values_and_gradients_stay(training):
    torch.manual_seed(0)
    model = block().train(training)
    fused = copy.deepcopy(model)
    ak.fuse(fused)
    x = torch.randn(5, 16)
    expected, actual = model(x), fused(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    actual.backward(dy)
    for (name, p), q in zip(model.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_replaces_in_place_and_back():
    model = block()
    modules, parameters = list(model.modules()), list(model.parameters())
    keys, names = list(model.state_dict()), kinds(model)
    report = ak.fuse(model)
    assert kinds(model)[1:] == [
        "FusedLayerNorm", "FusedLinear", "AbsorbedActivation", "FusedLinear", "FusedRMSNorm", "FusedSoftmax"
    ]  # fmt: skip
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert model[1].activation == "gelu" and len(report.fused) == 5 and not report.left_alone
    ak.unfuse(model)
    assert kinds(model) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert "_ampkernels_before" not in vars(model[1]) and "activation" not in vars(model[1])


def test_idempotent():
    model = block()
    ak.fuse(model)
    again = ak.fuse(model)
    assert not again.fused and not again.left_alone
    ak.unfuse(model)
    ak.unfuse(model)
    assert type(model[1]) is nn.Linear


def test_the_model_itself():
    model = nn.Linear(4, 4)
    ak.fuse(model)
    assert type(model) is ak.FusedLinear


@pytest.mark.parametrize("direction", ["load into fused", "load from fused"])
def test_checkpoints_load_strictly_both_ways(direction):
    plain, fused = block(), block()
    ak.fuse(fused)
    source, target = (plain, fused) if direction == "load into fused" else (fused, plain)
    target.load_state_dict(source.state_dict(), strict=True)
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies(way):
    model = block()
    ak.fuse(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    x = torch.randn(3, 16)
    assert torch.equal(other(x), model(x))
    ak.unfuse(other)
    assert type(other[1]) is nn.Linear and type(other[2]) is nn.GELU and type(model[1]) is ak.FusedLinear


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x))

    model = Tied()
    ak.fuse(model)
    assert model.head.weight is model.embedding.weight
    model(torch.arange(3)).sum().backward()
    assert model.embedding.weight.grad is not None and len(list(model.parameters())) == 1


def test_hooks_stay_and_see_what_they_saw():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU())
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    x = torch.randn(2, 4)
    model(x)
    report = ak.fuse(model)
    model(x)
    torch.testing.assert_close(seen[1], seen[0])
    assert model[0].activation is None and type(model[1]) is nn.GELU  # the hook must see the pre-activation
    assert model[2].activation == "gelu" and len(report.fused) == 2


def test_subclass_with_its_own_forward_is_left_alone_and_reported():
    model = nn.Sequential(OwnForward(4, 4), nn.GELU(), nn.Linear(4, 4))
    report = ak.fuse(model)
    assert type(model[0]) is OwnForward and type(model[1]) is nn.GELU
    (entry,) = report.left_alone
    assert entry.name == "0" and "own forward" in entry.note and "own forward" in str(report)


def test_parametrized_and_patched_modules_are_left_alone():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[1].forward = lambda x: x
    report = ak.fuse(model)
    assert not report.fused and len(report.left_alone) == 2


def test_multihead_attention_keeps_working():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    expected = attention(x, x, x)[0]
    ak.fuse(attention)
    torch.testing.assert_close(attention(x, x, x)[0], expected)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(training):
        expected = layer(x)
        ak.fuse(layer)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.ReLU(), "relu"), (nn.ReLU(inplace=True), "relu"), (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"), (nn.Sigmoid(), "sigmoid"), (nn.Tanh(), "tanh"),
    ],
)  # fmt: skip
def test_activations_are_told_by_their_values(module, name):
    model = Block(module)
    x = torch.randn(3, 8)
    expected = model(x)
    ak.fuse(model)
    assert model.fc1.activation == name and model.fc2.activation is None
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "module", [nn.LeakyReLU(), nn.ELU(), nn.Softplus(), nn.PReLU(), nn.Hardswish(), nn.Dropout(0.5)]
)
def test_other_activations_stay(module):
    model = Block(module)
    ak.fuse(model)
    assert model.fc1.activation is None and type(model.act) is type(module)


def test_activation_that_does_not_follow_directly_stays():
    model = Block(nn.GELU(), between=nn.Dropout(0.1))
    ak.fuse(model)
    assert model.fc1.activation is None and type(model.act) is nn.GELU


def test_linear_whose_output_is_read_twice_keeps_it():
    class Twice(Block):
        def forward(self, x):
            h = self.fc1(x)
            return self.fc2(self.act(h) * h)

    model = Twice(nn.SiLU())
    x = torch.randn(3, 8)
    expected = model(x)
    ak.fuse(model)
    assert model.fc1.activation is None
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_shared_activation_stays():
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    x = torch.randn(3, 4)
    expected = model(x)
    ak.fuse(model)
    assert type(act) is nn.GELU and type(model[0]) is ak.FusedLinear
    torch.testing.assert_close(model(x), expected)


def test_linear_that_is_called_twice_keeps_its_activation_apart():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.fc(self.act(self.fc(x)))

    model = Loop()
    x = torch.randn(3, 4)
    expected = model(x)
    ak.fuse(model)
    torch.testing.assert_close(model(x), expected)


def test_forward_that_cannot_be_traced():
    class Dynamic(Block):
        def forward(self, x):
            h = self.fc1(x)
            if h.sum() > 0:
                h = self.act(h)
            return self.fc2(h)

    model = Dynamic(nn.GELU())
    ak.fuse(model)
    assert model.fc1.activation is None and type(model.fc1) is ak.FusedLinear


def test_include_and_exclude():
    model = nn.ModuleDict({"encoder": block(), "head": nn.Linear(16, 4)})
    report = ak.fuse(model, include="encoder.*", exclude=[nn.LayerNorm, lambda name, _: name.endswith(".5")])
    assert type(model["head"]) is nn.Linear and type(model["encoder"][0]) is nn.LayerNorm
    assert type(model["encoder"][5]) is nn.Softmax and type(model["encoder"][1]) is ak.FusedLinear
    assert {e.note for e in report.left_alone} == {"not included", "excluded"}


def test_accumulate_is_set_on_the_linears():
    model = block()
    ak.fuse(model, accumulate="fp32")
    assert str(model[1].accumulate) == "fp32"
    with pytest.raises(ValueError, match="Accumulate: must be"):
        ak.fuse(block(), accumulate="fp8")


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"fuse: model must be an nn\.Module, got list"):
        ak.fuse([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unfuse: model must be an nn\.Module, got int"):
        ak.unfuse(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fuse: include must be a glob, a module class or a function"):
        ak.fuse(block(), include=[3])  # type: ignore[list-item]


def test_report_groups_repeated_blocks():
    model = nn.Sequential(*(block() for _ in range(3)))
    text = str(ak.fuse(model))
    assert "*.*" in text and "FusedLayerNorm" in text and "fused 15 modules" in text


# -------------------------------------------------------------------------------------------- models of other libraries


def test_timm_vision_transformer():
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=2, num_heads=2
    ).eval()
    x = torch.randn(2, 1, 8, 8)
    expected = model(x)
    report = ak.fuse(model)
    assert all(b.mlp.fc1.activation == "gelu" and isinstance(b.norm1, ak.FusedLayerNorm) for b in model.blocks)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert len(report.fused) >= 2 * 6


@pytest.mark.parametrize("family", ["bert", "vit", "llama", "gemma", "gpt2", "distilbert"])
def test_transformers(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = torch.arange(12).view(2, 6)
    if family == "bert":
        model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **small))
        acts = [layer.intermediate.dense for layer in model.encoder.layer]
        args = (tokens,)
    elif family == "vit":
        model = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **small))
        acts = [m for n, m in model.named_modules() if n.endswith(("intermediate.dense", "mlp.fc1"))]
        args = (torch.randn(2, 3, 8, 8),)
    elif family == "llama":
        model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **small))
        acts = [layer.mlp.gate_proj for layer in model.layers]
        args = (tokens,)
    elif family == "gemma":
        model = transformers.GemmaModel(
            transformers.GemmaConfig(vocab_size=50, head_dim=16, num_key_value_heads=2, **small)
        )
        acts = [layer.mlp.gate_proj for layer in model.layers]
        args = (tokens,)
    elif family == "gpt2":
        model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2))
        acts = [layer.mlp.c_fc for layer in model.h]
        args = (tokens,)
    else:
        config = transformers.DistilBertConfig(vocab_size=50, dim=32, hidden_dim=64, n_layers=2, n_heads=2)
        model = transformers.DistilBertModel(config)
        acts = []  # its feed-forward is chunked by a helper that a trace does not see through
        args = (tokens,)
    model.eval()
    for module in model.modules():  # weights that are not 1: a norm without them, or with an offset, would be seen
        if type(module).__name__.endswith("Norm"):
            module.weight.data += 0.1 * torch.randn_like(module.weight)
    keys = list(model.state_dict())
    names = kinds(model)
    with torch.no_grad():
        expected = model(*args).last_hidden_state
        ak.fuse(model)
        actual = model(*args).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
    assert all(linear.activation is not None for linear in acts)
    assert not any(
        type(m).__name__ in ("Conv1D", "LayerNorm") or "aRMSNorm" in type(m).__name__ for m in model.modules()
    )
    assert list(model.state_dict()) == keys
    ak.unfuse(model)
    assert kinds(model) == names
    with torch.no_grad():
        assert torch.equal(model(*args).last_hidden_state, expected)


def test_conv1d_has_its_gradients():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(12, 8), nn.GELU(approximate="tanh"))
    other = copy.deepcopy(model)
    ak.fuse(other)
    assert other[0].activation == "gelu_tanh"
    x, dy = torch.randn(5, 8), torch.randn(5, 12)
    model(x).backward(dy)
    other(x).backward(dy)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
        assert q.grad.stride() == p.grad.stride()
