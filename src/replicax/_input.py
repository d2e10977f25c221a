"""Distributed datasets: from batches on the host to one share of each batch on every replica's device.

    source -> batch (host) -> shares, one a replica (host, views) -> place (devices) -> buffer -> next

A batch of n rows is divided contiguously: each replica gets ceil(n/r) rows until none are left, and the last ones may
get fewer or none. A background thread does everything up to the buffer, so that the next element is on its way to the
devices while the current one is computed with. What "on the devices" means is the strategy's: it gives `place`.

The thread knows the buffer and the source, never the iterator. So an iterator that nobody holds any more is collected,
and its going stops the thread.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _runtime
from ._agreed_input import Pass, Round, Worker, agreed, all_static, empty
from ._data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    ElementIterator,
    Maker,
    Optional,
    as_host,
    first_spec,
    fold,
    num_rows,
    regroup,
    shown_spec,
    tensor_spec,
)
from ._errors import InvalidArgumentError
from ._files import shared
from ._specs import PerReplicaSpec, TensorSpec
from ._types import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode

__all__ = ["DistributedDataset", "DistributedDatasetsFromFunction", "DistributedIterator", "Optional"]

# place(round, fetch_to_device): the element made of one host structure for each of this worker's replicas.
Place = Callable[[Round, bool], Any]

_ALONE = Worker()

# Set by compiled functions. `_lift(iterator)` may give the next element in its own way, or return NotImplemented;
# `_on_iterate(dataset)` is told that a distributed dataset is about to be iterated over.
_lift: Callable[[DistributedIterator], Any] | None = None
_on_iterate: Callable[[Any], None] | None = None


# --- sources ---------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What a distributed dataset needs to know of the dataset that it distributes."""

    make: Maker  # a new iterator over elements: structures of host arrays
    spec: Callable[[bool], Any]  # see Dataset: the elements' specs, or None where only probing would tell
    cardinality: int
    batch_size: int | None
    policy: AutoShardPolicy
    files: int = 0  # how many files it reads


_MAKE_DATASET = "Make batches of it: `rx.data.Dataset.from_tensor_slices(arrays).batch(global_batch_size)`."


def normalize_source(dataset: Any) -> Source:
    """A `Source` of anything that yields batches, again each time it is iterated over."""
    kind = type(dataset).__name__
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise TypeError(f"The dataset is distributed already: got a {kind}. Pass the dataset that it was made of.")
    if isinstance(dataset, Dataset):
        policy = dataset._options.experimental_distribute.auto_shard_policy
        return Source(dataset._make, dataset._spec, dataset._cardinality, dataset._batch_size, policy, dataset._files)
    if hasattr(dataset, "as_numpy_iterator") and hasattr(dataset, "element_spec"):
        return _tf_source(dataset)
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

    return _foreign_source(dataset)


def _foreign_source(dataset: Any) -> Source:
    """Anything else that can be iterated over: its spec is known once an element has been seen."""
    seen: list[Any] = []

    def make() -> Iterator[Any]:
        for element in dataset:
            host = _host_element(element)
            if not seen:
                seen.append(shown_spec(host))
            yield host

    def spec(probe: bool) -> Any:
        if probe and not seen:
            first_spec(make)
        return seen[0] if seen else None

    try:
        cardinality = len(dataset)
    except (TypeError, NotImplementedError, ValueError):  # as different libraries say that they cannot tell
        cardinality = UNKNOWN_CARDINALITY
    return Source(make, spec, cardinality, None, AutoShardPolicy.AUTO)


def _tf_source(dataset: Any) -> Source:
    """A `tf.data.Dataset`, by what it can do: TensorFlow is not imported here."""
    spec = jax.tree.map(
        lambda s: TensorSpec(None if s.shape.rank is None else s.shape.as_list(), s.dtype.as_numpy_dtype),
        dataset.element_spec,
    )
    policy = AutoShardPolicy(int(dataset.options().experimental_distribute.auto_shard_policy))

    def make() -> Iterator[Any]:
        return map(_host_element, dataset.as_numpy_iterator())

    return Source(make, lambda probe: spec, int(dataset.cardinality()), None, policy)


