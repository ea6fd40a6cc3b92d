"""The build's decisions (tools/build_support.py), the ptxas check, and what build_info says. No compiler runs here."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import build_support as bs
import cuda_check
import pytest

from ampkernels import _build

ROOT = Path(__file__).resolve().parent.parent
ALL_ARCHS = frozenset({75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121})  # nvcc 13.0
OLD_ARCHS = frozenset({50, 60, 70, 75, 80, 86, 87, 89, 90})  # nvcc 12.4
TOOLKIT = bs.Toolkit("/opt/cuda", "13.0", ALL_ARCHS)


def machine(torch_version="2.14.1+cu130", torch_cuda="13.0", toolkit=TOOLKIT, gpus=()):
    return bs.Machine(torch_version, torch_cuda, toolkit, gpus)


CPU_TORCH = {"torch_version": "2.13.0+cpu", "torch_cuda": None}
NO_TOOLKIT = {"toolkit": None}
H200 = {"gpus": ((9, 0),)}


# ------------------------------------------------------------------------------------------------- the CUDA rule


@pytest.mark.parametrize(
    ("choice", "found", "reason"),
    [
        ("0", H200, "AMPKERNELS_CUDA=0"),
        ("0", CPU_TORCH, "AMPKERNELS_CUDA=0"),
        ("", {}, "no GPU is visible"),
        ("", CPU_TORCH, "torch 2.13.0+cpu is built without CUDA"),
        ("", NO_TOOLKIT, "no CUDA toolkit was found"),
        ("", {**NO_TOOLKIT, **H200}, "no CUDA toolkit was found"),
    ],
)
def test_cuda_is_left_out_with_a_reason(choice, found, reason):
    plan = bs.plan_cuda({"AMPKERNELS_CUDA": choice}, machine(**found))
    assert not plan.build
    assert reason in plan.reason


@pytest.mark.parametrize(
    ("environ", "found", "archs"),
    [
        ({}, H200, ("9.0a",)),
        ({"AMPKERNELS_CUDA": "1"}, H200, ("9.0a",)),
        ({"AMPKERNELS_CUDA": "1"}, {}, bs.DEFAULT_ARCHS),
        ({"TORCH_CUDA_ARCH_LIST": "8.0+PTX"}, H200, ("8.0+PTX",)),
        ({"TORCH_CUDA_ARCH_LIST": "native"}, H200, ("9.0a",)),
        ({"TORCH_CUDA_ARCH_LIST": " "}, H200, ("9.0a",)),
        ({}, {"gpus": ((9, 0), (8, 6), (9, 0))}, ("8.6", "9.0a")),
        ({"AMPKERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "8.0 9.0"}, {}, ("8.0", "9.0a")),
    ],
)
def test_cuda_is_built(environ, found, archs):
    plan = bs.plan_cuda(environ, machine(**found))
    assert plan.build
    assert plan.archs == archs


@pytest.mark.parametrize(
    ("environ", "found", "message"),
    [
        ({"AMPKERNELS_CUDA": "1"}, CPU_TORCH, r"torch 2.13.0\+cpu is built without CUDA"),
        ({"AMPKERNELS_CUDA": "1"}, NO_TOOLKIT, "no CUDA toolkit was found"),
        ({"AMPKERNELS_CUDA": "yes"}, {}, "must be 0, 1 or unset, got 'yes'"),
        ({"AMPKERNELS_CUDA": "1"}, {"torch_cuda": "12.8"}, "CUDA 13.0, torch .* CUDA 12.8; the major versions must be"),
        ({}, {"torch_cuda": "12.8", **H200}, "set AMPKERNELS_CUDA=0"),
        ({}, {"gpus": ((7, 5),)}, "compute capability 7.5 is visible, and the kernels need 8.0"),
        ({"TORCH_CUDA_ARCH_LIST": "7.5"}, H200, "need compute capability 8.0"),
        ({"TORCH_CUDA_ARCH_LIST": "10.5"}, H200, "this nvcc cannot compile for 10.5"),
    ],
)
def test_what_cannot_be_built_as_asked_fails(environ, found, message):
    with pytest.raises(bs.BuildError, match=message):
        bs.plan_cuda(environ, machine(**found))


def test_the_rule_over_all_machines():
    """Built if and only if asked for, or a GPU is there; never with 0; asked for and impossible is an error."""
    for choice, has_cuda_torch, has_toolkit, has_gpu in itertools.product(("", "0", "1"), *[(False, True)] * 3):
        found = machine(
            torch_cuda="13.0" if has_cuda_torch else None,
            toolkit=TOOLKIT if has_toolkit else None,
            gpus=((9, 0),) if has_gpu and has_cuda_torch else (),
        )
        possible = has_cuda_torch and has_toolkit
        if choice == "1" and not possible:
            with pytest.raises(bs.BuildError):
                bs.plan_cuda({"AMPKERNELS_CUDA": choice}, found)
            continue
        plan = bs.plan_cuda({"AMPKERNELS_CUDA": choice}, found)
        assert plan.build == (choice != "0" and possible and (choice == "1" or has_gpu))
        assert bool(plan.reason) != plan.build
        assert bool(plan.archs) == plan.build


def test_a_minor_version_apart_is_a_note():
    plan = bs.plan_cuda({"AMPKERNELS_CUDA": "1"}, machine(torch_cuda="13.2"))
    assert plan.build
    assert any("13.0" in note and "13.2" in note for note in plan.notes)


# --------------------------------------------------------------------------------------------------------- archs


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("9.0", ["9.0a"]),
        ("9.0a", ["9.0a"]),
        ("9.0+PTX", ["9.0a+PTX"]),
        ("9.0a+PTX", ["9.0a+PTX"]),
        ("8.0+PTX", ["8.0+PTX"]),
        ("8.0;8.6 9.0, 12.0", ["8.0", "8.6", "9.0a", "12.0"]),
        ("8.0;;8.0 ", ["8.0"]),
        ("10.0a;12.0f", ["10.0a", "12.0f"]),
        ("Hopper", ["9.0a+PTX"]),
        ("Ampere;Ada", ["8.0", "8.6+PTX", "8.9+PTX"]),
    ],
)
def test_arch_list(text, archs):
    assert bs.parse_arch_list(text) == archs


@pytest.mark.parametrize("text", ["sm_90", "90", "9", "9.0b", "9.0+ptx", "9.0a+PTX+PTX", "Fermi", "all"])
def test_arch_list_that_cannot_be_read(text):
    with pytest.raises(bs.BuildError, match=re.escape(text)):
        bs.parse_arch_list(text)


def test_gencode():
    assert bs.gencode_flags(["8.0", "9.0a+PTX", "12.0f"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",  # PTX of the plain arch
        "-gencode=arch=compute_120f,code=sm_120f",
    ]


def test_default_archs_follow_the_toolkit():
    archs, notes = bs.plan_archs(None, (), OLD_ARCHS)
    assert archs == ["8.0", "8.6", "8.9", "9.0a+PTX"]
    assert "10.0+PTX, 12.0 left out" in notes[0]
    # Whatever is left, GPUs that are newer than all of it find PTX.
    for known in (ALL_ARCHS, OLD_ARCHS, frozenset({80})):
        assert _build.covers(bs.plan_archs(None, (), known)[0], (13, 0))


def test_archs_older_than_the_kernels_are_noted():
    archs, notes = bs.plan_archs("7.5 8.0 12.0+PTX", (), ALL_ARCHS)
    assert archs == ["8.0", "12.0+PTX"]
    assert "7.5 left out" in notes[0]


def test_a_gpu_newer_than_nvcc_gets_ptx():
    archs, notes = bs.plan_archs(None, [(10, 0)], OLD_ARCHS)
    assert archs == ["9.0a+PTX"]
    assert notes and _build.covers(archs, (10, 0))


@pytest.mark.parametrize(
    ("archs", "capability", "covered"),
    [
        (["8.0"], (8, 0), True),
        (["8.0"], (8, 9), True),
        (["8.6"], (8, 0), False),
        (["8.0"], (9, 0), False),
        (["8.0+PTX"], (9, 0), True),
        (["9.0a"], (9, 0), True),
        (["9.0a"], (10, 0), False),
        (["9.0a+PTX"], (12, 0), True),
        (["10.0a"], (10, 3), False),
        (["10.0"], (10, 3), True),
        (bs.DEFAULT_ARCHS, (7, 5), False),
        *((bs.DEFAULT_ARCHS, c, True) for c in [(8, 7), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]),
    ],
)
def test_covers(archs, capability, covered):
    assert _build.covers(archs, capability) == covered


# ----------------------------------------------------------------------------------------------- versions and jobs


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.9.0a0+abc.nv", (2, 9)), ("2.10.0", (2, 10)), ("2.14.1+cu130", (2, 14)), ("13.0", (13, 0)), ("2.11", (2, 11))],
)
def test_version(text, version):
    assert bs.parse_version(text) == version


@pytest.mark.parametrize("version", ["2.9.0a0+abc.nv", "2.9.1", "1.13.1+cu117"])
def test_an_old_torch_is_refused(version):
    with pytest.raises(bs.BuildError, match=re.escape(version)):
        bs.check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git1234", "2.14.1+cu130", "3.0.0"])
def test_a_new_torch_is_accepted(version):
    bs.check_torch(version)


def test_a_free_threaded_python_is_refused(monkeypatch):
    bs.check_python()
    monkeypatch.setattr(bs.sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else None)
    with pytest.raises(bs.BuildError, match="free-threaded"):
        bs.check_python()


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(bs.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(bs.BuildError, match="apt install python3-dev"):
        bs.check_python()


def test_a_compiler_that_does_not_run():
    with pytest.raises(bs.BuildError, match="apt install g\\+\\+"):
        bs.check_compiler("/nonexistent/c++ -O2")


@pytest.mark.parametrize(
    ("environ", "cpus", "gib", "cuda", "jobs"),
    [
        ({}, 64, 8, False, 8),
        ({}, 64, 8, True, 3),
        ({}, 2, 64, True, 2),
        ({}, 4, 1, True, 1),
        ({}, 4, 0, False, 1),
        ({"MAX_JOBS": "7"}, 2, 1, True, 7),
        ({"MAX_JOBS": ""}, 2, 64, False, 2),
    ],
)
def test_jobs(environ, cpus, gib, cuda, jobs):
    assert bs.plan_jobs(environ, cpus, gib * bs.GIB, cuda) == jobs


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_max_jobs_that_cannot_be(value):
    with pytest.raises(bs.BuildError, match="MAX_JOBS"):
        bs.plan_jobs({"MAX_JOBS": value}, 2, bs.GIB, False)


# ----------------------------------------------------------------------------------------- what a build says of itself


def test_digest_follows_names_and_contents(tmp_path):
    (tmp_path / "a.h").write_text("1")
    first = _build.csrc_digest(tmp_path)
    assert first is not None and re.fullmatch("[0-9a-f]{12}", first)
    (tmp_path / "a.h").write_text("2")
    second = _build.csrc_digest(tmp_path)
    (tmp_path / "a.h").rename(tmp_path / "b.h")
    assert len({first, second, _build.csrc_digest(tmp_path)}) == 3
    assert _build.csrc_digest(tmp_path / "missing") is None


def test_reasons_at_run_time():
    built = {"built": True, "archs": ["8.0", "9.0a"], "reason": ""}
    reason = _build.cuda_unavailable_reason
    assert reason({"built": False, "reason": "no GPU is visible"}, [(9, 0)]) == "built without CUDA: no GPU is visible"
    assert reason(built, []) == "no GPU is visible to torch"
    assert reason(built, [(9, 0), (7, 5)]) == "GPU sm_75 is not covered by the archs built: 8.0 9.0a"
    assert reason(built, [(9, 0), (8, 6)]) is None


def test_build_info():
    info = _build.build_info()
    assert "error" not in info, info["error"]
    assert info["running"]["stale"] is None, info["running"]["stale"]
    assert info["cuda"]["built"] != bool(info["cuda"]["reason"])
    assert json.loads(json.dumps(info)) == info
    text = str(info)
    for part in (info["version"], info["csrc"], info["torch"], info["compiler"], info["cuda"]["reason"]):
        assert part in text
    assert info["running"]["operators"]["CPU"]
    if info["cuda"]["built"]:
        cpu, cuda = (set(info["running"]["operators"][device]) for device in ("CPU", "CUDA"))
        assert cpu - cuda == {"emulate_linear"} and cuda <= cpu


def test_an_extension_that_does_not_load_is_explained():
    missing = _build.import_failure(ModuleNotFoundError("No module named 'ampkernels._C'"))
    assert "make build" in missing
    no_cuda = _build.import_failure(ImportError("libtorch_cuda.so: cannot open shared object file"))
    assert "CUDA build of torch" in no_cuda and "AMPKERNELS_CUDA=0" in no_cuda
    assert "rebuild it against this torch" in _build.import_failure(ImportError("undefined symbol: _ZN3c10"))


def test_import_makes_no_cuda_context():
    """Fork safety, and a machine without a GPU."""
    code = "import ampkernels, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_command_line_info():
    run = [sys.executable, "-m", "ampkernels"]
    shown = subprocess.run([*run, "info", "--json"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(shown.stdout)["version"] == _build.__version__
    wrong = subprocess.run([*run, "nonsense"], capture_output=True, text=True, cwd=ROOT)
    assert wrong.returncode == 2 and "nonsense" in wrong.stderr


# --------------------------------------------------------------------------------------------------------- ptxas

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 49152 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1gPf' for 'sm_90a'
ptxas info    : Function properties for _Z1gPf
    64 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 64 bytes cumulative stack size
"""


