"""Datasets and values of which each worker has its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from replicax._base.messages import received
from replicax._base.specs import TensorSpec
from replicax._base.types import Tree
from replicax._data.dataset import Dataset
from replicax._data.iterators import ElementIterator
from replicax._engine.function import is_function
from replicax._input.distributed_dataset import DistributedDataset, for_this_process
from replicax._input.iterator import rounds_of
from replicax._parameter_server import scheduling
from replicax._parameter_server.scheduling import Kinds
from replicax._tracing.dataset_reads import element_arrays

AskKinds: TypeAlias = "Callable[[PerWorkerDistributedIterator], Kinds]"
_NOT_HERE = "Iterating over an `AsyncDistributedIterator` is not supported right now."


class PerWorkerValue:
    """A value of which each worker has its own. As an argument of a scheduled function it is that of its worker.

    >>> import jax.numpy as jnp, replicax as rx
    >>> table = coordinator.create_per_worker_value(lambda: jnp.arange(3))
    >>> isinstance(table, rx.coordinator.PerWorkerValue)
    True
    """


def made(source: object) -> Iterable[Tree]:
    """Returns the dataset that a user gave for each worker: itself, or what a function returns.

    Raises:
        ValueError: it is no dataset.
    """
    dataset = source() if callable(source) and not isinstance(source, (Dataset, DistributedDataset)) else source
    if not isinstance(dataset, (Dataset, DistributedDataset)) and not hasattr(dataset, "element_spec"):
        raise ValueError(
            f"Unexpected dataset type! A per-worker dataset is made of a Dataset, or of a function that returns one, "
            f"got {received(dataset)}."
        )
    return for_this_process(dataset)  # type: ignore[no-any-return]


class _PerWorkerDataset:
    """A dataset of which each worker has its own.

    Args:
        source: a dataset, or a function that makes one.
        ask_kinds: returns the shapes and dtypes of some worker's next element.
    """

    _numbers = itertools.count()

    def __init__(self, source: object, ask_kinds: AskKinds):
        self.source, self.ask_kinds = source, ask_kinds
        self.key = f"dataset {next(self._numbers)}"
        with scheduling.on_worker(0):
            self._element_spec = made(source).element_spec  # type: ignore[attr-defined]

    @property
    def element_spec(self) -> Tree:
        """The specs of an element, with None for dimensions that may differ."""
        return self._element_spec

    def __iter__(self) -> Iterator[Tree]:
        return PerWorkerDistributedIterator(self)


class PerWorkerDatasetFromDatasetFunction(_PerWorkerDataset):
    """A dataset that each worker makes by calling a function."""


class PerWorkerDatasetFromDataset(_PerWorkerDataset):
    """A dataset of which each worker has a copy."""


class PerWorkerDistributedIterator(PerWorkerValue, ElementIterator):
    """An iterator of which each worker has its own: pass it to `ClusterCoordinator.schedule`.

    There is nothing to iterate over in the coordinator's process.
    """

    _numbers = itertools.count()

    def __init__(self, dataset: _PerWorkerDataset):
        self.dataset = self._dataset = dataset
        self.key = f"iterator {next(self._numbers)}"
        self._known: Kinds | None = None  # of a first element
        self._zeros: tuple[Kinds, list[jax.Array]] | None = None  # the arrays that were made up last

    @property
    def element_spec(self) -> Tree:
        return self._dataset.element_spec

    def _next_element(self) -> NoReturn:
        raise NotImplementedError(_NOT_HERE)

    def get_next(self) -> Tree:
        return next(self)

    def _pull(self) -> Tree:
        """Returns zeros like an element, for a function that is traced for workers."""
        tracing = scheduling.tracing()
        if tracing is None:
            raise NotImplementedError(_NOT_HERE)
        kinds = tracing.next_kinds() or self._first_kinds()
        if self._zeros is None or self._zeros[0] != kinds:
            self._zeros = kinds, [jnp.zeros(shape, dtype) for shape, dtype in kinds]
        tree: PyTreeDef = jax.tree.structure(self.element_spec)
        return tree.unflatten(self._zeros[1])

    def _first_kinds(self) -> Kinds:
        if self._known is None:
            specs: list[Any] = jax.tree.leaves(self.element_spec)
            if all(isinstance(spec, TensorSpec) and spec.shape.is_fully_defined() for spec in specs):
                self._known = tuple((tuple(spec.shape), jnp.dtype(spec.dtype).name) for spec in specs)
            else:
                self._known = self.dataset.ask_kinds(self)
        return self._known

    def _push_back(self, element: Tree) -> None:
        """Does nothing: it was made up."""


def kinds_of(element: Tree) -> Kinds:
    """Returns the shapes and dtypes of an element's arrays."""
    return tuple((tuple(array.shape), jnp.dtype(array.dtype).name) for array in element_arrays(element))


def per_worker_dataset(source: object, ask_kinds: AskKinds) -> _PerWorkerDataset:
    """Returns a per-worker dataset of a dataset, or of a function that makes one."""
    kind: type[_PerWorkerDataset] = PerWorkerDatasetFromDataset
    if callable(source) and not isinstance(source, (Dataset, DistributedDataset)):
        kind = PerWorkerDatasetFromDatasetFunction
    if is_function(source):
        source = source.python_function
    elif isinstance(source, DistributedDataset):  # for the strategy's one replica its batches come whole
        (source,) = rounds_of(source).sources
    return kind(source, ask_kinds)
