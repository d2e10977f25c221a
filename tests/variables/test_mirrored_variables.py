"""Mirrored variables: made, read, assigned in every context, scattered, printed, and taken by JAX."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import (
    MEAN,
    SUM,
    comes_per_replica,
    ctx,
    dealt,
    device_names,
    everywhere,
    few,
    local_ids,
    mirrored,
    one_device,
    over,
    parts,
    per_replica,
    replica_id,
    several,
    ways,
)

import replicax as rx

S, A = rx.VariableSynchronization, rx.VariableAggregation


def made(strategy, value=1.0, **more):
    with strategy.scope():
        return rx.Variable(value, **more)


# What it is.


@over(copies=True, processes=1, logical=False)
def test_a_variable_in_scope_is_a_mirrored_variable(make, n):
    """Facts 29, 59."""
    strategy = make()
    v = made(make(), [1.0, 2.0], name="w")
    assert type(v).__name__ == "MirroredVariable" and isinstance(v, rx.Variable) and isinstance(v, rx.DistributedValues)
    assert (v.name, v.shape, v.dtype, v.trainable, v.ndim) == ("w:0", (2,), np.float32, True, 1)
    assert v.synchronization is S.ON_WRITE and v.aggregation == A.NONE and v.distribute_strategy is strategy
    assert v.numpy().tolist() == v.read_value().tolist() == v.value().tolist() == [1.0, 2.0]
    full = device_names(strategy)
    assert v.device == full[0] and [c.device for c in v.values] == full
    assert [c.name for c in v.values] == ["w:0", *(f"w/replica_{i}:0" for i in range(1, len(full)))]
    assert all(type(c).__name__ == "ResourceVariable" for c in v.values)
    assert bool(v.is_initialized())


@over(copies=True)
def test_a_variable_is_an_array_to_jax_and_numpy(make, n):
    """Facts 59, 76."""
    v = made(make(), [1.0, 2.0])
    assert (v + 1).tolist() == (1 + v).tolist() == [2, 3] and (v * v).tolist() == [1, 4] and (2 / v).tolist() == [2, 1]
    assert float(v[1]) == 2 and v[...].tolist() == [1, 2] and len(v) == 2 and [float(x) for x in v] == [1, 2]
    assert float(jnp.sum(v)) == 3 and np.asarray(v).tolist() == [1, 2] and (-v).tolist() == [-1, -2]
    assert (v @ v).tolist() == 5 and (v > 1).tolist() == [False, True] and (v == v).tolist() == [True, True]
    assert jax.tree.leaves(v)[0].tolist() == [1, 2]
    assert jax.grad(lambda w: jnp.sum(w * w))(v).tolist() == [2, 4]
    scalar = made(make(), 3.0)
    assert float(scalar) == 3 and int(scalar) == 3 and bool(scalar) and f"{scalar:.1f}" == "3.0"


def test_a_variable_of_a_number_has_a_firm_dtype():
    """A variable's dtype does not give way to that of an operand."""
    half = jnp.ones(2, jnp.bfloat16)
    for v in (rx.Variable(1.0), made(mirrored(2), 1.0), made(mirrored(2), [1.0, 2.0]), rx.Variable(lambda: 1.0)):
        before = (v * half).dtype
        assert before == np.float32
        v.assign(v + 0.0)
        assert (v * half).dtype == np.float32


def test_a_variable_of_a_numpy_array_is_made_without_a_program(caplog):
    """Whatever its dtype, and in memory of its own. (By `jnp.asarray` each shape is compiled.)"""
    given = [np.ones((3, 1, 7, 5, i), kind) for i, kind in enumerate((np.float32, np.float64, np.int64, np.bool_), 1)]
    with jax.log_compiles():
        variables = [made(mirrored(2), array) for array in given]
    assert [str(v.dtype) for v in variables] == ["float32", "float32", "int32", "bool"]
    assert [record.message for record in caplog.records if "ompil" in record.message] == []
    for array in given:
        array[...] = 0
    assert all(v.numpy().all() for v in variables)


@pytest.mark.across_processes
@over(copies=True)
def test_the_initial_value_is_computed_once(make, n):
    """Fact 60."""
    calls = []

    def init():
        calls.append(1)
        return jax.random.normal(jax.random.key(0), (3,))

    v = made(make(), init)
    assert len(calls) == 1 and len({tuple(p) for p in parts(make(), v)}) == 1
    assert made(make(), lambda: 3.0, dtype=np.float16).dtype == np.float16
    assert made(make(), np.arange(3, dtype=np.int8)).dtype == np.int8 and made(make(), 3).dtype == np.int32
    assert made(make(), made(make(), [7.0])).numpy().tolist() == [7.0]


@several
def test_each_component_lies_on_its_device(n):
    """Fact 59."""
    v = made(mirrored(n), [1.0])
    for _ in range(2):
        devices = [next(iter(c.value().devices())) for c in v.values]
        assert len(set(devices)) == n
        v.assign_add([1.0])


def test_names():
    """Fact 61."""
    a, b = made(mirrored(2)), made(mirrored(2))
    with rx.name_scope("layer"):
        c = made(mirrored(2), name="kernel")
    assert [x.name for v in (a, b, c) for x in v.values] == [
        *["Variable:0", "Variable/replica_1:0"] * 2,
        "layer/kernel:0",
        "layer/kernel/replica_1:0",
    ]


def test_printing():
    """Fact 30."""
    v = made(mirrored(2), [1.0, 2.0], name="w")
    first = "<Variable 'w:0' shape=(2,) dtype=float32, numpy=array([1., 2.], dtype=float32)>"
    second = first.replace("w:0", "w/replica_1:0")
    assert str(v) == repr(v) == f"MirroredVariable:{{\n  0: {first},\n  1: {second}\n}}"
    v.assign([3.0, 4.0])
    assert "array([3., 4.]" in str(v)


