"""Variables of several replicas: mirrored ones, and those that synchronize on read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax._base import array_conversion, errors
from replicax._base.thread_state import current
from replicax._base.types import Leaf, ReduceOp, Tree, VariableAggregation, VariableSynchronization
from replicax._collectives import arithmetic
from replicax._collectives.reducer import Reducer
from replicax._tracing import context, frames, lost_values
from replicax._values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    as_distributed,
)
from replicax._variables import assigned_alike, deferred_restore
from replicax._variables.assigned_alike import CopiesMayDiffer, MayDiffer
from replicax._variables.homes import Divided
from replicax._variables.layouts import LayoutsOf, paths_and_types
from replicax._variables.leaves import ARRAY, SCATTER, combine, convert_leaf, refuse_split
from replicax._variables.resource import ResourceVariable
from replicax._variables.storage import ComponentStorage, Leaves, MirroredStorage, StackedStorage
from replicax._variables.variable import Variable

_T = TypeVar("_T")
_NONE = VariableAggregation.NONE
_NOT_ADDED = ("scatter_update", "scatter_max", "scatter_min")  # methods that do nothing sensible with a sum of rows


class Replicas:
    """The replicas of a strategy.

    Args:
        strategy: the strategy.
        reducer: reduces their values.
    """

    def __init__(self, strategy: context.StrategyLike, reducer: Reducer):
        self.strategy, self.reducer, self.mesh = strategy, reducer, reducer.mesh

    def is_inside(self) -> bool:
        """Return True in a replica function of the strategy."""
        replica_context = context.get_replica_context()
        return replica_context is not None and replica_context.strategy is self.strategy

    def check_scope(self) -> None:
        """Raise `RuntimeError` in the scope of another strategy."""
        current = context.get_strategy()
        if context.has_strategy() and current is not self.strategy:
            raise errors.mixing(current, self.strategy)

    def meet(self, merge_fn: Callable[..., _T], method: str, value: Tree, tag: tuple[object, ...]) -> _T:
        """Meet the other replicas, in replica context, and call `merge_fn(strategy, method, value)` once for all."""
        replica_context = context.get_replica_context()
        assert replica_context is not None
        result: _T = replica_context._merge(merge_fn, (method, value), {}, tag)
        return result


class OfReplicas(Variable):
    """A variable of a strategy with replicas, which may combine the values that they assign."""

    _mesh: ReplicaMesh

    def __init__(self, *args: Any, strategy: context.StrategyLike, reducer: Reducer, **kwargs: Any):
        self._strategy, self._mesh, self._replicas = strategy, reducer.mesh, Replicas(strategy, reducer)
        super().__init__(*args, **kwargs)

    def _assign_parts(self, method: str, value: jax.Array) -> Tree:
        combines = self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if combines and self._synchronization is not VariableSynchronization.ON_READ and self._replicas.is_inside():
            raise NotImplementedError(
                f"{method} is not supported in replicas for a variable with the aggregation {self._aggregation}, which "
                f"would combine the parts that are not written too. Use scatter_add of {self.name}, or assign outside "
                "of `run`."
            )
        return self.assign(value)

    def _aggregate(self, method: str, value: Tree) -> Leaves:
        """Meet the other replicas, in replica context, and update with the aggregate of all their values."""
        if method in SCATTER:
            if method in _NOT_ADDED and self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
                raise NotImplementedError(
                    f"{method} is only supported for mirrored variable (variable created within certain "
                    "`tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` aggregation, got: "
                    f"{self._aggregation}."
                )
            value = self._signature.convert_rows(method, value)
        elif isinstance(value, (np.ndarray, np.number)) and frames.is_tracing():
            # Each replica has its own, such as its number of rows.
            value = lax.optimization_barrier(array_conversion.as_array(value))
        elif isinstance(value, SyncOnReadVariable):  # each replica has its own value, in one object for all
            value = value.value()
        return self._replicas.meet(self._merge, method, value, (method, self._name, id(self)))

    def _merge(self, strategy: context.StrategyLike, method: str, value: Tree) -> Leaves:
        """Aggregate the replicas' values, in cross-replica context, and write; return what each replica gets."""
        reducer, signature = self._replicas.reducer, self._signature
        # Without an aggregation all replicas assign the same.
        aggregation = VariableAggregation.ONLY_FIRST_REPLICA if self._aggregation is _NONE else self._aggregation
        if method in SCATTER:
            self._write(method, [reducer.aggregate(aggregation, value)])
            return []
        leaves = signature.flatten(value)
        if reducer.mesh.lone:  # a Python number is this replica's component, of the variable's dtype
            leaves = [
                convert_leaf(leaf, kind, self.name) if isinstance(leaf, int | float) else leaf
                for leaf, kind in zip(leaves, self._types)
            ]
        total = signature.unflatten([reducer.aggregate(aggregation, leaf) for leaf in leaves])
        self._write(method, signature.convert_components(method, total))
        return []  # each replica reads what was assigned