def _host_element(element: Any) -> Any:
    """An element of another library's dataset with numpy leaves. Unlike in `Dataset`, lists are structures."""
    try:
        return jax.tree.map(as_host, element)
    except TypeError as e:
        raise TypeError(f"An element of the dataset holds what is neither array, number nor string: {e}") from e


# --- the split -------------------------------------------------------------------------------------------------------


def split_batch(element: Any, num_replicas: int) -> list[Any]:
    """One part of the batch `element` for each replica, as views: ceil(n / num_replicas) rows until none are left.

    >>> [part.tolist() for part in split_batch(np.arange(5), 4)]
    [[0, 1], [2, 3], [4], []]
    """
    structure: Any
    leaves, structure = jax.tree.flatten(_batch(element, num_replicas))
    share = -(-leaves[0].shape[0] // num_replicas)
    return [structure.unflatten([a[i * share : (i + 1) * share] for a in leaves]) for i in range(num_replicas)]


def _batch(element: Any, num_replicas: int) -> Any:
    """`element`, if it is a batch: arrays with one and the same first dimension."""
    leaves = jax.tree.leaves(element)
    if not leaves or any(not a.ndim or a.shape[0] != leaves[0].shape[0] for a in leaves):
        raise _not_a_batch(element, num_replicas)
    return element


def _not_a_batch(element: Any, num_replicas: int) -> InvalidArgumentError:
    """The error for an element (of arrays or specs) that has not one first dimension to split."""
    leaves = jax.tree_util.tree_leaves_with_path(element)
    if not leaves:
        return InvalidArgumentError(
            f"An element of the dataset has no array in it that could be split, got {element!r}."
        )
    shapes = {f"element{jax.tree_util.keystr(path)}": tuple(leaf.shape) for path, leaf in leaves}
    where = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
    if all(shapes.values()):
        return InvalidArgumentError(
            f"A batch is split along its first dimension, which must be the same in each array of it; got {where}."
        )
    return InvalidArgumentError(
        f"An element of the dataset has a scalar in it, which cannot be split among {num_replicas} replicas; "
        f"got {where}. Batch the dataset first, `dataset.batch(global_batch_size)`; in a list of batches each one "
        "must be an array or a structure of arrays (a Python list of numbers is not: use `np.array`)."
    )


def rebatched_rounds(
    elements: Iterator[Any], batch_size: int, num_replicas: int, worker: Worker = _ALONE
) -> Iterator[list[Any]]:
    """Rounds of shares cut from all rows in a row, whatever batches they come in: what policies OFF and FILE do.

    Each worker cuts its own rows. The sizes are such that the shares of all workers in one round add up to a batch.

    >>> rounds = rebatched_rounds(iter([np.arange(4), np.arange(4, 6)]), 4, 3)
    >>> [[part.tolist() for part in parts] for parts in rounds]
    [[[0, 1], [2], [3]], [[4, 5], [], []]]
    """
    total, first = num_replicas * worker.size, num_replicas * worker.rank
    sizes = [(batch_size + total - 1 - i % total) // total for i in range(first, first + total)]
    pieces = regroup((_batch(element, total) for element in elements), itertools.cycle(sizes))
    while parts := list(itertools.islice(pieces, num_replicas)):
        yield parts + [empty(parts[-1])] * (num_replicas - len(parts))


# --- the buffer ------------------------------------------------------------------------------------------------------


class _Buffer:
    """A bounded queue that a thread fills. Who holds it may take from it and close it; the thread ends by itself."""

    def __init__(self, make: Callable[[Callable[[], bool]], Iterator[Any]], size: int):
        self._make = make  # gets a function that tells whether the buffer was closed
        self._size = size
        self._items: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        # A condition's lock can be taken again by its holder, so that `stop` may run anywhere, also in a garbage
        # collection that comes while this very thread holds the lock.
        self._changed = threading.Condition()
        self._ended = False  # nothing more will be put in
        self._stopped = False  # nothing more will be taken out
        self.thread = threading.Thread(target=self._fill, name="replicax-input", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        _running.add(self)
        try:
            self.thread.start()
        except BaseException:  # no more threads, or Ctrl-C while it starts: nobody will take from it
            _running.discard(self)
            self.stop()
            raise

    def _fill(self) -> None:
        elements = None
        try:
            elements = self._make(lambda: self._stopped)
            while self._wait_for_room():
                self._put(next(elements), None)
        except StopIteration:
            pass
        except BaseException as e:  # whatever it is, it is raised where `next` waits for it
            self._put(None, e)
        finally:
            # A generator ends in its own thread and before the thread does, with whatever it has open.
            del elements
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            _running.discard(self)

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self._size)
            return not self._stopped

    def _put(self, element: Any, error: BaseException | None) -> None:
        with self._changed:
            if not self._stopped:
                self._items.append((element, error))
                self._changed.notify_all()

    def take(self) -> Any:
        """The next element; StopIteration at the end, and the source's own exception where it raised one."""
        with self._changed:
            # In pieces: an interrupt that comes just before Python goes to sleep is seen only once it wakes up.
            while not self._changed.wait_for(lambda: self._items or self._ended or self._stopped, timeout=0.2):
                pass
            if not self._items:
                raise StopIteration
            element, error = self._items.popleft()
            self._changed.notify_all()
        if error is None:
            return element
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: a cycle, which would keep the iterator

    def stop(self) -> None:
        """Lets the thread end as soon as it has the element at which it is."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self.thread is not threading.current_thread():
            self.thread.join(timeout)


# The buffers whose threads run.
_running: set[_Buffer] = set()


@atexit.register
def _stop_at_exit() -> None:
    # A daemon thread inside JAX would crash the interpreter as it goes down. One second is for a source that hangs.
    deadline = time.monotonic() + 1
    buffers = list(_running)
    for buffer in buffers:
        buffer.stop()
    for buffer in buffers:
        buffer.join(max(0.0, deadline - time.monotonic()))


# --- datasets --------------------------------------------------------------------------------------------------------


class DistributedIterator(ElementIterator):
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
        self._dataset = dataset
        self._topic = dataset._next_topic()
        self._buffer: _Buffer | None = None
        self._elements: Iterator[Any] | None = None
        self._pushed_back: list[Any] = []
        self._closed = False

    def __next__(self) -> Any:
        if _lift is not None:
            element = _lift(self)
            if element is not NotImplemented:
                return element
        return self._pull()

    def _pull(self) -> Any:
        """The next element from the host, never from a compiled function; StopIteration at the end."""
        if self._closed:
            raise StopIteration
        if self._pushed_back:
            return self._pushed_back.pop()
        size = self._dataset._options.experimental_per_replica_buffer_size
        if size <= 0:
            self._elements = self._elements or self._dataset._placed(Pass(self._topic))
            with self._dataset._watched():
                return next(self._elements)
        if self._buffer is None:
            # Neither the thread nor what it calls may hold this iterator: see above.
            placed, topic = self._dataset._placed, self._topic
            buffer = _Buffer(lambda stopped: placed(Pass(topic, stopped)), size)
            weakref.finalize(self, buffer.stop).atexit = False
            buffer.start()
            self._buffer = buffer
        with self._dataset._watched():
            return self._buffer.take()

    def _push_back(self, element: Any) -> None:
        """Makes `element` the next one: for a function that took it and then was to be run in another way."""
        self._pushed_back.append(element)

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
        if self._buffer is not None:
            self._buffer.stop()
            self._buffer.join(timeout)

    @property
    def element_spec(self) -> Any:
        """The dataset's `element_spec`."""
        return self._dataset.element_spec


class DistributedDataset:
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

    def __init__(self, *args: Any, **kwargs: Any):
        self._open(*args, **kwargs)

    def _open(
        self,
        dataset: Any,
        num_replicas: int,
        place: Place,
        options: InputOptions | None = None,
        policy: AutoShardPolicy | None = None,
        worker: Worker = _ALONE,
    ) -> None:
        """For strategies, which make distributed datasets: `place` brings the replicas' parts to their devices."""
        self._source = normalize_source(dataset)
        self._prepare(num_replicas, place, options, worker)
        if self._options.experimental_replication_mode == InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in `distribute_datasets_from_function`."
            )
        if self._total > 1:
            spec = self._source.spec(False)
            if spec is not None and any(s.shape.rank == 0 for s in jax.tree.leaves(spec)):
                raise _not_a_batch(spec, self._total)
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
            self._source = self._source._replace(make=shared(self._source.make, *worker))
        return policy

    def _prepare(self, num_replicas: int, place: Place, options: InputOptions | None, worker: Worker = _ALONE) -> None:
        self._num_replicas, self._worker = num_replicas, worker
        self._total = num_replicas * worker.size  # how many replicas all workers have
        self._number, self._passes = next(_numbers), itertools.count()
        self._place = place
        self._options = options or InputOptions()
        self._found_spec: Any = None

    def _rounds(self) -> Iterator[Round]:
        """This worker's parts, as far as it can tell by itself."""
        elements = self._source.make()
        if self._total == 1:
            return (Round([element], True) for element in elements)
        if self._batch_size is not None:
            cut = rebatched_rounds(elements, self._batch_size, self._num_replicas, self._worker)
            return (Round(parts, True) for parts in cut)
        size, rank = self._worker
        return (
            Round(split_batch(element, self._total)[rank::size], num_rows(element) % self._total == 0)
            for element in elements
        )

    def _shapes_follow(self) -> bool:
        """Whether this worker can tell by itself which shapes the parts of the others have."""
        spec = self._source.spec(False)
        return self._batch_size is None or (spec is not None and all_static(spec))

    def _replica_spec(self) -> Any:
        """The spec of one replica's part, on the host."""
        spec = self._source.spec(True)
        if self._total == 1:
            return spec
        size = _static_batch_size(spec)
        share = size // self._total if size is not None and size % self._total == 0 else None
        return jax.tree.map(
            lambda s: TensorSpec(None if s.shape.rank is None else (share, *s.shape[1:]), s.dtype), spec
        )

    def _placed(self, this: Pass) -> Iterator[Any]:
        # The bound method of a dataset, with no reference to an iterator.
        rounds = self._rounds()
        if self._worker.size > 1:
            rounds = agreed(
                this,
                rounds,
                replicas=self._num_replicas,
                count=int(self.cardinality),
                shapes_follow=self._shapes_follow(),
                spec=self._replica_spec,
            )
        return (self._place(this_round, self._options.experimental_fetch_to_device) for this_round in rounds)

    def _next_topic(self) -> str:
        """What the workers call the iteration that begins."""
        return f"input {self._number}.{next(self._passes)}"

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Where `next` waits, which may be for other workers."""
        return _runtime.waiting("next(iterator)") if self._worker.size > 1 else _nothing

    def __iter__(self) -> DistributedIterator:
        if _on_iterate is not None:
            _on_iterate(self)
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
        """The last of the states that `state = reduce_func(state, element)` goes through, as tensors.

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

    @property
    def cardinality(self) -> np.int64:
        """How many elements there are; -1 for no end, -2 for not known."""
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
        worker: Worker = _ALONE,
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
        self._sources = [normalize_source(dataset_fn(c)) for c in contexts]

    def _shapes_follow(self) -> bool:
        specs = [source.spec(False) for source in self._sources]
        return all(spec is not None and all_static(spec) for spec in specs)

    def _rounds(self) -> Iterator[Round]:
        iterators = [source.make() for source in self._sources]
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

    def _replica_spec(self) -> Any:
        return self._sources[0].spec(True)

    @property
    def cardinality(self) -> np.int64:
        """How many elements there are; -1 for no end, -2 for not known."""
        sizes = {source.cardinality for source in self._sources}
        size = sizes.pop() if len(sizes) == 1 else UNKNOWN_CARDINALITY
        if len(self._sources) == self._num_replicas or size < 0:
            return np.int64(size)
        rounds, rest = divmod(size, self._num_replicas)
        if not rest:
            return np.int64(rounds)
        spec = self._sources[0].spec(False)
        return np.int64(UNKNOWN_CARDINALITY if spec is None else rounds if all_static(spec) else rounds + 1)


_NO_MORE = object()
_numbers = itertools.count()
_nothing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _static_batch_size(spec: Any) -> int | None:
    """The first dimension of all leaves of `spec`, if it is known and one."""
    sizes = {s.shape[0] if s.shape.rank else None for s in jax.tree.leaves(spec)}
    return sizes.pop() if len(sizes) == 1 else None


def _batch_size(source: Source) -> int | None:
    """The size of the source's batches, if it can be told: from their spec, or from how the dataset was made."""
    spec = source.spec(False)
    if spec is None and source.batch_size is None:
        try:
            spec = source.spec(True)
        except InvalidArgumentError:  # there is no element to tell it from
            return None
    return source.batch_size if (size := _static_batch_size(spec)) is None else size
