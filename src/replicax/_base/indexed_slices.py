"""Sparse gradients and updates: some rows of a larger tensor."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import nest
from replicax._base.types import Leaf


class IndexedSlices(nest.LeafBase):
    """Rows `values` of a tensor, standing at `indices` along its first axis.

    Args:
        values: `[n, ...]`, the rows.
        indices: `[n]` integers; a repeated index adds its rows up.
        dense_shape: the tensor's shape, where it is known.

    >>> import jax.numpy as jnp, replicax as rx
    >>> rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), (3, 2)).to_dense().tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, values: jax.Array, indices: jax.Array, dense_shape: Sequence[int] | jax.Array | None = None):
        self.values, self.indices, self.dense_shape = values, indices, dense_shape

    @property
    def dtype(self) -> np.dtype:
        """The rows' dtype.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1])).dtype
        dtype('float32')
        """
        return self.values.dtype

    def to_dense(self) -> jax.Array:
        """Returns the whole tensor, zero where there is no row; raises `ValueError` without a `dense_shape`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.IndexedSlices(jnp.ones(2), jnp.array([1, 1]), dense_shape=(3,)).to_dense().tolist()
        [0.0, 2.0, 0.0]
        """
        if self.dense_shape is None:
            raise ValueError(
                f"Tensor conversion requested for IndexedSlices for argument `value` without dense_shape: {self!r}"
            )
        shape = tuple(int(size) for size in self.dense_shape)
        return jnp.zeros(shape, self.values.dtype).at[self.indices].add(self.values)

    def __jax_array__(self) -> jax.Array:
        return self.to_dense()

    def __repr__(self) -> str:
        return f"IndexedSlices(indices={self.indices}, values={self.values}, dense_shape={self.dense_shape})"


def dense(leaf: Leaf, method: str) -> Leaf:
    """Return a leaf; raise NotImplementedError for `IndexedSlices`. `method` was called by the user."""
    if isinstance(leaf, IndexedSlices):
        error = NotImplementedError(f"{method} does not support IndexedSlices")  # TensorFlow's words
        error.add_note("Pass a tensor: `slices.to_dense()`.")
        raise error
    return leaf


def dynamic_arrays(slices: IndexedSlices) -> tuple[jax.Array, ...]:
    """Return `values` and `indices`, and `dense_shape` too if it is a tracer, which a program has to return."""
    if isinstance(slices.dense_shape, jax.core.Tracer):
        return slices.values, slices.indices, slices.dense_shape
    return slices.values, slices.indices


def with_arrays(slices: IndexedSlices, arrays: Sequence[jax.Array]) -> IndexedSlices:
    """Return slices with these arrays, in the order of `dynamic_arrays(slices)`."""
    values, indices, *shape = arrays
    return IndexedSlices(values, indices, shape[0] if shape else slices.dense_shape)


def _flatten(slices: IndexedSlices) -> tuple[tuple[jax.Array, ...], tuple[tuple[int, ...], ...]]:
    if slices.dense_shape is None:
        return (slices.values, slices.indices), ()
    # A known array is a child too, since JAX requires a result to have as many children as its tracers had.
    if isinstance(slices.dense_shape, (jax.Array, np.ndarray)):
        return (slices.values, slices.indices, slices.dense_shape), ()
    return (slices.values, slices.indices), (tuple(slices.dense_shape),)


jax.tree_util.register_pytree_node(
    IndexedSlices, _flatten, lambda static_shape, arrays: IndexedSlices(*arrays, *static_shape)
)
