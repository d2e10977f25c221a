"""The layout of a compiled program's arguments: which leaf of a variable is which argument and which result.

Only a layout knows that variables share vectors and lists (see `_variables.packed_storage`). A program takes two lists
of arrays of its variables: arrays that its results replace, which it may take over, and arrays that it only reads.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from replicax._engine.signature import CallSignature
from replicax._passes import vectorize, work
from replicax._tracing import active_tapes, dataset_reads, frames
from replicax._tracing.dataset_reads import DatasetRead
from replicax._tracing.protocols import State
from replicax._values import ReplicaMesh
from replicax._variables import packed_storage
from replicax._variables.storage import Slot, Storage

Arrays: TypeAlias = list[jax.Array]
_PER_ARRAY = 1 << 24  # multiplications, which take a hundred times as long as to hand over an array


@dataclass(frozen=True, slots=True)
class InputSlot:
    """One leaf of a variable that a program reads or replaces.

    Args:
        variable: the variable.
        storage: where its arrays are.
        leaf: the leaf's number.
        slot: the input of the level that it is, None if the program only writes it.
        output: which of the jaxpr's outputs replaces it, None if the program only reads it.
        place: its place in a shared vector, None for a leaf that is an argument by itself.
    """

    variable: State
    storage: Storage
    leaf: int
    slot: int | None
    output: int | None
    place: Slot | None

    @property
    def donated(self) -> bool:
        """Whether the program takes its array over."""
        return self.slot is not None and self.output is not None and self.place is None

    @property
    def kept(self) -> bool:
        """Whether the program takes its array and leaves it as it is."""
        return self.slot is not None and self.output is None and self.place is None


def leaves_of(level: frames.TraceFrame) -> list[InputSlot]:
    """Return the leaves that a program reads, in the order of its inputs, and behind them those it only writes."""
    outputs: dict[int, int] = {}  # the first output of each variable that is written
    count = 0
    for key, variable in level.written.items():
        outputs[key], count = count, count + len(variable._types)
    leaves = []
    for key in dict.fromkeys([*level.inputs, *level.written]):
        variable, slots = level.variables[key], level.inputs.get(key)
        storage = cast(Storage, variable._storage)
        for i in range(len(variable._types)):
            place = None if level.local else storage.slots.get(i)
            leaves.append(
                InputSlot(
                    variable,
                    storage,
                    leaf=i,
                    slot=None if slots is None else slots[i],
                    output=outputs[key] + i if key in outputs else None,
                    place=place if place is not None and place.store.is_vector else None,
                )
            )
    return leaves


def share_vectors(level: frames.TraceFrame, jaxpr: jex.ClosedJaxpr, spares_arrays: bool) -> None:
    """Move small variables that a program updates alike to shared vectors, which make its calls shorter.

    Args:
        level: the level of the program.
        jaxpr: its jaxpr.
        spares_arrays: whether layers of equal shapes stay apart in a program that computes for long. XLA for CPUs
            compiles them once, unless their variables are cut out of a vector, each at another place. A short program
            is worth the longer compilation.
    """
    leaves = [leaf for leaf in leaves_of(level) if leaf.slot is not None and leaf.output is not None]
    if len(leaves) < packed_storage.FEWEST:
        return
    by_output = {cast(int, leaf.output): leaf for leaf in leaves}
    alike = vectorize.updated_alike(jaxpr, {output: cast(int, leaf.slot) for output, leaf in by_output.items()})
    groups = [[(by_output[output].storage, by_output[output].leaf) for output in outputs] for outputs in alike]
    if spares_arrays and work.multiplications(jaxpr) >= len(leaves) * _PER_ARRAY:
        groups = [group for group in groups if 2 * len({s.types[i].shape for s, i in group}) > len(group)]
    packed_storage.arrange(groups)


def layout_of(level: frames.TraceFrame, is_spread: bool) -> Layout:
    """Return the layout of a program's arguments as its variables lie now.

    Args:
        level: the level of the program.
        is_spread: whether the program runs on several devices.
    """
    leaves = leaves_of(level)
    return Plain(level, leaves) if level.local else Packed(level, leaves, is_spread)


class Layout(ABC):
    """How the leaves of a program's variables are its arguments and results.

    Attributes:
        form: layouts of equal forms serve the same compiled program.
        vector_results: the places of results that are vectors of new leaves; None if there is no shared vector.
    """

    form: object = None
    vector_results: Collection[int] | None = None

    @abstractmethod
    def take(self, frame: frames.Frame) -> tuple[Arrays, Arrays]:
        """Return the arrays that a call replaces, and the arrays that it only reads."""

    @abstractmethod
    def put(self, frame: frames.Frame, new: Arrays) -> None:
        """Store the arrays that a call returned."""

    @abstractmethod
    def leaves(self, replaced: Arrays, read: Arrays) -> dict[int, jax.Array]:
        """Return the leaves in these arguments by the slots of the level; in the program."""

    @abstractmethod
    def results(self, replaced: Arrays, outputs: Sequence[jax.Array]) -> Arrays:
        """Return the arrays that replace arguments; in the program.

        Args:
            replaced: the arguments that are replaced.
            outputs: the new leaves of all variables that the program writes.
        """

    def fresh_types(self) -> list[jax.ShapeDtypeStruct]:
        """Return the types of results that replace no argument, which are behind the others."""
        return []

    @abstractmethod
    def lost(self) -> list[Storage]:
        """Return the storages whose arrays a call that failed has taken over."""


class Plain(Layout):
    """Each leaf is an argument, and each new leaf a result.

    Args:
        level: the level of the program.
        leaves: the leaves.
    """

    def __init__(self, level: frames.TraceFrame, leaves: Sequence[InputSlot]):
        self._local = level.local  # a program of one replica takes components
        donated, read = [leaf for leaf in leaves if leaf.donated], [leaf for leaf in leaves if leaf.kept]
        self._inputs = [*donated, *read]
        self._donated, self._read = _by_variable(donated), _by_variable(read)
        # Donated leaves come first (see `_engine.trace_function`).
        written = [leaf for leaf in leaves if leaf.output is not None]
        self._written = sorted(written, key=lambda leaf: cast(int, leaf.output))
        self._stored = _by_variable(self._written)
        self.form = [(id(leaves.variable), leaves.indices) for leaves in self._stored]

    def take(self, frame: frames.Frame) -> tuple[Arrays, Arrays]:
        replaced: Arrays = []
        for leaves in self._donated:
            storage = leaves.storage
            if storage.slots and not self._local:
                replaced += storage.taken(leaves.indices)
            else:
                arrays = frame.fetch(leaves.variable)
                replaced += storage.home.copied(arrays) if storage.lent and not self._local else arrays
        read: Arrays = []
        for leaves in self._read:
            in_store = leaves.storage.slots and not self._local
            read += leaves.storage.kept(leaves.indices) if in_store else frame.fetch(leaves.variable)
        return replaced, read

    def put(self, frame: frames.Frame, new: Arrays) -> None:
        start = 0
        for leaves in self._stored:
            stop, storage = start + len(leaves.indices), leaves.storage
            if storage.slots and not self._local:
                storage.put(leaves.indices, new[start:stop])
            else:
                frame.store(leaves.variable, new[start:stop])
            storage.lent = self._local  # one replica's component stands among others
            start = stop

    def leaves(self, replaced: Arrays, read: Arrays) -> dict[int, jax.Array]:
        pairs = zip(self._inputs, [*replaced, *read])
        return {
            cast(int, leaf.slot): value if self._local else leaf.storage.home.entering(value) for leaf, value in pairs
        }

    def results(self, replaced: Arrays, outputs: Sequence[jax.Array]) -> Arrays:
        return [outputs[cast(int, leaf.output)] for leaf in self._written]

    def fresh_types(self) -> list[jax.ShapeDtypeStruct]:
        return [leaf.storage.home.leaf_types(False)[leaf.leaf] for leaf in self._written if leaf.slot is None]

    def lost(self) -> list[Storage]:
        storages = []
        for leaves in self._donated:
            arrays = [leaves.storage.own()[i] for i in leaves.indices]
            if any(array is not None and array.is_deleted() for array in arrays):
                storages.append(leaves.storage)
        return storages


@dataclass(frozen=True, slots=True)
class _Leaves:
    """Leaves of one variable that are arguments or results by themselves."""

    variable: State
    storage: Storage
    indices: tuple[int, ...]


def _by_variable(leaves: Iterable[InputSlot]) -> list[_Leaves]:
    """Return the leaves of each variable together."""
    by_variable: dict[int, list[InputSlot]] = {}  # by the variable's id: variables are not hashable
    for leaf in leaves:
        by_variable.setdefault(id(leaf.variable), []).append(leaf)
    return [_Leaves(of[0].variable, of[0].storage, tuple(leaf.leaf for leaf in of)) for of in by_variable.values()]


class Packed(Layout):
    """Leaves in shared vectors are arguments together, and so are leaves in a list; all others are as in `Plain`.

    Args:
        level: the level of the program.
        leaves: the leaves.
        is_spread: whether the program runs on several devices.
    """

    def __init__(self, level: frames.TraceFrame, leaves: Sequence[InputSlot], is_spread: bool):
        in_vectors = [(cast(packed_storage.SharedVector, x.place.store), x) for x in leaves if x.place is not None]
        replaced = {id(vector) for vector, leaf in in_vectors if leaf.output is not None}
        vectors = {id(vector): vector for vector, _ in in_vectors}
        self._replaced = [vector for key, vector in vectors.items() if key in replaced]
        self._read = [vector for key, vector in vectors.items() if key not in replaced]
        # For slots of the level, the vector in which the leaf is, and its place there.
        self._places = {x.slot: (v, cast(Slot, x.place)) for v, x in in_vectors if x.slot is not None}
        # For each vector that is replaced, the outputs that replace its leaves, None for a leaf that stays.
        outputs = {leaf.place: leaf.output for _, leaf in in_vectors}
        self._outputs = [[outputs.get(slot) for slot in vector.slots] for vector in self._replaced]
        if vectors:
            self.vector_results = [i for i, places in enumerate(self._outputs) if None not in places]
        others = [leaf for leaf in leaves if leaf.place is None]
        donated = [leaf for leaf in others if leaf.donated]
        self._list: packed_storage.SharedList | None = None
        # Fewer are only in a list if they were in it before.
        may_be_listed = len(donated) >= packed_storage.FEWEST_IN_LIST or any(leaf.storage.slots for leaf in donated)
        if donated and may_be_listed and all(leaf.storage.home.may_be_listed(is_spread) for leaf in donated):
            self._list = packed_storage.list_of([(leaf.storage, leaf.leaf) for leaf in donated])
        self._listed = [] if self._list is None else donated
        self._plain = Plain(level, others if self._list is None else [leaf for leaf in others if not leaf.donated])
        # Whether donated leaves are in a list or not, the compiled program is the same.
        self.form = list(vectors), len(self._replaced), self._places.keys(), Plain(level, others).form

    def take(self, frame: frames.Frame) -> tuple[Arrays, Arrays]:
        replaced, read = self._plain.take(frame)
        vectors = [vector.current() for vector in self._replaced]
        listed = [] if self._list is None else self._list.current()
        return [*vectors, *listed, *replaced], [*(vector.current() for vector in self._read), *read]

    def put(self, frame: frames.Frame, new: Arrays) -> None:
        start, stop = len(self._replaced), len(self._replaced) + len(self._listed)
        for vector, array in zip(self._replaced, new):
            vector.put(array)
        if self._list is not None:
            self._list.put(new[start:stop])
        self._plain.put(frame, new[stop:])

    def leaves(self, replaced: Arrays, read: Arrays) -> dict[int, jax.Array]:
        start, stop = len(self._replaced), len(self._replaced) + len(self._listed)
        arrays = dict(zip([*self._replaced, *self._read], [*replaced[:start], *read]))
        leaves = {slot: _cut(arrays[vector], place) for slot, (vector, place) in self._places.items()}
        for leaf, array in zip(self._listed, replaced[start:stop]):
            leaves[cast(int, leaf.slot)] = leaf.storage.home.entering(array)
        return {**leaves, **self._plain.leaves(replaced[stop:], read[len(self._read) :])}

    def results(self, replaced: Arrays, outputs: Sequence[jax.Array]) -> Arrays:
        vectors = []
        for shared, vector, places in zip(self._replaced, replaced, self._outputs):
            if None in places:  # only some of its leaves are replaced
                for slot, place in zip(shared.slots, places):
                    if place is not None:
                        vector = lax.dynamic_update_slice(vector, jnp.ravel(outputs[place]), (slot.start,))
            else:
                vector = lax.concatenate([jnp.ravel(outputs[cast(int, place)]) for place in places], 0)
            vectors.append(shared.home.leaving(vector))
        listed = [outputs[cast(int, leaf.output)] for leaf in self._listed]
        return [*vectors, *listed, *self._plain.results(replaced, outputs)]

    def fresh_types(self) -> list[jax.ShapeDtypeStruct]:
        return self._plain.fresh_types()

    def lost(self) -> list[Storage]:
        stores: list[packed_storage.SharedVector | packed_storage.SharedList]
        stores = [vector for vector in self._replaced if vector.array.is_deleted()]
        if self._list is not None and any(array.is_deleted() for array in self._list.arrays):
            stores.append(self._list)
        storages = [slot.storage for store in stores for slot in store.slots if slot.storage is not None]
        return [*storages, *self._plain.lost()]


def _cut(vector: jax.Array, place: Slot) -> jax.Array:
    """Return a leaf of a shared vector."""
    return jnp.reshape(lax.slice(vector, (place.start,), (place.start + place.size,)), place.shape)


class Taped(Layout):
    """Each variable that is read is an argument in global form, as a gradient tape sees it; nothing is donated."""

    def __init__(self, level: frames.TraceFrame):
        self._level = level

    def take(self, frame: frames.Frame) -> tuple[Arrays, Arrays]:
        variables = (self._level.variables[key] for key in self._level.inputs)
        return [], [leaf for v in variables for leaf in active_tapes.on_read(v, frame.read(v))]

    def put(self, frame: frames.Frame, new: Arrays) -> None:
        leaves = iter(new)
        for variable in self._level.written.values():
            frame.store(variable, list(itertools.islice(leaves, len(variable._types))))
            variable._storage.lent = True  # the tape holds on to what it saw

    def leaves(self, replaced: Arrays, read: Arrays) -> dict[int, jax.Array]:
        inputs = self._level.inputs.items()
        slots = [(self._level.variables[key]._storage, slot) for key, slots in inputs for slot in slots]
        return {slot: x if self._level.local else storage.home.entering(x) for (storage, slot), x in zip(slots, read)}

    def results(self, replaced: Arrays, outputs: Sequence[jax.Array]) -> Arrays:
        return list(outputs)

    def lost(self) -> list[Storage]:
        return []


def meshes_of(level: frames.TraceFrame, call: CallSignature, reads: Sequence[DatasetRead]) -> list[ReplicaMesh]:
    """Return the meshes of replicas that a program has to do with."""
    variables = [variable._mesh for variable in level.variables.values() if variable._mesh is not None]
    return [m for m in [*level.meshes, *variables, *call.meshes(), *dataset_reads.meshes_of(reads)] if m is not None]
