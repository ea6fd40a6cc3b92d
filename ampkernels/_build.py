"""What this build is: its version, the sources it came from, what was compiled in, and why something is missing.

`setup.py` loads this file by path, before the package or torch can be imported: standard library only at module level.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_CSRC = Path(__file__).resolve().parent.parent / "csrc"


def csrc_digest(csrc: Path = _CSRC) -> str | None:
    """The first 12 hex digits of the SHA-256 over the paths and contents of `csrc/`, or None without a source tree.

    The build bakes it in (`build_info()["csrc"]`); benchmarks and golden files carry it, so that a number can be traced
    to the code that made it.
    """
    files = sorted((path.relative_to(csrc).as_posix(), path) for path in csrc.rglob("*") if path.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def covers(archs: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether code built for `archs` ("8.0", "9.0a", "10.0+PTX", ...) runs on a GPU of this compute capability.

    Machine code runs on its own major version, from its minor version up ("a" code on that very version only); PTX on
    everything from its version up.
    """
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if match is None:
            continue
        built = (int(match[1]), int(match[2]))
        if match[4] and capability >= built:
            return True
        if match[3] == "a":
            if capability == built:
                return True
        elif capability[0] == built[0] and capability[1] >= built[1]:
            return True
    return False


def describe(config: Mapping[str, Any]) -> str:
    """The block that the build prints at its end, from the configuration that it compiles in."""
    cuda = config["cuda"]
    gpu = f"left out: {cuda['reason']}"
    if cuda["built"]:
        gpu = f"nvcc {cuda['toolkit']}, archs {' '.join(cuda['archs'])}"
    rows = [
        ("CPU kernels", config["compiler"]),
        ("CUDA kernels", gpu),
        ("planner", "built" if config["planner"] else "left out: csrc/plan/module.cpp does not exist"),
        ("built with", f"torch {config['torch']}, Python {config['python']}"),
        ("sources", f"csrc {config['csrc']}"),
        *(("note", note) for note in config["notes"]),
    ]
    return "\n".join([f"ampkernels {config['version']}", *_lines(rows)])


def _lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<16}{value}" for name, value in rows]


class BuildInfo(dict[str, Any]):
    """The result of `build_info()`: a dict that prints as a block of text."""

    def __str__(self) -> str:
        if "error" in self:
            return f"ampkernels {self['version']}\n  {self['error']}"
        running = self["running"]
        rows = [("running on", f"torch {running['torch']}"), ("CUDA", running["cuda"] or "ready")]
        for device in ("CPU", "CUDA"):
            rows.append((f"{device} operators", ", ".join(running["operators"][device]) or "none"))
        if running["stale"]:
            rows.append(("stale build", running["stale"]))
        return "\n".join([describe(self), *_lines(rows)])

    __repr__ = __str__


def import_failure(error: ImportError) -> str:
    """Why `ampkernels._C` did not load, and what to do about it."""
    import torch

    if isinstance(error, ModuleNotFoundError):
        return (
            "the compiled extension ampkernels._C is missing: in a clone, run `make build` or "
            "`pip install --no-build-isolation -e .`; elsewhere, reinstall the package"
        )
    remedy = "rebuild it against this torch"
    if re.search("torch_cuda|cudart|aoti_torch_get_current_cuda_stream", str(error)):
        remedy = "it holds CUDA kernels, so install a CUDA build of torch, or rebuild it with AMPKERNELS_CUDA=0"
    return f"torch {torch.__version__} cannot load the compiled extension ampkernels._C ({error}): {remedy}"


def build_info() -> BuildInfo:
    """What the extension was built with and for, what is present, and why something is missing.

    Returns:
        A dict that prints as a block of text. Keys: `version`; `csrc` (digest of the sources); `torch`, `python`,
        `compiler` (built with); `cuda` (`built`, `reason`, `toolkit`, `archs`); `kernels` (source files of `cpu` and
        `cuda`); `planner`; `notes`; and `running`: `torch`, `cuda` (why CUDA tensors cannot be used now, or None),
        `operators` (those present for `CPU` and `CUDA`), `stale` (how the sources differ from the build, or None). If
        the extension cannot be loaded, `version` and `error` only.
    """
    import torch

    try:
        importlib.import_module("ampkernels._C")
    except ImportError as error:
        return BuildInfo(version=__version__, error=import_failure(error))
    config = json.loads(torch.ops.ampkernels.build_config())
    if not config:
        return BuildInfo(
            version=__version__, error="the extension was not built by setup.py, and says nothing of itself"
        )

    source = csrc_digest()
    stale = None
    if source not in (None, config["csrc"]):
        stale = f"built from csrc {config['csrc']}, the source tree has {source}: run `make build`"
    capabilities = []
    if torch.cuda.is_available():
        capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    running = {
        "torch": torch.__version__,
        "cuda": cuda_unavailable_reason(config["cuda"], capabilities),
        "operators": {device: _operators(device) for device in ("CPU", "CUDA")},
        "stale": stale,
    }
    return BuildInfo(config, running=running)


def cuda_unavailable_reason(cuda: Mapping[str, Any], capabilities: Iterable[tuple[int, int]]) -> str | None:
    """Why the kernels cannot run on the visible GPUs, or None if they can."""
    if not cuda["built"]:
        return f"built without CUDA: {cuda['reason']}"
    capabilities = list(capabilities)
    if not capabilities:
        return "no GPU is visible to torch"
    missing = sorted({c for c in capabilities if not covers(cuda["archs"], c)})
    if missing:
        names = ", ".join(f"sm_{major}{minor}" for major, minor in missing)
        return f"GPU {names} is not covered by the archs built: {' '.join(cuda['archs'])}"
    return None


def _operators(device: str) -> list[str]:
    import torch

    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(device)
    return sorted(name.split("::")[1] for name in names if name.startswith("ampkernels::"))


def main(argv: list[str]) -> int:
    """`python -m ampkernels info [--json]`."""
    info = build_info()
    print(json.dumps(info, indent=2) if "--json" in argv else info)
    return 1 if "error" in info else 0
