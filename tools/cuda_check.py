"""Compiles every CUDA source for every architecture that matters, and fails on what ptxas would rather not say aloud.

    python tools/cuda_check.py [--arch 9.0a] [--all] [--jobs 2] [FILE.cu ...]

Fails on any compiler warning, on wgmma instructions that ptxas serialises (C7508, C7510, ...), on register spills and
on local memory, except as reviewed, with a reason, in tools/reviewed_local_memory.txt. Prints one line for each
kernel template and architecture: instances, registers, shared and local memory (--all: a line for each instance).

No GPU and no torch; a machine without nvcc passes, saying so. Results are kept in build/cuda-check under a digest of
what went into them, so that a second run compiles only what has changed.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from build_support import NVCC_FLAGS, Toolkit, arch_number, find_toolkit, gencode_flags, parse_arch_list

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("8.0", "9.0a", "10.0", "12.0")
REVIEWED = "tools/reviewed_local_memory.txt"
# torch's own defaults for extensions, so that what is checked is what is built.
FLAGS = [
    *NVCC_FLAGS,
    "--expt-relaxed-constexpr",
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "-DAMPKERNELS_WITH_CUDA",
    "-DAMPKERNELS_SM90A",
    "-Xptxas=-v",
    "-Icsrc/include",
    "-Icsrc",
]
COMPLAINT = re.compile(r"\bwarning\b|\(C75\d\d\)|Potential Performance Loss", re.IGNORECASE)


@dataclass
class Kernel:
    """What ptxas says of one entry function."""

    name: str  # demangled
    registers: int = 0
    shared: int = 0  # static shared memory, bytes
    stack: int = 0  # local memory, bytes per thread
    spills: int = 0  # spill stores + loads, bytes


@dataclass
class Result:
    """One source compiled for one arch."""

    source: str
    arch: str
    seconds: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Review:
    """A line of the reviewed list: kernels (a pattern), arch or *, allowed stack and spill bytes, the reason."""

    pattern: str
    arch: str
    stack: int
    spills: int

    def allows(self, kernel: Kernel, arch: str) -> bool:
        matches = fnmatch.fnmatchcase(kernel.name, self.pattern) and self.arch in ("*", arch)
        return matches and kernel.stack <= self.stack and kernel.spills <= self.spills


def parse_ptxas(log: str) -> list[Kernel]:
    """The kernels in the output of `ptxas -v`, mangled names."""
    kernels: list[Kernel] = []
    current: Kernel | None = None
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            current = Kernel(entry[1])
            kernels.append(current)
        elif properties := re.search(r"Function properties for (\w+)", line):
            # Also printed for device functions that were not inlined: their stack counts to no entry here.
            current = next((k for k in kernels if k.name == properties[1]), None)
        elif current and (
            frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        ):
            current.stack, current.spills = int(frame[1]), int(frame[2]) + int(frame[3])
        elif current and (used := re.search(r"Used (\d+) registers", line)):
            current.registers = int(used[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                current.shared = int(shared[1])
            if cumulative := re.search(r"(\d+) bytes cumulative stack size", line):
                current.stack = max(current.stack, int(cumulative[1]))
    return kernels


def parse_reviews(text: str) -> list[Review]:
    """Lines `pattern | arch | stack bytes | spill bytes | reason`; # starts a comment."""
    reviews = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        columns = [column.strip() for column in line.split("|")]
        if len(columns) != 5 or not columns[4]:
            raise SystemExit(f"{REVIEWED}:{number}: expected `pattern | arch | stack | spills | reason`, got: {line}")
        reviews.append(Review(columns[0], columns[1], int(columns[2]), int(columns[3])))
    return reviews


