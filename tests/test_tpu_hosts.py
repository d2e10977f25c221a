"""TPUStrategy on several hosts: the program of a TPU slice, in one process for each of its machines."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from processes import Workers

import replicax as rx

# What a program for a slice begins with, to the letter as TensorFlow's documentation has it.
START = """
import json
import jax.numpy as jnp, numpy as np
import replicax.tf as tf
resolver = tf.distribute.cluster_resolver.TPUClusterResolver("")
tf.config.experimental_connect_to_cluster(resolver)
topology = tf.tpu.experimental.initialize_tpu_system(resolver)

def told(name, value):
    print("told", json.dumps([name, value]), flush=True)
"""

TRAINING = """
assignment = None
if {logical} > 1:
    shape = [1, 1, 1, {logical}]
    assignment = tf.tpu.experimental.DeviceAssignment.build(topology, computation_shape=shape, num_replicas=4)
strategy = tf.distribute.TPUStrategy(resolver, assignment)
weights = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16) + resolver.task_id  # the first host's count
with strategy.scope():
    w = tf.Variable(strategy.experimental_split_to_logical_devices(weights, [1, {logical}]))
rows = np.sin(np.arange(48 * 8, dtype=np.float32)).reshape(48, 8)
data = tf.data.Dataset.from_tensor_slices(rows).batch(16, drop_remainder=True)

@tf.function
def step(batch):
    def replica(x):
        y = strategy.experimental_split_to_logical_devices(tf.matmul(x, w), [1, {logical}])
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tf.matmul(x.T, y))
        w.assign_sub(0.01 * gradient)
        return tf.reduce_sum(y)
    return strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None)

