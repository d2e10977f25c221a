"""Running a replica function compiled: traced once, whatever the number of replicas.

The function is traced to a jaxpr in the surroundings that `jax.shard_map` gives it, where its values are one
replica's components and `psum` over the axis `replica` meets the others. What it reads and writes of variables turns
out meanwhile (see `_tracing.frames`). Then `shard_map` runs that jaxpr over the mesh, with the variables' values among
its inputs and outputs.

`check_vma=False` matters: with it on, JAX sums gradients of replicated inputs over the replicas by itself, while
users of this API expect each replica's own gradient and reduce it themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax._base import jax_internals, nest, profiling, signatures
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import CommunicationOptions, ReduceOp
from replicax._collectives import arithmetic
from replicax._collectives.reducer import Reducer
from replicax._engine.outputs import Outputs, Results
from replicax._passes import check_collectives, cpu_convolutions, uneven_replicas
from replicax._tracing import active_tapes, frames
from replicax._tracing import context as _context
from replicax._tracing.context import ReplicaContext, StrategyLike
from replicax._tracing.dataset_reads import RunEagerly, lifts
from replicax._values import (
    AXIS,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    global_array,
    mapped,
    of_traced,
    own_component,
    padded_form,
    part_of,
    traced_component,
)
from replicax._variables import assigned_alike

_STACKED, _MIRRORED = PartitionSpec(AXIS), PartitionSpec()


class SpmdContext(ReplicaContext):
    """The context of the replicas while their function is traced, once for all of them."""

    def __init__(self, strategy: StrategyLike, reducer: Reducer, level: frames.TraceFrame, outer: Any):
        super().__init__(strategy, None)
        self._reducer, self._level, self._outer = reducer, level, outer
        self._options = reducer.options
        self.has_ended = False
        self._common: dict[int, Any] = {}  # what merge functions returned, one value for all replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        if self.has_ended:
            raise RuntimeError(
                "This replica context is of a compiled replica function, which has ended: its "
                "replica_id_in_sync_group is a value in that function alone. Return it from the function, or ask "
                "get_replica_context() anew."
            )
        if self._replica_id is None:
            with frames.jax_trace(self._level.trace):
                self._replica_id = lax.axis_index(AXIS)
        return self._replica_id

    @property
    def devices(self) -> Any:
        return [list(self._reducer.mesh.device_names)]

    def _is_own(self, leaf: Any) -> bool:
        """Returns whether a value was computed by the replica, rather than brought in from outside as one object."""
        if id(leaf) in self._common:
            return False
        if self._reducer.mesh.lone and isinstance(leaf, jax.Array):  # another worker's may be another
            return True
        if not isinstance(leaf, jax.core.Tracer):
            return False
        return jax_internals.trace_of(leaf) not in self._outer

    def is_common(self, leaf: Any) -> bool:
        """Returns whether a value was computed by a merge function, as one for all replicas."""
        return id(leaf) in self._common

    def _merge(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tag: tuple[Any, ...]
    ) -> Any:
        mesh = self._reducer.mesh

        def wrap(leaf: Any) -> Any:
            if isinstance(leaf, IndexedSlices) or self._is_own(leaf):
                return of_traced(PerReplica, leaf, mesh)
            return leaf

        def unwrap(leaf: Any) -> Any:
            if self._is_own(leaf):
                self._common[id(leaf)] = leaf
            return own_component(leaf)

        args, kwargs = nest.map_structure(wrap, args), nest.map_structure(wrap, kwargs)
        with _context.entered(self._strategy, None):
            return nest.map_structure(unwrap, fn(self._strategy, *args, **kwargs))

    def _exchange(self, leaves: list[Any], collective: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Applies the collective to the replica's own values; others count as one value for all."""
        own = [i for i, leaf in enumerate(leaves) if isinstance(leaf, IndexedSlices) or self._is_own(leaf)]
        results = [leaf if i in own else lax.optimization_barrier(leaf) for i, leaf in enumerate(leaves)]
        for i, result in zip(own, collective([leaves[i] for i in own]) if own else ()):
            results[i] = result
        return results

    def _all_reduce(self, op: ReduceOp, leaves: list[Any], options: CommunicationOptions) -> list[Any]:
        with jax.named_scope("all_reduce"):
            return self._exchange(leaves, lambda own: self._reducer.reduce_local(op, own, options))

    def _reduce_to_parts(self, op: ReduceOp, leaves: list[Any], options: CommunicationOptions) -> list[Any]:
        """Returns each replica's part of the sum or mean of the replicas' own values (see `sharding`)."""
        return self._exchange(leaves, lambda own: self._reducer.reduce_to_parts(op, own, options))

    def _all_gather(self, leaves: list[Any], axis: int, options: CommunicationOptions) -> list[Any]:
        with jax.named_scope("all_gather"):
            return self._exchange(leaves, lambda own: [arithmetic.local_gather(leaf, axis) for leaf in own])


