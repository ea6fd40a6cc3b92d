"""Who may include and import what: docs/design.md, section 4."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "ampkernels"

TORCH = re.compile(r"^(torch|ATen|c10|aten)/")
STABLE_TORCH = re.compile(r"^torch/(csrc/stable/|headeronly/|csrc/inductor/aoti_torch/c/shim\w*\.h$)")
CUDA = re.compile(r"^(cuda|cublas|cute/|cutlass/|cub/|thrust/|nvrtc|mma\.h)")
PYTHON = re.compile(r"^(Python\.h|pybind11/)")


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cuh", ".cpp", ".cu"})


def includes(path: Path) -> list[tuple[str, bool]]:
    """The included names, each with whether it stands inside an #if on __CUDACC__."""
    found, guards = [], []
    for line in path.read_text().splitlines():
        directive = re.match(r"\s*#\s*(\w+)\s*(.*)", line)
        if directive is None:
            continue
        word, rest = directive.groups()
        if word in ("if", "ifdef", "ifndef"):
            guards.append("__CUDACC__" in rest and word != "ifndef" and "!" not in rest)
        elif word in ("else", "elif"):
            guards[-1] = word == "elif" and "__CUDACC__" in rest
        elif word == "endif":
            guards.pop()
        elif word == "include":
            found.append((re.sub(r'["<]([^">]+)[">].*', r"\1", rest), any(guards)))
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources(CSRC), ids=relative)
def test_includes(path):
    layer = path.relative_to(CSRC).parts[0]
    assert layer in {"binding", "cpu", "cuda", "include", "plan"}, "a folder that design.md does not name"
    for name, guarded in includes(path):
        where = f"{relative(path)} includes {name}"
        if TORCH.match(name):
            assert layer == "binding", f"{where}: torch belongs in csrc/binding"
            assert STABLE_TORCH.match(name), f"{where}: only torch's stable ABI"
        if PYTHON.match(name):
            assert layer == "binding" or relative(path) == "csrc/plan/module.cpp", f"{where}: Python in a kernel"
            assert layer != "binding" or not name.startswith("pybind11"), f"{where}: the binding is the limited API"
        if CUDA.match(name):
            if layer == "include":
                assert guarded, f"{where}: CUDA headers only inside #if defined(__CUDACC__)"
            assert layer not in {"cpu", "plan"}, f"{where}: no CUDA headers here"
        # Downwards only: binding -> cuda, cpu -> plan -> include.
        target = re.match(r"(cpu|cuda|binding|plan)/", name)
        if target and target[1] != layer:
            allowed = {
                "binding": {"cpu", "cuda", "plan"},
                "cuda": {"plan"},
                "cpu": {"plan"},
                "plan": set(),
                "include": set(),
            }
            assert target[1] in allowed[layer], f"{where}: {layer} must not know {target[1]}"


# The layers, lowest first. A module imports only from lower lines; neighbours on a line do not know each other.
LAYERS = [
    {"_build", "accumulate", "autocast"},
    {"reference"},
    {"_ops"},
    {"autograd"},
    {"functional"},
    {"nn"},
    {"fuse"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imported_modules(path: Path, tree: ast.AST) -> set[str]:
    """The top-level modules of ampkernels that a file imports, at any depth of nesting, type checking aside."""
    package = ["ampkernels", *path.relative_to(PACKAGE).parent.parts]
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    names = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name.split(".")[1] for name in names if name.startswith("ampkernels.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=relative)
def test_imports(path):
    tree = ast.parse(path.read_text())
    module = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if module not in RANK:
        return  # __init__, and what stands beside the layers: explain, numerics, bench, demo, __main__
    for name in imported_modules(path, tree) - {module}:
        assert name in RANK or name in {"_C", "_plan"}, (
            f"{relative(path)} imports {name}, which stands beside the layers"
        )
        if name in RANK:
            assert RANK[name] < RANK[module], f"{relative(path)} imports {name}: only from a lower layer"


def test_only_ops_loads_the_extension():
    for path in PACKAGE.rglob("*.py"):
        if "ampkernels._C" in path.read_text():
            assert path.name in {"_ops.py", "_build.py"}, relative(path)


def test_import_needs_torch_alone():
    """Modules of the package import nothing but torch and the standard library when they are imported."""
    import sys

    beside = {"demo", "numerics", "bench"}  # commands, with dependencies of their own
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in beside:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in {"torch", "ampkernels"} or top in sys.stdlib_module_names, f"{relative(path)}: {name}"


FOLDERS = ["ampkernels", "benchmarks", "csrc", "docs", "tests", "tools", ".ci"]
TEXT = {".py", ".h", ".cuh", ".cpp", ".cu", ".md", ".toml", ".txt", ".csv", ".json", ""}


def test_no_private_paths():
    private = re.compile(r"/(?:work|home|Users|root|tmp/bash)/\w")
    found = []
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("[!.]*"))
    for path in files:
        if (
            path.is_file()
            and path.suffix in TEXT
            and path != Path(__file__).resolve()
            and "__pycache__" not in path.parts
        ):
            found += [f"{relative(path)}: {line}" for line in path.read_text().splitlines() if private.search(line)]
    assert not found, "\n".join(found)
