"""Bytes that workers exchange with parameter servers for a closure."""

from __future__ import annotations

import pytest
from ps_clusters import ENVIRONMENT, HEAD, in_turn

# A worker prints how many bytes it has sent and received so far, after each update.
COUNTING = """
    from replicax._parameter_server import execution
    from replicax._transport.peer import _RemoteLink
    real, call, sizes = execution.update, _RemoteLink._sent, []
    def counted(link, message, *args):
        data = call(link, message, *args)
        sizes.append(message.size + len(data))
        return data
    def update(*args):
        found = real(*args)
        print(sum(sizes), flush=True)
        return found
    execution.update, _RemoteLink._sent = update, counted
"""

OWN = """
    import optax
    def clusters():
        halves = rx.experimental.partitioners.FixedShardsPartitioner(2)
        for servers in (1, 2):
            for partitioner in (None, halves):
                with Cluster(workers=1, servers=servers, partitioner=partitioner) as cluster:
                    yield cluster
    def bytes_of(cluster, step, *args):
        totals = []
        for _ in range(3):
            cluster.coordinator.schedule(step, args=args).fetch()
            totals.append(int(cluster.line("worker", 0)))
        return totals[2] - totals[1]
"""
PROGRAMS = {
    # And a step of SGD the gradients of these rows, with their ids.
    "a lookup moves rows and their ids alone": """
        rows, width, batch = 5000, 64, 1024
        for cluster in clusters():
            with cluster.strategy.scope():
                table = rx.Variable(np.ones((rows, width), "f4"))
            optimizer = rx.Optimizer(optax.sgd(0.1), [table])
            weights = jnp.ones((width, 8))
            ids = jnp.asarray(np.random.default_rng(0).integers(0, rows, batch), "int32")
            @rx.function
            def look_up(ids):
                return jnp.sum(table.value()[ids])
            @rx.function
            def train(ids, weights):
                with rx.GradientTape() as tape:
                    loss = jnp.sum((table.value()[ids] @ weights) ** 2)
                optimizer.apply_gradients(tape.gradient(loss, [table]))
                return loss
            once = batch * (width * 4 + 4)
            found = bytes_of(cluster, look_up, ids), bytes_of(cluster, train, ids, weights)
            assert once <= found[0] <= 1.1 * once, (found, once)
            assert 2 * once <= found[1] <= 1.1 * 2 * once, (found, once)
    """,
    # The state of an optimizer stays on the servers.
    "a dense step moves gradients and the values that it reads": """
        size = 512
        for cluster in clusters():
            for name in ("sgd", "adam"):
                with cluster.strategy.scope():
                    weights = [rx.Variable(np.eye(size, dtype="f4")) for _ in range(2)]
                    optimizer = rx.Optimizer(getattr(optax, name)(0.1), weights)
                @rx.function
                def train(x):
                    with rx.GradientTape() as tape:
                        loss = jnp.sum((jnp.tanh(x @ weights[0].value()) @ weights[1].value()) ** 2)
                    optimizer.apply_gradients(tape.gradient(loss, weights))
                    return loss
                once = 2 * size * size * 4
                found = bytes_of(cluster, train, jnp.ones((8, size)))
                assert 2 * once <= found <= 1.05 * 2 * once, (name, type(weights[0]).__name__, found, once)
    """,
}


@pytest.mark.thorough
def test_a_step_moves_what_it_needs_alone(run_well):
    """With one server and with two, and with whole and divided variables."""
    run_well(in_turn(PROGRAMS, HEAD + OWN, workers=1, servers=2, hooks={"worker": COUNTING}), env=ENVIRONMENT)
