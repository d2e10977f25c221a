"""What variables hold: one copy for each replica's device, and never a second one at rest."""

from __future__ import annotations

import gc
import weakref

import jax.numpy as jnp
import pytest
from live_memory import memory_watched

import replicax as rx

SIZE = 4 * 50_000  # bytes of each variable's array


@pytest.mark.parametrize("kind", ["mirrored", "on read"])
def test_one_copy_a_device(kind):
    strategy = rx.MirroredStrategy(["GPU:4", "GPU:5", "GPU:6"])
    on_read = {"synchronization": rx.VariableSynchronization.ON_READ, "aggregation": rx.VariableAggregation.SUM}
    devices = strategy.extended._mesh.devices

    def step():
        v.assign_add(v.value() + 1.0)

    compiled = rx.function(lambda: strategy.run(step))
    with memory_watched(SIZE) as check_more_held:
        with strategy.scope():
            v = rx.Variable(lambda: jnp.zeros(SIZE // 4), **(on_read if kind == "on read" else {}))
        uses = {
            "making it": lambda: None,
            "a read": lambda: (v.numpy(), None)[1],
            "reads of the components": lambda: [c.numpy() for c in v.values] and None,
            "an eager step": lambda: strategy.run(step),
            "a compiled step": compiled,
            "another one": compiled,
            "a read after it": lambda: strategy.run(lambda: (v.value(), None)[1]),
            "an assignment": lambda: (v.assign(jnp.ones(SIZE // 4)), None)[1],
        }
        for use, call in uses.items():
            call()
            check_more_held({(device, "device"): SIZE for device in devices}, use)


def test_variables_of_compiled_functions_are_freed():
    """JAX keeps what it traced of jitted functions such as `jnp.clip`, but not the variables that were read around."""
    strategy, gone = rx.OneDeviceStrategy("GPU:0"), []
    for _ in range(2):
        with strategy.scope():
            v = rx.Variable(jnp.zeros(10))
        step = rx.function(lambda x, v=v: v.assign_add(jnp.clip(x, 0, 1)))
        step(jnp.ones(10))
        gone.append(weakref.ref(v))
    del v, step
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
