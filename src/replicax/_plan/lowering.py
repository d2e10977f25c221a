"""Lowers a step for devices that are not there: traced again, with a mesh that stands for them.

First the step is traced as it is, without running: this shows which strategy's replicas it runs, and which elements of
datasets it takes. Then it is traced with a mesh that stands for the planned devices and with variables that have shapes
in place of arrays, and the result is exported. No device and no value takes part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr
from jax.typing import DTypeLike

from replicax._base import array_conversion, doc_pages, nest
from replicax._base.planning import PlanError
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._collectives.sharding import cut_axis
from replicax._engine.argument_layout import meshes_of
from replicax._engine.function import Function, calls_of
from replicax._engine.program import Program
from replicax._engine.signature import ArgumentKey, CallSignature
from replicax._engine.trace_function import Tracing
from replicax._input.distributed_dataset import DistributedDataset
from replicax._plan.chips import Topology
from replicax._plan.exports import Lowered, bytes_on_device, export_program, refuse_callbacks, spec_of
from replicax._plan.report import Inputs
from replicax._tracing import context, frames
from replicax._tracing.dataset_reads import DatasetRead, array_of
from replicax._tracing.protocols import storage_of
from replicax._values import Mirrored, PerReplica, ReplicaMesh, is_array, mesh_of, of_array, padded_form
from replicax._variables.inspection import abstract_storages, leaves_of
from replicax._variables.storage import CentralStorage
from replicax._variables.variable import Variable, living


class Step:
    """A user's step, traced as it is, which can be lowered for any topology.

    Args:
        function: the compiled function.
        args, kwargs: the arguments of a call, or specs of them.

    Attributes:
        name: the function's.
        assigns: whether it assigns variables.
        results: the specs of what it returns.
        mesh: the mesh of its replicas; None if it runs no replicas, or its strategy has no mesh.
        variables: the variables that it reads or assigns.

    Raises:
        PlanError: the step cannot be compiled as a whole, or runs under a strategy that cannot be planned for.
    """

    def __init__(self, function: Function, args: tuple[Tree, ...], kwargs: dict[str, Tree] | None = None):
        self._calls = calls_of(function)
        self.name = self._calls.code.name
        self.args = tuple(nest.map_structure(_with_values, each) for each in (args, kwargs or {}))
        program = self._calls.trace(*self.args)
        if program is None:
            raise PlanError(
                f"{self.name} cannot be planned: it has no program of its own for these arguments. It loops over a "
                "distributed dataset, or takes values that no program can take; plan the function that takes one "
                "batch. "
                f"See {doc_pages.page('how-to/planning#what-cannot-be-planned')}."
            )
        self._reads, self.assigns, self.results = program.reads, program.assigns, program.result_specs()
        self.elements = [read.element for read in program.reads]
        self.variables = [v for v in program.level.variables.values() if isinstance(v, Variable)]
        call = CallSignature(*self.args)
        meshes = {id(mesh): mesh for mesh in meshes_of(program.level, call, program.reads)}
        if len(meshes) > 1:
            raise PlanError(f"{self.name} cannot be planned: it runs replicas of {len(meshes)} strategies.")
        self.mesh = next(iter(meshes.values()), None)
        unknown = [v for v in self.variables if isinstance(storage_of(v), CentralStorage)]
        if unknown or program.runner is not None or (self.mesh is not None and not self.mesh.all_local):
            raise PlanError(
                f"{self.name} cannot be planned: its strategy has to keep the variables with the replicas, in this "
                "process, as MirroredStrategy does. ParameterServerStrategy, CentralStorageStrategy and jobs of "
                "several processes do not. Plan the step of such a job in one process, where its strategy has all "
                "replicas. "
                f"See {doc_pages.page('how-to/planning#what-cannot-be-planned')}."
            )

    @property
    def rows(self) -> int | None:
        """The rows of each replica's part of the batch: the first dimension of its first array; None without one.

        Arrays that are divided among the replicas are the batch. If no array is, all arrays are.
        """
        batch = self._batch()
        return _shape_of_part(batch[0], self.mesh)[0] if batch else None

    def _batch(self) -> list[Leaf]:
        leaves = [leaf for leaf in nest.leaves((self.args, self.elements)) if _shape_of_part(leaf, self.mesh)]
        return [leaf for leaf in leaves if isinstance(leaf, PerReplica)] or leaves

    def parts(self, replicas: int) -> int:
        """Return the number of parts of the batch."""
        return replicas

    def with_rows(self, rows: int) -> Step:
        """Return the step for a batch with so many rows in each replica's part.

        Arrays of the batch with another first dimension than the first array stay.
        """
        before, mesh, batch = self.rows, self.mesh, {id(leaf) for leaf in self._batch()}

        def resize(leaf: Leaf) -> Leaf:
            shape = _shape_of_part(leaf, mesh)
            if id(leaf) not in batch or shape[0] != before:
                return leaf
            shape, dtype = (rows, *shape[1:]), array_of(leaf).dtype
            if mesh is not None and isinstance(leaf, PerReplica):
                return of_array(PerReplica, jax.ShapeDtypeStruct((mesh.size, *shape), dtype), mesh)
            return _without_contents(shape, dtype)

        other = copy.copy(self)
        other.args = tuple(nest.map_structure(resize, each) for each in self.args)
        other.elements = [nest.map_structure(resize, element) for element in self.elements]
        return other

    def lowered(self, topology: Topology) -> Lowered:
        """Returns it lowered for these devices.

        Raises:
            PlanError: the devices cannot be divided among the replicas.
        """
        if self.mesh is None:
            with frames.lock, abstract_storages():
                return self._exported(topology)
        if topology.size % self.mesh.logical_size:
            raise PlanError(
                f"{topology.name} has {topology.size} devices, which cannot be divided into replicas of "
                f"{self.mesh.logical_size} devices each."
            )
        was_alone = self.mesh.size == 1
        with frames.lock, self.mesh.standing_for(topology.platform, topology.size), abstract_storages():
            return self._exported(topology, was_alone)

    def _exported(self, topology: Topology, was_alone: bool = False) -> Lowered:
        def planned(leaf: Leaf) -> Leaf:
            return _planned(leaf, self.mesh, was_alone)

        call = _PlannedCall(*(nest.map_structure(planned, each) for each in self.args))
        elements = [nest.map_structure(planned, element) for element in self.elements]
        queue = [
            (DatasetRead(iterator, call.iterators, element), element)
            for read, element in zip(self._reads, elements)
            if (iterator := read.source(call.iterators)) is not None
        ]
        tracing = _Planning(call, queue, lambda: False)
        with self._calls.code.entered():
            jaxpr = tracing.run(self._calls.code)
        program = Program(self.name, tracing.level, jaxpr, call, tracing.reads, tracing.results)
        groups = program.arguments(call)
        tracing.close()
        refuse_callbacks(self.name, jaxpr)
        compiled = program.executable.for_steps(1).function
        exported = export_program(self.name, compiled, groups, topology, has_devices=self.mesh is None)
        flat = [leaf for group in groups for leaf in group]
        mesh = self.mesh
        replicas = 1 if mesh is None else mesh.size
        return Lowered(
            bytes(exported.serialize()),
            {"replica": 1} if mesh is None else dict(zip(mesh.mesh.axis_names, mesh.mesh.axis_sizes)),
            [spec_of(leaf) for leaf in flat],
            [] if program.keeps else list(range(len(groups[0]))),
            replicas,
            _inputs(program, [*groups[2], *groups[3]], replicas),
        )


class _PlannedCall(CallSignature):
    """The arguments of a planned call. Arrays of `_without_contents` stay without contents."""

    __slots__ = ()

    def _take(self, leaf: Leaf) -> ArgumentKey:
        if not isinstance(leaf, np.ndarray) or any(leaf.strides) or leaf.size < 2:
            return super()._take(leaf)
        kind = jax.ShapeDtypeStruct(leaf.shape, array_conversion.as_array(leaf.flat[0]).dtype)
        self.dynamic.append(kind)  # type: ignore[arg-type]
        return kind.shape, kind.dtype, False


class _Planning(Tracing):
    """A trace that takes only the given elements of datasets, and gives none back."""

    def _give_back(self) -> None:
        self._queue.clear()


def _with_values(leaf: Leaf) -> Leaf:
    """Returns an argument of the step for a leaf of the batch: specs become values without contents."""
    if isinstance(leaf, DistributedDataset):
        raise PlanError(
            "`batch` is a tuple with a distributed dataset in it, which would be an argument of the step. Pass the "
            "dataset itself, for its first element, or an iterator."
        )
    specs = leaf.value_specs if isinstance(leaf, PerReplicaSpec) else (leaf,)
    if any(isinstance(spec, TensorSpec) and not spec.shape.is_fully_defined() for spec in specs):
        raise PlanError(f"The spec {leaf!r} leaves a size open. Pass a batch in its place, such as next(iter(data)).")
    if isinstance(leaf, PerReplicaSpec):
        mesh = _mesh_of_specs()
        shapes = [tuple(spec.shape) for spec in leaf.value_specs]
        shape = tuple(map(max, zip(*shapes))) if shapes[0] else ()
        kind = jax.ShapeDtypeStruct((mesh.size, *shape), leaf.value_specs[0].dtype)
        return of_array(PerReplica, kind, mesh)
    if isinstance(leaf, PerReplica) and mesh_of(leaf) is not None and (padded := padded_form(leaf)) is not None:
        return of_array(PerReplica, padded.array, mesh_of(leaf))  # as if all replicas' parts were the largest
    if isinstance(leaf, (TensorSpec, jax.ShapeDtypeStruct)):
        return _without_contents(tuple(int(n or 0) for n in leaf.shape), leaf.dtype)
    return leaf


def _without_contents(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an array of zeros that takes the memory of one."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _mesh_of_specs() -> ReplicaMesh:
    """Returns the mesh of the current strategy or, outside of any scope, of the only strategy that has variables."""
    meshes = (mesh_of(each) for each, _ in living)
    found = {id(mesh): mesh for mesh in meshes if mesh is not None}
    if context.has_strategy():
        current = getattr(context.get_strategy().extended, "_mesh", None)
        found = {} if current is None else {id(current): current}
    if len(found) != 1:
        raise PlanError(
            f"A PerReplicaSpec does not say which strategy it is for, and {len(found)} strategies have variables. Call "
            "`plan` in the strategy's scope, or pass a batch of a distributed dataset."
        )
    return next(iter(found.values()))


def _planned(leaf: Leaf, mesh: ReplicaMesh | None, was_alone: bool) -> Leaf:
    """Returns an argument for the planned mesh, in which each replica's part has the size of the largest one."""
    if mesh is None:
        return leaf
    of_mesh = isinstance(leaf, (PerReplica, Mirrored)) and mesh_of(leaf) is mesh
    if not of_mesh and not (was_alone and mesh.size > 1 and is_array(leaf) and leaf.ndim):
        return leaf
    array = array_of(leaf)
    if array is None:
        raise PlanError(f"A value of replicas has components that no program can take: {leaf!r}.")
    if isinstance(leaf, Mirrored):
        kind = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=mesh.mirrored)
        return of_array(Mirrored, kind, mesh)
    shape = array.shape[1:] if of_mesh else array.shape
    stacked = jax.ShapeDtypeStruct((mesh.size, *shape), array.dtype, sharding=mesh.stacked)
    return of_array(PerReplica, stacked, mesh)


