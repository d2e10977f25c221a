"""Running a replica function compiled: traced once, whatever the number of replicas.

The function is traced to a jaxpr in the surroundings that `jax.shard_map` gives it, where its values are one
replica's components and `psum` over the axis `replica` meets the others. What it reads and writes of variables turns
out meanwhile (see `_levels`). Then `shard_map` runs that jaxpr over the mesh, with the variables' values among
its inputs and outputs.

`check_vma=False` matters: with it on, JAX sums gradients of replicated inputs over the replicas by itself, while
users of this API expect each replica's own gradient and reduce it themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax import _collectives, _context, _control_flow, _convolutions, _levels, _nest, _pieces, _private, _profiling
from replicax._context import ReplicaContext
from replicax._indexed_slices import IndexedSlices
from replicax._pulls import RunEagerly, lifts
from replicax._values import (
    AXIS,
    Mirrored,
    PerReplica,
    ReplicaMesh,
    filled,
    is_array,
    is_text,
    largest_of,
    mapped,
    own_component,
    part_of,
)

_STACKED, _MIRRORED = PartitionSpec(AXIS), PartitionSpec()


class SpmdContext(ReplicaContext):
    """The context of the replicas while their function is traced, once for all of them."""

    def __init__(self, strategy: Any, level: _levels.Level, outer: Any):
        super().__init__(strategy, None)
        self._level, self._outer = level, outer
        self._common: dict[int, Any] = {}  # what merge functions returned, one value for all replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        if self._replica_id is None:
            with _levels.jax_trace(self._level.trace):
                self._replica_id = lax.axis_index(AXIS)
        return self._replica_id

    def _is_own(self, leaf: Any) -> bool:
        """Whether a value was computed by the replica, rather than brought in from outside as one object."""
        if id(leaf) in self._common:
            return False
        mesh = self._level.mesh
        if mesh.lone and isinstance(leaf, jax.Array):  # another worker's may be another
            return True
        if not isinstance(leaf, jax.core.Tracer):
            return False
        return _private.trace_of(leaf) not in self._outer

    def is_common(self, leaf: Any) -> bool:
        """Whether a value was computed by a merge function, as one for all replicas."""
        return id(leaf) in self._common

    def _merge(self, fn, args, kwargs, tag):
        mesh = self._level.mesh

        def wrap(leaf):
            if isinstance(leaf, IndexedSlices) or self._is_own(leaf):
                return PerReplica.of_local(leaf, mesh)
            return leaf

        def unwrap(leaf):
            if self._is_own(leaf):
                self._common[id(leaf)] = leaf
            return own_component(leaf)

        args, kwargs = _nest.map_structure(wrap, args), _nest.map_structure(wrap, kwargs)
        with _context.entered(self._strategy, None):
            return _nest.map_structure(unwrap, fn(self._strategy, *args, **kwargs))

    def _exchange(self, leaves: list[Any], collective: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The collective of the replica's own values; others count as one value for all."""
        own = [i for i, leaf in enumerate(leaves) if isinstance(leaf, IndexedSlices) or self._is_own(leaf)]
        results = [leaf if i in own else lax.optimization_barrier(leaf) for i, leaf in enumerate(leaves)]
        for i, result in zip(own, collective([leaves[i] for i in own]) if own else ()):
            results[i] = result
        return results

    def _all_reduce(self, op, leaves, options):
        extended = self._strategy.extended
        ops = extended._cross_device_ops_for(options)
        with jax.named_scope("all_reduce"):
            return self._exchange(leaves, lambda own: ops._local_reduce(op, own, self._level.mesh, options))

    def _reduce_to_parts(self, op: Any, leaves: list[Any], options: Any) -> list[Any]:
        """The sum or mean of the replica's own values, of which each replica gets a part (see `_shards`)."""
        ops: Any = self._strategy.extended._cross_device_ops_for(options)
        return self._exchange(leaves, lambda own: ops._local_parts(op, own, self._level.mesh, options))

    def _all_gather(self, leaves, axis, options):
        with jax.named_scope("all_gather"):
            return self._exchange(leaves, lambda own: [_collectives.local_gather(leaf, axis) for leaf in own])