told("losses", [float(step(batch)) for batch in strategy.experimental_distribute_dataset(data)])
told("parts", sorted(set(map(str, (shard.data.shape for shard in w.value().addressable_shards)))))
mean = strategy.run(lambda: jnp.mean(w))
told("mean", float(strategy.experimental_local_results(mean)[0]))
ids = strategy.run(lambda: jnp.ones(1) * tf.distribute.get_replica_context().replica_id_in_sync_group)
told("ids", strategy.gather(ids, 0).tolist())
told("sizes", [strategy.num_replicas_in_sync, strategy.extended.num_hosts, strategy.extended.num_replicas_per_host])
told("writes", strategy.extended.should_checkpoint and strategy.extended.should_save_summary)
told("task", strategy.extended.worker_devices[0].split("/device")[0])
"""


def slice_of(addresses: Sequence[str], index: int) -> dict[str, str]:
    """The environment of a machine of a TPU slice, all machines being this one."""
    hosts, ports = zip(*(address.split(":") for address in addresses))
    return {"TPU_WORKER_HOSTNAMES": ",".join(hosts), "TPU_WORKER_ID": str(index), "REPLICAX_TPU_PORT": ports[0]}


def run(folder: Any, hosts: int, cores: int, program: str) -> list[dict[str, Any]]:
    env = {"REPLICAX_VIRTUAL_DEVICES": f"TPU:{cores}"}
    with Workers(folder, hosts, START + program, env=env, config=slice_of) as workers:
        done = workers.join(timeout=120)
    assert all(ended.returncode == 0 for ended in done.values()), workers.output()
    lines = [ended.stdout.splitlines() for ended in done.values()]
    return [dict(json.loads(line[5:]) for line in some if line.startswith("told ")) for some in lines]


@pytest.mark.parametrize("logical", [1, 2])
def test_a_slice_trains_as_one_machine_with_all_its_cores(tmp_path, logical):
    """The same losses and weights, from the first host's initial value; a split variable stays split."""
    program = TRAINING.format(logical=logical)
    (one,) = run(tmp_path / "one", 1, 8, program)
    several = run(tmp_path / "several", 2, 4, program)
    n = 8 // logical
    assert one["sizes"] == [n, 1, n] and one["task"] == "/job:localhost/replica:0/task:0"
    for index, told in enumerate(several):
        np.testing.assert_allclose(told["losses"], one["losses"], rtol=1e-5)
        np.testing.assert_allclose(told["mean"], one["mean"], rtol=1e-5)
        assert told["parts"] == one["parts"] == [str((8, 16 // logical))]
        assert told["ids"] == one["ids"] == list(range(n))
        assert told["writes"] == (index == 0)
        assert told["sizes"] == [n, 2, n // 2] and told["task"] == f"/job:worker/replica:0/task:{index}"


def test_a_part_that_is_uneven_on_another_host_is_refused_on_all(tmp_path):
    """Where this host's own replicas have parts of one shape."""
    program = """
        strategy = tf.distribute.TPUStrategy(resolver)
        def rows(context):
            return tf.data.Dataset.from_tensor_slices(np.arange(32.0 - 2 * context.input_pipeline_id)).batch(4)
        batches = iter(strategy.distribute_datasets_from_function(rows))
        told("first", [part.shape[0] for part in strategy.experimental_local_results(next(batches))])
        try:
            next(batches)
        except Exception as error:
            told("error", [type(error).__name__, str(error)])
    """
    for told in run(tmp_path, 2, 4, textwrap.dedent(program)):
        assert told["first"] == [4, 4, 4, 4]
        name, text = told["error"]
        assert name == rx.InvalidArgumentError.__name__ and "and others on other hosts" in text and "8 (the" in text


def test_replicas_of_a_host_need_not_stand_together(tmp_path):
    """Components of different sizes go by replica id, not by host."""
    program = """
        import jax
        cores = np.array([[list(topology.device_coordinates[task, core])] for core in range(4) for task in range(2)])
        assignment = tf.tpu.experimental.DeviceAssignment(topology, cores[[0, 3, 4, 1, 6, 5, 7, 2]])
        strategy = tf.distribute.TPUStrategy(resolver, assignment)
        context = tf.distribute.get_replica_context
        ids = strategy.experimental_distribute_values_from_function(lambda ctx: jnp.array(ctx.replica_id_in_sync_group))
        told("ids", [int(i) for i in ids.values])
        told("sum", float(strategy.reduce("SUM", ids, axis=None)))
        gathered = strategy.run(lambda i: context().all_gather(i[None], 0), args=(ids,))
        told("gathered", [part.tolist() for part in strategy.experimental_local_results(gathered)])

        def uneven(i):
            def loss(x):
                everyone = context().all_gather(x, 0)
                return jnp.sum(everyone * jnp.arange(everyone.shape[0])), everyone
            gradient, everyone = jax.grad(loss, has_aux=True)(jnp.full((1 + int(i) % 3,), float(i)))
            return everyone, jnp.sum(gradient)

        everyone, gradients = strategy.run(uneven, args=(ids,))
        told("uneven", strategy.experimental_local_results(everyone)[0].tolist())
        told("gradients", [float(gradient) for gradient in gradients.values])
    """
    several = run(tmp_path, 2, 4, textwrap.dedent(program))
    assert [told["ids"] for told in several] == [[0, 2, 4, 7], [1, 3, 5, 6]]
    everyone = [i for i in range(8) for _ in range(1 + i % 3)]
    for told in several:
        assert told["sum"] == 28.0 and told["gathered"] == [list(range(8))] * 4 and told["uneven"] == everyone
        # Each of the 8 replicas weighs the components by where they stand.
        own = [8 * sum(place for place, i in enumerate(everyone) if i == replica) for replica in told["ids"]]
        assert told["gradients"] == own


def test_whole_arrays_and_keys_are_laid_out_too(tmp_path):
    program = """
        import jax
        pairs = tf.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
        strategy = tf.distribute.TPUStrategy(resolver, pairs)
        with strategy.scope():
            whole = tf.Variable(strategy.experimental_replicate_to_logical_devices(jnp.arange(4.0) + resolver.task_id))
            split = strategy.experimental_split_to_logical_devices(jnp.ones((4, 4)), [2, 1])
            both = tf.Variable({"split": split, "key": jax.random.key(resolver.task_id)})
        key = strategy.experimental_replicate_to_logical_devices(jax.random.key(3 + resolver.task_id))
        told("whole", whole.numpy().tolist())
        whole.assign_add(jnp.ones(4))
        told("added", whole.numpy().tolist())
        told("key", jax.random.key_data(key).tolist())
        draw = tf.function(lambda: strategy.run(lambda: jax.random.normal(both.value()["key"], (2,))))
        told("drawn", strategy.experimental_local_results(draw())[0].tolist())
        told("same", jax.random.normal(jax.random.key(0), (2,)).tolist())
    """
    for told in run(tmp_path, 2, 4, textwrap.dedent(program)):
        assert told["whole"] == [0, 1, 2, 3] and told["added"] == [1, 2, 3, 4] and told["key"] == [0, 3]
        assert told["drawn"] == told["same"]


def test_shapes_that_differ_between_hosts_are_refused(tmp_path):
    """No host can see that by itself; they compare what they made."""
    program = """
        strategy = tf.distribute.TPUStrategy(resolver)
        made = strategy.experimental_distribute_values_from_function(lambda ctx: jnp.ones(1 + resolver.task_id))

        @tf.function
        def total(x):
            return strategy.run(lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x), args=(x,))

        try:
            total(made)
        except tf.errors.InvalidArgumentError as error:
            print(error)
    """
    env = {"REPLICAX_VIRTUAL_DEVICES": "TPU:4"}
    with Workers(tmp_path, 2, START + textwrap.dedent(program), env=env, config=slice_of) as workers:
        done = workers.join(timeout=60)
    own = {0: "replica 0: (1,), replica 1: (1,), ", 1: "replica 4: (2,), replica 5: (2,), "}
    for worker, ended in enumerate(done.values()):
        text = f"needs the same shapes on each, but they are: {own[worker]}"
        assert ended.returncode == 0 and text in ended.stdout, workers.output()
        assert "and others on other hosts" in ended.stdout, workers.output()
