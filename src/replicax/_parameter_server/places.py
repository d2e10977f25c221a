"""Where the leaves of variables lie on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from replicax._base.specs import TensorShape
from replicax._base.types import Tree


class Part(NamedTuple):
    """Rows of axis 0 of a leaf that lie on a server. A leaf that is not sharded has one part with all its rows."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where one leaf of a variable lies.

    Args:
        names: the names that the servers know its parts by.
        kind: its shape and dtype.
        parts: its rows, in order; one part for a leaf that lies on one server as a whole.
    """

    names: tuple[str, ...]
    kind: jax.ShapeDtypeStruct
    parts: tuple[Part, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether it consists of several parts."""
        return len(self.parts) > 1

    def part(self, number: int) -> Place:
        """Returns one part as a leaf of its own, at the same place."""
        if not self.is_sharded:
            return self
        server, start, stop = self.parts[number]
        kind = jax.ShapeDtypeStruct((stop - start, *self.kind.shape[1:]), self.kind.dtype)
        return Place((self.names[number],), kind, (Part(server, 0, stop - start),))


class Near:
    """Leaves on parameter servers with which new ones lie, as an optimizer's averages do with its variables.

    Args:
        places: where the leaves lie: a nest of `Place`, with None for what lies elsewhere.
    """

    def __init__(self, places: Tree):
        found, _ = jax.tree.flatten_with_path(places, is_leaf=lambda node: isinstance(node, Place))
        self._places: dict[tuple[object, ...], Place] = dict(found)

    def parts(self, path: tuple[object, ...], shape: tuple[int, ...]) -> tuple[Part, ...] | None:
        """Returns the parts of a new leaf; None where any server will do.

        The end of its path in the new value is the path of the leaf with which it lies, if it has the shape of that:
        `state[0].mu["w"]` lies with `["w"]`. Of those that lie with none, scalars are on the first leaf's server, and
        so are all others if there is no other leaf; they are divided as that is, if they have as many rows.
        """
        for start in range(len(path) + 1):
            place = self._places.get(path[start:])
            if place is not None and place.kind.shape == shape:
                return place.parts
        if not self._places or (shape and len(self._places) > 1):
            return None
        first = next(iter(self._places.values()))
        return first.parts if first.kind.shape[:1] == shape[:1] else whole(first.parts[0].server, shape)


def whole(server: int, shape: Sequence[int]) -> tuple[Part, ...]:
    """Returns the only part of a leaf that lies on one server."""
    return (Part(server, 0, shape[0] if shape else 1),)


def shards(first: int, servers: int, rows: int, count: int) -> tuple[Part, ...]:
    """Returns the parts of a leaf with so many rows, on servers in turn; the first parts are larger by one row.

    >>> shards(1, 2, 5, 2)
    (Part(server=1, start=0, stop=3), Part(server=0, start=3, stop=5))
    """
    size, larger = divmod(rows, count)
    stops = [0]
    for number in range(count):
        stops.append(stops[-1] + size + (number < larger))
    return tuple(Part((first + n) % servers, stops[n], stops[n + 1]) for n in range(count))


def initial_value_of_parts(initial_value: Callable[..., Tree], shape: tuple[int, ...], count: int) -> Tree:
    """Call the function for each part of axis 0 if it takes parts, else once; return the whole initial value."""
    values = []
    for _, start, stop in shards(0, 1, shape[0], count):
        part_shape, offset = (stop - start, *shape[1:]), (start, *[0] * (len(shape) - 1))
        try:
            value = initial_value(partition_shape=TensorShape(part_shape), partition_offset=offset)
        except (TypeError, ValueError):  # as TensorFlow finds out that a function takes no parts
            return initial_value()
        if getattr(value, "shape", None) != part_shape:
            return value  # the whole value, whichever part is asked for
        values.append(value)
    return jnp.concatenate(values)
