"""Datasets over host data, with tf.data's names.

A `Dataset` is a recipe: a function that makes an iterator over elements, together with what is known of the elements
beforehand (`element_spec`, `cardinality`, the batch size). Each transformation wraps that function in another one.
Elements are structures of numpy arrays throughout; only the user's functions and the user's loop see tensors.

Rows that lie in arrays are not moved one by one. Such a dataset also carries `Rows`: the order of its rows as chunks
of row numbers, and a function from row numbers to rows. `shuffle`, `repeat`, `take` and their like act on the numbers
alone, and `batch` fetches the rows of a whole batch at once, or of several.
"""

from __future__ import annotations

from replicax._base.types import AutoShardPolicy
from replicax._data.calls import fold
from replicax._data.dataset import Dataset, Variant, counter, from_variant, to_variant
from replicax._data.elements import as_host, as_tensor, host_structure, num_rows, regroup
from replicax._data.iterators import DatasetIterator, ElementIterator, NumpyIterator, Optional
from replicax._data.options import DistributeOptions, Options
from replicax._data.ragged import RaggedTensor
from replicax._data.reading import Maker, Reading, replayed, use_default_seed
from replicax._data.rows import RowBatches
from replicax._data.specs import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    DatasetSpec,
    first_spec,
    shown_spec,
    tensor_spec,
)

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
    "counter",
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
