"""The base of all parts of `Dataset`: how datasets are made of each other, and their facts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self, cast

import numpy as np

from replicax._base.messages import received
from replicax._base.tracebacks import origin
from replicax._base.types import Tree
from replicax._data import iterators
from replicax._data.elements import Nested
from replicax._data.functions import ElementFunction
from replicax._data.iterators import DatasetIterator, NumpyIterator, Unsure
from replicax._data.options import Options
from replicax._data.reading import Maker, Reading, StatefulNode, hands_on
from replicax._data.rows import RowOrder, Rows
from replicax._data.skipping import warn_of_making
from replicax._data.specs import INFINITE_CARDINALITY, DatasetSpec, tensor_spec


class Base(Nested):
    """A recipe for an iterator over elements, and what is known of these beforehand."""

    _dataset: ClassVar[type[Base]]  # the class of all datasets that methods make, which stands above their modules
    _functions: ClassVar[type[ElementFunction]] = ElementFunction  # how users' functions of elements run
    _at_hand = False  # whether making an element costs next to nothing and calls no code of the user's
    _in_place: Self | None = None  # the same elements without the thread of `prefetch`, for callers that have one

    def _set_up(
        self,
        make: Maker,
        spec: Callable[[bool], Tree],
        cardinality: int,
        *,
        batch_size: int | None = None,
        rows: Rows | None = None,
        options: Options | None = None,
        files: int = 0,
        nodes: Iterable[StatefulNode] = (),
        unsure: Sequence[Unsure] = (),
    ) -> None:
        # `spec` takes one argument: whether it may call the users' functions. It returns None where it would have to
        # and may not.
        self._maker = make
        self._find_spec = spec
        self._cardinality = cardinality
        self._batch_size = batch_size  # for specs that do not show it
        self._rows = rows
        self._options = options or Options()
        self._files = files  # how many files it reads, which may be divided among workers; see _data/files.py
        self._nodes = tuple(dict.fromkeys(nodes))  # in the order in which the code made them
        self._found_spec: Tree = None
        self._origin = origin()  # for messages
        self._unsure = tuple(dict.fromkeys(unsure))

    @classmethod
    def _made(cls, make: Maker, spec: Callable[[bool], Tree], cardinality: int, **known: Any) -> Self:
        """Returns a new `Dataset`, whatever subclass this one is of; the arguments are those of `_set_up`."""
        dataset = cls._dataset.__new__(cls._dataset)
        dataset._set_up(make, spec, cardinality, **known)
        return cast(Self, dataset)

    @classmethod
    def _of_list(cls, elements: Sequence[Tree], spec: Tree) -> Self:
        """Returns a dataset of elements on the host, of this spec."""

        @hands_on
        def make(reading: Reading, start: int = 0, /) -> Iterator[Tree]:
            return itertools.islice(elements, start, None)

        return cls._made(make, lambda probe: spec, len(elements))

    def _make(self, reading: Reading, start: int = 0, /) -> Iterator[Tree]:
        """Returns an iterator over the elements of a reading, from number `start` on."""
        if reading.skip is not None and not hasattr(self._maker, "hands_on"):
            if reading.skip.on:
                warn_of_making(reading.skip.count, str(self._origin))
            reading = reading.skipping(None)
        elif start and hasattr(self._maker, "makes_again"):
            warn_of_making(start, str(self._origin))
        return reading.guarded(self._maker(reading, start))

    def _spec(self, probe: bool) -> Tree:
        """Returns the spec of the elements on the host, None where it is not known and `probe` is False."""
        if self._found_spec is None:
            self._found_spec = self._find_spec(probe)
        return self._found_spec

    def _derived(
        self,
        make: Maker,
        cardinality: int,
        spec: Callable[[Tree], Tree] | None = None,
        *,
        find: Callable[[bool], Tree] | None = None,
        nodes: Iterable[StatefulNode] = (),
        **known: Any,
    ) -> Self:
        """Returns a dataset made of this one; `spec` is a function of this one's, or `find` takes its place."""

        def found(probe: bool) -> Tree:
            own = self._spec(probe)
            return own if own is None or spec is None else spec(own)

        nodes = (*self._nodes, *nodes)
        known = {"options": self._options, "files": self._files, "unsure": self._unsure, **known}
        return self._made(make, find or found, cardinality, nodes=nodes, **known)

    def _probed(self, make: Maker, find: Callable[[Maker], Tree], cardinality: int) -> Self:
        """Returns a dataset whose spec is `find(make)`, found only where the users' functions may run."""
        return self._derived(make, cardinality, find=lambda probe: find(make) if probe else None)

    def _reordered(
        self, make: Maker, on_rows: Callable[[RowOrder], RowOrder], cardinality: int, *nodes: StatefulNode
    ) -> Self:
        """Returns a dataset of these elements in another number or order; `on_rows` does that to row numbers."""
        if self._rows is None:
            dataset = self._derived(make, cardinality, batch_size=self._batch_size, nodes=nodes)
            dataset._at_hand = self._at_hand
            return dataset
        rows = self._rows._replace(order=on_rows(self._rows.order), in_order=False)
        return self._derived(rows.elements, cardinality, batch_size=self._batch_size, rows=rows, nodes=nodes)

    def _leaf_spec(self) -> DatasetSpec:
        """Returns the `element_spec` of a dataset that has this one as an element."""
        return DatasetSpec(self._spec(True))

    # Facts

    def with_options(self, options: Options, name: str | None = None) -> Self:
        """Returns this dataset with `options` added to its own; raises TypeError if they are no `Options`.

        >>> import replicax as rx
        >>> options = rx.data.Options()
        >>> options.deterministic = False
        >>> rx.data.Dataset.range(4).with_options(options).options().deterministic
        False
        """
        if not isinstance(options, Options):
            raise TypeError(f"`options` is an `rx.data.Options`, got {received(options)}.")
        return self._with(self._options.merge(options))

    def _with(self, options: Options) -> Self:
        dataset = copy.copy(self)
        dataset._options = options
        return dataset

    def options(self) -> Options:
        """Returns the options set for this dataset.

        >>> import replicax as rx
        >>> rx.data.Dataset.range(4).options().experimental_distribute.auto_shard_policy.name
        'AUTO'
        """
        return copy.deepcopy(self._options)

    @property
    def element_spec(self) -> Tree:
        """The shape and dtype of an element's tensors, in the structure of the elements.

        After `map` and its like it is found by calls of the function on zeros and on ones, or from the first element.

        >>> from replicax.data import Dataset
        >>> Dataset.from_tensor_slices(np.ones((4, 3), np.float32)).batch(2).element_spec
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        """
        return tensor_spec(self._spec(True))

    def cardinality(self, name: str | None = None) -> np.int64:
        """Returns the number of elements; -1 for no end, -2 for not known.

        >>> from replicax.data import Dataset
        >>> [int(dataset.cardinality()) for dataset in (Dataset.range(7).batch(2), Dataset.counter())]
        [4, -1]
        """
        return np.int64(self._cardinality)

    def as_numpy_iterator(self) -> NumpyIterator:
        """Returns an iterator over the elements as numpy arrays; scalars as numpy scalars.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        iterators.announce()
        return NumpyIterator(self)

    def __iter__(self) -> DatasetIterator:
        iterators.announce()
        return DatasetIterator(self)

    def __bool__(self) -> bool:
        return True  # even where the length is 0 or unknown

    def __len__(self) -> int:
        if self._cardinality < 0:
            endless = self._cardinality == INFINITE_CARDINALITY
            raise TypeError("The dataset is infinite." if endless else "The dataset length is unknown.")
        return self._cardinality

    def __repr__(self) -> str:
        spec = self._spec(False)
        return f"<Dataset element_spec={'?' if spec is None else tensor_spec(spec)}>"
