"""Values that have one component for each replica, and the mesh of devices that they live on.

`PerReplica` has three forms behind one class. *Stacked*: one global array of shape `[replicas, ...]`, sharded
over its first axis; it enters and leaves compiled code as it is. *Parts*: a tuple with the components of this
process, which may differ in shape or be no arrays at all. *Padded*: a stacked array of components that differ in
shape, each filled up to the largest one, and their shapes, for compiled code. `Mirrored` likewise is one fully
replicated array, or its copies. Each form is made from another when it is first asked for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax import _devices, _nest, _pickling, _private, _tracebacks, _value_errors
from replicax._indexed_slices import IndexedSlices
from replicax._recycled import Pool, keeps_bits, put

AXIS = "replica"
LOGICAL_AXIS = "logical"
THREADS = 256  # of XLA for the parts of all CPU devices' programs; fixed in its source (kMaxIntraOpThreads)


class ReplicaMesh:
    """The devices of the replicas, in order of replica id.

    A replica has one device or a list of several *logical* ones. Then the mesh has further axes, one for each prime
    factor of their number, so that two dimensions of an array can be split over four of them. Code is SPMD over the
    replicas only; over a replica's logical devices XLA spreads it, as arrays' layouts say (see `_logical`). Eager
    components lie on a replica's first device.

    Nothing here assumes that all of them belong to this process: `local_ids` says which do. Where others hold some of
    the replicas, a value's `values` are this process's components.
    """

    def __init__(self, devices: Sequence[jax.Device | Sequence[jax.Device]]):
        self.logical_devices: list[Any] = [list(d) if isinstance(d, (list, tuple)) else [d] for d in devices]
        self.devices: tuple[jax.Device, ...] = tuple(row[0] for row in self.logical_devices)
        factors = _prime_factors(len(self.logical_devices[0]))
        self.logical_axes = (
            (LOGICAL_AXIS,) if len(factors) == 1 else tuple(f"{LOGICAL_AXIS}_{n}" for n in range(len(factors)))
        )
        names = (AXIS, *self.logical_axes)
        grid = np.array(self.logical_devices).reshape(len(self.devices), *factors)
        self.mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
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
        self._stack_of_host = _private.FromHost(self.stacked, committed=True)
        # With several CPU devices, JAX must not have too many collectives in flight (see _dispatch.py).
        self.needs_bound = grid.size > 1 and self.devices[0].platform == "cpu"
        self.crowded = self.needs_bound and len(self._local_grid) > THREADS
        if self.crowded:
            _tracebacks.warn(
                f"{len(self._local_grid)} CPU devices of one process are more than the {THREADS} threads that XLA has "
                "for parts of their programs. A program with much to do beside a collective may stand still, until XLA "
                f"ends the process. With at most {THREADS} devices that cannot happen.",
                RuntimeWarning,
            )

    @property
    def size(self) -> int:
        """How many replicas there are."""
        return len(self.devices)

    @property
    def logical_size(self) -> int:
        """How many devices each replica has."""
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

    def by_replica(self, by_process: Sequence[Sequence[Any]]) -> list[Any]:
        """What each process says of its replicas, in order of replica id; those of one need not stand together."""
        told = [iter(of_process) for of_process in by_process]
        return [next(told[device.process_index]) for device in self.devices]

    def mirror(self, parts: Sequence[Any]) -> jax.Array:
        """One replicated array whose copy on each local device is that part."""
        if self.all_local and all(part is parts[0] for part in parts):
            return put([self.pool.settled(parts[0])], self.mirrored)[0]
        placed = self._placed(parts)
        return jax.make_array_from_single_device_arrays(placed[0].shape, self.mirrored, placed)

    def stack(self, parts: Sequence[Any]) -> jax.Array:
        """One array `[replicas, ...]` whose row on each local device is that part."""
        if all(isinstance(part, np.ndarray) and part.dtype == parts[0].dtype for part in parts):
            by_id = {i: self.pool.settled(part)[None] for i, part in zip(self.local_ids, parts)}
            shape = (self.size, *parts[0].shape)
            wide = keeps_bits(parts[0])
            return self._stack_of_host(shape, parts[0].dtype, lambda index: by_id[index[0].start or 0], wide)
        rows = [part[None] if np.ndim(part) else jnp.reshape(part, (1,)) for part in parts]
        placed = self._placed(rows)
        shape = (self.size, *placed[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.stacked, placed)

    def _placed(self, parts: Sequence[Any]) -> list[jax.Array]:
        """Each local replica's part on all of its devices, in the mesh's order."""
        settled = [self.pool.settled(part) for part in parts]
        return put([part for part in settled for _ in range(self.logical_size)], self._local_grid)

    def components(self, parts: Sequence[np.ndarray]) -> list[jax.Array]:
        """Each local replica's part on its device."""
        return [self.pool.on_device(part, device) for part, device in zip(parts, self.local_devices)]

    def spread(self, array: Any, sharding: NamedSharding) -> jax.Array:
        """An array of which every process has all, spread over the mesh in this way."""
        if self.all_local or is_global(array):
            return jax.device_put(array, sharding)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def result_sharding(self, ndim: int, stacked: bool) -> NamedSharding:
        """What compiled programs leave a result in; over logical devices it stays as XLA has it."""
        if not self.logical_axes:
            return self.stacked if stacked else self.mirrored
        free = [PartitionSpec.UNCONSTRAINED] * ndim
        return NamedSharding(self.mesh, PartitionSpec(AXIS, *free[1:]) if stacked else PartitionSpec(*free))

    def layout_of(self, array: Any) -> PartitionSpec | None:
        """How an array is split over the logical devices; None where it is not, or lies elsewhere."""
        sharding = getattr(array, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh) or sharding.is_fully_replicated:
            return None
        return sharding.spec

    def copies(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """The local copies of a replicated array; they share its buffers."""
        if not array.sharding.is_equivalent_to(self.mirrored, array.ndim):
            array = jax.device_put(array, self.mirrored)
        return tuple(_private.uncommitted(shard.data) for shard in array.addressable_shards[:: self.logical_size])

    def copy(self, array: jax.Array, replica: int) -> jax.Array:
        """One of `copies`."""
        if not array.sharding.is_equivalent_to(self.mirrored, array.ndim):
            array = jax.device_put(array, self.mirrored)
        return _private.uncommitted(self.shard(array, replica))

    def shard(self, array: jax.Array, replica: int) -> jax.Array:
        """The same of an array that lies as `mirrored` says, committed to its device."""
        # Of a replicated array `addressable_data` is always the first.
        return array.addressable_shards[replica * self.logical_size].data

    def rows(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """The local rows of a stacked array, each on its replica's device."""
        if not array.sharding.is_equivalent_to(self.stacked, array.ndim):
            array = jax.device_put(array, self.stacked)
        return tuple(self._part(block, block.shape[1:]) for block in self._blocks(array))

    def _blocks(self, array: jax.Array) -> list[Any]:
        """The blocks of one row of a stacked array, each on its replica's device."""
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)[:: self.logical_size]
        return [shard.data for shard in shards]

    def pad(self, parts: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
        """One array `[replicas, *shape]` whose row on each local device is that part, filled up with zeros."""
        placed = put([self.pool.settled(part) for part in parts], self.local_devices)
        rows = [_filled_row(part, shape) for part in placed]
        return jax.make_array_from_single_device_arrays((self.size, *shape), self.stacked, rows)

    def cut(self, array: jax.Array, shapes: Sequence[tuple[int, ...]]) -> tuple[jax.Array, ...]:
        """The local ones of the parts that a padded array was made of, each on its replica's device.

        `shapes` are those of all replicas' parts.
        """
        blocks = self._blocks(jax.device_put(array, self.stacked))
        return tuple(map(self._part, blocks, (shapes[i] for i in self.local_ids)))

    def _part(self, block: Any, shape: tuple[int, ...]) -> jax.Array:
        """The part of this shape that the row in a block begins with, on its device."""
        (device,) = block.devices()
        is_key = jax.dtypes.issubdtype(block.dtype, jax.dtypes.extended)
        if device.platform == "cpu" and not (is_key or block.weak_type) and block.is_ready():
            # It shares the memory. A program would have to be compiled for each shape and each device.
            return self.pool.on_device(part_of(np.asarray(block)[0], shape), device, wide=True)
        return _private.uncommitted(_part_of_row(block, shape))


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


def part_of(array: Any, shape: tuple[int, ...]) -> Any:
    """The first so many entries along each dimension."""
    return array if array.shape == shape else array[tuple(slice(n) for n in shape)]


def filled(part: Any, shape: tuple[int, ...]) -> Any:
    """An array of this shape that begins with `part`, and is zero behind it."""
    if part.shape == shape:
        return part
    module = np if isinstance(part, np.ndarray) else jnp
    return module.pad(part, [(0, n - m) for m, n in zip(part.shape, shape)])


def is_text(array: Any) -> bool:
    """Whether an array is one of strings or objects, which numpy has and JAX has not."""
    return getattr(array.dtype, "kind", "V") in "OSU"


_ARRAYS = (np.ndarray, np.generic, jax.Array)  # the quickest to tell first


def is_array(value: Any) -> bool:
    """Whether `value` is an array, of JAX (concrete or traced) or numpy."""
    return isinstance(value, _ARRAYS)


def _can_be_padded(parts: Sequence[Any], kinds: Sequence[Any], mesh: ReplicaMesh) -> bool:
    """Whether these components can be, where `kinds` tell the shapes and dtypes of those of all replicas.

    All processes come to the same, since they compare what all of them know.
    """
    return (
        not mesh.logical_axes
        and len(kinds) == mesh.size
        and all(is_array(part) and not is_text(part) for part in parts)
        and not any(jax.dtypes.issubdtype(part.dtype, jax.dtypes.extended) for part in parts)
        and all(kind.dtype == kinds[0].dtype and kind.ndim == kinds[0].ndim for kind in kinds)
    )


def largest_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The smallest shape in which all of these fit."""
    return tuple(max(sizes) for sizes in zip(*shapes))


def is_global(array: Any) -> bool:
    """Whether some of an array lies on devices of other processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


class DistributedValues(_nest.Leaf):
    """The base of values with a component for each replica: `PerReplica`, `Mirrored` and distributed variables."""

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in order."""
        raise NotImplementedError

    def _text(self, show) -> str:
        lines = ",\n".join(f"  {index}: {show(value)}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __str__(self) -> str:
        return self._text(str)

    def __repr__(self) -> str:
        return self._text(repr)


class _Value(DistributedValues):
    """What `PerReplica` and `Mirrored` share: parts, a global array, and the mesh to go between them."""

    __slots__ = ("__weakref__", "_array", "_local", "_padded", "_parts", "kinds", "mesh", "ragged", "whole")

    kinds: Sequence[Any] | None  # what has the shapes and dtypes of all replicas' components, where that is known

    ragged: bool  # whether components in other processes are known to differ in shape from those here
    whole: bool  # whether it was made as one array, so that all processes know it to be one

    def __init__(self, values: Sequence[Any], mesh: ReplicaMesh | None = None, ragged: bool = False):
        self._parts: tuple[Any, ...] | None = tuple(values)
        self.ragged, self.whole, self.kinds = ragged, False, None
        self._array: Any = None
        self._local: Any = None
        self._padded: Any = None
        self.mesh = mesh

    @classmethod
    def of_array(cls, array: jax.Array, mesh: Any):
        """The value whose global form this array is."""
        self = cls.__new__(cls)
        self._parts, self._array, self._local, self.mesh, self.ragged = None, array, None, mesh, False
        self._padded, self.kinds, self.whole = None, None, True
        return self

    @classmethod
    def of_local(cls, component: Any, mesh: Any):
        """The value as one replica sees it while a replica function is traced: its own component, symbolically."""
        self = cls.__new__(cls)
        self._parts, self._array, self._local, self.mesh, self.ragged = None, None, component, mesh, False
        self._padded, self.kinds, self.whole = None, None, False
        return self

    def __copy__(self) -> _Value:
        return self  # which nothing changes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_pickling.stored(self.values),)  # without devices, which another process need not have

    def uniform(self) -> bool:
        """Whether the components here are arrays of one shape and dtype."""
        parts = self._parts
        return (
            self.mesh is not None
            and parts is not None
            and not self.ragged
            and len(parts) == len(self.mesh.local_ids)
            and all(is_array(part) and not is_text(part) for part in parts)
            and all(part.shape == parts[0].shape and part.dtype == parts[0].dtype for part in parts)
        )

    def array(self) -> jax.Array | None:
        """The global form, None where the components have none (they differ in shape, or are no arrays)."""
        if self._array is not None and not isinstance(self._array, jax.Array):
            return None
        if self._array is None and self._local is None and self.uniform():
            assert self._parts is not None and self.mesh is not None
            if any(isinstance(part, jax.core.Tracer) for part in self._parts):
                return self._join_traced(self._parts)
            parts = [np.asarray(part) if isinstance(part, np.generic) else part for part in self._parts]
            with _private.at_once():
                self._array = self._join(parts)
        return self._array

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        raise NotImplementedError

    def _join_traced(self, parts: Sequence[Any]) -> jax.Array:
        raise NotImplementedError


# Components that came bare out of compiled programs, by id: there is one of that shape on every replica of the mesh.
_bare: dict[int, tuple[weakref.ref, ReplicaMesh]] = {}

_uneven: dict[int, weakref.ref] = {}  # and those of which other replicas have some of other shapes


class PerReplica(_value_errors.NotATensor, _Value):
    """A value with a component of its own for each replica.

    `values` is the tuple of the components of this process. It is no tensor: pass it to `Strategy.run`, in
    whose function it is the replica's component, or to `Strategy.reduce`. As a pytree it is its stacked array.

    >>> import replicax as rx
    >>> rx.PerReplica([1, 2])
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ()

    @classmethod
    def of_kinds(cls, values: Sequence[Any], kinds: Sequence[Any], mesh: ReplicaMesh) -> PerReplica:
        """The value with these components here, where `kinds` have the shapes and dtypes of those of all replicas."""
        self = cls(values, mesh)
        if not mesh.all_local:  # else they are there to be looked at
            self.know(kinds)
        return self

    def know(self, kinds: Sequence[Any]) -> None:
        """Takes note of the shapes and dtypes of all replicas' components."""
        self.kinds, self.ragged = kinds, len({(kind.shape, str(kind.dtype)) for kind in kinds}) > 1

    def to_be_compared(self) -> bool:
        """Whether these are arrays of which other processes might have some of other shapes."""
        parts, mesh = self._parts, self.mesh
        if parts is None or mesh is None or mesh.all_local or len(parts) != len(mesh.local_ids):
            return False
        known = self.kinds is not None or self._array is not None or self._padded is not None
        return not known and all(is_array(p) and not is_text(p) and not isinstance(p, jax.core.Tracer) for p in parts)

    @classmethod
    def of_padded(cls, array: Any, shapes: Sequence[tuple[int, ...]], mesh: Any) -> PerReplica:
        """The value with components of these shapes, all replicas', with which the rows of `array` begin."""
        self = cls.of_local(None, mesh)
        self._padded, self.ragged = (array, tuple(shapes)), not mesh.all_local
        return self

    @classmethod
    def from_host(cls, parts: Sequence[Any], kinds: Sequence[Any], mesh: ReplicaMesh) -> PerReplica | None:
        """The value with these components of the host, put on the devices stacked or padded; None where it cannot be.

        Args:
            parts: the components of this process.
            kinds: what has the shapes and dtypes of those of all processes, in order of replica id.
            mesh: where to put them.
        """
        if not _can_be_padded(parts, kinds, mesh):
            return None
        shapes = [kind.shape for kind in kinds]
        array = mesh.stack([filled(part, largest_of(shapes)) for part in parts])
        return cls.of_array(array, mesh) if len(set(shapes)) == 1 else cls.of_padded(array, shapes, mesh)

    def padded(self) -> tuple[Any, tuple[tuple[int, ...], ...]] | None:
        """The padded form of components that differ in shape, and the shapes; None where there is none.

        There is one of numeric components with equal dtypes and ranks, on a device each, where all shapes are known:
        where all are in this process, or in what came of a dataset or out of a program.
        """
        parts, mesh = self._parts, self.mesh
        if self._padded is not None or self._array is not None or parts is None:
            return self._padded
        kinds = parts if self.kinds is None else self.kinds
        if mesh is None or not _can_be_padded(parts, kinds, mesh):
            return None
        shapes = tuple(tuple(kind.shape) for kind in kinds)
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.stack([filled(jnp.asarray(part), largest_of(shapes)) for part in parts]), shapes
        with _private.at_once():
            self._padded = mesh.pad(parts, largest_of(shapes)), shapes
        return self._padded

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of those components of this process that are arrays and not known to be alike."""
        if self._parts is None:
            if self._padded is None or self.mesh is None:
                return []
            return [self._padded[1][i] for i in self.mesh.local_ids]
        return [tuple(part.shape) for part in self._parts if is_array(part)]

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        assert self.mesh is not None
        return self.mesh.stack(parts)

    def _join_traced(self, parts: Sequence[Any]) -> jax.Array:
        return jnp.stack([jnp.asarray(part) for part in parts])

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in order."""
        if self._parts is None:
            assert self.mesh is not None
            if self._local is not None:
                if self.mesh.size == 1:
                    return (self._local,)
                everyone = jax.lax.all_gather(self._local, AXIS)
                return tuple(everyone[i] for i in range(self.mesh.size))
            if self._padded is not None:
                array, shapes = self._padded
                if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
                    return tuple(part_of(array[i], shape) for i, shape in enumerate(shapes))
                with _private.at_once():
                    self._parts = self.mesh.cut(array, shapes)
                return self._parts
            assert self._array is not None
            self._parts = self._components(self._array)
            if any(isinstance(part, jax.core.Tracer) for part in self._parts):
                parts, self._parts = self._parts, None
                return parts
        return self._parts

    @staticmethod
    def bare(component: jax.Array, mesh: ReplicaMesh) -> jax.Array:
        """The only component of this process, out of a program's `as_copies`, which `of_bare` is to know again."""
        key = id(component)
        _bare[key] = weakref.ref(component, lambda _: _bare.pop(key, None)), mesh
        return component

    @classmethod
    def padded_bare(cls, array: Any, shapes: Sequence[tuple[int, ...]], mesh: Any) -> Any:
        """The only component of this process of the value that `of_padded` makes."""
        (component,) = cls.of_padded(array, shapes, mesh).values
        key = id(component)
        _uneven[key] = weakref.ref(component, lambda _: _uneven.pop(key, None))
        return component

    @staticmethod
    def is_uneven(component: Any) -> bool:
        """Whether this came from `padded_bare`."""
        return id(component) in _uneven

    @classmethod
    def of_bare(cls, component: Any, mesh: ReplicaMesh) -> PerReplica:
        """The value whose only component here this is."""
        value = cls([component], mesh)
        known = _bare.get(id(component))
        if known is None or known[1] is not mesh:
            return value
        array = value.array()
        assert array is not None
        return cls.of_array(array, mesh)

    @property
    def count(self) -> int:
        """How many components there are, on all workers together."""
        return len(self.values) if self.mesh is None else self.mesh.size

    def _components(self, array: Any) -> tuple[Any, ...]:
        assert self.mesh is not None
        if np.shape(array)[:1] != (self.mesh.size,):  # what jax.tree.map made of the value: the same for all
            return (array,) * len(self.mesh.local_ids)
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
            return tuple(array[i] for i in range(self.mesh.size))
        with _private.at_once():
            return self.mesh.rows(array)


class Mirrored(_Value):
    """A value that is the same on every replica, with a copy on each replica's device."""

    __slots__ = ()

    def _join(self, parts: Sequence[Any]) -> jax.Array:
        assert self.mesh is not None
        return self.mesh.mirror(parts)

    def _join_traced(self, parts: Sequence[Any]) -> jax.Array:
        return jnp.asarray(parts[0])

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies of this process's replicas."""
        if self._parts is None:
            assert self.mesh is not None
            value = self._array if self._local is None else self._local
            if isinstance(value, jax.core.Tracer):
                return (value,) * self.mesh.size
            if not isinstance(value, jax.Array):
                return (value,) * len(self.mesh.local_ids)
            with _private.at_once():
                self._parts = self.mesh.copies(value)
        return self._parts

    def __jax_array__(self):
        return self._local if self._local is not None else self.values[0]


def _flatten(value: _Value):
    if value._local is not None:
        return (value._local,), ("local", value.mesh)
    array = value.array()
    return ((array,), ("array", value.mesh)) if array is not None else (value.values, (value.ragged, value.mesh))


def _unflatten(cls):
    def unflatten(aux, children):
        form, mesh = aux
        if isinstance(form, bool):
            return cls(children, mesh, ragged=form)
        return (cls.of_array if form == "array" else cls.of_local)(children[0], mesh)

    return unflatten


for _cls in (PerReplica, Mirrored):
    jax.tree_util.register_pytree_node(_cls, _flatten, _unflatten(_cls))


def own_component(leaf: Any) -> Any:
    """Inside of compiled replicas: this replica's component of a distributed value; another value as it is."""
    if not isinstance(leaf, (PerReplica, Mirrored)):
        return leaf
    return leaf._local if leaf._local is not None else jnp.stack(leaf.values)[jax.lax.axis_index(AXIS)]


def as_rows(copies: Any, mesh: ReplicaMesh) -> Any:
    """Inside of compiled code: one stacked array of the copies that the replicas' devices have of a value."""
    return mapped(lambda copy: copy[None], mesh, PartitionSpec(), PartitionSpec(AXIS))(copies)


def as_copies(rows: Any, mesh: ReplicaMesh) -> Any:
    """Inside of compiled code: the rows of a stacked array as copies of one that is called replicated.

    So a program hands out the only component of this process without a second program that takes its row.
    """
    return mapped(lambda row: row[0], mesh, PartitionSpec(AXIS), PartitionSpec())(rows)


def mapped(function: Callable[..., Any], mesh: ReplicaMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function of one replica's blocks, mapped over the replicas."""
    over_all = jax.shard_map(
        function, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
    )
    return jax.jit(over_all) if mesh.logical_axes else over_all  # over logical devices only the compiler spreads it


def arrays_of(nest: Any) -> list[Any]:
    """The arrays in a structure, whatever forms its values have: what a gradient tape may know them by."""
    found: list[Any] = []
    for leaf in _nest.leaves(nest):
        forms = [leaf]
        if isinstance(leaf, _Value):
            forms = [leaf._array, leaf._padded and leaf._padded[0], *(leaf._parts or ())]
        for form in forms:
            found += [form.values, form.indices] if isinstance(form, IndexedSlices) else [form]
    return [array for array in found if isinstance(array, jax.Array)]


def regroup(results: Sequence[Any], mesh: ReplicaMesh, merging: bool = False) -> Any:
    """One structure from each replica's: leaves become PerReplica, unless all replicas gave the very same object.

    Where they are put together to be merged, no array counts as the same in another process.
    """

    def group(values: Sequence[Any]) -> Any:
        alike = all(value is values[0] for value in values)
        if alike and not (merging and not mesh.all_local and isinstance(values[0], (*_ARRAYS, IndexedSlices))):
            return values[0]
        return PerReplica(values, mesh)

    return _nest.merge(results, group)


def select(replica: int, nest: Any) -> Any:
    """The structure as that replica (counted among the local ones) sees it: PerReplica leaves by their component."""
    return _nest.map_structure(lambda x: x.values[replica] if isinstance(x, (PerReplica, Mirrored)) else x, nest)
