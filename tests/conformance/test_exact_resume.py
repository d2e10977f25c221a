"""A job that is killed at any step and started again goes on to the bit as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from launching import Launch
from processes import Ended, Workers, told_by

STEPS = 12
INTERVAL = 3

# What the parts below share: a job that saves every INTERVAL steps. After step STOP_AT, worker VICTIM kills it; if the
# step is negative, the first worker copies what was saved by then, as a job that is killed there leaves it.
HEAD = """
import hashlib, json, os, pathlib, shutil, signal, sys
import jax, jax.numpy as jnp, numpy as np, optax
import replicax as rx
import replicax.tf as tf

folder, steps, interval, stop_at, victim = json.loads(os.environ["RESUME"])
strategy = rx.MultiWorkerMirroredStrategy()
me = strategy.cluster_resolver.task_id or 0
killed = pathlib.Path(folder) / "killed"
log = open(pathlib.Path(folder) / f"losses{me}", "a", buffering=1)
x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)

def go(train, objects, step, of_weights):
    checkpoint = rx.train.Checkpoint(step=step, **objects)
    manager = rx.train.CheckpointManager(
        checkpoint, pathlib.Path(folder) / "saved", max_to_keep=2, step_counter=step, checkpoint_interval=interval)
    manager.restore_or_initialize()
    while int(step) < steps:
        loss = float(train())
        print(json.dumps([int(step), loss.hex()]), file=log)
        if int(step) == stop_at and me == victim and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if int(step) == -stop_at and me == 0:
            shutil.copytree(pathlib.Path(folder) / "saved", pathlib.Path(folder) / "copied")
        manager.save()
    assert checkpoint.report().complete, str(checkpoint.report())
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(of_weights())]
    print(json.dumps(["weights", hashlib.sha1(b"".join(leaves)).hexdigest()]), file=log)
"""

# Adam with a schedule, iterations, an input with random maps, generators with and without a strategy.
PLAIN = """
with strategy.scope():
    w = rx.Variable(jnp.ones((4, 3)))
    optimizer = rx.Optimizer(optax.adam(optax.cosine_decay_schedule(0.1, steps)), w, reduce_op="MEAN")
    total = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ,
                             aggregation=rx.VariableAggregation.SUM)
    generator = tf.random.Generator.from_seed(3)
outside = tf.random.Generator.from_seed(4)
step = rx.Variable(0)
data = rx.data.Dataset.from_tensor_slices(x)
noise = rx.data.Dataset.random(seed=5, rerandomize_each_iteration=True)
noisy = rx.data.Dataset.zip(data, noise).map(
    lambda row, seed: row + 0.1 * tf.random.stateless_normal([4], [seed, 1]), num_parallel_calls=2)
noisy = noisy.shuffle(20, seed=6).repeat().batch(12, drop_remainder=True).prefetch(2)
iterator = iter(strategy.experimental_distribute_dataset(noisy))

@rx.function
def train_step(batch, shift):
    def replica_step(batch):
        keep = generator.uniform([4]) < 0.8
        def loss_of(w):
            return jnp.mean((batch * keep @ w - shift) ** 2)
        loss, gradients = jax.value_and_grad(loss_of)(w.value())
        optimizer.apply_gradients(gradients)
        total.assign_add(loss)
        return loss
    loss = strategy.run(replica_step, args=(batch,))
    step.assign_add(1)
    return strategy.reduce("MEAN", loss, axis=None)

go(lambda: train_step(next(iterator), outside.normal([3])),
   dict(w=w, optimizer=optimizer, total=total, generator=generator, outside=outside, iterator=iterator), step,
   lambda: [w.numpy(), total.numpy(), optimizer.state.numpy()])
"""

KERAS = """
from replicax.tf import keras
keras.utils.set_random_seed(7)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(),
                              keras.layers.Dropout(0.4), keras.layers.Dense(1)])
    model.build((None, 4))
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    mean = keras.metrics.Mean()
step = rx.Variable(0)
data = rx.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True)))
data = data.shuffle(50, seed=1).batch(12, drop_remainder=True).repeat()
iterator = iter(strategy.experimental_distribute_dataset(data))

@rx.function
def train_step(batch):
    def replica_step(x, y):
        with rx.GradientTape() as tape:
            loss = jnp.sum((model(x, training=True) - y) ** 2) / 12
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean.update_state(loss)
        return loss
    loss = strategy.run(replica_step, args=batch)
    step.assign_add(1)
    return strategy.reduce("SUM", loss, axis=None)

go(lambda: train_step(next(iterator)),
   dict(model=model, optimizer=optimizer, mean=mean, iterator=iterator), step,
   lambda: [np.asarray(v) for v in model.weights] + [np.asarray(mean.result())])
