"""A model trains whose state is four times the memory that a process may have, in parts on eight devices."""

from __future__ import annotations

import json

import pytest
from processes import Workers

DEVICES, LIMIT_MB = 8, 96

# Parameters, gradients and Adam's two moments of one replica are 4 x LIMIT_MB. Each process may have LIMIT_MB beyond
# what it has when it has joined the job and run a small step of the same kind.
PROGRAM = """
import ctypes, json, os, resource
import jax, jax.numpy as jnp, numpy as np, optax
import replicax as rx

ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back to the system
LIMIT, SHARDED = int(os.environ["LIMIT_MB"]) << 20, os.environ["SHARDED"] == "1"
strategy = rx.MultiWorkerMirroredStrategy(shard_variables=SHARDED)

def training(width, layers, blocks):
    with strategy.scope():
        random = np.random.default_rng(0)
        weights = [
            rx.Variable(lambda: random.standard_normal((layers, width, width), np.float32) * np.float32(0.02))
            for _ in range(blocks)
        ]
        optimizer = rx.Optimizer(optax.adam(1e-5), weights, reduce_op="mean")

    def loss_of(values, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        for value in values:
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, value)
        return jnp.mean((x - 1.0) ** 2)

    def replica(x):
        loss, gradients = jax.value_and_grad(loss_of)([w.value() for w in weights], x)
        optimizer.apply_gradients(gradients)
        return loss

    step = rx.function(lambda x: strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None))
    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.full((2, width), 0.1 * (context.replica_id_in_sync_group + 1), np.float32)
    )
    state = sum(kind.size * 4 for v in [*weights, optimizer.state] for kind in v._types)
    return state, [float(step(x)) for _ in range(int(os.environ["STEPS"]))], weights

training(128, 2, 2)  # threads, buffers of connections, code
with open("/proc/self/status") as status:
    (data,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")]
resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT, resource.RLIM_INFINITY))
layers, width = 16, 512
blocks = LIMIT // (4 * layers * width**2)  # so that the parameters alone are as much as the limit
state, losses, weights = training(width, layers, blocks)
whole = state + blocks * layers * width**2 * 4  # with gradients
print("told", json.dumps([whole, losses, weights[0]._storage.read()[0].addressable_shards[0].data.nbytes]), flush=True)
"""


def run(tmp_path, workers, sharded, steps=2):
    env = {"LIMIT_MB": str(LIMIT_MB), "SHARDED": "1" if sharded else "0", "STEPS": str(steps)}
    quiet = {"REPLICAX_PREFLIGHT": "quiet", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "REPLICAX_STEP_TIMEOUT": "300"}
    with Workers(tmp_path, workers, PROGRAM, env={**env, **quiet, "REPLICAX_HEARTBEAT_TIMEOUT": "60"}) as job:
        return job.join(timeout=300)


@pytest.mark.thorough
def test_a_model_of_four_times_the_memory_limit_trains_in_parts(tmp_path):
    done = run(tmp_path, DEVICES, sharded=True)
    for worker in done.values():
        assert worker.returncode == 0, worker.stderr
        (line,) = [line for line in worker.stdout.splitlines() if line.startswith("told ")]
        whole, losses, part = json.loads(line[5:])
        assert whole >= 4 * LIMIT_MB << 20
        assert losses[1] < losses[0]
        assert part == 16 * 512**2 * 4 // DEVICES


@pytest.mark.thorough
def test_the_same_model_does_not_train_whole(tmp_path):
    """Under the same limit."""
    (worker,) = run(tmp_path, 1, sharded=False).values()
    assert worker.returncode != 0
    assert "RESOURCE_EXHAUSTED" in worker.stderr or "MemoryError" in worker.stderr, worker.stderr
