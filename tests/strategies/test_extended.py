"""`StrategyExtended`: update, reduce_to and the rest of what optimizers are written with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from strategies import MEAN, SUM, ctx, mirrored, one_device, over, parts, per_replica, replica_id, several, ways

import replicax as rx

S, A = rx.VariableSynchronization, rx.VariableAggregation


def made(strategy, value=1.0, **more):
    with strategy.scope():
        return rx.Variable(value, **more)


def places(value):
    return [part.devices() for part in getattr(value, "values", (value,))]


def test_creators_entered_outside_of_the_scope_of_one_device_see_its_variables():
    """Seen in TensorFlow."""
    seen = []

    def creator(make, **kwargs):
        seen.append(kwargs["name"])
        return make(**kwargs)

    with rx.variable_creator_scope(creator):
        v = made(one_device(), name="a")
    assert seen == ["a"] and v.distribute_strategy is one_device()


@several
def test_update_calls_for_each_component_on_its_device(n):
    """Fact 83."""
    strategy, v, seen = mirrored(n), made(mirrored(n)), []
    total = strategy.extended.reduce_to(SUM, per_replica(strategy, [1.0] * n), destinations=v)

    def fn(component, x, *, k):
        seen.append((type(component).__name__, component.device[-5:], float(x), k))
        return component.assign_add(x)

    result = strategy.extended.update(v, fn, args=(total,), kwargs={"k": 7})
    assert seen == [("ResourceVariable", f"GPU:{r}", float(n), 7) for r in range(n)]
    assert type(result).__name__ == "Mirrored" and parts(strategy, result) == parts(strategy, v) == [1.0 + n] * n
    ungrouped = strategy.extended.update(v, lambda c: c.assign(9.0), group=False)
    assert type(ungrouped) is tuple and [float(x) for x in ungrouped] == [9.0] * n
    assert strategy.extended.update(v, lambda c: None) is None and strategy.extended.update(v, lambda c: 5) == 5


@over(at_least=2, copies=True)
@ways
def test_update_both_ways(make, n, way):
    """Facts 83, 84: PerReplica arguments are taken component by component."""
    strategy, v = make(), made(make())
    x = per_replica(strategy, [5.0 + r for r in range(n)])
    way(lambda x: strategy.extended.update(v, lambda c, x: c.assign(x * 2), args=(x,)))(x)
    assert parts(strategy, v) == [10.0 + 2 * r for r in range(n)]
    way(lambda: strategy.extended.update(v, lambda c: c.assign_add(1.0)))()
    assert parts(strategy, v) == [11.0 + 2 * r for r in range(n)]


@over(at_least=2, copies=True)
@ways
def test_update_in_replica_context_is_a_meeting_point(make, n, way):
    """Fact 84."""
    strategy, v, seen = make(), made(make(), copies_may_differ=True), []

    def fn(component, x):
        seen.append((rx.get_replica_context(), rx.in_cross_replica_context(), rx.get_strategy() is strategy))
        component.assign(x)

    way(lambda: strategy.run(lambda: strategy.extended.update(v, fn, args=(replica_id() + 5,))))()
    assert parts(strategy, v) == [5.0 + r for r in range(n)] and set(seen) == {(None, True, True)}


@several
def test_update_refuses(n):
    """Fact 84."""
    strategy, v, plain = mirrored(n), made(mirrored(n)), rx.Variable(1.0)
    for wrong in (plain, 5, made(mirrored(n + 1))):
        with pytest.raises(AssertionError):
            strategy.extended.update(wrong, lambda c: c)
    with pytest.raises(TypeError, match="must be an iterable, not int"):
        strategy.extended.update(v, lambda c: 1, args=5)
    assert float(rx.get_strategy().extended.update(plain, lambda c, x: c.assign(x), args=(4.0,))) == 4.0


@pytest.mark.across_processes
@over(at_least=2, copies=True)
@ways
def test_reduce_to(make, n, way):
    """Fact 85."""
    strategy, v = make(), made(make())
    x = per_replica(strategy, [2.0 * r + 1 for r in range(n)])
    total, mean = way(
        lambda x: (
            strategy.extended.reduce_to(SUM, x, destinations=v),
            strategy.extended.reduce_to("MEAN", x, destinations=x),
        )
    )(x)
    for value, expected in ((total, n * n), (mean, n)):
        assert type(value).__name__ == "Mirrored" and parts(strategy, value) == [expected] * n
    way(lambda x: v.assign(strategy.extended.reduce_to(SUM, x, destinations=v)))(x)
    assert parts(strategy, v) == [n * n] * n


@several
def test_reduce_to_puts_the_result_at_its_destination(n):
    """Fact 85."""
    strategy, v = mirrored(n), made(mirrored(n))
    x, last = per_replica(strategy, [1.0] * n), v.values[-1].value()
    with strategy.scope():
        assert places(strategy.extended.reduce_to(SUM, x, destinations=v)) == places(strategy.run(replica_id))
        on_device = strategy.extended.reduce_to(SUM, x, destinations=f"GPU:{n - 1}")
        at_array = strategy.extended.reduce_to(SUM, x, destinations=last)
    for value in (on_device, at_array):
        assert isinstance(value, jax.Array) and float(value) == n and value.devices() == last.devices()


@over(here=2, copies=True)
@ways
def test_reduce_to_refuses(make, n, way):
    """Fact 85."""
    strategy, v = make(), made(make())
    x, plain = per_replica(strategy, [1.0] * n), jnp.float32(2)
    extended = strategy.extended
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'destinations'"):
        extended.reduce_to(SUM, x)
    with pytest.raises((ValueError, AttributeError)):
        way(lambda x: extended.reduce_to(SUM, x, destinations=None))(x)
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        way(lambda x: extended.reduce_to("max", x, destinations=v))(x)
    with pytest.raises(ValueError, match="A non-DistributedValues value"):
        way(lambda p: extended.reduce_to(SUM, p, destinations=v))(plain)
    assert float(way(lambda p: extended.reduce_to(MEAN, p, destinations=v))(plain)) == 2.0
    with pytest.raises(AssertionError):
        way(lambda: extended.reduce_to(SUM, v, destinations=v))()
    assert way(lambda: extended.reduce_to(MEAN, v, destinations=v))() is v


@over(at_least=2, copies=True)
@ways
def test_batch_reduce_to(make, n, way):
    """Fact 86."""
    strategy, v, w = make(), made(make()), made(make(), [1.0])
    x, y = per_replica(strategy, [r + 1.0 for r in range(n)]), per_replica(strategy, [[r + 3.0] for r in range(n)])
    result = way(lambda x, y: strategy.extended.batch_reduce_to(SUM, [(x, v), (y, w)]))(x, y)
    total = n * (n + 1) / 2
    assert type(result) is list and [parts(strategy, r) for r in result] == [[total] * n, [[total + 2 * n]] * n]
    assert way(lambda: strategy.extended.batch_reduce_to(SUM, []))() == []


@over(at_least=2, copies=True)
@ways
def test_reduce_the_gradients_then_update(make, n, way):
    """Fact 87."""
    strategy, v = make(), made(make(), 10.0)

    def merge(s, gradient):
        total = s.extended.reduce_to(SUM, gradient, destinations=v)
        s.extended.update(v, lambda c, g: c.assign_sub(0.5 * g), args=(total,))

    def replica():
        ctx().merge_call(merge, args=(replica_id() + 1.0,))
        return v.read_value() * 1.0

    step = way(lambda: strategy.run(replica))
    for k in (1, 2):
        expected = [10.0 - k * n * (n + 1) / 4] * n
        assert parts(strategy, step()) == expected and parts(strategy, v) == expected


@over(copies=True, processes=1, logical=False)
def test_devices_and_containers(make, n):
    """Facts 88, 113."""
    strategy, plain = make(), rx.Variable(1.0)
    e, v = strategy.extended, made(make())
    full = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{r}" for r in range(n))
    assert isinstance(e, rx.StrategyExtended) and e.worker_devices == e.parameter_devices == full
    assert e.experimental_require_static_shapes is False and not e.experimental_between_graph
    assert e.should_checkpoint and e.should_save_summary
    assert e.value_container(v.values[-1]) is v and e.value_container(v) is v and e.value_container(plain) is plain
    assert [e.variable_created_in_scope(x) for x in (v, v.values[0], plain)] == [True, True, False]
    with pytest.raises((AttributeError, TypeError)):
        e.variable_created_in_scope(5)
    d = rx.get_strategy().extended
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=r"^worker_devices\(\) method|^parameter_devices\(\) method"):
            getattr(d, name)
    assert d.variable_created_in_scope(plain) and not d.experimental_require_static_shapes
    assert d.should_checkpoint and d.should_save_summary and not d.experimental_between_graph
    assert float(e.read_var(v)) == 1.0 and e.non_slot_devices([v]) == full


def test_reduce_to_checks_the_operation_of_a_single_replica_too():
    for strategy in (one_device(), rx.get_strategy()):
        with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
            strategy.extended.reduce_to("max", jnp.float32(1), "CPU:0")
        assert float(strategy.extended.reduce_to("sum", jnp.float32(1), "CPU:0")) == 1.0


def test_colocate_vars_with():
    """Fact 89."""
    strategy, v, plain = mirrored(2), made(mirrored(2)), rx.Variable(1.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        w = rx.Variable(2.0)
    assert [c.device for c in w.values] == [c.device for c in v.values]
    for wrong in (plain, 5):
        with (
            strategy.scope(),
            pytest.raises(ValueError, match="`colocate_vars_with` must only be passed a variable creat"),
        ):
            with strategy.extended.colocate_vars_with(wrong):
                pass
    with pytest.raises(RuntimeError, match=r'Need to be inside "with strategy.scope\(\)" for '):
        with strategy.extended.colocate_vars_with(v):
            pass


@several
def test_broadcast_to(n):
    """Fact 90."""
    strategy, v = mirrored(n), made(mirrored(n))
    value = strategy.extended.broadcast_to(jnp.float32(3), v)
    assert type(value).__name__ == "Mirrored" and parts(strategy, value) == [3.0] * n
    assert len(set(map(str, places(value)))) == n


@over(at_least=2, copies=True)
@ways
def test_update_non_slot_calls_once(make, n, way):
    strategy, calls = make(), []

    def fn(x):
        calls.append(rx.in_cross_replica_context())
        return x * 2

    result = way(lambda: strategy.extended.update_non_slot(None, fn, args=(jnp.float32(2),)))()
    assert float(result) == 4.0 and calls == [True]


def test_run_steps_on_an_iterator():
    """Fact 90."""
    strategy = mirrored(2)
    data = iter([jnp.float32(1), jnp.float32(2), jnp.float32(3)])
    seen = []

    def fn(context, x):
        seen.append(float(x))
        context.set_last_step_output("x", float(x))

    context = strategy.extended.experimental_run_steps_on_iterator(fn, data, iterations=2)
    assert seen == [1.0, 2.0] and context.last_step_outputs == {"x": 2.0}


def test_the_one_device_strategys_update():
    one = one_device()
    with one.scope():
        v = rx.Variable(1.0)
        one.extended.update(v, lambda c, x: c.assign_add(x), args=(2.0,))
        assert one.extended.reduce_to(SUM, jnp.float32(2), destinations=v) == 2
    assert float(v) == 3.0
