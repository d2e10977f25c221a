"""`pytest --cpu-times`: the CPU time of each test file, of its tests and of the processes they waited for.

Wall time says little on a machine that does other things too; CPU time is what a change to the suite saves.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator

import pytest
from warm_start import spent_by_programs

_KEY = "cpu seconds"


def _spent() -> tuple[float, float]:
    """Returns the CPU seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime + spent_by_programs()


class CpuTimes:
    """Counts the CPU time of each phase of a test, and prints the sums at the end."""

    def __init__(self) -> None:
        self._before = _spent()
        self._files: dict[str, list[float]] = {}
        self._tests: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self._before = _spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = _spent()
        report.cpu_times = [now[0] - self._before[0], now[1] - self._before[1]]  # xdist sends attributes along
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        own, children = getattr(report, "cpu_times", (0.0, 0.0))
        file = report.nodeid.partition("::")[0]
        sums = self._files.setdefault(file, [0.0, 0.0])
        sums[0] += own
        sums[1] += children
        self._tests[report.nodeid] += own + children

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds: own + of child processes")
        for file, (own, children) in sorted(self._files.items(), key=lambda pair: -sum(pair[1])):
            terminalreporter.line(f"{own:7.1f} + {children:6.1f}  {file}")
        own, children = (sum(sums[i] for sums in self._files.values()) for i in (0, 1))
        terminalreporter.line(f"{own:7.1f} + {children:6.1f}  in all")
        for test, seconds in self._tests.most_common(30):
            terminalreporter.line(f"{seconds:7.1f}  {test}")
