"""Which cases run: `pytest` leaves out the cases that are marked `thorough`, `pytest --thorough` has them too.

A case is left out if it costs much and others show nearly the same. A test that is asked for by name, with `-k` or as
`file.py::test`, has all its cases.

Strategies and the two ways to run (see strategies.py) are dealt: a test runs each case of its own, each strategy and
each way at least once, and the other combinations are `thorough`. Of a test that is marked `sampled(n)`, every n-th
case of its own runs.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

# Where a test has strategies, these parameters are theirs, and not cases of its own.
_OF_STRATEGIES = {"make", "n"}


def add_options(parser: pytest.Parser) -> None:
    """Add the options `--thorough` and `--unsampled`."""
    parser.addoption("--thorough", action="store_true", help="also run the cases that are marked `thorough`")
    parser.addoption("--unsampled", action="store_true", help="run every case of tests that are marked `sampled(n)`")


def deal(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark the combinations of cases, strategies and ways that need not run as thorough."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        parametrized = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if parametrized and not item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, combinations in tests.items():
        _deal(combinations, zlib.crc32(test.encode()), config.getoption("unsampled"))


def _deal(combinations: Sequence[pytest.Function], turn: int, unsampled: bool) -> None:
    """Mark combinations of one test; `turn`, a number, decides where to begin."""
    items = {_place(item): item for item in combinations}
    cases, strategies, ways = (list(dict.fromkeys(column)) for column in zip(*items))
    sampled = combinations[0].get_closest_marker("sampled")
    if sampled and not unsampled:
        step = min(sampled.args[0], len(cases))
        sample = cases[turn % step :: step]
        for (case, _, _), item in items.items():
            if case not in sample:
                item.add_marker("thorough")
        cases = sample
    # Case c meets strategy s every `period` pairs, so that each case and each strategy occurs.
    period = min(len(cases), len(strategies))
    runs = Counter[str | None]()  # of a strategy, which takes its ways in turn
    for (c, case), (s, strategy) in itertools.product(enumerate(cases), enumerate(strategies)):
        omitted = [way for way in ways if (case, strategy, way) in items]
        if omitted and (c + s + turn) % period == 0:
            omitted.pop((s + runs[strategy] + turn) % len(omitted))
            runs[strategy] += 1
        for way in omitted:
            items[case, strategy, way].add_marker("thorough")


def _place(item: pytest.Function) -> tuple[Hashable, str | None, object]:
    """Return a combination's own case, its strategy and its way; a strategy is None where the test has no table."""
    strategy = item.get_closest_marker("strategy")
    apart = {"way"} | (_OF_STRATEGIES if strategy else set())
    case = tuple((name, index) for name, index in sorted(item.callspec.indices.items()) if name not in apart)
    return case, strategy.args[0] if strategy else None, item.callspec.params.get("way")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the thorough cases, unless they are asked for."""
    if config.getoption("thorough") or config.option.keyword or any("::" in name for name in config.args):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]
