"""A bound on how many compiled calls with collectives are under way at once on CPU devices.

With several CPU devices JAX runs each device's part of a call on a thread of one pool. Once 32 calls that hold
collectives are in flight, each waits for threads that the others hold, and the process deadlocks and aborts
(seen on JAX 0.10). A bound on calls in flight costs nothing, since the devices are busy all the same. Calls that span
processes are also told to the job's watch (see _job/state.py).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterable, Sequence

import jax

from replicax._base.types import Tree
from replicax._job import state
from replicax._job.call_log import CollectiveCall, is_small
from replicax._values import ReplicaMesh

LIMIT = 16

_in_flight: collections.deque[tuple[jax.Array, CollectiveCall | None]] = collections.deque()
_lock = threading.Lock()


def shapes(arrays: Iterable[tuple[object, Sequence[int]]]) -> str:
    """Returns dtypes and shapes as text for a label, cut off if there are many.

    >>> shapes([("float32", (8, 3)), ("int32", ())])
    'float32[8, 3], int32[]'
    """
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in itertools.islice(arrays, 8))[:80]


class dispatching:
    """A context manager around the dispatch of a program with collectives, which sets `output` to one of its outputs.

    Reports of a job of several processes name the program by `label`, followed by the dtypes and shapes of the rows of
    `stacked`. `small` says that the output is known to be small. When too many calls are in flight, leaving waits until
    half of them have ended: waiting once for several calls wakes this thread up less often than waiting at each.
    """

    __slots__ = ("_call", "_label", "_mesh", "_small", "_stacked", "output")

    def __init__(self, mesh: ReplicaMesh, label: str, stacked: Sequence[jax.Array] = (), small: bool = False):
        self._mesh, self._label, self._stacked, self._small = mesh, label, stacked, small
        self._call: CollectiveCall | None = None
        self.output: jax.Array | None = None

    def __enter__(self) -> dispatching:
        if not self._mesh.all_local:
            self._call = state.begin(self._described() if self._stacked else self._label)
        return self

    def compile(self, program: jax.stages.Wrapped, *arguments: Tree) -> None:
        """Compiles a program before the call, in a job whose watch would else take the compilation for a wait."""
        if self._call is not None:
            self._call.compiling = True
            state.compare_now()
            try:
                program.lower(*arguments).compile()  # JAX keeps it for the call
            finally:
                self._call.compiled()

    def _described(self) -> str:
        return f"{self._label}({shapes((array.dtype, array.shape[1:]) for array in self._stacked)})"

    def __exit__(self, *_: object) -> None:
        output, call = self.output, self._call
        if isinstance(output, jax.core.Tracer):  # part of a larger program, whose own call counts
            output = None
        small = self._small or (output is not None and is_small(output))
        if call is not None:
            call.dispatched(output, small)
        if output is not None and self._mesh.needs_bound:
            _bound(output, call, small)


def _bound(output: jax.Array, call: CollectiveCall | None, small: bool) -> None:
    if not small:  # it is waited for at once, in place of being held
        output.block_until_ready()
        return
    with _lock:
        _in_flight.append((output, call))
        if len(_in_flight) < LIMIT:
            return
        older = [_in_flight.popleft() for _ in range(LIMIT // 2)]
    for array, its_call in older:
        if array.is_deleted():
            continue
        # Whoever reads an output of a call that failed gets its error. This thread makes another call.
        with contextlib.suppress(RuntimeError):
            array.block_until_ready()
        if its_call is not None:
            its_call.ended()
