"""Which tests run: combinations that are dealt to `make test`, and tests that a strategy changes on purpose."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import selection
from strategies import STRATEGIES

WAYS = ["eager", "compiled"]


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(
    "cases, strategies, ways",
    [(1, 1, 1), (1, 1, 2), (5, 1, 1), (5, 1, 2), (1, 7, 2), (4, 7, 2), (7, 4, 2), (30, 7, 2)],
)
def test_each_case_each_strategy_and_each_way_is_chosen_in_few_combinations(cases, strategies, ways, turn):
    columns = [list(range(cases)), [f"strategy {i}" for i in range(strategies)], WAYS[:ways]]
    places = list(itertools.product(*columns))
    chosen = selection.choose(places, *columns, turn)
    assert [sorted(set(column)) for column in zip(*chosen)] == [sorted(column) for column in columns]
    assert len(chosen) <= max(cases, strategies, ways) + min(cases, strategies)


def test_combinations_that_are_not_there_are_not_chosen():
    """A case may have one way alone, and a strategy some of the cases."""
    places = [(0, "a", "eager"), (1, "a", "compiled"), (1, "b", "eager"), (1, "b", "compiled")]
    chosen = selection.choose(places, [0, 1], ["a", "b"], WAYS, 0)
    assert chosen <= set(places) and {place[2] for place in chosen} == set(WAYS)


def test_entries_of_changes_name_shared_tests():
    root = Path(__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in root.rglob("test_*.py")]
    defined = {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    for strategy, kind in STRATEGIES.items():
        unknown = [pattern for pattern in kind.changes if re.match(r"\w+", pattern)[0] not in defined]
        assert not unknown, f"There are no tests {unknown}, which `changes` of the strategy {strategy!r} names."


def test_a_test_that_a_strategy_changes_has_to_fail():
    reasons = {"test_a": "it has no copies", r"test_b\[eager": "its eager replicas differ"}

    class Item:
        def __init__(self, name):
            self.name, self.added = name, []

        def iter_markers(self, name):
            return [pytest.mark.changes(reasons).mark] if name == "changes" else []

        def add_marker(self, marker):
            self.added.append((marker.name, marker.kwargs))

    items = [Item(name) for name in ("test_a", "test_a[2]", "test_ab", "test_b[eager-2]", "test_b[compiled-2]")]
    selection.excuse(items)
    no_copies, eager = (("xfail", {"reason": reason, "strict": True}) for reason in reasons.values())
    assert [item.added for item in items] == [[no_copies], [no_copies], [], [eager], []]
