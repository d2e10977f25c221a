"""Running a replica function compiled: traced once, whatever the number of replicas.

The function is traced to a jaxpr in the surroundings that `jax.shard_map` gives it, where its values are one
replica's components and `psum` over the axis `replica` meets the others. What it reads and writes of variables turns
out meanwhile (see `_levels`). Then `shard_map` runs that jaxpr over the mesh, with the variables' values among
its inputs and outputs.

`check_vma=False` matters: with it on, JAX sums gradients of replicated inputs over the replicas by itself, while
users of this API expect each replica's own gradient and reduce it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax import _collectives, _context, _control_flow, _levels, _nest, _private, _profiling
from replicax._context import ReplicaContext
from replicax._indexed_slices import IndexedSlices
from replicax._values import AXIS, Mirrored, PerReplica, ReplicaMesh, is_text, mapped, own_component

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

    def restored(self, stacked: Sequence[Any], mesh: ReplicaMesh) -> Any:
        """The function's result, its arrays replaced by what came out of the mapped program."""

        def value_of(array: Any) -> Any:
            if id(array) not in self.places:
                return array
            place = self.places[id(array)]
            return stacked[place] if self.common[place] else PerReplica.of_array(stacked[place], mesh)

        def restore(leaf: Any) -> Any:
            if isinstance(leaf, IndexedSlices):
                values, indices = value_of(leaf.values), value_of(leaf.indices)
                parts = zip(_components(values, mesh), _components(indices, mesh))
                slices = [IndexedSlices(v, i, leaf.dense_shape) for v, i in parts]
                return slices[0] if mesh.size == 1 else PerReplica(slices, mesh)
            value = value_of(leaf)
            return value.values[0] if mesh.size == 1 and isinstance(value, PerReplica) else value

        return _nest.map_structure(restore, self.result)


def _components(value: Any, mesh: ReplicaMesh) -> Sequence[Any]:
    return value.values if isinstance(value, PerReplica) else [value] * mesh.size


def run(strategy: Any, mesh: ReplicaMesh, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """`fn` on all replicas as part of the program that is being traced; the results put together."""
    level, outer = _levels.Level(local=True, mesh=mesh), _levels.frame()
    if isinstance(outer, _levels.Level):
        outer.meshes.append(mesh)
    context = SpmdContext(strategy, level, _outer_traces())
    inputs: list[Any] = []

    def split_off(leaf: Any) -> Any:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return leaf
        if leaf.array() is None:
            return _Parts(leaf)
        inputs.append(leaf)
        return _Place(len(inputs) - 1)

    skeleton = _nest.map_structure(split_off, (args, kwargs))
    outputs: list[_Outputs] = []
    written: list[Any] = []

    def replica_function(*components: Any) -> list[Any]:
        level.trace = _levels.untaped_trace()

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return components[leaf.index]
            return leaf.component(context) if isinstance(leaf, _Parts) else leaf

        own_args, own_kwargs = _nest.map_structure(fill, skeleton)
        with _context.entered(strategy, context), _levels.entered(level):
            with jax.named_scope(f"replica/{_profiling.identifier(fn)}"):
                result = fn(*own_args, **own_kwargs)
            outputs.append(_Outputs(result, context))
            written.extend(level.written.values())
            new_values = [leaf for variable in written for leaf in level.values[id(variable)]]
        return [*outputs[0].leaves, *new_values]

    arrays = [leaf.array() for leaf in inputs]
    in_specs = tuple(_STACKED if isinstance(leaf, PerReplica) else _MIRRORED for leaf in inputs)

    def component(leaf: Any, block: Any) -> Any:
        return block[0] if isinstance(leaf, PerReplica) else block

    # The first shard_map only lends its surroundings to the tracing of the function.
    traced: list[Any] = []

    def surroundings(*blocks: Any) -> Any:
        components = [component(leaf, block) for leaf, block in zip(inputs, blocks)]
        traced.append(jax.make_jaxpr(replica_function)(*components))
        return jnp.zeros(())

    jax.eval_shape(mapped(surroundings, mesh, in_specs, _MIRRORED), *arrays)

    reads = [(slot, level.variables[key], i) for key, slots in level.inputs.items() for i, slot in enumerate(slots)]
    for key in level.inputs:
        _levels.warn_of_constant(level.variables[key].name, stacklevel=5)
    current = {key: _levels.frame().read(level.variables[key]) for key in level.inputs}
    read_stacked = [_rows(level, variable, i) for _, variable, i in reads]
    varying = {slot for (slot, _, _), rows in zip(reads, read_stacked) if rows}
    told = mesh.size > 1 and any(variable._equal_by_contract for variable in written)
    differ = _control_flow.check(traced[0], [isinstance(leaf, PerReplica) for leaf in inputs], varying, told)
    if told:
        _refuse_different(level, written, differ[len(outputs[0].leaves) :])
    write_stacked = [_rows(level, variable, i) for variable in written for i in range(len(level.values[id(variable)]))]

    def program(values: Sequence[Any], blocks: Sequence[Any]) -> list[Any]:
        supplied = {slot: value[0] if rows else value for (slot, _, _), value, rows in zip(reads, values, read_stacked)}
        components = [component(leaf, block) for leaf, block in zip(inputs, blocks)]
        results = [jnp.asarray(result) for result in level.replay(traced[0], supplied, *components)]
        count = len(outputs[0].leaves)
        new_values = [x[None] if rows else x for x, rows in zip(results[count:], write_stacked)]
        common = outputs[0].common
        return [*(x if same else x[None] for x, same in zip(results[:count], common)), *new_values]

    read_specs = [_STACKED if rows else _MIRRORED for rows in read_stacked]
    out_specs = [_MIRRORED if same else _STACKED for same in outputs[0].common]
    out_specs += [_STACKED if rows else _MIRRORED for rows in write_stacked]
    values = [current[id(variable)][i] for _, variable, i in reads]
    results = mapped(program, mesh, (read_specs, list(in_specs)), out_specs)(values, arrays)

    new_values = iter(results[len(outputs[0].leaves) :])
    for variable in written:
        _levels.frame().write(variable, [next(new_values) for _ in level.values[id(variable)]])
    level.values.clear()
    return outputs[0].restored(results[: len(outputs[0].leaves)], mesh)


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
        shapes = ", ".join(f"replica {i}: {getattr(part, 'shape', repr(part))}" for i, part in enumerate(parts))
        raise ValueError(
            "Compiled code has one program for all replicas, which cannot take components that differ in shape or "
            f"are no arrays, got {shapes}. Run the function eagerly, or make the components alike."
        )


def context_outer(level: _levels.Level) -> list[Any]:
    """The traces outside of this level."""
    return [trace for trace in _outer_traces() if trace is not level.trace]
