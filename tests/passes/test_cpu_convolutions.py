"""Convolutions of dilated inputs have faster forms on CPU devices, and give the same."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import ctx, mirrored

import replicax as rx
from replicax._base.jaxprs import equations
from replicax._passes import pipeline
from replicax._passes.facts import Facts, Stage

NUMBERS = ("NHWC", "HWIO", "NHWC")


def transposed(x, kernel, strides, padding):
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, lhs_dilation=strides, dimension_numbers=NUMBERS)


def gradient(x, kernel, strides, padding):
    weights = jnp.cos(jnp.arange(transposed(x, kernel, strides, padding).size, dtype=np.float32))
    return jax.grad(lambda k: jnp.vdot(transposed(x, k, strides, padding), weights))(kernel)


def dilations(jaxpr):
    return [eqn.params["lhs_dilation"] for eqn in equations(jaxpr) if "conv" in eqn.primitive.name]


@pytest.mark.parametrize(
    ("kernel", "strides", "padding"),
    [
        ((5, 5), (2, 2), ((3, 2), (3, 2))),
        ((3, 3), (2, 2), ((2, 1), (1, 2))),
        ((4, 3), (3, 2), ((0, 0), (0, 1))),
        ((3, 3), (2, 2), ((5, 5), (4, 6))),
        ((2, 4), (1, 2), ((1, 0), (2, 2))),
        ((3, 3), (2, 2), ((-1, 2), (1, -1))),
    ],
)
def test_gradients_are_the_same(kernel, strides, padding):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 6, 7, 4)).astype(np.float32)
    k = rng.normal(size=(*kernel, 4, 5)).astype(np.float32)

    def function(x, k):
        return jax.jit(gradient, static_argnums=(2, 3))(x, k, strides, padding)

    jaxpr = jax.make_jaxpr(function)(x, k)
    other = pipeline.rewrite(jaxpr, Facts(Stage.FUNCTION, "cpu", optimizes=True))
    assert sum(max(d) > 1 for d in dilations(other)) < sum(max(d) > 1 for d in dilations(jaxpr))
    (found,) = jax.jit(jax.extend.core.jaxpr_as_fun(other))(x, k)
    np.testing.assert_allclose(found, function(x, k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding"),
    [
        ((5, 5), (2, 2), ((3, 2), (3, 2))),
        ((3, 3), (2, 2), ((2, 1), (1, 2))),
        ((4, 3), (3, 2), ((0, 0), (0, 1))),
        ((2, 4), (1, 2), ((1, 0), (2, 2))),
        ((3, 3), (2, 2), ((-1, 2), (1, -1))),
        ((1, 1), (2, 3), ((0, 1), (0, 0))),  # most phases are zeros
        ((2, 2), (3, 3), ((4, 7), (6, 5))),
        ((3, 3), (2, 2), ((-8, 0), (0, 9))),
    ],
)
@pytest.mark.parametrize("numbers", [NUMBERS, ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "CHWN")])
def test_convolutions_without_the_zeros_are_the_same(kernel, dilation, padding, numbers):
    def arrayed(spec, **sizes):
        return np.random.default_rng(0).normal(size=[sizes[name] for name in spec]).astype(np.float32)

    x = arrayed(numbers[0], N=3, H=6, W=7, C=4)
    k = arrayed(numbers[1], H=kernel[0], W=kernel[1], I=4, O=8)
    function = jax.jit(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), padding, dilation, dimension_numbers=numbers)
    )
    jaxpr = jax.make_jaxpr(function)(x, k)
    other = pipeline.rewrite(jaxpr, Facts(Stage.FUNCTION, "cpu", optimizes=True))
    assert max(dilations(jaxpr)) == dilation and max(dilations(other)) == (1, 1)
    (found,) = jax.jit(jax.extend.core.jaxpr_as_fun(other))(x, k)
    np.testing.assert_allclose(found, function(x, k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("images", "parts"), [(32, 4), (24, 3), (8, 2), (26, 1), (7, 1)])
@pytest.mark.parametrize("numbers", [NUMBERS, ("NCHW", "OIHW", "NCHW")])
@pytest.mark.parametrize(("strides", "padding"), [((1, 1), "SAME"), ((2, 1), "VALID")])
def test_gradients_of_kernels_are_sums_of_parts(images, parts, numbers, strides, padding):
    x = np.random.default_rng(0).normal(size=(images, 33, 34, 2)).astype(np.float32)
    k = np.random.default_rng(1).normal(size=(3, 2, 2, 8)).astype(np.float32)
    x = x if numbers is NUMBERS else x.transpose(0, 3, 1, 2)
    k = k if numbers is NUMBERS else k.transpose(3, 2, 0, 1)

    def total(x, k):
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=numbers)))

    function = jax.jit(jax.grad(total, 1))
    jaxpr = jax.make_jaxpr(function)(x, k)
    other = pipeline.rewrite(jaxpr, Facts(Stage.FUNCTION, "cpu", optimizes=True))
    assert (other is jaxpr) == (parts == 1)
    lengths = [eqn.params["length"] for eqn in equations(other) if eqn.primitive.name == "scan"]
    assert lengths == ([parts] if parts > 1 else [])
    (found,) = jax.jit(jax.extend.core.jaxpr_as_fun(other))(x, k)
    np.testing.assert_allclose(found, function(x, k), rtol=1e-4, atol=1e-3)


def test_other_convolutions_and_programs_stay_as_they_are():
    x, k = np.ones((1, 6, 6, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    for jaxpr in (
        jax.make_jaxpr(lambda x, k: transposed(x, k, (2, 2), ((3, 2), (3, 2))))(x, k),  # of few features
        jax.make_jaxpr(lambda x, k: gradient(x, k, (1, 1), "SAME"))(x, k),
        jax.make_jaxpr(lambda x: x + 1)(x),
        # A kernel that covers the images is no gradient, and its features are no images.
        jax.make_jaxpr(lambda x, k: transposed(x, k, (1, 1), "VALID"))(np.ones((16, 4, 4, 64)), np.ones((4, 4, 64, 8))),
    ):
        assert pipeline.rewrite(jaxpr, Facts(Stage.FUNCTION, "cpu", optimizes=True)) is jaxpr


def test_what_is_empty_or_not_known_stays_as_it_is():
    def gradients(x, k):
        return jax.grad(lambda x, k: jnp.sum(jnp.sin(lax.conv_general_dilated(x, k, (1, 1), "VALID"))), (0, 1))(x, k)

    def matrices(x, k):
        return lax.conv_general_dilated(x, k, (), ())

    kernel = jax.ShapeDtypeStruct((8, 8, 3, 3), np.float32)
    batch, height = jax.export.symbolic_shape("b, h", constraints=("h >= 9",))
    for function, x, k in (
        (gradients, jax.ShapeDtypeStruct((batch, 8, height, 16), np.float32), kernel),
        (gradients, jax.ShapeDtypeStruct((0, 8, 16, 16), np.float32), kernel),
        (matrices, jax.ShapeDtypeStruct((4, 8), np.float32), jax.ShapeDtypeStruct((8, 8), np.float32)),
    ):
        jaxpr = jax.make_jaxpr(function)(x, k)
        assert pipeline.rewrite(jaxpr, Facts(Stage.FUNCTION, "cpu", optimizes=True)) is jaxpr


@pytest.mark.filterwarnings("ignore:.* were not distributed")
@pytest.mark.parametrize("replicas", [0, 2])
def test_functions_and_replicas_compute_them_in_that_form(replicas):
    x = np.random.default_rng(1).normal(size=(2, 5, 5, 3)).astype(np.float32)
    k = np.random.default_rng(2).normal(size=(3, 3, 3, 4)).astype(np.float32)
    strategy = mirrored(replicas) if replicas else None

    def replica(x):
        found = gradient(x, k, (2, 2), ((2, 1), (2, 1)))
        return ctx().all_reduce("sum", found) / replicas if replicas else found

    def step_of():
        if strategy is None:
            return rx.function(replica)
        return rx.function(lambda x: strategy.run(replica, args=(x,)))

    def found_with(optimize):
        rx.config.optimize_programs(optimize)
        step = step_of()
        found = step(jnp.asarray(x))
        found = found if strategy is None else strategy.experimental_local_results(found)[0]
        return found, step.lower(jnp.asarray(x)).as_text().count("lhs_dilate = [2, 2]")

    try:
        on, dilated_on = found_with(True)
        off, dilated_off = found_with(False)
    finally:
        rx.config.optimize_programs(True)
    np.testing.assert_allclose(on, off, rtol=1e-4, atol=1e-4)
    assert dilated_on < dilated_off
