"""Part of `Dataset`: elements that go together, and elements that are left out for what they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import jax
import numpy as np
from numpy.typing import ArrayLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorShape, TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._data.base import Base
from replicax._data.batch import Batches
from replicax._data.calls import call_user
from replicax._data.elements import as_host, flatten, padded_shape, positive
from replicax._data.functions import mapped
from replicax._data.map_filter import returned_dataset
from replicax._data.reading import Reading, Seeds, replayed
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, DatasetSpec, first_spec


class Grouping(Batches):
    """Methods of `Dataset`."""

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Self:
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
        reach = (size - 1) * stride + 1

        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            elements = self._make(reading, start * shift)
            held: list[Tree] = []
            while True:
                held += itertools.islice(elements, max(0, reach - len(held)))
                if not held or (drop_remainder and len(held) < reach):
                    return
                specs, structure = flatten(self._spec(True))
                columns = zip(*(jax.tree.leaves(element) for element in held[:reach:stride]))
                yield structure.unflatten(list(map(self._of_list, columns, specs)))
                if shift > len(held):
                    for _ in itertools.islice(elements, shift - len(held)):
                        pass
                held = held[shift:]

        count = self._cardinality
        if count >= 0:
            count = max(0, -(-(count - reach + 1) // shift)) if drop_remainder else -(-count // shift)
        return self._derived(make, count, lambda spec: jax.tree.map(DatasetSpec, spec))

    def group_by_window(
        self,
        key_func: Callable[..., Tree],
        reduce_func: Callable[[Leaf, Self], Base],
        window_size: int | None = None,
        window_size_func: Callable[[Tree], Tree] | None = None,
        name: str | None = None,
    ) -> Self:
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

        of_key = self._functions("`key_func` of `Dataset.group_by_window`", key_func, with_element=True)
        of_window = self._functions("`reduce_func` of `Dataset.group_by_window`", reduce_func)
        of_size = self._functions("`window_size_func` of `Dataset.group_by_window`", window_size_func or positive)
        ahead = not self._unsure

        def size_of(key: np.ndarray) -> int:
            size: Leaf = window_size if window_size_func is None else int(of_size.called(key))
            return positive("Window size", size)

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            groups: dict[int, list[Tree]] = {}

            sizes: dict[int, int] = {}

            def reduced(key: int) -> Iterator[Tree]:
                pair = np.asarray(key, np.int64), self._of_list(groups.pop(key), self._spec(True))
                dataset: Base = returned_dataset("reduce_func", of_window.called(pair))
                return dataset._make(reading.child())

            pairs = mapped(of_key, reading, self._make(reading), 0, None, True, ahead)
            for element, number in reading.guarded(pairs):
                key = integer("key_func", number)
                if key not in groups:
                    groups[key], sizes[key] = [], size_of(np.asarray(key, np.int64))
                groups[key].append(element)
                if len(groups[key]) == sizes[key]:
                    yield from reduced(key)
            for key in sorted(groups):
                yield from reduced(key)

        return self._probed(make, first_spec, UNKNOWN_CARDINALITY)

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Tree],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Self:
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
                "`bucket_batch_sizes` needs one more number than `bucket_boundaries`, got "
                f"{len(sizes)} and {len(bounds)}."
            )

        role = "`element_length_func` of `Dataset.bucket_by_sequence_length`"

        def bucket(*element: Tree) -> int:
            length = integer("element_length_func", call_user(role, element_length_func, *element))
            number = int(np.searchsorted(bounds, length, side="right"))
            if pad_to_bucket_boundary and number == len(bounds):
                raise InvalidArgumentError(
                    f"With `pad_to_bucket_boundary` elements must be shorter than {max(bounds, default=0)}, the last "
                    f"of `bucket_boundaries`, got length {length}."
                )
            return number

        def batch(key: Leaf, window: Self) -> Self:
            number = int(key)
            if no_padding:
                return window.batch(sizes[number], drop_remainder)
            shapes = padded_shapes
            if pad_to_bucket_boundary:
                shapes = _filled_shapes(window._spec(True), padded_shapes, bounds[number] - 1)
            return window.padded_batch(sizes[number], shapes, padding_values, drop_remainder)

        dataset = self.group_by_window(bucket, batch, window_size_func=lambda key: sizes[int(key)])

        def spec(found: Tree) -> Tree:
            empty = self._of_list([], found)
            if no_padding:
                return empty.batch(1)._spec(True)
            return empty.padded_batch(1, padded_shapes, padding_values)._spec(True)

        return self._derived(dataset._make, UNKNOWN_CARDINALITY, spec)

    def unique(self, name: str | None = None) -> Self:
        """Returns each element once, where it comes first. Elements are single arrays of integers or strings.

        Raises:
            TypeError: they are of another dtype.
            InvalidArgumentError: they have several components.

        >>> from replicax.data import Dataset
        >>> list(Dataset.from_tensor_slices([1, 37, 2, 37, 1]).unique().as_numpy_iterator())
        [np.int32(1), np.int32(37), np.int32(2)]
        """

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            seen = set()
            for element in self._make(reading):
                _check_unique(element)
                (array,), _ = flatten(element)
                key = (array.shape, tuple(array.ravel()) if array.dtype == np.dtype(object) else array.tobytes())
                if key not in seen:
                    seen.add(key)
                    yield element

        if (known := self._spec(False)) is not None:
            _check_unique(known)
        return self._derived(make, UNKNOWN_CARDINALITY)

    def rejection_resample(
        self,
        class_func: Callable[..., Tree],
        target_dist: ArrayLike,
        initial_dist: ArrayLike | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Self:
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
        seeds, function = Seeds(seed), self._functions("`class_func` of `Dataset.rejection_resample`", class_func)

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            draw = reading.generator(seeds).random
            counts = np.ones(len(target))
            for element in self._make(reading):
                label = integer("class_func", function.called(element))
                if not 0 <= label < len(target):
                    raise InvalidArgumentError(
                        f"`class_func` returned {label}, of {len(target)} classes: 0 to {len(target) - 1}."
                    )
                counts[label] += 1
                now = counts if initial is None else initial
                accept = np.divide(target, now, out=np.zeros(len(target)), where=now > 0)
                if draw() * accept.max() < accept[label]:
                    yield np.asarray(label, np.int64), element

        count = INFINITE_CARDINALITY if self._cardinality == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        return self._derived(make, count, lambda found: (TensorSpec((), np.int64), found), nodes=[seeds])


def integer(name: str, value: Leaf) -> int:
    """Returns the integer that the function `name` returned; raises TypeError for anything else."""
    array = as_host(value)
    if array.dtype.kind not in "iu" or array.ndim:
        raise TypeError(f"`{name}` must return a scalar integer, got one of {array.dtype} of shape {array.shape}.")
    return int(array)


def _distribution(name: str, values: ArrayLike) -> np.ndarray:
    found = np.ravel(np.asarray(values)).astype(float)
    if (found < 0).any() or not np.isclose(found.sum(), 1, atol=1e-3):
        raise ValueError(f"`{name}` must be numbers of at least 0 that add up to 1, got {found.tolist()}.")
    return found


def _check_unique(element: Tree) -> None:
    leaves = jax.tree.leaves(element)
    if len(leaves) != 1:
        raise InvalidArgumentError(f"unique only supports elements of a single component, got {len(leaves)}.")
    if leaves[0].dtype not in (np.dtype(np.int32), np.dtype(np.int64), np.dtype(object)):
        raise TypeError(f"unique does not support {leaves[0].dtype}: only int32, int64 and strings.")


def _filled_shapes(spec: Tree, shapes: Tree, length: int) -> Tree:
    """Returns the shapes to pad to, with `length` for dimensions that are not known."""
    specs, structure = flatten(spec)
    wanted = [s.shape for s in specs] if shapes is None else [padded_shape(s) for s in structure.flatten_up_to(shapes)]
    return structure.unflatten([TensorShape([length if d is None else d for d in shape]) for shape in wanted])
