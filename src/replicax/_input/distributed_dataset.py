"""`DistributedDataset`: each global batch as one share on every replica's device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._base import doc_pages
from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import AutoShardPolicy, InputOptions, InputReplicationMode, Tree
from replicax._data import iterators
from replicax._data.calls import fold
from replicax._data.nodes.node import Node, node_of
from replicax._data.reading import Position, Reading
from replicax._data.skipping import warn_of_making
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, tensor_spec
from replicax._input.agreement import Round, Worker, all_static
from replicax._input.iterator import DistributedIterator, OfRounds, Place, PlacedRounds
from replicax._input.sources import as_dataset, is_buffered
from replicax._input.split import ALONE, Shares, not_a_batch, rebatched_rounds


class BatchRounds(PlacedRounds):
    """The rounds of a dataset of global batches; the arguments are those of `DistributedDataset`."""

    def __init__(
        self,
        dataset: object,
        num_replicas: int,
        place: Place,
        options: InputOptions | None = None,
        policy: AutoShardPolicy | None = None,
        worker: Worker = ALONE,
    ) -> None:
        source = as_dataset(dataset, ahead=is_buffered(options))
        super().__init__(num_replicas, place, options, worker)
        self._source = node_of(source)
        self.sources, self.nodes = [source], [self._source]
        if self.options.experimental_replication_mode == InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in `distribute_datasets_from_function`."
            )
        if self.total > 1:
            spec = self._source.spec(False)
            if spec is not None and any(s.shape.rank == 0 for s in jax.tree.leaves(spec)):
                raise not_a_batch(spec, self.total)
        policy = source.options().experimental_distribute.auto_shard_policy if policy is None else policy
        if worker.size > 1:
            policy = self._shard_by_file(policy)
        cuts_anew = self.total > 1 and policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE)
        # The rows of a round; None to split each batch by itself.
        self._batch_size = (_batch_size(self._source) or None) if cuts_anew else None

    def _shard_by_file(self, policy: AutoShardPolicy) -> AutoShardPolicy:
        """Gives this worker its files, where the policy is FILE or, the dataset reading files, AUTO."""
        files, worker = self._source.files, self.worker
        if policy is AutoShardPolicy.AUTO:
            policy = AutoShardPolicy.FILE if files else AutoShardPolicy.DATA
        if policy is AutoShardPolicy.FILE:
            if files < worker.size:
                raise InvalidArgumentError(
                    f"Could not apply FILE based sharding: the dataset only has {files} file(s), which is not enough "
                    f"for the required {worker.size} shards/workers. Set the auto-shard policy to DATA or OFF, or "
                    "write the data to more files; files are told from datasets such as rx.data.TextLineDataset. "
                    f"See {doc_pages.page('how-to/input')}."
                )
            self.share = worker.size, worker.rank
        return policy

    def rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        (reading,) = readings
        if self._batch_size is not None:
            warn_of_making(start, f"{self._source.origin}, whose batches are cut anew for the replicas,")
            elements = self._source.iterate(reading)
            cut = rebatched_rounds(elements, self._batch_size, self.num_replicas, self.worker)
            return (Round(parts, True) for parts in itertools.islice(cut, start, None))
        return Shares(self._source.iterate(reading, start), self.total, self.worker)

    def shares_one_order(self) -> bool:
        return self.worker.size > 1 and self.position_after(0).of_all

    def position_after(self, rounds: int) -> Position:
        return Position(rounds, of_all=self._batch_size is None and self.share == (1, 0))

    def shapes_follow(self) -> bool:
        spec = self._source.spec(False)
        if self._batch_size is None:
            return True
        return self._batch_size % self.total == 0 and spec is not None and all_static(spec)

    def replica_spec(self) -> Tree:
        spec = self._source.spec(True)
        if self.total == 1:
            return spec
        size = _static_batch_size(spec)
        share = size // self.total if size is not None and size % self.total == 0 else None
        return jax.tree.map(
            lambda s: TensorSpec(None if s.shape.rank is None else (share, *s.shape[1:]), s.dtype), spec
        )

    def counts_for_all(self) -> bool:
        return self.share == (1, 0)

    def cardinality(self) -> int:
        known = self._source.cardinality
        # Batches that are cut anew may make fewer rounds than there were batches.
        return known if self._batch_size is None or known == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY


def _static_batch_size(spec: Tree) -> int | None:
    """Returns the first dimension of all leaves of `spec`, if it is known and one."""
    sizes = {s.shape[0] if s.shape.rank else None for s in jax.tree.leaves(spec)}
    return sizes.pop() if len(sizes) == 1 else None


def _batch_size(source: Node) -> int | None:
    """Returns the size of the source's batches, if their spec or the way the dataset was made tells it."""
    spec = source.spec(False)
    if spec is None and source.batch_size is None:
        try:
            spec = source.spec(True)
        except InvalidArgumentError:  # the dataset is empty
            return None
    return source.batch_size if (size := _static_batch_size(spec)) is None else size


