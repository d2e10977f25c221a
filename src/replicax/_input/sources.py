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
from replicax._data.dataset import Dataset
from replicax._data.elements import as_host
from replicax._data.iterators import Unsure
from replicax._data.options import Options
from replicax._data.reading import Reading, replayed
from replicax._data.specs import UNKNOWN_CARDINALITY, first_spec, shown_spec


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
        in_place = dataset._in_place if ahead else None
        return dataset if in_place is None else in_place._with(dataset._options)
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
    return _of_iterable(dataset)


def _of_iterable(dataset: Any) -> Dataset:
    """Returns any other iterable as a dataset, whose spec is known once an element has been seen."""
    seen: list[Tree] = []
    pool = Pool()

    @replayed
    def make(reading: Reading) -> Iterator[Tree]:
        for element in call_user("The `__iter__` of the dataset", iter, dataset):
            host = jax.tree.map(pool.settled, _host_element(element))  # others may fill one buffer again and again
            if not seen:
                seen.append(shown_spec(host))
            yield host

    def spec(probe: bool) -> Tree:
        if probe and not seen:
            first_spec(make)
        return seen[0] if seen else None

    try:
        cardinality = len(dataset)
    except (TypeError, NotImplementedError, ValueError):  # as libraries raise where the length is unknown
        cardinality = UNKNOWN_CARDINALITY
    sequence = isinstance(dataset, Sequence) or hasattr(dataset, "__getitem__")
    unsure = [] if sequence else [Unsure(f"the iterable {type(dataset).__name__}", origin())]
    return Dataset._made(make, spec, cardinality, unsure=unsure)


def _of_tensorflow(dataset: Any) -> Dataset:
    """Returns a `tf.data.Dataset`, known by its methods, as one of ours: TensorFlow is not imported here."""
    spec = jax.tree.map(
        lambda s: TensorSpec(None if s.shape.rank is None else s.shape.as_list(), s.dtype.as_numpy_dtype),
        dataset.element_spec,
    )
    options = Options()
    policy = dataset.options().experimental_distribute.auto_shard_policy
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy(int(policy))

    @replayed
    def make(reading: Reading) -> Iterator[Tree]:
        return map(_host_element, dataset.as_numpy_iterator())

    unsure = [Unsure("the tf.data.Dataset", origin())]
    return Dataset._made(make, lambda probe: spec, int(dataset.cardinality()), options=options, unsure=unsure)


def _host_element(element: Tree) -> Tree:
    """Returns an element of another library's dataset with numpy leaves. Unlike in `Dataset`, lists are structures."""
    try:
        return jax.tree.map(as_host, element)
    except TypeError as e:
        raise TypeError(
            f"An element of the dataset has a leaf that is neither an array, a number nor a string: {e}"
        ) from e
