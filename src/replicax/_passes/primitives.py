"""Sets of JAX's primitives, by their names: each fact about primitives that a pass relies on stands here, once.

`tests/passes/test_primitives.py` compares them with the installed JAX: a collective of a new JAX that is not listed
fails it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from replicax._collectives.all_reduce import all_reduce_p

# All replicas have to come to these, or those that come wait for ever. JAX 0.10 and 0.12 have different ones.
COLLECTIVES = frozenset(
    {all_reduce_p.name, "psum", "psum_invariant", "pmax", "pmin"}
    | {"ppermute", "psend", "precv", "pbroadcast", "pbroadcast_dynamic"}
    | {"all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ragged_all_to_all", "reduce_scatter"}
    | {"unreduced_psum", "unreduced_pmax", "unreduced_pmin", "unreduced_reduce_scatter"}
    | {"psum_start", "psum_invariant_start", "unreduced_psum_start", "all_gather_start", "all_gather_reduced_start"}
    | {"reduce_scatter_start", "unreduced_reduce_scatter_start", "all_to_all_start", "ppermute_start"}
    | {"pbroadcast_start", "psum_done", "all_gather_done", "reduce_scatter_done", "all_to_all_done", "ppermute_done"}
    | {"pbroadcast_done"}
)

# Collectives after which all replicas have the same, unless they are of groups of replicas.
SAME_EVERYWHERE = frozenset(
    {all_reduce_p.name, "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)

# Primitives of `jax.lax.parallel` that name an axis and yet communicate nothing.
LOCAL_OF_AXES = frozenset({"axis_index", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"})

# Calls that compute their jaxpr and mean nothing else, with the name of the parameter that holds it.
CALLS: Mapping[str, str] = types.MappingProxyType({"jit": "jaxpr", "closed_call": "call_jaxpr", "call": "call_jaxpr"})
# The same, but derivatives recompute what is inside, in place of keeping it.
CHECKPOINTS: Mapping[str, str] = types.MappingProxyType({"remat2": "jaxpr"})
# The same, but derivatives are the user's.
CUSTOM_DERIVATIVES: Mapping[str, str] = types.MappingProxyType(
    {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
)
# All calls, where nothing differentiates any more.
IN_CALLS: Mapping[str, str] = types.MappingProxyType({**CALLS, **CHECKPOINTS, **CUSTOM_DERIVATIVES})

# Each element of the result is computed from the elements of the operands at the same place, or from a scalar.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type
    copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log
    log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())

# The result has the elements of the operand in the same order, if it has as many (and `dimensions`, by which `reshape`
# may transpose before, is None).
SAME_ELEMENTS = frozenset({"reshape", "squeeze", "broadcast_in_dim", "sharding_constraint", "reshard", "copy"})

# All elements of an array, or those along some of its axes, become one.
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})

# The result is the first operand with some elements changed: the others say which, and to what.
SCATTERS = frozenset(
    {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "dynamic_update_slice"}
)