class DistributedDataset(OfRounds):
    """A dataset whose batches come split, one part for each replica, each on its replica's device.

    `Strategy.experimental_distribute_dataset` makes one. The batches of the dataset are the global ones. Each replica
    gets ceil(n / replicas) rows of n until none are left, so that the last ones may get fewer or none. With one
    replica the batches come whole, as plain tensors, and elements need not be batches.

    An element has the structure of the dataset's, with PerReplica values for leaves. Each `iter` starts anew.

    Args:
        dataset: batches on the host: a `Dataset` or anything else that can be iterated over again and again.
        num_replicas: how many parts to make.
        place: makes the element of one host structure a replica; with one replica, a plain one of a list of one.
        options: how to bring elements to the devices.
        policy: the sharding policy, if not the dataset's own.

    Raises:
        TypeError: `dataset` is data and not a dataset, an iterator, or distributed already.
        NotImplementedError: `options` asks for one dataset a replica.
        InvalidArgumentError: the elements have no first dimension to split; here, if the dataset's spec says so, or
            at that element.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(6).batch(4))
    >>> isinstance(batches, rx.DistributedDataset)
    True
    >>> [[part.tolist() for part in batch.values] for batch in batches]
    [[[0, 1], [2, 3]], [[4], [5]]]
    """

    _rounds: PlacedRounds
    _found_spec: Tree = None

    def __init__(self, *args: Any, **kwargs: Any):  # the signature that `tf.distribute.DistributedDataset` shows
        self._rounds = BatchRounds(*args, **kwargs)

    _is_for_workers = False  # whether only the workers of a ClusterCoordinator may iterate over it

    def __iter__(self) -> DistributedIterator:
        if self._is_for_workers:
            raise ValueError(
                "To use this dataset, you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset. "
                "In the coordinator's program, iterate over the dataset that was distributed."
            )
        iterators.announce()
        return DistributedIterator(self)

    @property
    def element_spec(self) -> Tree:
        """The elements' specs: a structure of `PerReplicaSpec`s; of `TensorSpec`s where there is one replica.

        A batch's first dimension is None, unless it is fixed and the same for each replica. Where the dataset does
        not know its spec, such as a list of batches, it is read off the first element.

        >>> import numpy as np, replicax as rx
        >>> dataset = rx.data.Dataset.from_tensor_slices(np.ones((6, 3), np.float32)).batch(2)
        >>> rx.OneDeviceStrategy("GPU:0").experimental_distribute_dataset(dataset).element_spec
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        """
        if self._found_spec is None:
            rounds = self._rounds
            spec = tensor_spec(rounds.replica_spec())
            if rounds.total > 1:
                spec = jax.tree.map(lambda s: PerReplicaSpec(*[s] * rounds.num_replicas), spec)
            self._found_spec = spec
        return self._found_spec

    def reduce(self, initial_state: Tree, reduce_func: Callable[[Tree, Tree], Tree]) -> Tree:
        """Returns the last of the states that `state = reduce_func(state, element)` goes through, as tensors.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> dataset = strategy.experimental_distribute_dataset(rx.data.Dataset.range(5).batch(2))
        >>> int(dataset.reduce(np.int32(0), lambda count, batch: count + batch.size))
        5
        """
        iterator = iter(self)
        try:
            return fold(iterator, initial_state, reduce_func)
        finally:
            iterator.close(timeout=0)  # no reason to wait for the thread

    def __len__(self) -> int:
        """Returns the number of elements; raises TypeError where they have no end, or their number is not known.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> len(strategy.experimental_distribute_dataset(rx.data.Dataset.range(10).batch(4)))
        3
        """
        if self.cardinality == INFINITE_CARDINALITY:
            raise TypeError("The distributed dataset is infinite.")
        if self.cardinality < 0 or not self._rounds.counts_for_all():
            raise TypeError("The distributed dataset length is unknown.")
        return int(self.cardinality)

    def __bool__(self) -> bool:
        return True  # whatever its length

    @property
    def cardinality(self) -> np.int64:
        """The number of elements; -1 for no end, -2 for not known.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> int(strategy.experimental_distribute_dataset(rx.data.Dataset.range(10).batch(4)).cardinality)
        3
        """
        return np.int64(self._rounds.cardinality())


def for_workers(dataset: DistributedDataset) -> DistributedDataset:
    """Return a dataset over which only the workers of a ClusterCoordinator may iterate."""
    dataset._is_for_workers = True
    return dataset


def for_this_process(dataset: Tree) -> Tree:
    """Return a dataset for iteration in this process, by a library that trains here."""
    if not isinstance(dataset, DistributedDataset):
        return dataset
    readable = copy.copy(dataset)
    readable._is_for_workers = False
    return readable
