"""`Checkpoint`: saves the values of objects, and restores them into objects found by the same names."""

from __future__ import annotations

import functools
import json
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax import _checkpoint_files as _files
from replicax import _context, _exchange, _late, _levels, _tracking
from replicax._errors import CheckpointError, InvalidArgumentError
from replicax._input import DistributedIterator
from replicax._tracking import Names, Node, PositionLeaf
from replicax._variables import ResourceVariable

_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
_POSITION = ".ATTRIBUTES/ITERATOR_STATE"
_KEPT = "_restored_checkpoint"  # an attribute by which objects keep what waits for their children
Then = Callable[[str, bool], None]
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def _path(names: Names) -> str:
    """Names as one text that no others have."""
    return "/".join(name.replace(".", "..").replace("/", ".S") for name in names)


def _key(names: Names, kind: str = _VALUE) -> str:
    return "/".join(filter(None, [_path(names), kind]))


def _said(names: Names) -> str:
    return ".".join(("(root)", *names))


# Saving.


def _of_several(nodes: Sequence[Node]) -> bool:
    """Whether some of the objects belong to several processes, all of which then save together."""

    def shared(owner: Any) -> bool:
        mesh = getattr(owner, "_mesh", None)
        return isinstance(owner, DistributedIterator) or (mesh is not None and not mesh.all_local)

    return jax.process_count() > 1 and any(node.leaf is not None and shared(node.leaf.owner) for node in nodes)


def _everyones(message: str) -> list[str]:
    return _exchange.everyones(message, "checkpoints")


def _snapshot(nodes: Sequence[Node], together: bool) -> _files.Saved:
    """What is to be written. The arrays of a pytree become nodes below the object that has it."""
    saved: list[dict[str, Any]] = [{"children": dict(node.children)} for node in nodes]
    arrays: dict[str, np.ndarray] = {}
    for number, node in enumerate(nodes):
        if isinstance(node.leaf, PositionLeaf):
            told = node.leaf.packed()
            everyones = _everyones(told) if together else [told]
            saved[number]["key"] = key = _key(node.names, _POSITION)
            arrays[key] = np.frombuffer(json.dumps(everyones).encode(), np.uint8)
        elif node.leaf is not None:
            for names, array in node.leaf.read().items():
                if array.dtype.kind in "OSU":
                    raise TypeError(
                        f"{_said((*node.names, *names))} is an array of {array.dtype}; checkpoints have numbers only."
                    )
                at = number
                for name in names:
                    children = saved[at]["children"]
                    if name not in children:
                        children[name] = len(saved)
                        saved.append({"children": {}})
                    at = children[name]
                saved[at]["key"] = key = _key((*node.names, *names))
                arrays[key] = array
    return _files.Saved(saved, arrays, uuid.uuid4().hex)


def _write_together(path: str, saved: _files.Saved, then: Then) -> None:
    """Writes where several processes save: of those with the same path one does."""
    me, where = jax.process_index(), os.path.abspath(path)
    told = [text.rsplit(" ", 1) for text in _everyones(f"the checkpoint {where} {saved.token}")]
    first = [other for other, _ in told].index(told[me][0])
    problem = ""
    if first == me:
        try:
            _files.write(path, saved)
            then(path, True)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problems = [text.split("\n", 1)[1] for text in _everyones(f"the writing of the checkpoint {where}\n{problem}")]
    if any(problems):
        text = "; ".join(f"{_exchange.name(i)}: {problem}" for i, problem in enumerate(problems) if problem)
        raise CheckpointError(f"The checkpoint {path} was not written. {text}")
    if first != me:
        apart = _files.token_at(path) != told[first][1]  # the same name on another machine's disk
        if apart:
            _files.write(path, saved)
        then(path, apart)


# Restoring.


