"""Replicas of several devices in a job of several workers: variables start alike and stay split, models train alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from processes import Workers, told_by

import replicax as rx

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import replicax as rx
from replicax._base import foreign_state

RULES = {"(up|kernel_of_up)": (None, "model"), "down": ("model",)}

class Model(nnx.Module):
    def __init__(self, rngs):
        self.kernel_of_up = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(x @ self.kernel_of_up[...]))

OPTIONS = {"split": {}, "divided too": {"shard_variables": lambda shape, _: [2] * len(shape)}}

def train(strategy, worker, told):
    def initial():
        return {
            "up": np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16) + worker,
            "down": np.linspace(1, -1, 16 * 8, dtype=np.float32).reshape(16, 8) + worker,
        }

    with strategy.scope():
        w = rx.Variable(initial, name="w")
        optimizer = rx.Optimizer(optax.adam(0.01), w, "MEAN")
        model = Model(nnx.Rngs(worker))
        other = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def replica(x):
        of_arrays = lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        loss, gradients = jax.value_and_grad(of_arrays)(w.value())
        optimizer.apply_gradients(gradients)
        more, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        other.update(model, rx.get_replica_context().all_reduce("MEAN", gradients))
        return loss + more

    @rx.function
    def step(x):
        return strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None)

    x = strategy.experimental_distribute_values_from_function(
        lambda context: np.sin(np.arange(32.0, dtype=np.float32) + context.replica_id_in_sync_group).reshape(4, 8)
    )
    told("losses", [float(step(x)) for _ in range(3)])
    trace = other.opt_state[0].trace["kernel_of_up"]
    held = [foreign_state.variable_of(p) for p in (model.kernel_of_up, model.down.kernel, trace)]
    arrays = [leaf for variable in (w, *held) for leaf in variable._storage.read()]
    told("parts", [list(array.addressable_shards[0].data.shape) for array in arrays])
    told("replicas", strategy.num_replicas_in_sync)
    total = strategy.run(lambda: jnp.sum(w.value()["up"]))  # eager replicas have whole values
    told("eager", float(strategy.experimental_local_results(total)[0]))
"""

JOB = """
import functools, json

def told(which, name, value):
    print("told", json.dumps([which, name, value]), flush=True)

for which, options in OPTIONS.items():
    strategy = rx.MultiWorkerMirroredStrategy(devices_per_replica=2, sharding_rules=RULES, **options)
    train(strategy, strategy.cluster_resolver.task_id, functools.partial(told, which))
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_trains_as_one_process_with_all_devices(tmp_path):
    names: dict[str, Any] = {}
    exec(compile(PROGRAM, "program", "exec"), names)
    alone: dict[str, dict[str, Any]] = {which: {} for which in names["OPTIONS"]}
    for which, options in names["OPTIONS"].items():
        strategy = rx.MirroredStrategy(devices_per_replica=2, sharding_rules=names["RULES"], **options)
        names["train"](strategy, 0, alone[which].__setitem__)
    with Workers(tmp_path, 2, PROGRAM + JOB, env={"REPLICAX_VIRTUAL_DEVICES": "GPU:4"}) as workers:
        told = told_by(workers.join(timeout=180))
    assert alone["split"]["parts"] == [[8, 8]] * 5
    assert alone["divided too"]["parts"] == [[8, 2], [2, 8], [2, 8], [8, 2], [2, 8]]
    for which, expected in alone.items():
        for worker in told[which]:
            np.testing.assert_allclose(worker["losses"], expected["losses"], rtol=1e-5)
            np.testing.assert_allclose(worker["eager"], expected["eager"], rtol=1e-4)
            assert worker["parts"] == expected["parts"] and worker["replicas"] == expected["replicas"] == 4
