"""The program of a process that calls functions of elements for another one: see `worker_processes.py`."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax._base import frontend
from replicax._base.types import Leaf, Tree
from replicax._data import composites, process_link
from replicax._data.by_value import pickled
from replicax._data.elements import flatten, stack
from replicax._data.process_link import Link, Lost
from replicax._data.shared_memory import Writer

if TYPE_CHECKING:
    from replicax._data.functions import ElementFunction

# The readings whose random words are kept.
_READINGS = 16


class _Words:
    """The random words of a reading, which the other process knows."""

    def __init__(self, link: Link, number: int):
        self._link, self.number = link, number
        self.words = functools.cache(self._asked)

    def _asked(self, tag: object) -> np.ndarray:
        self._link.send(pickle.dumps(("words", tag)))
        words: np.ndarray = pickle.loads(self._link.receive())
        return words


class _Function:
    """A function of elements, and how JAX is configured for it."""

    def __init__(self, job: bytes):
        found = pickle.loads(job)
        self._configuration: dict[str, object] = found["jax"]
        self.configure()
        prepare: Callable[[], object] = found["prepare"]
        prepare()
        kind, *arguments = pickle.loads(found["function"])
        self.call: ElementFunction = kind(*arguments)

    def configure(self) -> None:
        """Configures JAX."""
        for name, value in self._configuration.items():
            if getattr(jax.config, name) != value:
                jax.config.update(name, value)


class _Server:
    """Answers the calls that come over a link."""

    def __init__(self, link: Link, writer: Writer):
        self._link, self._writer = link, writer
        self._functions: dict[int, _Function] = {}
        self._words = functools.lru_cache(_READINGS)(lambda reading: _Words(link, reading))

    def serve(self) -> None:
        """Answers calls until the link ends."""
        while True:
            number, job, ended, reading, unused = pickle.loads(self._link.receive())
            group = self._link.receive()
            for start in unused:
                self._writer.free(start)
            for other in ended:
                self._functions.pop(other, None)
            if job is not None:
                try:
                    self._functions[number] = _Function(job)
                except Exception as error:
                    self._link.send(pickle.dumps(("failed", f"{type(error).__name__}: {error}")))
                    continue
            self._functions[number].configure()
            self._link.send(self._answer(self._functions[number].call, reading, group))

    def _answer(self, function: ElementFunction, reading: int | None, request: bytes | bytearray) -> bytes:
        try:
            group: list[tuple[int, Tree]] = pickle.loads(request)
        except Exception as error:
            return pickle.dumps(("failed", f"{type(error).__name__}: {error}"))
        draws = None if reading is None else self._words(reading)
        _note_records([element for _, element in group])
        found: list[tuple[bool, Tree]] = []
        for number, element in group:
            try:
                found.append((True, function(element, number, draws)))
            except Lost:
                raise
            except Exception:  # the other process calls the function again, and has the error of that
                found.append((False, None))
        try:
            answer = pickled(self._placed(found))
            self._writer.hand_over()
            return answer
        except Exception:
            self._writer.take_back()
            return pickled([None] * len(group))

    def _placed(self, found: list[tuple[bool, Tree]]) -> list[tuple[Tree, int | None] | None]:
        """Returns results with places for large arrays: together as a block, if they can be one."""
        if len(found) > 1 and all(done for done, _ in found):
            block = self._block([result for _, result in found])
            if block is not None:
                return [(block, len(found))]
        return [(jax.tree.map(self._leaf, result), None) if done else None for done, result in found]

    def _leaf(self, leaf: Leaf) -> Any:
        return self._stacked([leaf], leaf.shape) if isinstance(leaf, np.ndarray) else leaf

    def _block(self, results: list[Tree]) -> Tree | None:
        if any(map(composites.has_composites, results)):
            return None
        leaves, structures = zip(*map(flatten, results))
        if any(structure != structures[0] for structure in structures):
            return None
        columns = list(zip(*leaves))
        if not columns or not all(map(_are_alike, columns)):
            return None
        return structures[0].unflatten([self._stacked(c, (len(c), *c[0].shape)) for c in columns])

    def _stacked(self, rows: Sequence[np.ndarray], shape: tuple[int, ...]) -> Any:
        """Returns rows as one array of this shape: its place, where it is large."""
        made = self._writer.empty(shape, rows[0].dtype)
        if made is None:
            return stack(list(rows)) if len(shape) > rows[0].ndim else rows[0]
        place, array = made
        array = array.reshape(len(rows), *rows[0].shape)
        for number, row in enumerate(rows):
            array[number] = row
        return place


def _are_alike(column: Sequence[Leaf]) -> bool:
    """Returns whether leaves are arrays of one shape and dtype."""
    first = column[0]
    return all(isinstance(a, np.ndarray) and a.shape == first.shape and a.dtype == first.dtype for a in column)


def _note_records(elements: Sequence[Tree]) -> None:
    """Notes strings that were handed over together, so that they are parsed together."""
    strings = [e.item() for e in elements if type(e) is np.ndarray and e.dtype.hasobject and not e.ndim]
    if len(strings) > 1 and all(isinstance(string, bytes) for string in strings):
        frontend.current.note_records(strings)


def main(link: int, memory: int) -> None:
    """Calls functions that come over the link, until it ends."""
    connection = process_link.inherited(link)
    with contextlib.suppress(Lost):
        connection.send(b"ready")
        _Server(connection, Writer(memory)).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of libraries
