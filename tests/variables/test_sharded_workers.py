"""Sharded variables of several processes: eager and compiled steps, and checkpoints."""

from __future__ import annotations

import json

import numpy as np
from processes import Workers

# Each pair of strategies trains one step, saves, restores under the other, and trains another step under both.
PROGRAM = """
import json, os
import jax, jax.numpy as jnp, numpy as np, optax
import replicax as rx

def training(shard):
    strategy = rx.MultiWorkerMirroredStrategy(shard_variables=shard)
    with strategy.scope():
        start = np.random.default_rng(jax.process_index()).normal(size=(2, 130, 64)).astype("f4")  # the first's counts
        w, table = rx.Variable(start[0] * 0.1), rx.Variable(start[1])
        optimizer = rx.Optimizer(optax.adam(0.1), [w, table], reduce_op="mean")

    def replica(x, ids):
        with rx.GradientTape() as tape:
            loss = jnp.mean((x @ w) ** 2) + jnp.mean(table.value()[ids] ** 2)
        optimizer.apply_gradients(tape.gradient(loss, [w, table]))
        return loss

    given = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full((4, 130), 0.1 * (1 + context.replica_id_in_sync_group))
    )
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.arange(3) * (1 + context.replica_id_in_sync_group)
    )
    step = lambda *args: strategy.reduce("MEAN", strategy.run(replica, args=args), axis=None)
    checkpoint = rx.train.Checkpoint(w=w, table=table, optimizer=optimizer)
    return w, table, checkpoint, lambda compiled: float((rx.function(step) if compiled else step)(given, ids))

for number, (before, after, compiled) in enumerate([(True, False, True), (False, True, False), (True, True, True)]):
    w, table, checkpoint, step = training(before)
    losses = [step(True)]
    path = checkpoint.save(os.path.join(os.getcwd(), f"checkpoint{number}"))
    others = training(after)
    others[2].restore(path).assert_consumed()
    assert all((one.numpy() == other.numpy()).all() for one, other in zip(others, (w, table)))
    losses += [step(False), others[3](compiled)]
    for one, other in zip(others, (w, table)):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-6)
    parts = [shard.data.shape for shard in others[0]._storage.read()[0].addressable_shards]
    print("told", json.dumps([losses, parts]), flush=True)
"""


def test_workers_train_in_parts_and_restore_checkpoints(tmp_path):
    quiet = {"REPLICAX_PREFLIGHT": "quiet", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "REPLICAX_STEP_TIMEOUT": "120"}
    with Workers(tmp_path, 2, PROGRAM, env=quiet) as workers:
        done = workers.join(timeout=200)
    for worker in done.values():
        assert worker.returncode == 0, worker.stderr
        told = [json.loads(line[5:]) for line in worker.stdout.splitlines() if line.startswith("told ")]
        assert [parts for _, parts in told] == [[[130, 64]], [[65, 64]], [[65, 64]]]
        for losses, _ in told:
            np.testing.assert_allclose(losses, told[0][0], rtol=1e-5)
            np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
