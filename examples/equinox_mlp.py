"""An Equinox model under a strategy, with Optax, on 4 virtual devices.

    python examples/equinox_mlp.py

A variable of the strategy holds the arrays of the model. What remains, functions and numbers, is the same everywhere.
"""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

rx.config.set_virtual_devices({"CPU": 4})
strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
BATCH = 64

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
dataset = rx.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)

model = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=jax.random.key(0))
arrays, static = eqx.partition(model, eqx.is_inexact_array)

with strategy.scope():
    params = rx.Variable(arrays)
    optimizer = rx.Optimizer(optax.adam(3e-3), params)


def loss_of(params, images, labels):
    logits = jax.vmap(eqx.combine(params, static))(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum() / BATCH


@rx.function
def train_step(images, labels):
    def replica_step(images, labels):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(params.value(), images, labels)
        optimizer.apply_gradients(gradients)  # sums the gradients
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)


for epoch in range(5):
    losses = [float(train_step(*batch)) for batch in batches]
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
trained = eqx.combine(params.value(), static)
right = np.mean(np.asarray(jax.vmap(trained)(images[1536:]).argmax(axis=1)) == labels[1536:])
print(f"test accuracy {right:.3f}")
