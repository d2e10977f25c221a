"""Part of `Dataset`: sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax._data.core import Base, made
from replicax._data.elements import as_host, host_structure, num_rows, read_only
from replicax._data.rows import fetch_from, plain_rows
from replicax._data.specs import UNKNOWN_CARDINALITY, first_spec, without_batch
from replicax._errors import InvalidArgumentError
from replicax._specs import TensorSpec, as_dtype, dtype_name, spec_of

if TYPE_CHECKING:
    from replicax._data import Dataset


class Sources(Base):
    """Methods of `Dataset`."""

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """A dataset of one element."""
        element = jax.tree.map(read_only, host_structure(tensors))
        spec = spec_of(element)
        return made(lambda: iter([element]), lambda probe: spec, 1)

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """A dataset of the rows of arrays: element i has row i of each.

        The arrays are not copied: do not change them while the dataset is in use.

        >>> from replicax.data import Dataset
        >>> list(Dataset.from_tensor_slices(np.arange(3, dtype=np.int32)).as_numpy_iterator())
        [np.int32(0), np.int32(1), np.int32(2)]
        """
        arrays = jax.tree.map(read_only, host_structure(tensors))
        shapes = {
            f"tensors{jax.tree_util.keystr(path)}": a.shape for path, a in jax.tree_util.tree_leaves_with_path(arrays)
        }
        if not shapes:
            raise InvalidArgumentError(f"from_tensor_slices needs at least one array, got {tensors!r}.")
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            found = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
            raise InvalidArgumentError(
                f"from_tensor_slices needs arrays with one and the same first dimension, got {found}."
            )
        count = num_rows(arrays)
        spec = without_batch(spec_of(arrays))
        rows = plain_rows(fetch_from(arrays), count)
        return made(rows.elements, lambda probe: spec, count, rows=rows)

    @staticmethod
    def range(*args: int, output_type: Any = np.int64, name: str | None = None) -> Dataset:
        """The numbers of Python's `range` with the same arguments, as int64.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(2, 8, 3).as_numpy_iterator())
        [np.int64(2), np.int64(5)]
        """
        numbers, dtype = range(*map(int, args)), as_dtype(output_type)
        start, step = numbers.start, numbers.step
        rows = plain_rows(lambda i: np.asarray(start + step * np.asarray(i, np.int64)).astype(dtype), len(numbers))
        return made(rows.elements, lambda probe: TensorSpec((), dtype), len(numbers), rows=rows)

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Iterable[Any] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements that `generator(*args)` yields; it is called anew for each pass.

        Args:
            generator: a function that returns something iterable.
            output_types: the elements' dtypes, in their structure.
            output_shapes: their shapes, in the same structure; None where not known.
            args: arguments for `generator`.
            output_signature: `TensorSpec`s in the structure of the elements, in place of the two. Without any of
                these, elements are taken as they come.

        Raises:
            TypeError: `generator` is not callable, or (at iteration) yielded something else than was declared.
        """
        if not callable(generator):
            raise TypeError(
                f"`generator` must be callable, so that each pass can start anew; got {type(generator).__name__}. "
                "Pass the generator function itself, or `lambda: ...`."
            )
        if output_signature is not None and (output_types is not None or output_shapes is not None):
            raise TypeError(
                "The `output_types` and `output_shapes` arguments are ignored with `output_signature`: drop them."
            )
        spec = output_signature
        if output_types is not None:
            structure: Any = jax.tree.structure(output_types)
            shapes = [None] * structure.num_leaves if output_shapes is None else structure.flatten_up_to(output_shapes)
            spec = structure.unflatten(list(map(TensorSpec, shapes, jax.tree.leaves(output_types))))
        arguments = tuple(args or ())

        def make() -> Iterator[Any]:
            for value in generator(*arguments):
                yield host_structure(value) if spec is None else _checked(value, spec)

        def find(probe: bool) -> Any:
            return first_spec(make) if spec is None and probe else spec

        return made(make, find, UNKNOWN_CARDINALITY)


def _checked(value: Any, spec: Any) -> Any:
    """What a generator yielded, as arrays of the declared dtypes and shapes."""
    structure: Any = jax.tree.structure(spec)
    try:
        leaves = structure.flatten_up_to(value)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that did not match the expected structure. "
            f"The expected structure was {spec}, but the yielded element was {value!r}."
        ) from e
    return structure.unflatten([_checked_leaf(leaf, s) for leaf, s in zip(leaves, jax.tree.leaves(spec))])


def _checked_leaf(value: Any, spec: TensorSpec) -> np.ndarray:
    try:
        array = as_host(value)
        array = array if array.dtype == spec.dtype else array.astype(spec.dtype)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that could not be converted to the expected type. "
            f"The expected type was {dtype_name(spec.dtype)}, but the yielded element was {value!r}."
        ) from e
    if not spec.shape.is_compatible_with(array.shape):
        raise TypeError(
            f"`generator` yielded an element of shape {array.shape} where an element of shape {spec.shape} was "
            "expected."
        )
    return array