class _Outputs:
    """The results of a traced replica function: arrays to bring out, and what stays as it is."""

    def __init__(self, result: Any, context: SpmdContext):
        self.result, self.context = result, context
        self.leaves: list[Any] = []
        self.common: list[bool] = []  # for each leaf, whether it is one value for all replicas
        self.places: dict[int, int] = {}  # id of a leaf -> its place among the leaves
        _nest.map_structure(self._add, result)

    def _add(self, leaf: Any) -> None:
        if isinstance(leaf, (PerReplica, Mirrored)):
            raise TypeError(
                f"A compiled replica function returned a {type(leaf).__name__} value, which has a component for each "
                "replica already. Return the replica's own component, or make the value outside of `run`."
            )
        for array in (leaf.values, leaf.indices) if isinstance(leaf, IndexedSlices) else (leaf,):
            if isinstance(array, np.ndarray) and not is_text(array):
                array = _context.as_array(array)
                array = lax.optimization_barrier(array)
                self._bring_out(id(leaf), array)
            elif id(array) not in self.places and (self.context._is_own(array) or self.context.is_common(array)):
                self._bring_out(id(array), array)

    def _bring_out(self, key: int, array: Any) -> None:
        self.places[key] = len(self.leaves)
        self.leaves.append(array)
        self.common.append(self.context.is_common(array))


class _Trace:
    """The replica function, traced as those replicas run it whose arguments have some shapes.

    Args:
        skeleton: the arguments, with a `_Place` where a replica's own component belongs.
        kind: for each place, the shape that the component has; None where all replicas' are alike.
        gathers: where there are other traces, for replicas whose arguments have other shapes, how it gathers values.
    """

    def __init__(self, strategy: Any, mesh: ReplicaMesh, fn: Callable, skeleton: Any, kind: tuple, gathers: Any):
        self.level = _levels.Level(local=True, mesh=mesh)
        self.level.gathers = gathers
        self._strategy, self._fn, self._skeleton, self._kind = strategy, fn, skeleton, kind
        self._context = SpmdContext(strategy, self.level, _outer_traces())
        self.outputs: Any = None
        self.written: list[Any] = []  # variables
        self._jaxpr: Any = None

    def _components(self, rows: Sequence[Any]) -> list[Any]:
        return [row if shape is None else part_of(row, shape) for row, shape in zip(rows, self._kind)]

    def take(self, rows: Sequence[Any]) -> None:
        """Traces the function, in the surroundings that it runs in."""
        self._jaxpr = jax.make_jaxpr(self._function)(*self._components(rows))

    def _function(self, *components: Any) -> list[Any]:
        self.level.trace = _levels.untaped_trace()

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return components[leaf.index]
            return leaf.component(self._context) if isinstance(leaf, _Parts) else leaf

        own_args, own_kwargs = _nest.map_structure(fill, self._skeleton)
        with _context.entered(self._strategy, self._context), _levels.entered(self.level):
            with jax.named_scope(f"replica/{_profiling.identifier(self._fn)}"):
                result = self._fn(*own_args, **own_kwargs)
            self.outputs = _Outputs(result, self._context)
            self.written.extend(self.level.written.values())
            self.new_values = [leaf for variable in self.written for leaf in self.level.values[id(variable)]]
        return [*self.outputs.leaves, *self.new_values]

    def check(self, varying_inputs: list[bool], varying: set[tuple[int, int]], told: bool) -> None:
        """Refuses collectives that some replicas may not come to and, if `told`, values that should not differ."""
        inputs = self.level.inputs.items()
        slots = {slot for key, slots in inputs for i, slot in enumerate(slots) if (key, i) in varying}
        differ = _control_flow.check(self._jaxpr, varying_inputs, slots, told)
        if told:
            _refuse_different(self.level, self.written, differ[len(self.outputs.leaves) :])

    def replayed(
        self, known: dict[tuple[int, int], Any], rows: Sequence[Any]
    ) -> tuple[list[Any], dict[int, list[Any]]]:
        """The arrays that come out, and the new leaves of each variable.

        Args:
            known: the leaves of the variables, by the variable's id and their number.
            rows: the components, those of other shapes padded.
        """
        supplied = {slot: known[key, i] for key, slots in self.level.inputs.items() for i, slot in enumerate(slots)}
        evaluate = None
        if self.level.gathers is not None:
            on_cpu = self.level.mesh.devices[0].platform == "cpu"
            others = {"conv_general_dilated": _convolutions.in_order} if on_cpu else {}
            evaluate = functools.partial(_pieces.unwrapped, others=others)
        found = self.level.replay(self._jaxpr, supplied, *self._components(rows), evaluate=evaluate)
        new_values = iter(found[len(self.outputs.leaves) :])
        return found, {id(v): [next(new_values) for _ in self.level.values[id(v)]] for v in self.written}


