"""Reading and writing parts of variables: rows, elements and slices at given indices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicax._base import array_conversion
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Leaf, Tree
from replicax._tracing import frames
from replicax._variables.as_leaves import ARRAY

SCATTER: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "scatter_add": lambda x, i, u: x.at[i].add(u),
    "scatter_sub": lambda x, i, u: x.at[i].add(-u),
    "scatter_mul": lambda x, i, u: x.at[i].multiply(u),
    "scatter_div": lambda x, i, u: x.at[i].divide(u),
    "scatter_update": lambda x, i, u: x.at[i].set(u),
    "scatter_max": lambda x, i, u: x.at[i].max(u),
    "scatter_min": lambda x, i, u: x.at[i].min(u),
}


class Scattering:
    """Adds the methods that read and write parts to a variable."""

    value: Callable[[], Tree]
    assign: Callable[..., Tree]
    _name: str
    _treedef: jax.tree_util.PyTreeDef
    _be_settled: Callable[[], None]
    _update_slices: Callable[[str, IndexedSlices], Tree]
    _get: Callable[[], list[jax.Array]]
    _put: Callable[[list[jax.Array]], None]

    def sparse_read(self, indices: Leaf, name: str | None = None) -> jax.Array:
        """Returns the rows at `indices`, integers: an array `[*indices.shape, *shape[1:]]`.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4], [5, 6]]).sparse_read([2, 0]).tolist()
        [[5, 6], [1, 2]]
        """
        self._require_array("sparse_read")
        return jnp.take(self.value(), jnp.asarray(indices), axis=0)

    def gather_nd(self, indices: Leaf, name: str | None = None) -> Leaf:
        """Returns the elements or slices at `indices`, whose last dimension counts through the first ones.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).gather_nd([[0, 1], [1, 0]]).tolist()
        [2, 3]
        """
        self._require_array("gather_nd")
        return self.value()[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]

    def _scatter(self, method: str, slices: IndexedSlices) -> Tree:
        self._check_slices(method, slices)
        self._be_settled()
        return self._update_slices(method, slices)

    def _scatter_here(self, method: str, slices: IndexedSlices) -> jax.Array:
        """Writes rows to the array of the current frame, and returns the new array."""
        indices, values = jnp.asarray(slices.indices), jnp.asarray(slices.values)
        with frames.lock:
            (old,) = self._get()
            new = SCATTER[method](old, indices, values)
            self._put([new])
        return new

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Adds rows to those at their indices.

        Args:
            sparse_delta: the rows, and their indices along axis 0. Rows at one index are all added.
            use_locking, name: accepted for compatibility.

        Returns:
            The new value.

        Raises:
            TypeError: `sparse_delta` is no `IndexedSlices`, or the variable holds a pytree.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_add(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [11, 2, 23]
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Subtracts rows from those at their indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_sub(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [-9, 2, -17]
        """
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Multiplies the rows at the indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_mul(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [10, 2, 60]
        """
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Divides the rows at the indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1.0, 2.0]).scatter_div(rx.IndexedSlices(jnp.array([4.0]), jnp.array([1]))).tolist()
        [1.0, 0.5]
        """
        return self._scatter("scatter_div", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Replaces the rows at the indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_update(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [10, 2, 20]
        """
        return self._scatter("scatter_update", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Replaces the rows at the indices by the larger of each two elements; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_max(rx.IndexedSlices(jnp.array([2, 2]), jnp.array([0, 2]))).tolist()
        [2, 2, 3]
        """
        return self._scatter("scatter_max", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Replaces the rows at the indices by the smaller of each two elements; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_min(rx.IndexedSlices(jnp.array([2, 2]), jnp.array([0, 2]))).tolist()
        [1, 2, 2]
        """
        return self._scatter("scatter_min", sparse_delta)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Tree:
        """Replaces elements along the last indexed axis, for each batch of indices.

        Args:
            sparse_delta: `indices` `[*batch, n]`, which count along the axis behind the batch's, and as many `values`.
            use_locking, name: accepted for compatibility.

        Returns:
            The new value.

        >>> import jax.numpy as jnp, replicax as rx
        >>> slices = rx.IndexedSlices(jnp.array([[10], [20]]), jnp.array([[1], [0]]))
        >>> rx.Variable([[1, 2], [3, 4]]).batch_scatter_update(slices).tolist()
        [[1, 10], [20, 4]]
        """
        self._check_slices("batch_scatter_update", sparse_delta)
        indices, values = jnp.asarray(sparse_delta.indices), jnp.asarray(sparse_delta.values)
        batch = jnp.indices(indices.shape)[:-1]
        return self.assign(self.value().at[(*batch, indices)].set(values))

    def _check_slices(self, method: str, slices: IndexedSlices) -> None:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {slices!r}")
        self._require_array(method)

    def _require_array(self, method: str) -> None:
        if self._treedef != ARRAY:
            raise TypeError(
                f"`{method}` is for variables of one array, and {self._name}:0 holds a pytree: {self._treedef}. Take "
                "the leaf of its value that you mean, and assign the changed pytree."
            )

    def _scatter_nd(self, indices: Leaf, updates: Leaf, method: str) -> Tree:
        self._require_array(f"scatter_nd_{method}")
        value = self.value()
        at = value.at[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]
        updates = array_conversion.own_array(updates, value.dtype)
        return self.assign(at.set(updates) if method == "update" else at.add(updates if method == "add" else -updates))

    def scatter_nd_add(self, indices: Leaf, updates: Leaf, name: str | None = None) -> Tree:
        """Adds to the elements or slices at `indices`, whose last dimension counts through the first ones.

        Args:
            indices: `[..., k]` integers, of the first `k` axes.
            updates: `[..., *shape[k:]]`.

        Returns:
            The new value.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).scatter_nd_add([[0, 1], [1, 0]], [10, 20]).tolist()
        [[1, 12], [23, 4]]
        """
        return self._scatter_nd(indices, updates, "add")

    def scatter_nd_sub(self, indices: Leaf, updates: Leaf, name: str | None = None) -> Tree:
        """Subtracts from the elements or slices at `indices`; see `scatter_nd_add`.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).scatter_nd_sub([[0, 1], [1, 0]], [10, 20]).tolist()
        [[1, -8], [-17, 4]]
        """
        return self._scatter_nd(indices, updates, "sub")

    def scatter_nd_update(self, indices: Leaf, updates: Leaf, name: str | None = None) -> Tree:
        """Replaces the elements or slices at `indices`; see `scatter_nd_add`.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).scatter_nd_update([[0, 1], [1, 0]], [10, 20]).tolist()
        [[1, 10], [20, 4]]
        """
        return self._scatter_nd(indices, updates, "update")
