"""Which cases run: `pytest` leaves out those that are marked `thorough` or `numbers`; options of these names add them.

A case is left out if it costs much and others show nearly the same. A test that is asked for by name, with `-k` or as
`file.py::test`, has all its cases.

Strategies and the two ways to run (see strategies.py) are dealt: a test runs each case of its own, each strategy and
each way at least once, and the other combinations are `thorough`. Of a test that is marked `sampled(n)`, every n-th
case of its own runs, and the others are comparisons of `numbers`, which run with `pytest --numbers`, as with the newest
JAX and all optimizations (see Makefile). Where that does not run the test, it is `sampled(n, others="thorough")`.
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
    """Add the options `--thorough` and `--numbers`."""
    parser.addoption("--thorough", action="store_true", help="also run the cases that are marked `thorough`")
    parser.addoption("--numbers", action="store_true", help="also run the cases that are marked `numbers`")


def deal(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark the combinations of cases, strategies and ways that need not run as thorough."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        parametrized = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if parametrized and not item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, combinations in tests.items():
        _deal(combinations, zlib.crc32(test.encode()), config.getoption("numbers"))


def _deal(combinations: Sequence[pytest.Function], turn: int, numbers: bool) -> None:
    """Mark combinations of one test; `turn`, a number, decides where to begin."""
    items = {_place(item): item for item in combinations}
    cases, strategies, ways = (list(dict.fromkeys(column)) for column in zip(*items))
    sampled = combinations[0].get_closest_marker("sampled")
    step = min(sampled.args[0], len(cases)) if sampled else 1
    for start in range(step):
        in_sample = numbers or start == turn % step
        group = cases[start::step]
        # Case c meets strategy s every `period` pairs, so that each case and each strategy occurs.
        period = min(len(group), len(strategies))
        runs = Counter[str | None]()  # of a strategy, which takes its ways in turn
        for (c, case), (s, strategy) in itertools.product(enumerate(group), enumerate(strategies)):
            omitted = [way for way in ways if (case, strategy, way) in items]
            if omitted and (c + s + turn) % period == 0:
                way = omitted.pop((s + runs[strategy] + turn) % len(omitted))
                runs[strategy] += 1
                if not in_sample:
                    items[case, strategy, way].add_marker(sampled.kwargs.get("others", "numbers"))
            for way in omitted:
                items[case, strategy, way].add_marker("thorough")


def _place(item: pytest.Function) -> tuple[Hashable, str | None, object]:
    """Return a combination's own case, its strategy and its way; a strategy is None where the test has no table."""
    strategy = item.get_closest_marker("strategy")
    apart = {"way"} | (_OF_STRATEGIES if strategy else set())
    # `callspec.indices` number combinations, and values need not be hashable.
    case = tuple(id(value) for name, value in sorted(item.callspec.params.items()) if name not in apart)
    return case, strategy.args[0] if strategy else None, item.callspec.params.get("way")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that are marked `thorough` or `numbers`, unless they are asked for."""
    if config.option.keyword or any("::" in name for name in config.args):
        return
    left_out = {mark for mark in ("thorough", "numbers") if not config.getoption(mark)}
    deselected = {item for item in items if not left_out.isdisjoint(mark.name for mark in item.iter_markers())}
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
