"""The devices of each replica, and the names of the axes along which there are several."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from replicax._base.errors import DeviceError
from replicax._base.messages import received
from replicax._base.types import CommunicationOptions
from replicax._collectives.cross_device_ops import CollectiveAllReduce, CrossDeviceOps, NcclAllReduce
from replicax._collectives.reducer import Reducer
from replicax._collectives.sharding import Rule
from replicax._strategies.sharding_rules import Dimensions
from replicax._values import AXIS, ReplicaMesh


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """The arguments of strategies that say how replicas and variables are laid out; see `MirroredStrategy`."""

    devices_per_replica: int | Mapping[str, int] = 1
    sharding_rules: Mapping[str, Dimensions] | None = None
    shard_optimizer_state: bool = False
    shard_variables: Rule | bool = False


MODEL_AXIS = "model"  # of a replica's devices where users give their number alone


def as_axes(devices_per_replica: int | Mapping[str, int]) -> dict[str, int]:
    """Returns the argument of that name as the axes of a replica's devices, with the number of devices along each.

    Raises:
        TypeError: it is neither a number nor a mapping of names to numbers.
        ValueError: a number is less than one, or a name cannot be an axis.
    """
    given = devices_per_replica
    if given == 1 and given is not True:
        return {}  # no axes: any layout leaves values whole
    axes = given if isinstance(given, Mapping) else {MODEL_AXIS: given}
    if not all(isinstance(name, str) for name in axes) or not all(map(_is_number, axes.values())):
        raise TypeError(
            "`devices_per_replica` is a number of devices, or a mapping from names of axes to numbers, such as "
            f'{{"model": 2}}; got {received(given)}.'
        )
    if not axes or min(axes.values()) < 1:
        raise ValueError(f"`devices_per_replica` has numbers from 1 on, and one at least; got {given!r}.")
    for name in axes:
        if name == AXIS or not name.isidentifier():
            raise ValueError(
                f"An axis in `devices_per_replica` is called by an identifier that is not {AXIS!r}, which is the axis "
                f"of the replicas; got {name!r}."
            )
    return dict(axes)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def mesh_of(processes: Sequence[Sequence[jax.Device]], devices_per_replica: int | Mapping[str, int]) -> ReplicaMesh:
    """Returns a mesh in which each replica has the next devices of a process; `processes` are the devices of each.

    Raises:
        DeviceError: a process has not a whole number of replicas.
    """
    axes = as_axes(devices_per_replica)
    size = math.prod(axes.values())
    for found in processes:
        if len(found) % size:
            raise DeviceError(
                f"A replica has {size} devices (`devices_per_replica` is {devices_per_replica!r}), which does not "
                f"divide the {len(found)} devices that {'each process has' if len(processes) > 1 else 'there are'}. "
                "Give a number of devices that can be divided so, or another `devices_per_replica`."
            )
    rows = [found[i : i + size] for found in processes for i in range(0, len(found), size)]
    return ReplicaMesh(rows, axes)


def mesh_of_rows(
    rows: Sequence[Sequence[jax.Device]], devices_per_replica: int | Mapping[str, int] | None
) -> ReplicaMesh:
    """Returns a mesh of replicas whose devices are these rows, along the axes that are named, if any are.

    Raises:
        ValueError: the axes are those of another number of devices.
    """
    if devices_per_replica is None:
        return ReplicaMesh(rows)
    axes = as_axes(devices_per_replica)
    if math.prod(axes.values()) != len(rows[0]):
        raise ValueError(
            f"`devices_per_replica` is {devices_per_replica!r}, and the device assignment gives each replica "
            f"{len(rows[0])}. Leave one of them out, or give numbers whose product is {len(rows[0])}."
        )
    return ReplicaMesh(rows, axes)


def check_sharding_of_state(mesh: ReplicaMesh, ops: CrossDeviceOps | None) -> None:
    """Raise `ValueError` if `shard_optimizer_state=True` is not possible on these devices or with these operations."""
    if mesh.logical_axes:
        raise ValueError(
            "shard_optimizer_state=True divides the state among replicas of one device each, and here each replica "
            f"has {mesh.logical_size}. Leave the option out: the state of a variable that is split over its "
            "replica's devices is split as the variable is. To divide both among the replicas too, give "
            "shard_variables=True."
        )
    if ops is not None and not isinstance(ops, (CollectiveAllReduce, NcclAllReduce)):
        raise ValueError(
            "With shard_optimizer_state=True gradients are reduced and scattered in one, for which "
            f"cross_device_ops is NcclAllReduce(...) or None, got {ops!r}."
        )


def reducer_of(
    mesh: ReplicaMesh,
    ops: CrossDeviceOps | None = None,
    options: CommunicationOptions | None = None,
    shards_optimizer_state: bool = False,
) -> Reducer:
    """Returns what combines the replicas' values, by `ops` if they are given.

    Raises:
        ValueError: replicas of several devices, with `ops` or with optimizer state that is sharded over the replicas;
            or such state with `ops` that cannot reduce and scatter in one.
    """
    if shards_optimizer_state:
        check_sharding_of_state(mesh, ops)
    if mesh.logical_axes and ops is not None:
        raise ValueError(
            f"`cross_device_ops` combines values of replicas of one device each, and here each replica has "
            f"{mesh.logical_size}, over which values may be split. Leave it out; got {ops!r}."
        )
    return Reducer(mesh, ops or CollectiveAllReduce(), options or CommunicationOptions())
