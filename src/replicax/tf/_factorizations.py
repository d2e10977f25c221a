"""Factors of matrices, roots, and systems of equations with few diagonals: the rest of `tf.linalg`."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf._core import as_dtype
from replicax.tf._host import jnp, on_jax
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import DTypeLike, TensorLike


@on_jax
def lu(input: TensorLike, output_idx_type: DTypeLike = np.int32, name: str | None = None) -> tuple[jax.Array, ...]:
    """Returns the triangular factors of square matrices in one matrix each, and the order of the rows."""
    factors, _, order = jax.lax.linalg.lu(convert_to_tensor(input))
    return factors, order.astype(as_dtype(output_idx_type))


@on_jax
def lu_reconstruct(
    lower_upper: TensorLike, perm: TensorLike, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the matrices of which `lu` gave these factors."""
    factors, order = convert_to_tensor(lower_upper), convert_to_tensor(perm)
    lower = jnp.tril(factors, -1) + jnp.eye(factors.shape[-1], dtype=factors.dtype)
    return jnp.take_along_axis(lower @ jnp.triu(factors), jnp.argsort(order)[..., None], axis=-2)


@on_jax
def lu_solve(
    lower_upper: TensorLike, perm: TensorLike, rhs: TensorLike, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """Solves `A x = rhs`, where `lu` gave these factors of A; `rhs` is `[..., n, m]`."""
    factors, order, right = (convert_to_tensor(each) for each in (lower_upper, perm, rhs))
    right = jnp.take_along_axis(right, order[..., None], axis=-2)
    lower = jax.lax.linalg.triangular_solve(factors, right, left_side=True, lower=True, unit_diagonal=True)
    return jax.lax.linalg.triangular_solve(factors, lower, left_side=True)


@on_jax
def lu_matrix_inverse(
    lower_upper: TensorLike, perm: TensorLike, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the inverses of the matrices of which `lu` gave these factors."""
    factors = convert_to_tensor(lower_upper)
    unit = jnp.broadcast_to(jnp.eye(factors.shape[-1], dtype=factors.dtype), factors.shape)
    return lu_solve(factors, perm, unit)


@on_jax
def sqrtm(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the principal square roots of square matrices; JAX has them on CPU alone."""
    matrices = convert_to_tensor(input)
    root = jax.scipy.linalg.sqrtm
    for _ in range(matrices.ndim - 2):
        root = jax.vmap(root)
    found = root(matrices)
    return found if jnp.iscomplexobj(matrices) else jnp.real(found)


def _three(diagonals: TensorLike, diagonals_format: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the diagonals above, on and below the main one, each `[..., n]`."""
    if diagonals_format == "compact":
        found = convert_to_tensor(diagonals)
        return found[..., 0, :], found[..., 1, :], found[..., 2, :]
    if diagonals_format == "matrix":
        matrix = convert_to_tensor(diagonals)
        above, on, below = (jnp.diagonal(matrix, offset, -2, -1) for offset in (1, 0, -1))
    elif diagonals_format == "sequence":
        above, on, below = map(convert_to_tensor, diagonals)  # type: ignore[arg-type]
    else:
        raise ValueError(f"Unrecognized diagonals_format: {diagonals_format}")
    before = [(0, 0)] * (on.ndim - 1)
    if above.shape[-1] < on.shape[-1]:
        above = jnp.pad(above, [*before, (0, 1)])
    if below.shape[-1] < on.shape[-1]:
        below = jnp.pad(below, [*before, (1, 0)])
    return above, on, below


@on_jax
def tridiagonal_matmul(
    diagonals: TensorLike, rhs: TensorLike, diagonals_format: str = "compact", name: str | None = None
) -> jax.Array:
    """Returns the product of matrices that have three diagonals and of matrices `[..., n, m]`."""
    above, on, below = _three(diagonals, diagonals_format)
    right = convert_to_tensor(rhs)
    nothing = jnp.zeros_like(right[..., :1, :])
    after = jnp.concatenate([right[..., 1:, :], nothing], -2)
    before = jnp.concatenate([nothing, right[..., :-1, :]], -2)
    return above[..., None] * after + on[..., None] * right + below[..., None] * before


@on_jax
def tridiagonal_solve(
    diagonals: TensorLike,
    rhs: TensorLike,
    diagonals_format: str = "compact",
    transpose_rhs: bool = False,
    conjugate_rhs: bool = False,
    name: str | None = None,
    partial_pivoting: bool = True,
    perturb_singular: bool = False,
) -> jax.Array:
    """Solves systems of equations whose matrices have three diagonals.

    Args:
        diagonals: those above, on and below the main one: `[..., 3, n]`, where the last of the first and the first of
            the last do not count; as a "sequence" of three tensors; or as a "matrix".
        rhs: `[..., n]` or `[..., n, m]`.
        diagonals_format: "compact", "sequence" or "matrix".
        transpose_rhs: whether `rhs` is `[..., m, n]`.
        conjugate_rhs: whether `rhs` is conjugated.
        name, partial_pivoting, perturb_singular: accepted for compatibility.

    Returns:
        The solutions, in the shape of `rhs`.
    """
    above, on, below = _three(diagonals, diagonals_format)
    right = jnp.conj(convert_to_tensor(rhs)) if conjugate_rhs else convert_to_tensor(rhs)
    vector = right.ndim == on.ndim
    right = right[..., None] if vector else jnp.swapaxes(right, -1, -2) if transpose_rhs else right
    matrix = _banded(above, on, below)
    solved = jnp.linalg.solve(matrix, right)
    result: jax.Array = solved[..., 0] if vector else solved
    return result


def _banded(above: jax.Array, on: jax.Array, below: jax.Array) -> jax.Array:
    """Returns matrices with these diagonals, so that systems are solved with pivots."""
    size = on.shape[-1]
    places = np.arange(size)
    matrix = jnp.zeros((*on.shape, size), on.dtype).at[..., places, places].set(on)
    matrix = matrix.at[..., places[:-1], places[1:]].set(above[..., :-1])
    return matrix.at[..., places[1:], places[:-1]].set(below[..., 1:])


@on_jax
def banded_triangular_solve(
    bands: TensorLike, rhs: TensorLike, lower: bool = True, adjoint: bool = False, name: str | None = None
) -> jax.Array:
    """Solves systems of equations whose matrices are triangular, with few diagonals `[..., diagonals, n]`."""
    diagonals, right = convert_to_tensor(bands), convert_to_tensor(rhs)
    count, size = diagonals.shape[-2:]
    matrix = jnp.zeros((*diagonals.shape[:-2], size, size), diagonals.dtype)
    for number in range(count):
        offset = number if lower else count - 1 - number
        rows = np.arange(offset, size) if lower else np.arange(size - offset)
        columns = rows - offset if lower else rows + offset
        matrix = matrix.at[..., rows, columns].set(diagonals[..., number, rows])
    return jax.lax.linalg.triangular_solve(
        matrix, right, left_side=True, lower=lower, transpose_a=adjoint, conjugate_a=adjoint
    )


operations(globals())
FACTORS = """banded_triangular_solve lu lu_matrix_inverse lu_reconstruct lu_solve sqrtm tridiagonal_matmul
tridiagonal_solve"""
