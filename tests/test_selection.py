"""Which combinations of a test's cases, strategies and ways to run are dealt to `make test`."""

from __future__ import annotations

import itertools

import pytest
import selection

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
