"""One row per point: what was measured, how, on what, and by which code."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import math
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class Row:
    """A row of the CSV; the field order is the column order. Times in microseconds; an empty cell was not measured.

    `status`: "ok"; "wrong" (the error exceeds its bound: timed, not ranked); "partial" (computes less than the
    operation: not ranked); "skipped", "error" or "oom" (the reason says why).
    """

    suite: str
    op: str
    shape: str
    dtype: str
    accumulate: str
    direction: str
    provider: str
    status: str = "ok"
    reason: str = ""
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    call_us: float | None = None
    rounds: int | None = None
    timing: str = ""  # "graph", "events", "wall" or "host"
    rate: float | None = None
    unit: str = ""  # "TFLOP/s", "GB/s", "samples/s", "tokens/s"
    roof: str = ""  # which measured roof
    roof_rate: float | None = None
    roof_share: float | None = None
    speedup: float | None = None  # over eager, median of the round-by-round ratios
    rank: int | None = None
    rel_l2: float | None = None
    max_ulp: float | None = None
    shrink: float | None = None
    error_over: str = ""  # what the error was taken over
    peak_mib: float | None = None
    setting: str = ""
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    version: str = ""
    commit: str = ""
    csrc_digest: str = ""
    date: str = ""

    def as_cells(self) -> dict[str, str]:
        cells = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            cells[field.name] = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        return cells

    @classmethod
    def from_cells(cls, cells: dict[str, str]) -> Row:
        values: dict[str, object] = {}
        for field in dataclasses.fields(cls):
            text = cells.get(field.name, "")
            kind = str(field.type)
            if "float" in kind:
                values[field.name] = float(text) if text else None
            elif "int" in kind:
                values[field.name] = int(text) if text else None
            else:
                values[field.name] = text
        return cls(**values)  # type: ignore[arg-type]


COLUMNS = [field.name for field in dataclasses.fields(Row)]


class CsvWriter:
    """Writes each row as soon as it is there, so that a run that is cut short keeps what it measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._writer.writeheader()

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._writer.writerow(row.as_cells())
        self._file.flush()

    def __enter__(self) -> CsvWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if not {"op", "shape", "provider", "median_us"} <= set(reader.fieldnames or ()):
            raise ValueError(f"{path} is not a results file of this harness")
        return [Row.from_cells(cells) for cells in reader]


@dataclass(frozen=True)
class Environment:
    """What a row carries so that its number can be judged later."""

    gpu: str
    driver: str
    torch: str
    cuda: str
    version: str
    commit: str
    csrc_digest: str
    date: str

    def stamp(self, row: Row) -> Row:
        for field in dataclasses.fields(self):
            setattr(row, field.name, getattr(self, field.name))
        return row

    def describe(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        cuda = f", CUDA {self.cuda}" if self.cuda else ""
        return f"{self.gpu}{driver}, torch {self.torch}{cuda}, ampkernels {self.version} ({self.commit})"

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")


def csrc_digest() -> str:
    """Digest of the kernel sources of this checkout, as the package computes it for its builds."""
    try:
        from ampkernels._build import csrc_digest as digest

        return digest() or "unavailable"
    except Exception:  # no package, or a build without sources beside it
        return "unavailable"


def environment(device: torch.device, commit: str | None = None) -> Environment:
    """Everything a row says about the machine and the code; `commit` for a checkout without git."""
    try:
        from importlib.metadata import version as package_version

        version = package_version("ampkernels")
    except Exception:
        version = "source"
    cuda = device.type == "cuda"
    return Environment(
        gpu=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        driver=_driver() if cuda else "",
        torch=torch.__version__,
        cuda=torch.version.cuda or "" if cuda else "",
        version=version,
        commit=commit or _commit(),
        csrc_digest=csrc_digest(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}+" if _output("git", "status", "--porcelain", "--untracked-files=no") else commit


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
