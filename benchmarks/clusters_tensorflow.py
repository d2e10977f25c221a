"""TensorFlow's side of parameter_servers.py: `chief SERVERS MEGABYTES`, or `task CLUSTER JOB INDEX`."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import clusters
import numpy as np
import serving


def chief(servers: int, megabytes: int) -> serving.Answering:
    """Starts the cluster; returns what answers requests."""
    tasks = clusters.Tasks(__file__, servers)
    import tensorflow as tf  # while the tasks do the same

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(tasks.spec), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    parts = tf.distribute.experimental.partitioners.FixedShardsPartitioner(servers) if servers > 1 else None
    strategy = tf.distribute.ParameterServerStrategy(resolver, parts)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    first_table, all_ids, all_y = clusters.embedding()
    with strategy.scope():
        count, steps = tf.Variable(0.0), tf.Variable(0)
        table, w = tf.Variable(first_table), tf.Variable(np.zeros((clusters.WIDTH, 1), "float32"))
        dense, averaged = ([tf.Variable(matrix) for matrix in clusters.matrices()] for _ in range(2))
        slots = [[tf.Variable(np.zeros_like(matrix)) for matrix in clusters.matrices()] for _ in range(2)]
        power = tf.Variable(0.0)
        large = tf.Variable(np.zeros(megabytes * 250_000, "float32"))
    values = np.ones(megabytes * 250_000, "float32")
    parts_of: Any = lambda v: getattr(v, "variables", [v])  # noqa: E731
    flat: Any = lambda variables: [part for v in variables for part in parts_of(v)]  # noqa: E731

    def data():
        return tf.data.Dataset.from_tensor_slices((all_ids, all_y)).repeat().prefetch(2)

    iterator = iter(coordinator.create_per_worker_dataset(data))

    def dense_gradients(variables):
        with tf.GradientTape() as tape:
            a, b = (tf.convert_to_tensor(v) for v in variables)
            loss = tf.reduce_mean((tf.nn.relu(tf.ones([64, clusters.DENSE]) @ a) @ b) ** 2)
        return loss, tape.gradient(loss, flat(variables))

    @tf.function
    def empty():
        return None

    @tf.function
    def add():
        count.assign_add(1.0)

    @tf.function
    def embedding_step(iterator):
        ids, y = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.embedding_lookup(table, ids) @ tf.convert_to_tensor(w) - y) ** 2)
        gradients = tape.gradient(loss, parts_of(table) + parts_of(w))
        for part, rows in zip(parts_of(table), gradients):
            part.scatter_sub(tf.IndexedSlices(clusters.RATE * rows.values, rows.indices))
        for part, gradient in zip(parts_of(w), gradients[len(parts_of(table)) :]):
            part.assign_sub(clusters.RATE * gradient)
        steps.assign_add(1)
        return loss

    @tf.function
    def dense_step():
        loss, gradients = dense_gradients(dense)
        for part, gradient in zip(flat(dense), gradients):
            part.assign_sub(clusters.RATE * gradient)
        return loss

    @tf.function
    def adam_step():  # with the operation that updates a variable and its slots where they are
        loss, gradients = dense_gradients(averaged)
        t = power.assign_add(1.0)
        for part, m, v, gradient in zip(flat(averaged), flat(slots[0]), flat(slots[1]), gradients):
            tf.raw_ops.ResourceApplyAdam(
                var=part.handle, m=m.handle, v=v.handle, beta1_power=0.9**t, beta2_power=0.999**t, lr=1e-3, beta1=0.9,
                beta2=0.999, epsilon=1e-8, grad=gradient,
            )  # fmt: skip
        return loss

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
        "write": repeated(lambda: large.assign(values)),
        "read": repeated(lambda: [part.numpy() for part in parts_of(large)]),
    }
    coordinator.schedule(empty).fetch()
    return clusters.answering(tasks, works, tf.__version__)


if __name__ == "__main__":
    if sys.argv[1] == "task":
        spec, job, index = clusters.task()
        import tensorflow as tf

        tf.distribute.Server(tf.train.ClusterSpec(spec), job_name=job, task_index=index, protocol="grpc").join()
    serving.serve(lambda: chief(int(sys.argv[2]), int(sys.argv[3])))
    os._exit(0)
