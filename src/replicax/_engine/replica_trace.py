"""One trace of a replica function: its context, the arguments that it is given, and what comes out of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Trace

from replicax._base import array_conversion, jax_internals, jaxprs, nest, tracebacks
from replicax._base.indexed_slices import IndexedSlices, dynamic_arrays
from replicax._base.messages import shown
from replicax._base.thread_state import optimizes_programs
from replicax._base.types import CommunicationOptions, Leaf, ReduceOp, Tree
from replicax._collectives import arithmetic
from replicax._collectives.arithmetic import Reducible
from replicax._collectives.reducer import Reducer
from replicax._collectives.sharding import Part
from replicax._passes import check_collectives, padded_rows, pipeline, uneven_replicas
from replicax._passes.facts import Facts, Parts, Stage
from replicax._passes.row_dims import Rows, Sizes
from replicax._tracing import context as _context
from replicax._tracing import frames
from replicax._tracing.context import ReplicaContext, StrategyLike
from replicax._tracing.protocols import State
from replicax._values import AXIS, Mirrored, PartRows, PerReplica, is_array, is_text, of_traced, own_component, part_of
from replicax._values.forms import Shape
from replicax._variables import assigned_alike

# A leaf of a variable: the variable's id, and the leaf's number.
LeafKey: TypeAlias = tuple[int, int]

_L = TypeVar("_L", bound=Reducible)
_R = TypeVar("_R", bound=Reducible | Part)


class SpmdContext(ReplicaContext):
    """The context of the replicas while their function is traced, once for all of them."""

    def __init__(
        self, strategy: StrategyLike, reducer: Reducer, level: frames.TraceFrame, outer: Sequence[Trace | None]
    ):
        super().__init__(strategy, None)
        self._reducer, self._level, self._outer = reducer, level, outer
        self._options = reducer.options
        self.has_ended = False
        self._axis_index: jax.Array | None = None
        self._common: dict[int, Leaf] = {}  # what merge functions returned, one value for all replicas

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        if self.has_ended:
            raise RuntimeError(
                "This replica context is of a compiled replica function, which has ended: its "
                "replica_id_in_sync_group is a value in that function alone. Return it from the function, or ask "
                "get_replica_context() anew."
            )
        if self._axis_index is None:
            with jex.set_current_trace(self._level.trace):
                self._axis_index = lax.axis_index(AXIS)
        return self._axis_index

    @property
    def devices(self) -> list[list[str]]:
        return [list(self._reducer.mesh.device_names)]

    def _total_size(self, size: int) -> int | jax.Array:
        alike = self._level.gathers is None and not self._level.pads_rows
        return size * self._reducer.mesh.size if alike else super()._total_size(size)

    def _is_own(self, leaf: Leaf) -> bool:
        """Returns whether a value was computed by the replica, rather than brought in from outside as one object."""
        if id(leaf) in self._common:
            return False
        if self._reducer.mesh.lone and isinstance(leaf, jax.Array):  # another worker's may be another
            return True
        return isinstance(leaf, jax.core.Tracer) and jax_internals.trace_of(leaf) not in self._outer

    def is_common(self, leaf: Leaf) -> bool:
        """Returns whether a value was computed by a merge function, as one for all replicas."""
        return id(leaf) in self._common

    def _merge(
        self, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree], tag: tuple[object, ...]
    ) -> Tree:
        mesh = self._reducer.mesh

        def wrap(leaf: Leaf) -> Leaf:
            if isinstance(leaf, IndexedSlices) or self._is_own(leaf):
                return of_traced(PerReplica, leaf, mesh)
            return leaf

        def unwrap(leaf: Leaf) -> Leaf:
            if self._is_own(leaf):
                self._common[id(leaf)] = leaf
            return own_component(leaf)

        args, kwargs = nest.map_structure(wrap, args), nest.map_structure(wrap, kwargs)
        with _context.entered(self._strategy, None):
            return nest.map_structure(unwrap, fn(self._strategy, *args, **kwargs))

    def _exchange(self, leaves: Sequence[_L], collective: Callable[[list[_L]], Sequence[_R]]) -> list[_L | _R]:
        """Applies the collective to the replica's own values; others count as one value for all."""
        own = [isinstance(leaf, IndexedSlices) or self._is_own(leaf) for leaf in leaves]
        exchanged = iter(collective([leaf for leaf, is_own in zip(leaves, own) if is_own]) if any(own) else ())
        return [next(exchanged) if is_own else lax.optimization_barrier(leaf) for leaf, is_own in zip(leaves, own)]

    def _all_reduce(self, op: ReduceOp, leaves: list[Reducible], options: CommunicationOptions) -> list[Reducible]:
        with jax.named_scope("all_reduce"):
            return self._exchange(leaves, lambda own: self._reducer.reduce_local(op, own, options))

    def _reduce_to_parts(
        self, op: ReduceOp, leaves: list[jax.Array], options: CommunicationOptions
    ) -> list[jax.Array | Part]:
        """Returns each replica's part of the sum or mean of the replicas' own values (see `sharding`)."""
        sums = self._exchange(leaves, lambda own: self._reducer.reduce_to_parts(op, own, options))
        return cast(list[jax.Array | Part], sums)  # sums of dense leaves are dense

    def _all_gather(self, leaves: list[jax.Array], axis: int, options: CommunicationOptions) -> list[jax.Array]:
        with jax.named_scope("all_gather"):
            return self._exchange(leaves, lambda own: [arithmetic.local_gather(leaf, axis) for leaf in own])