class DistributedVariable(OfReplicas, DistributedValues):
    """The base of mirrored and on-read variables, which have a component for each replica."""

    _storage: ComponentStorage
    _value_type: type[PerReplica] | type[Mirrored]
    _components: tuple[ResourceVariable, ...] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # A mirrored pytree may have counters, which replicas assign without their mean.
        types = self._types if len(self._types) == 1 or isinstance(self, SyncOnReadVariable) else []
        is_mean = self._aggregation is VariableAggregation.MEAN
        if is_mean and not all(jnp.issubdtype(kind.dtype, jnp.inexact) for kind in types):
            raise ValueError(
                "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not supported, "
                "please use a different aggregation or dtype"
            )

    @property
    def values(self) -> tuple[ResourceVariable, ...]:
        """The components of this process's replicas, as variables of their own."""
        if self._late is not False:
            deferred_restore.settle(self)
        if self._components is None:
            self._components = tuple(ResourceVariable.component(self, i) for i in range(len(self._mesh.local_ids)))
        return self._components

    _values = values  # libraries for TensorFlow use this private name

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        clone = super().__deepcopy__(memo)
        vars(clone).pop("_components", None)  # these are of this variable
        return clone

    def _as_distributed(self) -> PerReplica | Mirrored:
        """Return the components as a value."""
        return frames.frame().distributed(self, self._value_type)[0]

    def _write(self, method: str, leaves: list[Leaf]) -> Leaves:
        if method not in SCATTER:
            frame = frames.frame()
            leaves = [frame.in_form(self._storage, leaf, i) for i, leaf in enumerate(leaves)]
        return super()._write(method, leaves)

    def __repr__(self) -> str:
        lines, frame = [], frames.frame()
        for index, component in enumerate(self.values):
            with frames.lock, lost_values.explaining(self):
                traced = isinstance(frame, frames.TraceFrame)
                leaves = frame.read_component(self, index) if traced else self._storage.read_component(index)
                lines.append(f"  {index}: {self._signature.text(component.name, leaves)}")
        return f"{type(self).__name__}:{{\n" + ",\n".join(lines) + "\n}"

    __str__ = __repr__


class MirroredVariable(DistributedVariable):
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
        may_differ = self._copies_may_differ
        self._copies_must_agree = assigned_alike.refuses_different if may_differ is None else not may_differ

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
        self._replicas.check_scope()
        if not self._replicas.is_inside():
            if isinstance(value, MirroredVariable) and value._mesh is self._mesh and value._treedef == ARRAY:
                value = as_distributed(value)  # each copy stays on its device
            self._write(method, self._signature.convert_components(method, value))
            return self._signature.unflatten(frames.frame().distributed(self, Mirrored)) if read_value else None
        if self._aggregation is _NONE:
            self._write(method, self._signature.convert_components(method, value))
        else:
            self._aggregate(method, value)
        return self._signature.unflatten(self._get()) if read_value else None

    def _assign_alike(self, value: Tree) -> None:
        if not self._replicas.is_inside():
            return super()._assign_alike(value)
        self._replicas.check_scope()
        self._settle()
        self._write("assign", self._signature.convert_components("assign", value))


