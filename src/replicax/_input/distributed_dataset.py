"""Distributed datasets: from batches on the host to one share of each batch on every replica's device.

    source -> batch (host) -> shares, one a replica (host, views) -> place (devices) -> buffer -> next

A batch of n rows is divided contiguously: each replica gets ceil(n/r) rows until none are left, and the last ones may
get fewer or none. A background thread does everything up to the buffer, so that the next element is on its way to the
devices while the current one is computed with. What "on the devices" means is the strategy's: it gives `place`.

The thread knows the buffer and the source, never the iterator; see `_data.prefetch`.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from replicax._data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Optional,
    Reading,
    fold,
    iterators,
    tensor_spec,
)
from replicax._data.iterators import call_user
from replicax._data.multi_step import Demand, Several, together_on_host
from replicax._data.prefetch import Buffer, is_small
from replicax._data.reading import packed, unpacked
from replicax._input.agreement import Pass, Round, Worker, agreed, all_static, empty, one_order
from replicax._input.sources import Distributed, Source, normalize_source
from replicax._input.split import ALONE, Shares, not_a_batch, rebatched_rounds
from replicax._job import state as _state

__all__ = ["DistributedDataset", "DistributedDatasetsFromFunction", "DistributedIterator", "Optional"]

# place(round, fetch_to_device): the element made of one host structure for each of this worker's replicas.
Place = Callable[[Round, bool], Any]


class DistributedIterator(ElementIterator, Distributed):
    """An iterator over the elements of a distributed dataset; `iter(distributed_dataset)` makes one.

    `next` raises StopIteration at the end and `get_next` raises `OutOfRangeError`, both again and again. An exception
    in the dataset comes up where its element would have come, and is the last that comes.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(3).batch(2)))
    >>> next(iterator).tolist(), iterator.get_next().tolist()
    ([0, 1], [2])
    >>> bool(iterator.get_next_as_optional().has_value())
    False
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._open(*args, **kwargs)

    def _open(self, dataset: DistributedDataset) -> None:
        if not isinstance(dataset, DistributedDataset):
            raise TypeError(
                f"An iterator is made of a distributed dataset, got {dataset!r:.80} of type {type(dataset).__name__}. "
                "Call `iter(strategy.experimental_distribute_dataset(dataset))`."
            )
        self._dataset = dataset
        self._begin(dataset._readings(), 0)

    @iterators.exclusive
    def _begin(self, readings: list[Reading], position: int) -> None:
        self._readings, self._start, self._position = readings, position, position
        self._topic = self._dataset._next_topic()
        self._buffer: Buffer | None = None
        self._elements: Iterator[Any] | None = None
        self._pushed_back: list[Any] = []
        self._several = None
        self._demand = Demand()
        self._closed = False

    def _ask_for(self, count: int) -> None:
        # The threads of several workers would come to know at different elements, and make other arrays of them.
        if self._dataset._worker.size == 1:
            self._demand.ask(count, self._position)

    def _next_element(self) -> Any:
        if self._closed:
            raise StopIteration
        size = self._dataset._options.experimental_per_replica_buffer_size
        if size <= 0:
            self._elements = self._elements or self._dataset._placed(
                Pass(self._topic), self._readings, self._start, self._demand
            )
            with self._dataset._watched():
                return next(self._elements)
        if self._buffer is None:
            # Neither the thread nor what it calls may hold this iterator: see above.
            placed, topic = self._dataset._placed, self._topic
            arguments = self._readings, self._start, self._demand
            make = lambda stopped: placed(Pass(topic, stopped), *arguments)  # noqa: E731
            buffer = Buffer(make, size, self._dataset._is_at_hand())
            weakref.finalize(self, buffer.stop).atexit = False
            buffer.start()
            self._buffer = buffer
        with self._dataset._watched():
            return self._buffer.take()

    def save_state(self) -> bytes:
        """Returns the position of the iterator: after the last element that it gave, whatever waits in its buffer.

        Each worker saves its own.
        """
        return packed(self._position, self._readings)

    def restore_state(self, state: bytes) -> None:
        """Continues at the position of the iterator whose `save_state` returned `state`; see `DatasetIterator.restore_state`.

        It may be one of another process, over the same dataset and as many replicas. All workers restore together.
        Datasets of other libraries are gone through once more up to that place.

        Raises:
            InvalidArgumentError: `state` is no such state, or of another dataset; the iterator stays as it was.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(6).batch(2))
        >>> iterator = iter(batches)
        >>> _, state = next(iterator), iterator.save_state()
        >>> iterator = iter(batches)
        >>> iterator.restore_state(state)
        >>> [batch.tolist() for batch in iterator]
        [[2, 3], [4, 5]]
        """
        self._refuse_own_functions()
        position, saved = unpacked(state, self._readings)
        self.close(timeout=0)  # so that a thread that waits for an element ends its waiting
        self._begin(self._dataset._readings(saved), position)

    def close(self, timeout: float | None = None) -> None:
        """Ends the iteration, drops what is in the buffer, and waits for the background thread.

        Dropping the iterator, as by leaving a loop, does as much by itself, but for the waiting: the thread ends when
        the dataset has come up with the element that it is at.

        Args:
            timeout: how many seconds to wait at the most; None for no limit.
        """
        self._closed = True
        self._elements = None
        self._pushed_back.clear()
        self._several = None
        if self._buffer is not None:
            self._buffer.stop()
            self._buffer.join(timeout)

    @property
    def element_spec(self) -> Any:
        """The dataset's `element_spec`."""
        return self._dataset.element_spec


