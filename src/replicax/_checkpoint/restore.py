"""Restoring: the values of a checkpoint, given to the objects that have the same names, now or when they are made."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeAlias

import jax
import numpy as np

from replicax._base import doc_pages
from replicax._base.errors import InvalidArgumentError
from replicax._checkpoint import files as _files
from replicax._checkpoint import object_graph, workers
from replicax._checkpoint.object_graph import CheckpointLeaf, Identity, Names, ObjectNode, PositionLeaf
from replicax._checkpoint.sources import POSITION, REPLICAS, VALUE, ReplicaxSource, Source
from replicax._checkpoint.tensor_bundle import TensorBundle
from replicax._checkpoint.tensorflow_source import TensorFlowSource
from replicax._input.iterator import DistributedIterator
from replicax._report.terminal import progress
from replicax._variables import deferred_restore
from replicax._variables.variable import Variable

_KEPT = "_restored_checkpoint"  # an attribute by which objects keep what waits for their children


def _path(names: Names) -> str:
    """Returns names as one text, different for different names."""
    return "/".join(name.replace(".", "..").replace("/", ".S") for name in names)


def key_of(names: Names, kind: str = VALUE) -> str:
    """Returns the key of an array, as TensorFlow writes it."""
    return "/".join(filter(None, [_path(names), kind]))


def name_in_messages(names: Names) -> str:
    """Returns the name by which messages call an object."""
    return ".".join(("(root)", *names))


def open_checkpoint(path: str) -> Source:
    """Returns the checkpoint at a path.

    Raises:
        FileNotFoundError: nothing is there.
        CheckpointError: it is damaged, or of another format.
    """
    prefix = _files.tensorflow_prefix(path)
    if prefix is not None:
        return TensorFlowSource(TensorBundle(prefix))
    saved = _files.read(path)
    return ReplicaxSource(saved.nodes, saved.arrays, saved.save)


class Restoration:
    """A checkpoint that was read, and a record of which of its values were given to which objects.

    Args:
        path: the checkpoint's.
        roots: the objects.
        source: the checkpoint's content.
        exactly: whether replicas get back what each had for itself in place of a part of the aggregated value.
        together: whether all workers restore now, and compare their values even if there are none.
    """

    def __init__(self, path: str, roots: Sequence[object], source: Source, exactly: bool, together: bool):
        self.path, self._roots, self._saved, self._exactly = path, roots, source, exactly
        self.together = together  # False once the workers have compared
        self._given: dict[Identity, CheckpointLeaf] = {}  # restored leaves by identity, which keeps them alive
        self._stay: dict[Identity, CheckpointLeaf] = {}  # iterators that were warned about: they keep their position
        self._used: set[str] = set()
        self.quiet = False

    def settle(self, late_only: bool = False) -> None:
        """Restores the objects that are there and were not restored; all are checked before the first is changed."""
        plan = []
        for node, leaf, number in self._matched():
            late = getattr(leaf.owner, "_late", False)
            if leaf.identity in self._given or (late_only and late is False):
                continue
            values = self._values_for(node, leaf, number)
            if values is not None:
                plan.append((node, leaf, values))
            elif isinstance(leaf.owner, Variable) and late is not False:
                leaf.owner._late = False  # it is among the objects, and there is nothing for it
        found = []
        with progress("reading values", total=len(plan), unit="values") as bar:
            for node, leaf, values in plan:
                found.append(self._checked(node, leaf, values))
                bar.advance()
        self._compare([node for node, _, _ in plan], found)
        _move([(leaf, values[()]) for _, leaf, values in plan if isinstance(leaf, PositionLeaf)])
        for (_, leaf, values), arrays in zip(plan, found):
            self._given[leaf.identity] = leaf
            if not isinstance(leaf, PositionLeaf):
                leaf.write(arrays)
                if self._exactly:
                    leaf.write_replicas(self._of_replicas(values))
        if not self.unused():
            self.stop()

    def _compare(self, nodes: Sequence[ObjectNode], found: Sequence[dict[Names, np.ndarray]]) -> None:
        """Compare the values of shared objects with those of the other workers, before anything is changed."""
        named = [(name_in_messages(node.names), node, arrays) for node, arrays in zip(nodes, found)]
        digests = workers.shared_digests(named)
        if self.together or (digests and workers.is_of_several(nodes)):
            self.together = False
            workers.compare(self.path, digests)

    def _of_replicas(self, values: dict[Names, str]) -> dict[Names, np.ndarray]:
        """Returns what replicas had each for themselves of the arrays with these keys."""
        keys = {names: key.removesuffix(VALUE) + REPLICAS for names, key in values.items()}
        return {names: self._saved.arrays[key] for names, key in keys.items() if key in self._saved.arrays}

    def wait(self) -> None:
        """Waits for objects that are made or attached later, for as long as the present ones live."""
        deferred_restore.wait(self)
        for keeper in self._keepers():
            if object_graph.has_children(keeper):
                vars(keeper)[_KEPT] = self

    def stop(self) -> None:
        """Stops waiting for further objects."""
        deferred_restore.done(self)
        for keeper in self._keepers():
            if vars(keeper).get(_KEPT) is self:
                del vars(keeper)[_KEPT]

    def _keepers(self) -> Iterator[object]:
        for root in self._roots:
            for keeper in [root, *object_graph.trackable_children(root).values()]:
                if hasattr(keeper, "__dict__"):
                    yield keeper

    def _matched(self) -> list[tuple[ObjectNode, CheckpointLeaf, int | None]]:
        """Returns the leaves of the objects that are there, each with the number of the saved node of its name."""
        nodes, pairs = self._saved.match(self._roots)
        return [(node, node.leaf, pairs.get(number)) for number, node in enumerate(nodes) if node.leaf is not None]

    def _values_for(self, node: ObjectNode, leaf: CheckpointLeaf, number: int | None) -> dict[Names, str] | None:
        """Returns the keys of a leaf's arrays (an iterator's position itself); None if some are not there."""
        if number is None:
            return None
        if isinstance(leaf, PositionLeaf):
            key = self._saved.nodes[number].get("key", "")
            return self._position(node, leaf, key) if key.endswith(POSITION) else None
        found = {}
        for names in leaf.types():
            at: int | None = number
            for name in names:
                at = None if at is None else self._saved.nodes[at]["children"].get(name)
            key = "" if at is None else self._saved.nodes[at].get("key", "")
            if not key or key.endswith(POSITION):
                return None
            found[names] = key
        self._used.update(found.values())
        return found

    def _position(self, node: ObjectNode, leaf: PositionLeaf, key: str) -> dict[Names, str] | None:
        positions = json.loads(self._saved.arrays[key].tobytes())  # of each process that saved
        count = jax.process_count()
        self._used.add(key)
        if len(positions) == 1 and (count == 1 or not isinstance(leaf.owner, DistributedIterator)):
            return {(): positions[0]}
        if len(positions) == count:
            return {(): positions[jax.process_index()]}
        if (carried := leaf.carried_over(positions)) is not None:
            return {(): carried}
        if leaf.identity in self._stay:
            return None
        self._stay[leaf.identity] = leaf
        warnings.warn(
            f"{name_in_messages(node.names)} was saved by {len(positions)} processes and there are {count} now, to "
            "which its position cannot be carried over, since each process has one of its own (in its files, in a "
            "dataset that was made for it, in its random numbers). It stays where it is: elements that were taken "
            "before come again. With `experimental_distribute_dataset` and AutoShardPolicy.DATA it goes on exactly. "
            f"See {doc_pages.page('how-to/exact-resume#another-number-of-workers')}.",
            stacklevel=2,
        )
        return None

    def _checked(self, node: ObjectNode, leaf: CheckpointLeaf, values: dict[Names, str]) -> dict[Names, np.ndarray]:
        """Returns the arrays for a leaf, after comparing their shapes and dtypes."""
        if isinstance(leaf, PositionLeaf):
            return {}
        types = leaf.types()
        for names, kind in types.items():
            shape, dtype = self._saved.type(values[names])
            what = name_in_messages((*node.names, *names))
            if shape != kind.shape:
                raise ValueError(
                    f"Received incompatible tensor with shape {shape} when attempting to restore variable with "
                    f"shape {kind.shape} and name {what}, from {self.path}. Nothing has been restored. "
                    f"See {doc_pages.page('troubleshooting#checkpoints')}."
                )
            narrows = self._saved.narrows or node.names == ("save_counter",)
            if dtype != kind.dtype and not (narrows and dtype.kind == kind.dtype.kind and dtype.kind in "iu"):
                raise InvalidArgumentError(
                    f"{what} is of dtype {kind.dtype}; expected dtype {kind.dtype} does not equal original dtype "
                    f"{dtype} in {self.path}. Nothing has been restored. "
                    f"See {doc_pages.page('troubleshooting#checkpoints')}."
                )
        arrays = {names: self._saved.arrays[key] for names, key in values.items()}
        for names, array in arrays.items():
            arrays[names] = array.astype(types[names].dtype, copy=False)
            if array.dtype != types[names].dtype and (arrays[names] != array).any():
                raise InvalidArgumentError(
                    f"{name_in_messages((*node.names, *names))} is of dtype {types[names].dtype}, which does not hold "
                    f"the value {array.ravel()[0]} that it has in {self.path}. Nothing has been restored."
                )
        return arrays

    def unused(self) -> list[str]:
        """Returns the keys of the values that were given to no object."""
        return [key for key in self._saved.arrays if key not in self._used and not key.endswith(REPLICAS)]

    def unmatched(self) -> list[str]:
        """Returns descriptions of the objects that are there and have no value here."""
        return [
            f"{name_in_messages(node.names)} ({_shown(leaf.owner)})"
            for node, leaf, _ in self._matched()
            if leaf.identity not in self._given and not self._saved.is_optional(node)
        ]

    def matched_any(self) -> bool:
        """Returns True if any value was given to an object."""
        return bool(self._used - {key_of(("save_counter",))})

    def __del__(self) -> None:
        if getattr(self, "quiet", True) or sys is None or sys.is_finalizing():  # at exit, modules are cleared in turn
            return
        unused = self.unused()
        if unused:
            warnings.warn(
                f"{len(unused)} values of the checkpoint {self.path} have found no object to be restored into: "
                f"{abbreviated(unused)}. If that is as it should be, call expect_partial() on what restore() returns. "
                f"See {doc_pages.page('how-to/checkpoints#saved-values-and-their-names')}.",
                stacklevel=1,
            )


def _move(positions: Sequence[tuple[PositionLeaf, str]]) -> None:
    """Moves iterators to these positions. Where one raises, those before it return to where they stood."""
    moved: list[tuple[PositionLeaf, str]] = []
    try:
        for leaf, position in positions:
            before = leaf.packed()
            leaf.unpack(position)
            moved.append((leaf, before))
    except BaseException:
        for leaf, before in moved:
            leaf.unpack(before)
        raise


def _shown(owner: object) -> str:
    name = getattr(owner, "name", None)
    return f"{type(owner).__name__} {name!r}" if isinstance(name, str) else type(owner).__name__


def abbreviated(texts: Sequence[str]) -> str:
    """Returns the first ten of these texts and the number of the others, for a message."""
    return ", ".join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")


class CheckpointLoadStatus:
    """Assertions about a restored checkpoint. Each method returns the status itself."""

    def __init__(self, restoration: Restoration):
        self._restoration = restoration

    def _settled(self) -> Restoration:
        deferred_restore.apart(self._restoration.settle)
        self._restoration.quiet = True
        return self._restoration

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Raises `AssertionError` unless all values have found their object, and all objects their value."""
        restoration = self._settled()
        problems = [f"Unresolved object in checkpoint {restoration.path}: {key}" for key in restoration.unused()]
        return self._assert(problems + self._unbound())

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Raises `AssertionError` unless all objects that are there have found their value."""
        self._settled()
        return self._assert(self._unbound())

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Raises `AssertionError` if no value has found an object."""
        restoration = self._settled()
        if restoration.matched_any():
            return self
        return self._assert(
            [
                "Nothing except the root object matched a checkpointed value. The names in the program must be those "
                f"with which {restoration.path} was saved. It has {abbreviated(restoration.unused())}; the program has "
                f"{abbreviated(restoration.unmatched()) or 'nothing'}"
            ]
        )

    def expect_partial(self) -> CheckpointLoadStatus:
        """Turns off the warning about values of the checkpoint that find no object."""
        self._restoration.quiet = True
        return self

    def initialize_or_restore(self, session: object = None) -> None:
        """Does nothing: values are restored by now, and variables always have one."""

    run_restore_ops = initialize_or_restore

    def _unbound(self) -> list[str]:
        unmatched = self._restoration.unmatched()
        return unmatched and [
            f"Found {len(unmatched)} Python objects that were not bound to checkpointed values, likely due to changes "
            f"in the Python program: {abbreviated(unmatched)}"
        ]

    def _assert(self, problems: list[str]) -> CheckpointLoadStatus:
        if problems:
            raise AssertionError("\n".join(problems))
        return self


class InitializationOnlyStatus:
    """The result of `restore(None)`, which restores nothing: its assertions raise."""

    def assert_consumed(self) -> NoReturn:
        """Raises `AssertionError`."""
        raise AssertionError("No checkpoint specified (save_path=None); nothing is being restored.")

    assert_existing_objects_matched = assert_nontrivial_match = assert_consumed

    def run_restore_ops(self, session: object = None) -> NoReturn:
        """Raises `AssertionError`."""
        raise AssertionError("No checkpoint specified, so no restore ops are available (save_path=None).")

    def initialize_or_restore(self, session: object = None) -> None:
        """Does nothing: variables always have a value."""

    def expect_partial(self) -> InitializationOnlyStatus:
        """Returns itself."""
        return self


LoadStatus: TypeAlias = CheckpointLoadStatus | InitializationOnlyStatus
