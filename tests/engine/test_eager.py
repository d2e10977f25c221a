"""Eager replicas that go different ways: one clear error, always, and never a hang.

Every combination of what replicas can do is tried, in one process with a deadline.
"""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import pytest
from strategies import SUM, ctx, mirrored, several

import replicax as rx

_PROGRAM = """
import itertools, json, sys, threading, time
import jax.numpy as jnp
import replicax as rx

n, kinds = int(sys.argv[1]) if len(sys.argv) > 1 else {n}, {kinds!r}.split()
strategy = rx.MirroredStrategy([f"GPU:{{i}}" for i in range(n)])
ctx = rx.get_replica_context
with strategy.scope():
    v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    w = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
one = jnp.ones(1)


class Mine(Exception):
    pass


def act(kind):
    if kind == "sum":
        return ctx().all_reduce("SUM", one * 1.0)
    if kind == "mean":
        return ctx().all_reduce("MEAN", one * 1.0)
    if kind == "two":
        return ctx().all_reduce("SUM", [one * 1.0, one * 2.0])
    if kind == "gather":
        return ctx().all_gather(one * 1.0, axis=0)
    if kind == "merge":
        return ctx().merge_call(lambda strategy: None)
    if kind == "assign":
        return v.assign_add(jnp.float32(1.0) * 1)
    if kind == "other_assign":
        return w.assign_add(jnp.float32(1.0) * 1)
    if kind == "create":
        return rx.Variable(1.0)
    if kind == "return":
        return None
    raise Mine(kind)


results = []
for combination in itertools.product(kinds, repeat=n):
    for later in (False, True):  # at once, or after a meeting that all took part in

        def replica():
            if later:
                ctx().all_reduce("SUM", one * 1.0)
            act(combination[int(ctx().replica_id_in_sync_group)])

        start = time.monotonic()
        try:
            strategy.run(replica)
            outcome, text = "done", ""
        except Exception as error:
            outcome, text = type(error).__name__, str(error)
        seconds = time.monotonic() - start
        left = [t.name for t in threading.enumerate() if t.name.startswith("replicax")]
        results.append([combination, later, outcome, text, seconds, left, rx.has_strategy()])
# The strategy is as good as new.
total = strategy.run(lambda: ctx().all_reduce("SUM", one * 1.0))
print(json.dumps([results, [float(x[0]) for x in total.values]]))
"""


def check(finished, n):
    assert finished.returncode == 0, finished.stderr
    results, total = json.loads(finished.stdout)
    assert total == [float(n)] * n
    for combination, later, outcome, text, seconds, left, in_scope in results:
        case = f"{combination}, later={later}: {outcome}: {text}"
        assert not left and not in_scope, case
        assert seconds < 30, case  # the deadline on the process is the real one; this names the culprit
        if len(set(combination)) == 1 and combination[0] != "raise":
            assert outcome == "done", case
        elif "raise" in combination:
            first = combination.index("raise")
            others = combination[:first]
            assert outcome == "Mine" or (outcome == "ReplicaError" and others), case
        else:
            assert outcome == "ReplicaError", case
            for replica in range(n):  # the error names every replica and where it stood
                assert re.search(rf"replica {replica} (waits in \w.* at .*program\.py:\d+|has returned)", text), case
            assert ("different number of replica_context().merge_call() calls" in text) == ("return" in combination), (
                case
            )
    return results


def test_every_combination_of_two_replicas_ends(run_python):
    """Facts 13, 21."""
    kinds = "sum mean two gather merge assign other_assign create return raise"
    results = check(run_python(_PROGRAM.format(n=2, kinds=kinds), timeout=120), 2)
    assert len(results) == 200


@pytest.mark.thorough
def test_every_combination_of_four_replicas_ends(run_python):
    """Facts 13, 21."""
    results = check(run_python(_PROGRAM.format(n=4, kinds="sum gather assign return raise"), timeout=150), 4)
    assert len(results) == 2 * 5**4


