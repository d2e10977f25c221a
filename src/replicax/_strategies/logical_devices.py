"""Layouts, which say how arrays are split over a replica's devices; XLA works out those that are not given.

The devices of a replica are its *logical devices*, as TensorFlow calls those of a TPU's.

In compiled replicas a layout is a sharding constraint. Outside of replicas it places an array; a variable that is made
of such an array keeps its layout. Eager replicas compute on their first logical device, where layouts have no effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsIndex

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import array_conversion, foreign_state
from replicax._base.messages import received
from replicax._base.types import Leaf
from replicax._collectives import cross_process
from replicax._tracing import context, frames
from replicax._tracing.protocols import storage_of
from replicax._values import (
    AXIS,
    Array,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    global_array,
    is_global,
    mesh_of,
    of_array,
    partition,
)
from replicax._variables.distributed import MirroredVariable
from replicax._variables.variable import Variable


class _Extended(Protocol):
    @property
    def _mesh(self) -> ReplicaMesh | None: ...


def shape_of(tensor: Leaf) -> tuple[int, ...]:
    """Returns the shape of an array or variable, or of a distributed value's components."""
    if isinstance(tensor, (PerReplica, Mirrored)):
        tensor = tensor.values[0]
    return tuple(np.shape(tensor) if not hasattr(tensor, "shape") else tensor.shape)


def assigned(mesh: ReplicaMesh | None, tensor: Leaf, argument: str, device: SupportsIndex) -> Leaf:
    """Returns a tensor as one of a replica's devices has it, which is whole on all of them.

    Raises:
        ValueError: a replica has no device of that number.
    """
    count = 1 if mesh is None else mesh.logical_size
    if not 0 <= operator.index(device) < count:
        raise ValueError(
            f"`{argument}` is a number from 0 on, lower than that of the logical devices of a replica, which is "
            f"{count}; got {device}."
        )
    return lay_out(mesh, tensor, PartitionSpec())


def checked_dimensions(mesh: ReplicaMesh, dimensions: Iterable[object], what: str) -> PartitionSpec:
    """Returns a layout that names axes of a replica's devices for dimensions, where an array has so many.

    Args:
        mesh: of the replicas that have these axes; without axes any names will do.
        dimensions: for each dimension None, the name of an axis or a tuple of names; those left out at the end are
            None.
        what: what is laid out so, as errors call it.

    Raises:
        TypeError: `dimensions` are of another type.
        ValueError: there is no such axis, or one is named twice.
    """
    if isinstance(dimensions, str) or not isinstance(dimensions, Iterable):
        raise TypeError(
            f"The layout of {what} is a tuple with None or the name of an axis for each dimension, such as "
            f'(None, "model"); got {received(dimensions)}.'
        )
    layout = tuple(dimensions)
    seen: set[str] = set()
    for dimension, entry in enumerate(layout):
        for name in _names(entry, what):
            if mesh.axes and name not in mesh.axes:
                known = ", ".join(f"{axis!r} (of {count})" for axis, count in mesh.axes.items())
                raise ValueError(
                    f"The layout {layout} of {what} names the axis {name!r} for dimension {dimension}, and a replica's "
                    f"devices have these axes: {known}. Name one of them, or give the strategy "
                    f"devices_per_replica={{{name!r}: ...}}."
                )
            if name in seen:
                raise ValueError(
                    f"The layout {layout} of {what} names the axis {name!r} twice. Devices along one axis split one "
                    "dimension."
                )
            seen.add(name)
    return PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in layout))


def fitting_spec(mesh: ReplicaMesh, shape: Sequence[int], layout: PartitionSpec, what: str) -> PartitionSpec:
    """Returns a layout that `checked_dimensions` has returned, for an array of this shape.

    Raises:
        ValueError: the array has fewer dimensions, or one that cannot be divided so.
    """
    entries = tuple(layout)
    if len(entries) > len(shape):
        raise ValueError(
            f"The layout of {what} has an entry for each dimension at the most; got {len(entries)} entries, {entries}, "
            f"for the shape {tuple(shape)}."
        )
    for dimension, (size, parts) in enumerate(zip(shape, partition.parts_along(mesh, layout))):
        if size % parts:
            raise ValueError(
                f"Dimension {dimension} of {what}, of shape {tuple(shape)}, is {size}, which cannot be divided in "
                f"{parts} equal parts (its layout is {entries}). Split another dimension, or change its size."
            )
    return layout


