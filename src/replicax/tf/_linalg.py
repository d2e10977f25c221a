"""Linear algebra."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.tf._core import InvalidArgumentError, as_dtype
from replicax.tf._dressing import magnitude
from replicax.tf._host import jnp, lax
from replicax.tf._op_tables import largest, pair
from replicax.tf._operations import fitting, of_matmul, operations
from replicax.tf._ops import as_axis, convert_to_tensor, known
from replicax.tf._types import DTypeLike, TensorLike


def matmul(
    a: TensorLike,
    b: TensorLike,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: DTypeLike | None = None,
    grad_a: bool = False,
    grad_b: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the product of matrices, or of stacks of matrices, which are transposed or conjugated first if
    requested.
    """
    if (transpose_a and adjoint_a) or (transpose_b and adjoint_b):
        raise ValueError("Only one of transpose and adjoint can be True for a matrix.")
    left, right = pair(a, b)
    if jnp.ndim(left) < 2 or jnp.ndim(right) < 2:
        raise InvalidArgumentError(
            f"tf.matmul takes matrices, got shapes {jnp.shape(left)} and {jnp.shape(right)}: use tf.linalg.matvec or "
            "tf.tensordot for vectors."
        )
    kind = None if output_type is None else as_dtype(output_type)
    left, right = _turned(left, transpose_a, adjoint_a), _turned(right, transpose_b, adjoint_b)
    return fitting(jnp.matmul, of_matmul)(left, right, preferred_element_type=kind)


def _turned(matrix: jax.Array, transpose: bool, adjoint: bool) -> jax.Array:
    turned = jnp.swapaxes(matrix, -1, -2) if transpose or adjoint else matrix
    return jnp.conj(turned) if adjoint else turned


