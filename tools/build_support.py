"""The decisions of setup.py, as functions of what was found: is CUDA built, for which archs, with how many jobs.

First the pure functions, which tests/test_build.py tables; then the probes that look at the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_TORCH = (2, 10)
MIN_GXX = 10  # C++20
MIN_ARCH = (8, 0)  # bf16 mma.sync and cp.async

# sm_90 is built as sm_90a, which alone has wgmma and TMA multicast; both run on compute capability 9.0 only, so nothing
# is lost. PTX rides on 10.0, not 12.0, so that 11.0 is served as well as all that comes after 12.
DEFAULT_ARCHS = ("8.0", "8.6", "8.9", "9.0a", "10.0+PTX", "12.0")

# The names that torch accepts in TORCH_CUDA_ARCH_LIST.
NAMED_ARCHS = {
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}

# Rounding is written out in the sources: no contraction into fma, no fast-math, on either compiler.
HOST_FLAGS = [
    "-O3",
    "-g0",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",  # g++ 12 sees ghosts in std::optional
]
NVCC_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fmad=false",
    "-Xfatbin=-compress-all",
    "-Xcompiler=-ffp-contract=off,-fvisibility=hidden",
]

# Peak resident memory of one compiler process.
GIB = 1 << 30
NVCC_JOB_BYTES = 5 * GIB // 2
GXX_JOB_BYTES = 1 * GIB


class BuildError(Exception):
    """The build cannot do what was asked; the message says why and what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: where it is, its version ("13.0"), and the numbers nvcc can compile for (80, 86, ...)."""

    home: str
    version: str
    archs: frozenset[int]


@dataclass(frozen=True)
class Machine:
    """What the CUDA decision depends on, besides the environment variables."""

    torch_version: str
    torch_cuda: str | None  # torch.version.cuda
    toolkit: Toolkit | None
    gpus: tuple[tuple[int, int], ...] = ()  # compute capabilities visible to torch


@dataclass(frozen=True)
class CudaPlan:
    """Whether the CUDA kernels are built; if not, why; if so, for which archs ("8.0", "9.0a", "10.0+PTX")."""

    build: bool
    reason: str = ""
    archs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a version, pre-releases and vendors' builds included: "2.9.0a0+abc.nv" is (2, 9)."""
    match = re.match(r"\s*v?(\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"cannot read a version from {text!r}")
    return int(match[1]), int(match[2])


def check_torch(version: str) -> None:
    if parse_version(version) < MIN_TORCH:
        raise BuildError(f"ampkernels needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]} (its stable ABI), found {version}")


def parse_arch_list(text: str) -> list[str]:
    """TORCH_CUDA_ARCH_LIST to canonical archs: names expanded, 9.0 made 9.0a, in order, each once.

    Entries are separated by spaces, semicolons or commas, as torch takes them: "8.0;9.0", "8.6 8.9+PTX", "Hopper".
    """
    entries: list[str] = []
    for token in re.split(r"[\s;,]+", text.strip()):
        entries += NAMED_ARCHS.get(token, token).split(";") if token else []
    archs: list[str] = []
    for entry in entries:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: cannot read {entry!r}; give entries such as 8.0, 9.0a or 8.0+PTX, or one of "
                f"{', '.join(NAMED_ARCHS)}"
            )
        major, minor, suffix, ptx = match.groups()
        arch = f"{major}.{minor}{'a' if (major, minor) == ('9', '0') else suffix}{ptx or ''}"
        if arch not in archs:
            archs.append(arch)
    return archs


def arch_number(arch: str) -> int:
    """ "9.0a+PTX" -> 90."""
    major, minor = parse_version(arch)
    return 10 * major + minor


