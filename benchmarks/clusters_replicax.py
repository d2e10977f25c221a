"""The side of replicax in parameter_servers.py, with TLS on: `chief SERVERS MEGABYTES`, or `task CLUSTER JOB INDEX`."""

from __future__ import annotations

import os
import secrets
import sys

import clusters
import jax
import jax.numpy as jnp
import numpy as np
import optax
import serving

import replicax as rx
from replicax.coordinator import ClusterCoordinator, Server


def chief(servers: int, megabytes: int) -> serving.Answering:
    """Starts the cluster; returns what answers requests."""
    os.environ["REPLICAX_JOB_SECRET"] = secrets.token_hex()
    tasks = clusters.Tasks(__file__, servers)
    resolver = rx.cluster_resolver.SimpleClusterResolver(
        rx.ClusterSpec(tasks.spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    parts = rx.experimental.partitioners.FixedShardsPartitioner(servers) if servers > 1 else None
    strategy = rx.ParameterServerStrategy(resolver, parts)
    coordinator = ClusterCoordinator(strategy)
    first_table, all_ids, all_y = clusters.embedding()
    with strategy.scope():
        count, steps = rx.Variable(0.0), rx.Variable(0)
        table, w = rx.Variable(first_table), rx.Variable(np.zeros((clusters.WIDTH, 1), "float32"))
        dense, averaged = ([rx.Variable(matrix) for matrix in clusters.matrices()] for _ in range(2))
        optimizer = rx.Optimizer(optax.adam(1e-3), averaged)
        large = rx.Variable(np.zeros(megabytes * 250_000, "float32"))
    values = np.ones(megabytes * 250_000, "float32")

    def data():
        return rx.data.Dataset.from_tensor_slices((all_ids, all_y)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(data))

    def dense_loss(a, b):
        return jnp.mean((jax.nn.relu(jnp.ones((64, clusters.DENSE)) @ a) @ b) ** 2)

    @rx.function
    def empty():
        return None

    @rx.function
    def add():
        count.assign_add(1.0)

    @rx.function
    def embedding_step(iterator):
        ids, y = next(iterator)
        loss = lambda table, w: jnp.mean((table[ids] @ w - y) ** 2)  # noqa: E731
        value, (of_table, of_w) = jax.value_and_grad(loss, (0, 1))(table.value(), w.value())
        table.assign_sub(clusters.RATE * of_table)
        w.assign_sub(clusters.RATE * of_w)
        steps.assign_add(1)
        return value

    @rx.function
    def dense_step():
        value, gradients = jax.value_and_grad(dense_loss, (0, 1))(*(v.value() for v in dense))
        for variable, gradient in zip(dense, gradients):
            variable.assign_sub(clusters.RATE * gradient)
        return value

    @rx.function
    def adam_step():
        value, gradients = jax.value_and_grad(dense_loss, (0, 1))(*(v.value() for v in averaged))
        optimizer.apply_gradients(list(gradients))
        return value

    def closures(function, *args):
        def run(number: int) -> None:
            for _ in range(number):
                coordinator.schedule(function, args=args)
            coordinator.join()

        return run

    def repeated(function):
        return lambda number: [function() for _ in range(number)]

    works = {
        "empty": closures(empty),
        "assign_add": closures(add),
        "embedding": closures(embedding_step, iterator),
        "dense, SGD": closures(dense_step),
        "dense, Adam": closures(adam_step),
        "fetch": repeated(lambda: coordinator.schedule(empty).fetch()),
        "write": repeated(lambda: large.assign(values, read_value=False)),
        "read": repeated(large.numpy),
    }
    coordinator.schedule(empty).fetch()
    return clusters.answering(tasks, works, "")


if __name__ == "__main__":
    if sys.argv[1] == "task":
        spec, job, index = clusters.task()
        Server(spec, job_name=job, task_index=index).join()
    serving.serve(lambda: chief(int(sys.argv[2]), int(sys.argv[3])))
    os._exit(0)
