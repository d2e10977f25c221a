"""Running a replica function compiled: traced once, whatever the number of replicas.

The function is traced to a jaxpr in the surroundings that `jax.shard_map` gives it, where its values are one
replica's components and `psum` over the axis `replica` meets the others. What it reads and writes of variables turns
out meanwhile (see `_tracing.frames`). Then `shard_map` runs that jaxpr over the mesh, with the variables' values among
its inputs and outputs.

`check_vma=False` matters: with it on, JAX sums gradients of replicated inputs over the replicas by itself, while
users of this API expect each replica's own gradient and reduce it themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from replicax._base import nest
from replicax._base.thread_state import current
from replicax._base.types import Leaf, Tree
from replicax._collectives import sharding
from replicax._collectives.reducer import Reducer
from replicax._engine import padded_batch
from replicax._engine.program_outputs import ReplicaOutputs, leaf_count
from replicax._engine.replica_trace import (
    LeafKey,
    NotStacked,
    Placeholder,
    ReplicaTrace,
    SpmdContext,
    not_compiled,
    outer_traces,
    refuse_different,
)
from replicax._passes import uneven_replicas
from replicax._passes.row_dims import NotExact
from replicax._tracing import active_tapes, frames
from replicax._tracing import context as _context
from replicax._tracing.context import StrategyLike
from replicax._tracing.dataset_reads import RunEagerly, reader
from replicax._tracing.protocols import State
from replicax._values import (
    AXIS,
    Mirrored,
    PartRows,
    PerReplica,
    ReplicaMesh,
    counted_form,
    global_array,
    mapped,
    mark_results,
    of_traced,
    padded_form,
    part_rows,
    traced_component,
)
from replicax._values.forms import Shape

_STACKED, _MIRRORED = PartitionSpec(AXIS), PartitionSpec()


class _Form(NamedTuple):
    """How an array is divided among the replicas: in `rows`, one each; in parts along the axis `cut`; or not."""

    rows: bool = False
    cut: int | None = None

    @property
    def spec(self) -> PartitionSpec:
        """The part of the array that `shard_map` gives to a replica."""
        return _STACKED if self.rows else _MIRRORED if self.cut is None else PartitionSpec(*[None] * self.cut, AXIS)

    def whole(self, own: jax.Array) -> jax.Array:
        """Returns the whole of an array of which this may be a part."""
        return own if self.cut is None else sharding.gathered_along(own, self.cut)

    def part(self, array: jax.Array) -> jax.Array:
        """Returns this replica's part of an array, if it is cut."""
        return array if self.cut is None else sharding.own_along(array, self.cut)


_WHOLE, _ROWS = _Form(), _Form(rows=True)


