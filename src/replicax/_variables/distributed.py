"""Variables of several replicas: mirrored ones, and those that synchronize on read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax._base import array_conversion, errors, nest
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.thread_state import current
from replicax._base.types import Leaf, ReduceOp, Tree, VariableAggregation, VariableSynchronization
from replicax._collectives import arithmetic
from replicax._collectives.reducer import Reducer
from replicax._tracing import context, frames
from replicax._values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    global_array,
    is_whole,
    mesh_of,
    traced_component,
)
from replicax._variables import assigned_alike, deferred_restore
from replicax._variables.as_leaves import ARRAY, convert_leaf, refuse_split
from replicax._variables.assigned_alike import CopiesMayDiffer, MayDiffer
from replicax._variables.combine import combined
from replicax._variables.homes import Converted, Divided
from replicax._variables.layouts import LayoutsOf, paths_and_types
from replicax._variables.resource import ResourceVariable
from replicax._variables.storage import ComponentStorage, Leaves, MirroredStorage, StackedStorage
from replicax._variables.variable import Variable

_T = TypeVar("_T")
_NONE = VariableAggregation.NONE


class OfReplicas(Variable):
    """A variable of a strategy with replicas, which may combine what they assign."""

    _mesh: ReplicaMesh

    def __init__(self, *args: Any, strategy: context.StrategyLike, reducer: Reducer, **kwargs: Any):
        self._strategy, self._reducer, self._mesh = strategy, reducer, reducer.mesh
        super().__init__(*args, **kwargs)

    def _in_own_replica(self) -> bool:
        replica_context = context.get_replica_context()
        return replica_context is not None and replica_context.strategy is self._strategy

    def _check_strategy(self) -> None:
        current = context.get_strategy()
        if context.has_strategy() and current is not self._strategy:
            raise errors.mixing(current, self._strategy)

    def _assign_parts(self, method: str, value: jax.Array) -> Tree:
        combines = self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if combines and self._synchronization is not VariableSynchronization.ON_READ and self._in_own_replica():
            raise NotImplementedError(
                f"{method} is not supported in replicas for a variable with the aggregation {self._aggregation}, which "
                f"would combine the parts that are not written too. Use scatter_add of {self.name}, or assign outside "
                "of `run`."
            )
        return super()._assign_parts(method, value)

    def _merged(self, merge_fn: Callable[..., _T], method: str, value: Tree) -> _T:
        """Meets the other replicas, in replica context, and calls `merge_fn(strategy, method, value)` for all."""
        replica_context = context.get_replica_context()
        assert replica_context is not None
        result: _T = replica_context._merge(merge_fn, (method, value), {}, (method, self._name, id(self)))
        return result

    def _whole_leaves(self, value: Tree) -> Leaves:
        """Returns one value for all replicas as leaves, the first component of what is distributed."""
        return self._as_leaves(
            value.value() if isinstance(value, Variable) else nest.map_structure(arithmetic.first_component, value)
        )

    def _update_aggregated(self, method: str, value: Tree) -> Leaves:
        """Meets the other replicas, in replica context, and assigns what all replicas' values come to."""
        if isinstance(value, (np.ndarray, np.number)) and frames.is_tracing():
            # Each replica's own, such as its number of rows.
            value = lax.optimization_barrier(array_conversion.as_array(value))
        return self._merged(self._merge_update, method, value)

    def _merge_update(self, strategy: context.StrategyLike, method: str, value: Tree) -> Leaves:
        """Reduces the replicas' values, in cross-replica context, and updates every component."""
        leaves = [value] if self._treedef == ARRAY else jax.tree.leaves(value, is_leaf=nest.is_leaf)
        if self._reducer.mesh.lone:  # a Python number is this replica's component, of the variable's dtype
            leaves = [
                convert_leaf(x, t, self.name) if isinstance(x, int | float) else x for x, t in zip(leaves, self._types)
            ]
        # Without an aggregation it comes here where all assign the same.
        aggregation = VariableAggregation.ONLY_FIRST_REPLICA if self._aggregation is _NONE else self._aggregation
        combined = [self._reducer.aggregate(aggregation, leaf) for leaf in leaves]
        converted = [
            leaf if isinstance(leaf, (PerReplica, Mirrored)) else convert_leaf(leaf, kind, self.name)
            for leaf, kind in zip(combined, self._types)
        ]
        self._apply(method, converted)
        return []  # what was assigned is read by each replica

    def _apply(self, method: str, leaves: Sequence[Converted]) -> Leaves:
        """Combines the values of the current frame with these, writes and returns them."""
        raise NotImplementedError