def test_identity():
    """Fact 73."""
    v, w = made(mirrored(2)), made(mirrored(2))
    assert bool(v == w) and v.ref() == v.ref() and v.ref() != w.ref() and v.ref().deref() is v
    assert len({v.ref(), v.ref(), w.ref()}) == 2
    with pytest.raises(TypeError, match=r"Variable is unhashable. Instead, use variable.ref\(\) as the key"):
        hash(v)
    with pytest.raises(TypeError):
        {v: 1}  # noqa: B018
    clone = copy.deepcopy(v)
    clone.assign(5.0)
    assert type(clone).__name__ == "MirroredVariable" and float(v) == 1.0 and float(clone) == 5.0
    v.assign(7.0)
    assert parts(mirrored(2), clone) == [5.0, 5.0]


def test_arguments():
    """Facts 66, 69, 158."""
    for more, expected in (
        ({}, (S.ON_WRITE, A.NONE, True)),
        ({"synchronization": S.ON_WRITE}, (S.ON_WRITE, A.NONE, True)),
        ({"aggregation": None}, (S.ON_WRITE, A.NONE, True)),
        ({"aggregation": 1}, (S.ON_WRITE, A.SUM, True)),
        ({"trainable": False}, (S.ON_WRITE, A.NONE, False)),
    ):
        v = made(mirrored(2), **more)
        assert (v.synchronization, v.aggregation, v.trainable) == expected
    with pytest.raises(ValueError, match="`NONE` variable synchronization mode is not supported .* for variable: n"):
        made(mirrored(2), synchronization=S.NONE, name="n")
    for wrong in ("sum", SUM):
        with pytest.raises(ValueError, match="Invalid variable aggregation mode: .* for variable: n"):
            made(mirrored(2), aggregation=wrong, name="n")
    with pytest.raises(ValueError, match="Invalid variable synchronization mode: on_read for variable: None"):
        made(mirrored(2), synchronization="on_read")
    with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype is not supported"):
        made(mirrored(2), 0, aggregation=A.MEAN)
    assert rx.Variable(0, aggregation=A.MEAN).aggregation == A.MEAN
    plain = rx.Variable(1.0, synchronization=S.ON_READ, aggregation=A.SUM)
    assert type(plain).__name__ == "ResourceVariable" and not plain.trainable and plain.synchronization is S.ON_READ
    with pytest.raises(ValueError):
        made(mirrored(2), None)


# Assigning outside of replicas.


@over(copies=True)
@ways
def test_assigning_outside_of_replicas(make, n, way):
    """Fact 62."""
    strategy, v = make(), made(make())

    def after(program):
        way(program)()
        return parts(strategy, v)

    assert after(lambda: v.assign(5.0)) == [5.0] * n
    assert after(lambda: v.assign_add(1.0)) == [6.0] * n
    assert after(lambda: v.assign_sub(jnp.float32(2.0))) == [4.0] * n
    assert after(lambda: v.assign(np.float32(3.0))) == [3.0] * n
    other = made(make(), 7.0)
    assert after(lambda: v.assign(other)) == [7.0] * n
    assert after(lambda: v.assign(v + 1)) == [8.0] * n
    with strategy.scope():
        assert after(lambda: v.assign(v * 2)) == [16.0] * n
        value = strategy.extended.reduce_to(SUM, per_replica(strategy, [1.0] * n), destinations=v)
    assert after(lambda: v.assign(value)) == [float(n)] * n


@over(copies=True)
@ways
def test_an_assignment_outside_of_replicas_returns_a_mirrored_value(make, n, way):
    """Fact 62: a mirrored value, not the variable; None with read_value=False."""
    v = made(make())
    result = way(lambda: v.assign(5.0))()
    assert type(result).__name__ == "Mirrored" and parts(make(), result) == [5.0] * n
    v.assign(6.0)
    assert parts(make(), result) == [5.0] * n  # the value of then
    assert way(lambda: v.assign_add(1.0, read_value=False))() is None and float(v) == 7.0


@over(copies=True)
@ways
def test_what_an_assignment_returns_is_an_operand(make, n, way):
    step, v = made(make(), 0), made(make(), [1.0, 2.0])

    def compute():
        count, value = step.assign_add(1), v.assign_add([1.0, 1.0])
        assert (value.shape, value.dtype, len(value)) == ((2,), jnp.float32, 2)
        return count % 2 == 1, 3 - count, value * 2.0 + v, value[1:], -value, jnp.sum(value), value.max()

    results = way(compute)()
    assert [np.asarray(x).tolist() for x in results] == [True, 2, [6.0, 9.0], [3.0], [-2.0, -3.0], 5.0, 3.0]
    count = step.assign_add(1)
    assert (float(count), int(count), bool(count == 2), f"{count:d}") == (2.0, 2, True, "2")
    with pytest.raises(AttributeError, match="'Mirrored' object has no attribute 'nope'"):
        count.nope  # noqa: B018


@several
def test_an_eager_replica_computes_with_its_own_copy_of_a_mirrored_value(n):
    value = made(mirrored(n), [1.0, 2.0]).assign_add([1.0, 1.0])
    result = mirrored(n).run(lambda: (value * 2.0, value.device))
    assert [x.tolist() for x in result[0].values] == [[4.0, 6.0]] * n
    assert len(set(result[1].values)) == n