def gencode_flags(archs: Sequence[str]) -> list[str]:
    """nvcc's -gencode flags: machine code for each arch, and PTX where it says +PTX.

    PTX is always of the plain arch: PTX for sm_90a runs nowhere else.
    """
    flags = []
    for arch in archs:
        number = arch_number(arch)
        suffix = arch.removesuffix("+PTX").lstrip("0123456789.")
        flags.append(f"-gencode=arch=compute_{number}{suffix},code=sm_{number}{suffix}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def plan_archs(
    named: str | None, gpus: Sequence[tuple[int, int]], nvcc_archs: frozenset[int]
) -> tuple[list[str], list[str]]:
    """The archs to build for, and notes: those named, else those of the visible GPUs, else the default list."""
    named = (named or "").strip()
    notes: list[str] = []
    if named and named != "native":
        asked = parse_arch_list(named)
        archs = [arch for arch in asked if parse_version(arch) >= MIN_ARCH]
        dropped = [arch for arch in asked if arch not in archs]
        if not archs:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST={named!r}: the kernels need compute capability 8.0 or later")
        if dropped:
            notes.append(f"{', '.join(dropped)} left out: the kernels need compute capability 8.0 or later")
        unknown = [arch for arch in archs if arch_number(arch) not in nvcc_archs]
        if unknown:
            known = " ".join(f"{n // 10}.{n % 10}" for n in sorted(nvcc_archs))
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={named!r}: this nvcc cannot compile for {', '.join(unknown)}, only for {known}"
            )
        return archs, notes
    if gpus:
        archs = []
        for capability in sorted(set(gpus)):
            number = 10 * capability[0] + capability[1]
            if capability < MIN_ARCH:
                raise BuildError(
                    f"a GPU of compute capability {capability[0]}.{capability[1]} is visible, and the kernels need 8.0 "
                    "or later; hide it with CUDA_VISIBLE_DEVICES, or set AMPKERNELS_CUDA=0 to build for the CPU only"
                )
            if number in nvcc_archs:
                archs += parse_arch_list(f"{capability[0]}.{capability[1]}")
                continue
            # A GPU newer than this nvcc: the newest PTX that nvcc can make, compiled by the driver.
            newest = max(n for n in nvcc_archs if n < number)
            archs += parse_arch_list(f"{newest // 10}.{newest % 10}+PTX")
            notes.append(f"this nvcc does not know sm_{number}: PTX of {newest // 10}.{newest % 10} is built for it")
        return archs, notes
    archs = [arch for arch in DEFAULT_ARCHS if arch_number(arch) in nvcc_archs]
    if len(archs) < len(DEFAULT_ARCHS):
        notes.append(f"{', '.join(a for a in DEFAULT_ARCHS if a not in archs)} left out: this nvcc does not know them")
    if not any(arch.endswith("+PTX") for arch in archs):
        archs[-1] += "+PTX"
    return archs, notes


def plan_cuda(environ: Mapping[str, str], machine: Machine) -> CudaPlan:
    """The CUDA rule: built when a toolkit is there and (a GPU is visible or AMPKERNELS_CUDA=1); with 0, never.

    Raises:
        BuildError: CUDA was asked for, or a GPU is there for it, and it cannot be built as it should be.
    """
    choice = environ.get("AMPKERNELS_CUDA", "").strip()
    if choice not in ("", "0", "1"):
        raise BuildError(f"AMPKERNELS_CUDA must be 0, 1 or unset, got {choice!r}")
    if choice == "0":
        return CudaPlan(False, "AMPKERNELS_CUDA=0")

    missing = None
    if machine.torch_cuda is None:
        missing = f"torch {machine.torch_version} is built without CUDA (torch.version.cuda is None)"
    elif machine.toolkit is None:
        missing = "no CUDA toolkit was found (nvcc in $CUDA_HOME, on PATH or in /usr/local/cuda)"
    if missing and choice == "1":
        raise BuildError(
            f"AMPKERNELS_CUDA=1, but {missing}. Install what is missing, or unset AMPKERNELS_CUDA to build for the CPU"
        )
    if missing:
        return CudaPlan(False, missing)
    if not machine.gpus and choice != "1":
        return CudaPlan(False, "no GPU is visible (AMPKERNELS_CUDA=1 builds them without one)")

    toolkit, torch_cuda = machine.toolkit, machine.torch_cuda
    assert toolkit is not None and torch_cuda is not None
    notes = []
    if parse_version(toolkit.version)[0] != parse_version(torch_cuda)[0]:
        raise BuildError(
            f"nvcc in {toolkit.home} is CUDA {toolkit.version}, torch {machine.torch_version} is built with CUDA "
            f"{torch_cuda}; the major versions must be the same. Point CUDA_HOME at a CUDA {torch_cuda} toolkit, "
            f"install a torch for CUDA {toolkit.version}, or set AMPKERNELS_CUDA=0 to build for the CPU only. (An "
            "isolated build brings a torch of its own; --no-build-isolation uses the one that is installed.)"
        )
    if parse_version(toolkit.version) != parse_version(torch_cuda):
        notes.append(f"nvcc is CUDA {toolkit.version}, torch's CUDA is {torch_cuda}: minor versions may differ")
    archs, arch_notes = plan_archs(environ.get("TORCH_CUDA_ARCH_LIST"), machine.gpus, toolkit.archs)
    return CudaPlan(True, archs=tuple(archs), notes=(*notes, *arch_notes))


