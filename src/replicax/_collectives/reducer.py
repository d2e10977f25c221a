"""`Reducer`: reduces and gathers the replicas' values, whatever form they have and wherever the program is.

A value comes as `PerReplica` or `Mirrored`, as a variable, or as one plain value for all replicas. Where it comes from
decides how it is reduced:

| value | how |
|---|---|
| a replica's own, while a replica function is traced | a collective over the axis `replica` |
| rows of one stacked array | a sum over the rows, in the program that is traced or in one of its own |
| components, all of them in this process | added up, or by the cross-device operations |
| components of several processes | a program over all of them, after a comparison of shapes |

A strategy has one reducer, and gives it to its variables and to the contexts of its replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from replicax._base import nest
from replicax._base.array_conversion import as_array
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import CommunicationOptions, Leaf, ReduceOp, Tree, VariableAggregation, exact
from replicax._collectives import arithmetic, cross_device_ops, cross_process, in_flight, sharding
from replicax._collectives.arithmetic import Axis, Reducible, check_numeric, first_component, gather_axis
from replicax._collectives.cross_device_ops import (
    AllReduceCrossDeviceOps,
    CollectiveAllReduce,
    CrossDeviceOps,
    is_variable,
)
from replicax._collectives.sharding import Part, Value
from replicax._tracing import active_tapes, context, frames
from replicax._values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    adopted,
    as_distributed,
    as_rows,
    counted_form,
    global_array,
    is_array,
    is_mirrored,
    is_whole,
    mesh_of,
    of_array,
    of_traced,
    traced_component,
)


class Reducer:
    """Reduces and gathers values over the replicas of a mesh.

    Args:
        mesh: the replicas' devices.
        ops: the cross-device operations by which they are combined.
        options: of collectives for which none are given.
    """

    def __init__(self, mesh: ReplicaMesh, ops: CrossDeviceOps, options: CommunicationOptions | None = None):
        self.mesh, self._ops = mesh, ops
        self.options = CommunicationOptions() if options is None else options

    @property
    def ops(self) -> CrossDeviceOps:
        """The cross-device operations.

        Raises:
            TypeError: the user has given something else.
        """
        if not isinstance(self._ops, CrossDeviceOps):
            raise TypeError(
                f"cross_device_ops is a CrossDeviceOps such as NcclAllReduce(), got {self._ops!r} of type "
                f"{type(self._ops).__name__}."
            )
        return self._ops

    # In cross-replica context.

    def reduce(self, op: ReduceOp, value: Tree, axis: Axis | None = None) -> Tree:
        """Returns the sum or mean of each leaf of a nest, along `axis` of the components first if that is not None."""
        if value is None:  # more likely from a replica function without `return` than an empty structure
            return self._non_distributed(op, value)
        leaves = nest.values(value)
        totals = iter(self._leaves(op, leaves, axis))
        return nest.map_values(lambda _: next(totals), value)

    def gather(self, value: Leaf, axis: int) -> Leaf:
        """Returns the concatenation of the components along `axis`; a value that is not distributed as it is."""
        value = self._checked(ReduceOp.MEAN, value)
        if is_mirrored(value):
            of_variable = is_variable(value)
            value = self._components(value.values, value) if of_variable else PerReplica(value.values, self.mesh)
        if self.mesh.size == 1 and isinstance(value, PerReplica) and traced_component(value) is None:
            return value.values[0]
        return self._gathered(value, axis)

    def batch_reduce(
        self, op: ReduceOp, pairs: Sequence[tuple[Leaf, object]], options: CommunicationOptions | None
    ) -> list[Leaf]:
        """Returns the sum or mean of each value of several (value, destinations) pairs, where its destinations are."""
        results = [self._checked(op, value) for value, _ in pairs]
        batch = [i for i, value in enumerate(results) if isinstance(value, PerReplica)]
        for i, value in enumerate(results):
            if not isinstance(value, DistributedValues):
                results[i] = self._non_distributed(op, value)
        if batch:
            reduced = self._batch(op, [(results[i], pairs[i][1]) for i in batch], options or self.options)
            for i, result in zip(batch, reduced):
                results[i] = result
        return results

    def aggregate(self, aggregation: VariableAggregation, value: Leaf) -> Leaf:
        """Returns the aggregate of the values that the replicas assign to a variable."""
        value = self._own(value)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            if isinstance(value, PerReplica) and traced_component(value) is None and not self.mesh.all_local:
                return _first_anywhere(self.mesh, value)
            return first_component(value) if isinstance(value, PerReplica) else value
        op = ReduceOp.from_variable_aggregation(aggregation)
        if not isinstance(value, PerReplica):
            return self._non_distributed(op, value)
        if traced_component(value) is not None:
            # As eagerly, the user's own way to reduce has no part in it.
            ops = self._ops if isinstance(self._ops, AllReduceCrossDeviceOps) else CollectiveAllReduce()
            return ops._local_reduce(op, [traced_component(value)], self.mesh, exact(self.options))[0]
        return self._leaf(op, value, None)

    # For replica contexts: in a compiled replica, and for eager ones that have met.

    def reduce_local(self, op: ReduceOp, leaves: Sequence[Reducible], options: CommunicationOptions) -> list[Reducible]:
        """Returns the sums or means of one replica's leaves while its function is traced."""
        return self.ops._local_reduce(op, leaves, self.mesh, options)

    def reduce_to_parts(
        self, op: ReduceOp, leaves: Sequence[jax.Array], options: CommunicationOptions
    ) -> list[Reducible | Part]:
        """Does as `reduce_local`, but each replica gets only its part of what is cut (see `_collectives.sharding`)."""
        return self._scattering_ops._local_parts(op, leaves, self.mesh, options)

    def gather_parts(self, values: Sequence[Value], options: CommunicationOptions) -> list[jax.Array]:
        """Returns one replica's values while its function is traced, as whole arrays; parts are gathered from all."""
        return sharding.gathered(values, self._scattering_ops._packing(self.mesh, options))

    @property
    def _scattering_ops(self) -> AllReduceCrossDeviceOps:
        ops = self.ops
        assert isinstance(ops, AllReduceCrossDeviceOps)  # strategies refuse others where they are made
        return ops

    def all_reduce(self, op: ReduceOp, values: list[Leaf], options: CommunicationOptions) -> list[Leaf]:
        """Returns the results of `all_reduce` of eager replicas: one for each value that they passed."""
        own = [i for i, value in enumerate(values) if isinstance(value, PerReplica)]
        for i in own:
            parts = values[i].values
            arithmetic.check_arrays(parts)
            if is_array(parts[0]):
                for part in parts:
                    check_numeric(part.dtype)
                if self.mesh.all_local:  # else all workers' are compared
                    arithmetic.check_alike(parts)
        if self.mesh.size == 1:  # the only replica's values arrive bare
            return [arithmetic.reduce_parts(op, [value]) if is_array(value) else value for value in values]
        results = [_on_each_replica(self.mesh, value) for value in values]
        if own:
            pairs = [(values[i], values[i]) for i in own]
            for i, total in zip(own, self.ops.batch_reduce(op, pairs, options)):
                results[i] = _on_each_replica(self.mesh, total)
        return results

    def all_gather(self, values: Sequence[Leaf], axis: int) -> list[Leaf]:
        """Returns the results of `all_gather` of eager replicas: one for each value that they passed."""
        return [_on_each_replica(self.mesh, self._gathered(value, axis)) for value in values]

    def gather_sizes(self, size: PerReplica | int) -> list[int]:
        """Returns the numbers of all replicas, on all workers."""
        sizes: list[int] = list(size.values) if isinstance(size, PerReplica) else [size] * len(self.mesh.local_ids)
        return sizes if self.mesh.all_local else cross_process.gather_sizes(self.mesh, sizes)

    # One value, by its form.

    def _own(self, value: Leaf) -> Leaf:
        """Returns a plain value as this worker's component, if the worker has one replica of several."""
        mesh, value = self.mesh, adopted(value, self.mesh)
        if not mesh.lone or isinstance(value, DistributedValues):
            return value
        if isinstance(value, IndexedSlices):
            return PerReplica([value], mesh)
        return self._components([value], value)

    def _checked(self, op: ReduceOp, value: Leaf) -> Leaf:
        """Return a mirrored value or variable as it is, and others that are distributed as `PerReplica`.

        A variable whose copies may differ counts as `PerReplica` for a mean.

        Raises:
            AssertionError: the sum of a mirrored value.
        """
        if not isinstance(value, DistributedValues):
            return self._own(value)
        assert not (is_mirrored(value) and op is ReduceOp.SUM), (
            "The sum of a mirrored value is ambiguous: it is the same on every replica. Reduce a PerReplica value, or "
            "multiply by the number of replicas."
        )
        if not is_mirrored(value):
            return self._own(as_distributed(value))
        if getattr(value, "_copies_may_differ", None) is True and self.mesh.size > 1:
            return self._components(value.values, value)
        return value

    def _components(self, values: Sequence[Leaf], traced: Leaf) -> PerReplica:
        """Return a value with these components; in a trace, each replica's copy of `traced`."""
        if frames.frame().local:  # within compiled replicas
            return of_traced(PerReplica, as_array(_read(traced)), self.mesh)
        if frames.is_tracing():
            return of_array(PerReplica, as_rows(as_array(_read(traced)), self.mesh), self.mesh)
        return PerReplica([as_array(_read(value)) for value in values], self.mesh)

    def _non_distributed(self, op: ReduceOp, value: Leaf) -> Leaf:
        if self.mesh.size == 1:
            return value if isinstance(value, (jax.Array, IndexedSlices)) else as_array(value)
        if op is ReduceOp.MEAN:
            return value
        raise ValueError(f"A non-DistributedValues value {value!s} cannot be reduced with the given reduce op {op}.")

    def _leaves(self, op: ReduceOp, leaves: list[Leaf], axis: Axis | None) -> list[Leaf]:
        values = [self._checked(op, leaf) for leaf in leaves]
        together = [i for i, value in enumerate(values) if axis is None and self._takes_all_reduce(value)]
        if len(together) < 2 or not isinstance(self.ops, AllReduceCrossDeviceOps):
            return [self._leaf(op, value, axis) for value in values]
        pairs = [(values[i], values[i]) for i in together]
        totals = dict(zip(together, self.ops.batch_reduce(op, pairs, exact(self.options))))
        return [totals[i].values[0] if i in totals else self._leaf(op, value, axis) for i, value in enumerate(values)]

    def _takes_all_reduce(self, value: Leaf) -> bool:
        """Returns whether reducing this value, now, is a collective of the devices."""
        if not isinstance(value, PerReplica) or traced_component(value) is not None or frames.is_tracing():
            return False
        return is_whole(value) or (not self.mesh.all_local and all(is_array(part) for part in value.values))

    def _leaf(self, op: ReduceOp, value: Leaf, axis: Axis | None) -> Leaf:
        """Reduces one value that `_checked` has returned."""
        if not isinstance(value, DistributedValues):
            if axis is None:
                return self._non_distributed(op, value)
            return arithmetic.reduce_along(op, [as_array(_read(value))] * self.mesh.size, axis)
        if not isinstance(value, PerReplica):  # mirrored
            value = value.values[0]
            return value if axis is None else arithmetic.reduce_along(op, [_read(value)], axis)
        if traced_component(value) is not None:
            return self._local(op, traced_component(value), axis)
        if (counted := counted_form(value)) is not None and counted.shapes() is None:
            return arithmetic.reduce_rows(op, counted.array, counted.counts.array, axis)
        if is_whole(value) and (rows := global_array(value)) is not None:  # `jax.tree.map` may put anything else there
            return self._stacked(op, rows, axis)
        if self._spans_processes():
            if axis is None:
                return cross_process.reduced(op, value.values, self.mesh)
            return cross_process.reduced_along(op, value.values, axis, self.mesh)
        if axis is None:
            return arithmetic.reduce_parts(op, value.values)
        return arithmetic.reduce_along(op, value.values, axis)

    def _spans_processes(self) -> bool:
        """Returns whether a value's components here are of some of the replicas only."""
        return not self.mesh.all_local and not frames.is_tracing()

    def _local(self, op: ReduceOp, leaf: jax.Array, axis: Axis | None) -> jax.Array:
        """Reduces one replica's component while its function is traced."""
        count: int | jax.Array = self.mesh.size
        if axis is not None:
            own = arithmetic.count_along(leaf.shape, axis)
            uneven = frames.frame().gathers is not None
            count = arithmetic.local_sum(jnp.asarray(own, jnp.int32)) if uneven else count * own
            total = arithmetic.local_sum(arithmetic.reduce_along(ReduceOp.SUM, [leaf], axis))
        else:
            check_numeric(leaf.dtype)
            total = arithmetic.local_sum(leaf)
        return arithmetic.divided(total, count, leaf.dtype) if op is ReduceOp.MEAN else total

    def _stacked(self, op: ReduceOp, stacked: jax.Array, axis: Axis | None) -> jax.Array:
        """Reduces the rows of a stacked array."""
        mesh, traced = self.mesh, isinstance(stacked, jax.core.Tracer) or frames.is_tracing()
        row = jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
        check_numeric(row.dtype)
        axes: tuple[int, ...] = ()
        if axis is not None:  # checks the axis, and raises in the components' terms
            jax.eval_shape(lambda x: arithmetic.reduce_along(op, [x], axis), row)
            axes = tuple(a % len(row.shape) for a in arithmetic.axes_of(axis))
        if traced:
            total = arithmetic.sum_of_rows(stacked, axes)
        else:
            with in_flight.dispatching(mesh, "reduce", [stacked]) as call:
                call.output = total = _sum_of_rows(stacked, axes)
            total = active_tapes.renamed(total, mesh.copies(total)[0])
        count = stacked.shape[0] * arithmetic.count_along(row.shape, axes)
        return arithmetic.divided(total, count, row.dtype) if op is ReduceOp.MEAN else total

    def _gathered(self, value: Leaf, axis: int) -> Leaf:
        """Returns the concatenation of a distributed value's components; another value as it is."""
        if isinstance(value, Mirrored):
            value = PerReplica(value.values, mesh_of(value))
        if not isinstance(value, PerReplica):
            return value
        if traced_component(value) is not None:
            return arithmetic.local_gather(traced_component(value), axis)
        parts: list[jax.Array] = []
        for part in value.values:
            part = context.exchangeable(part, "gather", sparse=True)
            parts.append(part.to_dense() if isinstance(part, IndexedSlices) else part)
        axis = gather_axis(axis, parts[0].ndim)
        if self._spans_processes():
            parts = cross_process.all_parts(self.mesh, parts, axis)
        arithmetic.check_alike(parts, free_axis=axis)
        return jnp.concatenate(parts, axis)

    def _batch(self, op: ReduceOp, pairs: list[tuple[PerReplica, object]], options: CommunicationOptions) -> list[Leaf]:
        for _, destinations in pairs:
            cross_device_ops.check_destinations(destinations)
        arrays = [global_array(value) if is_whole(value) else None for value, _ in pairs]
        stacked = [array for array in arrays if isinstance(array, jax.core.Tracer)]
        if len(stacked) < len(pairs):
            return self.ops.batch_reduce(op, pairs, options)
        if isinstance(self.ops, AllReduceCrossDeviceOps):
            totals = [self._stacked(op, array, None) for array in stacked]
        else:
            totals = [first_component(total) for total in self.ops.batch_reduce(op, pairs, options)]
        return [
            of_array(Mirrored, total, self.mesh) if isinstance(pair[1], DistributedValues) else total
            for total, pair in zip(totals, pairs)
        ]


def _on_each_replica(mesh: ReplicaMesh, value: Leaf) -> Leaf:
    """Return a plain array as a `Mirrored` value; anything else as it is."""
    return of_array(Mirrored, mesh.mirror([value] * len(mesh.local_ids)), mesh) if is_array(value) else value


def _first_anywhere(mesh: ReplicaMesh, value: PerReplica) -> Leaf:
    """Return replica 0's component, which another worker may hold."""

    def first(part: Leaf) -> Leaf:
        if isinstance(part, IndexedSlices):
            return IndexedSlices(first(part.values), first(part.indices), part.dense_shape)
        return cross_process.from_first(mesh, as_array(part), "the first replica's value")

    return nest.map_structure(first, value.values[0])


_sum_of_rows = jax.jit(arithmetic.sum_of_rows, static_argnums=1)


def _read(value: Leaf) -> Leaf:
    return value.read_value() if is_variable(value) else value
