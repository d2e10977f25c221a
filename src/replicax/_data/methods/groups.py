"""The methods of `Dataset` whose elements go together, or are left out for what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorShape
from replicax._base.types import Leaf, Tree
from replicax._data.base import Base
from replicax._data.calls import call_user
from replicax._data.elements import flatten, padded_shape, positive
from replicax._data.methods import batches
from replicax._data.nodes.group import Buckets, GroupByWindow, RejectionResample, Unique, Window, integer
from replicax._data.nodes.node import node_of
from replicax._data.reading import Seeds

D = TypeVar("D", bound=Base)


def window(
    self: D,
    size: int,
    shift: int | None = None,
    stride: int = 1,
    drop_remainder: bool = False,
    name: str | None = None,
) -> D:
    """Returns windows: datasets of `size` elements, each beginning `shift` elements after the one before.

    Where elements are structures, an element of the result is such a structure of datasets.

    Args:
        size: how many elements a window has; the last ones may have fewer.
        shift: how far it is from the beginning of a window to that of the next; by default, `size`.
        stride: how far it is between a window's elements.
        drop_remainder: whether to leave out windows with fewer.

    >>> from replicax.data import Dataset
    >>> pairs = Dataset.range(4).window(2, shift=1, drop_remainder=True)
    >>> list(pairs.flat_map(lambda window: window.batch(2)).as_numpy_iterator())
    [array([0, 1]), array([1, 2]), array([2, 3])]
    """
    size, stride = positive("Window size", size), positive("Window stride", stride)
    shift = size if shift is None else positive("Window shift", shift)
    return self._then(Window(self._node, size, shift, stride, drop_remainder, self._of_items))


def group_by_window(
    self: D,
    key_func: Callable[..., Tree],
    reduce_func: Callable[[Leaf, D], Base],
    window_size: int | None = None,
    window_size_func: Callable[[Tree], Tree] | None = None,
    name: str | None = None,
) -> D:
    """Returns the elements of the datasets that `reduce_func` makes of elements with the same key.

    Args:
        key_func: takes an element and returns its key, an integer.
        reduce_func: takes a key and a dataset of elements that have it, and returns a dataset.
        window_size: how many elements it gets at a time; in the end, those that are left.
        window_size_func: in place of that, takes a key and returns that number.

    Raises:
        ValueError: neither or both of the sizes are given.
        TypeError, InvalidArgumentError: at iteration, if a function returns something else than this, or a size
            is not positive.

    >>> from replicax.data import Dataset
    >>> parity = Dataset.range(5).group_by_window(lambda x: x % 2, lambda key, window: window.batch(5), 5)
    >>> list(parity.as_numpy_iterator())
    [array([0, 2, 4]), array([1, 3])]
    """
    if (window_size is None) == (window_size_func is None):
        raise ValueError("Give either `window_size` or `window_size_func`, and not both.")
    of_key = self._functions("group_by_window", "key_func", key_func, with_element=True)
    of_window = self._functions("group_by_window", "reduce_func", reduce_func)
    of_size = self._functions("group_by_window", "window_size_func", window_size_func or positive)

    def size_of(key: np.ndarray) -> Leaf:
        return window_size if window_size_func is None else int(of_size.call(key))

    return self._then(GroupByWindow(self._node, of_key, of_window, size_of, self._of_items))


def bucket_by_sequence_length(
    self: D,
    element_length_func: Callable[..., Tree],
    bucket_boundaries: Sequence[int],
    bucket_batch_sizes: Sequence[int],
    padded_shapes: Tree = None,
    padding_values: Tree = None,
    pad_to_bucket_boundary: bool = False,
    no_padding: bool = False,
    drop_remainder: bool = False,
    name: str | None = None,
) -> D:
    """Returns padded batches of elements of similar length.

    Args:
        element_length_func: takes an element and returns its length.
        bucket_boundaries: the lengths at which buckets begin, but for the first, which begins at 0.
        bucket_batch_sizes: how many elements of each bucket make a batch; one more than there are boundaries.
        padded_shapes, padding_values: see `padded_batch`.
        pad_to_bucket_boundary: whether to pad unknown dimensions to the greatest length of the bucket, and not of
            the batch. Then no element may be as long as the last boundary.
        no_padding: whether to stack elements as they are.
        drop_remainder: whether to leave out batches with fewer elements.

    Raises:
        ValueError: there is not one size for each bucket.
        InvalidArgumentError: at iteration, where an element is too long, or does not fit.

    >>> from replicax.data import Dataset
    >>> words = Dataset.range(1, 5).map(lambda n: np.arange(int(n), dtype=np.int32))
    >>> batches = words.bucket_by_sequence_length(lambda x: len(x), [3], [2, 2])
    >>> [batch.shape for batch in batches]
    [(2, 2), (2, 4)]
    """
    bounds, sizes = [int(n) for n in bucket_boundaries], [positive("Batch size", n) for n in bucket_batch_sizes]
    if len(sizes) != len(bounds) + 1:
        raise ValueError(
            f"`bucket_batch_sizes` needs one more number than `bucket_boundaries`, got {len(sizes)} and {len(bounds)}."
        )
    method = "bucket_by_sequence_length"
    role = f"`element_length_func` of `Dataset.{method}`"

    def bucket(*element: Tree) -> int:
        length = integer("element_length_func", call_user(role, element_length_func, *element))
        number = int(np.searchsorted(bounds, length, side="right"))
        if pad_to_bucket_boundary and number == len(bounds):
            raise InvalidArgumentError(
                f"With `pad_to_bucket_boundary` elements must be shorter than {max(bounds, default=0)}, the last "
                f"of `bucket_boundaries`, got length {length}."
            )
        return number

    def batch(key: Leaf, window: D) -> D:
        number = int(key)
        if no_padding:
            return batches.batch(window, sizes[number], drop_remainder)
        shapes = padded_shapes
        if pad_to_bucket_boundary:
            shapes = _filled_shapes(node_of(window).spec(True), padded_shapes, bounds[number] - 1)
        return batches.padded_batch(window, sizes[number], shapes, padding_values, drop_remainder)

    def batch_spec(spec: Tree) -> Tree:
        empty = self._of_items([], spec)
        made = batches.batch(empty, 1) if no_padding else batches.padded_batch(empty, 1, padded_shapes, padding_values)
        return node_of(made).spec(True)

    of_key = self._functions(method, "element_length_func", bucket, with_element=True)
    of_window = self._functions(method, "reduce_func", batch)
    sizes_of = lambda key: sizes[int(key)]  # noqa: E731
    return self._then(Buckets(batch_spec, self._node, of_key, of_window, sizes_of, self._of_items))


def unique(self: D, name: str | None = None) -> D:
    """Returns each element once, where it comes first. Elements are single arrays of integers or strings.

    Raises:
        TypeError: they are of another dtype.
        InvalidArgumentError: they have several components.

    >>> from replicax.data import Dataset
    >>> list(Dataset.from_tensor_slices([1, 37, 2, 37, 1]).unique().as_numpy_iterator())
    [np.int32(1), np.int32(37), np.int32(2)]
    """
    return self._then(Unique(self._node))


def rejection_resample(
    self: D,
    class_func: Callable[..., Tree],
    target_dist: ArrayLike,
    initial_dist: ArrayLike | None = None,
    seed: int | None = None,
    name: str | None = None,
) -> D:
    """Returns pairs of a class and an element, dropping elements at random so that classes are as often as wanted.

    Args:
        class_func: takes an element and returns its class, an integer from 0 on.
        target_dist: how often each class shall be, numbers that add up to 1.
        initial_dist: how often each is; where None, this is counted as the elements come.
        seed: makes the choices the same in each program.

    Raises:
        ValueError: the two are no distributions over the same classes.
        InvalidArgumentError: at iteration, where there is another class.

    >>> from replicax.data import Dataset
    >>> even = Dataset.range(6).rejection_resample(lambda x: x % 2, [1.0, 0.0], [0.5, 0.5], seed=0)
    >>> [(int(label), int(x)) for label, x in even]
    [(0, 0), (0, 2), (0, 4)]
    """
    target = _distribution("target_dist", target_dist)
    initial = None if initial_dist is None else _distribution("initial_dist", initial_dist)
    if initial is not None:
        if len(initial) != len(target):
            raise ValueError(f"`initial_dist` has {len(initial)} classes, and `target_dist` {len(target)}.")
        if not (target * initial).any():
            raise ValueError(f"`target_dist` {target} leaves out all classes that `initial_dist` {initial} has.")
    of_class = self._functions("rejection_resample", "class_func", class_func)
    return self._then(RejectionResample(self._node, of_class, target, initial, Seeds(seed)))


def _distribution(name: str, values: ArrayLike) -> np.ndarray:
    found = np.ravel(np.asarray(values)).astype(float)
    if (found < 0).any() or not np.isclose(found.sum(), 1, atol=1e-3):
        raise ValueError(f"`{name}` must be numbers of at least 0 that add up to 1, got {found.tolist()}.")
    return found


def _filled_shapes(spec: Tree, shapes: Tree, length: int) -> Tree:
    """Return the shapes to pad to, with `length` for dimensions that are not known."""
    specs, structure = flatten(spec)
    wanted = [s.shape for s in specs] if shapes is None else [padded_shape(s) for s in structure.flatten_up_to(shapes)]
    return structure.unflatten([TensorShape([length if d is None else d for d in shape]) for shape in wanted])
