"""A user's mistakes are answered in the user's terms: what was wrong, where, what was received, and what to do."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import MEAN, SUM, compiled, ctx, eager, mirrored, per_replica, replica_id, ways

import replicax as rx
from replicax._base.messages import received

S, A = rx.VariableSynchronization, rx.VariableAggregation


def strategy():
    return mirrored(2)


def x(values=(1.0, 2.0)):
    return per_replica(strategy(), list(values))


def run(replica, *args):
    return strategy().run(replica, args=args)


# mistake: (what is run, with which way, the error, words that its message has)
BOTH = [eager, compiled]
MISTAKES = {
    "all_gather above the replicas": (
        lambda: kept_context().all_gather(jnp.ones(1), axis=0),
        BOTH,
        RuntimeError,
        ["Need to be inside `call_for_each_replica()`"],
    ),
    "gather in a replica": (
        lambda: run(lambda: strategy().gather(jnp.ones(1), axis=0)),
        BOTH,
        RuntimeError,
        ["requires cross-replica context", "get_replica_context().all_gather()"],
    ),
    "reduce in a replica": (
        lambda: run(lambda: strategy().reduce(SUM, jnp.ones(1), axis=None)),
        BOTH,
        RuntimeError,
        ["cross-replica context", "get_replica_context().merge_call()"],
    ),
    "run in a replica": (
        lambda: run(lambda: strategy().run(lambda: 1)),
        BOTH,
        RuntimeError,
        ["cross-replica context"],
    ),
    "merge_call in a branch": (
        lambda: run(lambda: lax.cond(True, lambda: ctx().merge_call(lambda s: 1.0), lambda: 0.0)),
        [eager],
        RuntimeError,
        ["`merge_call` called while defining a new graph", "rx.function"],
    ),
    "all_reduce where replicas may not come": (
        lambda: run(lambda: lax.cond(replica_id() > 0, lambda: ctx().all_reduce(SUM, replica_id()), lambda: 0.0)),
        [compiled],
        RuntimeError,
        ["branch", "differ between replicas", "all_reduce"],
    ),
    "two strategies": (
        lambda: in_scope(mirrored(4), lambda: run(lambda: 1)),
        BOTH,
        RuntimeError,
        ["Mixing different tf.distribute.Strategy objects", "is not"],
    ),
    "a variable of another strategy": (
        lambda: assigned(variables()["four"]),
        BOTH,
        RuntimeError,
        ["Mixing different tf.distribute.Strategy"],
    ),
    "structures that differ": (
        lambda: run(lambda: {"a": 1} if first() else {"b": 1}),
        [eager],
        AssertionError,
        ["'a'", "'b'"],
    ),
    "lengths that differ": (
        lambda: run(lambda: [1] if first() else [1, 2]),
        [eager],
        AssertionError,
        ["len", "1", "2"],
    ),
    "kinds that differ": (
        lambda: run(lambda: [1] if first() else (1,)),
        [eager],
        AssertionError,
        ["structures differ", "list", "tuple"],
    ),
    "a scalar to gather": (
        lambda: strategy().gather(x(), axis=0),
        BOTH,
        rx.InvalidArgumentError,
        ["calar", "value[None]"],
    ),
    "a scalar to all_gather": (
        lambda: run(lambda: ctx().all_gather(replica_id(), axis=0)),
        BOTH,
        rx.InvalidArgumentError,
        ["calar", "value[None]"],
    ),
    "an axis out of range": (
        lambda: strategy().gather(x([[1.0], [2.0]]), axis=1),
        BOTH,
        rx.InvalidArgumentError,
        ["[-1, 1)", "1"],
    ),
    "an axis to reduce out of range": (
        lambda: strategy().reduce(SUM, x([[1.0], [2.0]]), axis=3),
        BOTH,
        ValueError,
        ["Invalid reduction dimension 3", "1 dimension", "(1,)"],
    ),
    "an axis that is no number": (
        lambda: strategy().reduce(SUM, x([[1.0], [2.0]]), axis="batch"),
        BOTH,
        TypeError,
        ["axis", "'batch'"],
    ),
    "an unknown reduce op": (
        lambda: strategy().reduce("max", x(), axis=None),
        BOTH,
        ValueError,
        ["'MAX' is not a valid ReduceOp"],
    ),
    "a reduce op of another kind": (
        lambda: strategy().reduce(A.SUM, x(), axis=None),
        BOTH,
        AssertionError,
        ["reduce_op", "ReduceOp", "VariableAggregation"],
    ),
    "an unknown op in a replica": (
        lambda: run(lambda: ctx().all_reduce("prod", replica_id())),
        BOTH,
        ValueError,
        ["'PROD' is not a valid ReduceOp"],
    ),
    "a Python number to all_reduce": (
        lambda: run(lambda: ctx().all_reduce(SUM, 3)),
        BOTH,
        TypeError,
        ["all_reduce", "3", "int", "jnp.asarray"],
    ),
    "text to all_reduce": (
        lambda: run(lambda: ctx().all_reduce(SUM, {"a": "text"})),
        BOTH,
        TypeError,
        ["'text'", "str"],
    ),
    "truth values to add": (
        lambda: run(lambda: ctx().all_reduce(SUM, replica_id() > 0)),
        BOTH,
        rx.InvalidArgumentError,
        ["bool", "cast"],
    ),
    "a per-replica value to all_reduce": (
        lambda: captured_per_replica(),
        BOTH,
        TypeError,
        ["PerReplica", "args", "strategy.run"],
    ),
    "a per-replica value to jax.numpy": (
        lambda: jnp.add(x(), 1),
        BOTH,
        ValueError,
        ["PerReplica", "strategy.run"],
    ),
    "the sum of what is not distributed": (
        lambda: strategy().reduce(SUM, run(lambda: 3), axis=None),
        BOTH,
        ValueError,
        ["3", "ReduceOp.SUM"],
    ),
    "the sum of a mirrored variable": (
        lambda: strategy().reduce(SUM, variables()["plain"], axis=None),
        BOTH,
        AssertionError,
        ["mirrored", "same on every replica"],
    ),
    "a literal assigned with a sum": (
        lambda: assigned(variables()["sum"]),
        BOTH,
        ValueError,
        ["1.0", "ReduceOp.SUM"],
    ),
    "a wrong shape": (
        lambda: variables()["plain"].assign([1.0, 2.0]),
        BOTH,
        ValueError,
        ["w:0", "()", "(2,)"],
    ),
    "a wrong structure of a pytree": (
        lambda: variables()["tree"].assign({"b": 1.0}),
        BOTH,
        ValueError,
        ["p:0", "structure"],
    ),
    "a variable of text": (
        lambda: in_scope(strategy(), lambda: rx.Variable({"a": "text"})),
        [eager],
        TypeError,
        ["'text'", "str"],
    ),
    "no initial value": (lambda: rx.Variable(), [eager], ValueError, ["initial_value"]),
    "reading without an aggregation": (
        lambda: variables()["on_read"].value(),
        BOTH,
        ValueError,
        ["VariableAggregation", "NONE"],
    ),
    "adding to an on-read sum": (
        lambda: variables()["on_read_sum"].assign_add(1.0),
        BOTH,
        ValueError,
        ["assign_add", "cross-replica context", "SUM"],
    ),
    "a batch that is no batch": (
        lambda: list(strategy().experimental_distribute_dataset([np.float32(1), np.float32(2)])),
        [eager],
        (ValueError, TypeError),
        ["batch"],
    ),
    "no dataset": (
        lambda: strategy().experimental_distribute_dataset(5),
        [eager],
        (ValueError, TypeError),
        ["dataset", "int"],
    ),
    "a dataset where a function is due": (
        lambda: strategy().distribute_datasets_from_function([np.ones(2)]),
        [eager],
        TypeError,
        ["list"],
    ),
    "no sequence of arguments": (
        lambda: strategy().run(lambda a: a, args=x()),
        BOTH,
        ValueError,
        ["list or tuple", "PerReplica"],
    ),
    "shapes that differ in compiled code": (
        lambda: jax.jit(lambda: run(lambda a: ctx().merge_call(lambda _, b: b.values[0].sum(), (a,)), ragged()))(),
        [eager],
        ValueError,
        ["(1,)", "(2,)", "eager"],
    ),
    "an assignment inside of jax.jit": (
        lambda: jax.jit(lambda a: variables()["ordinary"].assign(a))(jnp.float32(1)),
        [eager],
        RuntimeError,
        ["jax.jit", "replicax.function"],
    ),
    "a replica id as a Python number in compiled code": (
        lambda: rx.function(lambda: run(lambda: int(ctx().replica_id_in_sync_group)))(),
        [eager],
        jax.errors.ConcretizationTypeError,
        [],
    ),
    "unknown options": (
        lambda: rx.CommunicationOptions(implementation="fast"),
        [eager],
        ValueError,
        ["FAST"],
    ),
    "options that are a dict": (
        lambda: run(lambda a: ctx().all_reduce(SUM, a, options={"reduction_dtype": "bfloat16"}), x()),
        BOTH,
        TypeError,
        ["rx.CommunicationOptions(", "reduction_dtype", "dict"],
    ),
    "options that are a dict, to gather": (
        lambda: run(lambda a: ctx().all_gather(a[None], 0, options={"bytes_per_pack": 1}), x()),
        BOTH,
        TypeError,
        ["rx.CommunicationOptions(", "dict"],
    ),
    "options of a job that are a name": (
        lambda: rx.MultiWorkerMirroredStrategy(communication_options="NCCL"),
        [eager],
        TypeError,
        ["CommunicationOptions", "'NCCL'", "str"],
    ),
    "a word for a flag": (
        lambda: rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state="no"),
        [eager],
        TypeError,
        ["shard_optimizer_state", "True or False", "'no'", "str"],
    ),
}


def first():
    return int(ctx().replica_id_in_sync_group) == 0


def kept_context():
    kept = []
    strategy().run(lambda: kept.append(ctx()))
    return _Inside(kept[0])


class _Inside:
    """A kept replica context whose methods are called in the strategy's scope."""

    def __init__(self, context):
        self._context = context

    def all_gather(self, value, axis):
        with strategy().scope():
            return self._context.all_gather(value, axis)