class _Results:
    """What comes out of all traces of a replica function: which of their arrays belong together.

    Args:
        traces: they have the same results, but for shapes.
        which: for each replica, which trace is its own.
        written: all variables that they assign, by id.
    """

    def __init__(self, traces: Sequence[_Trace], which: Sequence[int], written: dict[int, Any]):
        self._traces, self._which, self._written = traces, which, written
        self._places: dict[tuple[int, ...], int] = {}  # places of a leaf in each trace's outputs -> its place here
        _nest.merge(self._of_traces(), self._take)
        self._leaves = [[t.outputs.leaves[i] for t, i in zip(traces, places)] for places in self._places]
        self.common = [all(t.outputs.common[i] for t, i in zip(traces, places)) for places in self._places]
        for leaves in self._leaves:
            if len({(leaf.ndim, leaf.dtype) for leaf in leaves}) > 1:
                raise _pieces.NotAlike("what the replicas return differs in rank or dtype")

    def _of_traces(self) -> list[Any]:
        return [trace.outputs.result for trace in self._traces]

    def _take(self, leaves: Sequence[Any]) -> None:
        if all(isinstance(leaf, IndexedSlices) for leaf in leaves):
            self._take([leaf.values for leaf in leaves])
            self._take([leaf.indices for leaf in leaves])
        elif (places := self._places_of(leaves)) is not None:
            self._places.setdefault(places, len(self._places))

    def _places_of(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        places = [trace.outputs.places.get(id(leaf)) for trace, leaf in zip(self._traces, leaves)]
        known = [place for place in places if place is not None]
        if known and len(known) < len(places):
            raise _pieces.NotAlike("what the replicas return is an array of their own on some of them only")
        return tuple(known) if known else None

    def of(self, trace: _Trace, reads: Sequence[tuple[int, int]], *args: Any) -> list[Any]:
        """What comes out of one trace: arrays, those of other shapes padded, and the leaves of all variables."""
        known = dict(zip(reads, args))
        found, new_values = trace.replayed(known, args[len(reads) :])
        number = self._traces.index(trace)
        out = [found[places[number]] for places in self._places]
        if len(self._traces) > 1:
            out = [filled(x, largest_of([leaf.shape for leaf in leaves])) for x, leaves in zip(out, self._leaves)]
        for key, variable in self._written.items():
            out += new_values.get(key) or [known[key, i] for i in range(len(variable._leaf_types(True)))]
        return [jnp.asarray(x) for x in out]

    def restored(self, stacked: Sequence[Any], mesh: ReplicaMesh) -> Any:
        """The function's result, its arrays replaced by what came out of the mapped program."""

        def value_of(leaves: Sequence[Any]) -> Any:
            places = self._places_of(leaves)
            if places is None:
                alike = all(_is_same(leaf, leaves[0]) for leaf in leaves)
                return leaves[0] if alike else _of_replicas([leaves[i] for i in self._which], mesh)
            place = self._places[places]
            if self.common[place]:
                return stacked[place]
            shapes = [leaf.shape for leaf in self._leaves[place]]
            if len(set(shapes)) > 1:
                return PerReplica.of_padded(stacked[place], [shapes[i] for i in self._which], mesh)
            return PerReplica.of_array(stacked[place], mesh)

        def restore(leaves: Sequence[Any]) -> Any:
            if all(isinstance(leaf, IndexedSlices) for leaf in leaves):
                values, indices = value_of([x.values for x in leaves]), value_of([x.indices for x in leaves])
                parts = zip(_components(values, mesh), _components(indices, mesh))
                slices = [IndexedSlices(v, i, leaves[0].dense_shape) for v, i in parts]
                return slices[0] if mesh.size == 1 else PerReplica(slices, mesh)
            value = value_of(leaves)
            return value.values[0] if mesh.size == 1 and isinstance(value, PerReplica) else value

        return _nest.merge(self._of_traces(), restore)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)