"""

NNX = """
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)
    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))

with strategy.scope():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(optax.linear_schedule(0.1, 0.0, steps)), wrt=nnx.Param)
step = rx.Variable(0)
data = rx.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True)))
data = data.shuffle(50, seed=1).repeat().batch(12)
iterator = iter(strategy.experimental_distribute_dataset(data))

@rx.function
def train_step(batch):
    def replica_step(x, y):
        loss_of = lambda model: jnp.sum((model(x) - y) ** 2) / 12
        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, rx.get_replica_context().all_reduce("SUM", gradients))
        return loss
    loss = strategy.run(replica_step, args=batch)
    step.assign_add(1)
    return strategy.reduce("SUM", loss, axis=None)

go(lambda: train_step(next(iterator)), dict(model=model, optimizer=optimizer, iterator=iterator), step,
   lambda: nnx.state(model, nnx.Param))
"""

RANDOM = """
import random
tf.random.set_seed(9); random.seed(1); np.random.seed(2)
own = np.random.default_rng(3)
with strategy.scope():
    w = tf.Variable(np.ones((4, 3), np.float32))
step = rx.Variable(0)
iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(x).repeat().batch(12)))

@tf.function
def train_step(batch, shift):
    def replica_step(batch):
        with tf.GradientTape() as tape:
            y = tf.nn.dropout(batch @ w.value(), 0.4) + tf.random.normal([3], seed=2)
            loss = tf.reduce_mean((y - shift) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce("MEAN", tape.gradient(loss, w))
        w.assign_sub(0.1 * gradient)
        return loss
    loss = strategy.run(replica_step, args=(batch,))
    step.assign_add(1)
    return strategy.reduce("MEAN", loss, axis=None)

def shift():
    by_host = np.float32(random.random() + np.random.normal() + own.normal())
    return by_host + tf.random.normal([3]) + tf.random.uniform([3], seed=1)

go(lambda: train_step(next(iterator), shift()),
   dict(w=w, iterator=iterator, random=rx.train.RandomState(own)), step, lambda: w.numpy())
"""

PROGRAMS = {"random": RANDOM, "plain": PLAIN, "keras": KERAS, "nnx": NNX}
REQUIRES = {"random": ["optax"], "plain": ["optax"], "keras": ["keras"], "nnx": ["flax", "optax"]}


def told(folder: Path, workers: int) -> list[dict[str, list[str]]]:
    """Returns for each worker, for each step, the losses of each time that it was taken."""
    found: list[dict[str, list[str]]] = [{} for _ in range(workers)]
    for worker in range(workers):
        for line in (folder / f"losses{worker}").read_text().splitlines():
            step, value = json.loads(line)
            found[worker].setdefault(str(step), []).append(value)
    return found


def settings(folder: Path, stop_at: int, victim: int) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return {"RESUME": json.dumps([str(folder), STEPS, INTERVAL, stop_at, victim])}


def run(folder: Path, name: str, workers: int, stop_at: int = 0, victim: int = 0) -> dict[int, Ended]:
    """Runs a job once."""
    env = settings(folder, stop_at, victim)
    started = folder / f"job{len(list(folder.glob('job*')))}"
    with Workers(started, workers, HEAD + PROGRAMS[name], env=env) as job:
        return job.join(timeout=120)


def succeeded(done: dict[int, Ended]) -> bool:
    assert not any(worker.returncode for worker in done.values()), done
    return True


def check(undisturbed: list[dict[str, list[str]]], resumed: list[dict[str, list[str]]]) -> None:
    again = 0
    for expected, found in zip(undisturbed, resumed, strict=True):
        assert found.keys() == expected.keys() == {*map(str, range(1, STEPS + 1)), "weights"}
        for step, losses in found.items():
            again += len(losses) - 1
            assert set(losses) == set(expected[step]), step
    assert again <= INTERVAL * len(resumed)


COPIED = [*(pytest.param(name, 2, marks=pytest.mark.thorough) for name in ("keras", "nnx")), ("random", 2)]


def chosen(name: str, workers: int) -> tuple[int, int]:
    """Returns a step behind the first save, and a worker."""
    for module in REQUIRES[name]:
        pytest.importorskip(module)
    chance = random.Random(f"{name} {workers}")
    return chance.randrange(INTERVAL + 2, STEPS), chance.randrange(workers)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_job_goes_on_to_the_bit(tmp_path, workers):
    kill_at, victim = chosen("plain", workers)
    assert succeeded(run(tmp_path / "undisturbed", "plain", workers))
    done = run(tmp_path / "killed", "plain", workers, kill_at, victim)
    assert done[victim].returncode == -signal.SIGKILL and all(worker.returncode for worker in done.values()), done
    assert succeeded(run(tmp_path / "killed", "plain", workers, kill_at, victim))
    check(told(tmp_path / "undisturbed", workers), told(tmp_path / "killed", workers))


@pytest.mark.parametrize("name, workers", COPIED)
def test_a_job_goes_on_to_the_bit_from_what_another_had_saved_at_some_step(tmp_path, name, workers):
    step, _ = chosen(name, workers)
    step -= step % INTERVAL == 1  # when nobody saves
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert succeeded(run(whole, name, workers, -step))
    resumed.mkdir()
    (whole / "copied").rename(resumed / "saved")
    assert succeeded(run(resumed, name, workers))
    expected, found = told(whole, workers), told(resumed, workers)
    for before, after in zip(expected, found, strict=True):
        first = min(int(key) for key in after if key != "weights")
        assert step - INTERVAL < first <= step
        assert after == {step: before[step] for step in (*map(str, range(first, STEPS + 1)), "weights")}


@pytest.mark.thorough
def test_a_job_that_the_launcher_restarts_goes_on_to_the_bit(tmp_path):
    pytest.importorskip("optax")
    assert succeeded(run(tmp_path / "undisturbed", "plain", 2))
    env = settings(tmp_path / "killed", 8, 1)
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**env, **devices, "PYTHONPATH": path}
    with Launch(tmp_path, "--workers 2 --max-restarts 1", HEAD + PLAIN, env=env) as launch:
        assert launch.wait(timeout=240) == 0, launch.output
    check(told(tmp_path / "undisturbed", 2), told(tmp_path / "killed", 2))


ELASTIC = """
import json, os, pathlib
import jax, numpy as np
import replicax as rx

folder, batches, kind = json.loads(os.environ["RESUME"])
strategy = rx.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else rx.MirroredStrategy()
resolver = strategy.cluster_resolver
me = (resolver.task_id or 0) if resolver is not None else 0
data = rx.data.Dataset.range(50).map(lambda x: x + 100).shuffle(20).repeat().batch(12)
if kind == "function":
    distributed = strategy.distribute_datasets_from_function(lambda context: data)
else:
    distributed = strategy.experimental_distribute_dataset(data)
iterator = iter(distributed)
checkpoint = rx.train.Checkpoint(iterator=iterator)
manager = rx.train.CheckpointManager(checkpoint, pathlib.Path(folder) / "saved", max_to_keep=1)
manager.restore_or_initialize()
rows = [[np.asarray(part).tolist() for part in strategy.experimental_local_results(next(iterator))]
        for _ in range(batches)]
manager.save()
if kind == "data" and batches == 4:  # so that what would have come is known
    rows += [[np.asarray(part).tolist() for part in strategy.experimental_local_results(next(iterator))]
             for _ in range(6)]
print("told", json.dumps(["", "rows", rows]), flush=True)
"""


def global_batches(workers: list[dict[str, list[list[list[int]]]]]) -> list[list[int]]:
    """Returns the batches, of which replica i is the (i // workers)-th of worker i % workers."""
    rounds = zip(*(worker["rows"] for worker in workers))
    return [sum(sum(map(list, zip(*parts)), []), []) for parts in rounds]


def elastic(folder: Path, workers: int, batches: int, kind: str = "data") -> tuple[list[list[int]], str]:
    folder.mkdir(exist_ok=True)
    env = {"RESUME": json.dumps([str(folder), batches, kind])}
    alone = {"TF_CONFIG": None} if workers == 1 else {}
    with Workers(folder / f"job{batches}.{workers}", workers, ELASTIC, env={**env, **alone}, devices=2) as job:
        done = job.join(timeout=120)
    return global_batches(told_by(done)[""]), done[0].stderr


def test_positions_are_carried_over_to_another_number_of_workers(tmp_path):
    """Each step's global batch is the same for any number of workers, where batches are divided (DATA)."""
    before, _ = elastic(tmp_path, 2, 4)
    taken, coming = before[:4], before[4:]
    assert sorted(sum(taken, [])[:48]) != sum(taken, [])[:48] and len(coming) == 6
    after, said = elastic(tmp_path, 3, 2)
    assert after == coming[:2] and "Warning" not in said
    after, said = elastic(tmp_path, 1, 3)
    assert after == coming[2:5] and "Warning" not in said
    after, said = elastic(tmp_path, 2, 1)
    assert after == coming[5:] and "Warning" not in said


def test_positions_of_data_of_each_worker_are_not_carried_over(tmp_path):
    elastic(tmp_path, 2, 4, "function")
    _, said = elastic(tmp_path, 1, 1, "function")
    assert said.count("was saved by 2 processes and there are 1 now") == 1
    assert "elements that were taken before come again" in said
