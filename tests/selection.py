"""Which cases run: `pytest` leaves out those that are marked `thorough` or `numbers`; options of these names add them.

A case is left out if it costs much and others show nearly the same. A test that is asked for by name, with `-k` or as
`file.py::test`, has all its cases.

Strategies and the two ways to run (see strategies.py) are dealt: a test runs each case of its own, each strategy and
each way at least once, and the other combinations are `thorough`. Of a test that is marked `sampled(n)`, every n-th
case of its own runs, and the others are comparisons of `numbers`, which run with `pytest --numbers`, as with the newest
JAX and all optimizations (see Makefile). Where that does not run the test, or what is compared are two programs of
replicax, it is `sampled(n, others="thorough")`.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

Place = tuple[Hashable, "str | None", str]  # a case of a test's own, a strategy and a way
_MARKS = {"thorough", "numbers"}
_WAYS = {"compiled", "eager"}
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
        group = dict.fromkeys(cases[start::step])
        places = [place for place in items if place[0] in group]
        chosen = choose(places, list(group), strategies, ways, turn)
        for place in places:
            if place not in chosen:
                items[place].add_marker("thorough")
            elif sampled and not numbers and start != turn % step:
                items[place].add_marker(sampled.kwargs.get("others", "numbers"))


def choose(
    places: Sequence[Place], cases: Sequence[Hashable], strategies: Sequence[str | None], ways: Sequence[str], turn: int
) -> set[Place]:
    """Return few of the places, in which each case, each strategy and each way occurs."""
    pairs: dict[tuple[Hashable, str | None], list[Place]] = {}
    for place in places:
        pairs.setdefault(place[:2], []).append(place)
    chosen: set[Place] = set()
    # Case c meets strategy s every `period` pairs, so that each case and each strategy occurs.
    period = min(len(cases), len(strategies))
    runs = Counter[str | None]()  # of a strategy, which takes its ways in turn
    for (c, case), (s, strategy) in itertools.product(enumerate(cases), enumerate(strategies)):
        combinations = pairs.get((case, strategy))
        if combinations and (c + s + turn) % period == 0:
            chosen.add(combinations[(s + runs[strategy] + turn) % len(combinations)])
            runs[strategy] += 1
    for way in set(ways) - {place[2] for place in chosen}:
        chosen.update([place for place in places if place[2] == way][:1])
    return chosen


def _place(item: pytest.Function) -> Place:
    """Return a combination's own case, its strategy and its way: None where the test has no table, "" for no way."""
    strategy = item.get_closest_marker("strategy")
    params = dict(item.callspec.params)
    way = getattr(params.get("way"), "__name__", "")
    apart = ({"way"} if way in _WAYS else set()) | (_OF_STRATEGIES if strategy else set())
    # `callspec.indices` number combinations, and values need not be hashable.
    case = tuple(id(value) for name, value in sorted(params.items()) if name not in apart)
    return case, strategy.args[0] if strategy else None, way if way in _WAYS else ""


def excuse(items: Sequence[pytest.Item]) -> None:
    """Expect tests to fail whose behaviour a strategy changes on purpose (`Kind.changes` in strategies.py).

    Such a test fails if it passes under the strategy: then the entry is no longer needed.
    """
    for item in items:
        for marker in item.iter_markers("changes"):
            for pattern, reason in marker.args[0].items():
                if re.match(rf"{pattern}\b", item.name):
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that are marked `thorough` or `numbers`, unless they are asked for, or recorded anew."""
    named = config.option.keyword or any("::" in name for name in config.args)
    if named or os.environ.get("REPLICAX_RECORD"):
        return
    asked = {name for name in _MARKS if config.getoption(name)}
    deselected = set()
    for item in items:
        marks = _MARKS & {mark.name for mark in item.iter_markers()}
        if marks and not marks & asked:
            deselected.add(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
