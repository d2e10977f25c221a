import jax
import jax.numpy as jnp
import optax
from task import BATCH, CLASSES, EPOCHS, FEATURES, LEARNING_RATE, ROWS, WIDTH, data, record

import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()  # all devices of this process, or of all processes of a job


def initial_parameters():
    sizes = [(FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    initializer = jax.nn.initializers.he_normal()
    return [(initializer(key, size), jnp.zeros(size[1])) for key, size in zip(keys, sizes)]


def loss_of(parameters, x, y):
    *hidden, last = parameters
    for kernel, bias in hidden:
        x = jax.nn.relu(x @ kernel + bias)
    logits = x @ last[0] + last[1]
    return rx.share_of_mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


with strategy.scope():
    parameters = rx.Variable(initial_parameters)
    optimizer = rx.Optimizer(optax.adam(LEARNING_RATE), parameters)


@rx.function
def train_step(x, y):
    def replica_step(x, y):
        loss, gradients = jax.value_and_grad(loss_of)(parameters.value(), x, y)
        optimizer.apply_gradients(gradients)
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)


dataset = rx.data.Dataset.from_tensor_slices(data()).shuffle(ROWS).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)
for _ in range(EPOCHS):
    for x, y in batches:
        loss = train_step(x, y)
        if strategy.extended.should_checkpoint:
            record(loss)
