"""The parts of a traced function that a worker and parameter servers run: what `cut` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._parameter_server.places import Place


@dataclass(frozen=True)
class ServedLeaf:
    """A leaf of a variable on parameter servers.

    Args:
        slot: the input of the level that it is, None where it is only written.
        output: which of the jaxpr's outputs replaces it, None where it is only read.
        place: where it lies.
    """

    slot: int | None
    output: int | None
    place: Place


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
        place: where the leaf lies.
        ids: which output of `Cut.index` has their ids: int32 of any shape, all of rows that exist. What is to become of
            others (mode of `jnp.take`) is in `Cut.compute`.
        aval: the rows as `Cut.compute` takes them: the shape of the ids and that of a row, and the leaf's dtype.
    """

    place: Place
    ids: int
    aval: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Take:
    """What an update takes of a shipped value.

    Args:
        shipped: the number of the shipped value.
        is_rows: whether it consists of ids (a vector) and as many rows; of one array otherwise.
        start: the first of the rows that go there; of ids and rows the first of the ids, which is subtracted from them.
        stop: the end of these, None where all of it goes there.
    """

    shipped: int
    is_rows: bool = False
    start: int = 0
    stop: int | None = None

    def of(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays to send, of a shipped value's arrays on the host.

        Ids and rows are those from `start` up to `stop`. For fewer different shapes they may be padded, with
        `stop - start` as the id of what the server is to leave out.
        """
        if self.stop is None:
            return list(arrays)
        if not self.is_rows:
            return [arrays[0][self.start : self.stop]]
        ids, rows = arrays
        (chosen,) = np.nonzero((ids >= self.start) & (ids < self.stop))
        return [ids[chosen] - ids.dtype.type(self.start), rows[chosen]]


@dataclass(frozen=True)
class Update:
    """What one server does at the end, at once. Parts of leaves are given by their names.

    Args:
        server: its number.
        writes: the parts that the program replaces.
        reads: the parts that it reads and leaves as they are.
        takes: which shipped values go there.
        compared: the parts whose new values depend on the old ones that the worker saw: if these have been replaced
            meanwhile, the closure has to run again.
    """

    server: int
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    takes: tuple[Take, ...]
    compared: tuple[str, ...]


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
class Exchange:
    """What a worker and the servers send each other for a closure.

    Args:
        gathers: the rows that the worker asks for.
        reads: the leaves that it reads whole.
        shipped: what travels to servers, the first outputs of the stage `compute`: the kinds of the one or two arrays
            (ids and rows) of each value.
        updates: one for each server that has something to update.
        computed: which results `compute` gives, in their order; the others are `answers`.
        answers: (result, update, k): the result is the k-th answer of an update. Several of one result are the parts of
            a sharded leaf in the order of the rows, to be joined along axis 0.
    """

    gathers: tuple[Gather, ...]
    reads: tuple[Place, ...]
    shipped: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
    updates: tuple[Update, ...]
    computed: tuple[int, ...]
    answers: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Cut:
    """The parts of a function.

    Args:
        exchange: what travels between them.
        index: (others, args) -> ids of each gather, None without gathers.
        compute: (others, args, gathered, read) -> [*shipped, *computed results, *operands of callbacks].
        programs: of the updates: (written olds, read olds, shipped) -> (news, answers). The list of shipped arrays has
            one for each take, or two, ids and rows; of these there may be any number, see `Take.of`.
        callbacks: what is called with values of `compute`, in the order of the program.
        has_callbacks: whether `compute` itself calls Python, so that it cannot be exported.
    """

    exchange: Exchange
    index: Stage | None
    compute: Stage
    programs: list[Stage]
    callbacks: list[Callback]
    has_callbacks: bool
