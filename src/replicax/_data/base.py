"""The base of `Dataset`: what a dataset has, how datasets are made of nodes, and their facts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Self, cast

import numpy as np

from replicax._base.messages import received
from replicax._base.types import Tree
from replicax._data import iterators
from replicax._data.functions import ElementFunction
from replicax._data.iterators import DatasetIterator, NumpyIterator
from replicax._data.nodes.node import Node, NodeOwner
from replicax._data.nodes.pipeline import pipeline_text
from replicax._data.nodes.sources import Items
from replicax._data.options import Options
from replicax._data.specs import INFINITE_CARDINALITY, DatasetSpec, tensor_spec


class Base(NodeOwner):
    """A node, which gives the elements, and options."""

    _dataset: ClassVar[type[Base]]  # the class of all datasets that methods make
    _functions: ClassVar[type[ElementFunction]] = ElementFunction  # how users' functions of elements run
    _options: Options

    def _begin(self, node: Node, options: Options | None = None) -> None:
        self._node, self._options = node, options or Options()

    @classmethod
    def _of(cls, node: Node, options: Options | None = None) -> Self:
        """Return a new `Dataset`, whatever subclass this one is of."""
        dataset = cls._dataset.__new__(cls._dataset)
        dataset._begin(node, options)
        return cast(Self, dataset)

    @classmethod
    def _of_items(cls, items: Sequence[Tree], spec: Tree) -> Self:
        """Return a dataset of elements on the host, of this spec."""
        return cls._of(Items("items", items, spec))

    def _then(self, node: Node) -> Self:
        """Return a dataset of a node that has this dataset's node as an input."""
        return self._of(node, self._options)

    def _leaf_spec(self) -> DatasetSpec:
        """Return the `element_spec` of a dataset that has this one as an element."""
        return DatasetSpec(self._node.spec(True))

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
        return self._of(self._node, self._options.merge(options))

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
        return tensor_spec(self._node.spec(True))

    def cardinality(self, name: str | None = None) -> np.int64:
        """Returns the number of elements; -1 for no end, -2 for not known.

        >>> from replicax.data import Dataset
        >>> [int(dataset.cardinality()) for dataset in (Dataset.range(7).batch(2), Dataset.counter())]
        [4, -1]
        """
        return np.int64(self._node.cardinality)

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
        if self._node.cardinality < 0:
            endless = self._node.cardinality == INFINITE_CARDINALITY
            raise TypeError("The dataset is infinite." if endless else "The dataset length is unknown.")
        return self._node.cardinality

    def __repr__(self) -> str:
        spec = self._node.spec(False)
        return f"<Dataset element_spec={'?' if spec is None else tensor_spec(spec)}>"

    def __str__(self) -> str:
        return pipeline_text(self._node)


class Variant:
    """A dataset as one value, which `to_variant` gives and `from_variant` and `Dataset` take."""

    def __init__(self, dataset: Base):
        self.dataset = dataset

    def __repr__(self) -> str:
        return f"<Variant {self.dataset!r}>"
