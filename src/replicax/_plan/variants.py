"""A step under other options of its strategy: replicated, or with sharded optimizer state or variables."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from replicax._base import doc_pages
from replicax._base.planning import PlanError
from replicax._base.quantities import seconds, size
from replicax._optim import optimizer as optimizers
from replicax._plan import pool
from replicax._plan.chips import Topology
from replicax._plan.exports import Lowered
from replicax._plan.jit_steps import JitStep
from replicax._plan.lowering import Step
from replicax._plan.pool import Settings
from replicax._plan.report import TopologyPlan
from replicax._report.columns import Row, columns
from replicax._strategies.replicated import MirroringExtended
from replicax._tracing import frames
from replicax._tracing.context import StrategyLike
from replicax._values import mesh_of

AS_IT_IS = "as it is"
# The values of `shard_optimizer_state` and `shard_variables`.
_OPTIONS = {
    "replicated": (False, False),
    "shard_optimizer_state": (True, False),
    "shard_variables": (False, True),
    "both": (True, True),
}


@dataclass(frozen=True)
class Variant:
    """The plans of a step with other options of its strategy; `variant["v5e:2x4"]` is one of them.

    Attributes:
        name: "replicated", "shard_optimizer_state", "shard_variables" or "both".
        change: the change to the program; "as it is" if the program is this variant.
        topologies: a plan for each topology; empty if the variant is not possible.
        error: the reason why it is not possible, None otherwise.
    """

    name: str
    change: str
    topologies: tuple[TopologyPlan, ...]
    error: str | None = None

    def __getitem__(self, topology: str | int) -> TopologyPlan:
        return find(self.topologies, topology)


def find(plans: Sequence[TopologyPlan], topology: str | int) -> TopologyPlan:
    """Return the plan for a topology; raise `KeyError` if none of the plans is for it."""
    names = str(topology), f"cpu:{topology}"
    for plan in plans:
        if plan.topology in names:
            return plan
    topologies = ", ".join(plan.topology for plan in plans)
    raise KeyError(f"The plan is for {topologies}, not for {topology!r}.")


def compare(
    step: Step | JitStep, topologies: Sequence[Topology], settings: Settings
) -> tuple[list[TopologyPlan], dict[str, Variant]]:
    """Return the plans of a step, and its variants by name. Variants with the same program share its plan.

    Raises:
        PlanError: the step's strategy does not have the options.
    """
    extended = _strategy_of(step)
    assert isinstance(step, Step)
    positions: dict[tuple[str, bytes, str], int] = {}  # of the plans of distinct programs
    plans_of: dict[str, tuple[int, ...]] = {}
    errors: dict[str, str] = {}

    def programs() -> Iterator[tuple[Lowered, Topology]]:
        for name, options in [(AS_IT_IS, None), *_OPTIONS.items()]:
            try:
                with contextlib.nullcontext() if options is None else _with_options(step, extended, *options):
                    lowered = [step.lowered(topology) for topology in topologies]
            except Exception as error:
                if options is None:
                    raise
                # The step itself has been lowered before, so that the options are the reason.
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            keys = [(topology.name, x.program, f"{x.specs} {x.donated}") for x, topology in zip(lowered, topologies)]
            for key, program in zip(keys, zip(lowered, topologies)):
                if key not in positions:
                    positions[key] = len(positions)
                    yield program
            plans_of[name] = tuple(positions[key] for key in keys)

    compiled = pool.compile_all(step.name, programs(), 3 * len(topologies), settings)
    as_it_is = plans_of[AS_IT_IS]
    plans = [compiled[i].result() for i in as_it_is]
    for name, numbers in plans_of.items():
        for error in filter(None, (compiled[i].exception() for i in numbers)):
            errors[name] = str(error).splitlines()[0]
    same: dict[tuple[int, ...], str] = {as_it_is: AS_IT_IS}
    variants = {}
    for name, options in _OPTIONS.items():
        change = _change(extended, *options)
        if name in errors:
            variants[name] = Variant(name, change, (), errors[name])
            continue
        equal = same.setdefault(plans_of[name], name)
        change = AS_IT_IS if equal == AS_IT_IS else change if equal == name else f"{change}, as {equal}"
        variants[name] = Variant(name, change, tuple(compiled[i].result() for i in plans_of[name]))
    return plans, variants


def _strategy_of(step: Step | JitStep) -> MirroringExtended:
    """Return the extended methods of the strategy of a step's variables."""
    strategies: list[StrategyLike | None] = []
    if isinstance(step, Step) and step.mesh is not None:
        strategies = [variable.distribute_strategy for variable in step.variables if mesh_of(variable) is step.mesh]
    extended = strategies[0].extended if strategies and strategies[0] is not None else None
    if not isinstance(extended, MirroringExtended):
        raise PlanError(
            f"{step.name} has no variants to compare: it has no variables of a strategy with the options "
            "`shard_optimizer_state` and `shard_variables`. Create the variables in the scope of a MirroredStrategy, "
            "MultiWorkerMirroredStrategy or TPUStrategy. "
            f"See {doc_pages.page('how-to/planning#variants-of-a-step')}."
        )
    return extended


