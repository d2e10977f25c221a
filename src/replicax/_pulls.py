"""Elements of datasets that the calls of a compiled function pull: `next(iterator)` as an input."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from replicax import _levels, _nest, _private
from replicax._data import iterators
from replicax._values import Mirrored, PerReplica, is_text


class Abort(BaseException):
    """Ends a tracing that cannot be finished; the function runs in another way instead."""


class DrivenFromHost(Abort):
    """The function takes elements of a dataset in a way that no program can: its Python code runs instead.

    `always`: in later calls too, which differ from this one in their elements alone.
    """

    def __init__(self, always: bool = True):
        self.always = always


def drive_from_host(what: str) -> None:
    """Has the Python code of the function that is being traced run as it is, which has `what` in it."""
    if not lifts.stack or any(isinstance(frame, _levels.Level) and frame.local for frame in _levels._frames.stack):
        raise RuntimeError(
            f"{what} cannot be part of a compiled program, and stands inside of a replica function or of jax.jit. Put "
            "it into the function that calls `strategy.run`, and pass the elements through `args`."
        )
    raise DrivenFromHost


class Pull:
    """A `next(iterator)` in a function: what to pull, and the slots that its leaves fill."""

    def __init__(self, iterator: Any, arguments: list[Any], element: Any):
        self.element, self.slots = element, list[int]()
        # Which of the call's arguments the iterator is; another one is known by itself.
        self._argument = next((i for i, argument in enumerate(arguments) if argument is iterator), None)
        self._iterator = weakref.ref(iterator)

    def source(self, arguments: list[Any]) -> Any:
        """The iterator, in a call whose iterators among the arguments are these; None where it is gone."""
        return self._iterator() if self._argument is None else arguments[self._argument]


def meshes_of(pulls: Sequence[Pull]) -> list[Any]:
    """The meshes of the per-replica values in the elements."""
    return [leaf.mesh for pull in pulls for leaf in _nest.leaves(pull.element) if isinstance(leaf, PerReplica)]


class _Lifts(threading.local):
    def __init__(self):
        self.stack: list[Callable[[Any], Any]] = []


lifts = _Lifts()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Outside of all that is being traced: where the functions of datasets run, for example."""
    before, lifts.stack = lifts.stack, []
    frame = _levels.frame()
    try:
        with _private.at_once(), _levels.entered(frame if frame.local else _levels.Frame()):
            yield
    finally:
        lifts.stack = before


def _lift(iterator: Any) -> Any:
    element = lifts.stack[-1](iterator) if lifts.stack else NotImplemented
    if element is NotImplemented and _levels.is_staging():
        raise RuntimeError(
            "next(iterator) stands inside of a compiled replica function or of jax.jit, where one element would become "
            "a constant. Take the element outside, and pass it through `args` of `strategy.run`."
        )
    return element


def pull_from(iterator: Any) -> Any:
    if iterator is None:
        raise RuntimeError("The iterator that the function takes elements from is gone.")
    with outside():
        return iterator._pull()


def push_back(pulls: Sequence[Pull], elements: Sequence[Any], arguments: list[Any]) -> None:
    """Gives elements back to the iterators that they came from."""
    for pull, element in reversed(list(zip(pulls, elements))):
        iterator = pull.source(arguments)
        if iterator is not None:
            iterator._push_back(element)


def element_arrays(element: Any) -> list[Any]:
    return [leaf.array() if isinstance(leaf, (PerReplica, Mirrored)) else leaf for leaf in _nest.leaves(element)]


def uniform(element: Any) -> bool:
    return all(array is not None and not is_text(array) for array in element_arrays(element))


def same_elements(pulls: Sequence[Pull], pulled: list[Any]) -> bool:
    """Whether the elements have the shapes and dtypes of those that were pulled while tracing."""
    if not all(uniform(element) for element in pulled):
        return False
    before = [leaf for pull in pulls for leaf in element_arrays(pull.element)]
    now = [leaf for element in pulled for leaf in element_arrays(element)]
    return [(x.shape, x.dtype) for x in before] == [(x.shape, x.dtype) for x in now]


def as_inputs(element: Any, level: _levels.Level, slots: list[int]) -> Any:
    def make(leaf: Any) -> Any:
        array = leaf.array() if isinstance(leaf, (PerReplica, Mirrored)) else leaf
        slot, tracer = level.new_input(array)
        slots.append(slot)
        return type(leaf).of_array(tracer, leaf.mesh) if isinstance(leaf, (PerReplica, Mirrored)) else tracer

    return _nest.map_structure(make, element)


def _on_iterate() -> None:
    if lifts.stack and isinstance(_levels.frame(), _levels.Level):
        drive_from_host("A loop over a dataset")


iterators.lift, iterators.on_iterate = _lift, _on_iterate