def _names(entry: object, what: str) -> tuple[str, ...]:
    names = () if entry is None else entry if isinstance(entry, (tuple, list)) else (entry,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"In the layout of {what} a dimension has None, the name of an axis or a tuple of names; got "
            f"{received(entry)}."
        )
    return tuple(names)


def split_spec(mesh: ReplicaMesh, shape: Sequence[int], partition_dimensions: Sequence[int]) -> PartitionSpec:
    """Returns the layout that splits each dimension of an array into the given number of parts.

    Raises:
        TypeError: the numbers are no list of integers.
        ValueError: there is not one for each dimension, they do not use all logical devices, or a dimension cannot be
            divided so.
    """
    numbers = list(partition_dimensions) if isinstance(partition_dimensions, (list, tuple)) else None
    if numbers is None or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise TypeError(
            "`partition_dimensions` is a list of integers, one for each dimension of the tensor; got "
            f"{partition_dimensions!r}."
        )
    if len(numbers) != len(shape):
        raise ValueError(
            "`partition_dimensions` must have one number for each dimension of the tensor; got "
            f"{len(numbers)} numbers, {numbers}, for a tensor of shape {tuple(shape)}."
        )
    if math.prod(numbers) != mesh.logical_size or min(numbers, default=1) < 1:
        raise ValueError(
            f"The product of `partition_dimensions` must be the number of logical devices of a replica, "
            f"{mesh.logical_size}; got {numbers}, whose product is {math.prod(numbers)}. A replica has as many logical "
            "devices as the strategy's `experimental_device_assignment` or `devices_per_replica` gives it."
        )
    for dimension, (size, parts) in enumerate(zip(shape, numbers)):
        if size % parts:
            raise ValueError(
                f"Dimension {dimension} of a tensor of shape {tuple(shape)} is {size}, which cannot be divided in "
                f"{parts} equal parts (`partition_dimensions` is {numbers})."
            )
    free = {name: mesh.axes[name] for name in mesh.logical_axes}
    taken = [_take(free, parts) for parts in numbers]
    if math.prod(free.values()) > 1:
        raise ValueError(
            f"A replica's devices have the axes {mesh.axes}, which do not split dimensions in {numbers} parts. Use "
            "split_to_devices, which takes the names of axes."
        )
    return PartitionSpec(*taken)


def _take(free: dict[str, int], parts: int) -> tuple[str, ...] | None:
    """Takes mesh axes that together have `parts` devices from those that are free; None if there are none to take."""
    taken = []
    for name, size in list(free.items()):
        if parts % size == 0:
            parts //= size
            taken.append(name)
            del free[name]
    return tuple(taken) or None


def lay_out(mesh: ReplicaMesh | None, tensor: Leaf, layout: PartitionSpec) -> Leaf:
    """Returns the tensor, split over the logical devices as the layout says.

    Outside of replicas a variable itself, also one of Keras or NNX, gets the layout, keeps it from then on, and is
    returned.
    """
    if foreign_state.holds_variable(tensor):
        held = foreign_state.variable_of(tensor)
        laid_out = lay_out(mesh, held, layout)
        return tensor if laid_out is held else laid_out
    if mesh is None:  # of a strategy whose devices JAX picks
        return tensor if isinstance(tensor, (Variable, PerReplica, Mirrored)) else array_conversion.as_array(tensor)
    replica_context = context.get_replica_context()
    in_replica = replica_context is not None and context.mesh_of(replica_context.strategy) is mesh
    if isinstance(tensor, MirroredVariable) and mesh_of(tensor) is mesh and not in_replica:
        if not frames.is_tracing():
            storage = storage_of(tensor)
            storage.lay_out(storage.home.with_layouts([layout]))
            return tensor
        tensor = tensor.value()
    if isinstance(tensor, (PerReplica, Mirrored)):
        return _laid_out_value(mesh, tensor, layout)
    if isinstance(tensor, np.ndarray) and tensor.dtype.itemsize < 8 and not frames.is_tracing():
        array: Array = tensor  # from the host to all devices at once: it need not fit on one
    else:
        array = array_conversion.as_array(tensor.value() if isinstance(tensor, Variable) else tensor)
    if not mesh.logical_axes:
        return array_conversion.as_array(array)
    if set(mesh.logical_axes) <= set(jax.sharding.get_abstract_mesh().axis_names):  # in compiled replicas
        return jax.lax.with_sharding_constraint(array, layout)
    if in_replica:
        return array_conversion.as_array(array)
    if not (mesh.all_local or is_global(array) or isinstance(array, jax.core.Tracer)):
        return cross_process.from_first_laid_out(mesh, array, layout)
    return _placed(array, NamedSharding(mesh.mesh, layout))


