"""How the variables of a compiled program go in and come out: in shared vectors, in a list, or each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import jax

from replicax._engine.signature import CallSignature
from replicax._tracing import dataset_reads, frames, lost_values
from replicax._tracing.dataset_reads import DatasetRead
from replicax._tracing.state import State
from replicax._values import ReplicaMesh
from replicax._variables import packed_storage
from replicax._variables.storage import Slot, Storage

Arrays: TypeAlias = list[jax.Array]


@dataclass(frozen=True, slots=True)
class InputSlot:
    """One leaf of a variable that a program reads or replaces.

    Args:
        variable: the variable.
        storage: where its arrays are.
        leaf: the leaf's number.
        slot: the input of the level that it is, None where the program only writes it.
        output: which of the jaxpr's outputs replaces it, None where the program only reads it.
        place: its place in a shared vector, None where it goes in by itself.
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


@dataclass(frozen=True, slots=True)
class OwnLeaves:
    """Those leaves of one variable whose arrays go in or come out by themselves."""

    variable: State
    storage: Storage
    leaves: tuple[int, ...]

    def kept(self, frame: frames.Frame, local: bool) -> Arrays:
        """Returns the leaves for a program that leaves them as they are.

        Args:
            frame: in which the program runs.
            local: whether it is one replica's program, which takes components.
        """
        return self.storage.kept(self.leaves) if self.storage.slots and not local else frame.fetch(self.variable)

    def taken(self, frame: frames.Frame, local: bool) -> Arrays:
        """Returns the leaves for a program that takes them over; copies of those that somebody else may hold."""
        storage = self.storage
        if storage.slots and not local:
            return storage.taken(self.leaves)
        leaves = frame.fetch(self.variable)
        return storage.copied(leaves) if storage.lent and not local else leaves


def leaves_of(level: frames.TraceFrame) -> list[InputSlot]:
    """Returns the leaves that a program reads, in the order of its inputs, and behind them those it only writes."""
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


def _by_variable(leaves: Iterable[InputSlot]) -> list[OwnLeaves]:
    """Returns the leaves of each variable together."""
    found: dict[int, list[InputSlot]] = {}  # by the variable's id: variables are not hashable
    for leaf in leaves:
        found.setdefault(id(leaf.variable), []).append(leaf)
    return [OwnLeaves(own[0].variable, own[0].storage, tuple(x.leaf for x in own)) for own in found.values()]