def _shape_of_part(leaf: Leaf, mesh: ReplicaMesh | None) -> tuple[int, ...]:
    """Return the shape of each replica's part of an array of the batch; an empty one for other values."""
    if isinstance(leaf, PerReplica):
        array = array_of(leaf) if mesh_of(leaf) is mesh else None
        return () if array is None else tuple(array.shape[1:])
    of_batch = is_array(leaf) and not isinstance(leaf, (Mirrored, Variable))
    return tuple(leaf.shape) if of_batch and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) else ()


class _Whole(NamedTuple):
    """An array that every replica has whole, and that could be sharded."""

    name: str
    shape: tuple[int, ...]
    size: int
    trainable: bool


def _inputs(program: Program, batch: Sequence[Leaf], replicas: int) -> Inputs:
    """Returns the bytes that the inputs take on each device."""
    sizes, wholes = {True: 0, False: 0}, list[_Whole]()
    for variable in program.level.variables.values():
        assert isinstance(variable, Variable)
        home, names = storage_of(variable).home, _names_of(variable)
        for kind, sharding, name in zip(home.leaf_types(False), home.shardings(), names):
            size = bytes_on_device(kind, sharding)
            sizes[variable.trainable] += size
            whole = sharding is not None and sharding.is_fully_replicated
            if whole and cut_axis(kind, replicas) is not None:
                wholes.append(_Whole(name, tuple(kind.shape), size, variable.trainable))
    given = sum(bytes_on_device(leaf, getattr(leaf, "sharding", None)) for leaf in batch)
    return Inputs(sizes[True], sizes[False], given, _with_state(wholes))


