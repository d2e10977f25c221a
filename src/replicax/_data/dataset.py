"""The class `Dataset`, of the parts that the other modules hold, and datasets as values."""

from __future__ import annotations

from typing import NoReturn

import numpy as np  # noqa: F401  for the example below

from replicax._base.messages import received
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.group_by import Grouping
from replicax._data.save_load import Saving
from replicax._data.sources import Sources


class Variant:
    """A dataset as one value, which `to_variant` gives and `from_variant` and `Dataset` take."""

    def __init__(self, dataset: Base):
        self.dataset = dataset

    def __repr__(self) -> str:
        return f"<Variant {self.dataset!r}>"


class Dataset(Sources, Grouping, Saving):
    """Elements that are structures of arrays, and transformations of them: tf.data's, over data on the host.

    An element is an array, or a tuple, named tuple or dict of elements. As in tf.data a *list* is one array. Functions
    given to `map`, `filter` and others see tensors; an element that is a tuple comes as several arguments. The argument
    `name` of methods is accepted for compatibility.

    Make one by `from_tensor_slices` and the other static methods. Each `iter` starts anew, and yields tensors;
    `as_numpy_iterator` yields numpy arrays, which may be read-only views of the source.

    >>> import replicax as rx
    >>> dataset = rx.data.Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(6)})
    >>> dataset = dataset.shuffle(6, seed=0).batch(4)
    >>> [batch["x"].shape for batch in dataset]
    [(4,), (2,)]
    """

    def __init__(self, variant_tensor: Variant):
        if not isinstance(variant_tensor, Variant):
            raise TypeError(
                "`Dataset(variant_tensor)` takes what tf.data.experimental.to_variant returned, got "
                f"{received(variant_tensor)}. To make a dataset of data, use "
                "Dataset.from_tensor_slices or another one of its static methods."
            )
        vars(self).update(vars(variant_tensor.dataset))

    def fingerprint(self) -> NoReturn:
        """Raises NotImplementedError: functions of datasets are Python functions, which no hash tells apart.

        >>> Dataset.range(3).fingerprint()
        Traceback (most recent call last):
        NotImplementedError: `Dataset.fingerprint` is not supported...
        """
        raise NotImplementedError(
            "`Dataset.fingerprint` is not supported: functions of datasets are Python functions, which no hash tells "
            "apart. Hash what identifies your data, such as file names and a version of the code, with hashlib."
        )


Base._dataset = Dataset
counter = Dataset.counter  # which is `tf.data.experimental.Counter` too


def to_variant(dataset: Dataset) -> Variant:
    """Returns the dataset as one value."""
    if not isinstance(dataset, Base):
        raise TypeError(f"`to_variant` takes a dataset, got {received(dataset)}.")
    return Variant(dataset)


def from_variant(variant: Variant, structure: Tree) -> Dataset:
    """Returns the dataset of a value; `structure` is its elements' spec."""
    return Dataset(variant)