class _Distributed(OfReplicas, DistributedValues):
    """The base of mirrored and on-read variables, which have a component for each replica."""

    _storage: ComponentStorage
    _value_type: type[PerReplica] | type[Mirrored]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        kind = self._types[0].dtype if len(self._types) == 1 else None
        if kind is not None and self._aggregation is VariableAggregation.MEAN and not jnp.issubdtype(kind, jnp.inexact):
            raise ValueError(
                "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not supported, "
                "please use a different aggregation or dtype"
            )
        self._components: tuple[ResourceVariable, ...] | None = None

    @property
    def values(self) -> tuple[ResourceVariable, ...]:
        """The components of this process's replicas, as variables of their own."""
        if self._late is not False:
            deferred_restore.settle(self)
        if self._components is None:
            replicas = range(len(self._mesh.local_ids))
            self._components = tuple(ResourceVariable._component(self, replica) for replica in replicas)
        return self._components

    @property
    def _values(self) -> tuple[ResourceVariable, ...]:
        """The same: libraries for TensorFlow use this private name."""
        return self.values

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        clone = super().__deepcopy__(memo)
        assert isinstance(clone, _Distributed)
        clone._components = None
        return clone

    def _as_distributed(self) -> PerReplica | Mirrored:
        """Returns the components as a value."""
        return frames.frame().distributed(self, self._value_type)[0]

    def _apply(self, method: str, leaves: Sequence[Converted]) -> Leaves:
        frame = frames.frame()
        formed = [frame.in_form(self._storage, leaf, i) for i, leaf in enumerate(leaves)]
        with frames.lock:
            new = self._combined(method, formed)
            self._put(new)
        return new

    def _result(self) -> Tree:
        """Returns what was assigned, as a value; in a merge function of compiled replicas it is a mirrored one."""
        frame = frames.frame()
        return self._of_leaves(frame.distributed(self, Mirrored if frame.local else self._value_type))

    def __repr__(self) -> str:
        show = []
        for index, component in enumerate(self.values):
            frame = frames.frame()
            with frames.lock:
                leaves = (
                    component._get() if isinstance(frame, frames.TraceFrame) else self._storage.read_component(index)
                )
            show.append(f"  {index}: {self._text_of(component.name, leaves)}")
        return f"{type(self).__name__}:{{\n" + ",\n".join(show) + "\n}"

    __str__ = __repr__


