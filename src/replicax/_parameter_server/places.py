"""Where the leaves of variables lie on parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from replicax._parameter_server.cut_types import Part


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
        server, start, stop = self.parts[number]
        kind = jax.ShapeDtypeStruct((stop - start, *self.kind.shape[1:]), self.kind.dtype)
        return Place((self.names[number],), kind, (Part(server, 0, stop - start),))


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
