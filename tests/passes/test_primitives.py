"""The table of primitives agrees with the JAX that is installed."""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
import warnings

import jax
import jax._src
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax import parallel

from replicax._collectives.all_reduce import all_reduce_p
from replicax._passes import primitives

OLDEST, NEWEST = (0, 10, 2), (0, 12)
# What only one of the two ends of the supported versions has.
ONLY_OLDEST = {
    "closed_call", "call", "vary_unreduced_cast_p", "psum_start", "unreduced_psum_start",
    "unreduced_reduce_scatter_start", "pbroadcast_start", "pbroadcast_done",
}  # fmt: skip
ONLY_NEWEST = {
    "vary_unreduced_cast", "pbroadcast_dynamic", "unreduced_pmax", "unreduced_pmin", "log2", "one_minus_square",
}  # fmt: skip
VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])
TABLE = {
    name
    for value in vars(primitives).values()
    if isinstance(value, (frozenset, primitives.types.MappingProxyType))
    for name in value
}


@functools.cache
def installed() -> dict[str, jex.Primitive]:
    """All primitives of the installed JAX, by name."""
    found: dict[str, jex.Primitive] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
            if module.name.removeprefix("jax._src.").startswith(("lax", "custom_", "pjit", "core", "ad_", "interp")):
                loaded = vars(importlib.import_module(module.name))
                found |= {v.name: v for v in loaded.values() if isinstance(v, jex.Primitive)}
    own = {all_reduce_p.name: all_reduce_p}
    return {**found, **own, "remat2": jax.make_jaxpr(jax.checkpoint(jnp.sin))(0.0).eqns[0].primitive}


def test_every_name_is_a_primitive_of_the_oldest_or_the_newest_jax():
    missing = TABLE - set(installed())
    if VERSION == OLDEST:
        assert missing == ONLY_NEWEST
    elif VERSION[:2] >= NEWEST:
        assert missing <= ONLY_OLDEST
    else:
        assert missing <= ONLY_OLDEST | ONLY_NEWEST


def test_every_collective_of_jax_is_known():
    """A new JAX with a new one fails here: does it communicate, and is its result the same on all replicas?"""
    of_axes = {value.name for value in vars(parallel).values() if isinstance(value, jex.Primitive)}
    assert of_axes <= primitives.COLLECTIVES | primitives.LOCAL_OF_AXES
    assert not primitives.COLLECTIVES & primitives.LOCAL_OF_AXES
    assert primitives.SAME_EVERYWHERE < primitives.COLLECTIVES


@jax.custom_jvp
def _own_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def _own_vjp(x):
    return jnp.sin(x)


_own_jvp.defjvp(lambda x, t: (jnp.sin(*x), t[0]))
_own_vjp.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (ct,))


@pytest.mark.parametrize("call", [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), _own_jvp, _own_vjp])
def test_the_table_names_the_jaxpr_parameter_of_call_primitives(call):
    calls = {**primitives.CALLS, **primitives.CHECKPOINTS, **primitives.CUSTOM_DERIVATIVES}
    (eqn,) = jax.make_jaxpr(call)(0.5).eqns
    inner = eqn.params[calls[eqn.primitive.name]]
    assert [one.primitive.name for one in inner.eqns] == ["sin"]


# Parameters that some primitives need, tried one after the other.
_PARAMS = (
    {},
    {"accuracy": None},
    {"y": 2},
    {"new_dtype": np.dtype(np.float16), "weak_type": False, "sharding": None},
    {"exponent_bits": 8, "mantissa_bits": 23},
    {"rounding_method": jax.lax.RoundingMethod.AWAY_FROM_ZERO},
    {"input_dtype": np.dtype(np.float32)},
)


@pytest.mark.parametrize("name", sorted(primitives.ELEMENTWISE - {"copy"}))
def test_elementwise_primitives_compute_each_element_by_itself(name):
    """A vector through each primitive is the same as its elements one after the other."""
    primitive = installed().get(name)
    if primitive is None:
        pytest.skip("not in this JAX")
    operands, params = _taken_by(primitive)
    together = primitive.bind(*operands, **params)
    alone = [primitive.bind(*(x[i : i + 1] for x in operands), **params) for i in range(4)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-6)


def _taken_by(primitive):
    """Operands and parameters that a primitive takes."""
    for dtype, count, params in itertools.product((jnp.float32, jnp.int32, jnp.complex64), (1, 2, 3), _PARAMS):
        operands = [jnp.array([1.5, -2.0, 0.5, 3.0]).astype(dtype)] * count
        try:
            primitive.bind(*operands, **params)
        except Exception:
            continue
        return operands, params
    if primitive.name == "select_n":
        return [jnp.array([True, False, True, False]), *[jnp.arange(4.0)] * 2], {}
    raise AssertionError(f"no operands found for {primitive}")
