"""The command line: suites, plots and the README's table."""

from __future__ import annotations

import argparse
import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import suites
from benchmarks.ops import DIRECTIONS
from benchmarks.providers import PROVIDERS, Compile, Provider, find_provider
from benchmarks.records import CsvWriter, Row, environment
from benchmarks.roofs import Roof, Roofs
from benchmarks.runner import OpRunner, Point, dtype_name
from benchmarks.tables import print_rows
from benchmarks.timing import Budget

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ACCUMULATE = re.compile(r"fp(32|16)(/[1-9]\d*)?")
DEFAULT_ACCUMULATE = ("fp32", "fp32/512", "fp32/128", "fp16", "fp16/128")
QUICK_ACCUMULATE = ("fp32", "fp32/512")

# One step of a run: what it is called on the progress bar, and what to do.
Task = tuple[str, Callable[[], Iterable[Row]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status. Bad arguments exit with 2 and list the valid ones."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["plot"]:
        return _plot(arguments[1:])
    if arguments[:1] == ["report"]:
        return _report(arguments[1:])
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
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
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed and error against float64 of ampkernels and its peers, side by side.",
        epilog="Without a suite: all --quick. Also: `python -m benchmarks plot DIR`, `report DIR`, `compare CSV CSV`.",
    )
    parser.add_argument("suite", nargs="*", help=f"{', '.join(suites.SUITES)}, or all")
    parser.add_argument("--quick", action="store_true", help="few shapes, short measurements: under a minute on a GPU")
    parser.add_argument("--device", default=None, help="cuda (default where there is one), cuda:1, cpu")
    parser.add_argument("--dtype", default="bf16", type=_names, help="of bf16, fp16, fp32; comma-separated")
    parser.add_argument("--shapes", type=_names, help="groups (see --list) or shapes such as 4096x4096x4096")
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both")
    parser.add_argument("--providers", type=_names, help="comma-separated; default: all that are installed")
    parser.add_argument("--accumulate", type=_names, help="policies of ours to measure, e.g. fp32,fp32/512,fp16/128")
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile")
    parser.add_argument(
        "--precompile", type=int, default=0, metavar="N", help="first fill the compilers' caches with N processes"
    )
    parser.add_argument("--precompile-share", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for the CSV; default build/benchmarks/<device>")
    parser.add_argument("--commit", help="written into the rows where the checkout has no git history")
    parser.add_argument("--list", action="store_true", help="list suites, shapes and providers, and stop")
    return parser


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


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
        self.shapes: list[str] | None = options.shapes
        self.providers = _providers(options.providers, self.quick)
        default = QUICK_ACCUMULATE if self.quick else DEFAULT_ACCUMULATE
        self.accumulates = _accumulates(options.accumulate) if options.accumulate else default
        Compile.mode = options.compile_mode
        self.environment = environment(self.device, options.commit)
        self.out: Path = options.out or Path("build/benchmarks") / self.environment.slug
        self.budget = Budget.quick() if self.quick else Budget()
        self.roofs = Roofs(self.device, self.quick)
        self.rows: list[Row] = []

    @property
    def csv_path(self) -> Path:
        name = "all" if set(self.suites) == set(suites.SUITES) else "-".join(self.suites)
        return self.out / f"{name}{'-quick' if self.quick else ''}.csv"

    def execute(self) -> int:
        """Measures, showing progress; what was measured is saved and shown whatever ends the run."""
        tasks = list(self.tasks())  # checks shapes of every suite before the first one starts
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
        seconds = time.perf_counter() - start
        verb = "interrupted after" if interrupted else "in"
        self.console.print(f"{len(self.rows)} rows {verb} {seconds:.0f} s: {self.csv_path}", highlight=False)
        return 130 if interrupted else 0

    def _work(self, tasks: Sequence[Task]) -> Iterator[list[Row]]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True) as progress:
            bar = progress.add_task("", total=len(tasks))
            for number, (name, task) in enumerate(tasks, 1):
                progress.update(bar, description=name)
                start = time.perf_counter()
                rows = list(task())
                if not self.console.is_terminal:  # a log instead of a bar
                    seconds = time.perf_counter() - start
                    self.console.print(
                        f"[{number}/{len(tasks)}] {name}: {seconds:.1f} s", highlight=False, markup=False
                    )
                if number == 1:
                    gc.freeze()  # what the imports left behind need not be walked through after every point
                yield [_roof_row(roof) for roof in self.roofs.take_fresh()] + rows
                progress.advance(bar)

    def compile_share(self, share: str) -> int:
        """One process of `precompile`: every N-th point, starting with the I-th, of those that something compiles."""
        index, count = map(int, share.split("/"))
        compilers = [
            p for p in self.providers if p.name in ("compile", "quack", "quack_mm") and not p.missing(self.device)
        ]
        runner = self._runner(compilers)
        points = [point for suite in self.suites if suite in suites.OP_SUITES for point in self._points(suite)]
        for point in points[index::count]:
            runner.compile(point)
        return 0

    def _runner(self, providers: Sequence[Provider]) -> OpRunner:
        return OpRunner(self.device, providers, self.accumulates, self.budget, self.roofs)

    def _points(self, suite: str) -> list[Point]:
        return suites.op_points(suite, self.device, self.dtypes, self.directions, self.shapes, self.quick)

    def tasks(self) -> Iterator[Task]:
        """The run's steps in order. Suites that need more than operations are imported only when asked for."""
        runner = self._runner(self.providers)
        for suite in self.suites:
            if suite in suites.OP_SUITES:
                for point in self._points(suite):
                    yield str(point), partial(runner.run, point)
            elif suite == "model":
                from benchmarks import models

                yield from models.tasks(self.device, self.dtypes, self.directions, self.shapes, self.budget, self.quick)
            elif suite == "train":
                from benchmarks import training

                yield from training.tasks(self.device, self.out, self.quick, self.console)
            else:
                from benchmarks import accuracy

                yield from accuracy.tasks(self.device, self.dtypes, self.providers, self.accumulates, self.quick)


def precompile(arguments: Sequence[str], processes: int) -> None:
    """Runs this command's compilations in parallel: torch.compile and QuACK keep theirs on disk, and find them again."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    workers = [
        subprocess.Popen([*command, "--precompile-share", f"{i}/{processes}"], stdout=subprocess.DEVNULL)
        for i in range(processes)
    ]
    for worker in workers:
        worker.wait()


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
        return [provider for provider in PROVIDERS.values() if not (quick and provider.slow_start)]
    return list(dict.fromkeys(find_provider(name) for name in names))


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
    for suite in suites.OTHER_SUITES:
        console.print(f"[bold]{suite}[/bold]")
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
    parser.add_argument("first", type=Path)
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