@several
@ways
def test_a_per_replica_argument_makes_the_components_differ(n, way):
    """Fact 62."""
    strategy, v = mirrored(n), made(mirrored(n))
    x = per_replica(strategy, [r + 1.0 for r in range(n)])
    way(lambda x: v.assign(x))(x)
    assert parts(strategy, v) == [r + 1.0 for r in range(n)] and float(v) == 1.0
    way(lambda x: v.assign_add(x))(x)
    assert parts(strategy, v) == [2 * (r + 1.0) for r in range(n)]
    way(lambda: v.assign_add(1.0))()
    assert parts(strategy, v) == [2 * (r + 1.0) + 1 for r in range(n)]


@over(copies=True)
@ways
def test_wrong_values_are_refused(make, n, way):
    """Fact 62: and leave the variable as it was."""
    strategy = make()
    for aggregation in (A.NONE, A.MEAN):
        v = made(make(), aggregation=aggregation)
        for where in (lambda f: f(), strategy.run):
            for error, match, value in (
                (ValueError, "Shape mismatch", lambda: [1.0, 2.0]),
                (TypeError, "Cannot convert 'a'", lambda: "a"),
                (
                    ValueError,
                    "conversion requested dtype float32 for Tensor with dtype int32",
                    lambda: jnp.ones((), jnp.int32),
                ),
            ):
                if where != strategy.run or aggregation is A.NONE:
                    with pytest.raises(error, match=match):
                        way(lambda where=where, v=v, value=value: where(lambda: v.assign(value())))()
        assert parts(strategy, v) == [1.0] * n


@over(copies=True)
@ways
def test_a_wrong_shape_is_an_error_of_two_classes_as_in_tensorflow(make, n, way):
    strategy = make()
    for initial_value in (1.0, True):
        v = made(make(), initial_value)
        wrong = [initial_value] * 2
        for where in (lambda f: f(), strategy.run):
            for method in ("assign", "assign_add", "assign_sub"):
                with pytest.raises(ValueError, match=f"{v.name}': Shape mismatch") as caught:
                    way(lambda where=where, method=method, v=v, wrong=wrong: where(lambda: getattr(v, method)(wrong)))()
                assert caught.type is (ValueError if method == "assign" else rx.InvalidArgumentError)


# Assigning in replicas.


@several
@ways
def test_without_aggregation_each_replica_assigns_its_own_component(n, way):
    """Fact 63, for a variable that allows it."""
    strategy, v = mirrored(n), made(mirrored(n), copies_may_differ=True)
    way(lambda: strategy.run(lambda: v.assign(2.0)))()
    assert parts(strategy, v) == [2.0] * n
    result = way(lambda: strategy.run(lambda: v.assign_add(jnp.float32(2.0) + 0 * replica_id())))()
    assert parts(strategy, result) == parts(strategy, v) == [4.0] * n
    way(lambda: strategy.run(lambda: v.assign(replica_id())))()
    assert parts(strategy, v) == [float(r) for r in range(n)] and float(v) == 0.0
    way(lambda: strategy.run(lambda: v.assign_add(10.0 + replica_id())))()
    assert parts(strategy, v) == [10.0 + 2 * r for r in range(n)] and float(v) == 10.0
    way(lambda: strategy.run(lambda: v.assign_sub(v * 2)))()
    assert parts(strategy, v) == [-(10.0 + 2 * r) for r in range(n)]


@pytest.mark.across_processes
@over(copies=True)
@ways
@pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA], ids=lambda a: a.name)
def test_aggregations(make, n, way, aggregation):
    """Fact 64: the replicas' values are combined, then every component is updated."""
    strategy, v = make(), made(make(), 10.0, aggregation=aggregation)
    values = [r + 1.0 for r in range(n)]
    combined = {A.SUM: sum(values), A.MEAN: sum(values) / n, A.ONLY_FIRST_REPLICA: 1.0}[aggregation]
    for method, expected in (("assign", combined), ("assign_add", 2 * combined), ("assign_sub", combined)):
        result = way(lambda method=method: strategy.run(lambda: getattr(v, method)(replica_id() + 1)))()
        assert parts(strategy, v) == parts(strategy, result) == [expected] * n


@several
@ways
def test_the_same_object_on_every_replica(n, way):
    """Fact 64: a literal is refused under SUM, and taken by the others."""
    strategy, shared = mirrored(n), jnp.float32(1.0)
    v = made(mirrored(n), 10.0, aggregation=A.SUM)
    for value in (1.0, shared):
        with pytest.raises(ValueError, match="A non-DistributedValues value .* cannot be reduced .* ReduceOp.SUM"):
            way(lambda value=value: strategy.run(lambda: v.assign_add(value)))()
    assert parts(strategy, v) == [10.0] * n and not rx.has_strategy()
    for aggregation in (A.MEAN, A.ONLY_FIRST_REPLICA):
        v = made(mirrored(n), 10.0, aggregation=aggregation)
        for value in (1.0, shared):
            way(lambda value=value, v=v: strategy.run(lambda: v.assign_add(value)))()
        assert parts(strategy, v) == [12.0] * n


@dealt("aggregation", [A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA], copies=True)
@ways
def test_a_python_number_is_assigned(make, n, way, aggregation):
    """As to TensorFlow's counter of steps. With one replica in each process a plain value is that replica's own."""
    strategy, v = make(), made(make(), 10.0, aggregation=aggregation)
    if aggregation is A.SUM and len(local_ids(strategy)) > 1:
        return  # refused, see above
    total = n if aggregation is A.SUM else 1
    way(lambda: strategy.run(lambda: v.assign_add(1)))()
    assert parts(strategy, v) == [10.0 + total] * n
    way(lambda: strategy.run(lambda: v.assign(1)))()
    assert parts(strategy, v) == [total] * n


