"""Fixtures: every test that takes `device` runs on the CPU and, where there is a GPU that the build has kernels for, on
CUDA. The header says what is under test; the end says how many CUDA tests were skipped, and why."""

import pytest
import torch

import ampkernels as ak

_INFO = ak.build_info()
_REASON = _INFO["error"] if "error" in _INFO else _INFO["running"]["cuda"]


def pytest_report_header() -> str:
    return str(_INFO)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and _REASON is not None:
        pytest.skip(f"CUDA: {_REASON}")
    return request.param


@pytest.fixture
def cuda() -> str:
    """For what exists on CUDA only."""
    if _REASON is not None:
        pytest.skip(f"CUDA: {_REASON}")
    return "cuda"


def pytest_terminal_summary(terminalreporter) -> None:  # type: ignore[no-untyped-def]
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "CUDA: " in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} CUDA tests skipped: {_REASON}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20261129)


@pytest.fixture
def few_buffers(monkeypatch):
    """Two sets of inputs instead of as many as overflow the cache: the harness's tests are about what it says, not how
    fast."""
    runner = pytest.importorskip("benchmarks.runner")
    monkeypatch.setattr(runner, "cache_bytes", lambda device: 0)
