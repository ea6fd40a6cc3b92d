"""The command line: suites, plots and the README's table."""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import STARTED, suites
from benchmarks.ops import DIRECTIONS, LAYOUTS, OPS, RESIDUAL
from benchmarks.providers import PROVIDERS, Compile, Provider, find_provider
from benchmarks.records import CsvWriter, Row, environment
from benchmarks.roofs import Roof, Roofs
from benchmarks.runner import OpRunner, Point, dtype_name
from benchmarks.tables import print_rows
from benchmarks.timing import Budget

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ACCUMULATE = re.compile(r"fp(32|16)(/[1-9]\d*)?")
DEFAULT_ACCUMULATE = ("fp32", "fp32/512", "fp32/128", "fp16", "fp16/128")
# On a CPU, a chunk is computed as a GPU would, bit by bit: --quick has no time for that.
QUICK_ACCUMULATE = {"cuda": ("fp32", "fp32/512"), "cpu": ("fp32",)}

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
QUICK_S = 56.0  # of the minute that --quick promises
# Seconds that the first step of a suite is taken to need, imports and compilers included, until one has been timed.
_FIRST_STEP_S = {"model": 10.0, "train": 4.0}
_FIRST_STEP_OF_OTHERS_S = 3.0


@dataclass(frozen=True)
class Task:
    """One step of a run."""

    suite: str
    name: str  # on the progress bar
    work: Callable[[], Iterable[Row]]
    extra: bool = False  # comes after every suite's first shape, if the time limit leaves room for it


