"""Data of Keras's loops: adapters of datasets, and batches that are distributed over the replicas or the workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from replicax._base import nest
from replicax._base.foreign_state import Original, wrap
from replicax._base.thread_state import current
from replicax._base.types import Tree
from replicax._data.dataset import Dataset
from replicax._input.distributed_dataset import DistributedDataset, for_this_process
from replicax._integrations.keras import scheduled

if TYPE_CHECKING:
    import keras
    from keras.src.trainers.epoch_iterator import EpochIterator


def join() -> None:
    """Changes the input of Keras's loops."""
    import keras
    from keras.src.backend.jax.trainer import JAXEpochIterator
    from keras.src.trainers import data_adapters

    wrap(data_adapters, "get_data_adapter", _adapted)
    for layer in (keras.layers.Normalization, keras.layers.Discretization):
        wrap(layer, "adapt", _adapt)
    wrap(JAXEpochIterator, "_get_iterator", _distributed)


def _adapted(adapter_of: Original, /, x: Tree, *args: object, **kwargs: object) -> Tree:
    """Returns Keras's adapter of the input, or ours of a dataset."""
    by_function = current.keras_strategy is not None and scheduled.is_dataset_function(x)
    if not (by_function or isinstance(x, (Dataset, DistributedDataset))):
        return adapter_of(x, *args, **kwargs)
    given = inspect.signature(adapter_of).bind(x, *args, **kwargs).arguments
    for name in ("y", "sample_weight"):
        if given.get(name) is not None:
            raise ValueError(f"`{name}` is part of a dataset's elements, and is not given beside the dataset.")
    if given.get("class_weight") is None:
        if not by_function:
            return _adapter(x, x)
        # Of how many batches an epoch consists, steps alone tell: each worker may have a dataset of its own.
        here = scheduled.made_here(x, current.keras_strategy)
        return _adapter(here, x, counts=given.get("steps_per_epoch") is None)
    if not isinstance(x, Dataset):
        raise ValueError("`class_weight` needs the rx.data.Dataset itself, and this one is distributed already.")
    weighted = x.map(lambda *data: _weighted(data, given["class_weight"]))
    return _adapter(weighted, weighted)


def _weighted(data: Tree, class_weight: dict[int, float]) -> tuple[Tree, Tree, Tree]:
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    x, y, sample_weight = unpack(data)
    if y is None or sample_weight is not None:
        raise ValueError(
            "`class_weight` is for datasets of pairs: of inputs and classes, without weights of their own."
        )
    return x, y, class_weight_to_sample_weights(y, class_weight)


def _adapt(adapt: Original, layer: keras.Layer, data: Tree, *args: object, **kwargs: object) -> Tree:
    """Adapts a layer to a dataset of ours as to an array of all its rows."""
    if isinstance(data, Dataset):
        data = np.concatenate(list(data.as_numpy_iterator()))
    return adapt(layer, data, *args, **kwargs)


def _adapter(value: Tree, data: Tree, counts: bool = True) -> Tree:
    """Returns Keras's view of a dataset; `data` is what the user gave, and `counts` tells whether it ends an epoch."""
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    class Adapter(DataAdapter):  # type: ignore[misc]  # Keras may be missing
        """A dataset, for Keras's loops."""

        def get_jax_iterator(self) -> Tree:
            return value if current.keras_strategy is not None else (nest.map_structure(jnp.asarray, x) for x in value)

        get_numpy_iterator = get_jax_iterator

        @property
        def num_batches(self) -> int | None:
            count = int(value.cardinality() if isinstance(value, Dataset) else value.cardinality)
            return count if count >= 0 and counts else None

        @property
        def batch_size(self) -> None:
            return None

        has_partial_batch = partial_batch_size = None

        def on_epoch_begin(self) -> None:
            pass

        on_epoch_end = on_epoch_begin

    adapter = Adapter()
    adapter.of_workers = data
    return adapter


class _Batches:
    """The batches of an adapter, an iterable."""

    def __init__(self, adapter: keras.src.trainers.data_adapters.DataAdapter):
        self._adapter = adapter

    def __iter__(self) -> Iterator[Tree]:
        return iter(self._adapter.get_jax_iterator())


def _distributed(get: Original, epoch_iterator: EpochIterator) -> Tree:
    strategy = current.keras_strategy
    if strategy is None:
        return get(epoch_iterator)
    adapter = epoch_iterator.data_adapter
    source = adapter.get_jax_iterator()
    if not isinstance(source, DistributedDataset):
        source = strategy.experimental_distribute_dataset(source if isinstance(source, Dataset) else _Batches(adapter))
    source = for_this_process(source)
    if current.keras_eagerly or scheduled.coordinator_of(strategy) is None:
        return source
    return scheduled.Batches(strategy, getattr(adapter, "of_workers", None), source, epoch_iterator.steps_per_epoch)


def unpack(data: Tree) -> tuple[Tree, Tree, Tree]:
    """Returns inputs, targets and weights of a batch; None for those that it lacks."""
    from keras.utils import unpack_x_y_sample_weight

    x, y, sample_weight = unpack_x_y_sample_weight(data)
    return x, y, sample_weight