class ProgramInputs:
    """The leaves of a program's variables, and how they are handed over.

    Args:
        level: the level in which the program was traced.
        spread: whether the program runs on several devices.
    """

    def __init__(self, level: frames.TraceFrame, spread: bool):
        self._level = level
        self.leaves = leaves_of(level)
        vectors: dict[int, packed_storage.SharedVector] = {}
        replaced: set[int] = set()  # ids of the vectors in which the program replaces leaves
        for leaf in self.leaves:
            if leaf.place is not None:
                vectors[id(leaf.place.store)] = cast(packed_storage.SharedVector, leaf.place.store)
                if leaf.output is not None:
                    replaced.add(id(leaf.place.store))
        # The vectors that the program replaces, and behind them those that it only reads.
        self.vectors = sorted(vectors.values(), key=lambda vector: id(vector) not in replaced)
        self.replaced = len(replaced)
        number = {id(vector): i for i, vector in enumerate(self.vectors)}
        # For slots of the level, in which vector they stand, and where.
        self.pieces = {
            leaf.slot: (number[id(leaf.place.store)], leaf.place)
            for leaf in self.leaves
            if leaf.place is not None and leaf.slot is not None
        }
        donated = [leaf for leaf in self.leaves if leaf.donated]
        kept = [leaf for leaf in self.leaves if leaf.kept]
        # What goes in by itself, in this order, and the slots of the level that it is for.
        self.by_themselves = [(leaf.storage, cast(int, leaf.slot)) for leaf in [*donated, *kept]]
        self.donors, self.keepers = _by_variable(donated), _by_variable(kept)
        # What comes out by itself, in the order of the jaxpr's outputs: donated leaves come first (see
        # `trace_function`).
        came_out = [leaf for leaf in self.leaves if leaf.output is not None and leaf.place is None]
        self.written = _by_variable(sorted(came_out, key=lambda leaf: leaf.output or 0))
        self.handed_out = [(id(arrays.variable), arrays.leaves) for arrays in self.written]
        self.list: packed_storage.SharedList | None = None
        if donated and not level.local and all(arrays.storage.may_be_listed(spread) for arrays in self.donors):
            self.list = packed_storage.list_of([(leaf.storage, leaf.leaf) for leaf in donated])
        if self.list is not None:
            self.written = self.written[len(self.donors) :]

    def taken(self, frame: frames.Frame) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Returns the arrays that a call takes: replaced vectors, donated leaves, read vectors and kept leaves."""
        local = self._level.local
        vectors = [vector.current() for vector in self.vectors]
        if self.list is not None:
            donated = self.list.current()
        else:
            donated = [leaf for leaves in self.donors for leaf in leaves.taken(frame, local)]
        kept = [leaf for leaves in self.keepers for leaf in leaves.kept(frame, local)]
        return vectors[: self.replaced], donated, vectors[self.replaced :], kept

    def put(self, frame: frames.Frame, new: Arrays) -> None:
        """Puts new vectors and leaves in the place of those that a call took over."""
        if lost_values.any_lost:
            for variable in self._level.written.values():
                variable._storage.lost = None
        local, start = self._level.local, self.replaced
        for shared, vector in zip(self.vectors, new[:start]):
            shared.put(vector)
        if self.list is not None:
            stop = start + len(self.list.slots)
            self.list.put(new[start:stop])
            start = stop
        for own in self.written:
            stop, storage = start + len(own.leaves), own.storage
            if storage.slots and not local:
                storage.put(own.leaves, new[start:stop])
            else:
                frame.store(own.variable, new[start:stop])
            storage.lent = local  # one replica's component stands among others
            start = stop

    def lost(self) -> list[Storage]:
        """Returns the storages whose arrays a call that failed has taken over."""
        stores: list[packed_storage.SharedVector | packed_storage.SharedList]
        stores = [vector for vector in self.vectors[: self.replaced] if vector.array.is_deleted()]
        if self.list is not None and any(array.is_deleted() for array in self.list.arrays):
            stores.append(self.list)
        found = [slot.storage for store in stores for slot in store.slots if slot.storage is not None]
        for donor in self.donors if self.list is None else ():
            arrays = [donor.storage.own()[i] for i in donor.leaves]
            if any(array is not None and array.is_deleted() for array in arrays):
                found.append(donor.storage)
        return found

    def are_as(self, others: ProgramInputs) -> bool:
        """Returns whether the same leaves stand in the same vectors."""
        same = self.vectors == others.vectors and self.replaced == others.replaced
        return same and self.pieces.keys() == others.pieces.keys() and self.handed_out == others.handed_out

    def outputs_of(self, vector: packed_storage.SharedVector) -> list[int | None]:
        """Returns which outputs replace the leaves that stand in a vector, in their order there."""
        outputs = {leaf.place: leaf.output for leaf in self.leaves if leaf.place is not None}
        return [outputs.get(slot) for slot in vector.slots]


def meshes_of(level: frames.TraceFrame, call: CallSignature, reads: Sequence[DatasetRead]) -> list[ReplicaMesh]:
    """Returns the meshes of replicas that a program has to do with."""
    variables = [variable._mesh for variable in level.variables.values() if variable._mesh is not None]
    return [m for m in [*level.meshes, *variables, *call.meshes(), *dataset_reads.meshes_of(reads)] if m is not None]
