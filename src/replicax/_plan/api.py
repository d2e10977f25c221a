"""`plan`: what a step would need and do on devices that are not there."""

from __future__ import annotations

import concurrent.futures
import importlib.util
from collections.abc import Callable, Sequence

from replicax._base import doc_pages
from replicax._base.planning import PlanError
from replicax._base.types import Tree
from replicax._data.iterators import ElementIterator
from replicax._engine.function import Function, function, is_function
from replicax._input.distributed_dataset import DistributedDataset
from replicax._plan import apart, chips
from replicax._plan.lowering import Lowered, Step
from replicax._plan.plans import Plan
from replicax._plan.report import TopologyPlan, report


def plan(step: Callable[..., Tree], batch: Tree = (), *, topology: str | int | Sequence[str | int]) -> Plan:
    """Compiles a step for devices that are not there, and says what it needs and does on them; nothing runs.

    The compiler runs in a process of its own: for TPUs the real one, which `replicax plan --install` installs apart
    from your environment. The variables' values play no part. It takes the extra `plan`. See docs/planning.md.

    Args:
        step: a `function`, or a function that is then compiled as one.
        batch: the arguments in a tuple, or the only one, as of `strategy.benchmark`: a distributed dataset or an
            iterator stands for its next element, which it keeps. In place of arrays there may be specs: `TensorSpec`,
            `jax.ShapeDtypeStruct`, and `PerReplicaSpec` in the strategy's scope. Each replica's part stays as large as
            it is here, whatever the number of replicas. Under a strategy of one replica, arrays are that one's part.
        topology: a TPU topology such as "v5e:2x4" or "v5p:4x4x8", or a number of virtual CPU devices; or a list.

    Returns:
        A `Plan`, which prints as a table, with a column for each topology.

    Raises:
        PlanError: a ValueError. There is no such topology, the step has no program of its own, its strategy cannot be
            planned for, or there is no compiler.

    >>> import replicax as rx
    >>> print(rx.plan(train_step, batch, topology=["v5e:2x4", "v5e:8x8"]))  # doctest: +SKIP
    """
    named = [topology] if isinstance(topology, (str, int)) else list(topology)
    topologies = [chips.parse(each) for each in named]
    if not topologies:
        raise PlanError("`topology` names no topology.")
    check(topologies)
    compiled: Function = step if is_function(step) else function(step)
    traced = Step(compiled, arguments(batch))
    return Plan(traced.name, tuple(compile_all(traced, topologies)))


def check(topologies: Sequence[chips.Topology]) -> None:
    """Raises `PlanError` where something is not installed that plans for these topologies take."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise PlanError(f"To plan takes flatbuffers, by which JAX stores programs: {doc_pages.install('plan')}.")
    for each in topologies:
        apart.python_for(each)


def arguments(batch: Tree) -> tuple[Tree, ...]:
    """Returns the step's arguments for a `batch` of `plan`; in place of a dataset or an iterator, its next element.

    Raises:
        PlanError: there is no next element.
    """
    try:
        if isinstance(batch, DistributedDataset):
            batch = next(iter(batch))
        elif isinstance(batch, ElementIterator):
            iterator = batch
            batch = iterator._pull()
            iterator._push_back(batch)
    except StopIteration:
        name = type(batch).__name__
        raise PlanError(f"`batch` is a {name} without a next element. Pass one that has elements, or specs.") from None
    return batch if isinstance(batch, tuple) else (batch,)


def compile_all(step: Step, topologies: Sequence[chips.Topology]) -> list[TopologyPlan]:
    """Returns the plans of a step for all topologies, some of which are compiled at a time."""

    def planned(lowered: Lowered, topology: chips.Topology) -> TopologyPlan:
        return report(topology, lowered.replicas, lowered.inputs, apart.compiled(lowered, topology))

    with concurrent.futures.ThreadPoolExecutor(apart.AT_ONCE) as pool:
        waiting = [pool.submit(planned, step.lowered(topology), topology) for topology in topologies]
        return [each.result() for each in waiting]
