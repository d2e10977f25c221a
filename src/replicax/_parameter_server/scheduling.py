"""What is known while a function is traced for workers: their index, and elements that are like theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.thread_state import current, entered, has_64_bit_types
from replicax._base.types import Leaf
from replicax._tracing import frames

# Shapes and dtypes of the arrays of one element.
Kinds = tuple[tuple[tuple[int, ...], str], ...]

_OUTSIDE = (
    "Cannot retrieve the worker index. `get_worker_idx_and_num_workers` should be called from within a tf.function "
    "being executed on a worker. This method should only be called from either a dataset_fn that is passed into "
    "`ClusterCoordinator.create_per_worker_dataset`, or a tf.function that is passed into "
    "`ClusterCoordinator.schedule`."
)


class Tracing:
    """A trace for workers.

    Attributes:
        kinds: of the elements that it is to take, in the order of its reads; those after the last are as the
            iterator's specs say.
        taken: how many it has taken.
        index_slot: the input that is the worker's index, None where it needs none.
    """

    def __init__(self, kinds: Sequence[Kinds]):
        self.kinds, self.taken = kinds, 0
        self.index_slot: int | None = None
        self._level: frames.TraceFrame | None = None
        self._index: jax.Array

    def next_kinds(self) -> Kinds | None:
        """Returns the kinds of the next element; None where they are not known."""
        self.taken += 1
        return self.kinds[self.taken - 1] if self.taken <= len(self.kinds) else None

    def index(self) -> jax.Array:
        """Returns the worker's index, as an input of the function."""
        (level, *_) = frames.levels()
        if self._level is not level:  # a trace that was given up may have had one
            self._level = level
            self.index_slot, self._index = level.new_input(jax.ShapeDtypeStruct((), index_dtype()))
        return self._index


def index_dtype() -> np.dtype:
    """Returns the dtype of workers' indices, which is int64 where programs have such values."""
    return np.dtype(np.int64 if has_64_bit_types() else np.int32)


def tracing() -> Tracing | None:
    """Return the trace for workers that this thread makes, None where it makes none."""
    trace: Tracing | None = current.worker_trace
    return trace


def traced_by(tracing: Tracing) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which functions are traced for workers."""
    return entered(worker_trace=tracing, worker=None)


def on_worker(index: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which functions of datasets run on this worker, also in the threads that they start."""
    return entered(worker_trace=None, worker=index)


def experimental_get_current_worker_index() -> Leaf:
    """Returns the index of the worker that runs the scheduled function or the function of a per-worker dataset.

    Raises:
        RuntimeError: outside of such functions.

    >>> import replicax as rx
    >>> index = rx.function(lambda: rx.coordinator.experimental_get_current_worker_index() + 0)
    >>> int(coordinator.schedule(index).fetch())
    0
    """
    if current.worker is not None:
        return jnp.asarray(current.worker, index_dtype())
    if (trace := tracing()) is None:
        raise RuntimeError(_OUTSIDE)
    return trace.index() if frames.levels() else jnp.asarray(0, index_dtype())  # in a first, eager call
