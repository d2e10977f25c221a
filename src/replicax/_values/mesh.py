"""The mesh of the devices that replicas run on, and how arrays are put on it and read from it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._base import devices as _devices
from replicax._base import jax_internals, tracebacks
from replicax._base.host_memory import Pool, keeps_bits, put
from replicax._base.types import Leaf, Tree
from replicax._values.arrays import Array, filled, is_global, part_of

_T = TypeVar("_T")
_P = ParamSpec("_P")

AXIS = "replica"
LOGICAL_AXIS = "logical"
THREADS = 256  # of XLA for the parts of all CPU devices' programs; fixed in its source (kMaxIntraOpThreads)


@dataclass(frozen=True)
class PlannedDevice:
    """A device that is not there, for which a program is planned."""

    platform: str
    id: int
    process_index: int = 0

    @property
    def name(self) -> str:
        """The name, as users write it."""
        return f"{self.platform.upper()}:{self.id}"


class ReplicaMesh:
    """The devices of the replicas, in order of replica id.

    A replica has one device or a list of several *logical* ones. Then the mesh has further axes: those of `axes`, by
    name the number of devices along each, or one for each prime factor of their number, so that two dimensions of an
    array can be split over four of them. Code is SPMD over the replicas only; over a replica's logical devices XLA
    spreads it, as arrays' layouts say (see `logical_devices`). Eager components lie on a replica's first device.

    Nothing here assumes that all of them belong to this process: `local_ids` says which do. Where others hold some of
    the replicas, a value's `values` are this process's components.
    """

    def __init__(self, devices: Sequence[jax.Device | Sequence[jax.Device]], axes: Mapping[str, int] | None = None):
        self.placing = threading.RLock()  # held while elements of datasets are placed, and while it stands for others
        self._arrange([[row] if isinstance(row, jax.Device) else list(row) for row in devices], axes)
        if self.crowded:
            tracebacks.warn(
                f"{len(self._local_grid)} CPU devices of one process are more than the {THREADS} threads that XLA has "
                "for parts of their programs. A program with much to do beside a collective may stand still, until XLA "
                f"ends the process. With at most {THREADS} devices that cannot happen.",
                RuntimeWarning,
            )

    def _arrange(self, rows: list[list[jax.Device]], axes: Mapping[str, int] | None) -> None:
        """Sets what follows from each replica's devices, which may be `PlannedDevice`s."""
        self.logical_devices = rows
        self.devices: tuple[jax.Device, ...] = tuple(row[0] for row in self.logical_devices)
        self.axes = dict(axes or _axes_of_factors(self.logical_size))
        # Without further devices there is nothing to spread, whatever names users have for it.
        self.logical_axes = tuple(self.axes) if self.logical_size > 1 else ()
        names = (AXIS, *self.logical_axes)
        grid = np.array(self.logical_devices).reshape(len(self.devices), *(self.axes[name] for name in names[1:]))
        types = (AxisType.Auto,) * len(names)
        self.is_planned = isinstance(self.devices[0], PlannedDevice)
        self.mesh = AbstractMesh(grid.shape, names, types) if self.is_planned else Mesh(grid, names, axis_types=types)
        self.mirrored = NamedSharding(self.mesh, PartitionSpec())
        self.stacked = NamedSharding(self.mesh, PartitionSpec(AXIS))
        process = jax.process_index()
        self.local_ids = tuple(i for i, device in enumerate(self.devices) if device.process_index == process)
        self.local_devices = [self.devices[i] for i in self.local_ids]
        self._local_grid = [device for i in self.local_ids for device in self.logical_devices[i]]
        self.all_local = len(self.local_ids) == len(self.devices)
        # With one replica here and others elsewhere, results come bare: a plain value is this replica's component.
        self.lone = not self.all_local and len(self.local_ids) == 1
        self.pool = Pool()
        self._stack_of_host = jax_internals.FromHost(self.stacked, committed=True)
        # With several CPU devices, JAX must not have too many collectives in flight (see _collectives/in_flight.py).
        self.needs_bound = grid.size > 1 and self.platform == "cpu"
        self.crowded = self.needs_bound and len(self._local_grid) > THREADS

    @contextlib.contextmanager
    def standing_for(self, platform: str, size: int) -> Iterator[None]:
        """Returns a context in which it is a mesh of so many devices that are not there.

        Programs that are traced in it can be lowered, and compiled elsewhere. Nothing can be placed or run. The other
        users of the mesh must not use it meanwhile.
        """
        rows, axes, before = size // self.logical_size, self.axes, self.__dict__
        devices: list[jax.Device] = [PlannedDevice(platform, i) for i in range(size)]  # type: ignore[misc]
        with self.placing:
            self.__dict__ = {"placing": self.placing}
            try:
                self._arrange([list(row) for row in np.array(devices).reshape(rows, -1)], axes)
                yield
            finally:
                self.__dict__ = before

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """The devices' platform, as JAX names it: `"cpu"`, `"gpu"`, `"tpu"`."""
        return str(self.devices[0].platform)

    @property
    def logical_size(self) -> int:
        """The number of devices of each replica."""
        return len(self.logical_devices[0])

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Full names of this process's devices, as `worker_devices` lists them."""
        return _devices.full_names(self.local_devices)

    @cached_property
    def groups(self) -> list[list[int]] | None:
        """The replicas of each process, where there are several processes."""
        if self.all_local:
            return None
        owners = [device.process_index for device in self.devices]
        return [[i for i, owner in enumerate(owners) if owner == process] for process in dict.fromkeys(owners)]

    def by_replica(self, by_process: Sequence[Sequence[_T]]) -> list[_T]:
        """Returns the items that each process has for its replicas in the order of the replicas' ids.

        The ids of one process need not be consecutive.
        """
        told = [iter(of_process) for of_process in by_process]
        return [next(told[device.process_index]) for device in self.devices]

    def mirror(self, parts: Sequence[Leaf]) -> jax.Array:
        """Returns a replicated array; `parts` are the copies of the local replicas."""
        if self.all_local and all(part is parts[0] for part in parts):
            return put([self.pool.settled(parts[0])], self.mirrored)[0]
        placed = self._placed(parts)
        return jax.make_array_from_single_device_arrays(placed[0].shape, self.mirrored, placed)

    def stack(self, parts: Sequence[Leaf]) -> jax.Array:
        """Returns an array `[replicas, ...]`, sharded over its first axis; `parts` are the local replicas' rows."""
        if all(isinstance(part, np.ndarray) and part.dtype == parts[0].dtype for part in parts):
            by_id = {i: self.pool.settled(part)[None] for i, part in zip(self.local_ids, parts)}
            shape = (self.size, *parts[0].shape)
            wide = keeps_bits(parts[0])
            return self._stack_of_host(shape, parts[0].dtype, lambda index: by_id[index[0].start or 0], wide)
        rows = [part[None] if np.ndim(part) else jnp.reshape(part, (1,)) for part in parts]
        placed = self._placed(rows)
        shape = (self.size, *placed[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.stacked, placed)

    def _placed(self, parts: Sequence[Leaf]) -> list[jax.Array]:
        """Copies each local replica's part to all of its devices; returns the copies in the mesh's order."""
        settled = [self.pool.settled(part) for part in parts]
        return put([part for part in settled for _ in range(self.logical_size)], self._local_grid)

    def components(self, parts: Sequence[np.ndarray]) -> list[jax.Array]:
        """Copies each local replica's part to its device."""
        return [self.pool.on_device(part, device) for part, device in zip(parts, self.local_devices)]

    def spread(self, array: Leaf, sharding: NamedSharding) -> jax.Array:
        """Returns an array with this sharding; every process passes all of the array."""
        if self.all_local or is_global(array):
            return put([array], sharding)[0]
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def result_sharding(self, ndim: int, stacked: bool) -> NamedSharding:
        """Returns the sharding of a compiled program's result; over logical devices XLA chooses it."""
        if not self.logical_axes:
            return self.stacked if stacked else self.mirrored
        free = [PartitionSpec.UNCONSTRAINED] * ndim
        return NamedSharding(self.mesh, PartitionSpec(AXIS, *free[1:]) if stacked else PartitionSpec(*free))

    def layout_of(self, array: object, name: str) -> PartitionSpec | None:
        """Returns how an array is split over the devices of the mesh; None where it is not.

        Raises `ValueError`, for a variable of that name, if it is split in a way that no layout of the mesh describes.
        """
        sharding = getattr(array, "sharding", None)
        if sharding is None or sharding.is_fully_replicated:
            return None
        assert isinstance(array, jax.Array)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return sharding.spec
        names = self.mesh.axis_names  # as it may be by the axes of another mesh, of which each is one of these
        for dimensions in itertools.product([None, *range(array.ndim)], repeat=len(names)):
            along = [tuple(x for x, d in zip(names, dimensions) if d == axis) or None for axis in range(array.ndim)]
            if NamedSharding(self.mesh, PartitionSpec(*along)).is_equivalent_to(sharding, array.ndim):
                return PartitionSpec(*(x[0] if x is not None and len(x) == 1 else x for x in along))
        sizes = ", ".join(f"{axis!r}: {size}" for axis, size in self.mesh.shape.items())
        raise ValueError(
            f"The initial value of {name} is an array that is split over devices in a way that its strategy cannot "
            f"keep: {sharding}. The devices of the strategy are a mesh of {{{sizes}}}, and it keeps arrays whose "
            "dimensions are split along axes of that mesh. Pass such an array, or `numpy.asarray(array)`, which the "
            "strategy lays out itself (see its `shard_variables`)."
        )

    def copies(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the local copies of a replicated array; they share its buffers."""
        shards = self._resharded(array, self.mirrored).addressable_shards[:: self.logical_size]
        return tuple(jax_internals.uncommitted(shard.data) for shard in shards)

    def copy(self, array: jax.Array, replica: int) -> jax.Array:
        """Returns the copy of one local replica, as `copies` does."""
        return jax_internals.uncommitted(self.shard(self._resharded(array, self.mirrored), replica))

    def shard(self, array: jax.Array, replica: int) -> jax.Array:
        """Returns the copy of one local replica of an array with the sharding `mirrored`, committed to its device."""
        # Of a replicated array `addressable_data` is always the first.
        shard: jax.Array = array.addressable_shards[replica * self.logical_size].data
        return shard

    def rows(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the local rows of a stacked array, each on its replica's device."""
        return tuple(self._part(block, block.shape[1:]) for block in self._blocks(array))

    @staticmethod
    def _resharded(array: jax.Array, sharding: NamedSharding) -> jax.Array:
        return array if array.sharding.is_equivalent_to(sharding, array.ndim) else put([array], sharding)[0]

    def _blocks(self, array: jax.Array) -> list[jax.Array]:
        """Returns the local blocks of one row of a stacked array, each on its replica's device."""
        shards = self._resharded(array, self.stacked).addressable_shards
        shards = sorted(shards, key=lambda shard: shard.index[0].start or 0)[:: self.logical_size]
        return [shard.data for shard in shards]

    def pad(self, parts: Sequence[Array], shape: tuple[int, ...]) -> jax.Array:
        """Returns an array `[replicas, *shape]`, whose local rows are these parts, padded with zeros."""
        placed = put([self.pool.settled(part) for part in parts], self.local_devices)
        rows = [_filled_row(part, shape) for part in placed]
        return jax.make_array_from_single_device_arrays((self.size, *shape), self.stacked, rows)

    def cut(self, array: jax.Array, shapes: Sequence[tuple[int, ...]]) -> tuple[jax.Array, ...]:
        """Returns the parts that the local rows of a padded array were made of, each on its replica's device.

        `shapes` are those of all replicas' parts.
        """
        blocks = self._blocks(array)
        return tuple(map(self._part, blocks, (shapes[i] for i in self.local_ids)))

    def _part(self, block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the leading part, of this shape, of the row in a block, on the block's device."""
        (device,) = block.devices()
        is_key = jax.dtypes.issubdtype(block.dtype, jax.dtypes.extended)
        if device.platform == "cpu" and not (is_key or block.weak_type):
            # It shares the memory, which is waited for. A program would have to be compiled for each shape and device,
            # and whether it was would depend on how long the block takes to be computed.
            return self.pool.on_device(part_of(np.asarray(block)[0], shape), device, wide=True)
        return jax_internals.uncommitted(_part_of_row(block, shape))


def mapped(function: Callable[_P, _T], mesh: ReplicaMesh, in_specs: Tree, out_specs: Tree) -> Callable[_P, _T]:
    """Returns `function`, which computes on one replica's blocks, mapped over the replicas."""
    over_all: Callable[_P, _T] = jax.shard_map(
        function, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
    )
    return jax.jit(over_all) if mesh.logical_axes else over_all  # over logical devices only the compiler spreads it


def as_rows(copies: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Returns the copies of a replicated array as the rows of a stacked one, inside of compiled code."""
    return mapped(_as_row, mesh, PartitionSpec(), PartitionSpec(AXIS))(copies)


def as_copies(rows: jax.Array, mesh: ReplicaMesh) -> jax.Array:
    """Returns the rows of a stacked array as the copies of one that counts as replicated, inside of compiled code.

    So a program returns the only component of this process, and no second program has to take its row.
    """
    return mapped(first_row, mesh, PartitionSpec(AXIS), PartitionSpec())(rows)


def _as_row(copy: jax.Array) -> jax.Array:
    return copy[None]


def first_row(rows: jax.Array) -> jax.Array:
    """Returns the first row; of one replica's block of a stacked array, the only one."""
    return rows[0]


def _axes_of_factors(number: int) -> dict[str, int]:
    """Returns an axis for each prime factor of a number."""
    factors = _prime_factors(number)
    if len(factors) == 1:
        return {LOGICAL_AXIS: number}
    return {f"{LOGICAL_AXIS}_{n}": factor for n, factor in enumerate(factors)}


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        if number % divisor:
            divisor += 1
        else:
            factors.append(divisor)
            number //= divisor
    return factors


@functools.partial(jax.jit, static_argnums=1)
def _part_of_row(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return part_of(block[0], shape)


@functools.partial(jax.jit, static_argnums=1)
def _filled_row(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return filled(part, shape)[None]


_find_local_replica: Callable[[ReplicaMesh], int] | None = None


def set_local_replica(find: Callable[[ReplicaMesh], int]) -> None:
    """Plug in the function that tells which of the local replicas of a mesh runs in this thread, 0 if none does."""
    global _find_local_replica
    _find_local_replica = find


def local_replica(mesh: ReplicaMesh) -> int:
    """Return which of the local replicas of a mesh runs in this thread, 0 if none does."""
    return 0 if _find_local_replica is None else _find_local_replica(mesh)


def constrained(array: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Return an array, in a program, with this sharding where the program hands it out; as it is for None."""
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)