def in_scope(other, call):
    with other.scope():
        return call()


@functools.cache
def variables():
    """Made before anything is compiled, where none may be made any more."""
    with mirrored(4).scope():
        made = {"four": rx.Variable(1.0)}
    with strategy().scope():
        made["plain"] = rx.Variable(1.0, name="w")
        made["sum"] = rx.Variable(1.0, aggregation=A.SUM)
        made["tree"] = rx.Variable({"a": 1.0}, name="p")
        made["on_read"] = rx.Variable(1.0, synchronization=S.ON_READ)
        made["on_read_sum"] = rx.Variable(1.0, synchronization=S.ON_READ, aggregation=A.SUM)
    return {**made, "ordinary": rx.Variable(1.0)}


def assigned(variable):
    return run(lambda: variable.assign(1.0))


def captured_per_replica():
    value = x()
    return run(lambda: ctx().all_reduce(SUM, value))


def ragged():
    return strategy().experimental_distribute_values_from_function(lambda c: jnp.ones(c.replica_id_in_sync_group + 1))


@pytest.mark.parametrize(
    "name, as_way",  # each is a case of its own, in both ways (see selection.py)
    [(name, way) for name, (_, both, _, _) in MISTAKES.items() for way in both],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_a_mistake_is_answered_in_its_terms(name, as_way):
    call, _, error, words = MISTAKES[name]
    variables()
    with pytest.raises(error) as caught:
        as_way(call)()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} missing in: {caught.value}"
    assert not rx.has_strategy() and not rx.in_cross_replica_context()


