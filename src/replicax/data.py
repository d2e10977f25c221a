"""Datasets: `Dataset`, those that read files, its options, and the policies for dividing input among workers."""

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
