"""Elements of datasets that the calls of a compiled function pull: `next(iterator)` as an input."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import jax

from replicax._base import errors, jax_internals, nest
from replicax._base.thread_state import current, entered
from replicax._base.types import Leaf, Tree
from replicax._data import iterators
from replicax._data.iterators import ElementIterator
from replicax._input.sources import Distributed
from replicax._tracing import context, frames
from replicax._values import (
    Mirrored,
    PerReplica,
    ReplicaMesh,
    RowCounts,
    counted_form,
    global_array,
    is_text,
    mesh_of,
    of_array,
    of_counted,
    of_padded,
    padded_form,
)


class Abort(BaseException):
    """Ends a tracing that cannot be finished; the function runs in another way instead."""


class DrivenFromHost(Abort):
    """The function takes elements of a dataset in a way that no program can: its Python code runs instead.

    `always`: in later calls too, which differ from this one in their elements alone.
    """

    def __init__(self, always: bool = True):
        self.always = always


class RunEagerly(Abort):
    """The replicas' parts differ, and no program can be made for them: the replicas run eagerly instead.

    `decided`: which did not turn out in the course of tracing.
    """

    def __init__(self, decided: bool = False):
        self.decided = decided


def drive_from_host(what: str) -> None:
    """Has the Python code of the function that is being traced run as it is, which has `what` in it."""
    if reader() is None or any(level.local for level in frames.levels()):
        raise RuntimeError(
            f"{what} cannot be part of a compiled program, and stands inside of a replica function or of jax.jit. Put "
            "it into the function that calls `strategy.run`, and pass the elements through `args`."
        )
    raise DrivenFromHost


class DatasetRead:
    """A `next(iterator)` in a function: where the element comes from, and the slots that its leaves fill."""

    def __init__(self, iterator: ElementIterator, arguments: Sequence[ElementIterator], element: Tree):
        self.element, self.slots = element, list[int]()
        # Which of the call's arguments the iterator is; another one is known by itself.
        argument = next((i for i, argument in enumerate(arguments) if argument is iterator), None)
        self.place = weakref.ref(iterator) if argument is None else argument

    @functools.cached_property
    def kinds(self) -> tuple[object, ...]:
        """The structure, shapes and dtypes that an element must have to fit the same program."""
        return _kinds(self.element)

    def source(self, arguments: Sequence[ElementIterator]) -> ElementIterator | None:
        """Returns the iterator, in a call whose iterators among the arguments are these; None where it is gone."""
        return arguments[self.place] if isinstance(self.place, int) else self.place()


def same_sources(reads: Sequence[DatasetRead], others: Sequence[DatasetRead]) -> bool:
    """Returns whether all are from the same iterators, in the same order."""
    return [read.place for read in reads] == [other.place for other in others]


def meshes_of(reads: Sequence[DatasetRead]) -> list[ReplicaMesh | None]:
    """Returns the meshes of the per-replica values in the elements."""
    return [mesh_of(leaf) for read in reads for leaf in nest.leaves(read.element) if isinstance(leaf, PerReplica)]


# Gives what is being traced the next element of an iterator; NotImplemented where it cannot take one.
Reader: TypeAlias = Callable[[ElementIterator], Tree]


@contextlib.contextmanager
def reading_by(reader: Reader) -> Iterator[None]:
    """Returns a context in which `reader` gives the elements that are taken."""
    if iterators.lift_element is None:
        raise errors.not_plugged_in("The reading of datasets by compiled functions")
    current.readers.append(reader)
    try:
        yield
    finally:
        current.readers.pop()


def reader() -> Reader | None:
    """Returns what gives elements to the function that is being traced; None where none is."""
    return current.readers[-1] if current.readers else None


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Returns a context outside of all that is being traced, where the functions of datasets run."""
    with entered(readers=[]), jax_internals.untraced(), frames.entered(frames.untraced_frame()):
        yield


def _read(iterator: ElementIterator) -> Tree:
    if isinstance(iterator, Distributed) and context.in_replica_function():
        raise ValueError(
            "next(iterator) should be called from outside of replica_fn. e.g. strategy.run(replica_fn, "
            "args=(next(iterator),)). An element of a distributed dataset has a component for each replica, and "
            "`strategy.run` passes each replica its own."
        )
    element = NotImplemented if (read := reader()) is None else read(iterator)
    if element is NotImplemented and frames.is_staging():
        raise RuntimeError(
            "next(iterator) stands inside of a compiled replica function or of jax.jit, where one element would become "
            "a constant. Take the element outside, and pass it through `args` of `strategy.run`."
        )
    return element


