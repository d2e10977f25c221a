"""Linear algebra."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import as_dtype
from replicax.tf._dressing import magnitude
from replicax.tf._operations import fitting, of_matmul, operations
from replicax.tf._ops import as_axis, convert_to_tensor, known, pair


def matmul(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: Any = None,
    grad_a: bool = False,
    grad_b: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the product of matrices, or of stacks of matrices, which are transposed or conjugated first if
    requested.
    """
    if (transpose_a and adjoint_a) or (transpose_b and adjoint_b):
        raise ValueError("Only one of transpose and adjoint can be True for a matrix.")
    a, b = pair(a, b)
    if jnp.ndim(a) < 2 or jnp.ndim(b) < 2:
        raise InvalidArgumentError(
            f"tf.matmul takes matrices, got shapes {jnp.shape(a)} and {jnp.shape(b)}: use tf.linalg.matvec or "
            "tf.tensordot for vectors."
        )
    kind = None if output_type is None else as_dtype(output_type)
    a, b = _turned(a, transpose_a, adjoint_a), _turned(b, transpose_b, adjoint_b)
    return fitting(jnp.matmul, of_matmul)(a, b, preferred_element_type=kind)


def _turned(matrix: Any, transpose: bool, adjoint: bool) -> Any:
    turned = jnp.swapaxes(matrix, -1, -2) if transpose or adjoint else matrix
    return jnp.conj(turned) if adjoint else turned


