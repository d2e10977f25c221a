"""`pytest --progress`: lines with the time that is left in place of dots, and a table of the slowest files."""

from __future__ import annotations

import time
from collections import Counter

import pytest

_INTERVAL = 20.0  # seconds between two lines
_ENOUGH = 0.1  # of the tests, for an estimate
_ROWS = 12


class Progress:
    """Report how far the tests are, and which files take the time."""

    def __init__(self, config: pytest.Config) -> None:
        self._controller = not hasattr(config, "workerinput")
        self._config = config
        self._start = self._said = time.monotonic()
        self._total = self._done = 0
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._count(len(ids))

    def _count(self, total: int) -> None:
        if self._controller and total and not self._total:
            self._total, self._start = total, time.monotonic()
            self._say(f"{total:,} tests")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.passed and report.when == "call":
            return "passed", "", ""  # no dot
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "setup":
            self._tests[file] += 1
        if report.when == "teardown":
            self._done += 1
            now = time.monotonic()
            if self._controller and now - self._said > _INTERVAL:
                self._said = now
                spent = now - self._start
                done = self._done / max(self._total, self._done)
                left = f", about {_minutes(spent / done - spent)} left" if done > _ENOUGH else ""
                self._say(f"{int(100 * done):3} %  {self._done:6,} tests  {_minutes(spent)} so far{left}")

    def _say(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        whole = time.monotonic() - self._start
        terminalreporter.section(f"{self._done:,} tests in {_minutes(whole)} minutes")
        terminalreporter.line(f"{'tests':>6} {'seconds':>8}  slowest files")
        for file, seconds in self._seconds.most_common(_ROWS):
            terminalreporter.line(f"{self._tests[file]:6} {seconds:8.1f}  {file}")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
