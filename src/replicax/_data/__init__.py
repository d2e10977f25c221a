"""Datasets over host data, with tf.data's names.

A `Dataset` is a recipe: a function that makes an iterator over elements, together with what is known of the elements
beforehand (`element_spec`, `cardinality`, the batch size). Each transformation wraps that function in another one.
Elements are structures of numpy arrays throughout; only the user's functions and the user's loop see tensors.

Rows that lie in arrays are not moved one by one. Such a dataset also carries `Rows`: the order of its rows as chunks
of row numbers, and a function from row numbers to rows. `shuffle`, `repeat`, `take` and their like act on the numbers
alone, and `batch` fetches the rows of a whole batch at once, or of several.
"""

from __future__ import annotations

import numpy as np  # noqa: F401  for the example below

from replicax._data.batches import Batches
from replicax._data.combined import Combined
from replicax._data.composite import Composites
from replicax._data.elements import as_host, as_tensor, host_structure, num_rows, regroup
from replicax._data.fingerprint import Fingerprints, Variant, from_variant, remembering, to_variant
from replicax._data.functions import Functions
from replicax._data.grouping import Grouping
from replicax._data.iterators import DatasetIterator, ElementIterator, NumpyIterator, Optional, fold
from replicax._data.options import DistributeOptions, Options
from replicax._data.order import Order
from replicax._data.reading import Maker, Reading, replayed, use_default_seed
from replicax._data.rows import RowBatches
from replicax._data.saving import Saving
from replicax._data.sources import Sources
from replicax._data.specs import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    DatasetSpec,
    first_spec,
    shown_spec,
    tensor_spec,
)
from replicax._ragged import RaggedTensor
from replicax._types import AutoShardPolicy

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "DistributeOptions",
    "ElementIterator",
    "Maker",
    "NumpyIterator",
    "Optional",
    "Options",
    "RaggedTensor",
    "Reading",
    "RowBatches",
    "Variant",
    "as_host",
    "as_tensor",
    "first_spec",
    "fold",
    "from_variant",
    "host_structure",
    "num_rows",
    "regroup",
    "replayed",
    "shown_spec",
    "tensor_spec",
    "to_variant",
    "use_default_seed",
]


@remembering
class Dataset(Sources, Batches, Composites, Functions, Grouping, Order, Combined, Saving, Fingerprints):
    """Elements that are structures of arrays, and transformations of them: tf.data's, over data on the host.

    An element is an array, or a tuple, named tuple or dict of elements. As in tf.data a *list* is one array. Functions
    given to `map`, `filter` and others see tensors; an element that is a tuple comes as several arguments.

    Make one by `from_tensor_slices` and the other static methods. Each `iter` starts anew, and yields tensors;
    `as_numpy_iterator` yields numpy arrays, which may be read-only views of the source.

    >>> import replicax as rx
    >>> dataset = rx.data.Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(6)})
    >>> dataset = dataset.shuffle(6, seed=0).batch(4)
    >>> [batch["x"].shape for batch in dataset]
    [(4,), (2,)]
    """


counter = Dataset.counter  # which is `tf.data.experimental.Counter` too