class DistributedDataset(Distributed):
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
    """

    _sources: list[Source]
    _share: tuple[int, int]

    def __init__(self, *args: Any, **kwargs: Any):
        self._open(*args, **kwargs)

    def _open(
        self,
        dataset: Any,
        num_replicas: int,
        place: Place,
        options: InputOptions | None = None,
        policy: AutoShardPolicy | None = None,
        worker: Worker = ALONE,
    ) -> None:
        """Sets the dataset up, for strategies: `place` brings the replicas' parts to their devices."""
        self._source = normalize_source(dataset, ahead=_is_buffered(options))
        self._sources = [self._source]
        self._prepare(num_replicas, place, options, worker)
        if self._options.experimental_replication_mode == InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in `distribute_datasets_from_function`."
            )
        if self._total > 1:
            spec = self._source.spec(False)
            if spec is not None and any(s.shape.rank == 0 for s in jax.tree.leaves(spec)):
                raise not_a_batch(spec, self._total)
        policy = self._source.policy if policy is None else policy
        if worker.size > 1:
            policy = self._shard_by_file(policy)
        cuts_anew = self._total > 1 and policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE)
        # The rows of a round; None to split each batch by itself.
        self._batch_size = (_batch_size(self._source) or None) if cuts_anew else None

    def _shard_by_file(self, policy: AutoShardPolicy) -> AutoShardPolicy:
        """Gives this worker its files, where the policy is FILE or, the dataset reading files, AUTO."""
        files, worker = self._source.files, self._worker
        if policy is AutoShardPolicy.AUTO:
            policy = AutoShardPolicy.FILE if files else AutoShardPolicy.DATA
        if policy is AutoShardPolicy.FILE:
            if files < worker.size:
                raise InvalidArgumentError(
                    f"Could not apply FILE based sharding: the dataset only has {files} file(s), which is not enough "
                    f"for the required {worker.size} shards/workers. Set the auto-shard policy to DATA or OFF, or "
                    "write the data to more files; files are told from datasets such as rx.data.TextLineDataset."
                )
            self._share = worker.size, worker.rank
        return policy

    def _prepare(self, num_replicas: int, place: Place, options: InputOptions | None, worker: Worker = ALONE) -> None:
        self._num_replicas, self._worker = num_replicas, worker
        self._total = num_replicas * worker.size  # how many replicas all workers have
        self._number, self._passes = next(_numbers), itertools.count()
        self._place = place
        self._options = options or InputOptions()
        self._share = (1, 0)  # of the files: how many there are, and which of them is this worker's
        self._found_spec: Any = None

    def _readings(self, saved: list[Any] | None = None) -> list[Reading]:
        """Returns new readings of the sources, or those that repeat the saved ones."""
        states = [None] * len(self._sources) if saved is None else saved
        return [Reading(s.nodes, self._share, saved=state) for s, state in zip(self._sources, states, strict=True)]

    def _rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        """Returns this worker's parts from round `start` on, as far as it can tell by itself."""
        (reading,) = readings
        if self._batch_size is not None:
            elements = self._source.make(reading)
            cut = rebatched_rounds(elements, self._batch_size, self._num_replicas, self._worker)
            return (Round(parts, True) for parts in itertools.islice(cut, start, None))
        return Shares(self._source.make(reading, start), self._total, self._worker)

    def _shares_one_order(self) -> bool:
        """Returns whether all workers take their parts of the same batches."""
        return self._worker.size > 1 and self._batch_size is None and self._share == (1, 0)

    def _shapes_follow(self) -> bool:
        """Returns whether this worker can tell by itself which shapes the parts of the others have."""
        spec = self._source.spec(False)
        if self._batch_size is None:
            return True
        return self._batch_size % self._total == 0 and spec is not None and all_static(spec)

    def _replica_spec(self) -> Any:
        """Returns the spec of one replica's part, on the host."""
        spec = self._source.spec(True)
        if self._total == 1:
            return spec
        size = _static_batch_size(spec)
        share = size // self._total if size is not None and size % self._total == 0 else None
        return jax.tree.map(
            lambda s: TensorSpec(None if s.shape.rank is None else (share, *s.shape[1:]), s.dtype), spec
        )

    def _placed(self, this: Pass, readings: list[Reading], start: int, demand: Demand) -> Iterator[Any]:
        # The bound method of a dataset, with no reference to an iterator.
        if self._shares_one_order():
            rounds = one_order(this, readings[0], lambda: self._rounds(readings, start))
        else:
            rounds = self._rounds(readings, start)
        if self._worker.size > 1:
            rounds = agreed(
                this,
                rounds,
                replicas=self._num_replicas,
                count=int(self.cardinality),
                shapes_follow=self._shapes_follow(),
                spec=self._replica_spec,
            )
        return self._on_devices(this, rounds, start, demand)

    def _on_devices(self, this: Pass, rounds: Iterator[Round], position: int, demand: Demand) -> Iterator[Any]:
        """Yields elements made of rounds, as blocks where they are asked for and the rounds are alike."""
        fetch, at_hand, in_a_row = self._options.experimental_fetch_to_device, self._is_at_hand(), 1
        while not this.stopped():
            count, whole = demand.at(position)
            together = whole and count > 1 and fetch
            if whole and count == 1:
                count = in_a_row
            if together and isinstance(rounds, Shares) and (parts := rounds.several(count)) is not None:
                yield Several(self._place(Round(parts, True), fetch), count)
                position += count
                continue
            taken: list[Round] = []
            end: BaseException | None = None
            while len(taken) < count and end is None and not this.stopped():
                try:
                    taken.append(next(rounds))
                except BaseException as error:  # it comes up behind the elements that there were
                    end = error
            parts = None
            if together and count == len(taken) and all(this_round.alike for this_round in taken):
                parts = together_on_host([this_round.parts for this_round in taken])
            if parts is not None:
                yield Several(self._place(Round(parts, True), fetch), count)
            else:
                yield from (self._place(this_round, fetch) for this_round in taken)
            position += len(taken)
            # The rows that are taken for a batch drive out of the processor's caches how one goes to the devices.
            in_a_row = _IN_A_ROW if taken and at_hand and is_small(taken[-1].parts) else 1
            if isinstance(end, StopIteration):
                return
            if end is not None:
                try:
                    raise end
                finally:
                    del end  # its traceback holds this frame

    def _is_at_hand(self) -> bool:
        """Returns whether elements take next to nothing to make, and no code of the user's."""
        return all(source.at_hand for source in self._sources)

    def _next_topic(self) -> str:
        """Returns the name under which the workers agree about the iteration that begins."""
        return f"input {self._number}.{next(self._passes)}"

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for `next`, in which it may wait for other workers."""
        return _state.waiting("next(iterator)") if self._worker.size > 1 else _nothing

    def __iter__(self) -> DistributedIterator:
        iterators.tell()
        return DistributedIterator(self)

    @property
    def element_spec(self) -> Any:
        """The elements' specs: a structure of `PerReplicaSpec`s; of `TensorSpec`s where there is one replica.

        A batch's first dimension is None, unless it is fixed and the same for each replica. Where the dataset does
        not know its spec, such as a list of batches, it is read off the first element.
        """
        if self._found_spec is None:
            spec = tensor_spec(self._replica_spec())
            if self._total > 1:
                spec = jax.tree.map(lambda s: PerReplicaSpec(*[s] * self._num_replicas), spec)
            self._found_spec = spec
        return self._found_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
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
        if self.cardinality < 0 or not self._counts_for_all():
            raise TypeError("The distributed dataset length is unknown.")
        return int(self.cardinality)

    def __bool__(self) -> bool:
        return True  # it is there, whatever its length

    def _counts_for_all(self) -> bool:
        """Returns whether the number of elements, which workers agree on, follows from this worker's data alone."""
        return self._share == (1, 0)

    @property
    def cardinality(self) -> np.int64:
        """The number of elements; -1 for no end, -2 for not known."""
        known = self._source.cardinality
        # Where batches are cut anew, there may be fewer rounds than there were batches.
        return np.int64(known if self._batch_size is None or known == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY)


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
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
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
        context = context or InputContext(num_replicas_in_sync=num_replicas)
        contexts = [context]
        if self._options.experimental_replication_mode == InputReplicationMode.PER_REPLICA:
            count, first = context.num_input_pipelines * num_replicas, context.input_pipeline_id * num_replicas
            contexts = [InputContext(count, first + i, context.num_replicas_in_sync) for i in range(num_replicas)]
        ahead = _is_buffered(options) and len(contexts) == 1
        self._sources = [
            normalize_source(call_user("`dataset_fn` of `distribute_datasets_from_function`", dataset_fn, c), ahead)
            for c in contexts
        ]

    def _shares_one_order(self) -> bool:
        return False

    def _shapes_follow(self) -> bool:
        specs = [source.spec(False) for source in self._sources]
        return all(spec is not None and all_static(spec) for spec in specs)

    def _rounds(self, readings: list[Reading], start: int) -> Iterator[Round]:
        first = start if len(self._sources) == self._num_replicas else start * self._num_replicas
        iterators = [source.make(reading, first) for source, reading in zip(self._sources, readings)]
        if len(iterators) == 1:
            iterators *= self._num_replicas  # one iterator, which feeds all in turn
        while True:
            parts = [next(iterator, _NO_MORE) for iterator in iterators]
            there = [i for i, part in enumerate(parts) if part is not _NO_MORE]
            if not there:
                return
            if len(there) < len(parts):
                spec = self._sources[there[0] % len(self._sources)].spec(True)
                if all_static(spec):
                    return
                parts = [empty(parts[there[0]]) if part is _NO_MORE else part for part in parts]
            yield Round(parts, True)

    def _counts_for_all(self) -> bool:
        return self._worker.size == 1

    def _replica_spec(self) -> Any:
        return self._sources[0].spec(True)

    @property
    def cardinality(self) -> np.int64:
        """The number of elements; -1 for no end, -2 for not known."""
        sizes = {source.cardinality for source in self._sources}
        size = sizes.pop() if len(sizes) == 1 else UNKNOWN_CARDINALITY
        if len(self._sources) == self._num_replicas or size < 0:
            return np.int64(size)
        rounds, rest = divmod(size, self._num_replicas)
        if not rest:
            return np.int64(rounds)
        spec = self._sources[0].spec(False)
        return np.int64(UNKNOWN_CARDINALITY if spec is None else rounds if all_static(spec) else rounds + 1)


_IN_A_ROW = 4  # small batches that are taken before the first of them goes to the devices
_NO_MORE = object()
_numbers = itertools.count()
_nothing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _is_buffered(options: InputOptions | None) -> bool:
    return options is None or options.experimental_per_replica_buffer_size > 0


def _static_batch_size(spec: Any) -> int | None:
    """Returns the first dimension of all leaves of `spec`, if it is known and one."""
    sizes = {s.shape[0] if s.shape.rank else None for s in jax.tree.leaves(spec)}
    return sizes.pop() if len(sizes) == 1 else None


def _batch_size(source: Source) -> int | None:
    """Returns the size of the source's batches, if their spec or the way the dataset was made tells it."""
    spec = source.spec(False)
    if spec is None and source.batch_size is None:
        try:
            spec = source.spec(True)
        except InvalidArgumentError:  # there is no element to tell it from
            return None
    return source.batch_size if (size := _static_batch_size(spec)) is None else size