class _Restoration:
    """A checkpoint that was read, and which of its values have been given to which objects."""

    def __init__(self, path: str, parts: Sequence[Any]):
        self.path, self._parts = path, parts
        self._saved = _files.read(path)
        self._given: dict[Any, Any] = {}  # by identity: the leaves that have their value, which keeps them alive
        self._stay: dict[Any, Any] = {}  # iterators whose position cannot be carried over, which was said
        self._used: set[str] = set()
        self.quiet = False

    def settle(self, late_only: bool = False) -> None:
        """Gives values to objects that have none yet; all are checked before the first is changed."""
        plan = []
        for node, number in self._matched():
            variable = node.leaf.owner
            late = getattr(variable, "_late", False)
            if node.leaf.identity in self._given or (late_only and late is False):
                continue
            values = self._values_for(node, number)
            if values is not None:
                plan.append((node, values))
            elif late is not False:
                variable._late = False  # it is among the objects, and there is nothing for it
        for node, values in plan:
            self._check(node, values)
        for node, values in plan:
            self._given[node.leaf.identity] = node.leaf
            if isinstance(node.leaf, PositionLeaf):
                node.leaf.unpack(values[()])
            else:
                node.leaf.write({names: self._saved.arrays[key] for names, key in values.items()})
        if not self.unused():
            self.stop()

    def wait(self) -> None:
        """Waits for objects that are made or attached later, for as long as those that it has now live."""
        _late.wait(self)
        for part in self._parts:
            for keeper in [part, *_tracking.trackable_children(part).values()]:
                if hasattr(keeper, "__dict__") and _tracking.has_children(keeper):
                    vars(keeper)[_KEPT] = self

    def stop(self) -> None:
        """Waits no longer."""
        _late.done(self)
        for part in self._parts:
            for keeper in [part, *_tracking.trackable_children(part).values()]:
                if getattr(keeper, "__dict__", {}).get(_KEPT) is self:
                    del vars(keeper)[_KEPT]

    def _matched(self) -> list[tuple[Node, int | None]]:
        """The objects that are there and have a value, each with the number of the saved one that is called so."""
        nodes = _tracking.graph_of(self._parts)
        pairs: dict[int, int] = {0: 0}
        for number in range(len(nodes)):  # those nearer to the root come first
            if number in pairs:
                saved = self._saved.nodes[pairs[number]]["children"]
                for name, child in nodes[number].children.items():
                    if name in saved:
                        pairs.setdefault(child, saved[name])
        return [(node, pairs.get(number)) for number, node in enumerate(nodes) if node.leaf is not None]

    def _values_for(self, node: Node, number: int | None) -> dict[Names, str] | None:
        """The keys of a leaf's arrays, for an iterator its part of what was saved; None if some are not there."""
        if number is None:
            return None
        if isinstance(node.leaf, PositionLeaf):
            key = self._saved.nodes[number].get("key", "")
            return self._position(node, key) if key.endswith(_POSITION) else None
        found = {}
        for names in node.leaf.types():
            at: int | None = number
            for name in names:
                at = None if at is None else self._saved.nodes[at]["children"].get(name)
            key = "" if at is None else self._saved.nodes[at].get("key", "")
            if not key.endswith(_VALUE):
                return None
            found[names] = key
        self._used.update(found.values())
        return found

    def _position(self, node: Node, key: str) -> dict[Names, str] | None:
        everyones = json.loads(self._saved.arrays[key].tobytes())
        count = jax.process_count()
        self._used.add(key)
        if len(everyones) == 1 and (count == 1 or not isinstance(node.leaf.owner, DistributedIterator)):
            return {(): everyones[0]}
        if len(everyones) == count:
            return {(): everyones[jax.process_index()]}
        if node.leaf.identity in self._stay:
            return None
        self._stay[node.leaf.identity] = node.leaf
        warnings.warn(
            f"{_said(node.names)} was saved by {len(everyones)} processes and there are {count} now, to which its "
            "position in the data cannot be carried over. It stays where it is.",
            stacklevel=2,
        )
        return None

    def _check(self, node: Node, values: dict[Names, str]) -> None:
        if isinstance(node.leaf, PositionLeaf):
            return
        for names, kind in node.leaf.types().items():
            array, said = self._saved.arrays[values[names]], _said((*node.names, *names))
            if array.shape != kind.shape:
                raise ValueError(
                    f"Received incompatible tensor with shape {array.shape} when attempting to restore variable with "
                    f"shape {kind.shape} and name {said}, from {self.path}. Nothing has been restored."
                )
            both_counters = node.names == ("save_counter",) and array.dtype.kind == kind.dtype.kind
            if array.dtype != kind.dtype and not both_counters:
                raise InvalidArgumentError(
                    f"{said} is of dtype {kind.dtype}; expected dtype {kind.dtype} does not equal original dtype "
                    f"{array.dtype} in {self.path}. Nothing has been restored."
                )

    def unused(self) -> list[str]:
        """The values that have found no object."""
        return [key for key in self._saved.arrays if key not in self._used]

    def without(self) -> list[str]:
        """The objects that are there and have no value here."""
        return [
            f"{_said(node.names)} ({_shown(node.leaf.owner)})"
            for node, _ in self._matched()
            if node.leaf.identity not in self._given
        ]

    def used(self) -> bool:
        """Whether any value has found its object."""
        return bool(self._used - {_key(("save_counter",))})

    def __del__(self) -> None:
        if getattr(self, "quiet", True) or sys.is_finalizing():
            return
        unused = self.unused()
        if unused:
            warnings.warn(
                f"{len(unused)} values of the checkpoint {self.path} have found no object to be restored into: "
                f"{_some(unused)}. If that is as it should be, call expect_partial() on what restore() returns.",
                stacklevel=1,
            )