def test_ptxas_is_read():
    clean, spilling = cuda_check.parse_ptxas(PTXAS)
    assert clean == cuda_check.Kernel("_Z1kPf", registers=32, shared=49152)
    assert spilling == cuda_check.Kernel("_Z1gPf", registers=255, stack=64, spills=40)
    assert not cuda_check.COMPLAINT.search(PTXAS)


@pytest.mark.parametrize(
    "line",
    [
        "ptxas warning : Registers are spilled to local memory in function '_Z1gPf'",
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        'a.cu(3): warning #177-D: variable "x" was declared but never referenced',
    ],
)
def test_ptxas_complaints_are_seen(line):
    assert cuda_check.COMPLAINT.search(line)


def test_reviews():
    (review,) = cuda_check.parse_reviews("# comment\n\nak::softmax* | 9.0a | 64 | 40 | a reason\n")
    spilling = cuda_check.Kernel("ak::softmax<float>", stack=64, spills=40)
    assert review.allows(spilling, "9.0a")
    assert not review.allows(spilling, "8.0")
    assert not review.allows(cuda_check.Kernel("ak::softmax<float>", stack=65), "9.0a")
    assert not review.allows(cuda_check.Kernel("ak::norm", stack=64), "9.0a")
    with pytest.raises(SystemExit, match="reason"):
        cuda_check.parse_reviews("ak::softmax* | 9.0a | 64 | 40 |")
