"""Part of `Dataset`: several datasets in one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._base.specs import TensorSpec
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.elements import flatten
from replicax._data.reading import Maker, Reading, Seeds, StatefulNode, hands_on, skipped
from replicax._data.rows import plain_rows
from replicax._data.shuffle_repeat import Order, concatenated
from replicax._data.skipping import all_made, applied_to_each, made
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, common_spec, same_kinds, tensor_spec

_D = TypeVar("_D", bound=Base)


class Combined(Order):
    """Methods of `Dataset`."""

    @classmethod
    def zip(cls, *args: Tree, datasets: Tree = None, name: str | None = None) -> Self:
        """Returns the elements of several datasets side by side, in the structure in which the datasets come.

        Raises:
            TypeError: something else than a dataset, or none at all.

        >>> from replicax.data import Dataset
        >>> a, b = Dataset.range(2), Dataset.range(5, 9)
        >>> list(Dataset.zip(a, b).as_numpy_iterator())
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6))]
        """
        tree = datasets if datasets is not None else args[0] if len(args) == 1 else args
        inputs, structure = flatten(tree)
        for dataset in inputs:
            if not isinstance(dataset, Base):
                raise TypeError(f"Dataset.zip takes datasets in tuples or dicts, got {type(dataset).__name__}.")
        if not inputs:
            raise TypeError("Dataset.zip needs at least one dataset.")
        sizes = [d._cardinality for d in inputs]
        cardinality = min((n for n in sizes if n != INFINITE_CARDINALITY), default=INFINITE_CARDINALITY)

        sources = [d._rows for d in inputs if d._rows is not None and d._rows.in_order]
        rows = None
        if len(sources) == len(inputs):
            composite = any(s.composite for s in sources)
            rows = plain_rows(lambda i: structure.unflatten([s.fetch(i) for s in sources]), cardinality, composite)

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            # Begin one element early, so that each input is begun even if all of its elements are skipped.
            first, raising = max(0, start - 1), reading.with_errors(None)
            side_by_side = SideBySide([d._make(raising, first) for d in inputs], start - first)
            if reading.skip is None:
                return map(structure.unflatten, side_by_side)
            return applied_to_each(reading.skip, lambda leaves: structure.unflatten(all_made(leaves)), side_by_side)

        made = make if rows is None else rows.elements
        files = max(d._files for d in inputs)
        return cls._joined(inputs, made, structure.unflatten, cardinality, files=files, rows=rows)

    def enumerate(self, start: int = 0, name: str | None = None) -> Self:
        """Returns pairs of a number (int64, from `start`) and an element.

        >>> from replicax.data import Dataset
        >>> [(int(number), int(x)) for number, x in Dataset.range(5, 7).enumerate(start=1)]
        [(1, 5), (2, 6)]
        """
        return self.zip(self._numbers(start, 1, np.dtype(np.int64)), self)._with(self._options)

    def concatenate(self, dataset: Base, name: str | None = None) -> Self:
        """Returns these elements and then those of `dataset`.

        Raises:
            TypeError: `dataset` is no Dataset, or its elements are known to be of another kind.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(2).concatenate(Dataset.range(5, 7))]
        [0, 1, 5, 6]
        """
        if not isinstance(dataset, Base):
            raise TypeError(f"`dataset` is a Dataset, got {received(dataset)}.")

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return concatenated((self, dataset), reading, start, known=self._cardinality >= 0)

        def common(specs: list[Tree]) -> Tree:
            if not same_kinds(*specs):
                raise TypeError(f"Incompatible dataset elements: {' vs. '.join(str(tensor_spec(s)) for s in specs)}")
            return common_spec(*specs)

        sizes = (self._cardinality, dataset._cardinality)
        cardinality = UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in sizes else sum(sizes)
        if INFINITE_CARDINALITY in sizes:
            cardinality = INFINITE_CARDINALITY
        options, files = self._options.merge(dataset._options), self._files + dataset._files
        joined = self._joined((self, dataset), make, common, cardinality, options=options, files=files)
        joined._spec(False)  # raises where the elements are known to differ
        return joined

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Self], choice_dataset: Base, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Returns elements of several datasets, each of the one whose number comes next in `choice_dataset`.

        Args:
            datasets: datasets of elements of one kind.
            choice_dataset: scalars of int64, from 0 to the number of datasets less one.
            stop_on_empty_dataset: whether to end where the chosen dataset has no more elements, or to go on to the
                next choice.

        Raises:
            TypeError: the datasets' elements differ, or choices are no int64.
            ValueError: there are no datasets.
            InvalidArgumentError: at iteration, where there is no dataset of the chosen number.

        >>> from replicax.data import Dataset
        >>> pair = [Dataset.range(3), Dataset.range(10, 13)]
        >>> choices = Dataset.from_tensor_slices(np.array([1, 0, 1]))
        >>> [int(x) for x in Dataset.choose_from_datasets(pair, choices)]
        [10, 0, 11]
        """
        inputs = _alike(datasets)
        kind = choice_dataset._spec(False)
        if kind is not None and kind != TensorSpec((), np.int64):
            raise TypeError(f"Elements of `choice_dataset` must be scalar int64 tensors, but are {kind}.")

        def choices(reading: Reading) -> Iterator[int]:
            for choice in choice_dataset._make(reading):
                number = int(made(choice))
                if not 0 <= number < len(inputs):
                    raise InvalidArgumentError(
                        f"`choice_dataset` chose dataset {number}; the datasets are 0 to {len(inputs) - 1}."
                    )
                yield number

        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            return _chosen(inputs, reading, choices(reading), stop_on_empty_dataset)

        return cls._joined(inputs, make, _common_spec, UNKNOWN_CARDINALITY, nodes=choice_dataset._nodes)

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Self],
        weights: ArrayLike | Base | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Self:
        """Returns elements of several datasets, each taken from one chosen at random.

        Args:
            datasets: datasets of elements of one kind.
            weights: how probable each is to be chosen, up to a factor, or a dataset of such vectors; all alike where
                it is None. Datasets of weight 0 are left out.
            seed: makes the choices the same in each program.
            stop_on_empty_dataset: whether to end where the chosen dataset has no more elements; else it is left out
                from there on.
            rerandomize_each_iteration: whether each pass makes other choices; by default where there is no seed.

        Raises:
            TypeError: the datasets' elements differ.
            ValueError: there are no datasets, or there is not one weight for each.

        >>> from replicax.data import Dataset
        >>> both = Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(2)], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 0, 1, 1]
        """
        inputs = _alike(datasets)
        seeds = Seeds(seed, seed is None if rerandomize_each_iteration is None else bool(rerandomize_each_iteration))
        there, fixed = inputs, None
        if not isinstance(weights, Base):
            fixed = _probabilities(np.ones(len(inputs)) if weights is None else weights)
            if len(fixed) != len(inputs):
                raise ValueError(f"`weights` needs one for each of the {len(inputs)} datasets, got {len(fixed)}.")
            if not fixed.any():
                return inputs[0].take(0)
            there, fixed = [d for d, weight in zip(inputs, fixed) if weight], fixed[fixed > 0]

        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            draw = reading.generator(seeds).random
            changing: Iterator[Tree] = itertools.repeat(fixed)
            if isinstance(weights, Base):
                changing = weights._make(reading)
            left = np.ones(len(there))

            def choices() -> Iterator[int]:
                for now in changing:
                    ends = np.cumsum(_probabilities(made(now)) * left)
                    if not ends[-1]:
                        return
                    yield int(np.searchsorted(ends, draw() * ends[-1], side="right"))

            return _chosen(there, reading, choices(), stop_on_empty_dataset, left)

        sizes = [d._cardinality for d in there]
        endless = INFINITE_CARDINALITY in sizes
        cardinality = sizes[0] if len(sizes) == 1 else INFINITE_CARDINALITY if endless else UNKNOWN_CARDINALITY
        nodes = (seeds, *(weights._nodes if isinstance(weights, Base) else ()))
        return cls._joined(there, make, _common_spec, cardinality, nodes=nodes)

    @classmethod
    def _joined(
        cls,
        inputs: Sequence[Base],
        make: Maker,
        spec: Callable[[list[Tree]], Tree],
        cardinality: int,
        *,
        nodes: Iterable[StatefulNode] = (),
        **known: Any,
    ) -> Self:
        """Returns a dataset made of several; `spec` is a function of theirs."""

        def find(probe: bool) -> Tree:
            specs = [d._spec(probe) for d in inputs]
            return None if any(one is None for one in specs) else spec(specs)

        sizes = {d._batch_size for d in inputs}
        known = {"options": inputs[0]._options, "batch_size": sizes.pop() if len(sizes) == 1 else None, **known}
        nodes = (*itertools.chain.from_iterable(d._nodes for d in inputs), *nodes)
        known["unsure"] = [*itertools.chain.from_iterable(d._unsure for d in inputs)]
        return cls._made(make, find, cardinality, nodes=nodes, **known)

    @classmethod
    def _numbers(cls, start: int, step: int, dtype: np.dtype, count: int = INFINITE_CARDINALITY) -> Self:
        """Returns `count` numbers `start`, `start + step`, ..."""
        rows = plain_rows(lambda i: np.asarray(start + step * np.asarray(i, np.int64)).astype(dtype), count)
        return cls._made(rows.elements, lambda probe: TensorSpec((), dtype), count, rows=rows)


