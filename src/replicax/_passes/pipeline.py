"""The passes that rewrite compiled programs, in one ordered list.

A compiled function is rewritten in three stages: the jaxpr of each replica function, for `shard_map`; the jaxpr of the
whole function; and the same jaxpr with the arguments of the compiled program (see `_engine.argument_layout`). In each
stage the passes of the list follow one another, and each rewrites the result of the passes before it. So passes for
uneven batches, sharded variables and CPUs work together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex

from replicax._passes import cpu_forms, merge_all_reduces, scatters_in_turn, sharded_variables, uneven_replicas
from replicax._passes.facts import Facts, Stage


class Pass(NamedTuple):
    """A rewriting of jaxprs.

    Args:
        name: in the text of `describe`.
        stages: the stages that it is part of.
        is_for: returns whether these facts call for the pass.
        applies: returns whether the pass changes a jaxpr.
        evaluate: computes the results of a jaxpr from its arguments, in another way than JAX does.
    """

    name: str
    stages: Collection[Stage]
    is_for: Callable[[Facts], bool]
    applies: Callable[[jex.ClosedJaxpr, Facts], bool]
    evaluate: Callable[[jex.ClosedJaxpr, Facts, Sequence[jax.Array]], list[jax.Array]]


PASSES = (
    Pass(
        "sharded_variables",
        {Stage.REPLICA},
        lambda facts: facts.parts is not None,
        lambda jaxpr, facts: True,
        sharded_variables.evaluate,
    ),
    Pass(
        "open_calls",
        {Stage.REPLICA},
        lambda facts: facts.is_branch,
        uneven_replicas.has_collectives_in_calls,
        uneven_replicas.open_calls,
    ),
    Pass(
        "scatters_in_turn",
        {Stage.FUNCTION},
        lambda facts: facts.packing is not None and facts.packing.fit.ahead > 0,
        scatters_in_turn.applies,
        scatters_in_turn.evaluate,
    ),
    Pass(
        "merge_all_reduces",
        {Stage.PROGRAM},
        lambda facts: facts.packing is not None,
        merge_all_reduces.applies,
        merge_all_reduces.evaluate,
    ),
    Pass(
        "cpu_forms",
        {*Stage},
        lambda facts: facts.platform == "cpu" and facts.optimizes,
        cpu_forms.applies,
        cpu_forms.evaluate,
    ),
)


def passes_for(jaxpr: jex.ClosedJaxpr, facts: Facts) -> list[Pass]:
    """Return the passes that apply to a jaxpr, in their order, and record them in `facts.applied`."""
    candidates = (entry for entry in PASSES if facts.stage in entry.stages and entry.is_for(facts))
    chosen = [entry for entry in candidates if entry.applies(jaxpr, facts)]
    facts.applied.extend(entry.name for entry in chosen)
    return chosen


def rewrite(jaxpr: jex.ClosedJaxpr, facts: Facts) -> jex.ClosedJaxpr:
    """Return a jaxpr of the same arguments and results, rewritten by all passes that apply."""
    for entry in passes_for(jaxpr, facts):
        jaxpr = _trace(entry, jaxpr, facts, jaxpr.in_avals)
    return jaxpr


def evaluate(jaxpr: jex.ClosedJaxpr, facts: Facts, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the results of a jaxpr, rewritten by all passes that apply.

    Args:
        jaxpr: the jaxpr.
        facts: the facts about it.
        arguments: its arguments; a part of an argument that is in `facts.parts`.
    """
    chosen = passes_for(jaxpr, facts)
    for entry in chosen[:-1]:
        jaxpr = _trace(entry, jaxpr, facts, arguments)
    if chosen:  # evaluated in place, which takes one trace less
        return chosen[-1].evaluate(jaxpr, facts, arguments)
    results: list[jax.Array] = jex.jaxpr_as_fun(jaxpr)(*arguments)
    return results


def _trace(entry: Pass, jaxpr: jex.ClosedJaxpr, facts: Facts, arguments: Iterable[object]) -> jex.ClosedJaxpr:
    return jax.make_jaxpr(lambda *args: entry.evaluate(jaxpr, facts, args))(*arguments)


def describe(applied: Collection[tuple[Stage, str]], is_compiled: bool) -> str:
    """Return a text with one line for each pass and stage, in the order in which they run.

    Args:
        applied: the stages and names of the passes that have rewritten a program.
        is_compiled: whether the program is compiled; the passes of its last stage are not chosen before.
    """
    lines = []
    for stage, entry in ((stage, entry) for stage in Stage for entry in PASSES if stage in entry.stages):
        if stage is Stage.PROGRAM and not is_compiled:
            effect = "chosen by the first call"
        else:
            effect = "applied" if (stage, entry.name) in applied else "not needed"
        lines.append(f"  {stage.value:16}  {entry.name:17}  {effect}")
    return "\n".join(lines)
