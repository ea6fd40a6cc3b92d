"""Fuse a whole model in place, and undo it.

``fuse`` never builds a new module: it changes the class of the modules that are already there (``nn.Linear`` becomes
:class:`~ampkernels.FusedLinear`, a subclass of it). Parameters, buffers, hooks, names, ties between weights and every
reference to a module stay what they were, so optimizers, checkpoints and ``state_dict`` keys do not notice.

A linear that is directly followed by its activation computes both in one call; the activation module stays in its place
and passes its input through. Whether the one feeds the other, and only the other, is read off a trace of the module that
holds both (``torch.fx``), not off names; which activation it is, is read off its values.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from . import functional, reference
from ._ops import ACTIVATIONS
from .accumulate import Accumulate
from .nn import FusedLayerNorm, FusedLinear, FusedRMSNorm, FusedSoftmax

__all__ = ["FusionReport", "fuse", "unfuse"]

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]

# torch's module -> ours, and the attributes that ours has beyond torch's, at their defaults.
_FUSED: dict[type[nn.Module], tuple[type[nn.Module], dict[str, Any]]] = {
    nn.Linear: (FusedLinear, {"activation": None, "accumulate": None, "out_dtype": None}),
    nn.LayerNorm: (FusedLayerNorm, {"out_dtype": None}),
    nn.RMSNorm: (FusedRMSNorm, {"weight_offset": 0.0, "out_dtype": None}),
    nn.Softmax: (FusedSoftmax, {"scale": 1.0, "causal": False, "out_dtype": None}),
}

# Where a fused module keeps what `unfuse` needs: its class before, the attributes that were replaced, those added.
_BEFORE = "_ampkernels_before"


class FusedConv1D(nn.Module):
    """transformers' ``Conv1D`` (GPT-2): a linear whose weight is (in, out), read as it lies."""

    weight: nn.Parameter
    bias: nn.Parameter
    activation: str | None = None
    accumulate: Accumulate | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias, activation=self.activation, accumulate=self.accumulate)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, activation={self.activation!r}"


class AbsorbedActivation(nn.Module):
    """Stands where an activation was whose linear now computes it: returns its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input

    def extra_repr(self) -> str:
        return f"{getattr(self, _BEFORE)[0].__name__}, computed by the linear before it"


@dataclass(frozen=True)
class Entry:
    """One module that ``fuse`` looked at. ``after`` is None where it was left alone; ``note`` says why, or how."""

    name: str
    before: str
    after: str | None
    note: str = ""


@dataclass
class FusionReport:
    """What ``fuse`` replaced by what, what it left alone, and why. Prints as a table."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def fused(self) -> list[Entry]:
        """The modules that were replaced."""
        return [e for e in self.entries if e.after is not None]

    @property
    def left_alone(self) -> list[Entry]:
        """The modules that could have been, and were not."""
        return [e for e in self.entries if e.after is None]

    def summary(self) -> str:
        """One line: counts by kind."""
        kinds = Counter((e.before, e.after) for e in self.fused)
        replaced = ", ".join(f"{n} {before} -> {after}" for (before, after), n in kinds.items())
        return f"fused {len(self.fused)} modules ({replaced or 'none'}); left {len(self.left_alone)} alone"

    def __str__(self) -> str:
        # Modules of repeated blocks differ in their indices only: one line for all of them.
        groups: dict[tuple[str, str, str | None, str], list[str]] = {}
        for e in self.entries:
            pattern = ".".join("*" if part.isdigit() else part for part in e.name.split("."))
            groups.setdefault((pattern, e.before, e.after, e.note), []).append(e.name)
        rows = [("module", "was", "is now", "n", "note")]
        for (pattern, before, after, note), names in groups.items():
            name = names[0] if len(names) == 1 else pattern
            rows.append((name or "(the model itself)", before, after or "left alone", str(len(names)), note))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([*lines, self.summary()])


