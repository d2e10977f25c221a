"""`tf.data.experimental`: methods of datasets under their former names, most of them as arguments of `apply`."""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from replicax.tf._cardinality import assert_cardinality
from replicax.tf._core import (
    AutotuneOptions,
    DatasetIterator,
    Leaf,
    OptimizationOptions,
    Optional,
    OutOfRangeError,
    ServiceOptions,
    ThreadingOptions,
    Tree,
    data,
)
from replicax.tf._datasets import Dataset
from replicax.tf._features import Feature
from replicax.tf._ops import as_int
from replicax.tf._types import ShapeLike

_Apply: TypeAlias = Callable[[data.Dataset], data.Dataset]

# Arguments of methods that the functions do not have.
_NEWER = ("self", "name", "rerandomize_each_iteration", "wait", "checkpoint_args")


def _applied(method: str) -> Callable[..., _Apply]:
    """Returns a function with the arguments of a method of datasets, which returns a function for `apply`."""
    of_dataset = getattr(Dataset, method)

    def transformation(*args: object, **kwargs: object) -> _Apply:
        return lambda dataset: getattr(dataset, method)(*args, **kwargs)

    functools.update_wrapper(transformation, of_dataset)
    parameters = inspect.signature(of_dataset).parameters.values()
    kept = [each for each in parameters if each.name not in _NEWER]
    vars(transformation)["__signature__"] = inspect.Signature(kept)
    transformation.__doc__ = f"Returns a function for `Dataset.apply` that calls `Dataset.{method}`."
    return transformation


class AutotuneAlgorithm(enum.Enum):
    """Ways of tuning, which have no effect."""

    DEFAULT, HILL_CLIMB, GRADIENT_DESCENT, MAX_PARALLELISM, STAGE_BASED = range(5)


class ExternalStatePolicy(enum.Enum):
    """What to do about state outside of a dataset, which has no effect."""

    WARN, IGNORE, FAIL = range(3)


class TFRecordWriter:
    """Writes a dataset of strings to a file of TFRecords."""

    def __init__(self, filename: str, compression_type: str | None = None):
        self._filename, self._compression = filename, compression_type

    def write(self, dataset: data.Dataset) -> None:
        """Writes all elements."""
        with data.TFRecordWriter(self._filename, self._compression) as writer:
            for record in dataset.as_numpy_iterator():
                writer.write(record)


def at(dataset: data.Dataset, index: int) -> Tree:
    """Returns the element of this number; raises `OutOfRangeError` if there is none."""
    count, number = int(dataset.cardinality()), as_int(index, "index")
    if number >= 0 and (count < 0 or number < count):
        for element in dataset.skip(number).take(1):
            return element
    raise OutOfRangeError(f"Index out of range [0, {count}):{number}")


def cardinality(dataset: data.Dataset) -> Leaf:
    """Returns the number of elements; `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY` if it is infinite or unknown."""
    return dataset.cardinality()


def copy_to_device(target_device: str, source_device: str = "/cpu:0") -> _Apply:
    """Returns a function for `Dataset.apply` that changes nothing: elements move when they are used."""
    return lambda dataset: dataset


def choose_from_datasets(
    datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = False
) -> Dataset:
    """Returns elements of the datasets, in the order in which another one says of which."""
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


def dense_to_sparse_batch(batch_size: int, row_shape: ShapeLike) -> _Apply:
    """Returns a function for `Dataset.apply` that calls `Dataset.sparse_batch`."""
    return lambda dataset: dataset.sparse_batch(batch_size, row_shape)


def from_list(elements: list[Tree], name: str | None = None) -> data.Dataset:
    """Returns a dataset of elements of one structure, which may be of different shapes."""
    if not elements:
        raise ValueError("Invalid `elements`. `elements` should not be empty.")
    datasets = [Dataset.from_tensors(element) for element in elements]
    return functools.reduce(lambda one, other: one.concatenate(other), datasets)


def get_next_as_optional(iterator: DatasetIterator) -> Optional:
    """Returns the next element of an iterator, if there is one, as a `tf.experimental.Optional`."""
    return iterator.get_next_as_optional()


def get_single_element(dataset: data.Dataset) -> Tree:
    """Returns the only element of a dataset."""
    return dataset.get_single_element()


def get_structure(dataset_or_iterator: data.Dataset | DatasetIterator) -> Tree:
    """Returns the spec of the elements of a dataset or an iterator."""
    return dataset_or_iterator.element_spec


def load(
    path: str | os.PathLike[str],
    element_spec: Tree = None,
    compression: str | None = None,
    reader_func: Callable[..., Dataset] | None = None,
) -> data.Dataset:
    """Returns a dataset that `Dataset.save` has written."""
    return Dataset.load(path, element_spec, compression, reader_func)


