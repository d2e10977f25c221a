"""Writing a checkpoint: the values of its objects at one moment, and which worker of a job writes them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from replicax._base.errors import CheckpointError, CheckpointFailedElsewhere
from replicax._checkpoint import files as _files
from replicax._checkpoint import workers
from replicax._checkpoint.object_graph import Identity, ObjectNode, PositionLeaf
from replicax._checkpoint.restore import key_of, name_in_messages
from replicax._checkpoint.sources import POSITION, REPLICAS

# Called after writing with the path and True if this process wrote it.
OnWritten = Callable[[str, bool], None]
# Positions to save in place of the current positions of iterators. They hold the leaves, so that ids stay unique.
Positions = dict[Identity, tuple[PositionLeaf, str]]


class Snapshot(NamedTuple):
    """The values of a checkpoint's objects at one moment.

    Attributes:
        saved: the content to be written, without the positions of iterators.
        positions: the position of each iterator in this process, by its key.
        shared: the arrays of each object that belongs to several workers, by its name.
        loose: the names of variables with `copies_may_differ`.
        asynchronous: whether it is written while training goes on.
    """

    saved: _files.Saved
    positions: dict[str, str]
    shared: dict[str, list[np.ndarray]]
    loose: list[str]
    asynchronous: bool

    def with_positions(self, of_processes: Sequence[Mapping[str, str]]) -> _files.Saved:
        """Return the content with the positions of iterators in each process."""
        lists = {key: [positions[key] for positions in of_processes] for key in self.positions}
        texts = {key: np.frombuffer(json.dumps(positions).encode(), np.uint8) for key, positions in lists.items()}
        return self.saved._replace(arrays=self.saved.arrays | texts)

    def compute_digests(self, turn: int) -> dict[str, int]:
        """Return a digest of the value of each object that belongs to several workers, by its name."""
        return {name: workers.checksum(arrays, turn) for name, arrays in self.shared.items()}


def _position_of(leaf: PositionLeaf, overrides: Positions | None) -> str:
    """Return the position to save: from the overrides, if there are any, or else the current one."""
    if overrides is None or not hasattr(leaf.owner, "__next__"):
        return leaf.packed()
    if leaf.identity in overrides:
        return overrides[leaf.identity][1]
    return leaf.packed_at_beginning()  # it was made later, for an epoch that begins with the next step


def take_snapshot(
    nodes: Sequence[ObjectNode], together: bool, overrides: Positions | None, asynchronous: bool
) -> Snapshot:
    """Return the content to be written. The arrays of a pytree become nodes below the object that has it.

    For an asynchronous save, the arrays are copies.
    """
    if asynchronous:
        _files.import_orbax()  # an error is raised here, and the thread does not hold up imports of the program
    saved: list[_files.NodeRecord] = [{"children": dict(node.children)} for node in nodes]
    arrays: dict[str, np.ndarray] = {}
    positions: dict[str, str] = {}
    shared: dict[str, list[np.ndarray]] = {}
    for number, node in enumerate(nodes):
        if isinstance(node.leaf, PositionLeaf):
            saved[number]["key"] = key = key_of(node.names, POSITION)
            positions[key] = _position_of(node.leaf, overrides)
        elif node.leaf is not None:
            values = node.leaf.read(copy=asynchronous)
            if together and workers.is_shared(node.leaf.owner):
                shared[name_in_messages(node.names)] = list(values.values())
            for names, array in values.items():
                if array.dtype.kind in "OSU":
                    raise TypeError(
                        f"{name_in_messages((*node.names, *names))} is an array of {array.dtype}; checkpoints have "
                        "numbers only."
                    )
                at = number
                for name in names:
                    children = saved[at]["children"]
                    if name not in children:
                        children[name] = len(saved)
                        saved.append({"children": {}})
                    at = children[name]
                saved[at]["key"] = key = key_of((*node.names, *names))
                arrays[key] = array
            for names, array in node.leaf.read_replicas(copy=asynchronous).items():
                arrays[key_of((*node.names, *names), REPLICAS)] = array
    token = uuid.uuid4().hex
    owners = {name_in_messages(node.names): node.leaf.owner for node in nodes if node.leaf is not None}
    loose = [name for name in shared if workers.may_differ(owners[name])]
    return Snapshot(_files.Saved(saved, arrays, token, token), positions, shared, loose, asynchronous)


def prepare_together(path: str, take: Callable[[], Snapshot], then: OnWritten | None) -> Callable[[], None]:
    """Take a snapshot in a job of several processes, and return a function that writes it.

    The snapshot needs the devices' collectives. The returned function only exchanges messages with the other workers,
    so that all of them may run it in the background.

    Args:
        path: where the checkpoint is to be.
        take: returns the values of this process. If that raises, the other processes raise CheckpointError.
        then: called with the path after writing.

    Raises:
        CheckpointError: another worker cannot save, or saves other iterators.
    """
    try:
        snapshot = take()
    except Exception as error:
        _exchange_announcements(path, problem=f"{type(error).__name__}: {error}")
        raise
    announcements = _exchange_announcements(path, snapshot)
    return functools.partial(_write_together, path, snapshot, announcements, then)


def _write_together(
    path: str, snapshot: Snapshot, announcements: Sequence[_Announcement], then: OnWritten | None
) -> None:
    """Write a snapshot. If several processes give the same path, the first of them writes.

    The workers compare digests of their values before the checkpoint takes its place. A process that then finds no
    checkpoint of this save has another disk, and writes a copy. All processes wait for the copies, so that they count
    saves alike if one disk is full.

    Raises:
        CheckpointError: on all workers, if one cannot write, or if the values of shared variables differ.
    """
    me = jax.process_index()
    first = [announcement.path for announcement in announcements].index(announcements[me].path)
    saved = snapshot.with_positions([announcement.positions for announcement in announcements])
    saved = saved._replace(save=announcements[0].token)
    digests = snapshot.compute_digests(announcements[0].turn)
    try:
        with contextlib.ExitStack() as publishing:

            def write() -> str:
                if first == me:
                    publishing.enter_context(_files.stage(path, saved, listed=then is not None))
                return str(workers.digest_of(digests))

            def publish() -> str:
                publishing.close()
                if first == me and then is not None:
                    then(path, True)
                return ""

            if len(set(_do_on_all(path, write))) > 1:
                workers.compare_saved(digests, snapshot.loose)
            _do_on_all(path, publish, "was not written, or not listed")
    except CheckpointError:  # all workers raise it; the next line waits until no folder has unfinished files
        workers.all_gather(f"the removal of unfinished files at {os.path.abspath(path)}")
        raise

    def copy() -> str:
        if first != me:
            if _files.token_at(path) != announcements[first].token:
                _write(path, saved, then)
            elif then is not None:
                then(path, False)
        return ""

    _do_on_all(path, copy, "was not copied to all disks")


class _Announcement(NamedTuple):
    """A message from a process to all others before it writes.

    Attributes:
        problem: why the process cannot save; empty if it can.
        path: the absolute path of its checkpoint.
        token: names its call of `save`.
        turn: counts its saves; that of process 0 decides which parts of large arrays are compared.
        positions: the positions of its iterators, by their keys.
        asynchronous: whether it writes while training goes on.
    """

    problem: str
    path: str
    token: str
    turn: int
    positions: dict[str, str]
    asynchronous: bool


_turns = itertools.count(random.SystemRandom().randrange(1 << 16))  # so that short runs do not always begin alike


def _exchange_announcements(path: str, snapshot: Snapshot | None = None, problem: str = "") -> list[_Announcement]:
    """Return all announcements; raise CheckpointError if another process cannot save or saves other iterators."""
    token, positions = ("", {}) if snapshot is None else (snapshot.saved.token, snapshot.positions)
    asynchronous = snapshot is not None and snapshot.asynchronous
    mine = _Announcement(problem, os.path.abspath(path), token, next(_turns), positions, asynchronous)
    announcements = [_Announcement(*values) for values in workers.all_gather(f"the checkpoint {mine.path}", mine)]
    if problem:
        return announcements
    problems = [f"{workers.name(i)}: {other.problem}" for i, other in enumerate(announcements) if other.problem]
    if problems:
        raise CheckpointFailedElsewhere(f"The checkpoint {path} was not written. {'; '.join(problems)}")
    for i, other in enumerate(announcements):
        if other.asynchronous != asynchronous:
            raise CheckpointError(
                f"The checkpoint {path} was not written. All workers must save with the same `enable_async`: it is "
                f"{asynchronous} on this worker and {other.asynchronous} on {workers.name(i)}."
            )
        if different := sorted(other.positions.keys() ^ positions.keys()):
            raise CheckpointError(
                f"The checkpoint {path} was not written. {workers.name(i)} and this worker must save the same "
                f"iterators: only one of them has an iterator at {different[0].removesuffix(POSITION)}."
            )
    return announcements


def _do_on_all(path: str, act: Callable[[], str], failed: str = "was not written") -> list[str]:
    """Call a function in each process and return all results; raise CheckpointError in all if it raises in one."""
    result = problem = ""
    try:
        result = act()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    label = f"the writing of the checkpoint {os.path.abspath(path)}"
    problems, results = zip(*workers.all_gather(label, [problem, result]))
    if any(problems):
        text = "; ".join(f"{workers.name(i)}: {problem}" for i, problem in enumerate(problems) if problem)
        error_type = CheckpointError if problem else CheckpointFailedElsewhere
        raise error_type(f"The checkpoint {path} {failed}. {text}")
    return list(results)


def prepare_alone(path: str, take: Callable[[], Snapshot], then: OnWritten | None) -> Callable[[], None]:
    """Take a snapshot, and return a function that writes it in this process, without the others."""
    snapshot = take()
    return functools.partial(_write, path, snapshot.with_positions([snapshot.positions]), then)


def _write(path: str, saved: _files.Saved, then: OnWritten | None) -> None:
    with _files.stage(path, saved, listed=then is not None):
        pass
    if then is not None:
        then(path, True)
