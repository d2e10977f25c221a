"""The parts of a traced function that a worker and parameter servers run: what `cut` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np


class Part(NamedTuple):
    """Rows of axis 0 of a leaf that lie on a server. A leaf that is not sharded has one part with all its rows."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class ServedLeaf:
    """A leaf of a variable on parameter servers.

    Args:
        slot: the input of the level that it is, None where it is only written.
        output: which of the jaxpr's outputs replaces it, None where it is only read.
        aval: its shape and dtype.
        parts: where it lies, in the order of the rows.
    """

    slot: int | None
    output: int | None
    aval: jax.ShapeDtypeStruct
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Stage:
    """A part of a program.

    Args:
        function: a pure function of lists of arrays, to be jitted or exported.
        avals: of its inputs, a tuple for each list; of inputs that it does not use, perhaps others.
    """

    function: Callable[..., Any]
    avals: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]


@dataclass(frozen=True)
class Gather:
    """Rows of a leaf that the worker asks for.

    Args:
        leaf: the number of the leaf.
        ids: which output of `Cut.index` has their ids: int32 of any shape, all of rows that exist. What is to become of
            others (mode of `jnp.take`) is in `Cut.compute`.
        aval: the rows as `Cut.compute` takes them: the shape of the ids and that of a row, and the leaf's dtype.
    """

    leaf: int
    ids: int
    aval: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Shipped:
    """What travels to servers: the first outputs of `Cut.compute`, in their order.

    Args:
        kind: "array", or "rows" for ids (a vector) and as many rows.
        avals: of its one or two arrays.
    """

    kind: str
    avals: tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Take:
    """What an update takes of a shipped value.

    Args:
        shipped: the number of the shipped value.
        start: the first of the rows that go there; of "rows" the first of the ids, which is subtracted from them.
        stop: the end of these, None where all of an array goes there.
    """

    shipped: int
    start: int = 0
    stop: int | None = None

    def of(self, kind: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays to send, of a shipped value's arrays on the host.

        Those of "rows" have as many rows as there are ids from `start` up to `stop`. For fewer different shapes they
        may be padded, with `stop - start` as the id of what the server is to leave out.
        """
        if self.stop is None:
            return list(arrays)
        if kind == "array":
            return [arrays[0][self.start : self.stop]]
        ids, rows = arrays
        (chosen,) = np.nonzero((ids >= self.start) & (ids < self.stop))
        return [ids[chosen] - ids.dtype.type(self.start), rows[chosen]]


@dataclass(frozen=True)
class Update:
    """What one server does at the end, at once.

    Args:
        server: its number.
        reads: (leaf, part) that the program reads and leaves as they are.
        writes: (leaf, part) that it replaces.
        takes: which shipped values go there.
        program: (written olds, read olds, shipped) -> (news, answers). The list of shipped arrays has one for each
            take, or two, ids and rows; of these there may be any number, see `Take.of`.
        compared: (leaf, part) whose new values depend on the old ones that the worker saw: if these have been
            replaced meanwhile, the closure has to run again.
    """

    server: int
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    takes: list[Take]
    program: Stage
    compared: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Callback:
    """A function of Python that the program calls with some of its values.

    Args:
        function: takes arrays. Those of a `Program` leave what they raise to its guard (`_tracing.step_failures`).
        count: how many operands it has.
        shows: whether it does nothing but print or write.
    """

    function: Callable[..., Any]
    count: int
    shows: bool


@dataclass(frozen=True)
class Cut:
    """The parts of a function.

    Args:
        index: (others, args) -> ids of each gather, None without gathers.
        gathers: the rows that the worker asks for.
        reads: the numbers of the leaves that the worker reads whole.
        compute: (others, args, gathered, read) -> [*shipped, *computed results, *operands of callbacks].
        shipped: what travels to servers.
        updates: one for each server that has something to update.
        computed: which results `compute` gives, in their order; the others are `answers`.
        answers: (result, update, k): the result is the k-th answer of an update. Several of one result are the parts of
            a sharded leaf in the order of the rows, to be joined along axis 0.
        callbacks: what is called with values of `compute`, in the order of the program.
        has_callbacks: whether `compute` itself calls Python, so that it cannot be exported.
    """

    index: Stage | None
    gathers: list[Gather]
    reads: list[int]
    compute: Stage
    shipped: list[Shipped]
    updates: list[Update]
    computed: list[int]
    answers: list[tuple[int, int, int]]
    callbacks: list[Callback]
    has_callbacks: bool
