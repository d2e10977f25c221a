"""Elements on the host: structures of numpy arrays, how they are made, stacked, joined, cut and padded."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import frontend, jax_internals
from replicax._base.devices import default_device
from replicax._base.errors import InvalidArgumentError
from replicax._base.host_memory import LARGE, Pool, is_settled, settle
from replicax._base.specs import PYTHON_DTYPES, TensorShape
from replicax._base.thread_state import has_64_bit_types
from replicax._base.types import Leaf, Tree
from replicax._data import composites


def tensor_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that `as_tensor` gives to an array of `dtype`."""
    return dtype if dtype == np.dtype(object) or has_64_bit_types() else jax.dtypes.canonicalize_dtype(dtype)


class Strings(np.ndarray):
    """A numpy array of bytes objects with the methods of a tensor: JAX has no arrays of strings."""

    @property  # type: ignore[misc]
    def shape(self) -> TensorShape:  # type: ignore[override, misc]
        """The shape."""
        return TensorShape(np.ndarray.shape.__get__(self))  # type: ignore[attr-defined]

    def get_shape(self) -> TensorShape:
        """Returns the shape."""
        return self.shape

    def set_shape(self, shape: Tree) -> None:
        """Does nothing: the shape is known. Raises ValueError where it is another one."""
        self.shape.assert_is_compatible_with(shape)

    def numpy(self) -> np.ndarray | bytes:
        """Returns a copy as a plain numpy array; bytes, where it is a single string."""
        return np.array(self)[()]

    def __getitem__(self, key: Any) -> Strings:
        return as_strings(np.asarray(self)[key])

    def __iter__(self) -> Iterator[Strings]:
        return map(as_strings, np.asarray(self))

    def __add__(self, other: Any) -> Strings:  # type: ignore[override]
        return as_strings(np.add(np.asarray(self), _encoded(other)))

    def __radd__(self, other: Any) -> Strings:
        return as_strings(np.add(_encoded(other), np.asarray(self)))

    __iadd__ = __add__  # type: ignore[misc, assignment]  # a new one: tensors do not change

    def __eq__(self, other: object) -> Any:
        if composites.is_composite(other):
            return NotImplemented
        return np.equal(np.asarray(self), _encoded(other))

    def __ne__(self, other: object) -> Any:
        if composites.is_composite(other):
            return NotImplemented
        return np.not_equal(np.asarray(self), _encoded(other))

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return frontend.current.array_str(np.asarray(self))

    def __repr__(self) -> str:
        return frontend.current.array_repr(np.asarray(self))


class Probe(bytes):
    """The empty string of an element that shows specs alone: what parses it makes up values.

    Attributes:
        size: how many values it makes up where their number is not known; another one in each of several elements.
    """

    size = 0

    @classmethod
    def of_size(cls, size: int) -> Probe:
        """Returns one of a size."""
        probe = cls()
        probe.size = size
        return probe


def as_strings(value: bytes | np.ndarray) -> Strings:
    """Returns bytes, or a numpy array of them, as the strings that users see."""
    if not isinstance(value, np.ndarray):
        value = np.array(value, object)
    return value.view(Strings)


def _encoded(value: object) -> np.ndarray:
    return value if isinstance(value, np.ndarray) and value.dtype == np.dtype(object) else np.asarray(as_host(value))


class Nested:
    """The base class of what may be a leaf of an element in place of an array: datasets."""

    _stays_in_process = True  # see `by_value.py`

    def _leaf_spec(self) -> Tree:
        """Returns the spec of this leaf."""
        raise NotImplementedError


def as_tensor(array: Leaf) -> Leaf:
    """Returns a host array as users see it: a JAX array, 64 bits wide where JAX allows that. Strings stay numpy's."""
    if isinstance(array, Nested):
        return array
    if array.dtype == np.dtype(object):
        return as_strings(array)
    array = array if is_settled(array) else array.copy()  # JAX may share the memory
    return jnp.asarray(array, dtype=tensor_dtype(array.dtype))


