"""Datasets: `Dataset`, its options, and the policies for dividing input among workers."""

from replicax._data import Dataset, DistributeOptions, Options
from replicax._files import TextLineDataset
from replicax._types import AutoShardPolicy

__all__ = ["AutoShardPolicy", "Dataset", "DistributeOptions", "Options", "TextLineDataset"]
