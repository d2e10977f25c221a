"""`RandomState`: the random numbers of a process that no variable holds, as an object for checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from replicax._base import frontend
from replicax._base.messages import received
from replicax._base.positioned import Positioned

_State: TypeAlias = Any  # numbers, strings and arrays in dicts, lists and tuples


def states() -> dict[str, _State]:
    """Returns the states of this process's random numbers, by what they are of."""
    found = {"python": random.getstate(), "numpy": np.random.get_state()}
    if (numbers := frontend.current.random_numbers) is not None:
        found[numbers.name] = numbers.save()
    return found


class RandomState(Positioned):
    """The random numbers that a program draws without an object in its checkpoint.

    These are those of Python's `random`, of `numpy.random`, and of the functions of `tf.random` that take no generator
    and no key. In a `Checkpoint`, `restore` sets them to where they were when it was saved. Each worker has its own.

    Args:
        *generators: `numpy.random.Generator`s, and instances of `random.Random`, whose states it has too.

    >>> import random, tempfile
    >>> import replicax as rx
    >>> checkpoint = rx.train.Checkpoint(random=rx.train.RandomState())
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
    >>> drawn = random.random()
    >>> _ = checkpoint.restore(path)
    >>> random.random() == drawn
    True
    """

    def __init__(self, *generators: np.random.Generator | random.Random):
        for generator in generators:
            if not isinstance(generator, np.random.Generator | random.Random):
                raise TypeError(
                    f"RandomState takes numpy.random.Generators and random.Randoms, got {received(generator)}. "
                    "A tf.random.Generator has a name of its own in the Checkpoint."
                )
        self._generators = generators

    def save_state(self) -> dict[str, _State]:
        """Returns the states, made of numbers, strings and arrays.

        >>> import random, replicax as rx
        >>> random_state = rx.train.RandomState()
        >>> state, drawn = random_state.save_state(), random.random()
        >>> random_state.restore_state(state)
        >>> random.random() == drawn
        True
        """
        return {**states(), "generators": self._own_states()}

    def _own_states(self) -> list[_State]:
        return [g.getstate() if isinstance(g, random.Random) else g.bit_generator.state for g in self._generators]

    def restore_state(self, state: dict[str, _State]) -> None:
        """Sets the states to those that `save_state` returned.

        Raises:
            ValueError: it was saved with other generators; nothing is set then.

        >>> import numpy as np, replicax as rx
        >>> generator = np.random.default_rng(0)
        >>> random_state = rx.train.RandomState(generator)
        >>> state, drawn = random_state.save_state(), generator.random()
        >>> random_state.restore_state(state)
        >>> generator.random() == drawn
        True
        """
        here, saved = _kinds(self._own_states()), _kinds(state["generators"])
        if here != saved:
            raise ValueError(
                f"This RandomState has {len(here)} generators{_listed(here)}, and that which was saved had "
                f"{len(saved)}{_listed(saved)}. Make it of the same generators, in the same order."
            )
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if (numbers := frontend.current.random_numbers) is not None and numbers.name in state:
            numbers.restore(state[numbers.name])
        for generator, own in zip(self._generators, state["generators"]):
            if isinstance(generator, random.Random):
                generator.setstate(own)
            else:
                generator.bit_generator.state = own

    def _carried_over(self, states: Sequence[_State]) -> _State | None:
        """Returns what to restore of the states of another number of workers."""
        return states[0] if all(same(state, states[0]) for state in states) else None


def _kinds(states: Sequence[_State]) -> list[str]:
    """Returns the kinds of the generators that have these states."""
    return [str(state["bit_generator"]) if isinstance(state, dict) else "random.Random" for state in states]


def _listed(kinds: Sequence[str]) -> str:
    return f" ({', '.join(kinds)})" if kinds else ""


def same(one: _State, other: _State) -> bool:
    """Returns whether two states are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))
