"""Bytes that workers exchange with parameter servers for a closure."""

from __future__ import annotations

import pytest
from ps_clusters import ENVIRONMENT

HEAD = """
    import json
    import jax.numpy as jnp, numpy as np, optax
    import replicax as rx
    from ps_clusters import Cluster
    from replicax.coordinator import ClusterCoordinator
    # A worker prints what it has sent and received so far, after each update.
    counting = '''
        import json
        from replicax._parameter_server import execution
        real = execution.update
        def update(plan, computed, servers, *args):
            found = real(plan, computed, servers, *args)
            print(sum(peer.sent + peer.received for peer in servers._peers), flush=True)
            return found
        execution.update = update
    '''
    def bytes_of(cluster, coordinator, step, *args):
        totals = []
        for _ in range(3):
            coordinator.schedule(step, args=args).fetch()
            totals.append(int(cluster.line("worker", 0)))
        return totals[2] - totals[1]
    def strategies(cluster):
        partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
        return cluster.strategy, rx.ParameterServerStrategy(cluster.strategy.cluster_resolver, partitioner)
"""
SERVERS = pytest.mark.parametrize("servers", [1, 2])


@pytest.fixture
def run(run_well):
    return lambda code: run_well(code, head=HEAD, env=ENVIRONMENT)


@SERVERS
def test_a_lookup_moves_rows_and_their_ids_alone(run, servers):
    """And a step of SGD the gradients of these rows, with their ids."""
    run(f"""
        rows, width, batch = 20_000, 64, 1024
        with Cluster(workers=1, servers={servers}, processes=True, hooks={{"worker": counting}}) as cluster:
            for strategy in strategies(cluster):
                co = ClusterCoordinator(strategy)
                with strategy.scope():
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
                found = bytes_of(cluster, co, look_up, ids), bytes_of(cluster, co, train, ids, weights)
                assert once <= found[0] <= 1.1 * once, (found, once)
                assert 2 * once <= found[1] <= 1.1 * 2 * once, (found, once)
    """)


@SERVERS
def test_a_dense_step_moves_gradients_and_the_values_that_it_reads(run, servers):
    """The state of an optimizer stays on the servers."""
    run(f"""
        size = 512
        with Cluster(workers=1, servers={servers}, processes=True, hooks={{"worker": counting}}) as cluster:
            for strategy in strategies(cluster):
                co = ClusterCoordinator(strategy)
                for name in ("sgd", "adam"):
                    with strategy.scope():
                        weights = [rx.Variable(np.eye(size, dtype="f4")) for _ in range(2)]
                        optimizer = rx.Optimizer(getattr(optax, name)(0.1), weights)
                    @rx.function
                    def train(x):
                        with rx.GradientTape() as tape:
                            loss = jnp.sum((jnp.tanh(x @ weights[0].value()) @ weights[1].value()) ** 2)
                        optimizer.apply_gradients(tape.gradient(loss, weights))
                        return loss
                    once = 2 * size * size * 4
                    found = bytes_of(cluster, co, train, jnp.ones((8, size)))
                    assert 2 * once <= found <= 1.05 * 2 * once, (name, type(weights[0]).__name__, found, once)
    """)