def tensors_of(element: Tree) -> Tree:
    """Returns an element on the host as users see it, see `as_tensor`."""
    if not jax_internals.is_eager(jax_internals.current_trace()):
        return jax.tree.map(as_tensor, element)
    put = jax_internals.from_host_to(default_device())
    dtypes: dict[np.dtype, np.dtype] = {}

    def tensor(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
            return as_tensor(leaf)
        dtype = dtypes.get(leaf.dtype) or dtypes.setdefault(leaf.dtype, tensor_dtype(leaf.dtype))
        # To find out whether a small array is settled takes as long as to copy it.
        array = leaf if leaf.nbytes >= LARGE and dtype == leaf.dtype and is_settled(leaf) else leaf.astype(dtype)
        return put(array.shape, dtype, lambda _: array, dtype.itemsize >= 8)

    with jax.transfer_guard_host_to_device("allow"):  # as for `jax.device_put`, since a dataset is asked for it
        return jax.tree.map(tensor, element)


def as_host(value: Leaf) -> Leaf:
    """Returns an array, number, string, nested list of those, or another library's tensor as a numpy array.

    Python's numbers get the dtypes of tensors (int32, float32), strings become bytes in an array of objects, and arrays
    in a foreign byte order are copied to this machine's, since JAX takes no others.
    """
    if isinstance(value, Nested):
        return value
    if isinstance(value, Strings):
        return np.asarray(value)
    if isinstance(value, np.ndarray):
        array = np.asarray(value)  # plain, where it is a tensor on the host
    elif hasattr(value, "detach"):  # PyTorch
        array = value.detach().cpu().numpy()
    elif callable(getattr(value, "numpy", None)):  # TensorFlow
        array = np.asarray(value.numpy())
    else:
        array = as_numpy(value)
        array = array.astype(_python_dtype(value, array), copy=False)
    if array.dtype.kind == "S":
        return array.astype(object)
    if array.dtype.kind in "OU":
        return _bytes(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_numpy(value: Tree) -> np.ndarray:
    """Returns a value, or a nested list, as a numpy array: strings as objects, since numpy's own lose zeros at the end.

    >>> as_numpy([b"a", b"b\\0"])
    array([b'a', b'b\\x00'], dtype=object)
    """
    array = np.asarray(value)
    return np.asarray(value, object) if array.dtype.kind in "SU" and not isinstance(value, np.ndarray) else array


_NARROW = {"i": np.dtype(np.int32), "f": np.dtype(np.float32), "c": np.dtype(np.complex64)}


def _python_dtype(value: object, array: np.ndarray) -> np.dtype:
    """Returns the dtype for `value`, which became `array`: a tensor's where it is made of Python's numbers."""
    while isinstance(value, (list, tuple)) and len(value):
        value = value[0]
    if isinstance(value, np.generic) or not isinstance(value, (list, tuple, *PYTHON_DTYPES)):
        return array.dtype
    narrow = _NARROW.get(array.dtype.kind, array.dtype)
    # An integer that does not fit stays wide, rather than becoming another one.
    return narrow if narrow != np.int32 or (array.astype(np.int32) == array).all() else array.dtype


def _bytes(array: np.ndarray) -> np.ndarray:
    flat = [v.encode() if isinstance(v, str) else v for v in array.ravel()]
    for v in flat:
        if not isinstance(v, bytes):
            raise TypeError(
                f"Elements of a dataset are made of arrays, numbers and strings, got {type(v).__name__}: {v!r:.80}. "
                "Convert it to an array first."
            )
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(array.shape)


def host_structure(value: Tree) -> Tree:
    """Returns `value` with every leaf as a numpy array. As in tf.data a list is one tensor, not a structure."""
    return jax.tree.map(as_host, value, is_leaf=lambda v: isinstance(v, list))


class Structure(Protocol):
    """The structure of a pytree. (JAX's class for it, `PyTreeDef`, has no type annotations.)"""

    num_leaves: int

    def unflatten(self, leaves: Iterable[Leaf], /) -> Tree:
        """Returns a pytree of this structure."""

    def flatten_up_to(self, tree: Tree, /) -> list[Tree]:
        """Returns what stands in `tree` in the places of the leaves."""


def flatten(tree: Tree) -> tuple[list[Leaf], Structure]:
    """Returns the leaves and the structure of a pytree."""
    return jax.tree.flatten(tree)


def structure_of(tree: Tree) -> Structure:
    """Returns the structure of a pytree."""
    return flatten(tree)[1]


def num_rows(block: Tree) -> int:
    """Returns the number of rows of a batch."""
    found = composites.row_count(composites.leaves(block)[0])
    assert found is not None
    return found


def regroup(blocks: Iterable[Tree], sizes: Iterable[int]) -> Iterator[Tree]:
    """Yields the rows of blocks in pieces of the given `sizes` (endless), in order; the last piece may be shorter.

    >>> [piece.tolist() for piece in regroup([np.arange(4), np.arange(4, 6)], itertools.cycle([3, 1]))]
    [[0, 1, 2], [3], [4, 5]]
    """
    sizes = iter(sizes)
    size, pending, count = next(sizes), [], 0
    for block in blocks:
        pending.append(block)
        count += num_rows(block)
        if count < size:
            continue
        whole, start = _joined_batches(pending), 0
        while count - start >= size:
            yield rows_between(whole, start, start + size)
            start += size
            size = next(sizes)
        count -= start
        pending = [rows_between(whole, start, None)] if count else []
    if count:
        yield _joined_batches(pending)


def rows_between(batch: Tree, start: int, stop: int | None) -> Tree:
    """Returns the rows of a batch from `start` up to `stop`."""
    return composites.on_rows(lambda leaf: composites.rows_between(leaf, start, stop), batch)


def _joined_batches(batches: list[Tree]) -> Tree:
    if not composites.has_composites(batches[0]):
        return joined(batches)
    return composites.on_rows(composites.joined, *batches)


def cut(block: Tree, start: int, stop: int | None) -> Tree:
    """Returns elements of a block. (A batch is cut by `rows_between`.)"""
    return jax.tree.map(lambda a: a[start:stop], block)


def joined(blocks: list[Tree], pool: Pool | None = None) -> Tree:
    """Returns the elements of several blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    try:
        return jax.tree.map(lambda *arrays: _joined(list(arrays), pool), *blocks)
    except ValueError as e:
        shapes = [jax.tree.map(np.shape, block) for block in blocks[:4]]
        raise InvalidArgumentError(f"Batches of shapes {shapes} cannot be joined and rebatched: {e}") from e


def stack(elements: list[Tree], pool: Pool | None = None) -> Tree:
    """Returns elements as the rows of arrays; large ones are of the pool, and settled."""
    if type(first := elements[0]) is np.ndarray:
        if not first.ndim and first.dtype.hasobject:
            return _stacked_strings(elements)
        if all(type(e) is np.ndarray and e.dtype == first.dtype and e.shape == first.shape for e in elements):
            return _stacked(elements, pool)
    if composites.has_composites(elements[0]):
        return composites.on_rows(composites.stacked, *elements)
    if (columns := _columns(elements)) is None:
        columns = list(zip(*(flatten(element)[0] for element in elements)))
    for number, arrays in enumerate(columns):
        composites.check_shapes(arrays, f" in component {number}")
    return structure_of(elements[0]).unflatten([_stacked(arrays, pool) for arrays in columns])


def _columns(elements: Sequence[Tree]) -> list[Sequence[np.ndarray]] | None:
    """Returns the leaves of elements, those of each place together, where all are alike in dicts and tuples of arrays.

    To flatten each of them takes several times as long. None where they are not alike, or have other parts.
    """
    kinds = set(map(type, elements))
    kind = kinds.pop()
    if kinds or kind not in (np.ndarray, dict, tuple):
        return None
    if kind is np.ndarray:
        return [elements]
    if len(set(map(len, elements))) > 1 or len(first := elements[0]) < 2:
        return None
    if kind is dict:
        if not all(type(key) is str for key in first):
            return None
        try:
            elements = list(map(operator.itemgetter(*sorted(first)), elements))
        except KeyError:
            return None
    found: list[Sequence[np.ndarray]] = []
    for parts in zip(*elements):
        if (columns := _columns(parts)) is None:
            return None
        found += columns
    return found


def _stacked(arrays: Sequence[np.ndarray], pool: Pool | None) -> np.ndarray:
    """Returns arrays of one shape as the rows of one."""
    first = arrays[0]
    if first.dtype.hasobject:
        return _stacked_strings(arrays)
    if (found := _room(arrays, (len(arrays), *first.shape), pool)) is None:
        return np.array(arrays)  # `np.stack` takes longer, since it makes views of them
    for number, array in enumerate(arrays):
        found[number] = array
    return settle(found)


def _stacked_strings(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if arrays[0].ndim:
        return np.stack(arrays)
    strings = np.empty(len(arrays), object)  # numpy takes longer for arrays of objects
    strings[:] = [array[()] for array in arrays]
    return strings


def _joined(arrays: list[np.ndarray], pool: Pool | None) -> np.ndarray:
    """Returns the rows of arrays as one."""
    rows = sum(len(array) for array in arrays)
    found = _room(arrays, (rows, *arrays[0].shape[1:]), pool)
    return np.concatenate(arrays) if found is None else settle(np.concatenate(arrays, out=found))


def _room(arrays: Sequence[np.ndarray], shape: tuple[int, ...], pool: Pool | None) -> np.ndarray | None:
    """Returns an array of the pool for all of them; None where they are small, or have several dtypes."""
    first = arrays[0]
    if pool is None or first.dtype.hasobject or sum(array.nbytes for array in arrays) < LARGE:
        return None
    return pool.empty(shape, first.dtype) if all(array.dtype == first.dtype for array in arrays) else None


def read_only(array: np.ndarray) -> np.ndarray:
    """Returns a view that cannot be written: elements are views of the source, and must not be a way to change it."""
    view = array.view()
    view.flags.writeable = False
    return view


def grouped(elements: Iterator[Tree], size: int, drop_remainder: bool) -> Iterator[list[Tree]]:
    """Returns an iterator over lists of `size` elements. An error of `elements` does not end it."""
    groups = iter(lambda: list(itertools.islice(elements, size)), [])
    return (filter(lambda group: len(group) == size, groups)) if drop_remainder else groups


def positive(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r:.80}.") from None
    if number < 1:
        raise InvalidArgumentError(f"{name} must be greater than zero, got {value}.")
    return number


def padded_shape(shape: Tree) -> TensorShape:
    return TensorShape([None if d is None or d == -1 else d for d in np.atleast_1d(np.array(shape, object))])


def pad_and_stack(elements: list[Tree], shapes: Tree, values: Tree) -> Tree:
    leaves, structures = zip(*map(flatten, elements))
    structure, count = structures[0], len(leaves[0])
    all_shapes = [None] * count if shapes is None else [padded_shape(s) for s in structure.flatten_up_to(shapes)]
    one_value = values is None or jax.tree.structure(values) != structure
    all_values = [values] * count if one_value else jax.tree.leaves(values)
    columns = [list(column) for column in zip(*leaves)]
    return structure.unflatten(list(map(_pad_column, columns, all_shapes, all_values)))


def _pad_column(arrays: list[np.ndarray], shape: TensorShape | None, value: Tree) -> np.ndarray:
    longest = [max(sizes) for sizes in zip(*(a.shape for a in arrays))]
    if shape is not None:
        if len(shape) != len(longest):
            raise ValueError(
                f"The padded shape {shape} is not compatible with the shape {arrays[0].shape} of the corresponding "
                "input component."
            )
        longest = [n if wanted is None else wanted for n, wanted in zip(longest, shape)]
    if value is None:
        value = b"" if arrays[0].dtype == np.dtype(object) else 0
    value = as_host(value)
    if not np.can_cast(value.dtype, arrays[0].dtype, "same_kind"):
        raise TypeError(f"`padding_values` has {value} of {value.dtype} for a component of {arrays[0].dtype}.")
    out = np.full((len(arrays), *longest), value, arrays[0].dtype)
    for row, array in zip(out, arrays) if longest else ():
        if any(n > room for n, room in zip(array.shape, row.shape)):
            raise InvalidArgumentError(
                f"Attempted to pad to a smaller size than the input element: shape {array.shape} to {row.shape}."
            )
        row[tuple(map(slice, array.shape))] = array
    return out if longest else np.stack(arrays)
