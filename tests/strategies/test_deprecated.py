"""The older spellings: each does what the name of now does, and warns once, naming it."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import SUM, central, compiled, eager, mirrored, over, parts, per_replica, ways

import replicax as rx
from replicax._strategies import deprecated


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """Nothing has been warned of yet."""
    monkeypatch.setattr(deprecated, "_warned", set())


@pytest.fixture
def v1():
    """MirroredStrategy of two replicas as `tf.compat.v1.distribute` has it, made without importing `replicax.tf`."""

    class MirroredStrategyV1(deprecated.V1Methods, rx.MirroredStrategy):
        pass

    return MirroredStrategyV1(["GPU:0", "GPU:1"])


def one_warning(call, name, now):
    """What a call returns, which warns once of `name`, and not when it is made again."""
    with pytest.warns(DeprecationWarning, match=f"^`{name}` is an older spelling: .*{now}") as caught:
        result = call()
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    return result


@over(plain=True)
def test_deprecated_methods_name_their_replacements(make):
    """Fact 90."""
    strategy = make()
    assert one_warning(lambda: strategy.experimental_run(lambda: 1), "experimental_run", "run") == 1
    x = strategy.run(lambda: jnp.ones(1) + 1)
    unwrapped = one_warning(lambda: strategy.unwrap(x), "unwrap", "experimental_local_results")
    assert [part.tolist() for part in unwrapped] == [[2.0]] * len(strategy.experimental_local_results(x))
    with strategy.scope():
        v = rx.Variable(1.0)
        beside = one_warning(
            lambda: strategy.colocate_vars_with(v), "colocate_vars_with", "strategy.extended.colocate_vars_with"
        )
        with beside:
            assert rx.Variable(2.0).device == v.device


@over(plain=True)
def test_deprecated_methods_without_effect_say_to_leave_them_out(make):
    """Fact 90: `group` of one tensor is that tensor."""
    strategy, x = make(), jnp.asarray(1)
    assert one_warning(strategy.configure, "configure", "leave it out") is None
    config = object()
    assert one_warning(lambda: strategy.update_config_proto(config), "update_config_proto", "leave it out") is config
    assert one_warning(lambda: strategy.group(x), "group", "leave it out") is x
    assert strategy.group(x, name="step") is None


def test_group_of_several_components_returns_none():
    assert one_warning(lambda: mirrored(2).group(per_replica(mirrored(2), [1, 2])), "group", "leave it out") is None


@over(plain=True)
@ways
def test_make_dataset_iterator(make, way):
    """The element goes to `fn`; at the end there is OutOfRangeError; `initialize` starts anew."""
    strategy = make()
    dataset = rx.data.Dataset.range(8).batch(4)
    iterator = one_warning(
        lambda: strategy.make_dataset_iterator(dataset), "make_dataset_iterator", "experimental_distribute_dataset"
    )
    one_warning(lambda: strategy.experimental_run(lambda x: x, iterator), "experimental_run", "run")
    with pytest.raises(rx.OutOfRangeError):
        iterator.get_next()
    iterator.initialize()
    step = way(lambda: strategy.reduce(SUM, strategy.experimental_run(lambda x: jnp.sum(x) + 0, iterator), axis=None))
    assert [int(step()), int(step())] == [6, 22]
    with pytest.raises(rx.OutOfRangeError):
        step()
    iterator.initialize()
    assert int(step()) == 6
    iterator.close()


@pytest.mark.parametrize("way", [eager, compiled], ids=["eager", "compiled"])
def test_make_input_fn_iterator(way):
    """From a dataset, whose batches are the replicas' parts, or from a function, called for each part."""
    strategy, calls = mirrored(2), iter(range(100))
    iterator = one_warning(
        lambda: strategy.make_input_fn_iterator(lambda context: rx.data.Dataset.range(8).batch(2)),
        "make_input_fn_iterator",
        "distribute_datasets_from_function",
    )
    assert parts(strategy, way(lambda: strategy.run(lambda x: x + 0, (next(iterator),)))()) == [[0, 1], [2, 3]]
    iterator.close()
    endless = strategy.make_input_fn_iterator(lambda context: lambda: np.float32([next(calls)]))
    assert parts(strategy, endless.get_next()) == [[0.0], [1.0]] and parts(strategy, next(endless)) == [[2.0], [3.0]]
    endless.close()
    mode = rx.InputReplicationMode.PER_REPLICA
    each = strategy.make_input_fn_iterator(
        lambda context: rx.data.Dataset.from_tensors(np.int32(context.input_pipeline_id)), mode
    )
    assert parts(strategy, next(each)) == [0, 1]
    each.close()


def test_the_older_name_of_distribute_datasets_from_function():
    strategy = mirrored(2)
    dataset = one_warning(
        lambda: strategy.experimental_distribute_datasets_from_function(lambda c: rx.data.Dataset.range(4).batch(2)),
        "experimental_distribute_datasets_from_function",
        "distribute_datasets_from_function",
    )
    assert [parts(strategy, x) for x in dataset] == [[[0, 1], [2, 3]]]


