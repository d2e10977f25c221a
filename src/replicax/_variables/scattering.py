"""Reading and writing parts of variables: rows, elements and slices at given indices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Leaf, Tree
from replicax._tracing import frames
from replicax._variables.as_leaves import ARRAY, convert_dtype
from replicax._variables.combine import check_arithmetic


def _divide(array: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Divide rows of an array; integers as in C, one row after the other, since a product may be too large."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array.at[indices].divide(rows)
    rows = jnp.broadcast_to(rows, (*indices.shape, *array.shape[1:]))

    def divide_row(array: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, divisor = row
        return array.at[index].set(lax.div(array[index], divisor)), None

    return lax.scan(divide_row, array, (indices.reshape(-1), rows.reshape(-1, *array.shape[1:])))[0]


SCATTER: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "scatter_add": lambda x, i, u: x.at[i].add(u),
    "scatter_sub": lambda x, i, u: x.at[i].add(-u),
    "scatter_mul": lambda x, i, u: x.at[i].multiply(u),
    "scatter_div": _divide,
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
    _types: list[jax.ShapeDtypeStruct]
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
        places = _as_indices("sparse_read", indices, self._types[0].shape, nd=False)
        return jnp.take(self.value(), places, axis=0, mode="fill", fill_value=0)

    def gather_nd(self, indices: Leaf, name: str | None = None) -> Leaf:
        """Returns the elements or slices at `indices`, whose last dimension counts through the first ones.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).gather_nd([[0, 1], [1, 0]]).tolist()
        [2, 3]
        """
        self._require_array("gather_nd")
        places = _as_indices("gather_nd", indices, self._types[0].shape, nd=True)
        return self.value().at[tuple(jnp.moveaxis(places, -1, 0))].get(mode="fill", fill_value=0)

    def _scatter(self, method: str, slices: IndexedSlices) -> Tree:
        slices = self._convert_slices(method, slices)
        self._be_settled()
        return self._update_slices(method, slices)

    def _convert_slices(self, method: str, slices: IndexedSlices) -> IndexedSlices:
        """Return rows of the variable's dtype; raise for rows that do not fit, before any is written."""
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {slices!r}")
        self._require_array(method)
        kind = self._types[0]
        values = convert_dtype(slices.values, kind.dtype)
        check_arithmetic(method, kind.dtype, self._name)
        indices = _as_indices(method, slices.indices, kind.shape, nd=False)
        if values.shape not in ((), (*indices.shape, *kind.shape[1:])):
            raise InvalidArgumentError(
                f"{method} of {self._name}:0: Must have updates.shape = indices.shape + params.shape[1:] or "
                f"updates.shape = [], got updates.shape {values.shape}, indices.shape {indices.shape}, params.shape "
                f"{kind.shape}"
            )
        if method == "scatter_div" and not isinstance(values, jax.core.Tracer) and not np.all(np.asarray(values)):
            raise InvalidArgumentError(f"{method} of {self._name}:0: updates must not contain 0, got {values}")
        return IndexedSlices(values, indices, slices.dense_shape)

    def _scatter_here(self, method: str, slices: IndexedSlices) -> jax.Array:
        """Writes rows to the array of the current frame, and returns the new array."""
        with frames.lock:
            (old,) = self._get()
            new = SCATTER[method](old, slices.indices, slices.values)
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
            ValueError: rows of another dtype.
            InvalidArgumentError: rows of another shape, or, except in compiled code, an index out of range.

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
        """Divides the rows at the indices, integers towards zero; see `scatter_add`.

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
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {sparse_delta!r}")
        self._require_array("batch_scatter_update")
        values = convert_dtype(sparse_delta.values, self._types[0].dtype)
        indices = jnp.asarray(sparse_delta.indices)
        batch = jnp.indices(indices.shape)[:-1]
        return self.scatter_nd_update(jnp.stack([*batch.astype(indices.dtype), indices], -1), values)

    def _require_array(self, method: str) -> None:
        if self._treedef != ARRAY:
            raise TypeError(
                f"`{method}` is for variables of one array, and {self._name}:0 holds a pytree: {self._treedef}. Take "
                "the leaf of its value that you mean, and assign the changed pytree."
            )

    def _scatter_nd(self, indices: Leaf, updates: Leaf, method: str) -> Tree:
        name = f"scatter_nd_{method}"
        self._require_array(name)
        kind = self._types[0]
        updates = convert_dtype(updates, kind.dtype)
        check_arithmetic(name, kind.dtype, self._name)
        places = _as_indices(name, indices, kind.shape, nd=True)
        expected = (*places.shape[:-1], *kind.shape[places.shape[-1] :])
        if updates.shape != expected:
            raise InvalidArgumentError(
                f"{name} of {self._name}:0: updates must have shape {expected}, that is indices.shape[:-1] + "
                f"params_shape[indices.shape[-1]:], got {updates.shape}"
            )
        at = self.value().at[tuple(jnp.moveaxis(places, -1, 0))]
        new = at.set(updates) if method == "update" else at.add(updates if method == "add" else -updates)
        return self._assign_parts(name, new)

    def _assign_parts(self, method: str, value: jax.Array) -> Tree:
        """Assign a value of which only some parts differ from the value here."""
        return self.assign(value)

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


def _as_indices(method: str, indices: Leaf, shape: tuple[int, ...], nd: bool) -> jax.Array:
    """Return indices of rows of an array of this shape, or with `nd` of its elements or slices, as an array.

    Raises:
        InvalidArgumentError: they are no integers, have too many dimensions, or one is out of range. Compiled code
            does not know them: it writes nothing for an index that is too large, and reads 0.
    """
    places = jnp.asarray(indices)
    if not jnp.issubdtype(places.dtype, jnp.integer):
        raise InvalidArgumentError(f"{method}: indices must be integers, got dtype {places.dtype}")
    depth = (places.shape[-1] if places.ndim else 0) if nd else 1
    if depth > len(shape) or (nd and not places.ndim):
        raise InvalidArgumentError(f"{method}: indices of shape {places.shape} do not fit a variable of shape {shape}")
    if not isinstance(places, jax.core.Tracer):
        numbers = np.asarray(places)
        wrong = numbers[(numbers < 0) | (numbers >= (np.array(shape[:depth], np.int64) if nd else shape[0]))]
        if wrong.size:
            raise InvalidArgumentError(f"{method}: indices[...] = {wrong[0]} is not in a variable of shape {shape}")
    return places