@several
def test_the_error_names_each_replica_and_where_it_stood(n):
    strategy = mirrored(n)

    def replica():
        r = int(ctx().replica_id_in_sync_group)
        if r == 0:
            return ctx().all_reduce(SUM, jnp.ones(1) * r)
        return ctx().all_gather(jnp.ones(1) * r, axis=0)

    with pytest.raises(rx.ReplicaError) as caught:
        strategy.run(replica)
    lines = str(caught.value).splitlines()
    assert len(lines) == n + 1 and "different calls" in lines[0]
    first = replica.__code__.co_firstlineno
    assert re.fullmatch(rf"  replica 0 waits in all_reduce\(.*\) at {re.escape(__file__)}:{first + 3}", lines[1])
    for r in range(1, n):
        assert re.fullmatch(
            rf"  replica {r} waits in all_gather\(.*\) at {re.escape(__file__)}:{first + 4}", lines[r + 1]
        )


@several
def test_except_exception_does_not_keep_a_released_replica_alive(n):
    """`except Exception` around a collective does not keep a released replica alive."""
    strategy, after = mirrored(n), []

    def replica():
        if int(ctx().replica_id_in_sync_group) == n - 1:
            raise KeyError("last")
        try:
            ctx().all_reduce(SUM, jnp.ones(1) * 1.0)
        except Exception:
            after.append(1)
        after.append(2)

    with pytest.raises(KeyError, match="last"):
        strategy.run(replica)
    assert after == []


@several
def test_a_released_replica_that_reaches_a_collective_ends(n):
    """`finally` blocks run, and a collective in them does not wait for anybody."""
    strategy, log = mirrored(n), []

    def replica():
        r = int(ctx().replica_id_in_sync_group)
        if r == n - 1:
            raise KeyError("last")
        try:
            ctx().all_reduce(SUM, jnp.ones(1) * 1.0)
        finally:
            log.append(r)
            ctx().all_reduce(SUM, jnp.ones(1) * 1.0)

    with pytest.raises(KeyError, match="last"):
        strategy.run(replica)
    assert sorted(log) == list(range(n - 1))


@several
def test_an_error_in_the_merge_function_reaches_the_caller_once(n):
    calls = []

    def merge(strategy):
        calls.append(1)
        raise ValueError("in the merge")

    with pytest.raises(ValueError, match="in the merge"):
        mirrored(n).run(lambda: ctx().merge_call(merge))
    assert len(calls) == 1


@several
def test_a_replica_with_more_collectives_than_the_others_is_reported(n):
    def replica():
        for _ in range(1 + int(ctx().replica_id_in_sync_group)):
            ctx().all_reduce(SUM, jnp.ones(1) * 1.0)

    with pytest.raises(rx.ReplicaError, match=r"replica 0 has returned\n  replica 1 waits in all_reduce"):
        mirrored(n).run(replica)


@several
def test_base_exceptions_are_raised_too(n):
    class Leave(BaseException):
        pass

    def replica():
        if int(ctx().replica_id_in_sync_group) == n - 1:
            raise Leave
        ctx().all_reduce(SUM, jnp.ones(1) * 1.0)

    with pytest.raises(Leave):
        mirrored(n).run(replica)
    with pytest.raises(SystemExit):
        mirrored(n).run(lambda: exit_with(3))


def exit_with(code):
    raise SystemExit(code)


@several
def test_many_runs_leave_no_threads_or_memory(n):
    """The fixture of every test counts threads; here after 50 runs that end in an error."""
    strategy = mirrored(n)

    def replica():
        if int(ctx().replica_id_in_sync_group):
            ctx().all_reduce(SUM, jnp.ones(1) * 1.0)

    for _ in range(50):
        with pytest.raises(rx.ReplicaError):
            strategy.run(replica)
    assert strategy.run(lambda: None) is None