class Deadline:
    """A run's time limit, kept by beginning no step that would overrun it if it took as long as its like took before."""

    def __init__(self, seconds: float | None, started: float = STARTED) -> None:
        self.seconds = seconds
        self.started = started
        self._expected: dict[str, float] = {}

    def fits(self, suite: str) -> bool:
        if self.seconds is None:
            return True
        expected = self._expected.get(suite, _FIRST_STEP_S.get(suite, _FIRST_STEP_OF_OTHERS_S))
        return time.perf_counter() - self.started + expected <= self.seconds

    def record(self, suite: str, seconds: float) -> None:
        # Not the longest so far: a suite's first step also imports and compiles what the later ones find there.
        self._expected[suite] = max(seconds, 0.5 * self._expected.get(suite, 0.0))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Bad arguments exit with 2 and list the valid ones."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["plot"]:
        return _plot(arguments[1:])
    if arguments[:1] == ["report"]:
        return _report(arguments[1:])
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    if arguments[:1] == ["baselines"]:
        return _baselines(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.list:
            print_list(Console())
            return 0
        run = Run(options)
        if options.precompile_share:
            return run.compile_share(options.precompile_share)
        if options.precompile:
            precompile(arguments, options.precompile)
        return run.execute()
    except KeyboardInterrupt:
        print("interrupted before anything was measured", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed and error against float64 of ampkernels and its peers, side by side.",
        epilog="Without a suite: all --quick. Also: `python -m benchmarks plot DIR`, `report DIR`, `compare A B`, `baselines A`.",
    )
    parser.add_argument("suite", nargs="*", help=f"{', '.join(suites.SUITES)}, or all")
    parser.add_argument("--quick", action="store_true", help="few shapes, short measurements: under a minute on a GPU")
    parser.add_argument("--device", default=None, help="cuda (default where there is one), cuda:1, cpu")
    parser.add_argument("--dtype", default="bf16", type=_names, help="of bf16, fp16, fp32; comma-separated")
    parser.add_argument("--shapes", type=_names, help="groups (see --list) or shapes such as 4096x4096x4096")
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous", help="of the operations' first input")
    parser.add_argument("--residual", action="store_true", help="linear + residual, norms of x + residual, forward")
    parser.add_argument("--providers", type=_names, help="comma-separated; default: all that are installed")
    parser.add_argument("--accumulate", type=_names, help="policies of ours to measure, e.g. fp32,fp32/512,fp16/128")
    parser.add_argument("--compile-mode", default="default", choices=COMPILE_MODES, help="mode of torch.compile")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"begin nothing that would end later; {QUICK_S:g} for --quick on a GPU",
    )
    parser.add_argument(
        "--precompile", type=int, default=0, metavar="N", help="first fill the compilers' caches with N processes"
    )
    parser.add_argument("--precompile-share", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for the CSV; default build/benchmarks/<device>")
    parser.add_argument("--name", help="of the CSV, without its ending; default: the suites")
    parser.add_argument("--commit", help="written into the rows where the checkout has no git history")
    parser.add_argument("--list", action="store_true", help="list suites, shapes and providers, and stop")
    return parser


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError("names nothing")
    return names


class Run:
    """One run: checks its options before anything is measured, then works through its tasks.

    Raises:
        ValueError: An option names something that there is not; the message lists what there is.
    """

    def __init__(self, options: argparse.Namespace, console: Console | None = None) -> None:
        self.console = console or Console(width=None if sys.stdout.isatty() else 160)
        self.suites = suites.check_suites(options.suite or ["all"])
        self.device = _device(options.device)
        self.dtypes = _dtypes(options.dtype)
        self.directions = DIRECTIONS if options.direction == "both" else (options.direction,)
        self.quick: bool = options.quick or not options.suite
        self.shapes = _shapes(options.shapes, self.suites)
        self.providers = _providers(options.providers, self.quick)
        default = QUICK_ACCUMULATE[self.device.type] if self.quick else DEFAULT_ACCUMULATE
        self.accumulates = _accumulates(options.accumulate) if options.accumulate else default
        Compile.mode = options.compile_mode
        self.environment = environment(self.device, options.commit)
        self.layout: str = options.layout
        self.residual: bool = options.residual
        if self.layout != "contiguous" and not set(self.suites) <= set(suites.OP_SUITES):
            raise ValueError(f"--layout is for {', '.join(suites.OP_SUITES)}, got {', '.join(self.suites)}")
        if self.residual and not set(self.suites) <= set(RESIDUAL):
            raise ValueError(f"--residual is for {', '.join(RESIDUAL)}, got {', '.join(self.suites)}")
        if self.residual and options.direction == "bwd":
            raise ValueError("--residual measures the forward alone, got --direction bwd")
        self.out: Path = options.out or Path("build/benchmarks") / self.environment.slug
        self.name: str | None = options.name
        self.budget = Budget.quick() if self.quick else Budget()
        on_gpu = self.device.type == "cuda"
        self.deadline = Deadline(options.limit or (QUICK_S if self.quick and on_gpu else None))
        self.left_out: list[str] = []
        self.roofs = Roofs(self.device, self.quick)
        self.rows: list[Row] = []

    @property
    def csv_path(self) -> Path:
        name = "all" if set(self.suites) == set(suites.SUITES) else "-".join(self.suites)
        return self.out / f"{self.name or name + ('-quick' if self.quick else '')}.csv"

    def execute(self) -> int:
        """Measures, showing progress; what was measured is saved and shown whatever ends the run."""
        # All of them first: what is wrong with the arguments is said before anything is measured.
        tasks = sorted(self.tasks(), key=lambda task: (task.extra, self.quick and task.suite == "model"))
        self.console.print(self.environment.describe(), highlight=False)
        start = time.perf_counter()
        interrupted = False
        with CsvWriter(self.csv_path) as writer:
            try:
                for rows in self._work(tasks):
                    for row in rows:
                        self.environment.stamp(row)
                    writer.write(rows)
                    self.rows += rows
            except KeyboardInterrupt:
                interrupted = True
        print_rows(self.console, self.rows)
        for line in self.notes():
            self.console.print(line, highlight=False, soft_wrap=True)
        seconds = time.perf_counter() - start
        verb = "interrupted after" if interrupted else "in"
        self.console.print(f"{len(self.rows)} rows {verb} {seconds:.0f} s: {self.csv_path}", highlight=False)
        return 130 if interrupted else 0

    def _work(self, tasks: Sequence[Task]) -> Iterator[list[Row]]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as progress:
            bar = progress.add_task("", total=len(tasks))
            for number, task in enumerate(tasks, 1):
                progress.update(bar, description=task.name)
                if not self.deadline.fits(task.suite):
                    self.left_out.append(task.name)
                    progress.advance(bar)
                    continue
                start = time.perf_counter()
                for row in task.work():  # one by one: an interrupt loses only what is not measured yet
                    yield [*map(_roof_row, self.roofs.take_fresh()), row]
                yield [*map(_roof_row, self.roofs.take_fresh())]
                seconds = time.perf_counter() - start
                self.deadline.record(task.suite, seconds)
                if not self.console.is_terminal:  # a log instead of a bar
                    line = f"[{number}/{len(tasks)}] {task.name}: {seconds:.1f} s"
                    self.console.print(line, highlight=False, markup=False)
                if number <= 2:  # roofs, and the first point, for which the providers were imported
                    gc.freeze()  # what the imports left behind need not be walked through after every point
                progress.advance(bar)

    def notes(self) -> list[str]:
        """What this run left out, and how to get it."""
        lines = []
        if self.left_out:
            lines.append(f"left out for the limit of {self.deadline.seconds:g} s: {', '.join(self.left_out)}")
        if self.quick:
            absent = [p.name for p in PROVIDERS.values() if p.not_quick and p not in self.providers]
            text = "quick: one to three shapes of each operation, one small model, ten steps of training"
            text += f"; without {', '.join(absent)}, unless named" if absent else ""
            lines.append(f"{text}. All of it: python -m benchmarks all")
        return lines

    def compile_share(self, share: str) -> int:
        """One process of `precompile`: every N-th piece of work, starting with the I-th, of what something compiles."""
        index, count = map(int, share.split("/"))
        runner = self._runner([p for p in self.providers if p.compiles and not p.missing(self.device)])
        work: list[Callable[[], object]] = []
        if "model" in self.suites:  # first, since it takes longest
            from benchmarks import models

            work += models.compilations(
                self.device, self.dtypes, self.directions, self.shapes["model"], self._names(), self.quick
            )
        points = [point for suite in self.suites if suite in suites.OP_SUITES for point in self._points(suite)]
        work += [partial(runner.compile, point) for point in points]
        for one in work[index::count]:
            one()
        return 0

    def _names(self) -> list[str]:
        return [provider.name for provider in self.providers]

    def _runner(self, providers: Sequence[Provider]) -> OpRunner:
        return OpRunner(self.device, providers, self.accumulates, self.budget, self.roofs)

    def _points(self, suite: str) -> list[Point]:
        return suites.op_points(
            suite,
            self.device,
            self.dtypes,
            self.directions,
            self.shapes[suite],
            self.quick,
            layout=self.layout,
            residual=self.residual,
        )

    def tasks(self) -> Iterator[Task]:
        """The run's steps in order. Suites that need more than operations are imported only when asked for."""
        runner = self._runner(self.providers)
        points = {suite: self._points(suite) for suite in self.suites if suite in suites.OP_SUITES}
        if points:
            yield Task("roofs", "roofs", partial(self._measure_roofs, any(OPS[suite].is_gemm for suite in points)))
        for suite in self.suites:
            if suite in points:
                first = points[suite][0].shape
                for point in points[suite]:
                    extra = self.quick and point.shape != first
                    yield Task(suite, str(point), partial(runner.run, point), extra)
                continue
            named: Iterable[tuple[str, Callable[[], Iterable[Row]]]]
            if suite == "model":
                from benchmarks import models

                named = models.tasks(
                    self.device,
                    self.dtypes,
                    self.directions,
                    self.shapes[suite],
                    self._names(),
                    self.budget,
                    self.quick,
                )
            elif suite == "train":
                from benchmarks import training

                named = training.tasks(self.device, self.out, self._names(), self.quick, self.console)
            elif suite == "host":
                from benchmarks import host

                named = host.tasks(self.device, self.dtypes, self.directions, self.providers, self.budget)
            else:
                from benchmarks import accuracy

                named = accuracy.tasks(self.device, self.dtypes, self.providers, self.accumulates, self.quick)
            for name, work in named:
                yield Task(suite, name, work, extra=self.quick and suite == "host")

    def _measure_roofs(self, gemm: bool) -> list[Row]:
        """All roofs, whether or not a row needs them; their rows are those that are fresh."""
        for kind in ("copy", "read", "read2write1"):
            self.roofs.memory(kind)
        for dtype in self.dtypes if gemm else ():
            self.roofs.gemm(dtype)
        return []


def precompile(arguments: Sequence[str], processes: int) -> None:
    """Runs this command's compilations in parallel: torch.compile and QuACK keep theirs on disk, and find them again."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    # The processes are the parallelism: Inductor's own pools of workers on top would be one per process.
    options: dict[str, Any] = {"env": {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}}
    options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    start = time.perf_counter()
    workers = [
        subprocess.Popen([*command, "--precompile-share", f"{i}/{processes}"], **options) for i in range(processes)
    ]
    try:
        for worker in workers:
            worker.wait()
    finally:  # an interrupt ends them too
        for worker in workers:
            worker.terminate()
    failed = sum(worker.returncode != 0 for worker in workers)
    note = f", {failed} of them failed: what they did not compile is compiled while measuring" if failed else ""
    print(f"compiled ahead in {time.perf_counter() - start:.0f} s by {processes} processes{note}", flush=True)


def _roof_row(roof: Roof) -> Row:
    row = Row("roof", "roof", "", dtype_name(roof.dtype), "", "", roof.what)
    row.median_us, row.rate, row.unit = roof.seconds * 1e6, roof.figure, roof.unit
    row.roof, row.setting, row.timing = roof.kind, roof.kind, "events"
    return row


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; valid: cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; valid: cpu, cuda, cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _dtypes(names: Sequence[str] | str) -> list[torch.dtype]:
    names = _names(names) if isinstance(names, str) else names
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; valid: {', '.join(DTYPES)}")
    return [DTYPES[name] for name in names]


def _providers(names: Sequence[str] | None, quick: bool) -> list[Provider]:
    if names is None:
        return [provider for provider in PROVIDERS.values() if not (quick and provider.not_quick)]
    return list(dict.fromkeys(find_provider(name) for name in names))


def _shapes(names: Sequence[str] | None, chosen: Sequence[str]) -> dict[str, list[str] | None]:
    """The shapes that were asked for, per suite; None stands for a suite's own."""
    from benchmarks.models import MODELS

    shares = suites.share_shapes(names, chosen, list(MODELS)) if names is not None else {}
    return {suite: shares.get(suite) for suite in chosen}


def _accumulates(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not ACCUMULATE.fullmatch(name):
            raise ValueError(f"unknown accumulate {name!r}; valid: fp32, fp16, each with /CHUNK, e.g. fp32/512")
    return tuple(names)


def print_list(console: Console) -> None:
    """What there is to name: suites with their shapes, providers with what they lack here."""
    device = _device(None)
    for suite in suites.OP_SUITES:
        console.print(f"[bold]{suite}[/bold]")
        for group in suites.GROUPS[suite]:
            console.print(f"  {suites.describe_group(group)}", highlight=False, soft_wrap=True)
    from benchmarks import accuracy, host, models, training

    others = {"model": models, "train": training, "numerics": accuracy, "host": host}
    for suite in suites.OTHER_SUITES:
        console.print(f"[bold]{suite}[/bold]")
        for line in others[suite].describe():
            console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print("[bold]providers[/bold]")
    for provider in PROVIDERS.values():
        names = ", ".join((provider.name, *provider.aliases))
        console.print(f"  {names}: {provider.missing(device) or 'available'}", highlight=False)


def _plot(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description="Draws the CSVs of a folder.")
    parser.add_argument("dir", type=Path)
    options = parser.parse_args(arguments)
    from benchmarks import plot

    try:
        for path in plot.plot_folder(options.dir):
            print(path)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _compare(arguments: Sequence[str]) -> int:
    from benchmarks import compare

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description="How well the ratios of two runs agree; exits with 1 if they do not.",
    )
    parser.add_argument("first", type=Path, help="a CSV of this harness, or a folder of them")
    parser.add_argument("second", type=Path)
    parser.add_argument("--within", type=float, default=0.03, help="relative difference allowed; default 0.03")
    parser.add_argument("--above-us", type=float, default=1000.0, help="of points that take longer; default 1000")
    options = parser.parse_args(arguments)
    try:
        lines, agree = compare.ratios(options.first, options.second, options.within, options.above_us)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join(lines))
    return 0 if agree else 1


def _baselines(arguments: Sequence[str]) -> int:
    from benchmarks import compare

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks baselines",
        description="Whether a run reproduces the times measured earlier; exits with 1 if not all of them are there and near.",
    )
    parser.add_argument("results", type=Path, nargs="+", help="CSVs of this harness, or folders of them")
    parser.add_argument("--against", type=Path, default=compare.BASELINES, help=f"default: {compare.BASELINES.name}")
    parser.add_argument("--within", type=float, default=0.1, help="relative difference allowed; default 0.1")
    options = parser.parse_args(arguments)
    try:
        lines, agree = compare.baselines(options.results, options.against, options.within)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n".join(lines))
    return 0 if agree else 1


def _report(arguments: Sequence[str]) -> int:
    from benchmarks import report

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report",
        description="Writes tables and plots of committed results between the markers of a README.",
    )
    parser.add_argument("dir", type=Path, nargs="?", default=report.RESULTS, help="default: benchmarks/results")
    parser.add_argument("--readme", type=Path, default=report.README)
    options = parser.parse_args(arguments)
    try:
        for line in report.write(options.dir, options.readme):
            print(line)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0