class SyncOnReadVariable(DistributedVariable):
    """A variable in which each replica has a value of its own, aggregated when it is read from outside."""

    _value_type = PerReplica

    def _new_storage(self, leaves: Leaves, lent: bool) -> StackedStorage:
        refuse_split(leaves, self.name)
        return StackedStorage(self.name, self._types, self._mesh, leaves, lent)

    def _read(self) -> Leaves:
        # In `tf.init_scope` of a traced replica it is the first one's.
        return frames.frame().read_component(self, 0) if self._replicas.is_inside() else self._aggregate_now()

    def _aggregate_now(self) -> Leaves:
        """Return the aggregate of the replicas' values, in cross-replica context."""
        frame, mesh, reducer, how = frames.frame(), self._mesh, self._replicas.reducer, self._aggregation
        op = None if how is VariableAggregation.ONLY_FIRST_REPLICA else ReduceOp.from_variable_aggregation(how)
        if frame.local and frame.mesh is mesh:
            leaves = frame.read(self)
            if op is None:
                return [arithmetic.first_replica(leaf) for leaf in leaves]
            for leaf in leaves:
                arithmetic.check_numeric(leaf.dtype)
            sums = [arithmetic.local_sum(leaf) for leaf in leaves]
            return [arithmetic.divided(x, mesh.size, x.dtype) for x in sums] if op is ReduceOp.MEAN else sums
        if isinstance(frame, frames.TraceFrame) and not frame.local:
            if op is None:
                return [leaf[0] for leaf in frame.read(self)]
            aggregate = jnp.sum if op is ReduceOp.SUM else jnp.mean
            return [aggregate(leaf, axis=0, dtype=leaf.dtype) for leaf in frame.read(self)]
        if self._storage.is_abstract:
            return self._storage.home.leaf_types(True)  # type: ignore[return-value]
        if op is None:
            self._storage.lent = True
            return [reducer.aggregate(how, value) for value in self._storage.values()]
        return [reducer.reduce(op, value) for value in self._storage.values()]

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        signature, sums = self._signature, self._aggregation is VariableAggregation.SUM
        self._replicas.check_scope()
        if method in SCATTER:
            raise NotImplementedError(f"Variables with `synchronization=ON_READ` doesn't support `{method}`")
        if self._replicas.is_inside():
            new = self._write(method, signature.convert_components(method, value))
            return signature.unflatten(new) if read_value else None
        if current.for_one_device:
            return signature.unflatten(self._update_total(method, signature.convert_first(value)))
        if isinstance(value, PerReplica):
            raise TypeError(
                f"{self.name} is assigned one value for all replicas outside of `run`, got a PerReplica value. Assign "
                "it in the replica function, where it is the replica's component."
            )
        if method != "assign" and sums:
            raise ValueError(
                f"SyncOnReadVariable does not support `{method}` in cross-replica context when aggregation is set "
                "to `tf.VariableAggregation.SUM`."
            )
        leaves = signature.convert_first(value)
        if method != "assign":
            leaves = combine(method, self._aggregate_now(), leaves)
        elif self._aggregation is _NONE:
            ReduceOp.from_variable_aggregation(_NONE)  # raises
        elif sums:
            leaves = [(leaf / self._mesh.size).astype(leaf.dtype) for leaf in leaves]
        self._write("assign", leaves)
        return signature.unflatten(self._aggregate_now()) if read_value else None

    def _update_total(self, method: str, leaves: Leaves) -> Leaves:
        """Update and return the variable's value, as if there were one replica."""
        with frames.lock:
            new = combine(method, self._aggregate_now(), leaves)
            rows = [frames.frame().in_form(self._storage, leaf, i) for i, leaf in enumerate(new)]
            if self._aggregation is VariableAggregation.SUM:  # the first replica has all of it
                rows = [leaf.at[1:].set(0) for leaf in rows]
            self._put(rows)
        return new
