"""How JAX's primitives treat rows: each by itself, or combined, where those that do not count are masked.

A rule takes `(eqn, arrays, rows, out, masked)`: the operands, the axes of rows of these and of the results, and
`masked(array, rows, axes, fill)`. It checks that no row that counts depends on one that does not, and computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from replicax._base import jax_internals
from replicax._base.jaxprs import kind_of
from replicax._passes.primitives import ELEMENTWISE
from replicax._passes.row_dims import NotExact, Rows

Masked = Callable[[jax.Array, Rows, Sequence[int], object], jax.Array]
_Rule = Callable[[jex.JaxprEqn, list[jax.Array], list[Rows], list[Rows], Masked], Sequence[jax.Array] | None]


def computed(
    eqn: jex.JaxprEqn, arrays: list[jax.Array], rows: list[Rows], out: list[Rows], masked: Masked
) -> list[jax.Array]:
    """Computes an equation in which rows occur.

    Args:
        eqn: the equation.
        arrays, rows: its operands, and which of their axes are of rows.
        out: the same of its results.
        masked: see above.

    Raises:
        NotExact: rows that count would depend on others.
    """
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if rule is None and name not in _EACH_BY_ITSELF:
        raise NotExact(f"{name!r} may combine rows")
    masked_arrays = rule(eqn, arrays, rows, out, masked) if rule is not None else None
    promises = [name for name in ("unique_indices", "indices_are_sorted") if name in eqn.params]
    params: dict[str, Any] = {**eqn.params, **dict.fromkeys(promises, False)}  # which hold of the rows that count
    return jax_internals.rebind(eqn, params, arrays if masked_arrays is None else masked_arrays)


def _refuse_if(wrong: bool, eqn: jex.JaxprEqn) -> None:
    if wrong:
        raise NotExact(f"{eqn.primitive.name!r} combines or reorders rows")


# What computes each element of the result of one element of each operand, at the same place.
_OTHERS = """
    bessel_i0e bessel_i1e bitcast_convert_type eq_to igamma igamma_grad_a igammac iota le_to lt_to name
    optimization_barrier polygamma pvary random_fold_in random_unwrap random_wrap regularized_incomplete_beta reshard
    sharding_constraint squeeze stack stop_gradient transpose zeta