@over(copies=True)
@ways
def test_a_truth_value_of_the_first_replica(make, n, way):
    strategy, v = make(), made(make(), False, aggregation=A.ONLY_FIRST_REPLICA)
    way(lambda: strategy.run(lambda: v.assign(replica_id() == 0)))()
    assert parts(strategy, v) == [True] * n and v.dtype == np.bool_
    way(lambda: strategy.run(lambda: v.assign(False)))()
    assert parts(strategy, v) == [False] * n


@several
def test_differing_python_numbers_are_refused(n):
    """Fact 64."""
    for aggregation in (A.SUM, A.MEAN):
        v = made(mirrored(n), 10.0, aggregation=aggregation)
        with pytest.raises((TypeError, AttributeError)):
            mirrored(n).run(lambda v=v: v.assign_add(float(ctx().replica_id_in_sync_group)))
        assert float(v) == 10.0
    v = made(mirrored(n), 10.0, aggregation=A.ONLY_FIRST_REPLICA)
    mirrored(n).run(lambda: v.assign_add(float(ctx().replica_id_in_sync_group) + 2))
    assert parts(mirrored(n), v) == [12.0] * n


@over(at_least=2, copies=True)
@ways
def test_an_assignment_in_replicas_returns_the_new_value(make, n, way):
    """Fact 65."""
    strategy, v = make(), made(make(), aggregation=A.MEAN)
    seen = []

    def replica():
        result = v.assign_add(replica_id() * 0 + 1)
        seen.append(isinstance(result, jax.Array))
        return result

    result = way(lambda: strategy.run(replica))()
    assert all(seen) and comes_per_replica(strategy, result) and result is not v
    assert way(lambda: strategy.run(lambda: v.assign_add(replica_id() * 0 + 1, read_value=False)))() is None
    assert float(v) == 3.0