class SideBySide(Iterator[list[Tree]]):
    """Iterates over several sources at once.

    Where one of them raises, the elements beside it are dropped, so that the sources stay in step. The first `skip`
    elements are left out when the first one is asked for.
    """

    def __init__(self, sources: list[Iterator[Tree]], skip: int):
        self._sources, self._skip = sources, skip

    def __next__(self) -> list[Tree]:
        while self._skip:
            self._skip -= 1
            self._taken()
        return self._taken()

    def _taken(self) -> list[Tree]:
        elements, errors = [], []
        for source in self._sources:
            try:
                elements.append(next(source))
            except StopIteration:
                raise
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]
        return elements


def _common_spec(specs: list[Tree]) -> Tree:
    return functools.reduce(common_spec, specs)


def _alike(datasets: Sequence[_D]) -> list[_D]:
    inputs = list(datasets)
    if not inputs:
        raise ValueError("`datasets` should not be empty.")
    for dataset in inputs:
        if not isinstance(dataset, Base):
            raise TypeError(f"`datasets` should be a list of datasets, got a {type(dataset).__name__} in it.")
    first = inputs[0]._spec(False)
    for number, dataset in enumerate(inputs):
        spec = dataset._spec(False)
        if first is not None and spec is not None and not same_kinds(first, spec):
            raise TypeError(
                f"`datasets` must have compatible elements, but those of number 0 are {tensor_spec(first)}, and of "
                f"number {number} {tensor_spec(spec)}."
            )
    return inputs


def _chosen(
    inputs: Sequence[Base],
    reading: Reading,
    choices: Iterator[int],
    stop_on_empty: bool,
    left: np.ndarray | None = None,
) -> Iterator[Tree]:
    """Yields elements of the chosen inputs. Where one has no more, its entry in `left` becomes 0."""
    iterators = [d._make(reading) for d in inputs]
    left = np.ones(len(inputs)) if left is None else left
    for number in choices:
        for element in iterators[number]:
            yield element
            break
        else:
            left[number] = 0
            if stop_on_empty or not left.any():
                return


def _probabilities(weights: ArrayLike) -> np.ndarray:
    found = np.ravel(np.asarray(weights)).astype(float)
    if (found < 0).any() or not np.isfinite(found).all():
        raise ValueError(f"`weights` must be numbers that are not negative, got {found.tolist()}.")
    return found
