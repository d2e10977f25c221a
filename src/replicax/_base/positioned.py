"""Objects whose position or state a checkpoint saves as a whole, beside variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Positioned:
    """The base class of iterators and generators of this library that have `save_state` and `restore_state`."""

    def save_state(self) -> Any:
        """Return the state, made of numbers, strings and arrays in dicts, lists and tuples."""
        raise NotImplementedError

    def _first_state(self) -> Any:
        """Return the state at the beginning, if it can be told; else the present one."""
        return self.save_state()

    def _carried_over(self, states: Sequence[Any]) -> Any:
        """Return which of the states of another number of processes holds here; None if none does."""
        return None