def matvec(
    a: TensorLike,
    b: TensorLike,
    transpose_a: bool = False,
    adjoint_a: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the product of matrices `[..., m, n]` and vectors `[..., n]`."""
    return matmul(a, convert_to_tensor(b)[..., None], transpose_a, adjoint_a=adjoint_a)[..., 0]


def tensordot(a: TensorLike, b: TensorLike, axes: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the product summed over `axes`: a number of axes, or those of `a` and those of `b`."""
    summed = known(axes, "The axes of a product", "Give Python numbers.").tolist()
    return jnp.tensordot(*pair(a, b), axes=summed)


def einsum(equation: str, *inputs: TensorLike, **kwargs: object) -> jax.Array:
    """Computes the sums of products of an einsum equation."""
    unknown = set(kwargs) - {"name", "optimize"}
    if unknown:
        raise TypeError(f"Invalid keyword arguments for einsum: {sorted(unknown)}.")
    return jnp.einsum(equation, *(convert_to_tensor(x) for x in inputs))


def norm(
    tensor: TensorLike,
    ord: Any = "euclidean",
    axis: TensorLike | None = None,
    keepdims: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the norm of vectors or, with two axes, of matrices: "euclidean", "fro" (matrices), 1, 2, p or
    infinity.
    """
    values, along = convert_to_tensor(tensor), as_axis(axis)
    matrices = isinstance(along, tuple) and len(along) == 2
    if ord in ("euclidean", "fro") or (ord == 2 and not matrices):
        return jnp.sqrt(jnp.sum(values * jnp.conj(values), axis=along, keepdims=bool(keepdims)))
    if ord not in (1, 2, np.inf) and (matrices or not isinstance(ord, (int, float)) or ord <= 0):
        raise ValueError(
            f"'ord' must be a supported norm, got {ord!r}: euclidean, fro, 1, 2, inf or a positive number."
        )
    if matrices:
        norms: jax.Array = jnp.linalg.norm(values, ord, along, bool(keepdims))
        return norms
    size = magnitude(values)
    if ord == np.inf:
        return largest(size, along, bool(keepdims))
    result: jax.Array = jnp.sum(size**ord, axis=along, keepdims=bool(keepdims)) ** (1.0 / ord)
    return result


def normalize(
    tensor: TensorLike, ord: str | float = "euclidean", axis: TensorLike | None = None, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the tensor divided by its norm, and the norm."""
    size = norm(tensor, ord, axis, keepdims=True)
    return convert_to_tensor(tensor) / size, size


def l2_normalize(
    x: TensorLike,
    axis: TensorLike | None = None,
    epsilon: float = 1e-12,
    name: str | None = None,
    dim: TensorLike | None = None,
) -> jax.Array:
    """Returns `x / sqrt(max(sum(x ** 2), epsilon))` along the axes."""
    tensor, along = convert_to_tensor(x), as_axis(axis if dim is None else dim)
    square = jnp.sum(jnp.real(tensor * jnp.conj(tensor)), axis=along, keepdims=True)
    return tensor * lax.rsqrt(jnp.maximum(square, epsilon))


# Matrices.


def adjoint(matrix: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the conjugate of matrices with rows and columns exchanged."""
    return _turned(convert_to_tensor(matrix), False, True)


def matrix_transpose(a: TensorLike, name: str = "matrix_transpose", conjugate: bool = False) -> jax.Array:
    """Returns matrices with rows and columns exchanged."""
    return _turned(convert_to_tensor(a), True, conjugate)


def band_part(input: TensorLike, num_lower: TensorLike, num_upper: TensorLike, name: str | None = None) -> jax.Array:
    """Sets matrices to 0 outside of a band of diagonals below and above the main one; a negative number means all."""
    matrix = convert_to_tensor(input)
    row, column = jnp.arange(matrix.shape[-2])[:, None], jnp.arange(matrix.shape[-1])[None, :]
    lower, upper = convert_to_tensor(num_lower), convert_to_tensor(num_upper)
    inside = ((lower < 0) | (row - column <= lower)) & ((upper < 0) | (column - row <= upper))
    return jnp.where(inside, matrix, jnp.zeros((), matrix.dtype))


def _one_diagonal(k: TensorLike, align: str) -> int:
    diagonal = known(k, "The diagonal", "Give a Python number.")
    if diagonal.ndim:
        raise ValueError(f"k must be one diagonal, got {diagonal.tolist()}; for a band, call it for each diagonal.")
    return int(diagonal)


def diag(
    diagonal: TensorLike,
    name: str = "diag",
    k: TensorLike = 0,
    num_rows: int = -1,
    num_cols: int = -1,
    padding_value: ArrayLike = 0,
    align: str = "RIGHT_LEFT",
) -> jax.Array:
    """Returns matrices `[..., rows, columns]` with `diagonal` `[..., n]` on their diagonal `k`, and a value
    elsewhere.
    """
    values, k = convert_to_tensor(diagonal), _one_diagonal(k, align)
    n = values.shape[-1]
    square = num_rows == num_cols == -1
    rows = n + abs(k) if square else num_rows if num_rows != -1 else n + max(-k, 0)
    columns = n + abs(k) if square else num_cols if num_cols != -1 else n + max(k, 0)
    matrix = jnp.full((*values.shape[:-1], rows, columns), padding_value, values.dtype)
    return matrix.at[..., np.arange(n) + max(-k, 0), np.arange(n) + max(k, 0)].set(values)


def diag_part(
    input: TensorLike,
    name: str = "diag_part",
    k: TensorLike = 0,
    padding_value: ArrayLike = 0,
    align: str = "RIGHT_LEFT",
) -> jax.Array:
    """Returns the diagonal `k` of matrices."""
    result: jax.Array = jnp.diagonal(convert_to_tensor(input), _one_diagonal(k, align), -2, -1)
    return result


def set_diag(
    input: TensorLike, diagonal: TensorLike, name: str = "set_diag", k: TensorLike = 0, align: str = "RIGHT_LEFT"
) -> jax.Array:
    """Returns matrices with these values on their diagonal `k`."""
    matrix, k = convert_to_tensor(input), _one_diagonal(k, align)
    values = convert_to_tensor(diagonal, None if hasattr(diagonal, "dtype") else matrix.dtype)
    n = values.shape[-1]
    if n != (length := jnp.diagonal(matrix, k, -2, -1).shape[-1]):
        raise InvalidArgumentError(
            f"The diagonal {k} of a tensor of shape {matrix.shape} has {length} elements, got {n}."
        )
    return matrix.at[..., np.arange(n) + max(-k, 0), np.arange(n) + max(k, 0)].set(values)


def tensor_diag(diagonal: TensorLike, name: str | None = None) -> jax.Array:
    """Returns a tensor of twice the rank, with these values where both halves of the indices are equal."""
    values = convert_to_tensor(diagonal)
    return jnp.diag(values.reshape(-1)).reshape(values.shape * 2)


def tensor_diag_part(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the values at which both halves of the indices are equal."""
    tensor = convert_to_tensor(input)
    shape = tensor.shape[: tensor.ndim // 2]
    result: jax.Array = jnp.diagonal(tensor.reshape(int(np.prod(shape)), -1)).reshape(shape)
    return result


def trace(x: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the sum of the diagonal of matrices."""
    matrix = convert_to_tensor(x)
    return jnp.trace(matrix, axis1=-2, axis2=-1, dtype=matrix.dtype)


def cross(a: TensorLike, b: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the cross product of vectors of three elements."""
    return jnp.cross(*pair(a, b))


def cholesky(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the lower triangular matrix whose product with its adjoint is the matrix."""
    matrix = convert_to_tensor(input)
    lower = jnp.tril(matrix)
    read = lower + adjoint(jnp.tril(matrix, -1))  # only gradients use the upper half
    whole = (matrix + adjoint(matrix)) / 2
    result: jax.Array = jnp.linalg.cholesky(whole + lax.stop_gradient(read - whole), symmetrize_input=False)
    return result


def cholesky_solve(chol: TensorLike, rhs: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the solution of `A x = rhs`, from the Cholesky factor of `A`."""
    factor = convert_to_tensor(chol)
    half = lax.linalg.triangular_solve(factor, convert_to_tensor(rhs), left_side=True, lower=True)
    return lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


def triangular_solve(
    matrix: TensorLike, rhs: TensorLike, lower: bool = True, adjoint: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the solution of `matrix x = rhs` for triangular matrices."""
    a, b = convert_to_tensor(matrix), convert_to_tensor(rhs)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=lower, transpose_a=adjoint, conjugate_a=adjoint)


def solve(matrix: TensorLike, rhs: TensorLike, adjoint: bool = False, name: str | None = None) -> jax.Array:
    """Returns the solution of `matrix x = rhs`."""
    result: jax.Array = jnp.linalg.solve(_turned(convert_to_tensor(matrix), False, adjoint), convert_to_tensor(rhs))
    return result


def inv(input: TensorLike, adjoint: bool = False, name: str | None = None) -> jax.Array:
    """Returns the inverse of matrices."""
    result: jax.Array = jnp.linalg.inv(_turned(convert_to_tensor(input), False, adjoint))
    return result


def pinv(
    a: TensorLike, rcond: ArrayLike | None = None, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the Moore-Penrose inverse of matrices."""
    return jnp.linalg.pinv(convert_to_tensor(a), rtol=rcond)


def lstsq(
    matrix: TensorLike, rhs: TensorLike, l2_regularizer: ArrayLike = 0.0, fast: bool = True, name: str | None = None
) -> jax.Array:
    """Returns the least-squares solution of `matrix x = rhs`, with L2 regularization of `x` if requested."""
    a, b = convert_to_tensor(matrix), convert_to_tensor(rhs)
    if not np.any(np.asarray(l2_regularizer)) and not fast:
        return jnp.matmul(jnp.linalg.pinv(a), b)
    wide = a.shape[-2] < a.shape[-1]
    small = jnp.matmul(a, adjoint(a)) if wide else jnp.matmul(adjoint(a), a)
    small = small + jnp.asarray(l2_regularizer, a.dtype) * jnp.eye(small.shape[-1], dtype=a.dtype)
    if wide:
        return jnp.matmul(adjoint(a), jnp.linalg.solve(small, b))
    result: jax.Array = jnp.linalg.solve(small, jnp.matmul(adjoint(a), b))
    return result


def det(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the determinant of matrices."""
    result: jax.Array = jnp.linalg.det(convert_to_tensor(input))
    return result


def slogdet(input: TensorLike, name: str | None = None) -> tuple[jax.Array, ...]:
    """Returns the sign of the determinant and the logarithm of its absolute value."""
    return tuple(jnp.linalg.slogdet(convert_to_tensor(input)))


def logdet(matrix: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the logarithm of the determinant of positive definite matrices."""
    root = jnp.linalg.cholesky(convert_to_tensor(matrix))
    return 2.0 * jnp.sum(jnp.log(jnp.real(jnp.diagonal(root, axis1=-2, axis2=-1))), -1)


def matrix_rank(
    a: TensorLike, tol: ArrayLike | None = None, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the rank of matrices, int32."""
    result: jax.Array = jnp.linalg.matrix_rank(convert_to_tensor(a), tol).astype(np.int32)
    return result


def qr(input: TensorLike, full_matrices: bool = False, name: str | None = None) -> tuple[jax.Array, ...]:
    """Returns an orthogonal and an upper triangular matrix whose product is the matrix."""
    return tuple(jnp.linalg.qr(convert_to_tensor(input), "complete" if full_matrices else "reduced"))


def svd(
    tensor: TensorLike, full_matrices: bool = False, compute_uv: bool = True, name: str | None = None
) -> jax.Array | tuple[jax.Array, ...]:
    """Returns (s, u, v) with singular values `s` and `tensor = u diag(s) v*`, or `s` alone."""
    found = jnp.linalg.svd(convert_to_tensor(tensor), full_matrices=full_matrices, compute_uv=compute_uv)
    return (found[1], found[0], adjoint(found[2])) if compute_uv else found


def eigh(tensor: TensorLike, name: str | None = None) -> tuple[jax.Array, ...]:
    """Returns the eigenvalues, in ascending order, and the eigenvectors of self-adjoint matrices."""
    return tuple(jnp.linalg.eigh(convert_to_tensor(tensor), symmetrize_input=False))


def eigvalsh(tensor: TensorLike, name: str | None = None) -> jax.Array:
    """Returns eigenvalues of self-adjoint matrices, in ascending order."""
    result: jax.Array = jnp.linalg.eigh(convert_to_tensor(tensor), symmetrize_input=False)[0]
    return result


def eig(tensor: TensorLike, name: str | None = None) -> tuple[jax.Array, ...]:
    """Returns eigenvalues and eigenvectors of matrices; JAX has them on CPU alone."""
    return tuple(jnp.linalg.eig(convert_to_tensor(tensor)))


def eigvals(tensor: TensorLike, name: str | None = None) -> jax.Array:
    """Returns eigenvalues of matrices; JAX has them on CPU alone."""
    result: jax.Array = jnp.linalg.eigvals(convert_to_tensor(tensor))
    return result


def expm(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the exponential of matrices."""
    result: jax.Array = jax.scipy.linalg.expm(convert_to_tensor(input))
    return result


operations(globals())