class _Trace:
    """The replica function, traced as those replicas run it whose arguments have some shapes.

    Args:
        skeleton: the arguments, with a `_Place` where a replica's own component belongs.
        kind: for each place, the shape that the component has; None where all replicas' are alike.
        gathers: where there are other traces, for replicas whose arguments have other shapes, how it gathers values.
    """

    def __init__(
        self, strategy: StrategyLike, reducer: Reducer, fn: Callable, skeleton: Any, kind: tuple, gathers: Any
    ):
        self.level = frames.TraceFrame(local=True, mesh=reducer.mesh)
        self.level.gathers = gathers
        self._strategy, self._mesh = strategy, reducer.mesh
        self._fn, self._skeleton, self._kind = fn, skeleton, kind
        self._context = SpmdContext(strategy, reducer, self.level, _outer_traces())
        self.outputs: Any = None
        self.written: list[Any] = []  # variables
        self._jaxpr: Any = None

    def _components(self, rows: Sequence[Any]) -> list[Any]:
        return [row if shape is None else part_of(row, shape) for row, shape in zip(rows, self._kind)]

    def take(self, rows: Sequence[Any]) -> None:
        """Traces the function, in the surroundings that it runs in."""
        function = signatures.named(self._function, self._fn, _paths(self._skeleton))
        self._jaxpr = jax.make_jaxpr(function)(*self._components(rows))

    def _function(self, *components: Any) -> list[Any]:
        self.level.trace = frames.untaped_trace()

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return components[leaf.index]
            return leaf.component(self._context) if isinstance(leaf, _Parts) else leaf

        own_args, own_kwargs = nest.map_structure(fill, self._skeleton)
        try:
            with _context.entered(self._strategy, self._context), frames.entered(self.level):
                with jax.named_scope(f"replica/{profiling.identifier(self._fn)}"):
                    result = self._fn(*own_args, **own_kwargs)
                self.outputs = Outputs(result, self._context)
                self.written.extend(self.level.written.values())
                self.new_values = [leaf for variable in self.written for leaf in self.level.values[id(variable)]]
        finally:
            self._context.has_ended = True
        return [*self.outputs.leaves, *self.new_values, *self.level.shared_leaves]

    def check(self, varying_inputs: list[bool], varying: set[tuple[int, int]], told: bool) -> None:
        """Refuses collectives that some replicas may not come to and, if `told`, values that should not differ."""
        inputs = self.level.inputs.items()
        slots = {slot for key, slots in inputs for i, slot in enumerate(slots) if (key, i) in varying}
        differ = check_collectives.check(self._jaxpr, varying_inputs, slots, told or bool(self.level.shared))
        check_collectives.check_shared(self.level, self._jaxpr, differ)
        if told and not check_collectives.has_groups(self._jaxpr):
            _refuse_different(self.written, differ[len(self.outputs.leaves) :])

    def replayed(
        self, known: dict[tuple[int, int], Any], rows: Sequence[Any]
    ) -> tuple[list[Any], dict[int, list[Any]]]:
        """Returns the arrays that come out, and the new leaves of each variable.

        Args:
            known: the leaves of the variables, by the variable's id and their number.
            rows: the components, those of other shapes padded.
        """
        supplied = {slot: known[key, i] for key, slots in self.level.inputs.items() for i, slot in enumerate(slots)}
        evaluate = None
        if self.level.gathers is not None:
            on_cpu = self._mesh.devices[0].platform == "cpu"
            others = {"conv_general_dilated": cpu_convolutions.in_order} if on_cpu else {}
            evaluate = functools.partial(uneven_replicas.unwrapped, others=others)
        found = self.level.replay(self._jaxpr, supplied, *self._components(rows), evaluate=evaluate)
        new_values = iter(found[len(self.outputs.leaves) :])
        return found, {id(v): [next(new_values) for _ in self.level.values[id(v)]] for v in self.written}