def _shown(owner: Any) -> str:
    name = getattr(owner, "name", None)
    return f"{type(owner).__name__} {name!r}" if isinstance(name, str) else type(owner).__name__


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")


class CheckpointLoadStatus:
    """What became of a restored checkpoint, which can be asserted. Each method returns the status itself."""

    def __init__(self, restoration: _Restoration):
        self._restoration = restoration

    def _settled(self) -> _Restoration:
        _late.apart(self._restoration.settle)
        self._restoration.quiet = True
        return self._restoration

    def assert_consumed(self) -> CheckpointLoadStatus:
        """`AssertionError` unless all values have found their object, and all objects their value."""
        restoration = self._settled()
        problems = [f"Unresolved object in checkpoint {restoration.path}: {key}" for key in restoration.unused()]
        return self._assert(problems + self._unbound())

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """`AssertionError` unless all objects that are there have found their value."""
        self._settled()
        return self._assert(self._unbound())

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """`AssertionError` where no value has found an object."""
        restoration = self._settled()
        if restoration.used():
            return self
        return self._assert(
            [
                "Nothing except the root object matched a checkpointed value. The names in the program must be those "
                f"with which {restoration.path} was saved. It has {_some(restoration.unused())}; the program has "
                f"{_some(restoration.without()) or 'nothing'}"
            ]
        )

    def expect_partial(self) -> CheckpointLoadStatus:
        """No warning if values of the checkpoint find no object."""
        self._restoration.quiet = True
        return self

    def _unbound(self) -> list[str]:
        without = self._restoration.without()
        return without and [
            f"Found {len(without)} Python objects that were not bound to checkpointed values, likely due to changes in "
            f"the Python program: {_some(without)}"
        ]

    def _assert(self, problems: list[str]) -> CheckpointLoadStatus:
        if problems:
            raise AssertionError("\n".join(problems))
        return self


class InitializationOnlyStatus:
    """What `restore(None)` returns, which restores nothing: only `expect_partial` does not raise."""

    def _nothing(self) -> Any:
        raise AssertionError("No checkpoint specified (save_path=None); nothing is being restored.")

    def assert_consumed(self) -> Any:
        """`AssertionError`."""
        return self._nothing()

    def assert_existing_objects_matched(self) -> Any:
        """`AssertionError`."""
        return self._nothing()

    def assert_nontrivial_match(self) -> Any:
        """`AssertionError`."""
        return self._nothing()

    def expect_partial(self) -> InitializationOnlyStatus:
        """Itself."""
        return self


# The checkpoint.


def _refuse_replicas(method: str) -> None:
    if _levels.is_tracing() or isinstance(_levels.frame(), _levels.Level):
        raise RuntimeError(
            f"Checkpoint.{method} is called in a function that is being compiled, such as that of `rx.function` or "
            "`jax.jit`, where it would happen once, while it is traced. Call it outside, between steps."
        )
    if _context.get_replica_context() is not None and _context.has_strategy():
        raise RuntimeError(
            f"Checkpoint.{method} is called by a replica, inside of `strategy.run`. It concerns all replicas: call it "
            "outside, between steps."
        )