def _with_state(wholes: Sequence[_Whole]) -> dict[str, int]:
    """Returns the bytes of each array by its name; those of a variable include its optimizer's state.

    The state is recognized by its shape: if the number of other arrays of a shape is a multiple of the number of
    trainable ones, they are their state. Otherwise each array counts for itself.
    """
    found: dict[str, int] = {}
    for shape in dict.fromkeys(whole.shape for whole in wholes):
        variables = [whole for whole in wholes if whole.shape == shape and whole.trainable]
        others = [whole for whole in wholes if whole.shape == shape and not whole.trainable]
        shared = bool(others) and bool(variables) and len(others) % len(variables) == 0
        text = f" with {len(others) // len(variables)} of its optimizer" if shared else ""
        state = sum(other.size for other in others) // len(variables) if shared else 0
        for whole in variables if shared else [*variables, *others]:
            alike = sum(name.startswith(whole.name) for name in found)
            found[f"{whole.name} ({alike + 1}){text}" if alike else whole.name + text] = whole.size + state
    return found


def _names_of(variable: Variable) -> list[str]:
    """Returns the names of a variable's arrays: its own, with the path in its pytree, dtype and shape."""
    name = variable.name.removesuffix(":0")
    return [f"{name}{keystr(path)} {kind.dtype}{list(kind.shape)}" for path, kind in leaves_of(variable)]
