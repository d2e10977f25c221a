"""Which strategy is current, and in which context the program stands."""

from __future__ import annotations

import copy
import pickle
import threading

import jax.numpy as jnp
import pytest
from strategies import MEAN, SUM, another, ctx, mirrored, one_device, over, parts, ways

import replicax as rx


def test_outside_of_any_scope_there_is_the_default_strategy():
    """Fact 1."""
    c, default = rx.get_replica_context(), rx.get_strategy()
    assert isinstance(c, rx.ReplicaContext) and c is rx.get_replica_context()
    assert c.num_replicas_in_sync == 1 and c.replica_id_in_sync_group == 0 and type(c.replica_id_in_sync_group) is int
    assert not rx.in_cross_replica_context() and not rx.has_strategy()
    assert isinstance(default, rx.Strategy) and default.num_replicas_in_sync == 1 and c.strategy is default
    assert c.devices == ("",) and type(default).__name__ == "_DefaultDistributionStrategy"


def test_the_default_strategy_runs_one_replica():
    """Fact 2."""
    d = rx.get_strategy()
    assert d.run(lambda x, y=1: (x, y, rx.get_replica_context() is not None), args=(5,), kwargs={"y": 2}) == (
        5,
        2,
        True,
    )
    x = jnp.asarray([1.0, 2.0])
    assert d.reduce("SUM", x, axis=None) is x and float(d.reduce("MEAN", x, axis=0)) == 1.5
    assert d.reduce("SUM", 7, axis=None) == 7 and d.experimental_local_results([1, 2]) == ([1, 2],)
    scalar = jnp.asarray(1)
    assert d.gather(x, axis=0) is x and d.gather(scalar, axis=0) is scalar
    dataset = [1, 2, 3]
    assert d.experimental_distribute_dataset(dataset) is dataset
    assert d.experimental_distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    ) == (0, 1)
    assert float(ctx().all_reduce("SUM", jnp.float32(3))) == 3
    assert ctx().all_reduce("MEAN", {"a": x})["a"].tolist() == [1, 2] and ctx().all_gather(x, axis=0).tolist() == [1, 2]
    assert ctx().merge_call(lambda s, x: (s is d, rx.get_replica_context(), x), args=(4,)) == (True, None, 4)
    with d.scope():
        assert not rx.in_cross_replica_context() and not rx.has_strategy() and rx.get_replica_context() is not None


@over(plain=True)
def test_inside_of_a_scope(make):
    """Fact 3."""
    strategy = make()
    with strategy.scope() as entered:
        assert entered is strategy and rx.get_strategy() is strategy and rx.get_replica_context() is None
        assert rx.in_cross_replica_context() and rx.has_strategy()
    assert not rx.has_strategy() and not rx.in_cross_replica_context()


@over(plain=True)
@ways
def test_scopes_nest_in_themselves_but_not_in_others(make, way):
    """Fact 5."""
    strategy, other = make(), another()

    def program():
        with strategy.scope():
            with strategy.scope():
                assert rx.get_strategy() is strategy
            with pytest.raises(RuntimeError, match="^Mixing different tf.distribute.Strategy objects: .* is not "):
                with other.scope():
                    pass
            assert rx.get_strategy() is strategy

    way(program)()
    assert not rx.has_strategy()


def test_a_scope_object_is_entered_once():
    """Fact 6."""
    scope = mirrored(2).scope()
    with scope:
        pass
    with pytest.raises((RuntimeError, AttributeError)):
        with scope:
            pass
    assert not rx.has_strategy()


@over(at_least=2)
@ways
def test_no_scope_inside_of_run(make, n, way):
    """Fact 7."""

    def enter(strategy):
        with strategy.scope():
            return 1

    with pytest.raises(
        RuntimeError, match=r"requires being in cross-replica context, use get_replica_context\(\).merge"
    ):
        way(lambda: make().run(lambda: enter(make())))()
    with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
        way(lambda: make().run(lambda: enter(another())))()
    assert not rx.has_strategy()


@over(at_least=2)
@ways
def test_methods_of_the_wrong_context(make, n, way):
    """Fact 9."""
    strategy, x = make(), jnp.ones(1)
    for call in (
        lambda: strategy.run(lambda: 1),
        lambda: strategy.reduce(SUM, x, axis=None),
        lambda: strategy.extended.reduce_to(SUM, x, destinations="GPU:0"),
        lambda: strategy.extended.batch_reduce_to(SUM, [(x, "GPU:0")]),
    ):
        with pytest.raises(
            RuntimeError, match="^Method requires being in cross-replica context, use get_replica_context"
        ):
            way(lambda call=call: strategy.run(call))()
    for call in (
        lambda: strategy.experimental_local_results(x),
        lambda: strategy.experimental_distribute_values_from_function(lambda c: jnp.ones(1)),
    ):
        way(lambda call=call: strategy.run(lambda: (call(), None)[1]))()


def test_experimental_set_strategy():
    """Fact 11."""
    strategy, other = mirrored(2), rx.MirroredStrategy(["GPU:2"])
    try:
        rx.experimental_set_strategy(strategy)
        assert rx.has_strategy() and rx.in_cross_replica_context() and rx.get_strategy() is strategy
        assert type(rx.Variable(1.0)).__name__ == "MirroredVariable"
        rx.experimental_set_strategy(other)
        assert rx.get_strategy() is other
        with pytest.raises(RuntimeError, match="Mixing different"):
            with strategy.scope():
                pass
        with other.scope():
            assert rx.get_strategy() is other
    finally:
        rx.experimental_set_strategy(None)
    assert not rx.has_strategy() and not rx.in_cross_replica_context()
    for wrong in (other, None):
        with (
            strategy.scope(),
            pytest.raises(RuntimeError, match="Must not be called inside a `tf.distribute.Strategy` sc"),
        ):
            rx.experimental_set_strategy(wrong)
    with pytest.raises(RuntimeError, match="Must not be called inside"):
        strategy.run(lambda: rx.experimental_set_strategy(None))


