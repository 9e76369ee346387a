"""Options, the session's results, and the tables at its end."""

from __future__ import annotations

import pytest
from report import Results, race_table, target_table, write_csv

KEY: pytest.StashKey[Results] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every rate in every dtype, torch.compile everywhere")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEY] = Results()


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    return request.config.stash[KEY]


@pytest.hookimpl(trylast=True)   # after pytest-benchmark's own tables
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[KEY]
    if not found.rows and not found.figures:
        return
    for title, lines in (("against limit and peers", race_table(found)), ("targets", target_table(found))):
        terminalreporter.section(title)
        for text in lines:
            terminalreporter.write_line(text)
    if found.rows:
        write_csv(found)
        terminalreporter.write_line("")
        terminalreporter.write_line("rows: benchmarks/data/step.csv")
