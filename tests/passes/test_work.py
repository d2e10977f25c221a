"""How much a program computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from replicax._passes.work import multiplications


def of(function, *shapes) -> int:
    return multiplications(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)))


def test_products_and_convolutions_count_their_multiplications():
    assert of(jnp.matmul, (5, 3), (3, 7)) == 5 * 3 * 7
    assert of(jnp.matmul, (2, 5, 3), (2, 3, 7)) == 2 * 5 * 3 * 7
    assert of(jax.jit(lambda x, y: jnp.sin(x @ y) * 2), (5, 3), (3, 7)) == 5 * 3 * 7
    assert of(lambda x, y: x * y, (5, 3), (5, 3)) == 0

    def convolved(image, kernel, groups=1):
        order = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=order, feature_group_count=groups
        )

    assert of(convolved, (2, 8, 8, 6), (3, 3, 6, 4)) == 2 * 8 * 8 * 4 * 3 * 3 * 6
    assert of(lambda *x: convolved(*x, groups=2), (2, 8, 8, 6), (3, 3, 3, 4)) == 2 * 8 * 8 * 4 * 3 * 3 * 3


def test_symbolic_shapes_do_not_count():
    (rows,) = export.symbolic_shape("rows")
    assert of(lambda x, y, z: (x @ y, y @ z), (rows, 3), (3, 7), (7, 2)) == 3 * 7 * 2
