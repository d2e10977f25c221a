"""`DistributedDatasetsFromFunction`: distributed datasets whose parts for the replicas the user makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from replicax._base.types import InputContext, InputOptions, InputReplicationMode, Tree
from replicax._data.calls import call_user
from replicax._data.nodes.node import node_of
from replicax._data.reading import Position, Reading
from replicax._data.specs import UNKNOWN_CARDINALITY
from replicax._input.agreement import Round, Worker, all_static, empty
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.iterator import Place, PlacedRounds
from replicax._input.sources import as_dataset, is_buffered
from replicax._input.split import ALONE

_NO_MORE = object()


class ReplicaBatches(PlacedRounds):
    """Rounds of batches of single replicas; the arguments are those of `DistributedDatasetsFromFunction`."""

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
        super().__init__(num_replicas, place, options, worker)
        _check_placement(self.options)
        context = context or InputContext(num_replicas_in_sync=num_replicas)
        contexts = [context]
        if self.options.experimental_replication_mode == InputReplicationMode.PER_REPLICA:
            count, first = context.num_input_pipelines * num_replicas, context.input_pipeline_id * num_replicas
            contexts = [InputContext(count, first + i, context.num_replicas_in_sync) for i in range(num_replicas)]
        ahead = is_buffered(options) and len(contexts) == 1
        self.sources = [
            as_dataset(call_user("`dataset_fn` of `distribute_datasets_from_function`", dataset_fn, c), ahead)
            for c in contexts
        ]
        self.nodes = [node_of(source) for source in self.sources]

    def shares_one_order(self) -> bool:
        return False

    def position_after(self, rounds: int) -> Position:
        return Position(rounds, each=1 if len(self.sources) == self.num_replicas else self.num_replicas)

    def shapes_follow(self) -> bool:
        specs = [node.spec(False) for node in self.nodes]
        return all(spec is not None and all_static(spec) for spec in specs)

    def rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        first = start if len(self.sources) == self.num_replicas else start * self.num_replicas
        iterators = [node.iterate(reading, first) for node, reading in zip(self.nodes, readings)]
        if len(iterators) == 1:
            iterators *= self.num_replicas  # one iterator, which feeds all in turn
        while True:
            parts = [next(iterator, _NO_MORE) for iterator in iterators]
            there = [i for i, part in enumerate(parts) if part is not _NO_MORE]
            if not there:
                return
            if len(there) < len(parts):
                spec = self.nodes[there[0] % len(self.sources)].spec(True)
                if all_static(spec):
                    return
                parts = [empty(parts[there[0]]) if part is _NO_MORE else part for part in parts]
            yield Round(parts, True)

    def counts_for_all(self) -> bool:
        return self.worker.size == 1

    def replica_spec(self) -> Tree:
        return self.nodes[0].spec(True)

    def cardinality(self) -> int:
        sizes = {node.cardinality for node in self.nodes}
        size = sizes.pop() if len(sizes) == 1 else UNKNOWN_CARDINALITY
        if len(self.sources) == self.num_replicas or size < 0:
            return size
        rounds, rest = divmod(size, self.num_replicas)
        if not rest:
            return rounds
        spec = self.nodes[0].spec(False)
        return UNKNOWN_CARDINALITY if spec is None else rounds if all_static(spec) else rounds + 1


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
        self._rounds = ReplicaBatches(dataset_fn, num_replicas, place, options, context, worker)


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
