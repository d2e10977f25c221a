"""Variables that are split over the devices of a replica by rules, and divided among the replicas as well."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import compiled, ctx, eager, mirrored, per_replica, virtual_tpus, ways

import replicax as rx
from replicax import partitioners
from replicax._base import foreign_state
from replicax._benchmark import hlo

foreign_state.join()

WIDTH, ROWS = 64, 16
RULES = {"a/kernel": (None, "model"), "a/bias": ("model",), "b/kernel": ("model",)}


def both(replicas: int, size: int, **options: Any) -> rx.MirroredStrategy:
    """A strategy of so many replicas, of so many devices each, that splits and divides variables."""
    names = [f"GPU:{i}" for i in range(replicas * size)]
    options = {"shard_variables": True, "sharding_rules": RULES} | options
    return rx.MirroredStrategy(names, devices_per_replica={"model": size}, **options)


def layout(array: jax.Array) -> tuple[Any, ...]:
    return tuple(getattr(array.sharding, "spec", ()))


def parts(array: jax.Array) -> set[tuple[int, ...]]:
    """The shapes that the devices hold of an array."""
    return {shard.data.shape for shard in array.addressable_shards}


def start() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "a": {"kernel": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,)},
        "b": {"kernel": (2 * WIDTH, WIDTH), "bias": (WIDTH,)},
        "c": {"kernel": (2 * WIDTH, WIDTH)},  # divided, not split
    }
    return jax.tree.map(
        lambda shape: (random.normal(size=shape) * 0.1).astype("f4"), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def loss_of(p: dict[str, Any], x: jax.Array) -> jax.Array:
    y = jax.nn.relu(x @ p["a"]["kernel"] + p["a"]["bias"])
    return jnp.mean((x + y @ p["b"]["kernel"] + p["b"]["bias"] + y @ p["c"]["kernel"]) ** 2)


def batch(strategy: rx.Strategy) -> Any:
    n = strategy.num_replicas_in_sync
    return per_replica(strategy, np.random.default_rng(1).normal(size=(n, ROWS // n, WIDTH)).astype("f4"))


def trained(strategy: rx.Strategy, way: Any = compiled, transformation: Any = None) -> tuple[Any, rx.Variable, Any]:
    """The losses of three steps, the parameters and the state."""
    with strategy.scope():
        p = rx.Variable(start(), name="p")
        optimizer = rx.Optimizer(
            transformation or optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)), p, "mean"
        )

    def replica(x):
        loss, gradients = jax.value_and_grad(loss_of)(p.value(), x)
        optimizer.apply_gradients(gradients)
        return loss

    step = way(lambda x: strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None))
    return [float(step(batch(strategy))) for _ in range(3)], p, optimizer.state


def same(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), one, other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("replicas", "size"), [(2, 2), (4, 2), (2, 4)])
def test_training_is_as_with_whole_variables(replicas, size):
    losses, p, state = trained(both(replicas, size))
    expected_losses, expected, expected_state = trained(mirrored(replicas))
    same((losses, p.numpy(), state.numpy()), (expected_losses, expected.numpy(), expected_state.numpy()))
    for leaves in (p.value(), state.value()[1][0].mu, state.value()[1][0].nu):
        assert layout(leaves["a"]["kernel"]) == ("replica", "model")
        assert layout(leaves["b"]["kernel"]) == ("model", "replica")
        assert layout(leaves["a"]["bias"]) == ("model",)  # small
        assert layout(leaves["c"]["kernel"]) == ("replica",)
        for name in "ab":
            kernel = leaves[name]["kernel"]
            assert {shard.data.nbytes for shard in kernel.addressable_shards} == {kernel.nbytes // (replicas * size)}


@pytest.mark.parametrize("way", [eager, compiled])
def test_eager_replicas_train_alike_and_leave_the_parts_where_they_are(way):
    losses, p, state = trained(both(2, 2), way)
    same((losses, p.numpy()), (trained(mirrored(2))[0], trained(mirrored(2))[1].numpy()))
    assert layout(p.value()["b"]["kernel"]) == layout(state.value()[1][0].nu["b"]["kernel"]) == ("model", "replica")


def test_a_tpu_strategy_splits_and_divides_too():
    virtual_tpus()
    losses, p, _ = trained(rx.TPUStrategy(devices_per_replica=4, shard_variables=True, sharding_rules=RULES))
    expected_losses, expected, _ = trained(mirrored(2))
    same((losses, p.numpy()), (expected_losses, expected.numpy()))
    assert parts(p.value()["b"]["kernel"]) == {(2 * WIDTH // 4, WIDTH // 2)}


def test_devices_exchange_what_they_have_of_their_replica():
    """No device gathers more than its part of what a replica has, nor sends more of a gradient."""
    strategy = both(4, 2)
    with strategy.scope():
        p = rx.Variable({name: start()[name] for name in "ab"}, name="p")
        optimizer = rx.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)), p, "mean")

    def loss_of(p, x):
        return jnp.mean((x + jax.nn.relu(x @ p["a"]["kernel"]) @ p["b"]["kernel"]) ** 2)

    def replica(x):
        optimizer.apply_gradients(jax.grad(loss_of)(p.value(), x))

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    found = hlo.collectives(step.lower(batch(strategy)).compile().as_text())
    large = [(one.kind, shape) for one in found for _, shape in one.arrays if np.prod(shape) > 2 * WIDTH]
    activations = "all-reduce", (ROWS // 4, WIDTH)
    assert sorted(set(large)) == [
        ("all-gather", (WIDTH, WIDTH)),
        activations,
        ("reduce-scatter", (WIDTH // 4, WIDTH)),
        ("reduce-scatter", (WIDTH, WIDTH // 4)),
    ]
    assert len(large) == 5  # two matrices, each gathered once and scattered once, and the sum of one product


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_in_a_loop_and_rows_of_a_table(checkpointed):
    layers, tokens = 3, 512

    def run(strategy):
        random = np.random.default_rng(0)
        shapes = {"table": (tokens, WIDTH), "up": (layers, WIDTH, 2 * WIDTH), "down": (layers, 2 * WIDTH, WIDTH)}
        with strategy.scope():
            p = rx.Variable({k: (random.normal(size=n) * 0.1).astype("f4") for k, n in shapes.items()}, name="p")
            optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), p, "mean")

        def layer(x, weights):
            return x + jax.nn.relu(x @ weights[0]) @ weights[1], None

        def loss_of(p, ids):
            body = jax.checkpoint(layer) if checkpointed else layer
            return jnp.mean(jax.lax.scan(body, p["table"][ids], (p["up"], p["down"]))[0] ** 2)

        def replica(ids):
            loss, gradients = jax.value_and_grad(loss_of)(p.value(), ids)
            optimizer.apply_gradients(gradients)
            return loss

        step = rx.function(lambda x: strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None))
        ids = per_replica(strategy, np.random.default_rng(1).integers(0, tokens, (2, 8), dtype=np.int32))
        text = step.lower(ids).compile().as_text()
        return [float(step(ids)) for _ in range(3)], p, hlo.collectives(text)

    rules = {"table": (None, "model"), "up": (None, None, "model"), "down": (None, "model")}
    losses, p, found = run(both(2, 2, sharding_rules=rules))
    expected_losses, expected, _ = run(mirrored(2))
    same((losses, p.numpy()), (expected_losses, expected.numpy()))
    assert {name: layout(x) for name, x in p.value().items()} == {
        "table": ("replica", "model"),
        "up": (None, "replica", "model"),
        "down": (None, "model", "replica"),
    }
    gathered = [shape for one in found if one.kind == "all-gather" for _, shape in one.arrays if np.prod(shape) > 4096]
    assert not gathered  # a layer's part of a replica has 4,096 elements


def test_a_dimension_is_split_and_divided_where_no_other_can_be():
    strategy = both(2, 2, sharding_rules={"v": ("model",), "odd": ("model",)})
    with strategy.scope():
        v = rx.Variable(np.arange(8192, dtype=np.float32), name="v")
        odd = rx.Variable(np.ones((130, 129), np.float32), name="odd")  # 65 rows for a device cannot be divided
    assert layout(v.value()) == (("replica", "model"),) and parts(v.value()) == {(2048,)}
    assert layout(odd.value()) == ("model",)

    def replica(x):
        total = ctx().all_reduce("SUM", v.value() * x)
        v.assign(v.value() + total)
        return jnp.sum(total)

    x = per_replica(strategy, [np.float32(1), np.float32(2)])
    result = rx.function(lambda x: strategy.run(replica, args=(x,)))(x)
    np.testing.assert_allclose(result.values[0], 3 * np.arange(8192.0).sum(), rtol=1e-6)
    np.testing.assert_allclose(v.numpy(), 4 * np.arange(8192.0))
    assert parts(v.value()) == {(2048,)}


@ways
def test_what_is_split_by_hand_is_divided_too(way):
    strategy = both(2, 2, sharding_rules=None, shard_variables=partitioners.MinSizePartitioner(4, max_shards=8))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    with strategy.scope():
        w = rx.Variable(strategy.split_to_devices(values, (None, "model")))
        later = rx.Variable(values)
    assert layout(w.value()) == ("replica", "model") and layout(later.value()) == ("replica",)
    strategy.split_to_devices(later, ("model",))
    assert layout(later.value()) == ("model", "replica")
    way(lambda: strategy.run(lambda: (w.assign(w + 1), later.assign(later * 2))))()
    np.testing.assert_array_equal(w.numpy(), values + 1)
    np.testing.assert_array_equal(later.numpy(), values * 2)
    assert parts(w.value()) == parts(later.value()) == {(4, 4)}
    strategy.replicate_to_devices(later)
    assert layout(later.value()) == ("replica",) and later.numpy()[1, 1] == 18
    [copy, _] = strategy.experimental_local_results(later)
    np.testing.assert_array_equal(copy.numpy(), values * 2)


def test_copies_that_may_differ_are_split_and_not_divided():
    strategy = both(2, 2)
    with strategy.scope():
        v = rx.Variable(np.ones((64, 128), np.float32), name="a/kernel", copies_may_differ=True)
    assert layout(v.value()) == (None, "model")


def test_checkpoints_are_restored_under_other_layouts(tmp_path):
    _, p, state = trained(both(2, 2))
    path = rx.train.Checkpoint(p=p, state=state).save(str(tmp_path / "a"))
    strategies = [both(2, 4), both(4, 2), both(2, 2, shard_variables=False), both(8, 1), mirrored(2)]
    for strategy in strategies:
        with strategy.scope():
            other = rx.Variable(jax.tree.map(np.zeros_like, start()), name="p")
            optimizer = rx.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)), other)
        before = [leaf.sharding for leaf in other._storage.read()]
        rx.train.Checkpoint(p=other, state=optimizer.state).restore(path)
        jax.tree.map(
            np.testing.assert_array_equal, (other.numpy(), optimizer.state.numpy()), (p.numpy(), state.numpy())
        )
        assert [leaf.sharding for leaf in other._storage.read()] == before
    back = rx.train.Checkpoint(p=other).save(str(tmp_path / "b"))
    rx.train.Checkpoint(p=p).restore(back)
    assert layout(p.value()["a"]["kernel"]) == ("replica", "model")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.b(nnx.relu(self.a(x)))


@pytest.mark.numbers
def test_an_nnx_model_and_its_optimizer():
    def run(strategy):
        with strategy.scope():
            model = Block(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        def replica(x):
            loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, ctx().all_reduce("MEAN", gradients))
            return loss

        step = rx.function(lambda x: strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None))
        return [float(step(batch(strategy))) for _ in range(3)], model, optimizer

    losses, model, optimizer = run(both(2, 2))
    expected_losses, expected, _ = run(mirrored(2))
    same(losses, expected_losses)
    same(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(expected)))
    for kernel in (model.b.kernel, optimizer.opt_state[0].mu["b"]["kernel"]):
        assert parts(kernel.get_value()) == {(WIDTH, WIDTH // 2)}


def test_a_keras_model_and_its_optimizer():
    def run(strategy):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(2 * WIDTH, "relu", name="a"), keras.layers.Dense(WIDTH, name="b")]
            model = keras.Sequential([keras.Input((WIDTH,)), *layers])
            model.compile(keras.optimizers.Adam(1e-3), "mse")
        x = np.random.default_rng(1).normal(size=(32, WIDTH)).astype("f4")
        return model.fit(x, x, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"], model

    losses, model = run(both(2, 2))
    expected_losses, expected = run(mirrored(2))
    same(losses, expected_losses)
    same(model.get_weights(), expected.get_weights())
    held = [
        v for v in [*model.variables, *model.optimizer.variables] if v.path.endswith(("b/kernel", "b_kernel_momentum"))
    ]
    assert [parts(v.value) for v in held] == [{(WIDTH, WIDTH // 2)}] * 2