@over(at_least=2, copies=True)
@ways
def test_integers(make, n, way):
    """Fact 66."""
    strategy, v = make(), made(make(), 0, aggregation=A.SUM)
    way(lambda: strategy.run(lambda: v.assign_add(ctx().replica_id_in_sync_group + 1)))()
    assert parts(strategy, v) == [n * (n + 1) // 2] * n and v.dtype == np.int32


@several
@ways
def test_a_replica_reads_its_own_component(n, way):
    """Fact 67."""
    strategy, v = mirrored(n), made(mirrored(n))
    for r, component in enumerate(v.values):
        component.assign(5.0 + r)
    assert float(v) == 5.0 and parts(strategy, v) == [5.0 + r for r in range(n)]

    def replica():
        assert type(v).__name__ == "MirroredVariable" and v.name == "Variable:0"
        return v + 0, v.read_value() * 1.0, jnp.asarray(v) * 1.0, v.value() * 1.0

    for result in way(lambda: strategy.run(replica))():
        assert parts(strategy, result) == [5.0 + r for r in range(n)]
    assert float(v + 0) == 5.0
    assert float(strategy.reduce(SUM, strategy.run(lambda: v + 0), axis=None)) == sum(5.0 + r for r in range(n))


@several
def test_an_eager_replica_reads_numbers_and_its_device(n):
    """Fact 67."""
    strategy, v = mirrored(n), made(mirrored(n), 3.0)
    seen = strategy.run(lambda: (float(v.numpy()), float(v), v.device))
    assert seen[0].values == seen[1].values == (3.0,) * n
    assert [d[-5:] for d in seen[2].values] == [f"GPU:{i}" for i in range(n)]


@over(at_least=2, copies=True)
@ways
def test_a_write_is_read_at_once_and_in_order(make, n, way):
    strategy, v = make(), made(make(), aggregation=A.SUM)

    def replica():
        before = v + 0.0
        v.assign_add(replica_id() + 1)
        between = v + 0.0
        v.assign(v * replica_id())
        return before, between, v + 0.0

    before, between, after = way(lambda: strategy.run(replica))()
    ids = sum(range(n))
    total = 1.0 + n * (n + 1) / 2
    assert parts(strategy, before) == [1.0] * n and parts(strategy, between) == [total] * n
    assert parts(strategy, after) == parts(strategy, v) == [total * ids] * n


@over(copies=True)
@ways
def test_an_ordinary_variable_is_shared_by_the_replicas(make, n, way):
    """Facts 70, 134: their assignments happen one after the other; each worker has its own."""
    strategy, plain = make(), rx.Variable(1.0)
    ids = local_ids(strategy)
    assert not strategy.extended.variable_created_in_scope(plain)
    way(lambda: strategy.run(lambda: plain.assign_add(1.0)))()
    assert float(plain) == 1.0 + len(ids)
    way(lambda: strategy.run(lambda: plain.assign(replica_id())))()
    assert float(plain) == ids[-1]
    with strategy.scope():
        plain.assign(9.0)
    assert float(plain) == 9.0
    way(lambda: strategy.run(lambda: plain.assign_sub(replica_id() + 1)))()
    assert float(plain) == 9.0 - sum(r + 1 for r in ids)
    rows = rx.Variable([0.0, 0.0])
    way(lambda: strategy.run(lambda: rows.scatter_add(rx.IndexedSlices(jnp.ones(1), jnp.array([1])))))()
    assert rows.numpy().tolist() == [0.0, len(ids)]
    way(lambda: strategy.run(lambda: ctx().merge_call(lambda _: plain.assign_add(1.0, read_value=False))))()
    assert float(plain) == 10.0 - sum(r + 1 for r in ids)


@over(at_least=2, copies=True)
@ways
def test_a_numpy_number_is_each_replicas_own(make, n, way):
    """Such as the number of its rows, which `tf.shape` gives."""
    strategy, v = make(), made(make(), 0, aggregation=A.SUM)
    way(lambda: strategy.run(lambda: v.assign_add(np.int32(3))))()
    assert parts(strategy, v) == [3 * n] * n


def test_compiled_replicas_do_not_assign_to_a_shared_variable_what_depends_on_it():
    """Eagerly each replica sees what those before it have assigned, which compiled ones cannot."""
    strategy, plain, other = mirrored(2), rx.Variable(0.0), rx.Variable(5.0)

    def adds():
        plain.assign(plain + replica_id() + 1)

    def calls():
        plain.assign(jax.jit(lambda x: x * 2 + replica_id() + 1)(plain.value()))

    def adds_what_is_missing():
        plain.assign_add(2 + replica_id() - plain.value())

    def adds_to_zero():
        plain.assign(0.0)
        plain.assign_add(1.0)

    def assigns_another():
        plain.assign(other * (replica_id() + 1))

    def assigns_to_another():
        other.assign_add(plain + 1)

    def doubles_what_it_assigned():
        plain.assign(replica_id() + 3.0)
        plain.assign(plain * 2)

    def assigned(run):
        plain.assign(0.0)
        other.assign(5.0)
        run()
        return float(plain)

    refused = [(adds, 3.0), (calls, 4.0), (adds_what_is_missing, 3.0), (adds_to_zero, 1.0)]
    alike = [(assigns_another, 10.0), (assigns_to_another, 0.0), (doubles_what_it_assigned, 8.0)]
    for step, result in refused + alike:
        assert assigned(functools.partial(strategy.run, step)) == result
    for step, result in alike:
        assert assigned(rx.function(functools.partial(strategy.run, step))) == result
    for step, _ in refused:
        with pytest.raises(ValueError, match="was made outside of the strategy's scope"):
            assigned(rx.function(functools.partial(strategy.run, step)))
        assert float(plain) == 0.0


def test_compiled_replicas_assign_to_a_shared_variable_once_what_is_the_same_for_all():
    """So an optimizer may be made outside of the scope, with the variables that it trains."""
    strategy, weights = mirrored(2), rx.Variable(jnp.ones(2))
    optimizer, momentum = rx.Optimizer(optax.sgd(0.5, momentum=0.5), weights), rx.Variable(1.0)

    def step():
        optimizer.apply_gradients(jnp.full(2, 1.0 + replica_id()))
        momentum.assign(momentum * 0.5 + ctx().all_reduce(MEAN, replica_id() + 0.5))

    compiled = rx.function(lambda: strategy.run(step))
    for expected in ([-0.5, -0.5], [-2.75, -2.75]):  # gradients 3, and then 3 + 3 / 2
        compiled()
        assert weights.numpy().tolist() == expected
    assert float(momentum) == 1.75


@several
@ways
def test_a_variable_of_another_strategy(n, way):
    """Fact 71: may be read, not assigned."""
    strategy, other = mirrored(n), rx.MirroredStrategy(["GPU:5", "GPU:6"])
    with other.scope():
        v = rx.Variable(1.0, aggregation=A.SUM)
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
        way(lambda: v.assign(2.0))()
    with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
        way(lambda: strategy.run(lambda: v.assign_add(replica_id())))()
    assert parts(other, v) == [1.0, 1.0]
    assert parts(strategy, strategy.run(lambda: v + 0)) == [1.0] * n


@dealt(
    "method, aggregation",
    list(
        itertools.product(
            few(["scatter_add", "scatter_sub", "scatter_mul", "scatter_div"]),
            few([A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA, A.NONE]),
        )
    ),
    at_least=2,
    copies=True,
)
@ways
def test_scatter_in_replicas(make, n, way, method, aggregation):
    """Fact 72."""
    strategy, v = make(), made(make(), [1.0, 2.0, 3.0, 4.0], aggregation=aggregation, copies_may_differ=True)

    def slices():
        return rx.IndexedSlices((10.0 * (replica_id() + 1))[None], ctx().replica_id_in_sync_group[None])

    way(lambda: strategy.run(lambda: getattr(v, method)(slices())))()

    def applied(replicas, share):
        values = [1.0, 2.0, 3.0, 4.0]
        for r in replicas:
            x = 10.0 * (r + 1) / share
            values[r] = {"add": values[r] + x, "sub": values[r] - x, "mul": values[r] * x, "div": values[r] / x}[
                method[8:]
            ]
        return values

    if aggregation is A.NONE:
        expected = [applied([r], 1) for r in range(n)]
    else:
        expected = [
            applied([0] if aggregation is A.ONLY_FIRST_REPLICA else range(n), n if aggregation is A.MEAN else 1)
        ] * n
    np.testing.assert_allclose(parts(strategy, v), expected, rtol=1e-6)


@over(at_least=2, copies=True)
@ways
@pytest.mark.parametrize("method", ["scatter_update", "scatter_max", "scatter_min"])
def test_scatter_that_cannot_be_summed(make, n, way, method):
    """Facts 72, 171."""
    strategy = make()

    def slices():
        return rx.IndexedSlices((10.0 * (replica_id() + 1))[None], ctx().replica_id_in_sync_group[None])

    for aggregation in (A.SUM, A.MEAN):
        v = made(make(), [1.0, 2.0, 3.0, 4.0], aggregation=aggregation)
        with pytest.raises(NotImplementedError, match=f"{method} is only supported for mirrored variable .* got: Var"):
            way(lambda v=v: strategy.run(lambda: getattr(v, method)(slices())))()
    v = made(make(), [1.0, 2.0, 3.0, 4.0], aggregation=A.ONLY_FIRST_REPLICA)
    way(lambda: strategy.run(lambda: getattr(v, method)(slices())))()
    first = {"scatter_update": 10.0, "scatter_max": 10.0, "scatter_min": 1.0}[method]
    assert parts(strategy, v) == [[first, 2.0, 3.0, 4.0]] * n


@over(copies=True)
@ways
def test_scatter_outside_of_replicas(make, n, way):
    """Fact 72."""
    v = made(make(), [1.0, 2.0, 3.0])
    way(lambda: v.scatter_add(rx.IndexedSlices(jnp.array([5.0, 7.0]), jnp.array([0, 0]))))()
    assert parts(make(), v) == [[13.0, 2.0, 3.0]] * n
    with pytest.raises(TypeError, match="sparse_delta is not IndexedSlices"):
        v.scatter_add(5)
    assert v.sparse_read([2, 0]).tolist() == [3.0, 13.0]


@over(copies=True)
@ways
@pytest.mark.parametrize("place", ["replicas", "outside"])
def test_a_scatter_keeps_the_dtype_of_a_variable(make, n, way, place):
    strategy = make()
    run = strategy.run if place == "replicas" else lambda f: f()
    v = made(strategy, [7, -7, 1, 9], copies_may_differ=True)
    way(lambda: run(lambda: v.scatter_div(rx.IndexedSlices(jnp.array([2, 2, 2]), jnp.array([0, 1, 0])), name="x")))()
    assert parts(strategy, v) == [[1, -3, 1, 9]] * n and v.dtype == v.values[0].numpy().dtype == np.int32
    floats = rx.IndexedSlices(jnp.array([1.5]), jnp.array([0]))
    refused = [getattr(v, f"scatter_{name}") for name in ["add", "sub", "mul", "div", "max", "min", "update"]]
    for method in (*refused, v.batch_scatter_update, lambda x: v.scatter_nd_update([[0]], x.values)):
        with pytest.raises(ValueError, match="Tensor conversion requested dtype int32 for Tensor with dtype float32"):
            way(lambda method=method: run(lambda: method(floats)))()
    assert parts(strategy, v) == [[1, -3, 1, 9]] * n


@over(at_least=2, copies=True)
@ways
def test_parts_that_an_aggregation_would_combine_with_the_rest_are_refused(make, n, way):
    strategy, v = make(), made(make(), [1.0, 2.0], aggregation=A.SUM)
    with pytest.raises(NotImplementedError, match="scatter_nd_add is not supported in replicas for a variable with"):
        way(lambda: strategy.run(lambda: v.scatter_nd_add([[0]], [5.0])))()
    way(lambda: v.scatter_nd_add([[0]], [5.0]))()
    assert parts(strategy, v) == [[6.0, 2.0]] * n


@pytest.mark.parametrize(
    "method, rows, indices, message",
    [
        ("scatter_add", [1], [4], r"indices\[...\] = 4 is not in a variable of shape \(4,\)"),
        ("scatter_update", [1], [-1], r"indices\[...\] = -1 is not in"),
        ("scatter_add", [1, 2], [0], "Must have updates.shape = indices.shape"),
        ("scatter_div", [0], [0], "updates must not contain 0"),
        ("scatter_add", [1], [0.0], "indices must be integers"),
    ],
)
def test_wrong_rows_of_a_scatter_are_refused(method, rows, indices, message):
    v = rx.Variable([7, -7, 1, 9])
    with pytest.raises(rx.InvalidArgumentError, match=message):
        getattr(v, method)(rx.IndexedSlices(rows, indices))
    assert v.numpy().tolist() == [7, -7, 1, 9]


@pytest.mark.parametrize(
    "dtype, value, error",
    [("bool", 2, TypeError), ("int8", 300, TypeError), ("int32", 1.5, TypeError), ("float32", None, ValueError)],
)
def test_numbers_that_the_dtype_does_not_have_are_refused(dtype, value, error):
    v = rx.Variable(np.ones((), dtype))
    with pytest.raises(error, match="onvert"):
        v.assign(value)
    assert v.numpy() == 1
    if value is not None:
        with pytest.raises(error, match="onvert"):
            rx.Variable(value, dtype=dtype)


# Gradients, creators, pytrees.


@over(at_least=2, copies=True)
@ways
def test_gradients_in_replicas_are_the_replicas_own(make, n, way):
    """Fact 68."""
    strategy, v = make(), made(make(), 3.0)
    x = per_replica(strategy, [r + 1.0 for r in range(n)])

    def by_tape(x):
        with rx.GradientTape() as tape:
            loss = v * v * x
        assert [w is v for w in tape.watched_variables()] == [True]
        return tape.gradient(loss, v)

    def by_grad(x):
        return jax.grad(lambda w: w * w * x)(v.value())

    for gradient in (by_tape, by_grad):
        result = way(lambda x, gradient=gradient: strategy.run(gradient, args=(x,)))(x)
        assert parts(strategy, result) == [6.0 * (r + 1) for r in range(n)]


@over(copies=True)
@ways
def test_gradients_outside_of_replicas(make, n, way):
    """Fact 68."""
    v = made(make(), 3.0)

    def program():
        with rx.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, v)

    assert float(way(program)()) == 6.0