@contextlib.contextmanager
def _with_options(step: Step, extended: MirroringExtended, optimizer_state: bool, variables: bool) -> Iterator[None]:
    """Return a context that gives the step's strategy these options, and its optimizers the state that follows."""
    variables_of_step = {id(variable) for variable in step.variables}
    of_step = [optimizer for optimizer, _ in optimizers.living if id(optimizer.state) in variables_of_step]
    with frames.lock, contextlib.ExitStack() as stack:
        stack.enter_context(extended._with_options(optimizer_state, variables))
        for optimizer in of_step:
            stack.enter_context(optimizer._with_planned_state())
        yield


def _change(extended: MirroringExtended, optimizer_state: bool, variables: bool) -> str:
    """Return the change to a program that gives its strategy these options."""
    kind = type(extended._container)
    name = kind.__name__ if "shard_variables" in inspect.signature(kind).parameters else "MirroredStrategy"
    names = "shard_optimizer_state", "shard_variables"
    before, after = (extended._shards_optimizer_state, extended._divides is not False), (optimizer_state, variables)
    options = "".join(f", {option}=True" for option, is_on in zip(names, after) if is_on)
    left_out = [option for option, was_on, is_on in zip(names, before, after) if was_on and not is_on]
    without = f" without {' and '.join(left_out)}" if left_out else ""
    return f"{name}(...{options}){without}"


def text(plans: Sequence[TopologyPlan], variants: Mapping[str, Variant]) -> str:
    """Return the tables that compare the variants of a step, one for each topology, the best variant first."""
    return "\n".join(line for plan in plans for line in ["", *_table(plan, list(variants.values()))])


def _table(as_it_is: TopologyPlan, variants: Sequence[Variant]) -> list[str]:
    lines = [(variant[as_it_is.topology], variant.name, variant.change) for variant in variants if not variant.error]
    if all(change != AS_IT_IS for _, _, change in lines):
        lines.insert(0, (as_it_is, AS_IT_IS, AS_IT_IS))
    head = (f"variants on {as_it_is.topology}", "fits", "needed", "least time", "exposed", "change to the program")
    rows: list[Row] = [head, None]
    for plan, name, change in sorted(lines, key=lambda line: _rank(line[0])):
        least = seconds(plan.bound[1]) if plan.bound else "-"
        fits = "-" if plan.available is None else "yes" if plan.fits else "NO"
        exposed = size(plan.exposed) if plan.timeline else "-"
        rows.append((name, fits, size(plan.needed), least, exposed, change))
    return columns(rows, left=[0, 5]) + [
        f"{variant.name} is not possible: {variant.error}" for variant in variants if variant.error
    ]


def _rank(plan: TopologyPlan) -> tuple[bool, float, float]:
    return not plan.fits, plan.bound[1] if plan.bound else 0.0, plan.needed
