"""Builds ampkernels._C (stable-ABI bindings over torch-free kernels) and ampkernels._plan (pybind11, the planner).

What is built is decided in tools/build_support.py, by AMPKERNELS_CUDA, TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS and
what the machine has; it is compiled in, printed at the end, and told again by `ampkernels.build_info()`.
Sources are globbed: a new kernel file needs no line here. Every .cu file is compiled for every arch; code for sm_90a
alone stands behind `#if defined(__CUDA_ARCH_FEAT_SM90_ALL)`, and AMPKERNELS_SM90A tells the host side that it is there.
"""

import importlib.util
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import setuptools
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "tools"))

from build_support import (  # noqa: E402
    HOST_FLAGS,
    NVCC_FLAGS,
    BuildError,
    CudaPlan,
    Machine,
    available_cpus,
    available_memory,
    check_compiler,
    check_python,
    check_torch,
    find_toolkit,
    gencode_flags,
    plan_cuda,
    plan_jobs,
)

try:
    import ninja
    import pybind11
    import torch
except ImportError as error:
    sys.exit(
        f"ampkernels: {error.name} is needed to build. With --no-build-isolation, first run\n"
        "    pip install 'torch>=2.10' 'setuptools>=77' ninja pybind11\n"
        "or leave the flag out, and pip brings them for the build alone."
    )
if int(setuptools.__version__.split(".")[0]) < 77:  # it cannot read pyproject.toml's license
    sys.exit(
        f"ampkernels: setuptools {setuptools.__version__} is too old to build. First run: pip install 'setuptools>=77'"
    )
# Run by path, an environment's Python does not put the environment's programs on PATH.
os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])

# torch takes CUDA_HOME from where nvcc lies, and a link to nvcc, as /usr/bin/nvcc may be, leads it astray.
toolkit = find_toolkit(os.environ)
if toolkit is not None:
    os.environ["CUDA_HOME"] = toolkit.home

from torch.utils import cpp_extension  # noqa: E402

spec = importlib.util.spec_from_file_location("_build", ROOT / "ampkernels" / "_build.py")
assert spec is not None and spec.loader is not None
_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_build)


GENERATED = ROOT / "build" / "generated"
BUILD_TEMP = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"


def sources(folder: str, pattern: str) -> list[str]:
    return sorted(path.as_posix() for path in Path("csrc", folder).glob(pattern))


def configuration(cuda: CudaPlan, compiler: str, toolkit_version: str | None) -> dict[str, object]:
    """What `build_info()` tells; see its docstring."""
    return {
        "version": _build.__version__,
        "csrc": _build.csrc_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": compiler,
        "cuda": {
            "built": cuda.build,
            "reason": cuda.reason,
            "toolkit": toolkit_version if cuda.build else None,
            "archs": list(cuda.archs),
        },
        "kernels": {
            "cpu": [Path(source).stem for source in sources("cpu", "*.cpp")],
            "cuda": [Path(source).stem for source in sources("cuda", "*.cu")] if cuda.build else [],
        },
        "planner": Path("csrc/plan/module.cpp").exists(),
        "notes": list(cuda.notes),
    }


def write_if_changed(path: Path, text: str) -> None:
    """So that an unchanged configuration recompiles nothing."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def extensions(cuda: CudaPlan) -> list[Extension]:
    headers = [path.as_posix() for path in sorted(Path("csrc").rglob("*.*h"))]
    depends = [*headers, str(GENERATED / "build_config.h")]
    include_dirs = [str(ROOT / "csrc" / "include"), str(ROOT / "csrc"), str(GENERATED)]
    defines = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    if cuda.build:
        defines += ["-DUSE_CUDA", "-DAMPKERNELS_WITH_CUDA"]
        if any(arch.startswith("9.0a") for arch in cuda.archs):
            defines.append("-DAMPKERNELS_SM90A")
    make: Callable[..., Extension] = cpp_extension.CUDAExtension if cuda.build else cpp_extension.CppExtension
    result = [
        make(
            "ampkernels._C",
            sources("binding", "*.cpp") + sources("cpu", "*.cpp") + (sources("cuda", "*.cu") if cuda.build else []),
            extra_compile_args={
                "cxx": [*HOST_FLAGS, *defines],
                "nvcc": [*NVCC_FLAGS, *defines, *gencode_flags(cuda.archs)],
            },
            include_dirs=[*include_dirs],
            depends=depends,
            extra_link_args=["-Wl,--as-needed"],
            py_limited_api=True,
        )
    ]
    if Path("csrc/plan/module.cpp").exists():
        result.append(
            Extension(
                "ampkernels._plan",
                sources("plan", "*.cpp"),
                include_dirs=[*include_dirs, pybind11.get_include()],
                depends=depends,
                extra_compile_args=HOST_FLAGS,
                language="c++",
            )
        )
    return result


class BuildExt(cpp_extension.BuildExtension):
    """torch's BuildExtension, in one build folder for every way of building, with a last word on what was built."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install would compile into a folder of its own, from nothing, each time.
        self.build_temp = str(BUILD_TEMP)

    def run(self) -> None:
        kernels = f"CPU and CUDA kernels ({' '.join(cuda.archs)})" if cuda.build else "CPU kernels"
        print(
            f"ampkernels: building {kernels}, {os.environ['MAX_JOBS']} compilers at once", file=sys.stderr, flush=True
        )
        text = json.dumps(json.dumps(CONFIG))  # a JSON string is a C string
        write_if_changed(
            GENERATED / "build_config.h", f"// Written by setup.py.\n#define AMPKERNELS_BUILD_CONFIG {text}\n"
        )
        super().run()
        print(f"\nBuilt {_build.describe(CONFIG)}\n", file=sys.stderr)


try:
    check_python()
    check_torch(torch.__version__)
    compiler = check_compiler(os.environ.get("CXX") or "c++")
    gpus: tuple[tuple[int, int], ...] = ()
    if torch.cuda.is_available():
        gpus = tuple(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    cuda = plan_cuda(os.environ, Machine(torch.__version__, torch.version.cuda, toolkit, gpus))
    os.environ["MAX_JOBS"] = str(plan_jobs(os.environ, available_cpus(), available_memory(), cuda.build))
except BuildError as error:
    sys.exit(f"\nampkernels: {error}\n")

CONFIG = configuration(cuda, compiler, toolkit.version if toolkit else None)
setup(ext_modules=extensions(cuda), cmdclass={"build_ext": BuildExt})
