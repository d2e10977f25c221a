"""A Flax NNX model under a strategy, with Optax, on 4 virtual devices.

    python examples/nnx.py

What is made under the scope holds variables of the strategy. The step is what it is without one, and sums gradients.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import replicax as rx

rx.config.set_virtual_devices({"CPU": 4})
strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
BATCH = 64


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
dataset = rx.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


@rx.function
def train_step(images, labels):
    def replica_step(images, labels):
        def loss_of(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            return rx.share_of_mean(losses)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        optimizer.update(model, gradients)
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)


for epoch in range(5):
    losses = [float(train_step(*batch)) for batch in batches]
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
model.eval()
right = np.mean(np.asarray(model(jnp.asarray(images[1536:])).argmax(axis=1)) == labels[1536:])
print(f"test accuracy {right:.3f}")
