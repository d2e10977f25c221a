"""Models of Keras and Flax NNX that rules split over the devices of a replica: layouts, numbers and communication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import per_replica

import replicax as rx
from replicax._benchmark import hlo

WIDTH, HEADS, LENGTH, ROWS = 16, 4, 4, 4

# A transformer's block as Megatron-LM splits it: by heads, and by the columns of the first and the rows of the second
# matrix. The first pattern that is found in a path counts.
RULES = {
    "(query|key|value)/kernel": (None, "model"),  # [width, heads, width of a head]
    "(query|key|value)/bias": ("model",),
    "attention.*out.*/kernel": ("model",),
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model",),
}


def make(size: int, rules: Any = None) -> rx.MirroredStrategy:
    """A strategy of two replicas with so many devices each."""
    names = [f"GPU:{i}" for i in range(2 * size)]
    rules = (RULES if rules is None else rules) if size > 1 else None
    return rx.MirroredStrategy(names, devices_per_replica={"model": size}, sharding_rules=rules)


def batch(strategy: rx.Strategy) -> Any:
    x = np.random.default_rng(1).normal(size=(2, ROWS, LENGTH, WIDTH)).astype(np.float32)
    return per_replica(strategy, x)


def collectives(function: Any, *args: Any) -> list[tuple[str, int]]:
    found = hlo.collectives(function.lower(*args).compile().as_text())
    return [(one.kind, len(one.arrays)) for one in found]


def layout(array: jax.Array) -> tuple[Any, ...]:
    return tuple(getattr(array.sharding, "spec", ()))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def nnx_model(strategy: rx.Strategy) -> tuple[Stack, nnx.Optimizer]:
    with strategy.scope():
        model = Stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def nnx_step(strategy: rx.Strategy, model: Stack, optimizer: nnx.Optimizer) -> Any:
    def replica(x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, rx.get_replica_context().all_reduce("MEAN", gradients))
        return loss

    return rx.function(lambda x: strategy.run(replica, args=(x,)))


def nnx_trained(size: int) -> tuple[list[list[float]], Stack, nnx.Optimizer]:
    strategy = make(size)
    model, optimizer = nnx_model(strategy)
    step, x = nnx_step(strategy, model, optimizer), batch(strategy)
    return [[float(part) for part in step(x).values] for _ in range(2)], model, optimizer


@pytest.mark.numbers
@pytest.mark.parametrize("size", [2, 4])
def test_an_nnx_model_trains_as_on_one_device_a_replica(size):
    losses, model, optimizer = nnx_trained(size)
    expected_losses, expected, _ = nnx_trained(1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for mine, theirs in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(expected))):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    attention = model.blocks[1].attention
    kernels = attention.query.kernel, attention.out.kernel, model.blocks[0].down.kernel
    assert [layout(kernel.get_value()) for kernel in kernels] == [(None, "model"), ("model",), ("model",)]
    assert {shard.data.size * size for shard in kernels[0].get_value().addressable_shards} == {WIDTH * WIDTH}
    trace = optimizer.opt_state[0].trace["blocks"][1]
    assert layout(trace["attention"]["query"]["kernel"].get_value()) == (None, "model")
    assert layout(trace["second"]["scale"].get_value()) == ()


def test_an_nnx_model_has_one_all_reduce_for_each_half_of_a_block():
    strategy = make(2)
    model, _ = nnx_model(strategy)
    forward = rx.function(lambda x: strategy.run(lambda x: model(x), args=(x,)))
    assert collectives(forward, batch(strategy)) == [("all-reduce", 1)] * 4


def test_nnx_variables_have_the_paths_of_the_whole_model():
    """Also where its parts are made before it."""
    strategy = make(2, {"blocks/0/up/kernel": (None, "model"), "^up/kernel": ("model",)})

    class Whole(nnx.Module):
        def __init__(self, blocks):
            self.blocks = nnx.List(blocks)

    with strategy.scope():
        model = Whole([Block(nnx.Rngs(0)), Block(nnx.Rngs(1))])
    x = jnp.ones((1, LENGTH, WIDTH))
    strategy.run(lambda: model.blocks[1](model.blocks[0](x)))
    assert [layout(block.up.kernel.get_value()) for block in model.blocks] == [(None, "model"), ()]


def test_rules_that_do_not_fit_an_nnx_model():
    def built(rules):
        strategy = make(2, rules)
        with strategy.scope():
            model = Block(nnx.Rngs(0))
        strategy.run(lambda: model(jnp.ones((1, LENGTH, WIDTH))))

    with pytest.raises(ValueError, match=r"the variable 'up/bias' .* 2 entries, .* for the shape \(64,\)"):
        built({"up": (None, "model")})
    with pytest.raises(ValueError, match="count for no variable: 'mlp/up'. The variables .* are: .*attention/key/bias"):
        built({"mlp/up": ("model",), "": ()})


def keras_model(strategy: rx.Strategy) -> keras.Model:
    layers = keras.layers
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        x = inputs = keras.Input((LENGTH, WIDTH))
        for i in range(2):
            y = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{i}")(y, y)
            y = layers.LayerNormalization()(x)
            y = layers.Dense(4 * WIDTH, activation="gelu", name=f"block_{i}_up")(y)
            x = x + layers.Dense(WIDTH, name=f"block_{i}_down")(y)
        model = keras.Model(inputs, x)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def keras_trained(size: int) -> tuple[list[float], keras.Model]:
    strategy = make(size)
    model = keras_model(strategy)
    x = np.random.default_rng(1).normal(size=(16, LENGTH, WIDTH)).astype(np.float32)
    history = model.fit(x, 0 * x, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model


@pytest.mark.numbers
def test_a_keras_model_trains_as_on_one_device_a_replica():
    losses, model = keras_trained(2)
    expected_losses, expected = keras_trained(1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for mine, theirs in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    layouts = {variable.path: layout(variable.value) for variable in [*model.variables, *model.optimizer.variables]}
    split = {path for path, spec in layouts.items() if "model" in spec}
    attention = [f"{of}/{kind}" for of in ("query", "key", "value") for kind in ("kernel", "bias")]
    names = [f"attention_{i}/{name}" for i in range(2) for name in [*attention, "attention_output/kernel"]]
    names += [f"block_{i}_{name}" for i in range(2) for name in ("up/kernel", "up/bias", "down/kernel")]
    assert split == {*names, *(f"sgd/{name.replace('/', '_')}_momentum" for name in names)}


def test_a_keras_model_has_one_all_reduce_for_each_half_of_a_block():
    strategy = make(2)
    model = keras_model(strategy)
    forward = rx.function(lambda x: strategy.run(lambda x: model(x), args=(x,)))
    assert collectives(forward, batch(strategy)) == [("all-reduce", 1)] * 4


@pytest.mark.numbers
def test_keras_models_are_saved_whole(tmp_path):
    _, model = keras_trained(2)
    model.save(tmp_path / "model.keras")
    with make(4).scope():
        other = keras.models.load_model(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert layout(other.get_layer("block_0_up").kernel.value) == (None, "model")
    for loaded in (other, plain):
        for mine, theirs in zip(loaded.get_weights(), model.get_weights()):
            np.testing.assert_array_equal(mine, theirs)


def test_single_variables_of_a_model_are_split_by_hand():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], devices_per_replica=2)
    with strategy.scope():
        block, dense = Block(nnx.Rngs(0)), keras.layers.Dense(4)
        dense.build((None, 8))
    for kernel in (block.up.kernel, dense.kernel):
        assert strategy.split_to_devices(kernel, (None, "model")) is kernel
    assert layout(block.up.kernel.get_value()) == layout(dense.kernel.value) == (None, "model")