def test_compat_v1_strategies_have_extra_methods(v1):
    """`reduce` without an axis, and two names that other strategies have lost."""
    x = per_replica(v1, [1.0, 2.0])
    assert one_warning(lambda: float(v1.reduce(SUM, x)), "reduce without an axis", "axis=None") == 3.0
    assert float(v1.reduce(SUM, x, axis=None)) == float(v1.reduce("sum", x, None)) == 3.0
    y = per_replica(v1, [[1.0, 2.0], [3.0, 4.0]])
    assert float(v1.reduce(SUM, y, axis=0)) == 10.0
    assert one_warning(lambda: v1.experimental_run_v2(lambda a, b: a + b, (1,), {"b": 2}), "experimental_run_v2", "run")
    assert v1.experimental_run_v2(lambda a: a, args=(1,)) == 1
    arrays = {"x": np.arange(4.0), "y": np.arange(4)}
    dataset = one_warning(
        lambda: v1.experimental_make_numpy_dataset(arrays), "experimental_make_numpy_dataset", "from_tensor_slices"
    )
    assert [(float(e["x"]), int(e["y"])) for e in dataset] == [(i, i) for i in range(4)]


@pytest.mark.parametrize("make", [lambda: mirrored(2), central], ids=["mirrored", "central"])
def test_removed_names_say_what_to_use(make):
    """Fact 90."""
    for name, now in {"experimental_run_v2": "`run`", "experimental_make_numpy_dataset": "from_tensor_slices"}.items():
        assert not hasattr(make(), name)
        with pytest.raises(AttributeError, match=f"{type(make()).__name__}.* has no attribute '{name}': it is .*{now}"):
            getattr(make(), name)
    with pytest.raises(AttributeError, match="has no attribute 'broadcast'$"):
        getattr(make(), "broadcast")  # noqa: B009


def test_a_warning_may_be_made_an_error():
    """The name works all the same afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            mirrored(2).unwrap(1)
        assert mirrored(2).unwrap(1) == (1,)


PROGRAM = """
    import warnings
    import numpy as np
    import replicax.tf as tf

    v1, v2 = tf.compat.v1.distribute, tf.distribute
    makers = {
        "MirroredStrategy": lambda: v1.MirroredStrategy(["GPU:0", "GPU:1"]),
        "OneDeviceStrategy": lambda: v1.OneDeviceStrategy("GPU:1"),
        "CentralStorageStrategy": lambda: v1.experimental.CentralStorageStrategy(["GPU:0", "GPU:1"], "CPU:0"),
        "MultiWorkerMirroredStrategy": lambda: v1.experimental.MultiWorkerMirroredStrategy(
            v1.experimental.CollectiveCommunication.AUTO
        ),
    }
    for name, make in makers.items():
        if not any(hasattr(space, name) for space in (v1, v1.experimental)):
            continue
        strategy = make()
        newer = getattr(v2.experimental, name, None) or getattr(v2, name)
        assert isinstance(strategy, v1.Strategy) and isinstance(strategy, newer) and not isinstance(newer, v1.Strategy)
        assert type(strategy).__name__ == name + "V1" and isinstance(strategy.extended, v1.StrategyExtended)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with strategy.scope():
                assert v1.get_strategy() is strategy and v1.has_strategy()
                w = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
            iterator = strategy.make_dataset_iterator(tf.data.Dataset.range(8).batch(8))
            iterator.initialize()
            total = strategy.reduce(v1.ReduceOp.SUM, strategy.experimental_run(lambda x: tf.reduce_sum(x), iterator))
            assert int(total) == 28, total
            iterator.close()
        print(name, strategy.num_replicas_in_sync, len(caught))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert v1.get_loss_reduction() is v1.get_loss_reduction() is v1.ReduceOp.SUM
        print(caught[0].message)
    print(hasattr(v2, "get_loss_reduction"), v1.CrossDeviceOps is v2.CrossDeviceOps, len(caught))
"""


def test_compat_v1_distribute(run_python):
    """The strategies of `tf.compat.v1.distribute` are those of now with the older methods mixed in. Fact 170."""
    done = run_python(PROGRAM)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "MirroredStrategy 2 3", lines  # the three names that it uses, each once
    assert {"OneDeviceStrategy 1 0", "CentralStorageStrategy 2 0"} < set(lines)
    assert lines[-2:] == [
        "`get_loss_reduction` is an older spelling: losses are summed, use `ReduceOp.SUM`.",
        "False True 1",
    ]


def test_compat_v1_parameter_servers(run_python):
    """Without parameter servers it keeps one copy of each variable for the replicas of the process."""
    done = run_python("""
        import json, os
        import replicax.tf as tf

        v1 = tf.compat.v1.distribute
        strategy = v1.experimental.ParameterServerStrategy()
        assert isinstance(strategy, v1.Strategy) and type(strategy).__name__ == "ParameterServerStrategyV1"
        with strategy.scope():
            v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
        assert [name[-5:] for name in strategy.extended.worker_devices] == ["GPU:0", "GPU:1"]
        assert v.device == "/job:localhost/replica:0/task:0/device:CPU:0" and strategy.cluster_resolver is None
        strategy.run(lambda: v.assign_add(tf.constant(2.0) * 1))
        assert v.numpy() == 5.0

        def resolver(*jobs):
            spec = tf.train.ClusterSpec({job: ["localhost:1"] for job in jobs})
            return tf.distribute.cluster_resolver.SimpleClusterResolver(spec)

        workers = resolver("worker")
        assert v1.experimental.ParameterServerStrategy(workers).cluster_resolver is workers
        cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        for args in ([], [resolver("worker", "ps")]):
            try:
                v1.experimental.ParameterServerStrategy(*args)
            except NotImplementedError as error:
                assert "sessions" in str(error) and "Use tf.distribute.ParameterServerStrategy" in str(error), error
            else:
                raise AssertionError("no error")
    """, env={"REPLICAX_VIRTUAL_DEVICES": "GPU:2,CPU:1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