def demangle(names: list[str]) -> list[str]:
    """Names without parameter lists; mangled ones if c++filt is missing."""
    try:
        text = subprocess.run(
            ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return names
    return [name.replace("(anonymous namespace)::", "").removeprefix("void ") for name in text]


def compile_one(source: str, arch: str, toolkit: Toolkit, headers: bytes) -> Result:
    """Compiles one source for one arch, or takes the result of an earlier run on the same text."""
    command = [str(Path(toolkit.home, "bin", "nvcc")), *FLAGS, *gencode_flags([arch]), "-cubin", source]
    key = hashlib.sha256(headers + Path(source).read_bytes() + repr((command, toolkit.version)).encode()).hexdigest()
    cached = Path("build", "cuda-check", f"{key[:20]}.json")
    if cached.exists():
        record = json.loads(cached.read_text())
        return Result(**{**record, "kernels": [Kernel(**kernel) for kernel in record["kernels"]]})
    start = time.monotonic()
    done = subprocess.run([*command, "-o", os.devnull], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kernels = parse_ptxas(done.stdout)
    for kernel, name in zip(kernels, demangle([kernel.name for kernel in kernels]), strict=True):
        kernel.name = name
    complaints = [line for line in done.stdout.splitlines() if COMPLAINT.search(line)]
    result = Result(source, arch, round(time.monotonic() - start, 1), kernels, complaints)
    if done.returncode:
        result.complaints = [done.stdout]
    else:
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(asdict(result)))
    return result


def table(results: Iterable[Result], every_instance: bool) -> str:
    """One line for each kernel template (or instance) and arch."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for result in results:
        for kernel in result.kernels:
            name = kernel.name if every_instance else re.sub(r"<.*", "", kernel.name)
            groups.setdefault((name.replace("ampkernels::", ""), result.arch), []).append(kernel)

    def span(values: list[int]) -> str:
        return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"

    rows: list[tuple[str, ...]] = [("kernel", "arch", "instances", "registers", "static smem", "local")]
    for (name, arch), kernels in sorted(groups.items()):
        columns = [[k.registers for k in kernels], [k.shared for k in kernels], [k.stack for k in kernels]]
        rows.append((name, arch, str(len(kernels)), *(span(column) for column in columns)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sources", nargs="*", help="default: csrc/cuda/*.cu")
    parser.add_argument("--arch", action="append", help=f"default: {', '.join(ARCHS)}")
    parser.add_argument("--all", action="store_true", help="a line for each instance of a template")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("MAX_JOBS") or 2))
    args = parser.parse_args()
    sources = [os.path.relpath(source, ROOT) for source in args.sources]
    os.chdir(ROOT)
    sources = sources or sorted(path.as_posix() for path in Path("csrc", "cuda").glob("*.cu"))
    archs = [arch for text in args.arch or ARCHS for arch in parse_arch_list(text)]

    toolkit = find_toolkit(os.environ)
    if toolkit is None:
        print("cuda-check: no nvcc on this machine (CUDA_HOME, PATH, /usr/local/cuda): nothing was checked")
        return 0
    skipped = [arch for arch in archs if arch_number(arch) not in toolkit.archs]
    if skipped:
        print(f"cuda-check: nvcc {toolkit.version} does not know {', '.join(skipped)}: not checked")
    jobs = [(source, arch) for source in sources for arch in archs if arch not in skipped]
    print(f"cuda-check: {len(sources)} files, archs {' '.join(archs)}, nvcc {toolkit.version} in {toolkit.home}")

    headers = b"".join(path.read_bytes() for path in sorted(Path("csrc").rglob("*.*h")))
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(compile_one, source, arch, toolkit, headers) for source, arch in jobs]
        for number, future in enumerate(futures, 1):
            result = future.result()
            results.append(result)
            print(f"[{number}/{len(jobs)}] {result.source} for {result.arch}: {result.seconds:.1f} s", flush=True)

    reviewed = Path(REVIEWED)
    reviews = parse_reviews(reviewed.read_text()) if reviewed.exists() else []
    failures = []
    for result in results:
        where = f"{result.source} for {result.arch}"
        failures += [f"{where}: {complaint}" for complaint in result.complaints]
        for kernel in result.kernels:
            if (kernel.stack or kernel.spills) and not any(r.allows(kernel, result.arch) for r in reviews):
                failures.append(
                    f"{where}: {kernel.name}: {kernel.stack} bytes of local memory, {kernel.spills} bytes of spills: "
                    f"not allowed by {REVIEWED}"
                )
    if not args.sources and not args.arch:
        names = {kernel.name for result in results for kernel in result.kernels}
        failures += [
            f"{REVIEWED}: {review.pattern} matches no kernel: remove the line"
            for review in reviews
            if not fnmatch.filter(names, review.pattern)
        ]
    print()
    print(table(results, args.all))
    print()
    if failures:
        print("\n".join(failures), file=sys.stderr)
        print(f"cuda-check: {len(failures)} failures", file=sys.stderr)
        return 1
    print(f"cuda-check: {len(jobs)} compilations, no warnings, no spills, no unreviewed local memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