class Checkpoint:
    """Saves the values of objects, and restores them.

    Values are found by the names that lead to them from the checkpoint, so that they can be restored in another
    program, under another strategy, with another number of replicas or processes. What can be saved: variables of all
    kinds, each as one value (an on-read one as its aggregated value); optimizers; `replicax.tf.Module`s; Keras' models,
    optimizers and metrics; iterators that have `save_state` and `restore_state`; arrays and pytrees of arrays, which
    `restore` replaces in the attribute; dicts, lists and tuples of these.

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

    _attributes: dict[str, Any]
    _root: Any

    def __init__(self, root: Any = None, **kwargs: Any):
        vars(self).update(_attributes={}, _root=root, _restoration=None)
        if root is not None and not _tracking.has_children(root):
            raise ValueError(_not_trackable("root", root))
        names = _tracking.trackable_children(root) if root is not None else {}
        for name, value in kwargs.items():
            if not _tracking.is_trackable(value):
                raise ValueError(_not_trackable(name, value))
            if name in names and names[name] is not value:
                raise ValueError(
                    f"Cannot create a Checkpoint with keyword argument {name} if root.{name} already exists, and is "
                    "another object. Choose another name."
                )
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or hasattr(type(self), name):
            return super().__setattr__(name, value)
        self._attributes[name] = value
        _tracking.attached(value)

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("_attributes", {})
        if name not in attributes:
            raise AttributeError(f"This Checkpoint has no attribute {name!r}; it has {sorted(attributes)}.")
        return attributes[name]

    def __delattr__(self, name: str) -> None:
        if self._attributes.pop(name, self) is self:
            raise AttributeError(name)

    def _parts(self) -> list[Any]:
        return [self._attributes] if self._root is None else [self._root, self._attributes]

    def _tracked(self) -> dict[str, Any]:
        parts = [_tracking.trackable_children(part) for part in self._parts()]
        return {name: child for part in parts for name, child in part.items()}

    @property
    def save_counter(self) -> Any:
        """How many times `save` was called, an integer variable, which is saved and restored too."""
        if "save_counter" not in self._attributes:
            dtype = np.int64 if _context.has_64_bit_types() else np.int32
            self._attributes["save_counter"] = ResourceVariable(0, dtype=dtype, trainable=False, name="save_counter")
        return self._attributes["save_counter"]

    def _write(self, path: str, method: str, then: Then = lambda path, wrote: None) -> None:
        """Writes at this very path, and calls `then` with the path and whether this process has written it."""
        _refuse_replicas(method)
        if self._restoration is not None and self._restoration.unused():
            _late.apart(functools.partial(self._restoration.settle, late_only=True))
        nodes = _tracking.graph_of(self._parts())
        together = _of_several(nodes)
        saved = _snapshot(nodes, together)
        if together:
            return _write_together(path, saved, then)
        _files.write(path, saved)
        then(path, True)

    def write(self, file_prefix: Any, options: Any = None) -> str:
        """Saves at this very path, without counting; see `save`.

        Args:
            file_prefix: the path of a folder that is written, in place of one that is there.
            options: accepted for compatibility.

        Returns:
            The path.

        Raises:
            RuntimeError: inside of a compiled function or of `run`.
            CheckpointError: another worker of the job could not write it.
        """
        path = os.fspath(file_prefix)
        self._write(path, "write")
        return path

    def save(self, file_prefix: Any, options: Any = None) -> str:
        """Saves at `file_prefix-NUMBER`, where NUMBER counts the calls; `latest_checkpoint` finds it.

        The checkpoint is there as a whole when this returns. If writing fails, those that were there are as before.

        Args:
            file_prefix: a path, the last part of which begins the folder's name.
            options: accepted for compatibility.

        Returns:
            The path, for `restore`.

        Raises:
            RuntimeError: inside of a compiled function or of `run`.
            CheckpointError: another worker of the job could not write it.
        """
        _refuse_replicas("save")
        prefix = os.fspath(file_prefix)
        directory = os.path.dirname(prefix) or "."
        before = _files.recorded(directory)

        def record(path: str, wrote: bool) -> None:
            if wrote:
                paths = {} if before is None else {p: at for p, at in before.paths.items() if os.path.isdir(p)}
                paths.pop(os.path.join(directory, os.path.basename(path)), None)
                _files.record(directory, _files.State({**paths, path: os.path.getmtime(path)}))

        return self._save_numbered(prefix, None, record)

    def _save_numbered(self, prefix: str, number: int | None, then: Then) -> str:
        """Counts and writes, and returns the path. `then` is over on all workers before one returns."""
        _refuse_replicas("save")
        self.save_counter.assign_add(1)
        try:
            path = f"{prefix}-{int(self.save_counter) if number is None else number}"
            self._write(path, "save", then)
            return path
        except BaseException:
            self.save_counter.assign_sub(1)
            raise

    def read(self, save_path: Any, options: Any = None) -> Any:
        """Restores values from a path of `write`; see `restore`, which also takes over the count of saves."""
        return self._read(save_path, "read", counting=False)

    def restore(self, save_path: Any, options: Any = None) -> Any:
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
            CheckpointError: it is damaged, or in TensorFlow's own format.
            ValueError: a value has another shape or dtype than its variable.
            RuntimeError: inside of a compiled function or of `run`.
        """
        return self._read(save_path, "restore", counting=True)

    def _read(self, save_path: Any, method: str, counting: bool) -> Any:
        _refuse_replicas(method)
        if save_path is None:
            return InitializationOnlyStatus()
        restoration = _Restoration(os.fspath(save_path), self._parts())
        if counting:
            self.save_counter  # noqa: B018  # makes it
        try:
            _late.apart(restoration.settle)
        except BaseException:
            restoration.quiet = True
            raise
        if self._restoration is not None:
            self._restoration.quiet = True
            self._restoration.stop()
        vars(self)["_restoration"] = restoration
        if restoration.unused():
            restoration.wait()
        return CheckpointLoadStatus(restoration)

    def sync(self) -> None:
        """Does nothing: what is saved is on the disk when `save` returns."""


