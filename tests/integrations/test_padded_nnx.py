"""A step of Flax NNX on padded batches has the numbers that it has without padding, in one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import SUM, mirrored

import replicax as rx
from replicax._base import foreign_state

foreign_state.join()

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(30, 4)).astype(np.float32)
Y = RANDOM.integers(0, 3, size=30).astype(np.int32)


class Model(nnx.Module):
    def __init__(self, axis_name):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, axis_name=axis_name, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def trained(axis_name, rows, pad):
    """Losses, metrics and the model's state after two epochs, and how often the step was traced."""
    strategy = mirrored(4)
    with strategy.scope():
        model = Model(axis_name)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_of(model, x, y):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum() / 16, logits

    def replica(x, y):
        (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, x, y)
        optimizer.update(model, rx.get_replica_context().all_reduce(SUM, gradients))
        metrics.update(logits=logits, labels=y, loss=loss * 16 / jnp.maximum(x.shape[0], 1))
        return loss

    @rx.function
    def step(batch):
        return strategy.reduce(SUM, strategy.run(replica, args=batch), axis=None)

    dataset = rx.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(16)
    batches = strategy.experimental_distribute_dataset(dataset, rx.InputOptions(pad_last_batch=pad))
    losses = [step(batch) for _ in range(2) for batch in batches]
    state = jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return [*losses, *metrics.compute().values(), *state], step.experimental_get_tracing_count()


def test_a_replica_without_rows_keeps_its_statistics():
    """With 18 rows the last batch, of 2, leaves two replicas without any."""
    strategy = mirrored(4)
    with strategy.scope():
        norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
    step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(norm(x)), args=(x,)))
    dataset = rx.data.Dataset.from_tensor_slices(X[:18]).batch(16)
    for batch in strategy.experimental_distribute_dataset(dataset, rx.InputOptions(pad_last_batch=True)):
        step(batch)
    of_full = [0.5 * X[start : start + 4].mean(0) for start in range(0, 16, 4)]
    expected = [0.5 * of_full[0] + 0.5 * X[16], 0.5 * of_full[1] + 0.5 * X[17], of_full[2], of_full[3]]
    np.testing.assert_allclose(norm.mean[...], np.mean(expected, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "axis_name, rows",
    [*(pytest.param(*case, marks=pytest.mark.numbers) for case in ((None, 30), ("replica", 30))), ("replica", 21)],
)
def test_an_epoch_is_one_program_with_the_numbers_without_padding(axis_name, rows):
    """With 21 rows the last batch, of 5, leaves the last replica without any."""
    expected, traces = trained(axis_name, rows, pad=False)
    found, traces_padded = trained(axis_name, rows, pad=True)
    assert (traces, traces_padded) == (2, 1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
