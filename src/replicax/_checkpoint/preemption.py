"""`PreemptionCheckpointHandler`: saves the state of a training before its workers are taken away, and goes on later."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._checkpoint import files
from replicax._checkpoint.checkpoint import Checkpoint
from replicax._checkpoint.files import Path
from replicax._checkpoint.manager import CheckpointManager
from replicax._checkpoint.object_graph import PytreeLeaf
from replicax._checkpoint.write import Positions
from replicax._cluster import gce
from replicax._cluster.preemption import platform_looks
from replicax._job import background, state
from replicax._job.agree_on_step import GATE
from replicax._job.notices import Look, Notice, Watch

if TYPE_CHECKING:
    from replicax._cluster.resolver import ClusterResolver

_P = ParamSpec("_P")
_R = TypeVar("_R")

RESTART, RESTART_ON_GOOGLE_CLOUD = 42, 143  # exit statuses, TensorFlow's
_NAME = "checkpointed_runs"  # of the number of calls among the objects of the checkpoint, TensorFlow's
# The time that is left for the last save of a grace period: so many times that of the first one, and so many steps.
_SAVES, _STEPS = 3.0, 6.0


@dataclasses.dataclass(eq=False, repr=False)
class TerminationConfig:
    """Says how a program learns that it is to end soon, and how it ends.

    Args:
        termination_watcher_fn: called about once a second, in a thread; returns True once the end is near. SIGTERM and
            the notices of Google Cloud count beside it.
        exit_fn: called to end the program when its state is saved, in place of `sys.exit(42)`. Further notices count
            for nothing then. The launcher ends a worker that takes 30 seconds longer than the first one.
        grace_period: seconds from the notice to the end of the machine. The state is saved at once and, with a period
            above 0, training goes on until the period is nearly over, when it is saved again. 0 by default (3600 for
            maintenance of Google Cloud's machines with GPUs).
        save_fn: called to save, in place of the manager's `save`.

    >>> import replicax as rx
    >>> rx.experimental.TerminationConfig(grace_period=600).grace_period
    600
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None


class _Calls:
    """The number of calls, which a checkpoint saves."""

    def __init__(self) -> None:
        self.number = 0
        self._saved_together = False  # all workers save and restore together, whatever else is in the checkpoint

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Returns a context in which all workers save or restore."""
        self._saved_together = True
        try:
            yield
        finally:
            self._saved_together = False

    def _checkpoint_leaf(self) -> PytreeLeaf:
        return _CallsLeaf(self)


class _CallsLeaf(PytreeLeaf):
    owner: _Calls

    def _get(self) -> np.int64:
        return np.int64(self.owner.number)

    def _set(self, value: np.int64) -> None:
        self.owner.number = int(value)


class PreemptionCheckpointHandler:
    """Saves the state when a worker is to end soon, at the same step on all workers, and restores it.

    A notice is SIGTERM, `termination_watcher_fn` that returns True, or an announcement of Google Cloud, on any worker.
    All workers then make one step more than one of them has begun, save one checkpoint, and end with exit status 42
    (143 on Google Cloud). The launcher (`replicax launch --max-restarts`), or the scheduler, starts the program again,
    and the handler that it makes restores the newest checkpoint. Make the handler in the main thread, after the
    strategy and everything that is to be restored.

    The state is saved where the next call of `run` begins. What was done between the calls is in it; but iterators are
    saved where they stood when the last call ended, since a batch that was taken to be an argument is not trained yet.

    Args:
        cluster_resolver: the strategy's; it may be None for one process.
        checkpoint_or_checkpoint_manager: a `Checkpoint`, or a `CheckpointManager` that the program saves with too.
        checkpoint_dir: the folder for a `Checkpoint`, the same on all workers. The newest checkpoint is kept.
        termination_config: how the program learns of its end, and how it ends.

    Raises:
        InvalidArgumentError: a `Checkpoint` without a folder.
        ValueError: the resolver does not say which task this process is.
        RuntimeError: there are several workers, and the strategy that joins them is not made yet.
        NotImplementedError: the cluster has parameter servers.

    >>> import tempfile
    >>> import replicax as rx
    >>> weights = rx.Variable([0.0, 0.0])
    >>> checkpoint, folder = rx.train.Checkpoint(weights=weights), tempfile.mkdtemp()
    >>> handler = rx.experimental.PreemptionCheckpointHandler(None, checkpoint, folder)
    >>> for step in range(handler.total_run_calls, 3):
    ...     _ = handler.run(weights.assign_add, [1.0, 2.0])
    >>> handler.total_run_calls, weights.numpy().tolist()
    (3, [3.0, 6.0])
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: Path | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        if isinstance(checkpoint_or_checkpoint_manager, Checkpoint) and not checkpoint_dir:
            raise InvalidArgumentError(
                "When a checkpoint is passed, a checkpoint_dir must be passed as well: the folder in which the handler "
                "saves."
            )
        _check_cluster(cluster_resolver)
        config = TerminationConfig() if termination_config is None else termination_config
        self._exit_fn, self._save_fn = config.exit_fn, config.save_fn
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._calls = _calls_of(self._manager.checkpoint)
        with self._calls.together():
            self._manager.restore_or_initialize()
        if self._save_fn is None:
            files.import_orbax()  # takes seconds, or is not installed: not when there is no time left
        self._began, self._calls_before = time.monotonic(), self._calls.number
        self._positions: Positions | None = None  # of iterators when the last call ended, if the next one is to save
        self._watch = Watch(_looks(config), float(config.grace_period or 0.0))

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run` that did not raise, including those before the program was restarted.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(0))
        >>> rx.experimental.PreemptionCheckpointHandler(None, checkpoint, tempfile.mkdtemp()).total_run_calls
        0
        """
        return self._calls.number

    def run(self, distributed_train_function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls a function that makes one step, and returns its result; saves and ends instead if that was agreed.

        Call it in the same way on all workers.

        Args:
            distributed_train_function: calls `strategy.run`, in most programs as an `rx.function`.
            *args: for the function.
            **kwargs: for the function.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(0))
        >>> handler = rx.experimental.PreemptionCheckpointHandler(None, checkpoint, tempfile.mkdtemp())
        >>> handler.run(lambda x: x + 1, 2), handler.total_run_calls
        (3, 1)
        """
        self._pass()
        result = distributed_train_function(*args, **kwargs)
        self._calls.number += 1
        if GATE.is_next_closed():
            self._positions = self._manager.checkpoint._positions()
        return result

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """Saves and ends if that was agreed; for loops without `run`, at the end of each step, on all workers.

        The call counts in `total_run_calls`.

        Args:
            *args: for `CheckpointManager.save`, or the `save_fn`.
            **kwargs: for these.

        >>> import tempfile, replicax as rx
        >>> v = rx.Variable(0)
        >>> handler = rx.experimental.PreemptionCheckpointHandler(None, rx.train.Checkpoint(v=v), tempfile.mkdtemp())
        >>> for _ in range(3):
        ...     _ = v.assign_add(1)
        ...     handler.save_checkpoint_if_preempted()
        >>> handler.total_run_calls
        3
        """
        self._calls.number += 1
        self._positions = None  # those of a call of `run` before this step
        self._pass(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Returns a context around a training loop, at whose end the state is saved too if that was agreed.

        A notice during the last call of `run` is heeded there. Without the context the program goes on to its end.

        >>> import tempfile, replicax as rx
        >>> v = rx.Variable(0)
        >>> handler = rx.experimental.PreemptionCheckpointHandler(None, rx.train.Checkpoint(v=v), tempfile.mkdtemp())
        >>> with handler.watch_preemption_scope():
        ...     for _ in range(3):
        ...         _ = handler.run(v.assign_add, 1)
        >>> int(v)
        3
        """
        yield
        self._pass()  # where a notice during the last call takes effect, which is one step later than it came
        self._pass()

    def _pass(self, *args: object, **kwargs: object) -> None:
        if self._watch.problems:
            raise self._watch.problems.pop()
        while not GATE.passes():
            self._stop(*args, **kwargs)
        self._positions = None

    def _stop(self, *args: object, **kwargs: object) -> None:
        """Saves, and ends the program unless training goes on for a grace period."""
        now = time.monotonic()
        step = (now - self._began) / max(1, self._calls.number - self._calls_before)
        self._save(*args, **kwargs)
        for_last_save = _SAVES * (time.monotonic() - now) + _STEPS * step
        with state.waiting("the end of the saves of all workers, which were preempted"):
            final = GATE.saved(for_last_save)
        if not final:
            return
        if self._exit_fn is not None:
            self._exit_fn()
        else:
            sys.exit(RESTART_ON_GOOGLE_CLOUD if gce.on_google_cloud() else RESTART)

    def _save(self, *args: object, **kwargs: object) -> None:
        save: Callable[..., object] = self._manager.save if self._save_fn is None else self._save_fn
        if self._save_fn is None and len(args) < 2:
            kwargs.setdefault("check_interval", False)
        try:
            background.wait()
        except Exception as error:  # an earlier save's, which must not prevent this one
            warnings.warn(f"An asynchronous save failed before this worker's last one. {error}", stacklevel=5)
        with self._calls.together(), self._manager.checkpoint._saving_at(self._positions):
            save(*args, **kwargs)
        background.wait()  # the program may end right after this


def _check_cluster(resolver: ClusterResolver | None) -> None:
    """Refuses clusters in which workers cannot agree: not joined, with parameter servers, or without a known task."""
    jobs = {} if resolver is None or (spec := resolver.cluster_spec()) is None else spec.as_dict()
    if "ps" in jobs:
        raise NotImplementedError(
            "PreemptionCheckpointHandler does not support usage with ParameterServerStrategy, whose workers do not "
            "make their steps together. Save from the coordinator, with rx.train.CheckpointManager."
        )
    if resolver is None or not jobs or state.current() is not None:
        return
    kind = resolver.task_type
    if kind is None or resolver.task_id is None:
        raise ValueError(f"There is no id for task_type {kind!r}")
    if kind != "evaluator" and sum(len(tasks) for job, tasks in jobs.items() if job != "evaluator") > 1:
        raise RuntimeError(
            "The cluster has several workers, which have not joined yet: make the strategy before the "
            "PreemptionCheckpointHandler, and pass it strategy.cluster_resolver."
        )


def _manager(given: Checkpoint | CheckpointManager, folder: Path | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    if not isinstance(given, Checkpoint) or folder is None:
        raise TypeError(
            f"`checkpoint_or_checkpoint_manager` is a Checkpoint or a CheckpointManager, got {received(given)}."
        )
    return CheckpointManager(given, folder, max_to_keep=1)


def _calls_of(checkpoint: Checkpoint) -> _Calls:
    """Returns the number of calls among the checkpoint's objects, where it is put the first time."""
    calls = getattr(checkpoint, _NAME, None)
    if calls is None:
        calls = _Calls()
        setattr(checkpoint, _NAME, calls)
    if not isinstance(calls, _Calls):
        raise ValueError(
            f"The checkpoint has an object named {_NAME!r}, the name under which the handler counts calls of `run`; "
            f"got {received(calls)}. Choose another name for it."
        )
    return calls


def _looks(config: TerminationConfig) -> list[Look]:
    looks = platform_looks(config.grace_period)
    watcher = config.termination_watcher_fn
    if watcher is not None:
        looks.append(lambda: Notice("is told of its end by its termination_watcher_fn") if watcher() else None)
    return looks