def _not_trackable(name: str, value: Any) -> str:
    return (
        f"`Checkpoint` was expecting {name} to be a trackable object, got {value!r} of type {type(value).__name__}. "
        "Variables, optimizers, modules, iterators, arrays, and dicts and lists of these are; an array or a pytree of "
        "arrays needs a name of its own."
    )


class CheckpointReader:
    """The values of a checkpoint, by their keys: the names that lead to each, and a fixed ending."""

    def __init__(self, path: str):
        self._saved = _files.read(path)
        graph = np.array(json.dumps(self._saved.nodes).encode(), object)
        self._values = {GRAPH: graph, **self._saved.arrays}

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """The shape of each."""
        return {key: list(array.shape) for key, array in self._values.items()}

    def get_variable_to_dtype_map(self) -> dict[str, Any]:
        """The dtype of each."""
        return {key: array.dtype for key, array in self._values.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Whether there is a value of this key."""
        return tensor_str in self._values

    def get_tensor(self, tensor_str: str) -> Any:
        """A value, as a numpy array or number; `KeyError` where there is none."""
        if tensor_str not in self._values:
            raise KeyError(f"Key {tensor_str} not found in checkpoint; it has {_some(sorted(self._values))}.")
        return self._values[tensor_str][()]


def load_checkpoint(ckpt_dir_or_file: Any) -> CheckpointReader:
    """A reader of the values of a checkpoint, or of a folder's newest whole one.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged, or in TensorFlow's own format.

    >>> import os, tempfile
    >>> import replicax as rx
    >>> path = rx.train.Checkpoint(v=rx.Variable(3.0)).write(os.path.join(tempfile.mkdtemp(), "ckpt"))
    >>> float(rx.train.load_checkpoint(path).get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE"))
    3.0
    """
    path = os.fspath(ckpt_dir_or_file)
    latest = _files.latest_checkpoint(path) if os.path.isdir(path) else None
    return CheckpointReader(path if latest is None else latest)