def pull_from(iterator: ElementIterator | None) -> Tree:
    """Returns the next element of an iterator, taken outside of all that is being traced."""
    if iterator is None:
        raise RuntimeError("The iterator that the function takes elements from is gone.")
    with outside():
        return iterators.pull(iterator)


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Returns a context after which the elements that were taken in it go back to where they came from."""
    taken: list[tuple[ElementIterator, Tree]] = []

    def read(iterator: ElementIterator) -> Tree:
        taken.append((iterator, pull_from(iterator)))
        return taken[-1][1]

    try:
        with reading_by(read):
            yield
    finally:
        for iterator, element in reversed(taken):
            iterators.push_back(iterator, element)


def push_back(reads: Sequence[DatasetRead], elements: Sequence[Tree], arguments: Sequence[ElementIterator]) -> None:
    """Gives elements back to the iterators that they came from."""
    for read, element in reversed(list(zip(reads, elements))):
        iterator = read.source(arguments)
        if iterator is not None:
            iterators.push_back(iterator, element)


def element_arrays(element: Tree) -> list[Leaf]:
    """Returns what a compiled program takes for an element: for its leaves, see `array_of`, and numbers of rows."""
    leaves = nest.values(element)
    return [*map(array_of, leaves), *(counts.array for counts in row_counts(leaves))]


def row_counts(leaves: Iterable[Leaf]) -> list[RowCounts]:
    """Returns the numbers of rows of padded values, each once."""
    forms = [form for leaf in leaves if (form := counted_form(leaf)) is not None]
    return list({id(form.counts): form.counts for form in forms}.values())


def array_of(leaf: Leaf) -> Leaf:
    """Returns the array that a compiled program takes for a leaf, None where it cannot take it."""
    if not isinstance(leaf, (PerReplica, Mirrored)):
        return leaf
    if (counted := counted_form(leaf)) is not None:
        return counted.array
    array = global_array(leaf)
    if array is None and isinstance(leaf, PerReplica) and (padded := padded_form(leaf)) is not None:
        return padded.array
    return array


def shapes_of(leaves: Iterable[Leaf]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns the shapes of those values of replicas whose components differ in shape."""
    uneven = [padded_form(leaf) for leaf in leaves if isinstance(leaf, PerReplica) and global_array(leaf) is None]
    return tuple(padded.shapes for padded in uneven if padded is not None)


def can_be_taken(element: Tree) -> bool:
    """Returns whether a compiled program can take the element."""
    return all(array is not None and not is_text(array) for array in element_arrays(element))


def same_elements(reads: Sequence[DatasetRead], pulled: Sequence[Tree]) -> bool:
    """Returns whether the elements have the structure, shapes and dtypes of those pulled while tracing."""
    return all(can_be_taken(element) for element in pulled) and (
        [read.kinds for read in reads] == [_kinds(element) for element in pulled]
    )


def _kinds(element: Tree) -> tuple[object, ...]:
    leaves = nest.values(element)
    arrays = [array_of(leaf) for leaf in leaves]
    if counts := row_counts(leaves):
        of_leaf = [form and counts.index(form.counts) for form in map(counted_form, leaves)]
        element = nest.map_structure(lambda leaf: leaf if counted_form(leaf) is None else 0, element)  # an opaque leaf
        return (jax.tree.structure(element), [(x.shape, x.dtype) for x in arrays], shapes_of(leaves), of_leaf)
    return (jax.tree.structure(element), [(x.shape, x.dtype) for x in arrays], shapes_of(leaves))


def like(leaf: Leaf, array: jax.Array, counts: RowCounts | None = None) -> Leaf:
    """Returns a value as `leaf`, with this array, and these numbers of rows if it is padded, for its own."""
    if not isinstance(leaf, (PerReplica, Mirrored)):
        return array
    if counts is not None:
        return of_counted(array, counts, mesh_of(leaf))
    if shapes := shapes_of([leaf]):
        return of_padded(array, shapes[0], mesh_of(leaf))
    return of_array(type(leaf), array, mesh_of(leaf))


def as_inputs(element: Tree, level: frames.TraceFrame, slots: list[int]) -> Tree:
    """Returns an element whose arrays are inputs of a level; their slots are added to `slots`."""
    arrays = element_arrays(element)
    inputs = [level.new_input(array) for array in arrays]
    slots += [slot for slot, _ in inputs]
    tracers = [tracer for _, tracer in inputs]
    counts = row_counts(nest.leaves(element))
    of_rows = {id(one): RowCounts(tracer) for one, tracer in zip(counts, tracers[len(arrays) - len(counts) :])}
    queue = iter(tracers)

    def make(leaf: Leaf) -> Leaf:
        form = counted_form(leaf)
        return like(leaf, next(queue), None if form is None else of_rows[id(form.counts)])

    return nest.map_values(make, element)


def _on_iterate() -> None:
    if reader() is not None and isinstance(frames.frame(), frames.TraceFrame):
        drive_from_host("A loop over a dataset")


def install() -> None:
    """Has iterators over datasets ask the function that is being traced for their elements."""
    iterators.set_hooks(_read, _on_iterate)