class Placeholder:
    """Stands for a distributed argument in the skeleton of the arguments."""

    def __init__(self, index: int):
        self.index = index


class NotStacked:
    """Stands for a distributed argument whose components are no arrays of one shape."""

    def __init__(self, value: PerReplica | Mirrored):
        self._value = value

    def component(self) -> Leaf:
        """Returns the only component that there is; raises `ValueError` where they differ."""
        parts = self._value.values
        if all(part is parts[0] for part in parts):
            return parts[0]
        raise not_compiled(self._value)


def not_compiled(value: PerReplica | Mirrored, why: str = "") -> ValueError:
    """Returns the error for an argument whose components no program can take."""
    kinds = [f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else shown(x) for x in value.values]
    got = ", ".join(f"replica {i}: {kind}" for i, kind in enumerate(kinds))
    return ValueError(
        "Compiled code has one program for all replicas, which cannot take components that are no arrays or, in this "
        f"function, that differ in shape or dtype{why}, got {got}. Run the function eagerly, or make the "
        "components alike."
    )


class TraceOutputs:
    """The results of a traced replica function: arrays to bring out, and what stays as it is.

    Attributes:
        result: what the function returned.
        leaves: the arrays that come out.
        common: for each of them, whether it is one value for all replicas.
        places: the places of the result's arrays among them, by id.
    """

    def __init__(self, result: Tree, context: SpmdContext):
        self.result, self._context = result, context
        self.leaves: list[jax.Array] = []
        self.common: list[bool] = []
        self.places: dict[int, int] = {}
        nest.map_structure(self._add, result)

    def _add(self, leaf: Leaf) -> None:
        if isinstance(leaf, (PerReplica, Mirrored)):
            raise TypeError(
                f"A compiled replica function returned a {type(leaf).__name__} value, which has a component for each "
                "replica already. Return the replica's own component, or make the value outside of `run`."
            )
        for value in dynamic_arrays(leaf) if isinstance(leaf, IndexedSlices) else (leaf,):
            if id(value) in self.places:
                continue
            if isinstance(value, (np.ndarray, np.number)) and not is_text(value):
                self._bring_out(value, lax.optimization_barrier(array_conversion.as_array(value)))
            elif self._context._is_own(value) or self._context.is_common(value):
                self._bring_out(value, value)

    def _bring_out(self, value: Leaf, array: jax.Array) -> None:
        self.places[id(value)] = len(self.leaves)
        self.leaves.append(array)
        self.common.append(self._context.is_common(value))