def fuse(
    model: nn.Module,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    accumulate: str | Accumulate | None = None,
) -> FusionReport:
    """Replaces the modules of ``model`` that ampkernels has kernels for, in place.

    ``nn.Linear``, ``nn.LayerNorm``, ``nn.RMSNorm`` and ``nn.Softmax`` become their fused subclasses; so do transformers'
    ``Conv1D`` and its RMSNorms of the usual formula (which round once more than ours: before the weight). A linear whose
    output goes to an activation module and nowhere else computes the activation, too. Everything else is untouched.
    Idempotent; undone by :func:`unfuse`.

    Args:
        model: any module; itself replaced if it is one of the four.
        include: if given, only modules that match. A selector is a glob over qualified names (``"encoder.*"``), a module
            class, or a function of (name, module); or several of them, of which one must match.
        exclude: modules to leave alone; wins over ``include``.
        accumulate: the accumulation policy of every linear that is replaced (see :class:`~ampkernels.Accumulate`).

    Returns:
        A :class:`FusionReport`; print it.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or a selector is none of the three kinds.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be an nn.Module, got {type(model).__name__}")
    included, excluded = _matcher(include, "include"), _matcher(exclude, "exclude")
    policy = None if accumulate is None else Accumulate.parse(accumulate)
    report = FusionReport()
    chosen: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, _BEFORE) or _replacement(module) is None:
            continue
        reason = _reason_to_leave(module)
        if include is not None and not included(name, module):
            reason = "not included"
        elif exclude is not None and excluded(name, module):
            reason = "excluded"
        if reason is None:
            chosen[module] = name
        else:
            report.entries.append(Entry(name, type(module).__name__, None, reason))

    absorbed = _find_activations(model, chosen)
    for module, name in chosen.items():
        before, replacement = type(module), _replacement(module)
        assert replacement is not None
        after, attributes = replacement[0], dict(replacement[1])
        note = ""
        if "activation" in attributes:
            attributes["accumulate"] = policy
            if module in absorbed:
                act_name, act, attributes["activation"] = absorbed[module]
                note = f"with {attributes['activation']} of {act_name.rpartition('.')[2]}"
                _swap(act, AbsorbedActivation, {})
        _swap(module, after, attributes)
        report.entries.append(Entry(name, before.__name__, after.__name__, note))
    return report


def unfuse(model: nn.Module) -> None:
    """Gives every module that :func:`fuse` replaced its class back. Parameters and state are untouched."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unfuse: model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if hasattr(module, _BEFORE):
            before, replaced, added = vars(module).pop(_BEFORE)
            for attribute in added:
                vars(module).pop(attribute, None)
            vars(module).update(replaced)
            module.__class__ = before


def _swap(module: nn.Module, after: type[nn.Module], attributes: dict[str, Any]) -> None:
    vars(module)[_BEFORE] = (
        type(module),
        {name: vars(module)[name] for name in attributes if name in vars(module)},
        tuple(attributes),
    )
    vars(module).update(attributes)
    module.__class__ = after


def _matcher(selectors: Any, argument: str) -> Callable[[str, nn.Module], bool]:
    if selectors is None or isinstance(selectors, str | type) or callable(selectors):
        selectors = [] if selectors is None else [selectors]
    tests = [_test(selector, argument) for selector in selectors]
    return lambda name, module: any(test(name, module) for test in tests)


def _test(selector: Selector, argument: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, str):
        return lambda name, _: fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, type):
        return lambda _, module: isinstance(module, selector)
    if callable(selector):
        return selector
    raise TypeError(
        f"fuse: {argument} must be a glob, a module class or a function of (name, module), got {type(selector).__name__}"
    )


def _replacement(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]] | None:
    """The class that a module would become, and the attributes that it would gain."""
    for base, fused in _FUSED.items():
        if isinstance(module, base):
            return fused
    cls = type(module)
    if f"{cls.__module__}.{cls.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return FusedConv1D, {"activation": None, "accumulate": None}
    if cls.__module__.startswith("transformers.") and cls.__name__.endswith("RMSNorm"):
        attributes = _rms_norm(module)
        return None if attributes is None else (FusedRMSNorm, attributes)
    return None


