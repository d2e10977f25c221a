"""Running a replica function eagerly: one thread for each local replica, of which one runs at a time.

Replica 0 runs to its first meeting point or to its end, then replica 1, and so on. When all have come to a meeting
point, the calling thread runs the merge function, once, in cross-replica context; then replica 0 goes on with its
component of the result. The order is the same every time. If the replicas go different ways (one returns or raises
while others wait, or they wait in different calls), those that wait are released and the caller gets one error.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from replicax._base import errors, jax_internals, nest, thread_state, tracebacks
from replicax._base.types import CommunicationOptions, Leaf, ReduceOp, Tree
from replicax._collectives.arithmetic import Reducible
from replicax._collectives.reducer import Reducer
from replicax._report import profiling
from replicax._tracing import active_tapes, frames, step_failures
from replicax._tracing import context as _context
from replicax._tracing.context import ReplicaContext, StrategyLike
from replicax._values import (
    PartRows,
    PerReplica,
    arrays_of,
    components_of,
    is_differing,
    mark_results,
    note_differing,
    part_rows,
    regroup,
    select,
)
from replicax._variables import assigned_alike

_L = TypeVar("_L", bound=Reducible)


class Meeting(NamedTuple):
    """A merge function that a replica has come to, and the replica's arguments of it.

    Args:
        fn, args, kwargs: the function and the arguments.
        tag: what all replicas that meet have in common.
        where: the user's line.
    """

    fn: Callable[..., Tree]
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    tag: tuple[object, ...]
    where: str


class _Abandoned(BaseException):
    """Raised in a waiting replica that nobody will come to meet any more."""


class LockstepContext(ReplicaContext):
    """The context of one eager replica."""

    def __init__(self, strategy: StrategyLike, reducer: Reducer, replica: _Replica):
        super().__init__(strategy, None)
        self._reducer, self._replica, self._options = reducer, replica, reducer.options
        self._part_rows = rows = replica.run.part_rows
        self._own_rows = rows.counts[replica.id] if rows is not None and rows.counts is not None else 0
        self._number: jax.Array | None = None

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        if self._number is None:
            with jax.default_device(self._reducer.mesh.local_devices[self._replica.index]):
                self._number = jnp.asarray(self._replica.id, dtype=jnp.int32)
        return self._number

    @property
    def devices(self) -> list[list[str]]:
        return [[self._reducer.mesh.device_names[self._replica.index]]]

    def _merge(
        self, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree], tag: tuple[object, ...]
    ) -> Tree:
        if frames.is_tracing():
            raise RuntimeError(errors.MERGE_IN_TRACE)
        frame = tracebacks.users_frame()
        return self._replica.meet(Meeting(fn, args, kwargs, tag, f"{frame.f_code.co_filename}:{frame.f_lineno}"))

    def _all_reduce(self, op: ReduceOp, leaves: list[_L], options: CommunicationOptions) -> list[_L]:
        def forward(values: list[_L]) -> list[_L]:
            def merged(_: StrategyLike, *values: Leaf) -> list[Leaf]:
                return self._reducer.all_reduce(op, list(values), options)

            return list(self._merge(merged, tuple(values), {}, ("all_reduce", op.value, len(values))))

        return _differentiable(forward, lambda _, gradients: self._all_reduce(op, gradients, options), leaves)

    def _all_gather(self, leaves: list[jax.Array], axis: int, options: CommunicationOptions) -> list[jax.Array]:
        def forward(values: list[jax.Array]) -> list[jax.Array]:
            def merged(_: StrategyLike, *values: Leaf) -> list[Leaf]:
                return self._reducer.all_gather(values, axis)

            return list(self._merge(merged, tuple(values), {}, ("all_gather", axis, len(values))))

        def backward(values: list[jax.Array], gradients: list[jax.Array]) -> list[jax.Array]:
            """Returns this replica's part of the sum of the gradients of what all replicas got."""
            parts = []
            for value, total in zip(values, self._all_reduce(ReduceOp.SUM, gradients, options)):
                size = value.shape[axis]
                sizes = self._merge(
                    lambda _, size: (self._reducer.gather_sizes(size),), (size,), {}, ("all_gather gradient",)
                )[0]
                start = sum(sizes[: self._replica.id])
                parts.append(jax.lax.slice_in_dim(total, start, start + size, axis=axis % total.ndim))
            return parts

        return _differentiable(forward, backward, leaves)