def matvec(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    adjoint_a: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the product of matrices `[..., m, n]` and vectors `[..., n]`."""
    return matmul(a, convert_to_tensor(b)[..., None], transpose_a, adjoint_a=adjoint_a)[..., 0]


def tensordot(a: Any, b: Any, axes: Any, name: str | None = None) -> Any:
    """Returns the product summed over `axes`: a number of axes, or those of `a` and those of `b`."""
    axes = known(axes, "The axes of a product", "Give Python numbers.").tolist()
    return jnp.tensordot(*pair(a, b), axes=axes)


def einsum(equation: str, *inputs: Any, **kwargs: Any) -> Any:
    """Computes the sums of products of an einsum equation."""
    unknown = set(kwargs) - {"name", "optimize"}
    if unknown:
        raise TypeError(f"Invalid keyword arguments for einsum: {sorted(unknown)}.")
    return jnp.einsum(equation, *(convert_to_tensor(x) for x in inputs))


def norm(tensor: Any, ord: Any = "euclidean", axis: Any = None, keepdims: Any = None, name: str | None = None) -> Any:
    """Returns the norm of vectors or, with two axes, of matrices: "euclidean", "fro" (matrices), 1, 2, p or
    infinity.
    """
    tensor, axis = convert_to_tensor(tensor), as_axis(axis)
    matrices = isinstance(axis, tuple) and len(axis) == 2
    if ord in ("euclidean", "fro") or (ord == 2 and not matrices):
        return jnp.sqrt(jnp.sum(tensor * jnp.conj(tensor), axis=axis, keepdims=bool(keepdims)))
    if ord not in (1, 2, np.inf) and (matrices or not isinstance(ord, (int, float)) or ord <= 0):
        raise ValueError(
            f"'ord' must be a supported norm, got {ord!r}: euclidean, fro, 1, 2, inf or a positive number."
        )
    if matrices:
        return jnp.linalg.norm(tensor, ord, axis, bool(keepdims))
    size = magnitude(tensor)
    if ord == np.inf:
        return jnp.max(size, axis=axis, keepdims=bool(keepdims))
    return jnp.sum(size**ord, axis=axis, keepdims=bool(keepdims)) ** (1.0 / ord)


def normalize(tensor: Any, ord: Any = "euclidean", axis: Any = None, name: str | None = None) -> Any:
    """Returns the tensor divided by its norm, and the norm."""
    size = norm(tensor, ord, axis, keepdims=True)
    return convert_to_tensor(tensor) / size, size


def l2_normalize(x: Any, axis: Any = None, epsilon: float = 1e-12, name: str | None = None, dim: Any = None) -> Any:
    """Returns `x / sqrt(max(sum(x ** 2), epsilon))` along the axes."""
    x, axis = convert_to_tensor(x), as_axis(axis if dim is None else dim)
    square = jnp.sum(jnp.real(x * jnp.conj(x)), axis=axis, keepdims=True)
    return x * lax.rsqrt(jnp.maximum(square, epsilon))


# Matrices.


def adjoint(matrix: Any, name: str | None = None) -> Any:
    """Returns the conjugate of matrices with rows and columns exchanged."""
    return _turned(convert_to_tensor(matrix), False, True)


def matrix_transpose(a: Any, name: str = "matrix_transpose", conjugate: bool = False) -> Any:
    """Returns matrices with rows and columns exchanged."""
    return _turned(convert_to_tensor(a), True, conjugate)


def band_part(input: Any, num_lower: Any, num_upper: Any, name: str | None = None) -> Any:
    """Sets matrices to 0 outside of a band of diagonals below and above the main one; a negative number means all."""
    matrix = convert_to_tensor(input)
    row, column = jnp.arange(matrix.shape[-2])[:, None], jnp.arange(matrix.shape[-1])[None, :]
    lower, upper = convert_to_tensor(num_lower), convert_to_tensor(num_upper)
    inside = ((lower < 0) | (row - column <= lower)) & ((upper < 0) | (column - row <= upper))
    return jnp.where(inside, matrix, jnp.zeros((), matrix.dtype))


def _one_diagonal(k: Any, align: str) -> int:
    diagonal = known(k, "The diagonal", "Give a Python number.")
    if diagonal.ndim:
        raise ValueError(f"k must be one diagonal, got {diagonal.tolist()}; for a band, call it for each diagonal.")
    return int(diagonal)


def diag(
    diagonal: Any,
    name: str = "diag",
    k: Any = 0,
    num_rows: int = -1,
    num_cols: int = -1,
    padding_value: Any = 0,
    align: str = "RIGHT_LEFT",
) -> Any:
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
    input: Any, name: str = "diag_part", k: Any = 0, padding_value: Any = 0, align: str = "RIGHT_LEFT"
) -> Any:
    """Returns the diagonal `k` of matrices."""
    return jnp.diagonal(convert_to_tensor(input), _one_diagonal(k, align), -2, -1)


def set_diag(input: Any, diagonal: Any, name: str = "set_diag", k: Any = 0, align: str = "RIGHT_LEFT") -> Any:
    """Returns matrices with these values on their diagonal `k`."""
    matrix, k = convert_to_tensor(input), _one_diagonal(k, align)
    values = convert_to_tensor(diagonal, None if hasattr(diagonal, "dtype") else matrix.dtype)
    n = values.shape[-1]
    if n != (length := jnp.diagonal(matrix, k, -2, -1).shape[-1]):
        raise InvalidArgumentError(
            f"The diagonal {k} of a tensor of shape {matrix.shape} has {length} elements, got {n}."
        )
    return matrix.at[..., np.arange(n) + max(-k, 0), np.arange(n) + max(k, 0)].set(values)


def tensor_diag(diagonal: Any, name: str | None = None) -> Any:
    """Returns a tensor of twice the rank, with these values where both halves of the indices are equal."""
    values = convert_to_tensor(diagonal)
    return jnp.diag(values.reshape(-1)).reshape(values.shape * 2)


def tensor_diag_part(input: Any, name: str | None = None) -> Any:
    """Returns the values at which both halves of the indices are equal."""
    tensor = convert_to_tensor(input)
    shape = tensor.shape[: tensor.ndim // 2]
    return jnp.diagonal(tensor.reshape(int(np.prod(shape)), -1)).reshape(shape)


def trace(x: Any, name: str | None = None) -> Any:
    """Returns the sum of the diagonal of matrices."""
    x = convert_to_tensor(x)
    return jnp.trace(x, axis1=-2, axis2=-1, dtype=x.dtype)


def cross(a: Any, b: Any, name: str | None = None) -> Any:
    """Returns the cross product of vectors of three elements."""
    return jnp.cross(*pair(a, b))


def cholesky(input: Any, name: str | None = None) -> Any:
    """Returns the lower triangular matrix whose product with its adjoint is the matrix."""
    matrix = convert_to_tensor(input)
    lower = jnp.tril(matrix)
    read = lower + adjoint(jnp.tril(matrix, -1))  # only gradients use the upper half
    whole = (matrix + adjoint(matrix)) / 2
    return jnp.linalg.cholesky(whole + lax.stop_gradient(read - whole), symmetrize_input=False)


def cholesky_solve(chol: Any, rhs: Any, name: str | None = None) -> Any:
    """Returns the solution of `A x = rhs`, from the Cholesky factor of `A`."""
    chol = convert_to_tensor(chol)
    half = lax.linalg.triangular_solve(chol, convert_to_tensor(rhs), left_side=True, lower=True)
    return lax.linalg.triangular_solve(chol, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


def triangular_solve(matrix: Any, rhs: Any, lower: bool = True, adjoint: bool = False, name: str | None = None) -> Any:
    """Returns the solution of `matrix x = rhs` for triangular matrices."""
    matrix, rhs = convert_to_tensor(matrix), convert_to_tensor(rhs)
    batch = np.broadcast_shapes(matrix.shape[:-2], rhs.shape[:-2])
    matrix, rhs = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (matrix, rhs))
    return lax.linalg.triangular_solve(
        matrix, rhs, left_side=True, lower=lower, transpose_a=adjoint, conjugate_a=adjoint
    )


def solve(matrix: Any, rhs: Any, adjoint: bool = False, name: str | None = None) -> Any:
    """Returns the solution of `matrix x = rhs`."""
    return jnp.linalg.solve(_turned(convert_to_tensor(matrix), False, adjoint), convert_to_tensor(rhs))


def inv(input: Any, adjoint: bool = False, name: str | None = None) -> Any:
    """Returns the inverse of matrices."""
    return jnp.linalg.inv(_turned(convert_to_tensor(input), False, adjoint))


def pinv(a: Any, rcond: Any = None, validate_args: bool = False, name: str | None = None) -> Any:
    """Returns the Moore-Penrose inverse of matrices."""
    return jnp.linalg.pinv(convert_to_tensor(a), rtol=rcond)


def lstsq(matrix: Any, rhs: Any, l2_regularizer: Any = 0.0, fast: bool = True, name: str | None = None) -> Any:
    """Returns the least-squares solution of `matrix x = rhs`, with L2 regularization of `x` if requested."""
    a, b = convert_to_tensor(matrix), convert_to_tensor(rhs)
    if not np.any(np.asarray(l2_regularizer)) and not fast:
        return jnp.matmul(jnp.linalg.pinv(a), b)
    wide = a.shape[-2] < a.shape[-1]
    small = jnp.matmul(a, adjoint(a)) if wide else jnp.matmul(adjoint(a), a)
    small = small + jnp.asarray(l2_regularizer, a.dtype) * jnp.eye(small.shape[-1], dtype=a.dtype)
    if wide:
        return jnp.matmul(adjoint(a), jnp.linalg.solve(small, b))
    return jnp.linalg.solve(small, jnp.matmul(adjoint(a), b))


def det(input: Any, name: str | None = None) -> Any:
    """Returns the determinant of matrices."""
    return jnp.linalg.det(convert_to_tensor(input))


def slogdet(input: Any, name: str | None = None) -> Any:
    """Returns the sign of the determinant and the logarithm of its absolute value."""
    return tuple(jnp.linalg.slogdet(convert_to_tensor(input)))


def logdet(matrix: Any, name: str | None = None) -> Any:
    """Returns the logarithm of the determinant of positive definite matrices."""
    root = jnp.linalg.cholesky(convert_to_tensor(matrix))
    return 2.0 * jnp.sum(jnp.log(jnp.real(jnp.diagonal(root, axis1=-2, axis2=-1))), -1)


def matrix_rank(a: Any, tol: Any = None, validate_args: bool = False, name: str | None = None) -> Any:
    """Returns the rank of matrices, int32."""
    return jnp.linalg.matrix_rank(convert_to_tensor(a), tol).astype(np.int32)


def qr(input: Any, full_matrices: bool = False, name: str | None = None) -> Any:
    """Returns an orthogonal and an upper triangular matrix whose product is the matrix."""
    return tuple(jnp.linalg.qr(convert_to_tensor(input), "complete" if full_matrices else "reduced"))


def svd(tensor: Any, full_matrices: bool = False, compute_uv: bool = True, name: str | None = None) -> Any:
    """Returns (s, u, v) with singular values `s` and `tensor = u diag(s) v*`, or `s` alone."""
    found = jnp.linalg.svd(convert_to_tensor(tensor), full_matrices=full_matrices, compute_uv=compute_uv)
    return (found[1], found[0], adjoint(found[2])) if compute_uv else found


def eigh(tensor: Any, name: str | None = None) -> Any:
    """Returns the eigenvalues, in ascending order, and the eigenvectors of self-adjoint matrices."""
    return tuple(jnp.linalg.eigh(convert_to_tensor(tensor), symmetrize_input=False))


def eigvalsh(tensor: Any, name: str | None = None) -> Any:
    """Returns eigenvalues of self-adjoint matrices, in ascending order."""
    return jnp.linalg.eigh(convert_to_tensor(tensor), symmetrize_input=False)[0]


def eig(tensor: Any, name: str | None = None) -> Any:
    """Returns eigenvalues and eigenvectors of matrices; JAX has them on CPU alone."""
    return tuple(jnp.linalg.eig(convert_to_tensor(tensor)))


def eigvals(tensor: Any, name: str | None = None) -> Any:
    """Returns eigenvalues of matrices; JAX has them on CPU alone."""
    return jnp.linalg.eigvals(convert_to_tensor(tensor))


def expm(input: Any, name: str | None = None) -> Any:
    """Returns the exponential of matrices."""
    return jax.scipy.linalg.expm(convert_to_tensor(input))


operations(globals())
