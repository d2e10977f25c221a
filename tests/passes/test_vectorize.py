"""The same arithmetic on many arrays, as one equation on a vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax._passes.vectorize import Values, pieces


@pytest.mark.parametrize("flags", [2, 1], ids=["a scalar for each array", "one scalar for all"])
def test_scalars_may_be_reshaped_arrays_of_one_element(flags):
    def updated(is_finite, new, old):
        return [jnp.where(is_finite[i % flags].reshape(()), new[i], old[i]) for i in range(2)]

    shapes = (2, 3), (4,)
    flag = [jnp.array([i == 0]) for i in range(flags)]
    new, old = ([jnp.full(shape, value) for shape in shapes] for value in (1.0, 0.0))
    jaxpr = jax.make_jaxpr(updated)(flag, new, old).jaxpr
    vectors = [piece for value in (1.0, 0.0) for piece in pieces(jnp.full(10, value), shapes)]
    values = Values(jaxpr, zip(jaxpr.invars, [*flag, *vectors]))
    _, (vector,) = values.arrays_and_vectors((), [jaxpr.outvars])
    wanted = np.concatenate([np.ravel(part) for part in updated(flag, new, old)])
    np.testing.assert_array_equal(vector, wanted)