def _differentiable(
    forward: Callable[[list[_L]], list[_L]],
    backward: Callable[[list[_L], list[jax.Array]], list[jax.Array]],
    leaves: list[_L],
) -> list[_L]:
    """Returns `forward(leaves)`, with `backward(leaves, gradients)` as its gradient if one is asked for."""
    if _plain():
        return forward(leaves)

    @jax.custom_vjp
    def call(*values: _L) -> tuple[_L, ...]:
        return tuple(forward(list(values)))

    def call_forward(*values: _L) -> tuple[tuple[_L, ...], tuple[_L, ...]]:
        return call(*values), values

    def call_backward(values: tuple[_L, ...], gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        results = list(gradients)  # those of integers are JAX's float0 and stay as they are
        some = [i for i, x in enumerate(values) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]
        for i, result in zip(some, backward([values[i] for i in some], [jnp.asarray(gradients[i]) for i in some])):
            results[i] = result
        return tuple(results)

    call.defvjp(call_forward, call_backward)
    return list(call(*leaves))


def _plain() -> bool:
    """Returns whether nothing records the operations that run: no tracing, and no gradient tape."""
    return jax_internals.is_eager(jax_internals.current_trace())


class _Replica:
    """One replica's thread, which calls `function`, and what it is at."""

    def __init__(self, run: Lockstep, index: int, function: Callable[[], Tree]):
        self.run, self.index, self.function = run, index, function
        self.id = run.mesh.local_ids[index]
        self.resume = threading.Semaphore(0)
        self.state = "ready"  # ready, running, waiting, returned, raised
        self.result: Tree = None
        self.error: BaseException | None = None
        self.meeting: Meeting | None = None
        self.thread: threading.Thread | None = None
        self.interruptible = False  # whether a KeyboardInterrupt may be sent to its thread
        self.sending = threading.Lock()  # held while it is sent

    def start(self) -> None:
        self.thread = threading.Thread(
            target=self.run.inherited.run, args=(self._main,), name=f"replicax-replica-{self.id}", daemon=True
        )
        self.thread.start()

    def body(self) -> Tree:
        """Calls the function in this replica's contexts."""
        run = self.run
        context = LockstepContext(run.strategy, run.reducer, self)
        frame = frames.ReplicaFrame(run.mesh, self.index)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_context.entered(run.strategy, context))
            stack.enter_context(frames.entered(frame))
            if run.tapes and run.mesh.size > 1:
                stack.enter_context(active_tapes.beside_replicas(run.tapes))
            stack.enter_context(jax.default_device(run.mesh.local_devices[self.index]))
            if profiling.active is not None:
                stack.enter_context(profiling.replica(self.id))
            return self.function()

    def _main(self) -> None:
        self.resume.acquire()
        try:
            self.interruptible = True
            if not self.run.abandoned:
                self.result = self.body()
            self.state = "returned"
        except _Abandoned:
            self.state = "returned"
        except BaseException as error:
            self.state, self.error = "raised", error
        self._end_interrupts()
        self.run.turn.release()

    def _end_interrupts(self) -> None:
        """Take in an interrupt that was sent and has not come yet. None is sent any more."""
        try:
            with self.sending:
                self.interruptible = False
            for _ in range(100):  # Python raises what was sent where a loop begins anew
                pass
        except (
            KeyboardInterrupt
        ):  # the only one; if it came inside of `with`, the lock may stay taken, and nobody needs it
            self.interruptible = False

    def meet(self, meeting: Meeting) -> Tree:
        """Waits for the other replicas, and returns this one's part of what the merge function returned."""
        if self.run.abandoned:
            raise _Abandoned
        self.meeting, self.state = meeting, "waiting"
        if self.thread is None:  # a single replica runs in the calling thread
            return self.run.merge([self])[0]
        self.run.turn.release()
        self.resume.acquire()
        self.state = "running"
        if self.run.abandoned:
            raise _Abandoned
        return self.result

    def standing(self) -> str:
        """Returns where the replica is, for error messages."""
        if self.state == "waiting" and self.meeting:
            tag = self.meeting.tag
            call = f"{tag[0]}({', '.join(map(str, tag[1:-1]))})" if len(tag) > 2 else tag[0]
            return f"replica {self.id} waits in {call} at {self.meeting.where}"
        if self.state == "raised":
            return f"replica {self.id} raised {type(self.error).__name__}"
        return f"replica {self.id} {'has returned' if self.state == 'returned' else 'has not started'}"