def _laid_out_value(mesh: ReplicaMesh, value: PerReplica | Mirrored, layout: PartitionSpec) -> PerReplica | Mirrored:
    array = global_array(value)
    if array is None or mesh_of(value) is not mesh:
        raise ValueError(
            f"A {type(value).__name__} value is laid out over logical devices where its components are arrays of one "
            "shape, and by the strategy that made it."
        )
    rows = PartitionSpec(AXIS, *layout) if isinstance(value, PerReplica) else layout
    return of_array(type(value), _placed(array, NamedSharding(mesh.mesh, rows)), mesh)


def _placed(array: Array, sharding: NamedSharding) -> jax.Array:
    placed: jax.Array
    if isinstance(array, jax.core.Tracer):
        placed = jax.lax.with_sharding_constraint(array, sharding)
    else:
        placed = jax.device_put(array, sharding)
    return placed


class LayoutMethods:
    """The methods of a strategy that lay tensors out over the devices of each replica.

    In compiled replicas a layout is a constraint for XLA. Outside of replicas an array comes back laid out, and a
    variable that is made of it stays so; a variable is laid out itself. Where a replica has one device, a tensor comes
    back as it is, so that the same model runs under every strategy.
    """

    _extended: _Extended

    def split_to_devices(self, tensor: Leaf, dimensions: Iterable[str | Sequence[str] | None]) -> Leaf:
        """Returns the tensor, split over the devices of each replica.

        In compiled replicas it is a constraint for XLA. Outside of replicas an array comes back split, and a variable
        that is made of it stays so; a variable is split itself, and returned. Where a replica has one device, nothing
        is split.

        Args:
            tensor: an array, a variable or a per-replica value (whose components are split).
            dimensions: for each dimension None, the name of an axis of the replica's devices, or a tuple of names, as
                in a `jax.sharding.PartitionSpec`. Dimensions left out at the end are not split.

        Raises:
            TypeError: `dimensions` are of another type.
            ValueError: there are more of them than the tensor has, an axis that the strategy does not have or that is
                named twice, or a dimension that cannot be divided so.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(devices_per_replica={"model": 4})
        >>> columns = strategy.split_to_devices(jnp.ones((2, 8)), (None, "model"))
        >>> columns.shape, columns.addressable_shards[0].data.shape
        ((2, 8), (2, 2))
        """
        mesh, layout = mesh_of(self._extended), PartitionSpec()
        if mesh is not None and mesh.axes:
            named = checked_dimensions(mesh, dimensions, "the tensor")
            layout = fitting_spec(mesh, shape_of(tensor), named, "the tensor")
        return lay_out(mesh, tensor, layout)

    def replicate_to_devices(self, tensor: Leaf) -> Leaf:
        """Returns the tensor, whole on each of a replica's devices; otherwise as `split_to_devices`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(devices_per_replica={"model": 4})
        >>> whole = strategy.replicate_to_devices(jnp.ones((2, 8)))
        >>> len(whole.devices()), whole.addressable_shards[0].data.shape
        (8, (2, 8))
        """
        return lay_out(mesh_of(self._extended), tensor, PartitionSpec())

    def assign_to_device(self, tensor: Leaf, device: int) -> Leaf:
        """Returns the tensor, not split: the program is one for all devices of a replica, and each holds all of it.

        Args:
            tensor: as of `split_to_devices`.
            device: the number of one of a replica's devices, from 0.

        Raises:
            ValueError: a replica has no device of that number.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(devices_per_replica={"model": 4})
        >>> strategy.assign_to_device(jnp.ones((2, 8)), 3).shape
        (2, 8)
        """
        return assigned(mesh_of(self._extended), tensor, "device", device)
