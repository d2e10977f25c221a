"""Datasets: `Dataset`, those that read files, its options, and the policies for dividing input among workers.

`AUTOTUNE` leaves a number to replicax: of calls of `map` at a time, or of elements to prefetch. `cardinality()` is
`INFINITE_CARDINALITY` where a dataset has no end, and `UNKNOWN_CARDINALITY` where it is not known.

>>> from replicax.data import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
>>> dataset = Dataset.range(5).map(lambda x: x * x, num_parallel_calls=AUTOTUNE).batch(2).prefetch(AUTOTUNE)
>>> [batch.tolist() for batch in dataset]
[[0, 1], [4, 9], [16]]
>>> bool(Dataset.counter().cardinality() == INFINITE_CARDINALITY)
True
>>> bool(Dataset.range(5).filter(lambda x: x > 2).cardinality() == UNKNOWN_CARDINALITY)
True
"""

from replicax._base.types import AutoShardPolicy
from replicax._data.dataset import Dataset
from replicax._data.files import FixedLengthRecordDataset, TextLineDataset, TFRecordDataset, TFRecordWriter
from replicax._data.iterators import DatasetIterator, NumpyIterator, Optional
from replicax._data.options import DistributeOptions, Options, ThreadingOptions
from replicax._data.ragged import RaggedTensor
from replicax._data.specs import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, DatasetSpec

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "DistributeOptions",
    "FixedLengthRecordDataset",
    "NumpyIterator",
    "Optional",
    "Options",
    "RaggedTensor",
    "TFRecordDataset",
    "TFRecordWriter",
    "TextLineDataset",
    "ThreadingOptions",
]
