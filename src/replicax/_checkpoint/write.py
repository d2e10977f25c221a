"""Writing a checkpoint: the values of its objects at one moment, and which worker of a job writes them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from replicax._base.errors import CheckpointError, CheckpointFailedElsewhere
from replicax._checkpoint import files as _files
from replicax._checkpoint import workers
from replicax._checkpoint.object_graph import Identity, ObjectNode, PositionLeaf
from replicax._checkpoint.restore import key_of, name_in_messages
from replicax._checkpoint.sources import POSITION, REPLICAS

# Called after writing with the path and whether this process wrote it.
OnWritten = Callable[[str, bool], None]
# Positions that are saved in place of those at which iterators stand; with the leaves, so that no other gets its id.
Positions = dict[Identity, tuple[PositionLeaf, str]]


class Snapshot(NamedTuple):
    """The values of a checkpoint's objects at one moment.

    Attributes:
        saved: the content to be written.
        shared: the arrays of each object that belongs to several workers, by its name.
        loose: the names of variables whose copies may differ.
    """

    saved: _files.Saved
    shared: dict[str, list[np.ndarray]]
    loose: list[str]

    def compute_digests(self) -> dict[str, int]:
        """Return a digest of the value of each object that belongs to several workers, by its name."""
        return {name: workers.checksum(arrays) for name, arrays in self.shared.items()}


def _position_of(leaf: PositionLeaf, kept: Positions | None) -> str:
    """Returns the position that is saved: the one that was kept, if any were."""
    if kept is None or not hasattr(leaf.owner, "__next__"):
        return leaf.packed()
    if leaf.identity in kept:
        return kept[leaf.identity][1]
    return leaf.packed_at_beginning()  # it was made later, for an epoch that begins with the next step


def take_snapshot(nodes: Sequence[ObjectNode], together: bool, kept: Positions | None) -> Snapshot:
    """Return the content to be written. The arrays of a pytree become nodes below the object that has it."""
    saved: list[_files.NodeRecord] = [{"children": dict(node.children)} for node in nodes]
    arrays: dict[str, np.ndarray] = {}
    shared: dict[str, list[np.ndarray]] = {}
    for number, node in enumerate(nodes):
        if isinstance(node.leaf, PositionLeaf):
            position = _position_of(node.leaf, kept)
            positions = workers.all_gather(position) if together else [position]
            saved[number]["key"] = key = key_of(node.names, POSITION)
            arrays[key] = np.frombuffer(json.dumps(positions).encode(), np.uint8)
        elif node.leaf is not None:
            values = node.leaf.read()
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
            for names, array in node.leaf.read_replicas().items():
                arrays[key_of((*node.names, *names), REPLICAS)] = array
    token = uuid.uuid4().hex
    owners = {name_in_messages(node.names): node.leaf.owner for node in nodes if node.leaf is not None}
    loose = [name for name in shared if workers.may_differ(owners[name])]
    return Snapshot(_files.Saved(saved, arrays, token, token), shared, loose)


def write_together(path: str, snapshot: Snapshot, then: OnWritten | None) -> None:
    """Write in a job of several processes: of those that give the same path, the first writes.

    The digests of the workers are computed while the files are written, and compared before the checkpoint takes its
    place. Where a process finds no checkpoint of this save after that, its disk is another one, and it writes a copy.

    Raises:
        CheckpointError: on all workers, if one cannot write, or if the values of shared variables differ.
    """
    me, where = jax.process_index(), os.path.abspath(path)
    with concurrent.futures.ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as publishing:
        digests = thread.submit(snapshot.compute_digests)
        texts = workers.all_gather(f"the checkpoint {where} {snapshot.saved.token}")
        places, tokens = zip(*(text.rsplit(" ", 1) for text in texts))
        first = places.index(places[me])
        snapshot = snapshot._replace(saved=snapshot.saved._replace(save=tokens[0]))

        def write() -> str:
            if first == me:
                publishing.enter_context(_files.written(path, snapshot.saved, listed=then is not None))
            return str(workers.digest_of(digests.result()))

        def publish() -> str:
            publishing.close()
            if first == me and then is not None:
                then(path, True)
            return ""

        if len(set(_do_on_all(path, write))) > 1:
            workers.compare_saved(digests.result(), snapshot.loose)
        _do_on_all(path, publish)
    if first != me:
        if _files.token_at(path) != tokens[first]:
            write_alone(path, snapshot, then)
        elif then is not None:
            then(path, False)


def _do_on_all(path: str, act: Callable[[], str]) -> list[str]:
    """Return what a function returns in each process; raise CheckpointError in all if it raises in one."""
    result = problem = ""
    try:
        result = act()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    texts = workers.all_gather(
        f"the writing of the checkpoint {os.path.abspath(path)}\n{json.dumps([problem, result])}"
    )
    problems, results = zip(*(json.loads(text.split("\n", 1)[1]) for text in texts))
    if any(problems):
        text = "; ".join(f"{workers.name(i)}: {problem}" for i, problem in enumerate(problems) if problem)
        error_type = CheckpointError if problem else CheckpointFailedElsewhere
        raise error_type(f"The checkpoint {path} was not written. {text}")
    return list(results)


def write_alone(path: str, snapshot: Snapshot, then: OnWritten | None) -> None:
    """Write in this process, without the others."""
    with _files.written(path, snapshot.saved, listed=then is not None):
        pass
    if then is not None:
        then(path, True)