def _of_replicas(parts: Sequence[Any], mesh: ReplicaMesh) -> PerReplica:
    """What replicas returned that are no arrays of theirs, and differ."""
    if mesh.all_local:
        return PerReplica(parts, mesh)
    numbers = [isinstance(x, (bool, int, float, complex)) or (is_array(x) and not is_text(x)) for x in parts]
    if not any(numbers):
        return PerReplica([parts[i] for i in mesh.local_ids], mesh)
    # All processes have to make the same program, so that it holds everyone's.
    arrays = [_context.as_array(x) if number else x for x, number in zip(parts, numbers)]
    if not all(numbers) or len({(type(x), a.shape, a.dtype) for x, a in zip(parts, arrays)}) > 1:
        raise _pieces.NotAlike("what the replicas return differs in type")
    return PerReplica.of_array(lax.optimization_barrier(jnp.stack(arrays)), mesh)


def _components(value: Any, mesh: ReplicaMesh) -> Sequence[Any]:
    return value.values if isinstance(value, PerReplica) else [value] * mesh.size


def run(strategy: Any, mesh: ReplicaMesh, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """`fn` on all replicas as part of the program that is being traced; the results put together.

    Where the parts of an argument differ in shape, `fn` is traced once for each shape, see `_pieces`.
    """
    outer = _levels.frame()
    if isinstance(outer, _levels.Level):
        outer.meshes.append(mesh)
    inputs: list[Any] = []
    arrays: list[Any] = []
    shapes: list[Any] = []  # of the components of each input, None where they are alike

    def split_off(leaf: Any) -> Any:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return leaf
        array = leaf.array()
        padded = leaf.padded() if array is None and isinstance(leaf, PerReplica) else None
        if array is None and padded is None:
            return _Parts(leaf)
        inputs.append(leaf)
        arrays.append(array if padded is None else padded[0])
        shapes.append(None if padded is None else padded[1])
        return _Place(len(inputs) - 1)

    skeleton = _nest.map_structure(split_off, (args, kwargs))
    by_replica = [tuple(each and each[i] for each in shapes) for i in range(mesh.size)]
    kinds = list(dict.fromkeys(by_replica))
    which = [kinds.index(kind) for kind in by_replica]
    in_specs = tuple(_STACKED if isinstance(leaf, PerReplica) else _MIRRORED for leaf in inputs)

    def rows(blocks: Sequence[Any]) -> list[Any]:
        return [block[0] if isinstance(leaf, PerReplica) else block for leaf, block in zip(inputs, blocks)]

    # The first shard_map only lends its surroundings to the tracing of the function.
    def traced(known: Any) -> list[_Trace]:
        traces = [
            _Trace(strategy, mesh, fn, skeleton, kind, None if len(kinds) == 1 else _pieces.Gathers(known))
            for kind in kinds
        ]

        def surroundings(*blocks: Any) -> Any:
            for trace in traces:
                trace.take(rows(blocks))
            return jnp.zeros(())

        jax.eval_shape(mapped(surroundings, mesh, in_specs, _MIRRORED), *arrays)
        return traces

    def refusal(error: _pieces.NotAlike) -> BaseException:
        if lifts.stack:
            return RunEagerly()
        return _not_compiled([leaf for leaf, each in zip(inputs, shapes) if each][0], f" ({error})")

    try:
        traces = traced([])
        if len(kinds) > 1:
            traces = _settled(traces, which, traced)
    except _pieces.NotAlike as error:
        raise refusal(error) from error

    variables = {key: trace.level.variables[key] for trace in traces for key in trace.level.inputs}
    for variable in variables.values():
        _levels.warn_of_constant(variable.name, stacklevel=5)
    written = {id(variable): variable for trace in traces for variable in trace.written}
    if any(len(trace.written) < len(written) for trace in traces):
        variables.update(written)  # what one trace leaves as it is
    current = {key: list(_levels.frame().read(variable)) for key, variable in variables.items()}
    reads = [(key, i) for key, leaves in current.items() for i in range(len(leaves))]
    read_stacked = [_rows(traces[0].level, variables[key], i) for key, i in reads]
    varying = {read for read, stacked in zip(reads, read_stacked) if stacked}
    told = mesh.size > 1 and any(variable._equal_by_contract for variable in written.values())
    for trace in traces:
        trace.check([isinstance(leaf, PerReplica) for leaf in inputs], varying, told)

    def program(values: Sequence[Any], blocks: Sequence[Any]) -> list[Any]:
        own = [value[0] if stacked else value for value, stacked in zip(values, read_stacked)]
        functions = [functools.partial(results.of, trace, reads) for trace in traces]
        if len(traces) == 1:
            found = functions[0](*own, *rows(blocks))
        else:
            mine = jnp.asarray(np.array(which, np.int32))[lax.axis_index(AXIS)]
            found = _pieces.together(functions, mine, [*own, *rows(blocks)])
        return [x[None] if stacked else x for x, stacked in zip(found, out_stacked)]

    try:
        results = _Results(traces, which, written)
        out_stacked = [not same for same in results.common]
        out_stacked += [
            _rows(traces[0].level, variable, i)
            for variable in written.values()
            for i in range(len(variable._leaf_types(True)))
        ]
        read_specs = [_STACKED if stacked else _MIRRORED for stacked in read_stacked]
        out_specs = [_STACKED if stacked else _MIRRORED for stacked in out_stacked]
        values = [current[key][i] for key, i in reads]
        found = mapped(program, mesh, (read_specs, list(in_specs)), out_specs)(values, arrays)
        result = results.restored(found[: len(results.common)], mesh)
    except _pieces.NotAlike as error:
        raise refusal(error) from error

    new_values = iter(found[len(results.common) :])
    for variable in written.values():
        _levels.frame().write(variable, [next(new_values) for _ in variable._leaf_types(True)])
    for trace in traces:
        trace.level.values.clear()
    return result


def _refuse_different(level: _levels.Level, written: Sequence[Any], differ: Sequence[bool]) -> None:
    """`ValueError` where replicas assign values of their own to a variable that has one value for all."""
    flags = iter(differ)
    for variable in written:
        own = [next(flags) for _ in level.values[id(variable)]]
        if any(own) and variable._equal_by_contract:
            raise ValueError(
                f"The replicas assign different values to {variable.name} of shape {variable.shape}, which is to have "
                "the same value on all of them. Sum gradients up before the update, "
                "`gradients = replicax.get_replica_context().all_reduce('SUM', gradients)`, and reduce in the same way "
                "whatever else depends on a replica's own data, random numbers or statistics."
            )


def _rows(level: _levels.Level, variable: Any, index: int) -> bool:
    """Whether the level sees one row of this leaf's global form, which has one for each replica."""
    return variable._has_rows(index) and level.is_local(variable)


def _outer_traces() -> list[Any]:
    """The traces that were in progress when the replicas were entered."""
    traces = [frame.trace for frame in _levels._frames.stack if isinstance(frame, _levels.Level)]
    trace = _levels.untaped_trace()
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def _settled(traces: list[_Trace], which: Sequence[int], traced: Callable[[Any], list[_Trace]]) -> list[_Trace]:
    """Traces that know the shapes of what all replicas gather."""
    known: Any = []
    for _ in range(4):  # what is gathered may come from what was gathered before
        gathers = [trace.level.gathers for trace in traces]
        found = _pieces.gathered(gathers, which)
        alike = all(len(set(shapes)) == 1 for shapes in found) and not any(one.guessed for one in gathers)
        if found == known or (not known and alike):
            return traces
        known = found
        traces = traced(known)
    raise _pieces.NotAlike("the shapes of what they gather depend on each other")


class _Place:
    """Stands for a distributed argument in the skeleton of the arguments."""

    def __init__(self, index: int):
        self.index = index


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
    shapes = ", ".join(f"replica {i}: {getattr(part, 'shape', repr(part))}" for i, part in enumerate(value.values))
    return ValueError(
        "Compiled code has one program for all replicas, which cannot take components that are no arrays or, in this "
        f"function, that differ in shape{why}, got {shapes}. Run the function eagerly, or make the components alike."
    )


def context_outer(level: _levels.Level) -> list[Any]:
    """The traces outside of this level."""
    return [trace for trace in _outer_traces() if trace is not level.trace]