class _DistributedArguments:
    """The distributed values among the arguments of a call, as arrays that go into its program.

    Attributes:
        skeleton: the arguments, with a `Placeholder` for each of them.
        values, arrays: the values, and their arrays.
        stacked: which of the arrays have a row for each replica.
        padded: the padded batch among them; None for none.
        kinds: the replicas' components may be of several kinds, which are the shapes that a component of each value has
            (None where all are alike).
        which: each replica's kind.
        part_rows: the rows of the replicas' parts of the batch, where their numbers differ.
    """

    def __init__(self, mesh: ReplicaMesh, arguments: Tree):
        self.values: list[PerReplica | Mirrored] = []
        self.arrays: list[jax.Array] = []
        self._has_counted = False  # whether there is a padded batch
        self._shapes: list[Sequence[Shape] | None] = []  # of all components of each value, None where they are alike
        self.skeleton = nest.map_structure(self._split_off, arguments)
        by_replica = [tuple(each[i] if each else None for each in self._shapes) for i in range(mesh.size)]
        self.kinds = list(dict.fromkeys(by_replica))
        self.which = [self.kinds.index(kind) for kind in by_replica]
        self.part_rows = part_rows(arguments) if len(self.kinds) > 1 else None
        self.stacked = [isinstance(value, PerReplica) for value in self.values]
        self.padded = padded_batch.of_values(self.values) if self._has_counted else None
        if self.padded is not None:
            self.part_rows = PartRows(None, padded=True)
            if len(self.kinds) > 1:
                raise NotExact("the function takes values of other shapes beside a padded batch")

    def _split_off(self, leaf: Leaf) -> Leaf:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return leaf
        array, shapes = global_array(leaf), None
        if (counted := counted_form(leaf)) is not None:
            array, self._has_counted = counted.array, True
        if array is None and isinstance(leaf, PerReplica) and (padded := padded_form(leaf)) is not None:
            array, shapes = padded.array, padded.shapes
        if array is None:
            return NotStacked(leaf)
        self.values.append(leaf)
        self.arrays.append(array)
        self._shapes.append(shapes)
        return Placeholder(len(self.values) - 1)

    @property
    def inputs(self) -> list[jax.Array]:
        """What goes into the program: the arrays, and the numbers of rows of a padded batch."""
        return self.arrays if self.padded is None else [*self.arrays, self.padded.counts.array]

    @property
    def specs(self) -> list[PartitionSpec]:
        """How the inputs are divided."""
        return _specs_of(self.stacked if self.padded is None else [*self.stacked, False])

    @property
    def differing(self) -> list[bool]:
        """Which operands of the replica function's program differ between the replicas."""
        return self.stacked if self.padded is None else [*self.stacked, True]

    def operands(self, blocks: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns what a replica's program takes: its components and, of a padded batch, how many rows count."""
        return self.rows(blocks) if self.padded is None else [*self.rows(blocks), self.padded.own_count(blocks[-1])]

    def tell_rows(self, trace: ReplicaTrace, traces: Sequence[ReplicaTrace]) -> None:
        """Tell the replica context of a trace how many rows the replica has; `traces` are those of the kinds."""
        if self.padded is not None:
            place = min(self.padded.places)
            trace.set_rows(self.part_rows, lambda components: components[place].shape[0])
        elif self.part_rows is not None and self.part_rows.counts is not None:
            count = self.part_rows.counts[self.which.index(traces.index(trace))]
            trace.set_rows(self.part_rows, lambda components: count)
        else:
            trace.set_rows(self.part_rows, lambda components: 0)

    def rows(self, blocks: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns a replica's own components, where `blocks` are its blocks of the inputs."""
        return [block[0] if stacked else block for block, stacked in zip(blocks, self.stacked)]

    def refusal(self, error: Exception) -> BaseException:
        """Returns the exception to raise where components that are not alike cannot be compiled."""
        if reader() is not None:
            return RunEagerly()
        return not_compiled(next(v for v, each in zip(self.values, self._shapes) if each), f" ({error})")


class _TracedVariables:
    """The variables that the traces read and write.

    Attributes:
        reads: the leaves that go in.
        values: their arrays.
        forms: how each of these is divided among the replicas.
        written: the variables that are written, by id.
        cut: the leaves of which each replica has a part, with its axis.
        forms_after: how each of their new leaves is.
    """

    def __init__(self, traces: Sequence[ReplicaTrace]):
        level, frame = traces[0].level, frames.frame()
        variables = {key: trace.level.variables[key] for trace in traces for key in trace.level.inputs}
        for variable in variables.values():
            frames.warn_of_constant(variable.name)
        self.written = {id(variable): variable for trace in traces for variable in trace.written}
        if any(len(trace.written) < len(self.written) for trace in traces):
            variables.update(self.written)  # what one trace leaves as it is
        values = {key: frame.read(variable) for key, variable in variables.items()}
        if current.tapes or current.tapes_outside:
            values = {key: active_tapes.on_read(variables[key], leaves) for key, leaves in values.items()}
        self.reads: list[LeafKey] = [(key, i) for key, leaves in values.items() for i in range(len(leaves))]
        self.values = [values[key][i] for key, i in self.reads]
        self.forms = [_form(level, variables[key], i) for key, i in self.reads]
        every = {**variables, **self.written}
        found = {(key, i): _form(level, v, i).cut for key, v in every.items() for i in range(leaf_count(v))}
        self.cut = {leaf: axis for leaf, axis in found.items() if axis is not None}
        self.forms_after = [_form(level, v, i) for v in self.written.values() for i in range(leaf_count(v))]

    def write(self, new: Sequence[jax.Array]) -> None:
        """Replaces what is written by these leaves."""
        leaves = iter(new)
        for variable in self.written.values():
            frames.frame().write(variable, [next(leaves) for _ in range(leaf_count(variable))])


def run(
    strategy: StrategyLike,
    reducer: Reducer,
    fn: Callable[..., Tree],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    alike: bool = True,
) -> Tree:
    """Runs `fn` on all replicas as part of the program that is being traced, and puts the results together.

    Where the components of an argument differ in shape, `fn` is traced once for each shape, see `uneven_replicas`. With
    `alike` replicas may not assign different values to variables whose copies must stay equal.
    """
    try:
        arguments = _DistributedArguments(reducer.mesh, (args, kwargs))
        return _run(strategy, reducer, fn, arguments, alike)
    except NotExact as error:
        raise padded_batch.refusal(fn, error) from error


def _run(
    strategy: StrategyLike,
    reducer: Reducer,
    fn: Callable[..., Tree],
    arguments: _DistributedArguments,
    alike: bool,
) -> Tree:
    mesh, padded = reducer.mesh, arguments.padded
    frames.frame().note_replicas(mesh)
    try:
        traces = _traces(strategy, reducer, fn, arguments)
    except uneven_replicas.NotAlike as error:
        raise arguments.refusal(error) from error
    variables = _TracedVariables(traces)
    varying = {read for read, form in zip(variables.reads, variables.forms) if form.rows}
    must_agree = alike and mesh.size > 1 and any(variable._equal_by_contract for variable in variables.written.values())
    for trace in traces:
        trace.check(arguments.differing, varying, must_agree)

    def of_several_kinds(own: Sequence[jax.Array], operands: Sequence[jax.Array]) -> tuple[list[jax.Array], list[bool]]:
        mine = jnp.asarray(np.array(arguments.which, np.int32))[lax.axis_index(AXIS)]

        def together(own: Sequence[jax.Array], cut: Mapping[LeafKey, int]) -> tuple[list[jax.Array], list[bool]]:
            functions = [functools.partial(outputs.of, trace, variables.reads, cut) for trace in traces]
            return uneven_replicas.together(functions, mine, [*own, *operands])

        if variables.cut:
            with contextlib.suppress(uneven_replicas.NotAlike):  # the kinds need the parts of others in different ways
                return together(own, variables.cut)
        found, same = together([form.whole(value) for value, form in zip(own, variables.forms)], {})
        return [form.part(x) for x, form in zip(found, out_forms)], same

    def program(values: Sequence[jax.Array], blocks: Sequence[jax.Array]) -> list[jax.Array]:
        own = [value[0] if form.rows else value for value, form in zip(values, variables.forms)]
        if len(traces) == 1:
            found = outputs.of(traces[0], variables.reads, variables.cut, *own, *arguments.operands(blocks))
        else:
            found, same = of_several_kinds(own, arguments.operands(blocks))
            if must_agree:
                differ = [not each for each in same[len(outputs.common) :]]
                refuse_different(variables.written.values(), differ, ": those whose batches have other shapes differ")
        return [x[None] if form.rows else x for x, form in zip(found, out_forms)]

    try:
        outputs = ReplicaOutputs(traces, arguments.which, variables.written)
        out_forms = [*(_WHOLE if same else _ROWS for same in outputs.common), *variables.forms_after]
        specs = [form.spec for form in variables.forms], arguments.specs
        found = mapped(program, mesh, specs, [form.spec for form in out_forms])(variables.values, arguments.inputs)
        result = outputs.restored(found[: len(outputs.common)], mesh, padded)
    except Exception as error:  # from a pass: tracing has ended, and eager replicas may assign equal values
        if isinstance(error, uneven_replicas.NotAlike) or (len(traces) > 1 and reader() is not None):
            raise arguments.refusal(error) from error
        raise
    if arguments.part_rows or traces[0].sum_warning:
        mark_results(result, arguments.part_rows, traces[0].sum_warning)
    variables.write(found[len(outputs.common) :])
    for trace in traces:
        trace.level.values.clear()
        trace.level.shared.clear()
    return result


def run_inline(
    strategy: StrategyLike, reducer: Reducer, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Tree:
    """Calls `fn` in a merge function of compiled replicas, where it goes on as the replica; returns its result."""
    level = frames.frame()
    assert isinstance(level, frames.TraceFrame)
    outer = [trace for trace in outer_traces() if trace is not level.trace]
    context = SpmdContext(strategy, reducer, level, outer)

    def inside(leaf: Leaf) -> Leaf:
        component = traced_component(leaf)
        return leaf if component is None else component

    args, kwargs = nest.map_structure(inside, (args, kwargs))
    with _context.entered(strategy, context):
        result = fn(*args, **kwargs)
    return nest.map_structure(
        lambda leaf: of_traced(PerReplica, leaf, reducer.mesh) if context._is_own(leaf) else leaf, result
    )


def _traces(
    strategy: StrategyLike, reducer: Reducer, fn: Callable[..., Tree], arguments: _DistributedArguments
) -> list[ReplicaTrace]:
    """Returns the traces of `fn`, one for each kind of components, which know the shapes of what all replicas gather.

    Raises:
        uneven_replicas.NotAlike: what is gathered has other shapes each time.
    """

    def traced(gathers: Sequence[uneven_replicas.Gathers | None]) -> list[ReplicaTrace]:
        pairs = [*zip(arguments.kinds, gathers)]
        traces = [ReplicaTrace(strategy, reducer, fn, arguments.skeleton, kind, each) for kind, each in pairs]
        padded = arguments.padded
        others = [ReplicaTrace(strategy, reducer, fn, arguments.skeleton, *pairs[0]) for _ in range(3) if padded]

        # This shard_map only lends its surroundings to the tracing of the function.
        def surroundings(*blocks: jax.Array) -> jax.Array:
            for trace in traces:
                trace.take(arguments.rows(blocks))
            if padded is not None:
                padded.compare(traces[0], others, arguments.rows(blocks))
            return jnp.zeros(())

        for trace in [*traces, *others]:
            trace.level.pads_rows = padded is not None
            arguments.tell_rows(trace, traces)
        jax.eval_shape(mapped(surroundings, reducer.mesh, tuple(arguments.specs), _MIRRORED), *arguments.inputs)
        return traces

    if len(arguments.kinds) == 1:
        return traced([None])
    known: list[list[Shape]] = []
    for _ in range(5):  # what is gathered may come from what was gathered before
        gathers = [uneven_replicas.Gathers(known) for _ in arguments.kinds]
        try:
            traces = traced(gathers)
        except Exception as error:
            supposed = any(each.supposes for each in gathers)
            if isinstance(error, uneven_replicas.NotAlike) or reader() is None or not supposed:
                raise
            raise uneven_replicas.NotAlike("tracing failed before it was known what all replicas gather") from error
        found = uneven_replicas.gathered(gathers, arguments.which)
        alike = all(len(set(shapes)) == 1 for shapes in found) and not any(each.guessed for each in gathers)
        if found == known or (not known and alike):
            return traces
        known = found
    raise uneven_replicas.NotAlike("the shapes of what they gather depend on each other")


def _specs_of(stacked: Iterable[bool]) -> list[PartitionSpec]:
    return [_STACKED if each else _MIRRORED for each in stacked]


def _form(level: frames.TraceFrame, variable: State, index: int) -> _Form:
    """Returns how a leaf of a variable, in global form, is divided among the replicas of a level."""
    if not level.is_local(variable):
        return _WHOLE
    return _Form(variable._storage.home.has_rows(index), variable._storage.home.cut_axis(index))
