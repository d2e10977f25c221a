"""Steps that fail while they run: their error comes out of them alone, and what they assign keeps its value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ways import MEAN, SUM, ctx, mirrored

import replicax as rx


def out_of_memory(x):
    """A zero of the dtype of `x`, for which the device needs more memory than there is."""
    many = x + jnp.arange(1 << 46, dtype=jnp.int8).astype(x.dtype)
    return 0 * jnp.sort(many)[7]


def test_the_error_of_a_failed_step_does_not_come_out_of_later_calls():
    strategy = mirrored(2)

    @rx.function
    def fails(x):
        return strategy.run(lambda x: ctx().all_reduce(SUM, x + out_of_memory(x)), args=(x,))

    @rx.function
    def total(x):
        return strategy.reduce(MEAN, strategy.run(lambda x: ctx().all_reduce(SUM, x + 1), args=(x,)), axis=None)

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        np.asarray(fails(jnp.float32(1)).values[0])
    # More calls than are in flight at once, after which older ones are waited for.
    assert [float(total(jnp.float32(k))) for k in range(40)] == [2.0 * k + 2 for k in range(40)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        np.asarray(fails(jnp.float32(1)).values[0])
    for _ in range(40):  # eager ones
        assert [float(x) for x in strategy.run(lambda: ctx().all_reduce(SUM, jnp.float32(3))).values] == [6.0, 6.0]