class MirroredVariable(_Distributed):
    """A variable with a copy on each replica's device, written on all of them; or with a part of it on each.

    `layouts` returns how its leaves are split over a replica's devices, and `divided` how else a leaf is divided among
    the replicas. Copies that may differ are not divided.
    """

    _storage: MirroredStorage
    _value_type = Mirrored
    _is_mirrored = True

    def __init__(self, *args: Any, layouts: LayoutsOf | None = None, divided: Divided | None = None, **kwargs: Any):
        self._layouts_of, self._divided = layouts, divided
        super().__init__(*args, **kwargs)
        self._synchronization = VariableSynchronization.ON_WRITE
        self._copies_must_agree = assigned_alike.is_required(self._copies_may_differ)

    @property
    def _can_be_divided(self) -> bool:
        """True if each replica may have a part of it: its copies need not differ."""
        may_differ: CopiesMayDiffer = self._copies_may_differ
        return not may_differ or may_differ is MayDiffer.UNLESS_DIVIDED

    @property
    def _equal_by_contract(self) -> bool:
        return self._aggregation is _NONE and (self._copies_must_agree or self._storage.home.is_cut)

    def _abstract_storage(self) -> MirroredStorage:
        assert self._strategy is not None
        division = self._strategy.extended._division
        storage = self._storage
        return storage.abstract(storage.home.divided_by(division if self._can_be_divided else None))

    def _read(self) -> Leaves:
        frame = frames.frame()
        if frame.local and frame.mesh is not self._mesh:
            return self._storage.read_component(0)
        return frame.read_one(self)

    def _new_storage(self, leaves: Leaves, lent: bool) -> MirroredStorage:
        layouts: Sequence[PartitionSpec | None] = [None] * len(self._types)
        if self._layouts_of is not None:
            layouts = self._layouts_of(self._name, paths_and_types(self._treedef, self._types))
        if not self._can_be_divided:
            assigned_alike.refuse_cut(leaves, self._mesh, self.name)
        divided = self._divided if self._can_be_divided else None
        return MirroredStorage(self.name, self._types, self._mesh, leaves, lent, layouts, divided)

    def _take_from_host(self, arrays: list[np.ndarray]) -> None:
        if not self._mesh.all_local and self._storage.home.layouts is None:
            return super()._take_from_host(arrays)
        self._storage.write(self._storage.home.of_host(arrays))

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        self._check_strategy()
        if self._in_own_replica():
            if self._aggregation is _NONE:
                new = self._apply(method, self._convert(value))
            else:
                # An on-read variable's value is this replica's own, and not one object for all.
                self._update_aggregated(method, value.value() if isinstance(value, SyncOnReadVariable) else value)
                new = self._get()
            return self._of_leaves(new) if read_value else None
        self._apply(method, self._spread_tree(value))
        return self._result() if read_value else None

    def _assign_alike(self, value: Tree) -> None:
        if not self._in_own_replica():
            return super()._assign_alike(value)
        self._check_strategy()
        self._be_settled()
        self._apply("assign", self._convert(value))

    def _spread_tree(self, value: Tree) -> list[Converted]:
        """Returns the converted leaves of a value whose pytree may have distributed leaves."""
        if isinstance(value, Variable):
            if isinstance(value, MirroredVariable) and value._mesh is self._mesh and value._treedef == ARRAY:
                value = value._as_distributed()
            else:
                value = value.value()
        leaves, tree = [value], ARRAY
        if self._treedef != ARRAY:
            leaves, tree = jax.tree.flatten(value, is_leaf=nest.is_leaf)
        self._check_structure(tree)
        return [self._converted(leaf, kind) for leaf, kind in zip(leaves, self._types)]

    def _converted(self, leaf: Leaf, kind: jax.ShapeDtypeStruct) -> Converted:
        """Returns a leaf of the variable's shape and dtype; a distributed value if its components have them."""
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return convert_leaf(leaf, kind, self.name)
        whole = traced_component(leaf)
        rows = whole is None and isinstance(leaf, PerReplica)
        if whole is None and is_whole(leaf):
            whole = global_array(leaf)
        if whole is None:
            converted = [convert_leaf(part, kind, self.name) for part in leaf.values]
            return type(leaf)(converted, mesh_of(leaf))
        shape, dtype = whole.shape[1:] if rows else whole.shape, whole.dtype
        if shape != kind.shape or dtype != kind.dtype:
            raise ValueError(
                f"Cannot assign value to variable ' {self.name}': its shape is {kind.shape} and its dtype "
                f"{kind.dtype}, the components of the assigned {type(leaf).__name__} value have shape {shape} and "
                f"dtype {dtype}."
            )
        return leaf

    def _update_slices(self, method: str, slices: IndexedSlices) -> Tree:
        self._check_strategy()
        if self._in_own_replica():
            if self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN) and method in (
                "scatter_update",
                "scatter_max",
                "scatter_min",
            ):
                raise NotImplementedError(
                    f"{method} is only supported for mirrored variable (variable created within certain "
                    "`tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` aggregation, got: "
                    f"{self._aggregation}."
                )
            if self._aggregation is not _NONE:
                self._merged(self._merge_slices, method, slices)
                return self._get()[0]
            return self._scatter_here(method, slices)
        self._scatter_here(method, slices)
        return self._result()

    def _merge_slices(self, strategy: context.StrategyLike, method: str, slices: Tree) -> None:
        self._scatter_here(method, self._reducer.aggregate(self._aggregation, slices))


