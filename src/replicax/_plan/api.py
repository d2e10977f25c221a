"""`plan`: compiles a step for devices that are not there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence

from replicax._base import doc_pages, jax_internals, tracebacks
from replicax._base.messages import received
from replicax._base.planning import PlanError
from replicax._base.types import Tree
from replicax._data.iterators import ElementIterator, pull, push_back
from replicax._engine.function import function, is_function
from replicax._input.distributed_dataset import DistributedDataset
from replicax._plan import apart, chips, pool, variants
from replicax._plan.jit_steps import JitStep, is_jitted
from replicax._plan.lowering import Step
from replicax._plan.options import TIME_LIMIT, check_time_limit
from replicax._plan.plans import Plan
from replicax._plan.pool import Settings


@tracebacks.boundary
def plan(
    step: Callable[..., Tree],
    batch: Tree = (),
    *,
    topology: str | int | Sequence[str | int],
    axes: Sequence[str] | None = None,
    compare: bool = False,
    time_limit: float = TIME_LIMIT,
) -> Plan:
    """Compile a step for devices that are not there, and report its memory, communication and least time on them.

    Nothing runs, and the variables' values are not used. XLA's own compiler for GPUs or TPUs compiles the step in a
    further process. `replicax plan --install gpu` and `--install tpu` install the compilers apart from your
    environment. `plan` needs the extra `plan`. See `replicax docs how-to/planning`.

    Args:
        step: a `function`, or a function that is then compiled as one; or a function of `jax.jit`, `nnx.jit` or
            `eqx.filter_jit`. The `NamedSharding`s of its arrays name the axes of a mesh, which has as many devices as
            the topology and may be an `AbstractMesh`; without any the step is planned for one device.
        batch: the arguments in a tuple, or the only one, as for `strategy.benchmark`. A distributed dataset or an
            iterator stands for its next element, which it keeps. In place of arrays there may be specs: `TensorSpec`,
            `jax.ShapeDtypeStruct`, and `PerReplicaSpec` in the strategy's scope. The part of each replica has the size
            that it has here, whatever the number of replicas. If the strategy has one replica here, whole arrays are
            its part.
        topology: GPUs like "h100:8" or "h100:2x8" (hosts x GPUs), TPUs like "v5e:2x4" or "v5p:4x4x8", or a number
            of virtual CPU devices; or a list.
        axes: the axes of the step's mesh, from the one that spans hosts to the one within a host; by default in the
            order of the mesh.
        compare: True to plan the step also with each combination of the strategy's options `shard_optimizer_state` and
            `shard_variables`, as `variants` of the result.
        time_limit: the most seconds that one compilation takes.

    Returns:
        A `Plan`, which prints as a table, with a column for each topology.

    Raises:
        PlanError: a ValueError. There is no topology of this name; `batch` has no next element; the step has no
            program, or its strategy cannot be planned for; or there is no compiler, it refuses the step, or it takes
            longer than the time limit.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0"])
    >>> def mean(x):
    ...     return rx.get_replica_context().all_reduce("MEAN", jnp.mean(x))
    >>> step = rx.function(lambda x: strategy.run(mean, args=(x,)))
    >>> print(rx.plan(step, jnp.ones((8, 4)), topology=2))  # or "h100:8", or ["h100:2x8", "v5e:4x4"]
    plan of function                        cpu:2
    ---------------------------------------------
    replicas                                    2
    ...
      all-reduce                       1 (0), 4 B
    ...
    """
    names = list(topology) if isinstance(topology, Iterable) and not isinstance(topology, (str, bytes)) else [topology]
    topologies = [chips.parse(name) for name in names]
    if not topologies:
        raise PlanError("`topology` is an empty list. Name at least one topology, such as 'h100:8', 'v5e:2x4' or 8.")
    check(topologies)
    settings = Settings(_check_axes(axes), check_time_limit(time_limit))
    traced: Step | JitStep
    try:
        with jax_internals.assume_cudnn():
            if is_jitted(step) and not is_function(step):
                traced = JitStep(step, arguments(batch))
            else:
                traced = Step(step if is_function(step) else function(step), arguments(batch))
    except TypeError as error:
        if isinstance(batch, tuple) and not batch and "required positional argument" in str(error):
            raise PlanError(f"The step needs arguments: {error}. Pass them, or specs of them, as `batch`.") from None
        raise
    return plan_step(traced, topologies, compare, settings)


def _check_axes(axes: Sequence[str] | None) -> Sequence[str] | None:
    if axes is not None and (isinstance(axes, str) or not all(isinstance(axis, str) for axis in axes)):
        raise PlanError(f"`axes` is a list of the names of the mesh's axes, such as ['data', 'model']; got {axes!r}.")
    return axes


def check(topologies: Sequence[chips.Topology]) -> None:
    """Raise `PlanError` if something is not installed that plans for these topologies need."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise PlanError(f"Plans need flatbuffers, with which JAX stores programs: {doc_pages.install('plan')}.")
    for topology in topologies:
        apart.python_for(topology)


def arguments(batch: Tree) -> tuple[Tree, ...]:
    """Return the step's arguments for a `batch` of `plan`; in place of a dataset or an iterator, its next element.

    Raises:
        PlanError: there is no next element, or `batch` has no arrays.
    """
    if batch is None or isinstance(batch, (str, bytes)):
        raise PlanError(
            f"`batch` is the step's arguments: arrays, specs of them, or a dataset; got {received(batch)}. Pass () for "
            "a step without arguments, and a tuple for arguments of other types."
        )
    try:
        if isinstance(batch, DistributedDataset):
            batch = next(iter(batch))
        elif isinstance(batch, ElementIterator):
            iterator = batch
            batch = pull(iterator)
            push_back(iterator, batch)
    except StopIteration:
        name = type(batch).__name__
        raise PlanError(f"`batch` is a {name} without a next element. Pass one that has elements, or specs.") from None
    return batch if isinstance(batch, tuple) else (batch,)


def plan_step(step: Step | JitStep, topologies: Sequence[chips.Topology], compare: bool, settings: Settings) -> Plan:
    """Return the plan of a step for all topologies, with its variants if they are to be compared."""
    if compare:
        plans, by_name = variants.compare(step, topologies, settings)
        return Plan(step.name, tuple(plans), by_name, step, settings)
    programs = ((step.lowered(topology), topology) for topology in topologies)
    plans = [future.result() for future in pool.compile_all(step.name, programs, len(topologies), settings)]
    return Plan(step.name, tuple(plans), {}, step, settings)
