"""`strategy.run`: in which of four ways the replicas run.

| the call is | the replicas run |
|---|---|
| in a merge function of compiled replicas of this strategy | *inline*: the function goes on as the replica |
| in a program that is traced, by `rx.function` or `jax.jit` | *compiled*: traced once for all, as a part of it |
| of an `rx.function`, or in one that the host drives | in a *program of their own*: `rx.function` of this call |
| any other | *eagerly*: a thread for each of them, of which one runs at a time |

The first two are in `compiled`, the third is in `compiled_runs`, which comes back here while it traces, the last is in
`_engine.eager`. An eager replica has no program of its own: what it calls meets the others eagerly, too.
"""

from __future__ import annotations

from collections.abc import Callable

from replicax._base import devices, nest
from replicax._base.thread_state import current
from replicax._base.types import Args, Kwargs, Leaf, ReduceOp, Tree
from replicax._collectives.reducer import Reducer
from replicax._engine import compiled, compiled_runs, eager, function, modes
from replicax._tracing import context, frames
from replicax._tracing.context import StrategyLike
from replicax._values import Mirrored, PerReplica, ReplicaMesh, adopted, component_count, is_array, is_text, mesh_of


def run(strategy: StrategyLike, reducer: Reducer, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
    """Calls `fn` on every replica and returns the results put together.

    Args:
        strategy: the strategy of the replicas.
        reducer: by which the replicas combine values; its mesh says where they are.
        fn: the replica function.
        args, kwargs: its arguments, with `PerReplica` leaves where replicas get values of their own.

    Raises:
        ValueError, IndexError: an argument has components for other replicas.
    """
    frame, mesh = frames.frame(), reducer.mesh
    _check_counts(strategy, mesh, (args, kwargs))
    args, kwargs = nest.map_structure(lambda leaf: adopted(leaf, mesh), (args, kwargs))
    with context.entered(strategy, None):
        if frame.is_replica_of(mesh):
            return compiled.run_inline(strategy, reducer, fn, args, kwargs)
        if frames.is_tracing():
            return compiled.run(strategy, reducer, fn, args, kwargs)
        if frame.compiles_runs and _asks_for_program(fn):
            return compiled_runs.run_compiled(strategy, fn, args, kwargs)
        return eager.run(strategy, reducer, fn, args, kwargs)


def run_single(
    strategy: StrategyLike,
    call: Callable[..., Tree],
    fn: Callable[..., Tree],
    args: Args,
    kwargs: Kwargs,
) -> Tree:
    """Runs the only replica of a strategy and returns its result.

    There are two ways only, since it has no other replica to meet: a program of its own in a function that the host
    drives, and `call(fn, args, kwargs)` at once everywhere else.
    """
    outermost = frames.frame().compiles_runs and not frames.is_tracing()
    if not (outermost and current.driven is not None) or any(map(_is_text, nest.leaves((args, kwargs)))):
        return call(fn, args, kwargs)
    return compiled_runs.run_compiled(strategy, fn, args, kwargs)


class StepContext:
    """The context of `StrategyExtended.experimental_run_steps_on_iterator`."""

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Tree] = {}

    def set_last_step_output(self, name: str, output: Tree, reduce_op: ReduceOp | str | None = None) -> None:
        """Keeps an output under this name."""
        self.last_step_outputs[name] = output


def _asks_for_program(fn: Callable[..., Tree]) -> bool:
    return (function.is_function(fn) and not modes.functions_run_eagerly()) or current.driven is not None


def _is_text(leaf: Leaf) -> bool:
    return is_array(leaf) and is_text(leaf)


def _check_counts(strategy: StrategyLike, mesh: ReplicaMesh, arguments: Tree) -> None:
    """Raise `ValueError`, or `IndexError` for too few components, for a value of other replicas.

    Eager replicas take components by their number, on whatever devices they are, as in TensorFlow; a program cannot.
    """
    for leaf in nest.leaves(arguments):
        if not isinstance(leaf, (PerReplica, Mirrored)):
            continue
        count, home = component_count(leaf), mesh_of(leaf)
        if count != (mesh.size if home is not None else len(mesh.local_ids)):
            where = ""
        elif home is not None and frames.is_tracing() and home.devices != mesh.devices:
            where = f", on the devices {', '.join(devices.short_names(home.device_names))},"
        else:
            continue
        kind = IndexError if count < mesh.size else ValueError  # a replica would take a component that is missing
        raise kind(
            f"A {type(leaf).__name__} value with {count} components{where} is passed to {strategy!r}, which has "
            f"{mesh.size} replicas. Values belong to the strategy that made them: distribute the dataset, or the "
            "values, with the strategy that runs the step."
        )
