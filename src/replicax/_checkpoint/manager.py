"""`CheckpointManager`: numbered checkpoints in a folder, of which the newest are kept."""

from __future__ import annotations

import functools
import operator
import os
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsIndex, SupportsInt

import numpy as np

from replicax._base import doc_pages
from replicax._base.atomic_files import make_folders, path_text, remove
from replicax._base.errors import CheckpointError
from replicax._base.messages import received
from replicax._checkpoint import files as _files
from replicax._checkpoint import lists, workers
from replicax._checkpoint.checkpoint import Checkpoint
from replicax._checkpoint.files import Path
from replicax._checkpoint.options import call_back, is_async
from replicax._checkpoint.restore import open_checkpoint
from replicax._checkpoint.sources import Source
from replicax._job import background


def get_checkpoint_state(checkpoint_dir: Path, latest_filename: str | None = None) -> types.SimpleNamespace | None:
    """Returns the list of checkpoints that a manager keeps in a folder; None where there is none.

    The attributes are `model_checkpoint_path`, the newest one, and `all_model_checkpoint_paths`.

    >>> import tempfile, replicax as rx
    >>> folder = tempfile.mkdtemp()
    >>> path = rx.train.Checkpoint(v=rx.Variable(1.0)).save(folder + "/ckpt")
    >>> rx.train.get_checkpoint_state(folder).model_checkpoint_path == path
    True
    """
    state = lists.read_list(os.fsdecode(checkpoint_dir), latest_filename or _files.LIST_NAME)
    if state is None or not state.paths:
        return None
    paths = list(state.paths)
    return types.SimpleNamespace(model_checkpoint_path=paths[-1], all_model_checkpoint_paths=paths)