class ReplicaTrace:
    """The replica function, traced as those replicas run it whose arguments have some shapes.

    Args:
        strategy, reducer: of the replicas.
        fn: the replica function.
        skeleton: the arguments, with a `Placeholder` where a replica's own component belongs.
        shapes: for each of these, the shape that the component has; None where all replicas' are alike.
        gathers: where there are other traces, for replicas whose arguments have other shapes, how it gathers values.

    Attributes:
        level: what the function reads and writes of variables.
        written: the variables that it assigns.
        outputs: what it returned.
        sum_warning: the warning to give if the results are added up; None for none.
    """

    outputs: TraceOutputs
    _jaxpr: jex.ClosedJaxpr
    _differ: tuple[set[int], list[bool]]  # which slots and inputs may differ between replicas

    def __init__(
        self,
        strategy: StrategyLike,
        reducer: Reducer,
        fn: Callable[..., Tree],
        skeleton: Tree,
        shapes: Sequence[Shape | None],
        gathers: uneven_replicas.Gathers | None,
    ):
        self.level = frames.TraceFrame(local=True, mesh=reducer.mesh)
        self.level.gathers = gathers
        self._strategy, self._mesh = strategy, reducer.mesh
        self._fn, self._skeleton, self._shapes = fn, skeleton, shapes
        self._context = SpmdContext(strategy, reducer, self.level, outer_traces())
        self.written: list[State] = []
        self._count_rows: Callable[[Sequence[jax.Array]], int] = lambda components: 0
        self.sum_warning: str | None = None

    def set_rows(self, rows: PartRows | None, count_rows: Callable[[Sequence[jax.Array]], int]) -> None:
        """Set the rows of the parts, and the function that counts the rows of this replica in its components."""
        self._context._part_rows, self._count_rows = rows, count_rows

    def _components(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        return [row if shape is None else part_of(row, shape) for row, shape in zip(rows, self._shapes)]

    def take(self, rows: Sequence[jax.Array]) -> None:
        """Traces the function, in the surroundings that it runs in."""
        found = jax.tree_util.tree_leaves_with_path(self._skeleton, is_leaf=nest.is_leaf)
        paths = {leaf.index: path for path, leaf in found if isinstance(leaf, Placeholder)}
        function = jaxprs.named(self._function, self._fn, [paths[i] for i in sorted(paths)])
        self._jaxpr = jax.make_jaxpr(function)(*self._components(rows))

    def _function(self, *components: jax.Array) -> list[jax.Array]:
        self.level.trace = frames.untaped_trace()

        def fill(leaf: Leaf) -> Leaf:
            if isinstance(leaf, Placeholder):
                return components[leaf.index]
            return leaf.component() if isinstance(leaf, NotStacked) else leaf

        args, kwargs = nest.map_structure(fill, self._skeleton)
        self._context._own_rows = self._count_rows(components)
        try:
            with _context.entered(self._strategy, self._context), frames.entered(self.level):
                with jax.named_scope(f"replica/{jaxprs.identifier(self._fn)}"):
                    result = self._fn(*args, **kwargs)
                self.outputs = TraceOutputs(result, self._context)
                self.written.extend(self.level.written.values())
        finally:
            self._context.has_ended = True
        new_values = [leaf for variable in self.written for leaf in self.level.values[id(variable)]]
        return [*self.outputs.leaves, *new_values, *self.level.shared_leaves]

    def check(self, varying_inputs: list[bool], varying: set[LeafKey], must_agree: bool) -> None:
        """Refuses collectives that some replicas may not reach and, with `must_agree`, assigned values that differ."""
        inputs = self.level.inputs.items()
        slots = {slot for key, slots in inputs for i, slot in enumerate(slots) if (key, i) in varying}
        self._differ = slots, varying_inputs
        differ = check_collectives.check(self._jaxpr, varying_inputs, slots, must_agree or bool(self.level.shared))
        check_collectives.check_shared(self.level, self._jaxpr, differ)
        if must_agree and not check_collectives.has_groups(self._jaxpr):
            refuse_different(self.written, differ[len(self.outputs.leaves) :])
        self._warn_of_whole_batch(varying_inputs, slots)

    def _warn_of_whole_batch(self, varying_inputs: list[bool], varying_slots: set[int]) -> None:
        """Warn if all replicas compute the same of a batch that was not distributed, and add that up."""
        arguments = nest.leaves(self._skeleton)
        batch = [leaf for leaf in arguments if is_array(leaf) and leaf.shape[:1] > (1,)]
        if self._mesh.size == 1 or not batch or any(isinstance(leaf, Placeholder) for leaf in arguments):
            return
        reduced, copies = check_collectives.reduces_copies(self._jaxpr, varying_inputs, varying_slots, batch)
        warning = whole_batch_warning(self._fn, batch, self._mesh.size)
        if reduced:
            tracebacks.warn(warning)
        elif any(copies[: len(self.outputs.leaves)]):
            self.sum_warning = warning

    def serve_any_rows(
        self,
        other: ReplicaTrace,
        alone: ReplicaTrace,
        sizes: Sizes,
        rows: Sequence[jax.Array],
        between: Callable[[], ReplicaTrace],
    ) -> list[Rows]:
        """Has the trace compute any number of rows, by comparison with traces for others.

        The number of rows that count is its last operand from now on.

        Args:
            other, alone: the traces for another number, and for a single row.
            sizes: the numbers of rows of this and of `other`.
            rows: the components, as for `take`.
            between: returns the trace for `sizes.between`; called if the others do not tell what few rows are.

        Returns:
            For each output of the jaxpr, which of its axes are of rows.
        """
        closed = self._jaxpr
        unforeseen: list[Sizes] = []

        def compared(other: ReplicaTrace, sizes: Sizes) -> jex.ClosedJaxpr:
            inputs = [item for trace in (self, other, alone) for item in trace.level.inputs.items()]
            evaluated = functools.partial(
                padded_rows.evaluated,
                closed,
                other=other._jaxpr,
                alone=alone._jaxpr,
                sizes=sizes,
                variables={slot: (key, i) for key, slots in inputs for i, slot in enumerate(slots)},
                unforeseen=lambda: unforeseen.append(sizes),
            )
            return jax.make_jaxpr(lambda *args: evaluated(*args[:-1], count=args[-1]))(*rows, jnp.zeros((), jnp.int32))

        for_any = compared(other, sizes)
        if unforeseen:
            compared(between(), sizes.between)  # or it is refused
        self._jaxpr = for_any
        self._shapes = [*self._shapes, None]
        return padded_rows.rows_of_outputs(closed, other._jaxpr, sizes)

    def replayed(
        self, known: dict[LeafKey, jax.Array], rows: Sequence[jax.Array], cut: Mapping[LeafKey, int]
    ) -> tuple[list[jax.Array], dict[int, list[jax.Array]]]:
        """Returns the arrays that come out, and the new leaves of each variable, by its id.

        Args:
            known: the leaves of the variables.
            rows: the components, those of other shapes padded.
            cut: the leaves of which a part is known, and is to come out, with its axis.
        """
        jaxpr, slots = frames.with_arguments(self._jaxpr)
        leaf_of = {slot: (key, i) for key, of_leaves in self.level.inputs.items() for i, slot in enumerate(of_leaves)}
        leaves = [leaf_of[slot] for slot in slots]
        facts = Facts(
            Stage.REPLICA,
            self._mesh.platform,
            optimizes_programs(),
            mesh=self._mesh,
            parts=self._parts(leaves, cut) if cut else None,
            is_branch=self.level.gathers is not None,
        )
        arguments = [*(known[leaf] for leaf in leaves), *self._components(rows)]
        found = pipeline.evaluate(jaxpr, facts, arguments)
        frames.note_passes((facts.stage, name) for name in facts.applied)
        new_values = iter(found[len(self.outputs.leaves) :])
        return found, {id(v): [next(new_values) for _ in self.level.values[id(v)]] for v in self.written}

    def _parts(self, leaves: Sequence[LeafKey], cut: Mapping[LeafKey, int]) -> Parts:
        """Return the parts among the arguments, which begin with these leaves of variables, and among the results."""
        slots, inputs_differ = self._differ
        storages = [self.level.variables[key]._storage for key, _ in leaves]
        written = [(v, i) for v in self.written for i in range(len(self.level.values[id(v)]))]
        results = dict(enumerate(written, len(self.outputs.leaves)))
        return Parts(
            arguments={place: cut[leaf] for place, leaf in enumerate(leaves) if leaf in cut},
            results={place: cut[id(v), i] for place, (v, i) in results.items() if (id(v), i) in cut},
            argument_layouts={
                place: storage.home.device_layout(i) for place, (storage, (_, i)) in enumerate(zip(storages, leaves))
            },
            result_layouts={place: v._storage.home.device_layout(i) for place, (v, i) in results.items()},
            differ=[*(self.level.inputs[key][i] in slots for key, i in leaves), *inputs_differ],
        )


def whole_batch_warning(fn: Callable[..., Tree], batch: Sequence[Leaf], replicas: int) -> str:
    """Return the warning for arrays that every replica gets whole."""
    shapes = ", ".join(str(tuple(array.shape)) for array in batch)
    return (
        f"{shown(fn)} gets arrays of shapes {shapes} that were not distributed: each of the {replicas} replicas "
        "computes the same from all of the rows, and the results are reduced as if they came from different rows. Pass "
        "batches from `strategy.experimental_distribute_dataset(dataset)`, which gives each replica a part."
    )


def refuse_different(written: Iterable[State], differ: Iterable[bool], found: str = "") -> None:
    """Raises `ValueError` where replicas assign different values to a variable that has one value for all."""
    flags = iter(differ)
    for variable in written:
        own = [next(flags) for _ in variable._types]
        if any(own) and variable._equal_by_contract:
            raise assigned_alike.error(variable, found)


def outer_traces() -> list[Trace | None]:
    """Returns the traces that were in progress when the replicas were entered."""
    traces = [level.trace for level in frames.levels()]
    trace = frames.untaped_trace()
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces
