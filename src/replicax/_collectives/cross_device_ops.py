"""How values are combined over the replicas' devices, and what choice there is in it.

XLA picks the algorithm of an all-reduce (ring, tree, NCCL's own) by itself. What is left to choose is how many
all-reduces there are and what each carries, and whether to reduce on one device in place of all:

| class | compiled program | eager |
|---|---|---|
| (none given) | small tensors of one dtype share all-reduces, as suits the devices | the same program, run at once |
| `NcclAllReduce(num_packs)` | `num_packs` all-reduces; 0: one a tensor | the same |
| `HierarchicalCopyAllReduce(num_packs)` | sums within halves of the replicas, then across them | the same |
| `ReductionToOneDevice` | every replica gathers all and adds them up | added up on one device, then copied |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeGuard

import jax
from jax.sharding import PartitionSpec

from replicax._base import devices, jax_internals, nest
from replicax._base.array_conversion import as_array
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.messages import received
from replicax._base.thread_state import optimizes_programs
from replicax._base.types import CommunicationOptions, Leaf, ReduceOp, as_integer, as_options
from replicax._collectives import arithmetic, cross_process, in_flight, sharding
from replicax._collectives.all_reduce import Packing, all_reduce, packing_for
from replicax._collectives.arithmetic import Reducible
from replicax._values import (
    AXIS,
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    as_distributed,
    components_of,
    global_array,
    is_whole,
    mapped,
    mesh_of,
    of_array,
    of_traced,
    traced_component,
)

_DESTINATIONS = "destinations must be one of a `DistributedValues` object, a tf.Variable object, or a device string."


class VariableLike(Protocol):
    """A variable, as far as what stands below variables needs it."""

    def read_value(self) -> Leaf: ...


def is_variable(value: object) -> TypeGuard[VariableLike]:
    """Returns whether `value` is a `Variable`; known by a mark, since variables stand above this module."""
    return bool(getattr(value, "_replicax_variable", False))


def placed(value: Leaf, destinations: object) -> Leaf:
    """Returns `value` where `destinations` is: mirrored for a distributed value or variable, else on its device."""
    mesh = mesh_of(destinations)
    if isinstance(value, jax.core.Tracer):
        local = mesh is not None and isinstance(destinations, DistributedValues)
        return of_traced(Mirrored, value, mesh) if local else value
    if isinstance(value, IndexedSlices):
        if not isinstance(destinations, DistributedValues):
            return value
        return Mirrored([IndexedSlices(value.values, value.indices, value.dense_shape) for _ in destinations.values])
    if isinstance(destinations, DistributedValues):
        if isinstance(mesh, ReplicaMesh):
            return of_array(Mirrored, mesh.mirror([value] * len(mesh.local_ids)), mesh)
        return Mirrored((value,) * len(destinations.values))
    if isinstance(destinations, str):
        device = devices.find_device(destinations)
    elif is_variable(destinations):
        device = next(iter(destinations.read_value().devices()))
    elif isinstance(destinations, jax.Array):
        device = next(iter(destinations.devices()))
    else:
        raise ValueError(f"{_DESTINATIONS} Got {received(destinations)}.")
    return jax_internals.uncommitted(jax.device_put(value, device))


class CrossDeviceOps:
    """The base of the ways to combine the replicas' values. To make one of your own, implement
    `reduce_implementation` and `batch_reduce_implementation`, and give an instance to `MirroredStrategy`.

    >>> import replicax as rx
    >>> class Largest(rx.CrossDeviceOps):
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         return self.broadcast(max(per_replica_value.values), destinations)
    ...     def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
    ...         return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]
    >>> Largest().reduce(rx.ReduceOp.SUM, rx.PerReplica([1.0, 5.0]), "CPU:0").item()
    5.0
    """

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Leaf,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Leaf:
        """Returns the sum or mean of the components, placed at the destinations.

        Args:
            reduce_op: a `ReduceOp`; names are not taken here.
            per_replica_value: a `PerReplica`; anything else counts as one replica's.
            destinations: a variable or distributed value (the result is `Mirrored` on its devices), or a
                device's name or an array (the result is a plain array there).
            options: see `CommunicationOptions`.

        Raises:
            ValueError: `reduce_op` is no `ReduceOp`, or `destinations` is none of these.

        >>> import numpy as np, replicax as rx
        >>> value = rx.PerReplica([np.float32(1), np.float32(5)])
        >>> rx.NcclAllReduce().reduce(rx.ReduceOp.MEAN, value, "GPU:0").item()
        3.0
        """
        _check_op(reduce_op)
        check_destinations(destinations)
        value = _as_per_replica(per_replica_value)
        return self.reduce_implementation(reduce_op, value, destinations, as_options(options, CommunicationOptions()))

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Leaf, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Leaf]:
        """Reduces a list of pairs (value, destinations) together; returns a list of the results. See `reduce`.

        >>> import numpy as np, replicax as rx
        >>> one, other = rx.PerReplica([np.float32(1), np.float32(5)]), rx.PerReplica([np.float32(2), np.float32(2)])
        >>> pairs = [(one, "GPU:0"), (other, "GPU:1")]
        >>> [total.item() for total in rx.NcclAllReduce().batch_reduce(rx.ReduceOp.SUM, pairs)]
        [6.0, 4.0]
        """
        _check_op(reduce_op)
        if not isinstance(value_destination_pairs, (list, tuple)) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in value_destination_pairs
        ):
            raise ValueError("Each element of `value_destination_pairs` should be a tuple.")
        pairs = [(_as_per_replica(value), destinations) for value, destinations in value_destination_pairs]
        for _, destinations in pairs:
            check_destinations(destinations)
        options = as_options(options, CommunicationOptions())
        return self.batch_reduce_implementation(reduce_op, pairs, options) if pairs else []

    def broadcast(self, tensor: Leaf, destinations: object) -> Leaf:
        """Returns a copy of `tensor` at the destinations; raises `ValueError` if they are None.

        >>> import replicax as rx
        >>> rx.NcclAllReduce().broadcast(3.0, "GPU:1").item()
        3.0
        """
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CommunicationOptions
    ) -> Leaf:
        """Does as `reduce`, with arguments that are checked; for subclasses to implement.

        >>> import replicax as rx
        >>> class Largest(rx.CrossDeviceOps):
        ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        ...         return max(per_replica_value.values)
        >>> Largest().reduce(rx.ReduceOp.SUM, rx.PerReplica([1.0, 5.0]), "CPU:0")
        5.0
        """
        raise NotImplementedError("_reduce method must be implemented in descendants.")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[Leaf]:
        """Does as `batch_reduce`, with arguments that are checked; for subclasses to implement.

        >>> import replicax as rx
        >>> class Largest(rx.CrossDeviceOps):
        ...     def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        ...         return [max(value.values) for value, _ in value_destination_pairs]
        >>> Largest().batch_reduce(rx.ReduceOp.SUM, [(rx.PerReplica([1.0, 5.0]), "CPU:0")])
        [5.0]
        """
        raise NotImplementedError("batch_reduce_implementation method must be implemented in descendants.")

    def broadcast_implementation(self, tensor: Leaf, destinations: object) -> Leaf:
        """Does as `broadcast`, with arguments that are checked; subclasses may implement it.

        >>> import replicax as rx
        >>> class OnHost(rx.CrossDeviceOps):
        ...     def broadcast_implementation(self, tensor, destinations):
        ...         return tensor
        >>> OnHost().broadcast(3.0, "GPU:1")
        3.0
        """
        return placed(as_array(tensor), destinations)

    def _local_reduce(
        self, op: ReduceOp, leaves: Sequence[Reducible], mesh: ReplicaMesh, options: CommunicationOptions
    ) -> list[Reducible]:
        """Returns one replica's leaves combined with the others', while a replica function is traced."""
        values = [of_traced(PerReplica, leaf, mesh) for leaf in leaves]
        results = self.batch_reduce(op, [(value, value) for value in values], options)
        return [result if traced_component(result) is None else traced_component(result) for result in results]


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Combines by all-reduce: every replica has the result at once."""

    _name = "All-reduce"  # as errors call it
    _halves = False  # whether within halves of the replicas first

    def __init__(self, num_packs: int = 1):
        if as_integer("num_packs", num_packs) < 0:
            raise ValueError(f"{self._name} requires num_packs >= 0, but {num_packs} is specified")
        self._num_packs = num_packs
        self._programs: dict[Hashable, Callable[..., Sequence[jax.Array]]] = {}

    def _packing(self, mesh: ReplicaMesh, options: CommunicationOptions) -> Packing:
        return packing_for(mesh, self._num_packs, options.bytes_per_pack, self._halves)

    def _local_reduce(
        self, op: ReduceOp, leaves: Sequence[Reducible], mesh: ReplicaMesh, options: CommunicationOptions
    ) -> list[Reducible]:
        add_up = functools.partial(all_reduce, packing=self._packing(mesh, options))
        return arithmetic.local_reduce(op, leaves, mesh.size, add_up, options.reduction_dtype)

    def _local_parts(
        self, op: ReduceOp, leaves: Sequence[jax.Array], mesh: ReplicaMesh, options: CommunicationOptions
    ) -> list[Reducible | sharding.Part]:
        """Does as `_local_reduce`, but each replica gets only its part of what is cut (see `_collectives.sharding`)."""

        def scatter(block: jax.Array) -> jax.Array:
            return sharding.scattered(block, 0, mesh)[0]

        def add_up(sent: list[jax.Array]) -> list[jax.Array]:
            return sharding.sums(sent, mesh.size, self._packing(mesh, options), scatter)

        cut = [i for i, leaf in enumerate(leaves) if sharding.is_cut(leaf, mesh.size)]
        others = [i for i in range(len(leaves)) if i not in cut]
        large, small = [leaves[i] for i in cut], [leaves[i] for i in others]
        parts = arithmetic.reduce_dense(op, large, mesh.size, add_up, options.reduction_dtype)
        results: dict[int, Reducible | sharding.Part] = dict(zip(others, self._local_reduce(op, small, mesh, options)))
        results |= {i: sharding.Part(part, leaves[i].shape) for i, part in zip(cut, parts)}
        return [results[i] for i in range(len(leaves))]

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CommunicationOptions
    ) -> Leaf:
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[Leaf]:
        values = [value for value, _ in value_destination_pairs]
        meshes = {mesh_of(value) for value in values}
        mesh = meshes.pop()
        totals: Sequence[Mirrored | Reducible]
        if mesh is not None and traced_component(values[0]) is not None:
            totals = self._local_reduce(reduce_op, [traced_component(value) for value in values], mesh, options)
        elif not meshes and mesh is not None and self._in_step(values, mesh):
            totals = self._run(reduce_op, values, mesh, options)
        elif mesh is None or mesh.all_local:
            narrow = options.reduction_dtype
            totals = [arithmetic.reduce_parts(reduce_op, value.values, narrow=narrow) for value in values]
        else:
            totals = [cross_process.reduced(reduce_op, value.values, mesh) for value in values]
        return [_placed_total(total, pair[1]) for total, pair in zip(totals, value_destination_pairs)]

    @staticmethod
    def _in_step(values: list[PerReplica], mesh: ReplicaMesh) -> bool:
        """Returns whether all values have a global form, in other processes as well."""
        parts = [value.values for value in values if not is_whole(value)]
        if not mesh.all_local and parts and not any(isinstance(part[0], IndexedSlices) for part in parts):
            cross_process.agree(mesh, "all_reduce", *parts)
        return all(global_array(v) is not None if is_whole(v) else components_of(v).is_uniform() for v in values)

    def _run(
        self, op: ReduceOp, values: list[PerReplica], mesh: ReplicaMesh, options: CommunicationOptions
    ) -> list[Mirrored]:
        """Runs the compiled program at once; returns mirrored results."""
        stacked = tuple(is_whole(value) or not mesh.lone for value in values)  # a lone component goes in as it is
        arrays = []
        for value, rows in zip(values, stacked):
            array = global_array(value) if rows else cross_process.given(mesh, value.values)
            assert array is not None, value  # `_in_step` has seen to it
            arrays.append(array)
        key = (op, mesh, options.bytes_per_pack, options.reduction_dtype, stacked, optimizes_programs())
        if key not in self._programs:

            def program(*blocks: jax.Array) -> tuple[Reducible, ...]:
                own = [block[0] if rows else block for block, rows in zip(blocks, stacked)]
                return tuple(self._local_reduce(op, own, mesh, options))

            specs = tuple(PartitionSpec(AXIS) if rows else PartitionSpec() for rows in stacked)
            self._programs[key] = jax.jit(mapped(program, mesh, specs, PartitionSpec()))
        shapes = in_flight.shapes((x.dtype, x.shape[1:] if rows else x.shape) for x, rows in zip(arrays, stacked))
        with in_flight.dispatching(mesh, f"all_reduce({shapes})") as call:
            totals = self._programs[key](*arrays)
            call.output = totals[0]
        return [of_array(Mirrored, total, mesh) for total in totals]


def _placed_total(total: Leaf, destinations: object) -> Leaf:
    if isinstance(total, Mirrored):
        if isinstance(destinations, DistributedValues):
            return total
        total = total.values[0]
    return placed(total, destinations)


class CollectiveAllReduce(AllReduceCrossDeviceOps):
    """What strategies use where no other is given: in messages that suit the devices."""


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduce in a chosen number of packs. On GPUs XLA uses NCCL; elsewhere the devices' own collectives.

    Args:
        num_packs: how many all-reduces the tensors of one dtype are put into; 0 leaves each tensor its own.

    Raises:
        ValueError: `num_packs` is negative.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], cross_device_ops=rx.NcclAllReduce(num_packs=2))
    >>> numbers = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    >>> int(strategy.reduce("SUM", numbers, axis=None))
    1
    """

    _name = "NCCL all-reduce"


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """All-reduce in two stages: within each half of the replicas, then between the halves.

    It helps where devices within a half are better connected than the halves are. With an odd number of
    replicas, or fewer than four, there is one stage.

    Args:
        num_packs: as in `NcclAllReduce`.

    Raises:
        ValueError: `num_packs` is negative.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(4)], rx.HierarchicalCopyAllReduce())
    >>> numbers = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    >>> int(strategy.reduce("SUM", numbers, axis=None))
    6
    """

    _name = "HierarchicalCopy"
    _halves = True


class ReductionToOneDevice(CrossDeviceOps):
    """Adds up on one device and copies the result to all.

    Compiled code has no reduction to one device: there every replica gathers all components and adds them up.

    Args:
        reduce_to_device: the device's name; by default the first of the destinations.
        accumulation_fn: takes the list of the components and returns their combination; by default their sum.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], rx.ReductionToOneDevice("CPU:0"))
    >>> numbers = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    >>> int(strategy.reduce("SUM", numbers, axis=None))
    1
    """

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None
    ):
        self._device = reduce_to_device
        self._accumulate = accumulation_fn or arithmetic.add

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CommunicationOptions
    ) -> Leaf:
        mesh, own = mesh_of(per_replica_value), traced_component(per_replica_value)
        if mesh is not None and own is not None:
            return placed(self._local_reduce(reduce_op, [own], mesh, options)[0], destinations)
        parts: Sequence[Leaf] = per_replica_value.values
        if self._device is not None and not isinstance(parts[0], IndexedSlices):
            device = devices.find_device(self._device)
            parts = [jax.device_put(as_array(part), device) for part in parts]
        total = arithmetic.reduce_parts(
            reduce_op, parts, lambda values: self._accumulate(list(values)), options.reduction_dtype
        )
        return placed(total, destinations)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[Leaf]:
        return [
            self.reduce_implementation(reduce_op, value, where, options) for value, where in value_destination_pairs
        ]

    def _local_reduce(
        self, op: ReduceOp, leaves: Sequence[Reducible], mesh: ReplicaMesh, options: CommunicationOptions
    ) -> list[Reducible]:
        def add_up(dense: list[jax.Array]) -> list[jax.Array]:
            gathered = [arithmetic.local_gather(leaf[None], 0) for leaf in dense]
            return [self._accumulate([parts[i] for i in range(mesh.size)]) for parts in gathered]

        return arithmetic.local_reduce(op, leaves, mesh.size, add_up, options.reduction_dtype)


def _check_op(reduce_op: object) -> None:
    if not isinstance(reduce_op, ReduceOp):
        raise ValueError("`reduce_op` must be Reduce.SUM or Reduce.MEAN.")


def check_destinations(destinations: object) -> None:
    """Raises `ValueError` where there are none."""
    if destinations is None:
        raise ValueError(_DESTINATIONS)


def _as_per_replica(value: Leaf) -> PerReplica:
    if isinstance(value, DistributedValues):
        value = as_distributed(value)
    if isinstance(value, Mirrored):  # each copy is a component
        own, mesh = traced_component(value), mesh_of(value)
        return PerReplica(value.values, mesh) if own is None else of_traced(PerReplica, own, mesh)
    if isinstance(value, PerReplica):
        return value
    if isinstance(value, (IndexedSlices, nest.LeafBase)):
        return PerReplica((value,))
    return PerReplica((as_array(value),))
