"""Restoring: the values of a checkpoint, given to the objects that have the same names, now or when they are made."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from replicax._base.errors import InvalidArgumentError
from replicax._checkpoint import files as _files
from replicax._checkpoint import object_graph
from replicax._checkpoint.object_graph import Names, Node, PositionLeaf
from replicax._input.iterator import DistributedIterator
from replicax._variables import deferred_restore

VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
POSITION = ".ATTRIBUTES/ITERATOR_STATE"
_KEPT = "_restored_checkpoint"  # an attribute by which objects keep what waits for their children


def _path(names: Names) -> str:
    """Names as one text that no others have."""
    return "/".join(name.replace(".", "..").replace("/", ".S") for name in names)


def key_of(names: Names, kind: str = VALUE) -> str:
    """The key of an array, as TensorFlow writes it."""
    return "/".join(filter(None, [_path(names), kind]))


def said(names: Names) -> str:
    """What messages call an object."""
    return ".".join(("(root)", *names))


class Restoration:
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
        _move([(node.leaf, values[()]) for node, values in plan if isinstance(node.leaf, PositionLeaf)])
        for node, values in plan:
            self._given[node.leaf.identity] = node.leaf
            if not isinstance(node.leaf, PositionLeaf):
                node.leaf.write({names: self._saved.arrays[key] for names, key in values.items()})
        if not self.unused():
            self.stop()

    def wait(self) -> None:
        """Waits for objects that are made or attached later, for as long as those that it has now live."""
        deferred_restore.wait(self)
        for part in self._parts:
            for keeper in [part, *object_graph.trackable_children(part).values()]:
                if hasattr(keeper, "__dict__") and object_graph.has_children(keeper):
                    vars(keeper)[_KEPT] = self

    def stop(self) -> None:
        """Waits no longer."""
        deferred_restore.done(self)
        for part in self._parts:
            for keeper in [part, *object_graph.trackable_children(part).values()]:
                if getattr(keeper, "__dict__", {}).get(_KEPT) is self:
                    del vars(keeper)[_KEPT]

    def _matched(self) -> list[tuple[Node, int | None]]:
        """The objects that are there and have a value, each with the number of the saved one that is called so."""
        nodes = object_graph.graph_of(self._parts)
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
            return self._position(node, key) if key.endswith(POSITION) else None
        found = {}
        for names in node.leaf.types():
            at: int | None = number
            for name in names:
                at = None if at is None else self._saved.nodes[at]["children"].get(name)
            key = "" if at is None else self._saved.nodes[at].get("key", "")
            if not key.endswith(VALUE):
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
            f"{said(node.names)} was saved by {len(everyones)} processes and there are {count} now, to which its "
            "position in the data cannot be carried over. It stays where it is.",
            stacklevel=2,
        )
        return None

    def _check(self, node: Node, values: dict[Names, str]) -> None:
        if isinstance(node.leaf, PositionLeaf):
            return
        for names, kind in node.leaf.types().items():
            array, what = self._saved.arrays[values[names]], said((*node.names, *names))
            if array.shape != kind.shape:
                raise ValueError(
                    f"Received incompatible tensor with shape {array.shape} when attempting to restore variable with "
                    f"shape {kind.shape} and name {what}, from {self.path}. Nothing has been restored."
                )
            both_counters = node.names == ("save_counter",) and array.dtype.kind == kind.dtype.kind
            if array.dtype != kind.dtype and not both_counters:
                raise InvalidArgumentError(
                    f"{what} is of dtype {kind.dtype}; expected dtype {kind.dtype} does not equal original dtype "
                    f"{array.dtype} in {self.path}. Nothing has been restored."
                )

    def unused(self) -> list[str]:
        """The values that have found no object."""
        return [key for key in self._saved.arrays if key not in self._used]

    def without(self) -> list[str]:
        """The objects that are there and have no value here."""
        return [
            f"{said(node.names)} ({_shown(node.leaf.owner)})"
            for node, _ in self._matched()
            if node.leaf.identity not in self._given
        ]

    def used(self) -> bool:
        """Whether any value has found its object."""
        return bool(self._used - {key_of(("save_counter",))})

    def __del__(self) -> None:
        if getattr(self, "quiet", True) or sys is None or sys.is_finalizing():  # modules go one by one at the end
            return
        unused = self.unused()
        if unused:
            warnings.warn(
                f"{len(unused)} values of the checkpoint {self.path} have found no object to be restored into: "
                f"{some(unused)}. If that is as it should be, call expect_partial() on what restore() returns.",
                stacklevel=1,
            )


def _move(places: Sequence[tuple[PositionLeaf, str]]) -> None:
    """Moves iterators to these places. Where one does not take its own, those before it go back to where they stood."""
    moved: list[tuple[PositionLeaf, str]] = []
    try:
        for leaf, place in places:
            before = leaf.packed()
            leaf.unpack(place)
            moved.append((leaf, before))
    except BaseException:
        for leaf, before in moved:
            leaf.unpack(before)
        raise


def _shown(owner: Any) -> str:
    name = getattr(owner, "name", None)
    return f"{type(owner).__name__} {name!r}" if isinstance(name, str) else type(owner).__name__


def some(texts: Sequence[str]) -> str:
    """The first of them, for a message."""
    return ", ".join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")


class CheckpointLoadStatus:
    """What became of a restored checkpoint, which can be asserted. Each method returns the status itself."""

    def __init__(self, restoration: Restoration):
        self._restoration = restoration

    def _settled(self) -> Restoration:
        deferred_restore.apart(self._restoration.settle)
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
                f"with which {restoration.path} was saved. It has {some(restoration.unused())}; the program has "
                f"{some(restoration.without()) or 'nothing'}"
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
            f"the Python program: {some(without)}"
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