def test_creators():
    """Fact 75."""
    calls, strategy = [], mirrored(2)

    def creator(next_creator, **kwargs):
        v = next_creator(**kwargs)
        calls.append((kwargs.get("name"), type(v).__name__))
        return v

    with rx.variable_creator_scope(creator), strategy.scope():
        rx.Variable(1.0, name="outside")
    with strategy.scope(), rx.variable_creator_scope(creator):
        v = rx.Variable(1.0, name="inside")
    assert calls == [
        ("outside", "ResourceVariable"),
        ("outside/replica_1/", "ResourceVariable"),
        ("inside", "MirroredVariable"),
    ]
    assert type(v).__name__ == "MirroredVariable"


def test_a_creator_may_change_the_arguments():
    def creator(next_creator, **kwargs):
        return next_creator(**{**kwargs, "initial_value": 9.0, "trainable": False})

    with mirrored(2).scope(), rx.variable_creator_scope(creator):
        v = rx.Variable(1.0)
    assert parts(mirrored(2), v) == [9.0, 9.0] and not v.trainable


@over(at_least=2, copies=True)
@ways
def test_run_enters_the_scope_that_a_subclass_has_of_its_own(make, n, way, monkeypatch):
    base = type(make())

    def on_read(next_creator, **kwargs):
        return next_creator(**{**kwargs, "synchronization": S.ON_READ, "aggregation": A.MEAN, "trainable": False})

    class Replicator(base):
        @contextlib.contextmanager
        def scope(self):
            with super().scope() as strategy, rx.variable_creator_scope(on_read):
                yield strategy

    strategy, mine = make(), []
    monkeypatch.setattr(strategy, "__class__", Replicator)  # others use this object, too

    def step():
        if not mine:
            mine.append(rx.Variable(1.0))
        return mine[0] * 2

    result = way(lambda: strategy.run(step))()
    assert mine[0].synchronization is S.ON_READ and not mine[0].trainable
    assert parts(strategy, result) == [2.0] * n
    with strategy.scope():
        assert rx.Variable(1.0).synchronization is S.ON_READ


