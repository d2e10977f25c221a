"""Datasets that can be distributed: our own, other libraries', and iterables of batches that start anew each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from replicax._base.host_memory import Pool
from replicax._base.specs import TensorSpec
from replicax._base.tracebacks import origin
from replicax._base.types import AutoShardPolicy, InputOptions, Tree
from replicax._data.calls import call_user
from replicax._data.dataset import Dataset, dataset_of
from replicax._data.elements import as_host
from replicax._data.nodes.node import Replayed, Unsure, first_spec, node_of
from replicax._data.options import Options
from replicax._data.reading import Reading
from replicax._data.specs import UNKNOWN_CARDINALITY, shown_spec


class Distributed:
    """The base class of distributed datasets."""


def is_buffered(options: InputOptions | None) -> bool:
    """Returns whether elements are made ahead of their use."""
    return options is None or options.experimental_per_replica_buffer_size > 0


_MAKE_DATASET = "Make batches of it: `rx.data.Dataset.from_tensor_slices(arrays).batch(global_batch_size)`."


def as_dataset(dataset: Any, ahead: bool = False) -> Dataset:
    """Returns as a `Dataset` anything that yields batches each time it is iterated over.

    `ahead` says that elements are made before they are needed, as `prefetch` does it.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, Distributed):
        raise TypeError(f"The dataset is distributed already: got a {kind}. Pass the dataset that it was made of.")
    if isinstance(dataset, Dataset):
        in_place = node_of(dataset).without_thread if ahead else None
        return dataset if in_place is None else dataset_of(in_place, dataset.options())
    if hasattr(dataset, "as_numpy_iterator") and hasattr(dataset, "element_spec"):
        return _of_tensorflow(dataset)
    if isinstance(dataset, (str, bytes, dict, tuple)) or hasattr(dataset, "__array__"):
        raise TypeError(f"Expected a dataset, which yields batches; got {kind}, which is data. {_MAKE_DATASET}")
    if hasattr(dataset, "__next__"):
        raise TypeError(
            f"Expected a dataset, of which each iteration starts anew; got the iterator {kind}, which runs once. "
            "Pass what it was made of, or `rx.data.Dataset.from_generator(lambda: <a new iterator>)`."
        )
    if not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        made = " If it makes one, call it, or pass `rx.data.Dataset.from_generator(it)`." if callable(dataset) else ""
        raise TypeError(f"Expected a dataset or another iterable of batches, got {kind}.{made}")
    return dataset_of(_Iterable(dataset))


class _Iterable(Replayed):
    """Any other iterable, whose spec is known once an element has been seen."""

    def __init__(self, iterable: Any):
        try:
            cardinality = len(iterable)
        except (TypeError, NotImplementedError, ValueError):  # as libraries raise if the length is unknown
            cardinality = UNKNOWN_CARDINALITY
        name, is_sequence = type(iterable).__name__, isinstance(iterable, Sequence) or hasattr(iterable, "__getitem__")
        unsure = [] if is_sequence else [Unsure(f"the iterable {name}", origin())]
        super().__init__(name, cardinality=cardinality, unsure=unsure)
        self._iterable, self._pool, self._seen = iterable, Pool(), list[Tree]()

    def find_spec(self, may_call: bool) -> Tree:
        if may_call and not self._seen:
            first_spec(self)
        return self._seen[0] if self._seen else None

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        for element in call_user("The `__iter__` of the dataset", iter, self._iterable):
            host = jax.tree.map(
                self._pool.settled, _host_element(element)
            )  # others may fill one buffer again and again
            if not self._seen:
                self._seen.append(shown_spec(host))
            yield host


class _TensorFlowDataset(Replayed):
    """A `tf.data.Dataset`, known by its methods: TensorFlow is not imported here."""

    def __init__(self, dataset: Any):
        unsure = [Unsure("the tf.data.Dataset", origin())]
        super().__init__("tf.data.Dataset", cardinality=int(dataset.cardinality()), unsure=unsure)
        self._dataset = dataset

    def find_spec(self, may_call: bool) -> Tree:
        return jax.tree.map(
            lambda s: TensorSpec(None if s.shape.rank is None else s.shape.as_list(), s.dtype.as_numpy_dtype),
            self._dataset.element_spec,
        )

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        return map(_host_element, self._dataset.as_numpy_iterator())


def _of_tensorflow(dataset: Any) -> Dataset:
    options = Options()
    policy = dataset.options().experimental_distribute.auto_shard_policy
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy(int(policy))
    return dataset_of(_TensorFlowDataset(dataset), options)


def _host_element(element: Tree) -> Tree:
    """Returns an element of another library's dataset with numpy leaves. Unlike in `Dataset`, lists are structures."""
    try:
        return jax.tree.map(as_host, element)
    except TypeError as e:
        raise TypeError(
            f"An element of the dataset has a leaf that is neither an array, a number nor a string: {e}"
        ) from e