def plan_jobs(environ: Mapping[str, str], cpus: int, memory: int, cuda: bool) -> int:
    """Compiler processes at once: MAX_JOBS if set, else one for each CPU that there is memory for."""
    asked = environ.get("MAX_JOBS", "").strip()
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise BuildError(f"MAX_JOBS must be a positive integer, got {asked!r}")
        return int(asked)
    return max(1, min(cpus, memory // (NVCC_JOB_BYTES if cuda else GXX_JOB_BYTES)))


# ------------------------------------------------------------------------------------------------------------- probes


def available_memory() -> int:
    """Bytes that the build may use: what the kernel says is available, within the limit of this control group."""
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    memory = int(available[1]) * 1024 if available else 4 * GIB
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            memory = min(memory, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return memory


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_toolkit(environ: Mapping[str, str]) -> Toolkit | None:
    """The toolkit in $CUDA_HOME or $CUDA_PATH, else nvcc's on PATH, else in /usr/local/cuda; None if none works."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    nvcc = str(Path(named, "bin", "nvcc")) if named else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        version = _output(nvcc, "--version")
        archs = _output(nvcc, "--list-gpu-arch")
        # Where nvcc itself says it lives: the one on PATH may be a link or a script.
        top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull), re.MULTILINE)
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", version)
    if release is None:
        return None
    home = named or (str(Path(top[1]).resolve()) if top else str(Path(nvcc).resolve().parent.parent))
    return Toolkit(home, release[1], frozenset(int(n) for n in re.findall(r"compute_(\d+)\b", archs)))


def check_compiler(command: str) -> str:
    """Name and version of the C++ compiler ("g++ 12.2.0"), after checking that it knows C++20."""
    try:
        banner = _output(*command.split(), "--version")
        version = _output(*command.split(), "-dumpfullversion", "-dumpversion").strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"no C++ compiler: {command!r} does not run. On Debian or Ubuntu: sudo apt install g++. CXX names another"
        ) from error
    if "Free Software Foundation" not in banner:
        return f"{banner.splitlines()[0]}"
    if int(version.split(".")[0]) < MIN_GXX:
        raise BuildError(f"the kernels are C++20, which needs g++ {MIN_GXX} or later; {command!r} is {version}")
    return f"g++ {version}"


def _output(*command: str) -> str:
    """What a command prints, both streams."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def check_python() -> None:
    """The interpreter must offer the limited API and its headers."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError(
            "this is a free-threaded CPython, which has no limited API yet; build ampkernels with the ordinary CPython"
        )
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise BuildError(f"no Python.h in {include}. On Debian or Ubuntu: sudo apt install python3-dev")