"""
_EACH_BY_ITSELF = ELEMENTWISE | frozenset(_OTHERS.split())


def _of_reduction(fill: Callable[[np.dtype], object]) -> _Rule:
    def rule(eqn: jex.JaxprEqn, arrays: Any, rows: Any, out: Any, masked: Masked) -> list[jax.Array]:
        return [masked(x, r, eqn.params["axes"], fill(x.dtype)) for x, r in zip(arrays, rows)]

    return rule


def _least(dtype: np.dtype) -> object:
    if dtype == np.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def _most(dtype: np.dtype) -> object:
    if dtype == np.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max


def _broadcast(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    for axis, place in enumerate(eqn.params["broadcast_dimensions"]):
        _refuse_if(rows[0][axis] != out[0][place] and arrays[0].shape[axis] != 1, eqn)


def _reshape(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    """Rows stay rows if as much stands before them: their elements are then the same in both shapes."""
    shapes = arrays[0].shape, kind_of(eqn.outvars[0]).shape
    before = [
        [math.prod(shape[:axis]) for axis, k in enumerate(each) if k] for shape, each in zip(shapes, (rows[0], out[0]))
    ]
    _refuse_if(eqn.params["dimensions"] is not None or before[0] != before[1], eqn)


def _not_along(parameter: str) -> _Rule:
    """Returns the rule of primitives that combine along the axes in a parameter."""

    def rule(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
        axes = eqn.params[parameter]
        for axis in axes if isinstance(axes, (tuple, list)) else [axes]:
            _refuse_if(any(each and each[axis] for each in rows), eqn)

    return rule


def _cumulative(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    _refuse_if(rows[0][eqn.params["axis"]] > 0 and eqn.params["reverse"], eqn)


def _slice(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    strides = eqn.params["strides"] or [1] * arrays[0].ndim
    for axis, k in enumerate(rows[0]):
        start, stop = eqn.params["start_indices"][axis], eqn.params["limit_indices"][axis]
        cut = start != 0 or strides[axis] != 1 or not (stop == arrays[0].shape[axis] or out[0][axis])
        _refuse_if(k > 0 and cut, eqn)


def _dynamic_slice(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    sizes = eqn.params["slice_sizes"]
    _refuse_if(any(k and size != n for k, size, n in zip(rows[0], sizes, arrays[0].shape)), eqn)


def _dynamic_update(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    """What is replaced are parts of all rows."""
    _refuse_if(rows[0] != rows[1], eqn)


def _pad(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    padding = zip(rows[0], eqn.params["padding_config"])
    _refuse_if(rows[0] != out[0] or any(k and tuple(each) != (0, 0, 0) for k, each in padding), eqn)


def _tile(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    _refuse_if(any(k and times != 1 for k, times in zip(rows[0], eqn.params["reps"])), eqn)


def _window(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    """Windows are of one row each."""
    sizes = eqn.params["window_dimensions"]
    strides, padding = eqn.params["window_strides"], eqn.params["padding"]
    for axis, size in enumerate(sizes):
        moves = size != 1 or strides[axis] != 1 or tuple(padding[axis]) != (0, 0)
        _refuse_if(moves and any(len(each) > axis and each[axis] for each in rows), eqn)


def _leading(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    """Matrices or vectors in the last axes, one for each place in those before."""
    own = len(eqn.params["fft_lengths"]) if eqn.primitive.name == "fft" else 2
    _refuse_if(any(any(each[-own:]) for each in rows), eqn)


def _dot(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> list[jax.Array]:
    contracted, _ = eqn.params["dimension_numbers"]
    return [masked(x, each, axes, 0) for x, each, axes in zip(arrays, rows, contracted)]


def _convolution(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> list[jax.Array]:
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    (batch, feature, *spatial), (outer, inner, *of_kernel) = numbers.lhs_spec, numbers.rhs_spec
    _refuse_if(any(rows[0][axis] for axis in spatial) or any(rows[1][axis] for axis in of_kernel), eqn)
    _refuse_if((rows[0][batch] > 0 or rows[1][outer] > 0) and params["batch_group_count"] != 1, eqn)
    together = rows[0][feature] > 0 or rows[1][inner] > 0 or rows[1][outer] > 0
    _refuse_if(together and params["feature_group_count"] != 1, eqn)
    return [masked(arrays[0], rows[0], [feature], 0), masked(arrays[1], rows[1], [inner], 0)]


def _gather(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> Sequence[jax.Array]:
    """Of rows, each index takes its own, all of them, or one; an index beyond the last takes that, or nothing."""
    numbers, sizes, mode = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.params["mode"]
    indexed = []
    for axis, k in enumerate(rows[0]):
        whole = sizes[axis] == arrays[0].shape[axis] and axis not in numbers.collapsed_slice_dims
        if k > 0 and not whole and axis not in numbers.operand_batching_dims:
            indexed.append(axis)
            _refuse_if(sizes[axis] != 1 or mode not in (_FILL, _WITHIN), eqn)
    if mode != _FILL:
        return [arrays[0], _clamped(arrays[1], numbers.start_index_map, indexed, arrays[0].shape, rows[0], masked)]
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = _least(arrays[0].dtype) if not jnp.issubdtype(arrays[0].dtype, jnp.inexact) else jnp.nan
        _refuse_if(bool(indexed) and arrays[0].dtype.kind in "ub", eqn)
    return [masked(arrays[0], rows[0], indexed, fill), arrays[1]]


def _clamped(
    indices: jax.Array, axes: Sequence[int], indexed: Sequence[int], shape: Sequence[int], rows: Rows, masked: Masked
) -> jax.Array:
    """Returns indices, `[..., axes]`, of which none is beyond the last row that counts: XLA clamps `x[index]` so."""
    for axis in indexed:
        counts = masked(jnp.ones(shape[axis], indices.dtype), (rows[axis],), (0,), 0)
        last = jnp.maximum(jnp.sum(counts, dtype=indices.dtype) - 1, 0)
        is_axis = np.array([each == axis for each in axes])
        indices = jnp.where(is_axis, jnp.minimum(indices, last), indices)
    return indices


_FILL, _WITHIN = jax.lax.GatherScatterMode.FILL_OR_DROP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _scatter(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> list[jax.Array]:
    """What does not count is combined with nothing; where it would replace something each row has its own place."""
    operand, indices, updates = arrays
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    batching = [*numbers.operand_batching_dims]
    window = [axis for axis in range(operand.ndim) if axis not in (*numbers.inserted_window_dims, *batching)]
    windows = dict(zip(numbers.update_window_dims, window))
    taken = [i for i in range(updates.ndim) if i not in windows]  # the axes of `updates` that are axes of the indices
    places = [axis for axis in range(indices.ndim - 1) if axis not in numbers.scatter_indices_batching_dims]
    for axis, k in enumerate(rows[0]):
        if k and axis in numbers.scatter_dims_to_operand_dims:
            _refuse_if(axis in window or mode not in (_FILL, _WITHIN), eqn)
    own = dict(windows)
    own.update((taken[i], axis) for axis, i in zip(batching, numbers.scatter_indices_batching_dims))
    _refuse_if(any(rows[0][axis] != rows[2][i] for i, axis in own.items()), eqn)
    shared = [taken[i] for i in places if rows[2][taken[i]]]
    if eqn.primitive.name == "scatter":
        _refuse_if(bool(shared), eqn)
        return list(arrays)
    return [operand, indices, masked(updates, rows[2], shared, _NEUTRAL[eqn.primitive.name](operand.dtype))]


_NEUTRAL: Mapping[str, Callable[[np.dtype], object]] = {
    "scatter-add": lambda dtype: 0,
    "scatter-sub": lambda dtype: 0,
    "scatter-mul": lambda dtype: 1,
    "scatter-max": lambda dtype: _least(dtype),
    "scatter-min": lambda dtype: _most(dtype),
}


def _random_bits(eqn: jex.JaxprEqn, arrays: Any, rows: list[Rows], out: list[Rows], masked: Masked) -> None:
    """Numbers of the first rows are the same however many there are, for JAX's default kind of keys."""
    if any(rows[0]):  # each key has its own
        _refuse_if(out[0] != (*rows[0], *[0] * (len(out[0]) - len(rows[0]))), eqn)
        return
    shape = kind_of(eqn.outvars[0]).shape
    leading = all(n == 1 for axis, k in enumerate(out[0]) if k for n in shape[:axis])
    threefry = "fry" in str(arrays[0].dtype) and getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009  which has no type
    _refuse_if(sum(map(bool, out[0])) != 1 or not leading or not threefry, eqn)


