"""`DistributedDatasetsFromFunction`: distributed datasets whose parts for the replicas the user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from replicax._base.types import InputContext, InputOptions, InputReplicationMode, Tree
from replicax._data.calls import call_user
from replicax._data.nodes.node import node_of
from replicax._data.reading import Position, Reading
from replicax._data.specs import UNKNOWN_CARDINALITY
from replicax._input.agreement import Round, Worker, all_static, empty
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.placed_rounds import Place
from replicax._input.sources import as_dataset, is_buffered
from replicax._input.split import ALONE

_NO_MORE = object()


class DistributedDatasetsFromFunction(DistributedDataset):
    """A distributed dataset whose parts the user makes: `Strategy.distribute_datasets_from_function`.

    `dataset_fn` is called at once, and its batches are those of single replicas: consecutive ones go to replicas
    0, 1, ... in turn, not split. With `InputReplicationMode.PER_REPLICA` it is called once for each replica, and
    makes that one's batches.

    When the data end within a round, the replicas left over get empty batches; unless the elements' shapes are all
    fixed (`drop_remainder=True`, or elements that are no batches), for then the round is dropped.

    Args:
        dataset_fn: takes an `InputContext`, and returns what `experimental_distribute_dataset` takes.
        num_replicas: how many replicas' batches make a round.
        place: as for `DistributedDataset`.
        options: how to bring elements to the devices.
        context: the context of this worker; by default, that of a lone one.

    Raises:
        TypeError: `dataset_fn` is not callable, or does not return a dataset.
        ValueError: `options` contradict each other about the place of the datasets.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], object],
        num_replicas: int,
        place: Place,
        options: InputOptions | None = None,
        context: InputContext | None = None,
        worker: Worker = ALONE,
    ):
        if not callable(dataset_fn):
            raise TypeError(
                f"{type(dataset_fn).__name__!r} object is not callable: pass a function that takes an InputContext and "
                "returns a dataset. A dataset itself goes to `experimental_distribute_dataset`."
            )
        self._prepare(num_replicas, place, options, worker)
        _check_placement(self._options)
        context = context or InputContext(num_replicas_in_sync=num_replicas)
        contexts = [context]
        if self._options.experimental_replication_mode == InputReplicationMode.PER_REPLICA:
            count, first = context.num_input_pipelines * num_replicas, context.input_pipeline_id * num_replicas
            contexts = [InputContext(count, first + i, context.num_replicas_in_sync) for i in range(num_replicas)]
        ahead = is_buffered(options) and len(contexts) == 1
        self._sources = [
            as_dataset(call_user("`dataset_fn` of `distribute_datasets_from_function`", dataset_fn, c), ahead)
            for c in contexts
        ]

    def _shares_one_order(self) -> bool:
        return False

    def _told(self, rounds: int) -> Position:
        return Position(rounds, each=1 if len(self._sources) == self._num_replicas else self._num_replicas)

    def _shapes_follow(self) -> bool:
        specs = [node_of(source).spec(False) for source in self._sources]
        return all(spec is not None and all_static(spec) for spec in specs)

    def _rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        first = start if len(self._sources) == self._num_replicas else start * self._num_replicas
        iterators = [node_of(source).iterate(reading, first) for source, reading in zip(self._sources, readings)]
        if len(iterators) == 1:
            iterators *= self._num_replicas  # one iterator, which feeds all in turn
        while True:
            parts = [next(iterator, _NO_MORE) for iterator in iterators]
            there = [i for i, part in enumerate(parts) if part is not _NO_MORE]
            if not there:
                return
            if len(there) < len(parts):
                spec = node_of(self._sources[there[0] % len(self._sources)]).spec(True)
                if all_static(spec):
                    return
                parts = [empty(parts[there[0]]) if part is _NO_MORE else part for part in parts]
            yield Round(parts, True)

    def _counts_for_all(self) -> bool:
        return self._worker.size == 1

    def _replica_spec(self) -> Tree:
        return node_of(self._sources[0]).spec(True)

    @property
    def cardinality(self) -> np.int64:
        """The number of elements; -1 for no end, -2 for not known."""
        sizes = {node_of(source).cardinality for source in self._sources}
        size = sizes.pop() if len(sizes) == 1 else UNKNOWN_CARDINALITY
        if len(self._sources) == self._num_replicas or size < 0:
            return np.int64(size)
        rounds, rest = divmod(size, self._num_replicas)
        if not rest:
            return np.int64(rounds)
        spec = node_of(self._sources[0]).spec(False)
        return np.int64(UNKNOWN_CARDINALITY if spec is None else rounds if all_static(spec) else rounds + 1)


def _check_placement(options: InputOptions) -> None:
    """Raise ValueError for options that TensorFlow refuses. They make no difference here."""
    if not options.experimental_place_dataset_on_device:
        return
    if options.experimental_replication_mode != InputReplicationMode.PER_REPLICA:
        raise ValueError(
            "When `experimental_place_dataset_on_device` is set for dataset placement, you must also specify "
            f"`PER_REPLICA` for the replication mode, got {options!r}."
        )
    if options.experimental_fetch_to_device:
        raise ValueError(
            "`experimental_place_dataset_on_device` can not be set to True when experimental_fetch_to_device is True "
            f"and replication mode is set to `PER_REPLICA`, got {options!r}."
        )
