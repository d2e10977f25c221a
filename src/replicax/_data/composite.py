"""Part of `Dataset`: batches of elements of different shapes, ragged or sparse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from replicax._data.core import Base, made
from replicax._data.elements import flatten, grouped, positive
from replicax._data.reading import Maker, Reading
from replicax._data.specs import batch_count, with_batch
from replicax._errors import DataLossError, InvalidArgumentError
from replicax._ragged import RaggedTensor, ragged
from replicax._specs import TensorShape, TensorSpec, as_dtype


class Composites(Base):
    """Methods of `Dataset`."""

    def ragged_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        row_splits_dtype: Any = np.int64,
        name: str | None = None,
    ) -> Self:
        """Like `batch` for elements of different shapes: these become a `RaggedTensor`, without padding.

        An array whose shape is known stays one. What is ragged cannot be cut into rows any more, as `unbatch` and
        strategies of several replicas do: make it dense before, `map(lambda batch: batch.to_tensor())`.

        Args:
            batch_size: how many elements a batch has.
            drop_remainder: whether to drop a last, smaller batch.
            row_splits_dtype: that of the row splits, int32 or int64.
            name: accepted for compatibility.

        Raises:
            InvalidArgumentError: `batch_size` is not positive; at iteration, if elements differ in rank.

        >>> from replicax.data import Dataset
        >>> rows = Dataset.range(4).map(lambda n: np.arange(int(n), dtype=np.int32))
        >>> [batch.to_list() for batch in rows.ragged_batch(2)]
        [[[], [0]], [[0, 1], [0, 1, 2]]]
        """
        size, splits = positive("batch_size", batch_size), np.dtype(as_dtype(row_splits_dtype))

        def make(reading: Reading, start: int = 0, /) -> Iterator[Any]:
            specs = jax.tree.leaves(self._spec(True))
            for elements in grouped(self._make(reading, start * size), size, drop_remainder):
                leaves, structures = zip(*map(flatten, elements))
                columns = [_column(list(arrays), s.shape, splits) for arrays, s in zip(zip(*leaves), specs)]
                yield structures[0].unflatten(columns)

        def batched(s: TensorSpec) -> Any:
            return s if s.shape.is_fully_defined() else _ragged_spec(s, splits)

        def spec(found: Any) -> Any:
            return _with_rows(jax.tree.map(batched, found), size if drop_remainder else None)

        def first(make: Maker, found: Any) -> Any:
            """What a function made of zeros may have a known shape, which that of each element is not."""
            for element in make(Reading(probing=True)):
                leaves, structure = flatten(found)
                parts = structure.flatten_up_to(element)
                seen = [_seen(part, s) for part, s in zip(parts, leaves)]
                return structure.unflatten(seen)
            return found

        def find(probe: bool) -> Any:
            known = self._spec(False)
            found = self._spec(probe)
            return found if found is None else spec(found if known is not None else first(make, found))

        return made(
            make,
            find,
            batch_count(self._cardinality, size, drop_remainder),
            batch_size=size,
            options=self._options,
            files=self._files,
            nodes=self._nodes,
        )

    def sparse_batch(self, batch_size: int, row_shape: Any, name: str | None = None) -> Self:
        """Like `batch` for elements of different shapes: a batch is a sparse array, `jax.experimental.sparse.BCOO`.

        Each element stands in the lower corner of a row of `row_shape`; the rest is not stored.

        Args:
            batch_size: how many elements a batch has; the last one may have less.
            row_shape: the shape of a row, which no element may exceed.
            name: accepted for compatibility.

        Raises:
            TypeError: an element is not one array.
            DataLossError: at iteration, where an element is larger than a row.
            InvalidArgumentError: at iteration, where it has another rank.

        >>> from replicax.data import Dataset
        >>> rows = Dataset.range(1, 4).map(lambda n: np.full(int(n), 7, np.int32))
        >>> next(iter(rows.sparse_batch(2, [3]))).todense().tolist()
        [[7, 0, 0], [7, 7, 0]]
        """
        size = positive("batch_size", batch_size)
        shape: Any = tuple(TensorShape(row_shape).as_list())
        found = self._spec(False)
        if found is not None and not isinstance(found, TensorSpec):
            raise TypeError(
                f"`sparse_batch` requires an input dataset whose elements have a single component, but they are {found}"
            )
        if None in shape:
            raise ValueError(f"`row_shape` needs known dimensions, got {list(shape)}.")

        def make(reading: Reading, start: int = 0, /) -> Iterator[Any]:
            for elements in grouped(self._make(reading, start * size), size, drop_remainder=False):
                yield _sparse(elements, shape)

        def spec(found: Any) -> Any:
            indices = TensorSpec((None, 1 + len(shape)), np.int32)
            return _bcoo(TensorSpec((None,), found.dtype), indices, (None, *shape))

        return self._derived(make, batch_count(self._cardinality, size, False), spec, batch_size=size)


def _column(arrays: list[np.ndarray], shape: TensorShape, splits: Any) -> Any:
    ranks = {a.ndim for a in arrays}
    if len(ranks) > 1:
        raise InvalidArgumentError(
            f"Cannot batch tensors of different ranks, got shapes {[list(a.shape) for a in arrays]}."
        )
    (rank,) = ranks
    known = list(shape) if shape.rank == rank else [None] * rank
    differ = [i for i in range(rank) if known[i] is None or any(a.shape[i] != known[i] for a in arrays)]
    if not differ:
        return np.stack(arrays)
    inner = arrays[0].shape[differ[-1] + 1 :]
    return ragged(arrays, differ[-1] + 1, splits, arrays[0].dtype, inner)


def _ragged_spec(s: TensorSpec, splits: Any) -> Any:
    """The spec of a batch's RaggedTensor: the spec of each of its arrays."""
    if s.shape.rank is None:
        raise ValueError("ragged_batch needs elements of a known rank.")
    dims = list(s.shape)
    last = max(i for i, d in enumerate(dims) if d is None)
    part: Any = TensorSpec((None, *dims[last + 1 :]), s.dtype)
    for _ in range(last + 1):
        part = RaggedTensor(part, TensorSpec((None,), splits))
    return part