def _rms_norm(module: Any) -> dict[str, Any] | None:
    """The attributes that make a FusedRMSNorm of a module of another library, judged by its values; None if none do."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.is_meta:
        return None
    x = torch.linspace(-2.0, 3.0, 2 * weight.numel(), device=weight.device).view(2, -1)
    try:
        with torch.no_grad():
            values = module(x).double()
    except Exception:  # not a function of one tensor
        return None
    for offset in (0.0, 1.0):
        expected = reference.rms_norm(x, weight.numel(), weight.detach(), eps, weight_offset=offset)
        if torch.allclose(values, expected, rtol=2 * torch.finfo(weight.dtype).eps, atol=1e-5):
            shape = (weight.numel(),)
            return {
                "normalized_shape": shape, "eps": eps, "elementwise_affine": True, "weight_offset": offset,
                "out_dtype": None,
            }  # fmt: skip
    return None


def _reason_to_leave(module: nn.Module) -> str | None:
    """Why a module that has a replacement must stay as it is all the same; None if it can be replaced."""
    base = next((base for base in _FUSED if isinstance(module, base)), None)
    cls = type(module)
    if base is not None and isinstance(module, _FUSED[base][0]):
        return "is one of ours already"
    if (
        base is not None
        and cls is not base
        and not _SAME_AS_TORCH.get(f"{cls.__module__}.{cls.__qualname__}", lambda _: False)(module)
    ):
        if cls.forward is not base.forward:
            return f"subclass of nn.{base.__name__} with its own forward"
        return f"subclass of nn.{base.__name__}: its own code may rely on its class"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    for name, tensor in module.named_parameters(recurse=False):
        if not tensor.is_floating_point():
            return f"{name} has dtype {tensor.dtype}"
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            return f"{name} is on {tensor.device.type}"
    return None


# Subclasses that other libraries build their models from, and when their forward is torch's.
_SAME_AS_TORCH: dict[str, Callable[[Any], bool]] = {
    "timm.layers.norm.LayerNorm": lambda module: not module._fast_norm,
}


# ------------------------------------------------------------------------------------------------ linear -> activation


def _find_activations(model: nn.Module, chosen: dict[nn.Module, str]) -> dict[nn.Module, tuple[str, nn.Module, str]]:
    """{linear: (name of the activation module, the module, its activation)} for every pair that can be one call."""
    seen = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    found: dict[nn.Module, tuple[str, nn.Module, str]] = {}
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        if not any(child in chosen for child in children.values()):
            continue
        activations = {
            child: (n, kind)
            for n, child in children.items()
            if seen[child] == 1 and not _has_hooks(child) and (kind := _recognise(child)) is not None
        }
        if not activations:
            continue
        for linear, act in _chained(parent):
            if linear in chosen and act in activations and seen[linear] == 1 and not _has_hooks(linear):
                child_name, kind = activations[act]
                found[linear] = (f"{name}.{child_name}".lstrip("."), act, kind)
    return found


def _has_hooks(module: nn.Module) -> bool:
    """Hooks see what goes in and out of a module; a linear that absorbs its activation would show them something else."""
    return any(
        vars(module).get(name)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


class _Children(fx.Tracer):
    """Traces one module's own forward; every child is a leaf."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _chained(parent: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Pairs (linear, next) of children where next's only input is the linear's output, which nothing else reads."""
    try:
        graph = _Children().trace(parent)
    except Exception:  # whatever a forward may raise on proxies: then nothing is known, and nothing is absorbed
        return
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        if node.op != "call_module" or calls[node.target] != 1 or len(node.users) != 1:
            continue
        user = next(iter(node.users))
        if user.op == "call_module" and calls[user.target] == 1 and user.args == (node,) and not user.kwargs:
            linear, act = parent.get_submodule(str(node.target)), parent.get_submodule(str(user.target))
            if "activation" in (_replacement(linear) or ((), ()))[1]:
                yield linear, act


_PROBE = torch.linspace(-9.0, 9.0, 257)


def _recognise(module: nn.Module) -> str | None:
    """Which of our activations a module computes, judged by its values; None if none."""
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()) or isinstance(module, nn.Linear):
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            values = module(_PROBE.clone())
    except Exception:  # not a function of one tensor
        return None
    if not isinstance(values, torch.Tensor) or values.shape != _PROBE.shape:
        return None
    for name in ACTIVATIONS:
        expected = reference.activation(_PROBE.double(), name)
        if torch.allclose(values.double(), expected, rtol=1e-5, atol=1e-5):
            return name
    return None