def test_the_scope_belongs_to_a_thread():
    """Fact 12."""
    seen = []
    with mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append((rx.has_strategy(), rx.in_cross_replica_context())))
        thread.start()
        thread.join()
        assert rx.has_strategy()
    assert seen == [(False, False)]


def test_two_threads_run_two_strategies_at_once():
    results = {}

    def work(n):
        strategy = mirrored(n)
        with strategy.scope():
            for _ in range(20):
                x = strategy.run(lambda: ctx().all_reduce(SUM, jnp.float32(1) * 1))
            results[n] = parts(strategy, x)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {2: [2.0] * 2, 4: [4.0] * 4}


@over(plain=True)
@ways
def test_an_exception_leaves_the_context_as_it_was(make, way):
    """Fact 13."""
    strategy = make()

    def program():
        with strategy.scope():
            raise KeyError("x")

    with pytest.raises(KeyError):
        way(program)()
    assert not rx.has_strategy() and not rx.in_cross_replica_context()


def test_a_function_is_traced_apart_for_each_context():
    """Fact 14: what it learns of the context while tracing is right for every caller."""
    strategy, traces = mirrored(2), []

    @rx.function
    def f():
        traces.append((rx.has_strategy(), rx.in_cross_replica_context()))
        return jnp.zeros(())

    for _ in range(2):
        f()
    with strategy.scope():
        f(), f()
    for _ in range(2):
        strategy.run(f)
    assert traces == [(False, False), (True, True), (True, False)]


def test_strategies_can_be_deep_copied_but_not_copied():
    """Fact 170."""
    strategy = mirrored(2)
    with pytest.raises(RuntimeError, match="Must only deepcopy DistributionStrategy"):
        copy.copy(strategy)
    clone = copy.deepcopy(strategy)
    assert clone is not strategy and type(clone) is rx.MirroredStrategy
    assert parts(clone, clone.run(lambda: ctx().replica_id_in_sync_group)) == [0, 1]
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(strategy)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'extended'"):
        rx.Strategy()
    assert type(rx.Strategy(strategy.extended)) is rx.Strategy
    assert [c.__name__ for c in rx.MirroredStrategy.__mro__[:2]] == ["MirroredStrategy", "Strategy"]


def test_value_context_and_enumerations():
    """Facts 35, 157, 158, 159."""
    assert str(rx.ValueContext()) == "tf.distribute.ValueContext(replica id 0,  total replicas in sync: 1)"
    assert rx.ValueContext(2, 4).replica_id_in_sync_group == 2
    assert [(m.name, m.value) for m in rx.ReduceOp] == [("SUM", "SUM"), ("MEAN", "MEAN")]
    assert rx.ReduceOp.SUM != "SUM" and repr(rx.ReduceOp.SUM) == "<ReduceOp.SUM: 'SUM'>" and str(SUM) == "ReduceOp.SUM"
    assert [(m.name, m.value) for m in rx.CommunicationImplementation] == [(x, x) for x in ("AUTO", "RING", "NCCL")]
    assert [(m.name, m.value) for m in rx.InputReplicationMode] == [(x, x) for x in ("PER_WORKER", "PER_REPLICA")]
    assert [m.name for m in rx.VariableSynchronization] == ["AUTO", "NONE", "ON_WRITE", "ON_READ"]
    assert [m.name for m in rx.VariableAggregation] == ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
    assert [m.value for m in rx.VariableAggregation] == [0, 1, 2, 3]
    assert rx.ReduceOp.from_variable_aggregation(rx.VariableAggregation.MEAN) is MEAN
    with pytest.raises(
        ValueError, match="Could not convert from `tf.VariableAggregation` VariableAggregationV2.ONLY_FI"
    ):
        rx.ReduceOp.from_variable_aggregation(rx.VariableAggregation.ONLY_FIRST_REPLICA)
    assert repr(rx.RunOptions()) == (
        "RunOptions(experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False, "
        "experimental_xla_options=None)"
    )


@over(at_least=2, processes=1)
def test_older_names(make, n):
    """Fact 90."""
    strategy = make()
    assert strategy.cluster_resolver is None and not hasattr(strategy, "broadcast")
    assert strategy.extended.call_for_each_replica(lambda x: x, args=(2,)) == 2


def test_the_one_device_strategy():
    """Fact 115."""
    one = one_device()
    full = "/job:localhost/replica:0/task:0/device:GPU:1"
    assert (one.num_replicas_in_sync, one.cluster_resolver) == (1, None)
    assert one.extended.worker_devices == one.extended.parameter_devices == (full,)

    def replica(x):
        c = ctx()
        assert c.num_replicas_in_sync == 1 and c.devices == (full,) and c.replica_id_in_sync_group.dtype == jnp.int32
        return x + 1

    assert float(one.run(replica, args=(jnp.float32(1),))) == 2
    assert one.run(lambda: [1, (2, "x"), None]) == [1, (2, "x"), None]
    assert int(one.experimental_distribute_values_from_function(lambda c: jnp.asarray(c.num_replicas_in_sync))) == 1
    device = one.run(lambda: jnp.ones(2) + 1).devices()
    assert device == mirrored(2).run(lambda: jnp.ones(2) + 1).values[1].devices()
