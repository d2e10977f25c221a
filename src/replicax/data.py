"""Datasets: `Dataset`, those that read files, its options, and the policies for dividing input among workers."""

from replicax._base.types import AutoShardPolicy
from replicax._data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    DatasetIterator,
    DatasetSpec,
    DistributeOptions,
    NumpyIterator,
    Optional,
    Options,
    RaggedTensor,
)
from replicax._data.files import FixedLengthRecordDataset, TextLineDataset, TFRecordDataset, TFRecordWriter

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
]
