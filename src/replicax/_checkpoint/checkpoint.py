"""`Checkpoint`: saves the values of objects, and restores them into objects found by the same names."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from replicax._base import foreign_state, planning, thread_state
from replicax._base.atomic_files import path_text
from replicax._base.errors import CheckpointError
from replicax._base.types import Leaf
from replicax._checkpoint import lists, object_graph, report, workers
from replicax._checkpoint.files import Path
from replicax._checkpoint.object_graph import PositionLeaf
from replicax._checkpoint.options import call_back, is_async
from replicax._checkpoint.report import Report
from replicax._checkpoint.restore import (
    CheckpointLoadStatus,
    InitializationOnlyStatus,
    LoadStatus,
    Restoration,
    open_checkpoint,
)
from replicax._checkpoint.sources import Source
from replicax._checkpoint.write import OnWritten, Positions, prepare_alone, prepare_together, take_snapshot
from replicax._data import iterators
from replicax._job import background
from replicax._report.terminal import progress
from replicax._tracing import context, frames
from replicax._variables import deferred_restore
from replicax._variables.resource import ResourceVariable
from replicax._variables.variable import Variable


def _refuse_inside(method: str) -> None:
    """Raises RuntimeError in a function that is being compiled and in a replica function."""
    if frames.is_tracing() or isinstance(frames.frame(), frames.TraceFrame):
        raise RuntimeError(
            f"Checkpoint.{method} is called in a function that is being compiled, such as that of `rx.function` or "
            "`jax.jit`, where it would happen once, while it is traced. Call it outside, between steps."
        )
    if context.get_replica_context() is not None and context.has_strategy():
        raise RuntimeError(
            f"Checkpoint.{method} is called by a replica, inside of `strategy.run`. It concerns all replicas: call it "
            "outside, between steps."
        )


class Checkpoint:
    """Saves the values of objects, and restores them.

    Values are found by the names that lead to them from the checkpoint, so that they can be restored in another
    program, under another strategy, with another number of replicas or processes. What can be saved: variables of all
    kinds, each as one value (an on-read one as its aggregated value); optimizers; `replicax.tf.Module`s; Keras' models,
    optimizers and metrics; Flax NNX's objects; iterators that have `save_state` and `restore_state`; arrays and pytrees
    of arrays, which `restore` replaces in the attribute; dicts, lists and tuples of these.

    Objects that are made or attached after `restore` get their values then.

    In a job of several processes all of them call `save`, `write` and `restore` together. Those that give the same path
    write one checkpoint, those that give another path one of their own.

    Args:
        root: an object whose own children are the checkpoint's, beside those in `kwargs`.
        **kwargs: the objects, each under a name.

    Raises:
        ValueError: an argument is nothing that can be saved, or `root` has a child of the same name.

    >>> import os, tempfile
    >>> import replicax as rx
    >>> folder = tempfile.mkdtemp()
    >>> v = rx.Variable([1.0, 2.0])
    >>> path = rx.train.Checkpoint(v=v).save(os.path.join(folder, "ckpt"))
    >>> os.path.basename(path)
    'ckpt-1'
    >>> with rx.MirroredStrategy(["GPU:0", "GPU:1"]).scope():
    ...     mirrored = rx.Variable([0.0, 0.0])
    >>> status = rx.train.Checkpoint(v=mirrored).restore(path)
    >>> status.assert_consumed() is status, mirrored.numpy().tolist()
    (True, [1.0, 2.0])
    """

    _attributes: dict[str, Leaf]
    _kept_positions: Positions | None  # of a handler that saves; None to save iterators where they stand
    _root: object
    _restoration: Restoration | None

    def __init__(self, root: object = None, **kwargs: object):
        foreign_state.join()
        report.begin()
        vars(self).update(_attributes={}, _root=root, _restoration=None, _kept_positions=None)
        if root is not None and not object_graph.has_children(root):
            raise ValueError(_not_trackable("root", root))
        names = object_graph.trackable_children(root) if root is not None else {}
        for name, value in kwargs.items():
            if not object_graph.is_trackable(value):
                raise ValueError(_not_trackable(name, value))
            if name in names and names[name] is not value:
                raise ValueError(
                    f"Cannot create a Checkpoint with keyword argument {name} if root.{name} already exists, and is "
                    "another object. Choose another name."
                )
            setattr(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self) or hasattr(type(self), name):
            return super().__setattr__(name, value)
        self._attributes[name] = value
        object_graph.attached(value)

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("_attributes", {})
        if name not in attributes:
            raise AttributeError(f"This Checkpoint has no attribute {name!r}; it has {sorted(attributes)}.")
        return attributes[name]

    def __delattr__(self, name: str) -> None:
        if self._attributes.pop(name, self) is self:
            raise AttributeError(name)

    def _roots(self) -> list[object]:
        return [self._attributes] if self._root is None else [self._root, self._attributes]

    def _begin_restore(self, method: str) -> bool:
        """Raise RuntimeError inside of a function; return True if all workers of a job restore together."""
        _refuse_inside(method)
        background.wait()
        return workers.is_of_several(object_graph.graph_of(self._roots()))

    def _tracked(self) -> dict[str, object]:
        children = map(object_graph.trackable_children, self._roots())
        return {name: child for of_root in children for name, child in of_root.items()}

    @property
    def save_counter(self) -> Variable:
        """The number of calls of `save`, an integer variable, which is saved and restored too.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> _ = [checkpoint.save(tempfile.mkdtemp() + "/ckpt") for _ in range(2)]
        >>> int(checkpoint.save_counter)
        2
        """
        if "save_counter" not in self._attributes:
            dtype = np.int64 if thread_state.has_64_bit_types() else np.int32
            self._attributes["save_counter"] = ResourceVariable(0, dtype=dtype, trainable=False, name="save_counter")
        counter: Variable = self._attributes["save_counter"]
        return counter

    def _positions(self) -> Positions:
        """Returns where iterators stand now; random numbers (`RandomState`) are not among them."""
        leaves: list[object] = [node.leaf for node in object_graph.graph_of(self._roots())]
        # Iterators that are there now may come into the checkpoint later.
        leaves += [PositionLeaf(cast(Any, iterator)) for iterator, _ in iterators.living]
        of_iterators = [leaf for leaf in leaves if isinstance(leaf, PositionLeaf) and hasattr(leaf.owner, "__next__")]
        return {leaf.identity: (leaf, leaf.packed()) for leaf in of_iterators}

    @contextlib.contextmanager
    def _saving_at(self, positions: Positions | None) -> Iterator[None]:
        """Returns a context in which iterators are saved at these positions; for None, where they stand."""
        self._kept_positions = positions
        try:
            yield
        finally:
            self._kept_positions = None

    def _write(self, path: str, options: object, then: OnWritten | None = None) -> None:
        """Write at this very path, and call `then`, which adds it to the list of checkpoints.

        An asynchronous save returns once the values are copied to the host.
        """
        if self._restoration is not None and self._restoration.unused():
            deferred_restore.apart(functools.partial(self._restoration.settle, late_only=True))
        asynchronous, label = is_async(options), f"saving {os.path.basename(path)}"
        place, then = (os.path.abspath(path), _in_this_folder(path, then)) if asynchronous else (path, then)
        with progress(label):
            nodes = object_graph.graph_of(self._roots())
            together = workers.is_of_several(nodes)
            take = functools.partial(take_snapshot, nodes, together, self._kept_positions, asynchronous)
            write = (prepare_together if together else prepare_alone)(place, take, then)
            if not asynchronous:
                write()
                return

        def write_and_call_back() -> None:
            with progress(label):
                write()
            call_back(options, path)

        background.start(f"the asynchronous save of {path}", write_and_call_back)

    def write(self, file_prefix: Path, options: object = None) -> str:
        """Saves at this very path, without counting; see `save`.

        Args:
            file_prefix: the path of a folder that is written, in place of one that is there.
            options: a `CheckpointOptions`, for an asynchronous save or for callbacks.

        Returns:
            The path.

        Raises:
            RuntimeError: inside of a compiled function or of `run`.
            FileExistsError: there is something at the path that is no checkpoint, or has other files in it.
            InvalidArgumentError: the path is empty, or is the working folder or one above it.
            CheckpointError: this or another worker of the job could not write it.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> checkpoint.write(tempfile.mkdtemp() + "/ckpt").rpartition("/")[2]
        'ckpt'
        """
        path = path_text(file_prefix, "checkpoint")
        _refuse_inside("write")
        planning.refuse_saving("Checkpoint.write")
        background.wait()
        self._write(path, options)
        if not is_async(options):
            call_back(options, path)
        return path

    def save(self, file_prefix: Path, options: object = None) -> str:
        """Saves at `file_prefix-NUMBER`, where NUMBER counts the calls; `latest_checkpoint` finds it.

        The checkpoint is there as a whole when this returns, unless `options` ask for an asynchronous save. If writing
        fails, those that were there are as before.

        Args:
            file_prefix: a path, the last part of which begins the folder's name.
            options: a `CheckpointOptions`, for an asynchronous save or for callbacks.

        Returns:
            The path, for `restore`.

        Raises:
            RuntimeError: inside of a compiled function or of `run`.
            FileExistsError: there is something at that path that is no checkpoint, or has other files in it.
            IsADirectoryError: in that folder there is a folder `checkpoint`, the name of the list of checkpoints.
            CheckpointError: this or another worker of the job could not write it.

        >>> import tempfile, replicax as rx
        >>> checkpoint, folder = rx.train.Checkpoint(v=rx.Variable(1.0)), tempfile.mkdtemp()
        >>> [checkpoint.save(folder + "/ckpt").rpartition("/")[2] for _ in range(2)]
        ['ckpt-1', 'ckpt-2']
        >>> rx.train.latest_checkpoint(folder).rpartition("/")[2]
        'ckpt-2'
        """
        prefix = path_text(file_prefix, "checkpoint")
        directory = os.path.dirname(prefix) or "."
        before = lists.read_list(directory)

        def list_new(path: str, wrote: bool) -> None:
            if wrote:
                path = os.path.join(directory, os.path.basename(path))
                new = lists.CheckpointList({path: os.path.getmtime(path)})
                lists.write_list(directory, new, lambda other: other == path, before)

        path = self._save_numbered(prefix, None, options, list_new)
        if not is_async(options):
            call_back(options, path)
        return path

    def _save_numbered(self, prefix: str, number: int | None, options: object, then: OnWritten) -> str:
        """Count, write and return the path.

        `then` has returned on all workers before this, or the background task of an asynchronous save, ends on one.
        """
        _refuse_inside("save")
        planning.refuse_saving("Checkpoint.save")
        background.wait()
        self.save_counter.assign_add(1)
        try:
            path = f"{prefix}-{int(self.save_counter) if number is None else number}"
            self._write(path, options, then)
            return path
        except BaseException:
            self.save_counter.assign_sub(1)
            raise

    def read(self, save_path: Path | None, options: object = None) -> LoadStatus:
        """Restores values from a path of `write`; see `restore`, which also takes over the count of saves.

        >>> import tempfile, replicax as rx
        >>> v = rx.Variable(1.0)
        >>> path = rx.train.Checkpoint(v=v).write(tempfile.mkdtemp() + "/ckpt")
        >>> _ = v.assign(2.0), rx.train.Checkpoint(v=v).read(path)
        >>> float(v)
        1.0
        """
        return self._read(save_path, "read", counting=False)

    def restore(self, save_path: Path | None, options: object = None) -> LoadStatus:
        """Restores the values of all objects that are there, and of others when they are made or attached.

        All of them are checked before the first is changed. An object without a value keeps the one that it has: use
        the assertions of the result to find out. An on-read variable with aggregation SUM gets its part of the sum on
        each replica.

        Args:
            save_path: what `save` returned, or None to restore nothing.
            options: accepted for compatibility.

        Returns:
            A status with `assert_consumed()`, `assert_existing_objects_matched()`, `assert_nontrivial_match()` and
            `expect_partial()`.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: it is damaged.
            ValueError: a value has another shape or dtype than its variable.
            RuntimeError: inside of a compiled function or of `run`.

        >>> import tempfile, replicax as rx
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
        >>> _ = checkpoint.v.assign(2.0), checkpoint.restore(path).assert_consumed()
        >>> float(checkpoint.v)
        1.0
        """
        return self._read(save_path, "restore", counting=True)

    def _read(self, save_path: Path | None, method: str, counting: bool) -> LoadStatus:
        together = self._begin_restore(method)
        if save_path is None:
            if together:
                workers.compare("", {})
            return InitializationOnlyStatus()
        path = path_text(save_path, "checkpoint")
        with progress(f"restoring {os.path.basename(path)}"):
            try:
                source = open_checkpoint(path)
            except Exception as error:
                if together:
                    workers.compare(path, {}, f"{type(error).__name__}: {error}")
                raise
            return self._restore_from(source, path, counting, together=together)

    def _restore_from(
        self, source: Source, path: str, counting: bool, exactly: bool = False, together: bool = False
    ) -> LoadStatus:
        """Restore values from an open checkpoint; see `Restoration`."""
        if counting:
            self.save_counter  # noqa: B018  # makes it
        restoration = Restoration(path, self._roots(), source, exactly, together)
        try:
            deferred_restore.apart(restoration.settle)
        except BaseException as error:
            restoration.quiet = True
            if restoration.together and isinstance(error, Exception):
                workers.compare(path, {}, f"{type(error).__name__}: {error}")
            raise
        if self._restoration is not None:
            self._restoration.quiet = True
            self._restoration.stop()
        vars(self)["_restoration"] = restoration
        if restoration.unused():
            restoration.wait()
        return CheckpointLoadStatus(restoration)

    def report(self) -> Report:
        """Returns what of the program's state is not in this checkpoint, as far as it can be known.

        To be called in the course of a training, between steps: what has changed since the program's first checkpoint
        was made counts. Printed, it says what each part is, where it was made, and what to do; see
        `replicax docs how-to/exact-resume` for what cannot be known.

        >>> import replicax as rx
        >>> steps, total = rx.Variable(0), rx.Variable(0.0, name="total")
        >>> checkpoint = rx.train.Checkpoint(steps=steps)
        >>> _ = steps.assign_add(1), total.assign_add(2.0)
        >>> [entry.what for entry in checkpoint.report().entries if "total" in entry.what]
        ["the variable 'total:0'"]
        """
        return report.report_on(object_graph.graph_of(self._roots()))

    def sync(self) -> None:
        """Wait until an asynchronous save is on the disk, and raise its error if it failed.

        >>> import tempfile, replicax as rx
        >>> checkpoint, options = rx.train.Checkpoint(v=rx.Variable(1.0)), rx.train.CheckpointOptions(enable_async=True)
        >>> path = checkpoint.write(tempfile.mkdtemp() + "/ckpt", options)
        >>> checkpoint.sync()
        """
        background.wait()


def _in_this_folder(path: str, then: OnWritten | None) -> OnWritten | None:
    """Return `then` for an asynchronous save, to be called with `path` in the present working folder."""
    folder = os.getcwd()

    def check_folder(_: str, wrote: bool) -> None:
        assert then is not None
        if not os.path.isabs(path) and os.getcwd() != folder:
            raise CheckpointError(
                f"The working folder changed from {folder} to {os.getcwd()} during the asynchronous save of {path}. "
                "The checkpoint is whole, but not in the list of checkpoints. Save at an absolute path."
            )
        then(path, wrote)

    return then and check_folder


def _not_trackable(name: str, value: object) -> str:
    return (
        f"`Checkpoint` was expecting {name} to be a trackable object, got {value!r:.80} of type "
        f"{type(value).__name__}. Variables, optimizers, modules, iterators, arrays, and dicts and lists of these are; "
        "an array or a pytree of arrays needs a name of its own."
    )
