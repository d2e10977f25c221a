"""TPUStrategy on several hosts: the program of a TPU slice, in one process for each of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from processes import Workers, told_by

import replicax as rx

# What a program for a slice begins with, to the letter as TensorFlow's documentation has it.
START = """
import json
import jax, jax.numpy as jnp, numpy as np
import replicax.tf as tf
resolver = tf.distribute.cluster_resolver.TPUClusterResolver("")
tf.config.experimental_connect_to_cluster(resolver)
topology = tf.tpu.experimental.initialize_tpu_system(resolver)
context = tf.distribute.get_replica_context
program = ""

def told(name, value):
    print("told", json.dumps([program, name, value]), flush=True)
"""

TRAINING = """
def train(logical):
    assignment = None
    if logical > 1:
        shape = [1, 1, 1, logical]
        assignment = tf.tpu.experimental.DeviceAssignment.build(topology, computation_shape=shape, num_replicas=4)
    strategy = tf.distribute.TPUStrategy(resolver, assignment)
    weights = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16) + resolver.task_id  # the first host's count
    with strategy.scope():
        w = tf.Variable(strategy.experimental_split_to_logical_devices(weights, [1, logical]))
    rows = np.sin(np.arange(48 * 8, dtype=np.float32)).reshape(48, 8)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(16, drop_remainder=True)

    @tf.function
    def step(batch):
        def replica(x):
            y = strategy.experimental_split_to_logical_devices(tf.matmul(x, w), [1, logical])
            gradient = context().all_reduce("SUM", tf.matmul(x.T, y))
            w.assign_sub(0.01 * gradient)
            return tf.reduce_sum(y)
        return strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None)

    told("losses", [float(step(batch)) for batch in strategy.experimental_distribute_dataset(data)])
    told("parts", sorted(set(map(str, (shard.data.shape for shard in w.value().addressable_shards)))))
    mean = strategy.run(lambda: jnp.mean(w))
    told("mean", float(strategy.experimental_local_results(mean)[0]))
    ids = strategy.run(lambda: jnp.ones(1) * context().replica_id_in_sync_group)
    told("ids", strategy.gather(ids, 0).tolist())
    extended = strategy.extended
    told("sizes", [strategy.num_replicas_in_sync, extended.num_hosts, extended.num_replicas_per_host])
    told("writes", extended.should_checkpoint and extended.should_save_summary)
    told("task", extended.worker_devices[0].split("/device")[0])

for logical in (1, 2):
    program = f"training {logical}"
    train(logical)
"""

# Further programs of two hosts, each in front of its test. One job runs them all, since its processes take long to
# start; what the hosts refuse comes last, and each time the job goes on.
PROGRAMS: dict[str, str] = {}


def slice_of(addresses: Sequence[str], index: int) -> dict[str, str]:
    """The environment of a machine of a TPU slice, all machines being this one."""
    hosts, ports = zip(*(address.split(":") for address in addresses))
    return {"TPU_WORKER_HOSTNAMES": ",".join(hosts), "TPU_WORKER_ID": str(index), "REPLICAX_TPU_PORT": ports[0]}


def run(folder: Any, hosts: int, cores: int, program: str) -> dict[str, list[dict[str, Any]]]:
    """What the hosts told, by the program: of each host the values by their names."""
    env = {"REPLICAX_VIRTUAL_DEVICES": f"TPU:{cores}"}
    with Workers(folder, hosts, START + program, env=env, config=slice_of) as workers:
        return told_by(workers.join(timeout=180))


@pytest.fixture(scope="module")
def told(once, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What the two hosts told."""
    programs = "".join(f"program = {name!r}\n{text}\n" for name, text in PROGRAMS.items())
    return once("tpu-hosts", lambda: run(tmp_path_factory.mktemp("several"), 2, 4, TRAINING + programs))


@pytest.fixture(scope="module")
def told_by_one_machine(once, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What one machine told that has all cores."""
    return once("tpu-host", lambda: run(tmp_path_factory.mktemp("one"), 1, 8, TRAINING))


@pytest.mark.parametrize("logical", [1, 2])
def test_a_slice_trains_as_one_machine_with_all_its_cores(told, told_by_one_machine, logical):
    """The same losses and weights, from the first host's initial value; a split variable stays split."""
    (one,) = told_by_one_machine[f"training {logical}"]
    n = 8 // logical
    assert one["sizes"] == [n, 1, n] and one["task"] == "/job:localhost/replica:0/task:0"
    for index, host in enumerate(told[f"training {logical}"]):
        np.testing.assert_allclose(host["losses"], one["losses"], rtol=1e-5)
        np.testing.assert_allclose(host["mean"], one["mean"], rtol=1e-5, atol=1e-7)  # near zero
        assert host["parts"] == one["parts"] == [str((8, 16 // logical))]
        assert host["ids"] == one["ids"] == list(range(n))
        assert host["writes"] == (index == 0)
        assert host["sizes"] == [n, 2, n // 2] and host["task"] == f"/job:worker/replica:0/task:{index}"


PROGRAMS["apart"] = """
cores = np.array([[list(topology.device_coordinates[task, core])] for core in range(4) for task in range(2)])
assignment = tf.tpu.experimental.DeviceAssignment(topology, cores[[0, 3, 4, 1, 6, 5, 7, 2]])
strategy = tf.distribute.TPUStrategy(resolver, assignment)
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


def test_replicas_of_a_host_need_not_stand_together(told):
    """Components of different sizes go by replica id, not by host."""
    several = told["apart"]
    assert [host["ids"] for host in several] == [[0, 2, 4, 7], [1, 3, 5, 6]]
    everyone = [i for i in range(8) for _ in range(1 + i % 3)]
    for host in several:
        assert host["sum"] == 28.0 and host["gathered"] == [list(range(8))] * 4 and host["uneven"] == everyone
        # Each of the 8 replicas weighs the components by where they stand.
        own = [8 * sum(place for place, i in enumerate(everyone) if i == replica) for replica in host["ids"]]
        assert host["gradients"] == own


PROGRAMS["layouts"] = """
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


def test_whole_arrays_and_keys_are_laid_out_too(told):
    for host in told["layouts"]:
        assert host["whole"] == [0, 1, 2, 3] and host["added"] == [1, 2, 3, 4] and host["key"] == [0, 3]
        assert host["drawn"] == host["same"]


PROGRAMS["uneven parts"] = """
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


def test_a_part_that_is_uneven_on_another_host_is_refused_on_all(told):
    """Where this host's own replicas have parts of one shape."""
    for host in told["uneven parts"]:
        assert host["first"] == [4, 4, 4, 4]
        name, text = host["error"]
        assert name == rx.InvalidArgumentError.__name__ and "and others on other hosts" in text and "8 (the" in text


PROGRAMS["other shapes"] = """
strategy = tf.distribute.TPUStrategy(resolver)
made = strategy.experimental_distribute_values_from_function(lambda ctx: jnp.ones(1 + resolver.task_id))

@tf.function
def total(x):
    return strategy.run(lambda x: context().all_reduce("SUM", x), args=(x,))

try:
    total(made)
except tf.errors.InvalidArgumentError as error:
    told("error", str(error))
"""


def test_shapes_that_differ_between_hosts_are_refused(told):
    """No host can see that by itself; they compare what they made."""
    own = ["replica 0: (1,), replica 1: (1,), ", "replica 4: (2,), replica 5: (2,), "]
    for host, shapes in zip(told["other shapes"], own, strict=True):
        assert f"needs the same shapes on each, but they are: {shapes}" in host["error"]
        assert "and others on other hosts" in host["error"]
