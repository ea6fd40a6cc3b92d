"""What each suite measures: named groups of shapes per operation, and who takes part by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.ops import DIRECTIONS, OPS, shape_name
from benchmarks.runner import Point

Shape = tuple[int, ...]

# M x N x K. For gated_linear N = 2F; mlp has its own.
NINE: tuple[Shape, ...] = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 3072, 768),
    (16384, 768, 3072),
    (3072, 12288, 3072),
    (8192, 28672, 4096),
    (64, 14336, 4096),
)
LLAMA_8B_WIDTHS = ((14336, 4096), (4096, 14336))  # N x K of the up and the down projection
LLAMA_M = (1, 4, 16, 64, 256, 1024, 4096, 16384)
# Neither a multiple of 8: N, then K, then both; and everything.
ODD: tuple[Shape, ...] = ((4096, 4095, 4096), (4096, 4096, 4095), (4096, 1001, 1003), (1023, 4097, 4099))
MLP: tuple[Shape, ...] = ((8192, 14336, 4096), (16384, 3072, 768), (64, 14336, 4096))
ROWS: tuple[Shape, ...] = (
    (65536, 256),
    (32768, 768),
    (32768, 1024),
    (16384, 2048),
    (16384, 4096),
    (8192, 8192),
    (8192, 16384),
    (4096, 32768),
    (2048, 65536),
    (1024, 131072),
)
SMALL_ROWS: tuple[Shape, ...] = ((1, 4096), (64, 1024), (512, 1024), (4096, 1024))
ODD_ROWS: tuple[Shape, ...] = ((32768, 767), (16384, 4095), (4096, 32767))

CPU_GEMM: tuple[Shape, ...] = ((512, 3072, 768), (512, 768, 3072), (1, 3072, 768), (512, 1001, 1003))
CPU_ROWS: tuple[Shape, ...] = ((4096, 768), (512, 16384), (64, 768), (4096, 767))


@dataclass(frozen=True)
class Group:
    """Shapes that belong together. `bwd` is off where nobody trains at these shapes."""

    name: str
    shapes: tuple[Shape, ...]
    bwd: bool = True


def _llama(name: str, rows: Sequence[int], bwd: bool) -> Group:
    return Group(name, tuple((m, n, k) for n, k in LLAMA_8B_WIDTHS for m in rows), bwd)


_GEMM_GROUPS = (
    Group("nine", NINE),
    _llama("llama-decode", [m for m in LLAMA_M if m < 1024], bwd=False),
    _llama("llama-batch", [m for m in LLAMA_M if m >= 1024], bwd=False),
    Group("odd", ODD),
    Group("cpu", CPU_GEMM),
)
_ROW_GROUPS = (Group("rows", ROWS), Group("small", SMALL_ROWS), Group("odd", ODD_ROWS), Group("cpu", CPU_ROWS))
GROUPS: dict[str, tuple[Group, ...]] = {
    "linear": _GEMM_GROUPS,
    "gated_linear": (Group("nine", NINE), Group("odd", ODD), Group("cpu", CPU_GEMM)),
    "mlp": (Group("mlp", MLP), Group("cpu", ((512, 3072, 768), (64, 3072, 768)))),
    "softmax": _ROW_GROUPS,
    "layer_norm": _ROW_GROUPS,
    "rms_norm": _ROW_GROUPS,
}
OP_SUITES = tuple(GROUPS)
OTHER_SUITES = ("model", "train", "numerics", "host")
SUITES = (*OP_SUITES, *OTHER_SUITES)

# The first of each comes first; the others only while the time limit has room for them.
QUICK: dict[str, tuple[Shape, ...]] = {
    "linear": ((8192, 8192, 8192), (16384, 3072, 768), (64, 14336, 4096)),
    "gated_linear": ((8192, 28672, 4096),),
    "mlp": ((8192, 14336, 4096),),
    "softmax": ((8192, 16384), (65536, 256)),
    "layer_norm": ((8192, 16384), (32768, 1024)),
    "rms_norm": ((8192, 16384), (32768, 1024)),
}
QUICK_CPU: dict[str, tuple[Shape, ...]] = {
    "linear": ((512, 3072, 768),),
    "gated_linear": ((512, 3072, 768),),
    "mlp": ((512, 3072, 768),),
    "softmax": ((4096, 768),),
    "layer_norm": ((4096, 768),),
    "rms_norm": ((4096, 768),),
}


def op_points(
    op: str,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    directions: Sequence[str] = DIRECTIONS,
    shapes: Sequence[str] | None = None,
    quick: bool = False,
    layout: str = "contiguous",
    residual: bool = False,
) -> list[Point]:
    """The points of an operation's suite.

    Args:
        shapes: Names of groups, and shapes such as `4096x4096x4096` (any, not only those of the suite); None for all
            that suit the device.
        quick: The few shapes of the quick set.
        layout: Of the first input.
        residual: Norms of x + residual, linear plus one; their forward alone.

    Raises:
        ValueError: A name in `shapes` is neither; the message lists the groups and their shapes.
    """
    chosen = _chosen(op, device, shapes, quick)
    points = []
    for shape, bwd in chosen.items():
        for dtype in dtypes:
            for direction in directions:
                if direction == "fwd" or (bwd and not residual):
                    points.append(Point(op, op, shape, dtype, direction, layout, residual))
    return points


def _chosen(op: str, device: torch.device, shapes: Sequence[str] | None, quick: bool) -> dict[Shape, bool]:
    """Shapes in order, each once, and whether their backward is measured."""
    chosen: dict[Shape, bool] = {}
    if shapes is not None:
        groups = {group.name: group for group in GROUPS[op]}
        for name in shapes:
            if name in groups:
                for shape in groups[name].shapes:
                    chosen[shape] = chosen.get(shape, False) or groups[name].bwd
                continue
            try:
                chosen[OPS[op].parse(name)] = True
            except ValueError:
                raise ValueError(
                    f"{op}: unknown shape {name!r}; valid: a shape {'x'.join(OPS[op].axes)}, or one of "
                    + "; ".join(describe_group(group) for group in GROUPS[op])
                ) from None
        return chosen
    if quick:
        return dict.fromkeys((QUICK if device.type == "cuda" else QUICK_CPU)[op], True)
    for group in GROUPS[op]:
        if (group.name == "cpu") == (device.type == "cpu"):
            for shape in group.shapes:
                chosen[shape] = chosen.get(shape, False) or group.bwd
    return chosen


def share_shapes(names: Sequence[str], chosen: Sequence[str], models: Sequence[str]) -> dict[str, list[str]]:
    """Which of the names of --shapes each of the chosen suites takes; the others take none.

    Raises:
        ValueError: No suite knows a name, or nothing is left for a suite; the message lists what there is.
    """
    shares: dict[str, list[str]] = {suite: [] for suite in chosen if suite in OP_SUITES or suite == "model"}
    refused: dict[tuple[str, str], str] = {}
    for suite, share in shares.items():
        for name in names:
            try:
                if suite == "model" and name not in models:
                    raise ValueError(f"model: unknown shape {name!r}; valid: {', '.join(models)}")
                if suite != "model":
                    _chosen(suite, torch.device("cpu"), [name], False)
                share.append(name)
            except ValueError as error:
                refused[suite, name] = str(error)
    for name in names:
        if shares and all((suite, name) in refused for suite in shares):
            raise ValueError(refused[next(iter(shares)), name])
    for suite, share in shares.items():
        if not share:
            raise ValueError(refused[suite, names[0]])
    return shares


def describe_group(group: Group) -> str:
    note = "" if group.bwd else " (forward)"
    return f"{group.name}{note}: {', '.join(map(shape_name, group.shapes))}"


def check_suites(names: Sequence[str]) -> list[str]:
    """Suites by name, `all` spelled out; ValueError that lists the valid ones."""
    chosen: list[str] = []
    for name in names:
        if name != "all" and name not in SUITES:
            raise ValueError(f"unknown suite {name!r}; valid: {', '.join((*SUITES, 'all'))}")
        chosen += [s for s in (SUITES if name == "all" else (name,)) if s not in chosen]
    return chosen
