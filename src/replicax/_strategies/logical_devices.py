"""Layouts, which say how arrays are split over a replica's logical devices; XLA works out those that are not given.

In compiled replicas a layout is a sharding constraint. Outside of replicas it places an array; a variable that is made
of such an array keeps its layout. Eager replicas compute on their first logical device, where layouts have no effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import array_conversion
from replicax._base.types import Leaf
from replicax._collectives import cross_process
from replicax._tracing import context, frames
from replicax._values import AXIS, Array, Mirrored, PerReplica, ReplicaMesh, global_array, is_global, mesh_of, of_array
from replicax._variables.distributed import MirroredVariable
from replicax._variables.variable import Variable


def shape_of(tensor: Leaf) -> tuple[int, ...]:
    """Returns the shape of an array or variable, or of a distributed value's components."""
    if isinstance(tensor, (PerReplica, Mirrored)):
        tensor = tensor.values[0]
    return tuple(np.shape(tensor) if not hasattr(tensor, "shape") else tensor.shape)


def check_device(mesh: ReplicaMesh, logical_device_id: SupportsIndex, refused: bool) -> None:
    """Raises `ValueError` where a tensor cannot be assigned to this logical device."""
    if refused:
        raise ValueError(
            "With experimental_spmd_xla_partitioning=True no tensor is assigned to one logical device. Use "
            "experimental_split_to_logical_devices or experimental_replicate_to_logical_devices."
        )
    if not 0 <= operator.index(logical_device_id) < mesh.logical_size:
        raise ValueError(
            f"`logical_device_id` is a number from 0 on, lower than that of the logical devices of a replica, which "
            f"is {mesh.logical_size}; got {logical_device_id}."
        )


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
            "devices as the strategy's `experimental_device_assignment` gives it."
        )
    for dimension, (size, parts) in enumerate(zip(shape, numbers)):
        if size % parts:
            raise ValueError(
                f"Dimension {dimension} of a tensor of shape {tuple(shape)} is {size}, which cannot be divided in "
                f"{parts} equal parts (`partition_dimensions` is {numbers})."
            )
    free = {name: mesh.mesh.shape[name] for name in mesh.logical_axes}
    return PartitionSpec(*(_take(free, parts) for parts in numbers))


def _take(free: dict[str, int], parts: int) -> tuple[str, ...] | None:
    """Takes mesh axes that together have `parts` devices from those that are free; None if there are none to take."""
    taken = []
    for name, size in list(free.items()):
        if parts % size == 0:
            parts //= size
            taken.append(name)
            del free[name]
    return tuple(taken) or None


def lay_out(mesh: ReplicaMesh, tensor: Leaf, layout: PartitionSpec) -> Leaf:
    """Returns the tensor, split over the logical devices as the layout says.

    Outside of replicas a variable itself gets the layout, keeps it from then on, and is returned.
    """
    replica_context = context.get_replica_context()
    in_replica = replica_context is not None and replica_context.strategy.extended._mesh is mesh
    if isinstance(tensor, MirroredVariable) and tensor._mesh is mesh and not in_replica:
        if not frames.is_tracing():
            tensor._storage.lay_out([layout])
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