class SyncOnReadVariable(_Distributed):
    """A variable in which each replica has a value of its own, aggregated when it is read from outside."""

    _value_type = PerReplica

    def _new_storage(self, leaves: Leaves, lent: bool) -> StackedStorage:
        refuse_split(leaves, self.name)
        return StackedStorage(self.name, self._types, self._mesh, leaves, lent)

    def _read(self) -> Leaves:
        if self._in_own_replica():
            return frames.frame().read_component(self, 0)  # in `tf.init_scope` of a traced replica, the first one's
        return self._aggregated()

    def _aggregated(self) -> Leaves:
        frame, mesh = frames.frame(), self._mesh
        first_only = self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA
        op = None if first_only else ReduceOp.from_variable_aggregation(self._aggregation)
        if frame.local and frame.mesh is mesh:
            leaves = frame.read(self)
            if op is None:
                return [arithmetic.first_replica(leaf) for leaf in leaves]
            for leaf in leaves:
                arithmetic.check_numeric(leaf.dtype)
            sums = [arithmetic.local_sum(leaf) for leaf in leaves]
            return [arithmetic.divided(x, mesh.size, x.dtype) for x in sums] if op is ReduceOp.MEAN else sums
        if isinstance(frame, frames.TraceFrame) and not frame.local:
            leaves = frame.read(self)
            if op is None:
                return [leaf[0] for leaf in leaves]
            return [(jnp.sum if op is ReduceOp.SUM else jnp.mean)(x, axis=0, dtype=x.dtype) for x in leaves]
        if self._storage.is_abstract:
            return self._storage.home.leaf_types(True)  # type: ignore[return-value]
        if op is None:
            self._storage.lent = True
            return [self._reducer.aggregate(self._aggregation, value) for value in self._storage.values()]
        return [self._reducer.reduce(op, value) for value in self._storage.values()]

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        self._check_strategy()
        if self._in_own_replica():
            new = self._apply(method, self._convert(value))
            return self._of_leaves(new) if read_value else None
        if current.for_one_device:
            return self._of_leaves(self._update_total(method, self._whole_leaves(value)))
        if isinstance(value, PerReplica):
            raise TypeError(
                f"{self.name} is assigned one value for all replicas outside of `run`, got a PerReplica value. Assign "
                "it in the replica function, where it is the replica's component."
            )
        given = self._whole_leaves(value)
        if method == "assign":
            if self._aggregation is _NONE:
                ReduceOp.from_variable_aggregation(_NONE)  # which it refuses
            if self._aggregation is VariableAggregation.SUM:
                given = [(leaf / self._mesh.size).astype(leaf.dtype) for leaf in given]
            self._apply("assign", given)
        else:
            if self._aggregation is VariableAggregation.SUM:
                raise ValueError(
                    f"SyncOnReadVariable does not support `{method}` in cross-replica context when aggregation is set "
                    "to `tf.VariableAggregation.SUM`."
                )
            self._apply("assign", combined(method, self._aggregated(), given))
        return self._of_leaves(self._aggregated()) if read_value else None

    def _update_total(self, method: str, given: Leaves) -> Leaves:
        """Update and return the variable's value, as if there were one replica."""
        frame = frames.frame()
        with frames.lock:
            new = combined(method, self._aggregated(), given)
            rows = [frame.in_form(self._storage, leaf, i) for i, leaf in enumerate(new)]
            if self._aggregation is VariableAggregation.SUM:  # the first replica has all of it
                rows = [leaf.at[1:].set(0) for leaf in rows]
            self._put(rows)
        return new

    def _convert_slices(self, method: str, slices: IndexedSlices) -> IndexedSlices:
        raise NotImplementedError(f"Variables with `synchronization=ON_READ` doesn't support `{method}`")
