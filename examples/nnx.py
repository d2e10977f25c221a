"""A Flax NNX model under a strategy, with Optax, on 4 virtual devices.

    python examples/nnx.py

The model's state is a pytree in one variable, which lives on every replica. In the replica function it is plain Flax.
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
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
dataset = rx.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)

graph, parameters_state, statistics_state = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
with strategy.scope():
    parameters = rx.Variable(parameters_state.to_pure_dict())
    statistics = rx.Variable(  # each replica's own, and their mean when they are read
        statistics_state.to_pure_dict(),
        synchronization=rx.VariableSynchronization.ON_READ,
        aggregation=rx.VariableAggregation.MEAN,
    )
    optimizer = rx.Optimizer(optax.adam(3e-3), parameters)


def model_of(parameters, statistics):
    nnx.replace_by_pure_dict(parameters_state, parameters)
    nnx.replace_by_pure_dict(statistics_state, statistics)
    return nnx.merge(graph, parameters_state, statistics_state)


@rx.function
def train_step(images, labels):
    def replica_step(images, labels):
        with rx.GradientTape() as tape:
            model = model_of(parameters.value(), statistics.value())
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            loss = losses.sum() / BATCH
        optimizer.apply_gradients(tape.gradient(loss, parameters))
        statistics.assign(nnx.state(model, nnx.Not(nnx.Param)).to_pure_dict())
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)


for epoch in range(5):
    losses = [float(train_step(*batch)) for batch in batches]
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
model = model_of(parameters.value(), statistics.value())
model.eval()
right = np.mean(np.asarray(model(jnp.asarray(images[1536:])).argmax(axis=1)) == labels[1536:])
print(f"test accuracy {right:.3f}")