def checkpoints_iterator(
    checkpoint_dir: Path,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new checkpoint of a folder as it comes; for a program that evaluates them.

    Args:
        checkpoint_dir: the folder.
        min_interval_secs: how long to wait at least from one checkpoint to the next.
        timeout: how many seconds to wait for a new one; None for any time.
        timeout_fn: called after that time; the iterator ends where it returns True, or there is none.

    >>> import tempfile, replicax as rx
    >>> folder = tempfile.mkdtemp()
    >>> _ = rx.train.Checkpoint(v=rx.Variable(1.0)).save(folder + "/ckpt")
    >>> [path.rpartition("/")[2] for path in rx.train.checkpoints_iterator(folder, timeout=0)]
    ['ckpt-1']
    """
    last, begun = None, time.time()
    while True:
        newest = lists.latest_checkpoint(checkpoint_dir)
        if newest is not None and newest != last:
            last, begun = newest, time.time()
            yield newest
            time.sleep(max(0.0, begun + min_interval_secs - time.time()))
            begun = time.time()
        elif timeout is not None and time.time() >= begun + timeout:
            if timeout_fn is None or timeout_fn():
                return
            begun = time.time()
        else:
            time.sleep(min(1.0, timeout or 1.0))


class CheckpointManager:
    """Saves a checkpoint again and again under one name with a number, and deletes the older ones.

    What it keeps is written in a file beside the checkpoints, so that a new process goes on with them.

    Args:
        checkpoint: the `Checkpoint` to save.
        directory: the folder, which is made where it is missing.
        max_to_keep: how many checkpoints are kept; None for all.
        keep_checkpoint_every_n_hours: of those that would be deleted, one in so many hours is kept for good.
        checkpoint_name: what the checkpoints' names begin with.
        step_counter: an integer variable, needed for `checkpoint_interval`.
        checkpoint_interval: how many steps `save` waits between two checkpoints.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.
        last_checkpoint_step: the step of the last checkpoint, if it was saved without this manager.

    Raises:
        ValueError: `max_to_keep` is less than 1, or an interval is given without a counter.

    >>> import os, tempfile
    >>> import replicax as rx
    >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    >>> manager = rx.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2)
    >>> for _ in range(3):
    ...     path = manager.save()
    >>> [os.path.basename(path) for path in manager.checkpoints]
    ['ckpt-2', 'ckpt-3']
    >>> manager.restore_or_initialize() == manager.latest_checkpoint == path
    True
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: SupportsInt | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        last_checkpoint_step: int | None = None,
    ):
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"Expected a positive integer or `None` for `max_to_keep`, got {max_to_keep}.")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("`step_counter` should be passed if `checkpoint_interval` is not None.")
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"`checkpoint` is a Checkpoint, got {received(checkpoint)}.")
        self._checkpoint, self._max_to_keep = checkpoint, max_to_keep
        self._directory = path_text(directory, "folder of checkpoints")
        self._hours, self._name, self._init_fn = keep_checkpoint_every_n_hours, checkpoint_name, init_fn
        self._step_counter, self._interval, self._last_step = step_counter, checkpoint_interval, last_checkpoint_step
        self._checked: dict[str, bool] = {}  # False for checkpoints that were found damaged
        make_folders(self._directory)
        self._paths: dict[str, float] = {}  # with the times of their making, the oldest first
        self._others: dict[str, float] = {}  # those of other names, restored where there are none of its own
        self._spared: set[str] = set()  # those that may have been kept for good before the list was lost
        self._last_preserved = time.time()  # the time of the newest one that is kept for good
        self._find_existing()

    def _find_existing(self) -> None:
        """Finds the checkpoints that are there already."""
        state = lists.read_list(self._directory)
        if state is None:
            return
        self._last_preserved = state.last_preserved or self._last_preserved
        for path, made in state.paths.items():
            if _files.is_there(path):
                (self._paths if self._is_ours(path) else self._others)[path] = made
        if not self._paths and (found := lists.numbered_checkpoints(self._directory, self._name)):
            warnings.warn(
                f"{os.path.join(self._directory, _files.LIST_NAME)} names no checkpoint {self._name}-* that is there, "
                f"so the folder's are looked for; there are: {', '.join(map(os.path.basename, found))}.",
                stacklevel=3,
            )
            self._paths = found
        if self._hours is not None and state.last_preserved is None:  # the list is lost, and with it which are kept
            self._spared = set(self._paths)

    def _is_ours(self, path: str) -> bool:
        return lists.is_numbered(path, self._directory, self._name)

    @property
    def directory(self) -> str:
        """The folder.

        >>> import tempfile, replicax as rx
        >>> folder = tempfile.mkdtemp()
        >>> rx.train.CheckpointManager(rx.train.Checkpoint(), folder, max_to_keep=3).directory == folder
        True
        """
        return self._directory

    @property
    def checkpoint(self) -> Checkpoint:
        """The `Checkpoint` that is saved.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> rx.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3).checkpoint is checkpoint
        True
        """
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """The least number of steps between two checkpoints.

        >>> import tempfile, replicax as rx
        >>> steps = rx.Variable(0)
        >>> checkpoint, every_ten = rx.train.Checkpoint(steps=steps), {"step_counter": steps, "checkpoint_interval": 10}
        >>> manager = rx.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3, **every_ten)
        >>> _ = manager.save(), steps.assign_add(5)
        >>> manager.checkpoint_interval, manager.save()
        (10, None)
        """
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are there, the oldest first; without those that are kept for good.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> manager = rx.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3)
        >>> [manager.save(), manager.save()] == manager.checkpoints
        True
        """
        background.wait()
        return list(self._paths)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that is whole; None where there is none.

        One that this manager has not written itself is read through the first time, and a warning names a damaged one.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> manager = rx.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3)
        >>> manager.latest_checkpoint is None, manager.save() == manager.latest_checkpoint
        (True, True)
        """
        background.wait()
        for path in self._newest_first():
            if path not in self._checked:
                self._checked[path] = lists.newest_undamaged([path]) is not None
            if self._checked[path]:
                return path
        return None

    def _newest_first(self) -> Iterator[str]:
        """Yield the listed checkpoints, then those that the folder has besides, such as all but TensorFlow's newest."""
        listed = self._paths or self._others
        yield from reversed(list(listed))
        in_folder = lists.numbered_checkpoints(self._directory, self._name if self._paths else None)
        yield from reversed([path for path in in_folder if path not in listed])

    def save(self, checkpoint_number: object = None, check_interval: bool = True, options: object = None) -> str | None:
        """Saves, and deletes what is not to be kept.

        Args:
            checkpoint_number: the number in the name, an int or an integer variable; by default the count of saves.
            check_interval: False to save though the last checkpoint is less than `checkpoint_interval` steps old.
            options: a `CheckpointOptions`, for an asynchronous save or for callbacks.

        Returns:
            The path; None where nothing was saved, because it is too soon, or in the same step as the last one.

        Raises:
            RuntimeError: inside of a compiled function or of `run`.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> manager = rx.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=3)
        >>> manager.save().rpartition("/")[2], manager.save(checkpoint_number=100).rpartition("/")[2]
        ('ckpt-1', 'ckpt-100')
        """
        step = self._step()
        if step is not None and self._last_step is not None and self._interval is not None:
            wait = self._interval if check_interval else 1
            if self._last_step <= step < self._last_step + wait:
                return None
        number = None if checkpoint_number is None else _integer(checkpoint_number)
        prefix = os.path.join(self._directory, self._name)
        path = self._checkpoint._save_numbered(prefix, number, options, self._list_new)
        if step is not None:
            self._last_step = step
        if not is_async(options):
            call_back(options, path)
        return path

    def _step(self) -> int | None:
        """Returns the value of the step counter; None where there is no interval."""
        return None if self._interval is None or self._step_counter is None else int(self._step_counter)

    def _list_new(self, path: str, wrote: bool) -> None:
        """Lists a new checkpoint, and deletes old ones. Only the process that wrote it touches files."""
        self._paths.pop(path, None)
        self._paths[path] = time.time()
        self._checked[path] = True
        if wrote:
            self._write_list()  # before anything is deleted
        gone = self._take_off_oldest()
        if wrote:
            for old in gone:
                remove(old, _files.CHECKPOINT)
            self._write_list()

    def _take_off_oldest(self) -> list[str]:
        """Takes the oldest checkpoints off the list, and returns those to be deleted: some are kept for good."""
        gone = []
        while self._max_to_keep is not None and len(self._paths) > self._max_to_keep:
            path, made = next(iter(self._paths.items()))
            del self._paths[path]
            if self._hours is not None and made - self._hours * 3600.0 >= self._last_preserved:
                self._last_preserved = made
            elif path not in self._spared:
                gone.append(path)
        return gone

    def _write_list(self) -> None:
        lists.write_list(self._directory, lists.CheckpointList(self._paths, self._last_preserved), self._is_ours)

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint that is whole; where there is none, calls `init_fn`.

        A warning names each newer one that is damaged. As many replicas as have saved it get back the values that each
        had for itself in on-read variables, so that the training goes on exactly.

        In a job of several workers all of them restore the same checkpoint: the newest that any of them can read. A
        worker whose disk has no copy of it receives it from another one, with a warning.

        Returns:
            The path; None where nothing was restored.

        Raises:
            CheckpointError: all checkpoints are damaged, on all workers; or one of TensorFlow is not on every disk.

        >>> import tempfile, replicax as rx
        >>> v = rx.Variable(1.0)
        >>> manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=v), tempfile.mkdtemp(), max_to_keep=3)
        >>> manager.restore_or_initialize() is None, manager.save() == manager.restore_or_initialize()
        (True, True)
        """
        restore = functools.partial(self._checkpoint._restore_from, counting=True, exactly=True)
        if self._checkpoint._begin_restore("restore"):
            newest, damaged = self._open_newest(lambda source, _: source.check())
            newest, damaged = self._choose_together(newest, damaged), []  # it has raised for damaged ones
            if newest is not None:
                restore(*newest, together=True)
        else:
            newest, damaged = self._open_newest(restore)
        if newest is not None:
            if (step := self._step()) is not None:
                self._last_step = step
            return newest[1]
        if damaged:
            raise CheckpointError(
                f"None of the checkpoints in {self._directory} is whole. Move them elsewhere to begin anew. "
                f"See {doc_pages.page('how-to/checkpoints#guarantees')}."
            ) from damaged[-1]
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _open_newest(
        self, use: Callable[[Source, str], object]
    ) -> tuple[tuple[Source, str] | None, list[CheckpointError]]:
        """Open the newest checkpoint that is whole, and call `use` with it and its path.

        Returns:
            The checkpoint and its path, if there is one; and the errors of newer checkpoints, which opening or `use`
            raised. A warning names each of these.
        """
        damaged: list[CheckpointError] = []
        for path in self._newest_first():
            try:
                source = open_checkpoint(path)
                use(source, path)
            except FileNotFoundError:
                self._paths, self._others = {}, {}
                self._find_existing()  # another process may have saved newer ones and deleted this
                if path in self._newest_first():
                    raise
                return self._open_newest(use)
            except CheckpointError as error:
                damaged.append(error)
                if self._checked.get(path) is not False:  # else it was said before
                    warnings.warn(f"A checkpoint is passed over for an older one. {error}", stacklevel=3)
                self._checked[path] = False
                continue
            self._checked[path] = True
            return (source, path), damaged
        return None, damaged

    def _choose_together(
        self, newest: tuple[Source, str] | None, damaged: Sequence[CheckpointError]
    ) -> tuple[Source, str] | None:
        """Return the newest checkpoint that any worker of the job can read, the same on all of them.

        Raises:
            CheckpointError: no worker can read one, and a worker has a damaged one; or one cannot be sent.
        """
        candidate = workers.Candidate(damaged=str(damaged[-1]) if damaged else "")
        if newest is not None:
            candidate = workers.describe(*newest, self._is_ours(newest[1]), candidate.damaged)
        sender, candidates = workers.choose(candidate)
        chosen = candidates[sender].path
        if not chosen:
            if problems := workers.list_damage(candidates):
                raise CheckpointError(
                    f"No worker has a checkpoint that is whole in {self._directory}. {problems} Move them elsewhere, "
                    f"on all machines, to begin anew. See {doc_pages.page('how-to/checkpoints#guarantees')}."
                )
            return None
        source = workers.fetch(None if newest is None else newest[0], sender, candidates)
        if newest is not None and source is newest[0]:
            return newest
        warnings.warn(
            f"This worker cannot read a copy of the newest checkpoint, {chosen} of {workers.name(sender)}, and "
            f"received its content. {f'Its own newest is {candidate.path}.' if newest else 'It has no other.'}",
            stacklevel=3,
        )
        return source, os.path.join(self._directory, os.path.basename(chosen))

    def sync(self) -> None:
        """Wait until an asynchronous save is on the disk, and raise its error if it failed.

        >>> import tempfile, replicax as rx
        >>> rx.train.CheckpointManager(rx.train.Checkpoint(), tempfile.mkdtemp(), max_to_keep=3).sync()
        """
        background.wait()


def _integer(number: object) -> int:
    """Returns an int, or the value of an integer variable or array of any library, as an int."""
    if not isinstance(number, SupportsIndex):
        array = np.asarray(number)
        if array.ndim or array.dtype.kind not in "iu":
            raise TypeError(f"`checkpoint_number` is an integer or an integer variable, got {number!r:.80}.")
        return int(array)
    return operator.index(number)