def _seen(part: Any, s: TensorSpec) -> TensorSpec:
    """The spec of elements of which `part` is a batch, ragged where that is."""
    if not isinstance(part, RaggedTensor):
        return s
    return TensorSpec([None] * part.ragged_rank + list(part.flat_values.shape[1:]), s.dtype)


def _with_rows(spec: Any, size: int | None) -> Any:
    """The spec of batches: RaggedTensors are those of batches already."""

    def grow(s: Any) -> Any:
        if isinstance(s, RaggedTensor):
            splits = TensorSpec((None if size is None else size + 1,), s.row_splits.dtype)
            return RaggedTensor(s.values, splits)
        return with_batch(s, size)

    return jax.tree.map(grow, spec, is_leaf=lambda s: isinstance(s, RaggedTensor))


def _bcoo(data: Any, indices: Any, shape: tuple[Any, ...]) -> Any:
    """A BCOO of host arrays or of specs, which its constructor would make JAX arrays of."""
    from jax.experimental.sparse import BCOO

    empty = BCOO((jnp.zeros(0), jnp.zeros((0, 1), jnp.int32)), shape=(1,))
    aux: Any = {**empty.tree_flatten()[1], "shape": shape}
    return BCOO.tree_unflatten(aux, (data, indices))


def _sparse(arrays: list[Any], shape: tuple[int, ...]) -> Any:
    places = []
    for row, array in enumerate(arrays):
        if not isinstance(array, np.ndarray):
            raise TypeError(
                "`sparse_batch` requires an input dataset whose elements have a single component, got "
                f"{jax.tree.map(np.shape, array)}"
            )
        if array.ndim != len(shape):
            raise InvalidArgumentError(
                f"Input element had shape ({list(array.shape)}) that is incompatible with the row shape "
                f"({list(shape)})."
            )
        if any(n > room for n, room in zip(array.shape, shape)):
            raise DataLossError(
                f"Input element had shape ({list(array.shape)}) that is larger than the row shape ({list(shape)})."
            )
        inside = np.indices(array.shape, np.int32).reshape(array.ndim, array.size).T
        places.append(np.concatenate([np.full((array.size, 1), row, np.int32), inside], axis=1))
    data = np.concatenate([array.ravel() for array in arrays])
    return _bcoo(data, np.concatenate(places), (len(arrays), *shape))
