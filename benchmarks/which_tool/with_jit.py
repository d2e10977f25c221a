import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from task import BATCH, CLASSES, EPOCHS, FEATURES, LEARNING_RATE, ROWS, WIDTH, data, record

mesh = jax.make_mesh((jax.device_count(),), ("batch",))
replicated = NamedSharding(mesh, PartitionSpec())
divided = NamedSharding(mesh, PartitionSpec("batch"))
rule = optax.adam(LEARNING_RATE)


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
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


parameters = jax.device_put(initial_parameters(), replicated)
state = jax.device_put(rule.init(parameters), replicated)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(parameters, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)  # of the whole batch
    updates, state = rule.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state, loss


x, y = data()
rng = np.random.default_rng(0)
for _ in range(EPOCHS):
    order = rng.permutation(ROWS)
    for rows in order.reshape(-1, BATCH):
        batch = jax.device_put((x[rows], y[rows]), divided)
        parameters, state, loss = train_step(parameters, state, *batch)
        record(loss)