@over(at_least=2, copies=True)
@ways
def test_arithmetic_with_per_replica_values(make, n, way):
    """Fact 76: not outside of replicas."""
    strategy, v = make(), made(make(), [1.0, 2.0])
    x = per_replica(strategy, [10.0**r for r in range(n)])
    with pytest.raises((AttributeError, TypeError, ValueError)):
        way(lambda x: v + x)(x)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        way(lambda x: jnp.add(v, x))(x)
    assert parts(strategy, way(lambda x: strategy.run(lambda a: v * a, args=(x,)))(x)) == [
        [10.0**r, 2 * 10.0**r] for r in range(n)
    ]


@ways
def test_leaves_beside_mirrored_ones_are_converted_and_checked_too(way):
    strategy = mirrored(2)
    with strategy.scope():
        v, source = rx.Variable({"a": 1.0, "b": jnp.zeros(2)}), rx.Variable(0.0)
    way(lambda: v.assign({"a": source.assign(4.0), "b": np.array([1, 2])}))()
    assert v.value()["a"] == 4.0 and v.value()["b"].tolist() == [1.0, 2.0] and v.value()["b"].dtype == jnp.float32
    with pytest.raises(ValueError, match="Shape mismatch"):
        way(lambda: v.assign({"a": source.assign(5.0), "b": np.zeros(3)}))()
    with pytest.raises(ValueError, match="its structure is"):
        way(lambda: v.assign({"a": source.assign(5.0)}))()
    assert v.value()["a"] == 4.0


@over(copies=True)
@ways
def test_a_variable_of_a_pytree(make, n, way):
    """State of Flax or Optax is one variable."""
    strategy, half = make(), n - 1.0  # the mean of 0, 2, 4, ...
    v = made(make(), {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}, aggregation=A.MEAN)

    def floats():
        v.assign(jax.tree.map(lambda x: x + replica_id() * 2, v.value()))
        return v.value()["w"][0, 0] * 1.0

    assert parts(strategy, way(lambda: strategy.run(floats))()) == [1.0 + half] * n
    assert jax.tree.map(lambda x: x.tolist(), v.numpy()) == {"w": [[1 + half] * 2] * 2, "b": [half] * 2}
    with pytest.raises(ValueError, match="structure"):
        v.assign({"w": jnp.ones((2, 2))})
    with pytest.raises(TypeError):
        made(make(), {"a": "text"})
    mixed = made(make(), {"count": np.int32(3), "moments": (jnp.zeros(2), [])}, copies_may_differ=True)

    def step():
        state = mixed.value()
        mixed.assign({"count": state["count"] + 1, "moments": (state["moments"][0] + replica_id(), [])})

    way(lambda: strategy.run(step))()
    assert mixed.numpy()["count"] == 4 and mixed.dtype["count"] == np.int32
    assert everywhere([c.numpy()["moments"][0].tolist() for c in mixed.values]) == [[float(r)] * 2 for r in range(n)]
    assert mixed.values[-1].numpy()["moments"][1] == []


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Doubler:
    """A pytree that can be called, as modules of Equinox and Flax can."""

    w: jax.Array

    def __call__(self):
        return 2 * self.w


@over(plain=True)
def test_callable_pytree_is_a_value_and_not_an_initializer(make):
    """Whatever JAX flattens into something else than itself is a value."""
    module = made(make(), Doubler(jnp.ones(2))).value()
    assert isinstance(module, Doubler) and module.w.tolist() == [1.0, 1.0]
    bound = made(make(), jax.tree_util.Partial(jnp.add, jnp.ones(2))).value()
    assert bound(1.0).tolist() == [2.0, 2.0]
    struct = flax.struct.dataclass(
        type("Struct", (), {"__annotations__": {"w": jax.Array}, "__call__": Doubler.__call__})
    )
    assert made(make(), struct(jnp.ones(2))).value().w.tolist() == [1.0, 1.0]
    for initializer in (
        Doubler(jnp.ones(2)).__call__,
        functools.partial(jnp.full, 2, 2.0),
        jax.jit(lambda: jnp.full(2, 2.0)),
    ):
        assert made(make(), initializer).numpy().tolist() == [2.0, 2.0]
    assert made(make(), lambda: Doubler(jnp.zeros(2))).value().w.tolist() == [0.0, 0.0]