_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_WINDOWS = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
_SELECTIONS = ("select_and_scatter_add", "select_and_gather_add")
_LINEAR_ALGEBRA = ("cholesky", "triangular_solve", "lu", "qr", "geqrf", "eigh", "svd", "fft")
_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")

_RULES: Mapping[str, _Rule] = {
    "reduce_sum": _of_reduction(lambda dtype: 0),
    "reduce_prod": _of_reduction(lambda dtype: 1),
    "reduce_max": _of_reduction(_least),
    "reduce_min": _of_reduction(_most),
    "argmax": _of_reduction(_least),
    "argmin": _of_reduction(_most),
    "reduce_or": _of_reduction(lambda dtype: 0),
    "reduce_xor": _of_reduction(lambda dtype: 0),
    "reduce_and": _of_reduction(lambda dtype: True if dtype == np.bool_ else -1),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "concatenate": _not_along("dimension"),
    "sort": _not_along("dimension"),
    "rev": _not_along("dimensions"),
    "split": _not_along("axis"),
    "unstack": _not_along("axis"),
    "top_k": lambda eqn, arrays, rows, out, masked: _refuse_if(rows[0][eqn.params.get("axis", -1)] > 0, eqn),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "pad": _pad,
    "tile": _tile,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "random_bits": _random_bits,
    "random_split": _random_bits,
    **dict.fromkeys(_CUMULATIVE, _cumulative),
    **dict.fromkeys([*_WINDOWS, *_SELECTIONS], _window),
    **dict.fromkeys(_LINEAR_ALGEBRA, _leading),
    **dict.fromkeys(_SCATTERS, _scatter),
}
