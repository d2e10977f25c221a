"""The program of a process that calls a function of elements for another one: see `worker_processes.py`."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax._base.types import Leaf, Tree
from replicax._data import composites, record_blocks
from replicax._data.by_value import pickled
from replicax._data.elements import flatten, stack
from replicax._data.shared_memory import Writer

if TYPE_CHECKING:
    from replicax._data.functions import ElementFunction

# The readings whose random words are kept.
_READINGS = 16


class _Words:
    """The random words of a reading, which the other process knows."""

    def __init__(self, link: Connection):
        self._link = link
        self.words = functools.cache(self._asked)

    def _asked(self, tag: object) -> np.ndarray:
        self._link.send(("words", tag))
        words: np.ndarray = self._link.recv()
        return words


class _Server:
    """Answers the calls that come over a link."""

    def __init__(self, link: Connection, writer: Writer, function: ElementFunction):
        self._link, self._writer, self._function = link, writer, function
        self._words = functools.lru_cache(_READINGS)(lambda reading: _Words(link))

    def serve(self) -> None:
        """Answers calls until the link ends."""
        while True:
            reading, unused, group = pickle.loads(self._link.recv_bytes())
            for start in unused:
                self._writer.free(start)
            self._link.send_bytes(self._answer(reading, group))

    def _answer(self, reading: int | None, group: list[tuple[int, Tree]]) -> bytes:
        draws = None if reading is None else self._words(reading)
        _note_records([element for _, element in group])
        found: list[tuple[bool, Tree]] = []
        for number, element in group:
            try:
                found.append((True, self._function.of_one(element, number, draws)))
            except Exception:  # the other process calls the function again, and has the error of that
                found.append((False, None))
        try:
            return pickled(self._placed(found))
        except Exception:
            return pickled([None] * len(group))

    def _placed(self, found: list[tuple[bool, Tree]]) -> list[tuple[Tree, int | None] | None]:
        """Returns results with places for large arrays: together as a block, if they can be one."""
        if len(found) > 1 and all(done for done, _ in found):
            block = self._block([result for _, result in found])
            if block is not None:
                return [(block, len(found))]
        return [(jax.tree.map(self._leaf, result), None) if done else None for done, result in found]

    def _leaf(self, leaf: Leaf) -> Any:
        return self._stacked([leaf], leaf.shape)

    def _block(self, results: list[Tree]) -> Tree | None:
        if any(map(composites.has_composites, results)):
            return None
        leaves, structures = zip(*map(flatten, results))
        if any(structure != structures[0] for structure in structures):
            return None
        columns = list(zip(*leaves))
        if not all(_alike(column) for column in columns):
            return None
        return structures[0].unflatten([self._stacked(c, (len(c), *c[0].shape)) for c in columns])

    def _stacked(self, rows: Sequence[Leaf], shape: tuple[int, ...]) -> Any:
        """Returns rows as one array of this shape: its place, where it is large."""
        made = self._writer.empty(shape, rows[0].dtype) if isinstance(rows[0], np.ndarray) else None
        if made is None:
            return stack(list(rows)) if len(shape) > rows[0].ndim else rows[0]
        place, array = made
        array = array.reshape(len(rows), *rows[0].shape)
        for number, row in enumerate(rows):
            array[number] = row
        return place


def _alike(column: Sequence[Leaf]) -> bool:
    """Returns whether leaves are arrays of one shape and dtype."""
    first = column[0]
    return all(isinstance(a, np.ndarray) and a.shape == first.shape and a.dtype == first.dtype for a in column)


def _note_records(elements: Sequence[Tree]) -> None:
    """Notes strings that were handed over together, so that they are parsed together."""
    strings = [e.item() for e in elements if type(e) is np.ndarray and e.dtype.hasobject and not e.ndim]
    if len(strings) > 1 and all(isinstance(string, bytes) for string in strings):
        record_blocks.note(strings)


def main(link: int, memory: int) -> None:
    """Calls the function that comes first over the link, until the link ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process, with which this one ends
    connection = Connection(link)
    with contextlib.suppress(EOFError, OSError):
        job = pickle.loads(connection.recv_bytes())
        for name, value in job["jax"].items():
            jax.config.update(name, value)
        prepare: Callable[[], object] = job["prepare"]
        prepare()
        kind, *arguments = pickle.loads(job["function"])
        function: ElementFunction = kind(*arguments)
        connection.send("ready")
        _Server(connection, Writer(memory), function).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of libraries
