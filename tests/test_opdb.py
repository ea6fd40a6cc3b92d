"""A third party's inputs: PyTorch's own samples for these operations (torch.testing._internal), through ours."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import ampkernels as ak

OPS = {
    "nn.functional.linear": ak.linear,
    "softmax": ak.softmax,
    "log_softmax": ak.log_softmax,
    "nn.functional.layer_norm": ak.layer_norm,
    "nn.functional.rms_norm": ak.rms_norm,
}
INFOS = {info.name: info for info in op_db if info.name in OPS and not info.variant_test_name}


def test_none_is_missing():
    assert INFOS.keys() == OPS.keys()


def arguments(name, sample):
    """torch's arguments as ours: torch.softmax takes a dtype to cast the input to."""
    kwargs = dict(sample.kwargs)
    args = list(sample.args)
    if name.endswith("softmax"):
        dtype = kwargs.pop("dtype", None)
        if len(args) > 1:
            dtype = args.pop()
        if dtype is not None:
            kwargs["out_dtype"] = dtype
    return args, kwargs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(OPS))
def test_samples(device, name, dtype):
    info, count = INFOS[name], 0
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        args, kwargs = arguments(name, sample)
        wide = [
            a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) else a
            for a in (sample.input, *sample.args)
        ]
        wide_kwargs = {k: v.detach().double() if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()}
        if name.endswith("softmax"):
            wide_kwargs.pop("dtype", None)
        try:
            actual = OPS[name](sample.input, *args, **kwargs)
        except (TypeError, ValueError) as error:  # e.g. softmax of another dtype than the four
            out = kwargs.get("out_dtype")
            negative_eps = kwargs.get("eps", args[-1] if args else None)
            if out is not None and not out.is_floating_point:
                continue
            if isinstance(negative_eps, float) and negative_eps < 0 and "eps must be at least 0" in str(error):
                continue  # torch takes it, and the root of a negative number with it
            raise AssertionError(f"{name}: {sample}") from error
        expected = info.op(wide[0], *[w for w in wide[1:] if not isinstance(w, torch.dtype)], **wide_kwargs)
        out = actual.dtype
        u = max(torch.finfo(out).eps, torch.finfo(dtype).eps)
        torch.testing.assert_close(
            actual.double(),
            expected.double(),
            rtol=2 * u,
            atol=4 * u * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0),
        )
        if actual.requires_grad:
            dy = torch.randn_like(actual)
            actual.backward(dy)
            expected.backward(dy.double())
            for ours, theirs in zip((sample.input, *sample.args), wide, strict=True):
                if isinstance(ours, torch.Tensor) and ours.grad is not None:
                    largest = float(theirs.grad.abs().max()) if theirs.grad.numel() else 1.0
                    torch.testing.assert_close(
                        ours.grad.double(),
                        theirs.grad,
                        rtol=8 * u,
                        atol=16 * u * max(1.0, largest, 1e5 * (dtype == torch.float64)),
                    )
        count += 1
    assert count >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_samples_with_a_residual(device, dtype):
    info = INFOS["nn.functional.linear"]
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        plain = info.op(sample.input.double(), *(a.double() for a in sample.args))
        residual = torch.randn_like(plain).to(dtype).requires_grad_()
        actual = ak.linear(sample.input, *sample.args, residual=residual)
        expected = plain + residual.double()
        u = torch.finfo(dtype).eps
        largest = max(1.0, float(plain.abs().max()) if plain.numel() else 1.0)
        torch.testing.assert_close(actual.double(), expected, rtol=2 * u, atol=4 * u * largest)
        dy = torch.randn_like(actual)
        actual.backward(dy)
        assert torch.equal(residual.grad, dy) and sample.input.grad is not None


@pytest.mark.parametrize("name", sorted(OPS))
def test_error_samples(device, name):
    """Where torch refuses, so do we, with ours of the two exceptions."""
    info = INFOS[name]
    if info.error_inputs_func is None:
        pytest.skip("torch lists no errors for this operation")
    for error in info.error_inputs(device):
        args, kwargs = arguments(name, error.sample_input)
        with pytest.raises((TypeError, ValueError), match=info.name.rsplit(".", 1)[-1]):
            OPS[name](error.sample_input.input, *args, **kwargs)
