"""Plans of models that are split over the devices of each replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from strategies import per_replica

import replicax as rx

ROWS = 4


def step_of(strategy, width, hidden):
    """A step of two matrices, split as a transformer's are, and a batch."""
    with strategy.scope():
        kernels = {"up": (width, hidden), "down": (hidden, width)}
        model = rx.Variable(lambda: {name: jnp.ones(shape) for name, shape in kernels.items()}, name="model")
        optimizer = rx.Optimizer(optax.adam(1e-3), model, "MEAN")

    @rx.function
    def step(x):
        def replica(x):
            def loss(p):
                return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

            value, gradients = jax.value_and_grad(loss)(model.value())
            optimizer.apply_gradients(gradients)
            return value

        return strategy.run(replica, args=(x,))

    return step, per_replica(strategy, [np.ones((ROWS, width), np.float32)] * strategy.num_replicas_in_sync)


def strategy_of(size):
    names = [f"CPU:{i}" for i in range(4)]
    rules = {"up": (None, "model"), "down": ("model",)}
    return rx.MirroredStrategy(names, devices_per_replica={"model": size}, sharding_rules=rules)


def test_a_plan_has_the_parts_that_a_device_holds_and_the_communication_between_them():
    step, x = step_of(strategy_of(2), 32, 64)
    plan = rx.plan(step, x, topology=8)
    whole = 2 * 4 * 32 * 64
    on_eight = plan[8]
    assert on_eight.replicas == 4
    assert on_eight.memory.variables == whole // 2
    assert on_eight.memory.state == whole + 4  # Adam's two moments, in halves, and its count
    # The result of the second product forward, over a replica's two devices; the gradients, over the four replicas.
    assert sorted((one.kind, one.devices, one.bytes) for one in on_eight.collectives) == [
        ("all-reduce", 2, ROWS * 32 * 4),
        ("all-reduce", 4, whole // 2),
    ]