def test_variable_refuses_a_pytree_with_functions():
    with pytest.raises(TypeError, match=r"got a leaf <function .* in Doubler. Keep functions out of it"):
        rx.Variable(Doubler(lambda: jnp.ones(2)))


def test_one_device_variables_are_ordinary():
    """Fact 115."""
    one = one_device()
    with one.scope():
        v = rx.Variable(1.0)
        w = rx.Variable(1.0, synchronization=S.ON_READ, aggregation=A.SUM)
    assert type(v).__name__ == type(w).__name__ == "ResourceVariable"
    assert v.device == one.extended.worker_devices[0] == "/job:localhost/replica:0/task:0/device:GPU:1"
    for way in (lambda f: f, rx.function):
        before = float(v)
        way(lambda: one.run(lambda: v.assign_add(jnp.float32(1.0))))()
        assert float(v) == before + 1 and v.device.endswith("GPU:1")
    assert one.extended.variable_created_in_scope(v)


@over(at_least=2, copies=True)
@ways
def test_a_mean_assigned_by_hand_keeps_the_components_equal(make, n, way):
    """Fact 63: what makes reduce-then-assign work without an aggregation."""
    strategy, v = make(), made(make(), 10.0)
    way(lambda: strategy.run(lambda: v.assign_sub(0.5 * ctx().all_reduce(MEAN, replica_id()))))()
    assert parts(strategy, v) == [10.0 - (n - 1) / 4] * n


@pytest.mark.across_processes
@over(copies=True)
@ways
def test_replicas_that_assign_different_values_are_refused_unless_that_is_asked_for(make, n, way):
    """A gradient that was not summed up is refused, and nothing changes; NaN on all replicas is one value."""
    strategy = make()
    w, v = made(strategy, [1.0], name="w"), made(strategy, [[1.0]])
    count, total = made(strategy, 0), made(strategy, 0.0, aggregation=A.SUM)
    own = made(strategy, [0.0], synchronization=S.ON_READ, aggregation=A.SUM)
    asked = [made(strategy, [0.0], copies_may_differ=True)]
    rx.config.refuse_different_assignments(False)
    try:
        asked.append(made(strategy, [0.0]))
        strict = made(strategy, [0.0], copies_may_differ=False)
    finally:
        rx.config.refuse_different_assignments(True)
    gradient = lambda: jnp.ones(1) * (replica_id() + 1.0)  # noqa: E731

    def others():
        own.assign(gradient())
        count.assign_add(1)
        total.assign_add(jnp.float32(1.0) + 0 * replica_id())
        for variable in asked:
            variable.assign(gradient())
        v.assign(jnp.full((1, 1), jnp.nan))

    def all_values():
        return [parts(strategy, x) for x in (w, v, count, total, own, *asked, strict)]

    wrong = {
        "w:0": lambda: w.assign_sub(gradient()),
        "Variable:0": lambda: strict.assign(gradient()),
        "w:0 ": lambda: strategy.extended.update(w, lambda c, g: c.assign_sub(g), args=(gradient(),)),
    }
    before = all_values()
    for name, assign in wrong.items() if n > 1 else ():
        for inner in (assign, lambda assign=assign: (assign(), others(), None)[-1]):
            with pytest.raises(ValueError, match=f"(?s)different values to {name}.*all_reduce.*ON_READ.*may_differ"):
                way(lambda inner=inner: strategy.run(lambda: (inner(), None)[-1]))()
            assert all_values() == before

    def right():
        summed = ctx().all_reduce("SUM", gradient())
        w.assign_sub(jax.lax.optimization_barrier((summed, gradient()))[0])
        others()

    way(lambda: strategy.run(right))()
    everyones = [[float(r + 1)] for r in range(n)]
    assert parts(strategy, w) == [[1.0 - sum(range(n + 1))]] * n and np.isnan(parts(strategy, v)).all()
    assert int(count) == 1 and float(total) == n and own.numpy().tolist() == [sum(range(n + 1))]
    assert [parts(strategy, x) for x in asked] == [everyones] * 2
    way(lambda x: w.assign(x))(per_replica(strategy, everyones))  # outside of replicas that is what it says
    assert parts(strategy, w) == everyones


def test_eager_replicas_that_assign_different_values_are_named():
    strategy, w = mirrored(4), made(mirrored(4), jax.random.key(0), name="key")
    keys = [jax.random.key(1), jax.random.key(1), jax.random.key(2), jax.random.key(3)]
    with pytest.raises(ValueError, match="key:0 of shape .* on all of them: replicas 2, 3 differ from replica 0"):
        strategy.run(lambda: w.assign(keys[int(replica_id())], read_value=False))
    assert jax.random.key_data(w.value()).tolist() == [0, 0]
    with pytest.raises(ValueError, match="replica 3 differs from replica 0"):
        strategy.run(lambda: w.assign(keys[1], read_value=False) if int(replica_id()) == 3 else None)


def test_a_component_takes_no_tracers():
    with (strategy := rx.MirroredStrategy(["GPU:0", "GPU:1"])).scope():
        v = rx.Variable(1.0)
    component = v.values[1]
    with pytest.raises(RuntimeError, match="assigned a traced value"):
        jax.jit(lambda x: (component.assign(x * 2), x)[1])(3.0)
    assert [float(c) for c in strategy.experimental_local_results(v)] == [1.0, 1.0]