def map_and_batch(
    map_func: Callable[..., Tree],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> _Apply:
    """Returns a function for `Dataset.apply` that calls `map` and then `batch`."""
    calls = data.AUTOTUNE if num_parallel_batches is not None else num_parallel_calls
    return lambda dataset: dataset.map(map_func, calls).batch(batch_size, drop_remainder)


def pad_to_cardinality(cardinality: int, mask_key: str = "valid") -> _Apply:
    """Returns a function for `Dataset.apply` that adds elements of zeros up to a number.

    The elements are dicts, and get an entry `mask_key` that says whether an element was there before.
    """

    def apply(dataset: data.Dataset) -> data.Dataset:
        spec, count = dataset.element_spec, int(dataset.cardinality())
        if not isinstance(spec, Mapping):
            raise ValueError("`pad_to_cardinality` requires its input dataset to be a dictionary.")
        if count < 0:
            raise ValueError(f"The dataset must have a known, finite cardinality to be padded, got {count}.")
        if count > cardinality:
            raise ValueError(f"The dataset has {count} elements, more than the {cardinality} to pad it to.")
        zeros = {key: np.zeros([size or 0 for size in each.shape], each.dtype) for key, each in spec.items()}
        padding = Dataset.from_tensors({**zeros, mask_key: False}).repeat(cardinality - count)
        return dataset.map(lambda element: {**element, mask_key: True}).concatenate(padding)

    return apply


def parallel_interleave(
    map_func: Callable[..., data.Dataset],
    cycle_length: int,
    block_length: int = 1,
    sloppy: bool | None = False,
    buffer_output_elements: int | None = None,
    prefetch_input_elements: int | None = None,
) -> _Apply:
    """Returns a function for `Dataset.apply` that calls `Dataset.interleave`."""
    return lambda dataset: dataset.interleave(map_func, cycle_length, block_length, data.AUTOTUNE)


def parse_example_dataset(
    features: Mapping[str, Feature], num_parallel_calls: int | None = 1, deterministic: bool | None = None
) -> _Apply:
    """Returns a function for `Dataset.apply` that parses batches of serialized examples."""
    from replicax.tf._parse import parse_example

    return lambda dataset: dataset.map(lambda serialized: parse_example(serialized, features), num_parallel_calls)


def prefetch_to_device(device: str, buffer_size: int | None = None) -> _Apply:
    """Returns a function for `Dataset.apply` that prefetches elements; they move when they are used."""
    return lambda dataset: dataset.prefetch(data.AUTOTUNE if buffer_size is None else buffer_size)


def sample_from_datasets(
    datasets: Sequence[Dataset],
    weights: ArrayLike | None = None,
    seed: int | None = None,
    stop_on_empty_dataset: bool = False,
) -> Dataset:
    """Returns elements of the datasets in a random order, from each as often as its weight says."""
    return Dataset.sample_from_datasets(datasets, weights, seed, stop_on_empty_dataset)


def save(
    dataset: data.Dataset,
    path: str | os.PathLike[str],
    compression: str | None = None,
    shard_func: Callable[..., Tree] | None = None,
    checkpoint_args: object = None,
) -> None:
    """Writes a dataset to a folder."""
    dataset.save(path, compression, shard_func, checkpoint_args)


def shuffle_and_repeat(buffer_size: int, count: int | None = None, seed: int | None = None) -> _Apply:
    """Returns a function for `Dataset.apply` that calls `shuffle` and then `repeat`."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


EXPERIMENTAL: dict[str, object] = {
    "AutotuneAlgorithm": AutotuneAlgorithm,
    "AutotuneOptions": AutotuneOptions,
    "ExternalStatePolicy": ExternalStatePolicy,
    "OptimizationOptions": OptimizationOptions,
    "RandomDataset": Dataset.random,
    "SHARD_HINT": -1,
    "ServiceOptions": ServiceOptions,
    "TFRecordWriter": TFRecordWriter,
    "ThreadingOptions": ThreadingOptions,
    "assert_cardinality": assert_cardinality,
    "at": at,
    "bucket_by_sequence_length": _applied("bucket_by_sequence_length"),
    "cardinality": cardinality,
    "choose_from_datasets": choose_from_datasets,
    "copy_to_device": copy_to_device,
    "dense_to_ragged_batch": _applied("ragged_batch"),
    "dense_to_sparse_batch": dense_to_sparse_batch,
    "enumerate_dataset": _applied("enumerate"),
    "from_list": from_list,
    "get_next_as_optional": get_next_as_optional,
    "get_single_element": get_single_element,
    "get_structure": get_structure,
    "group_by_window": _applied("group_by_window"),
    "ignore_errors": _applied("ignore_errors"),
    "load": load,
    "map_and_batch": map_and_batch,
    "pad_to_cardinality": pad_to_cardinality,
    "parallel_interleave": parallel_interleave,
    "parse_example_dataset": parse_example_dataset,
    "prefetch_to_device": prefetch_to_device,
    "rejection_resample": _applied("rejection_resample"),
    "sample_from_datasets": sample_from_datasets,
    "save": save,
    "scan": _applied("scan"),
    "shuffle_and_repeat": shuffle_and_repeat,
    "snapshot": _applied("snapshot"),
    "take_while": _applied("take_while"),
    "unbatch": _applied("unbatch"),
    "unique": _applied("unique"),
}
