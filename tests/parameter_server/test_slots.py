"""Optimizers with their state on parameter servers: what a step of Optax and of Flax NNX moves."""

from __future__ import annotations

import pytest
from ps_clusters import HEAD


@pytest.fixture
def run(run_here):
    return lambda code: run_here(code, head=HEAD + "    import optax\n    from flax import nnx\n")


def test_divided_slots_never_travel(run):
    """Rows of the table and their gradients do, and weights and their gradients, once each."""
    run("""
        table, hidden = (1000, 16), (80, 8)
        rng = np.random.default_rng(0)
        ids = jnp.asarray(rng.integers(0, 1000, (32, 5)).astype("i4"))
        y = jnp.asarray(rng.normal(size=(32, 1)).astype("f4"))

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.table, self.dropout = nnx.Embed(*table, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
                self.hidden, self.out = nnx.Linear(*hidden, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

            def __call__(self, ids):
                rows = self.table(ids).reshape(ids.shape[0], -1)
                return self.out(nnx.relu(self.dropout(self.hidden(rows))))

        partitioner = rx.experimental.partitioners.MinSizePartitioner(1 << 10, 2)
        with Cluster(workers=1, servers=2, partitioner=partitioner) as cluster:
            coordinator, strategy = cluster.coordinator, cluster.strategy
            with strategy.scope():
                model = Model(nnx.Rngs(0))
                by_nnx = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
                variables = [rx.Variable(jnp.zeros(shape)) for shape in (table, hidden, (8,))]
                by_optax = rx.Optimizer(optax.adam(1e-2), variables)

            _, *slots = by_optax.state._storage.places  # behind the count, the averages of gradients and of squares
            assert [place.parts for place in slots] == [v._storage.places[0].parts for v in variables] * 2

            @rx.function
            def nnx_step(ids, y):
                def replica(ids, y):
                    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(ids) - y) ** 2))(model)
                    by_nnx.update(model, gradients)
                    return loss
                return strategy.run(replica, args=(ids, y))

            @rx.function
            def optax_step(ids, y):
                def loss_of(table, hidden, bias):
                    return jnp.mean((table[ids].reshape(32, 80) @ hidden + bias - y) ** 2)
                def replica():
                    values = [variable.value() for variable in variables]
                    loss, gradients = jax.value_and_grad(loss_of, (0, 1, 2))(*values)
                    by_optax.apply_gradients(list(gradients))
                    return loss
                return strategy.run(replica)

            once = 4 * (32 * 5 * 16 + 32 * 5 + 80 * 8)  # the rows with their ids, and the weights
            for step in (nnx_step, optax_step):
                def train():
                    return coordinator.schedule(step, args=(ids, y)).fetch()
                losses = [train() for _ in range(5)]
                travelled = moved(cluster, lambda: losses.extend([train()]))
                assert min(losses[3:]) < losses[0], losses
                assert 2 * once <= travelled <= 2 * once + 1000, (travelled, once)  # a slot of 80 * 8 has 2560 bytes
    """)


def test_the_state_of_each_optimizer_lies_with_its_own_variables(run):
    """Whatever the shapes, the other variables and the order; also in what has not all of the variables' structure."""
    run("""
        shape = (64, 4)
        elsewhere = rx.Variable(jnp.zeros(shape))
        with Cluster(workers=1, servers=3) as cluster, cluster.strategy.scope():
            colocated = cluster.strategy.extended.colocate_vars_with
            def server(variable):
                ((place,),) = [place.parts for place in variable._storage.places]
                return place.server
            def servers(variable):
                places = variable._treedef.unflatten(variable._storage.places)
                return jax.tree.map(lambda place: place.parts[0].server, places, is_leaf=lambda x: hasattr(x, "parts"))
            a, b, c, d = [rx.Variable(jnp.zeros(shape)) for _ in range(4)]
            assert list(map(server, (a, b, c, d))) == [0, 1, 2, 0]
            one, two = rx.Optimizer(optax.adam(1e-3), b), rx.Optimizer(optax.adam(1e-3), {"c": c, "a": [a]})
            state = servers(one.state)[0]
            assert (state.mu, state.nu, state.count) == (1, 1, 1)
            state = servers(two.state)[0]
            assert state.mu == state.nu == {"c": 2, "a": [0]}
            masked = rx.Optimizer(optax.masked(optax.adam(1e-3), [False, True]), [a, b])
            assert servers(masked.state).inner_state[0].mu[1] == 1

            tree = rx.Variable({"x": jnp.zeros(shape), "y": jnp.zeros(shape), "z": jnp.zeros(())})
            places = servers(tree)
            assert sorted(places.values()) == [0, 1, 2]
            state = servers(rx.Optimizer(optax.adam(1e-3), tree).state)[0]
            assert state.mu == state.nu == places
            with colocated(b):
                beside = rx.Variable([jnp.zeros(shape), jnp.zeros(3), jnp.zeros(())])
            assert servers(beside) == [1, 1, 1]
            assert servers(rx.Optimizer(optax.adam(1e-3), [b, elsewhere]).state)[0].mu[0] == 1
    """)


def test_what_nnx_keeps_of_a_weight_lies_with_it(run):
    """Also where weights are not divided, and lie on the servers in turn; a step count lies anywhere."""
    run("""
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
            def __call__(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x
        def server(variable):
            ((place,),) = [place.parts for place in variable.__replicax_variable__._storage.places]
            return place.server
        with Cluster(workers=1, servers=5) as cluster:
            with cluster.strategy.scope():
                model = Model(nnx.Rngs(0))
                optimizers = [
                    nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param),
                    nnx.ModelAndOptimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param),
                ]
            @rx.function
            def step(x):
                gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
                optimizers[0].update(model, gradients)
                optimizers[1].update(gradients)
            cluster.coordinator.schedule(step, args=(jnp.ones((2, 4)),)).fetch()
            of_model = {path: server(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
            assert len(set(of_model.values())) == 5
            adam, momentum = optimizers[0].opt_state[0], optimizers[1].opt_state[0]
            for kept in (adam.mu, adam.nu, momentum.trace):
                assert {path: server(leaf) for path, leaf in nnx.to_flat_state(kept)} == of_model
    """)
