"""The limits that `scripts/budget.py` checks."""

from __future__ import annotations

import dataclasses
import enum
import functools

import pytest
from test_release import load

import replicax as rx

budget = load("scripts/budget.py")


@pytest.fixture
def count_methods(monkeypatch):
    """Counts the methods of a class of this file as of one of replicax."""
    monkeypatch.setattr(budget, "SOURCE", budget.ROOT / "tests")

    def count(kind):
        for base in kind.__mro__:
            if base.__module__ == __name__:
                base.__module__ = "replicax._tested"
        return budget.method_names(kind)

    return count


def test_methods_of_base_classes_loops_and_tables_count(count_methods):
    class Base:
        def of_base(self): ...

        @property
        def property(self): ...

    class Kind(Base):
        __radd__ = __add__ = lambda self, other: other

        @staticmethod
        def static(): ...

        @functools.cached_property
        def cached(self): ...

    for name in ("first", "second"):
        setattr(Kind, name, lambda self: None)
    assert count_methods(Kind) == {
        *("of_base", "property", "__radd__", "__add__", "static", "cached", "first", "second"),
    }


def test_fields_members_and_generated_methods_do_not_count(count_methods):
    @dataclasses.dataclass(order=True)
    class Record:
        number: int = 0
        kind: type = int

    class Color(enum.Enum):
        RED = 1

    assert count_methods(Record) == count_methods(Color) == set()


def test_a_listed_figure_may_shrink_only_with_its_entry():
    limit = budget.LIMITS["class methods"]
    exceptions = {"class methods": {"a.Long": limit + 5}}
    for figure, errors in ((limit + 5, 0), (limit + 6, 1), (limit + 4, 1), (limit, 1)):
        figures = {"class methods": {"a.Long": figure, "a.Short": limit}}
        assert len(budget.check(figures, {}, exceptions)) == errors
        if figure <= limit + 5:
            assert budget.check(figures, {}, budget.shrink(figures, {}, exceptions)) == []


def test_tensorflows_names_do_not_count_for_the_classes_that_it_dictates():
    dictated = budget.names_from_tensorflow(rx.Variable)
    assert {"assign", "scatter_nd_add", "shape", "__radd__", "__len__"} < dictated
    assert "_update" not in dictated
    name = budget.full_name(rx.Variable)
    assert budget.limit_of("class methods", name, {name: 100}) == budget.DICTATED_LIMITS["class methods"]
    assert budget.names_from_tensorflow(rx.train.Checkpoint) == set()