class _Inputs:
    """The distributed values among the arguments of a call, as arrays that go into its program.

    `skeleton` are the arguments with a `_Place` for each of them. The replicas' parts may be of several `kinds`, which
    are the shapes that a part of each value has (None where all parts are alike); `which` tells each replica's kind.
    """

    def __init__(self, mesh: ReplicaMesh, arguments: Any):
        self.values: list[Any] = []
        self.arrays: list[Any] = []
        self._shapes: list[Any] = []  # of all parts of each value, None where they are alike
        self.skeleton = nest.map_structure(self._split_off, arguments)
        by_replica = [tuple(each and each[i] for each in self._shapes) for i in range(mesh.size)]
        self.kinds = list(dict.fromkeys(by_replica))
        self.which = [self.kinds.index(kind) for kind in by_replica]
        self.stacked = [isinstance(value, PerReplica) for value in self.values]

    def _split_off(self, leaf: Any) -> Any:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return leaf
        array = global_array(leaf)
        padded = padded_form(leaf) if array is None and isinstance(leaf, PerReplica) else None
        if array is None and padded is None:
            return _Parts(leaf)
        self.values.append(leaf)
        self.arrays.append(array if padded is None else padded.array)
        self._shapes.append(None if padded is None else padded.shapes)
        return _Place(len(self.values) - 1)

    def rows(self, blocks: Sequence[Any]) -> list[Any]:
        """Returns a replica's own components, where `blocks` are its blocks of the arrays."""
        return [block[0] if stacked else block for block, stacked in zip(blocks, self.stacked)]

    def refusal(self, error: uneven_replicas.NotAlike) -> BaseException:
        """Returns the exception to raise where parts that are not alike cannot be compiled."""
        if lifts.stack:
            return RunEagerly()
        return _not_compiled(next(v for v, each in zip(self.values, self._shapes) if each), f" ({error})")


class _State:
    """The variables that the traces read and write: `reads` names the leaves that go in, with their `values`."""

    def __init__(self, traces: Sequence[_Trace]):
        level, frame = traces[0].level, frames.frame()
        variables = {key: trace.level.variables[key] for trace in traces for key in trace.level.inputs}
        for variable in variables.values():
            frames.warn_of_constant(variable.name)
        self.written = {id(variable): variable for trace in traces for variable in trace.written}
        if any(len(trace.written) < len(self.written) for trace in traces):
            variables.update(self.written)  # what one trace leaves as it is
        current = {key: active_tapes.on_read(variable, frame.read(variable)) for key, variable in variables.items()}
        self.reads = [(key, i) for key, leaves in current.items() for i in range(len(leaves))]
        self.values = [current[key][i] for key, i in self.reads]
        self.stacked = [_rows(level, variables[key], i) for key, i in self.reads]
        written = [(v, i) for v in self.written.values() for i in range(len(v._storage.leaf_types(True)))]
        self.stacked_after = [_rows(level, variable, i) for variable, i in written]

    def write(self, new: Sequence[Any]) -> None:
        """Replaces what is written by these leaves."""
        leaves = iter(new)
        for variable in self.written.values():
            frames.frame().write(variable, [next(leaves) for _ in variable._storage.leaf_types(True)])


def run(
    strategy: StrategyLike,
    reducer: Reducer,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    alike: bool = True,
) -> Any:
    """Runs `fn` on all replicas as part of the program that is being traced, and puts the results together.

    Where the parts of an argument differ in shape, `fn` is traced once for each shape, see `uneven_replicas`. With
    `alike` replicas may not assign different values to variables whose copies must stay equal.
    """
    mesh = reducer.mesh
    frames.frame().note_replicas(mesh)
    inputs = _Inputs(mesh, (args, kwargs))
    try:
        traces = _traces(strategy, reducer, fn, inputs)
    except uneven_replicas.NotAlike as error:
        raise inputs.refusal(error) from error
    state = _State(traces)
    varying = {read for read, stacked in zip(state.reads, state.stacked) if stacked}
    told = alike and mesh.size > 1 and any(variable._equal_by_contract for variable in state.written.values())
    for trace in traces:
        trace.check(inputs.stacked, varying, told)

    def program(values: Sequence[Any], blocks: Sequence[Any]) -> list[Any]:
        own = [value[0] if stacked else value for value, stacked in zip(values, state.stacked)]
        functions = [functools.partial(results.of, trace, state.reads) for trace in traces]
        if len(traces) == 1:
            found = functions[0](*own, *inputs.rows(blocks))
        else:
            mine = jnp.asarray(np.array(inputs.which, np.int32))[lax.axis_index(AXIS)]
            found, same = uneven_replicas.together(functions, mine, [*own, *inputs.rows(blocks)])
            if told:
                differ = [not each for each in same[len(results.common) :]]
                _refuse_different(state.written.values(), differ, ": those whose batches have other shapes differ")
        return [x[None] if stacked else x for x, stacked in zip(found, out_stacked)]

    try:
        results = Results(traces, inputs.which, state.written)
        out_stacked = [*(not same for same in results.common), *state.stacked_after]
        in_specs = _specs_of(state.stacked), _specs_of(inputs.stacked)
        found = mapped(program, mesh, in_specs, _specs_of(out_stacked))(state.values, inputs.arrays)
        result = results.restored(found[: len(results.common)], mesh)
    except uneven_replicas.NotAlike as error:
        raise inputs.refusal(error) from error
    state.write(found[len(results.common) :])
    for trace in traces:
        trace.level.values.clear()
        trace.level.shared.clear()
    return result


