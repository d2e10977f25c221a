"""What variables hold: one copy for each replica's device, and never a second one at rest."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import replicax as rx

SIZE = 4 * 50_000  # bytes of each variable's array


def bytes_held(device):
    """The bytes of all live arrays on a device, buffers that several arrays share counted once."""
    gc.collect()
    buffers = {}
    for array in jax.live_arrays():
        if array.nbytes < SIZE:  # of the thousands that other tests have left
            continue
        for shard in array.addressable_shards:
            if shard.device == device and shard.data.nbytes >= SIZE:
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


@pytest.mark.parametrize("kind", ["mirrored", "on read"])
def test_one_copy_a_device(kind):
    strategy = rx.MirroredStrategy(["GPU:4", "GPU:5", "GPU:6"])
    on_read = {"synchronization": rx.VariableSynchronization.ON_READ, "aggregation": rx.VariableAggregation.SUM}
    before = [bytes_held(device) for device in strategy.extended._mesh.devices]
    with strategy.scope():
        v = rx.Variable(lambda: jnp.zeros(SIZE // 4), **(on_read if kind == "on read" else {}))

    def step():
        v.assign_add(v.value() + 1.0)

    compiled = rx.function(lambda: strategy.run(step))
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
        for device, was in zip(strategy.extended._mesh.devices, before):
            assert bytes_held(device) - was == SIZE, use


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
