"""The older methods of strategies, and `tf.compat.v1.distribute`."""

from __future__ import annotations

from pathlib import Path

SUITE = Path(__file__).with_name("older_strategies.py")


def test_older_methods(run_python):
    """The tests of `older_strategies.py` run in a process of their own."""
    program = f"""
        import sys
        import pytest
        ROOT = {str(SUITE.parents[2])!r}
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        sys.exit(pytest.main([*options, "--rootdir", ROOT, "-c", ROOT + "/pyproject.toml", {str(SUITE)!r}]))
        """
    done = run_python(program, timeout=300, fresh=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


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


def test_experimental_tpu_strategy_is_a_class_of_its_own(run_python):
    """Fact 170."""
    done = run_python(
        """
        import jax.numpy as jnp
        import replicax.tf as tf

        strategy = tf.distribute.experimental.TPUStrategy()
        assert not isinstance(strategy, tf.distribute.TPUStrategy) and isinstance(strategy, tf.distribute.Strategy)
        assert not hasattr(strategy, "experimental_split_to_logical_devices")
        context = tf.distribute.get_replica_context
        ids = strategy.run(lambda: jnp.ones(1) * context().replica_id_in_sync_group)
        assert strategy.gather(ids, 0).numpy().tolist() == [*range(8)]
        """,
        env={"REPLICAX_VIRTUAL_DEVICES": "TPU:8"},
    )
    assert done.returncode == 0, done.stderr
