"""A closure on the task that runs it: read, compute, update.

An update of one server happens at once. One of several servers happens at all or at none, although workers may be lost
at any moment: they keep it first, then one of them, the last, applies it, which decides, and then the others do. A
closure that runs again, because its worker was lost, goes the same way; where the last server has decided for the
first run already, the others apply what that one had them keep.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np

from replicax._parameter_server.arrays import Array, joined, on_host
from replicax._parameter_server.places import Place
from replicax._parameter_server.plans import WorkerPlan
from replicax._parameter_server.servers import Call, Servers
from replicax._transport.handlers import Answer

_ATTEMPTS = 3  # to update before somebody else does, where the new value was computed from all of the old one

Arrays = Sequence[np.ndarray | jax.Array]


@dataclass
class Computed:
    """A closure that has computed, and has not updated anything yet.

    Args:
        shipped: what goes to the servers: one or two arrays for each shipped value.
        results: what the worker knows of the results.
        operands: of the functions that are called back.
        versions: of the parts that were read, by their names.
    """

    shipped: list[list[Array]]
    results: list[Array]
    operands: list[Array]
    versions: dict[str, int]


def compute(plan: WorkerPlan, others: Arrays, args: Arrays, servers: Servers) -> Computed:
    """Reads what a closure needs, and computes it."""
    exchange, rows, gathers = plan.exchange, list[np.ndarray](), list[tuple[Place, np.ndarray]]()
    if exchange.gathers:
        ids = plan.index(others, args)
        gathers = [(gather.place, np.asarray(ids[gather.ids]).reshape(-1)) for gather in exchange.gathers]
    read: list[Array] = []
    versions: dict[str, int] = {}
    if exchange.gathers or exchange.reads:
        read, rows, versions = servers.fetch(exchange.reads, gathers, plan.compares)
        rows = [array.reshape(gather.aval.shape) for array, gather in zip(rows, exchange.gathers)]
    found = iter([on_host(array) for array in plan.compute(others, args, rows, read)])
    shipped = [[next(found) for _ in avals] for avals in exchange.shipped]
    results = [next(found) for _ in exchange.computed]
    return Computed(shipped, results, list(found), versions)


def update(plan: WorkerPlan, computed: Computed, servers: Servers, number: int, done: int) -> list[Array] | None:
    """Updates variables with what a closure has computed; returns its results.

    Returns None where somebody else has replaced a value meanwhile of which the new one was computed.

    Args:
        plan: the closure's.
        computed: by `compute`.
        servers: the parameter servers.
        number: the closure's.
        done: closures with lower numbers have ended.
    """
    if not plan.exchange.updates:
        return _results(plan, computed, {})
    calls = {}
    for each in plan.exchange.updates:
        arrays: list[np.ndarray] = []
        for take in each.takes:
            arrays += take.of(cast(list[np.ndarray], computed.shipped[take.shipped]))
        # Parts that no id fell on were not read: nothing was computed from them.
        versions = {name: computed.versions[name] for name in each.compared if name in computed.versions}
        head = {"program": plan.key, "closure": number, "done": done, "versions": versions}
        calls[each.server] = Call("update", head, arrays)
    *others, last = calls
    if others:
        attempt = uuid.uuid4().hex
        calls = {n: Call(call.method, {**call.head, "attempt": attempt}, call.arrays) for n, call in calls.items()}
        kept = servers.all({n: calls[n]._replace(method="keep") for n in others})
        if _are_changed(kept):
            return None
    answers = servers.all({last: calls[last]})
    if _are_changed(answers):
        return None
    if others:
        decided = {**calls[last].head, "attempt": answers[last][0].get("attempt", attempt)}
        answers |= servers.all({n: Call("apply", decided) for n in others})
    return _results(plan, computed, answers)


def _are_changed(answers: Mapping[int, Answer]) -> bool:
    return any("changed" in head for head, _ in answers.values())


def _results(plan: WorkerPlan, computed: Computed, answers: Mapping[int, Answer]) -> list[Array]:
    """Returns the results, of which servers answer some."""
    found: dict[int, list[Array]] = {n: [array] for n, array in zip(plan.exchange.computed, computed.results)}
    for result, number_of_update, k in plan.exchange.answers:
        head, news = answers[plan.exchange.updates[number_of_update].server]
        # Of a closure that ended elsewhere meanwhile nobody waits for this result.
        found.setdefault(result, []).append(news[k] if "late" not in head else np.zeros(0))
    return [joined(parts) for _, parts in sorted(found.items())]


def run(
    plan: WorkerPlan, others: Arrays, args: Arrays, servers: Servers, number: int, done: int
) -> tuple[list[Array], list[Array]] | None:
    """Runs a closure that asks nobody before it updates; returns its results, and operands of what it calls back.

    Returns None where others have replaced what it was to update, again and again.
    """
    for _ in range(_ATTEMPTS):
        computed = compute(plan, others, args, servers)
        results = update(plan, computed, servers, number, done)
        if results is not None:
            return results, computed.operands
    return None