class Lockstep:
    """One call of `run`."""

    def __init__(self, strategy: StrategyLike, reducer: Reducer):
        self.strategy, self.reducer, self.mesh = strategy, reducer, reducer.mesh
        self.turn = threading.Semaphore(0)  # given back by a replica that meets or ends
        self.abandoned = False
        self.inherited = thread_state.inherit()
        self.tapes = active_tapes.entered()
        self.part_rows: PartRows | None = None

    def call(self, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> list[Tree]:
        """Returns each local replica's result."""
        count = len(self.mesh.local_ids)
        self.part_rows = part_rows((args, kwargs)) if self.mesh.size > 1 else None

        def bound(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Callable[[], Tree]:
            return lambda: fn(*args, **kwargs)  # `functools.partial` has another error for what is no function

        replicas = [_Replica(self, i, bound(select(i, args), select(i, kwargs))) for i in range(count)]
        if count == 1:
            return [replicas[0].body()]
        for replica in replicas:
            replica.start()
        try:
            while True:
                for replica in replicas:
                    self._step(replica)
                if all(replica.state != "waiting" for replica in replicas):
                    self._join(replicas)
                    return [replica.result for replica in replicas]
                self._check(replicas)
                for replica, result in zip(replicas, self.merge(replicas)):
                    replica.result = result
        except BaseException:
            self._abandon(replicas)
            raise

    def _step(self, replica: _Replica) -> None:
        """Lets one replica run to its next meeting point or its end."""
        replica.state = "running"
        replica.resume.release()
        # In pieces: an interrupt that comes just before Python goes to sleep is seen only once it wakes up.
        while not self.turn.acquire(timeout=0.2):
            pass
        if replica.error is not None:
            raise replica.error

    def _check(self, replicas: Sequence[_Replica]) -> None:
        """Raises `ReplicaError` where not all replicas wait in the same call."""
        met = [replica.meeting for replica in replicas if replica.state == "waiting" and replica.meeting]
        if len(met) == len(replicas) and all(meeting.tag == met[0].tag for meeting in met):
            return
        standings = "\n".join("  " + replica.standing() for replica in replicas)
        if len(met) < len(replicas):
            raise errors.ReplicaError(
                "Some replicas made a different number of replica_context().merge_call() calls. Every replica must "
                f"make the same calls in the same order, but:\n{standings}"
            )
        raise errors.ReplicaError(
            f"The replicas meet in different calls. Every replica must make the same ones, but:\n{standings}"
        )

    def merge(self, replicas: Sequence[_Replica]) -> list[Tree]:
        """Runs the merge function that the replicas have met for; returns each replica's part of the result."""
        meetings = [replica.meeting for replica in replicas if replica.meeting]
        args, kwargs = regroup([(meeting.args, meeting.kwargs) for meeting in meetings], self.mesh, merging=True)
        with _context.entered(self.strategy, None), frames.entered(frames.GlobalFrame()):
            result = meetings[0].fn(self.strategy, *args, **kwargs)
        return [select(replica.index, result) for replica in replicas]

    @staticmethod
    def _join(replicas: Sequence[_Replica]) -> None:
        """Waits until the threads of replicas that have returned are gone, and so is what they alone held."""
        for replica in replicas:
            if replica.thread is not None:
                replica.thread.join()

    def _abandon(self, replicas: Sequence[_Replica]) -> None:
        self.abandoned = True
        for replica in replicas:
            if replica.state == "running" and replica.error is None and replica.thread and replica.thread.ident:
                # The caller was interrupted while this replica ran: interrupt it as well.
                with replica.sending:
                    if replica.interruptible:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(replica.thread.ident), ctypes.py_object(KeyboardInterrupt)
                        )
            replica.resume.release()
        for replica in replicas:
            if replica.thread is not None:
                replica.thread.join(timeout=0.5)


def run(
    strategy: StrategyLike, reducer: Reducer, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Tree:
    """Calls `fn` on every local replica, eagerly, and returns the results put together.

    If one of several replicas fails, all variables keep their former values: the replicas' copies would differ
    otherwise.

    Raises:
        ValueError: the replicas assigned different values to a variable that does not allow it.
    """
    mesh = reducer.mesh
    if mesh.size == 1:
        return regroup(Lockstep(strategy, reducer).call(fn, args, kwargs), mesh)
    with step_failures.undo_on_error() as log:
        lockstep = Lockstep(strategy, reducer)
        result = mark_results(regroup(lockstep.call(fn, args, kwargs), mesh), lockstep.part_rows)
        assigned_alike.check(mesh, log.variables)
    if mesh.lone and any(map(_is_uneven, nest.leaves((args, kwargs)))):
        for array in arrays_of(result):
            if array.ndim:
                note_differing(array)
    if active_tapes.entered():
        active_tapes.lost(_NOT_SEEN, arrays_of((args, kwargs)), arrays_of(result), variables=True)
    return result


def _is_uneven(leaf: Leaf) -> bool:
    return components_of(leaf).others_differ() if isinstance(leaf, PerReplica) else is_differing(leaf)


_NOT_SEEN = (
    "A gradient is asked for from what eager replicas computed, of a GradientTape that was entered outside of "
    "`strategy.run`. It sees compiled replicas alone. Put the tape and `strategy.run` into a `replicax.function` "
    "or enter the tape in the replica function."
)