@ways
def test_after_every_mistake_the_strategy_is_as_it_was(way):
    variables()
    for call, both, error, _ in MISTAKES.values():
        if way in both:
            with pytest.raises(error):
                way(call)()
    result = way(lambda: run(lambda: ctx().all_reduce(MEAN, replica_id())))()
    assert [float(part) for part in result.values] == [0.5, 0.5]


def outside(x):
    return x


class Callable:
    def __call__(self, x):
        return x

    def method(self, x):
        return x


LINE = outside.__code__.co_firstlineno


@pytest.mark.parametrize(
    "value, text",
    [
        (outside, f"`outside` (test_messages.py:{LINE})"),
        (jax.jit(outside), f"`outside` (test_messages.py:{LINE})"),
        (rx.function(outside), f"`outside` (test_messages.py:{LINE})"),
        (functools.partial(outside, 1), f"functools.partial of `outside` (test_messages.py:{LINE})"),
        (Callable().method, f"`Callable.method` (test_messages.py:{Callable.method.__code__.co_firstlineno})"),
        (len, "`len`"),
        (Callable(), "an object of type Callable"),
        (Callable, "the class `Callable`"),
        ([1, 2], "[1, 2] of type list"),
    ],
)
def test_messages_name_functions_and_objects_without_addresses(value, text):
    assert received(value) == text


def test_messages_name_lambdas_by_their_line_and_cut_long_values():
    short = lambda: None  # noqa: E731
    assert received(short) == f"the lambda at test_messages.py:{short.__code__.co_firstlineno}"
    assert received("x" * 1000) == f"'{'x' * 199}... of type str"


def test_the_warning_about_retracing_names_the_function_and_its_line():
    def step(x):
        return x

    compiled_step = rx.function(step)
    with pytest.warns(UserWarning) as caught:
        for n in range(1, 6):
            compiled_step(jnp.ones(n))
    (text,) = (str(warning.message) for warning in caught)
    assert f"calls to `step` (test_messages.py:{step.__code__.co_firstlineno}) triggered retracing" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: rx.data.Dataset.range(3).with_options(wrong),
        lambda wrong: rx.Optimizer(wrong, []),
        lambda wrong: rx.MirroredStrategy([wrong]),
        lambda wrong: mirrored(2).reduce(wrong, jnp.ones(2), axis=None),
    ],
)
@pytest.mark.parametrize("wrong", [outside, Callable()])
def test_errors_about_wrong_arguments_have_no_addresses(call, wrong):
    with pytest.raises((TypeError, ValueError, AssertionError)) as caught:
        call(wrong)
    assert received(wrong) in str(caught.value) and " at 0x" not in str(caught.value)
