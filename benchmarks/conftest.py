"""Options, the session's results, each test's share of its file's seconds, and the tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from racing import BUDGETS, race_seconds
from report import Results, race_table, target_table
from rows import save

from dprs_kernels.allocator import keep_freed_memory

KEY: pytest.StashKey[Results] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all sizes, rates, dtypes and peers; ten times the seconds")


def pytest_configure(config: pytest.Config) -> None:
    """What only --full runs is marked slow, which pyproject.toml leaves out. Freed memory serves again: for all."""
    config.stash[KEY] = Results()
    keep_freed_memory()
    if config.getoption("--full"):
        config.option.markexpr = ""


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    return request.config.stash[KEY]


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture
def seconds(request: pytest.FixtureRequest, full: bool) -> float:
    """What this test may spend racing."""
    file = request.path.stem
    races = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path.stem == file]
    return race_seconds(file, sum("seconds" in item.fixturenames for item in races), full=full)


@pytest.fixture(scope="module", autouse=True)
def file_took(request: pytest.FixtureRequest, results: Results) -> Iterator[None]:
    start = time.perf_counter()
    yield
    results.took[request.path.stem] = time.perf_counter() - start


@pytest.hookimpl(trylast=True)   # after pytest-benchmark's own tables
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[KEY]
    if not found.rows and not found.figures and not found.notes:
        return
    for title, lines in (("races", race_table(found)), ("targets", target_table(found))):
        terminalreporter.section(title)
        for text in lines:
            terminalreporter.write_line(text)
    terminalreporter.write_line("")
    budget = "" if config.getoption("--full") else " of {:.0f}"
    took = [f"{file} {took:.0f}{budget.format(BUDGETS[file])} s" for file, took in found.took.items()]
    terminalreporter.write_line(f"took: {', '.join(took)}")
    if written := save(found.kept()):
        terminalreporter.write_line(f"rows: {', '.join(path.name for path in written)} in benchmarks/data/")
        terminalreporter.write_line("from them: python -m benchmarks table, python -m benchmarks plot")