def run_inline(
    strategy: StrategyLike, reducer: Reducer, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `fn` in a merge function of compiled replicas, where it goes on as the replica; returns its result."""
    level = frames.frame()
    assert isinstance(level, frames.TraceFrame)
    outer = [trace for trace in _outer_traces() if trace is not level.trace]
    context = SpmdContext(strategy, reducer, level, outer)

    def inside(leaf: Any) -> Any:
        component = traced_component(leaf)
        return leaf if component is None else component

    args, kwargs = nest.map_structure(inside, args), nest.map_structure(inside, kwargs)
    with _context.entered(strategy, context):
        result = fn(*args, **kwargs)
    return nest.map_structure(
        lambda leaf: of_traced(PerReplica, leaf, reducer.mesh) if context._is_own(leaf) else leaf, result
    )


def _traces(strategy: StrategyLike, reducer: Reducer, fn: Callable, inputs: _Inputs) -> list[_Trace]:
    """Returns the traces of `fn`, one for each kind of parts."""
    several = len(inputs.kinds) > 1

    def traced(known: Any) -> list[_Trace]:
        traces = [
            _Trace(strategy, reducer, fn, inputs.skeleton, kind, uneven_replicas.Gathers(known) if several else None)
            for kind in inputs.kinds
        ]

        # This shard_map only lends its surroundings to the tracing of the function.
        def surroundings(*blocks: Any) -> Any:
            for trace in traces:
                trace.take(inputs.rows(blocks))
            return jnp.zeros(())

        jax.eval_shape(mapped(surroundings, reducer.mesh, tuple(_specs_of(inputs.stacked)), _MIRRORED), *inputs.arrays)
        return traces

    return _settled(traced([]), inputs.which, traced) if several else traced([])


def _specs_of(stacked: Sequence[bool]) -> list[Any]:
    return [_STACKED if each else _MIRRORED for each in stacked]


def _refuse_different(written: Iterable[Any], differ: Sequence[bool], found: str = "") -> None:
    """Raises `ValueError` where replicas assign different values to a variable that has one value for all."""
    flags = iter(differ)
    for variable in written:
        own = [next(flags) for _ in variable._types]
        if any(own) and variable._equal_by_contract:
            raise assigned_alike.error(variable, found)


def _rows(level: frames.TraceFrame, variable: Any, index: int) -> bool:
    """Returns whether the level sees one row of this leaf, whose global form has one for each replica."""
    return variable._storage.has_rows(index) and level.is_local(variable)


def _outer_traces() -> list[Any]:
    """Returns the traces that were in progress when the replicas were entered."""
    traces = [frame.trace for frame in frames._frames.stack if isinstance(frame, frames.TraceFrame)]
    trace = frames.untaped_trace()
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def _settled(traces: list[_Trace], which: Sequence[int], traced: Callable[[Any], list[_Trace]]) -> list[_Trace]:
    """Traces that know the shapes of what all replicas gather."""
    known: Any = []
    for _ in range(4):  # what is gathered may come from what was gathered before
        gathers = [trace.level.gathers for trace in traces]
        found = uneven_replicas.gathered(gathers, which)
        alike = all(len(set(shapes)) == 1 for shapes in found) and not any(one.guessed for one in gathers)
        if found == known or (not known and alike):
            return traces
        known = found
        traces = traced(known)
    raise uneven_replicas.NotAlike("the shapes of what they gather depend on each other")


class _Place:
    """Stands for a distributed argument in the skeleton of the arguments."""

    def __init__(self, index: int):
        self.index = index


def _paths(skeleton: Any) -> list[Any]:
    """Returns where each `_Place` stands in the arguments."""
    leaves = jax.tree_util.tree_leaves_with_path(skeleton, is_leaf=nest.is_leaf)
    return [path for path, _ in sorted(((p, x.index) for p, x in leaves if isinstance(x, _Place)), key=lambda y: y[1])]


class _Parts:
    """Stands for a distributed argument whose components are no arrays of one shape."""

    def __init__(self, value: Any):
        self.value = value

    def component(self, context: SpmdContext) -> Any:
        parts = self.value.values
        if all(part is parts[0] for part in parts):
            return parts[0]
        raise _not_compiled(self.value)


def _not_compiled(value: Any, why: str = "") -> ValueError:
    kinds = [f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x) for x in value.values]
    got = ", ".join(f"replica {i}: {kind}" for i, kind in enumerate(kinds))
    return ValueError(
        "Compiled code has one program for all replicas, which cannot take components that are no arrays or, in this "
        f"function, that differ in shape or dtype{why}, got {got}. Run the function eagerly, or make the "
        "components alike."
    )
