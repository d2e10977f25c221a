"""Writing a checkpoint: the values of its objects at one moment, and which worker of a job writes them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from replicax._base.errors import CheckpointError
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
        digests: a digest of the value of each object that belongs to several workers, by its name.
        loose: the names of variables whose copies may differ.
    """

    saved: _files.Saved
    digests: dict[str, int]
    loose: list[str]


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
    digests: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if isinstance(node.leaf, PositionLeaf):
            position = _position_of(node.leaf, kept)
            positions = workers.all_gather(position) if together else [position]
            saved[number]["key"] = key = key_of(node.names, POSITION)
            arrays[key] = np.frombuffer(json.dumps(positions).encode(), np.uint8)
        elif node.leaf is not None:
            values = node.leaf.read()
            if together and workers.is_shared(node.leaf.owner):
                digests[name_in_messages(node.names)] = workers.checksum(values.values())
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
    loose = [name for name in digests if workers.may_differ(owners[name])]
    return Snapshot(_files.Saved(saved, arrays, token, token), digests, loose)


def write_together(path: str, snapshot: Snapshot, then: OnWritten | None) -> None:
    """Write in a job of several processes: of those that give the same path, the first writes."""
    me, where = jax.process_index(), os.path.abspath(path)
    saved, digest = snapshot.saved, workers.digest_of(snapshot.digests)
    texts = workers.all_gather(f"the checkpoint {where} {saved.token} {digest}")
    places, tokens, digests = zip(*(text.rsplit(" ", 2) for text in texts))
    if len(set(digests)) > 1:
        workers.compare_saved(snapshot.digests, snapshot.loose)
    first = places.index(places[me])
    snapshot = snapshot._replace(saved=saved._replace(save=tokens[0]))
    problem = ""
    if first == me:
        try:
            write_alone(path, snapshot, then)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problems = [
        text.split("\n", 1)[1] for text in workers.all_gather(f"the writing of the checkpoint {where}\n{problem}")
    ]
    if any(problems):
        text = "; ".join(f"{workers.name(i)}: {problem}" for i, problem in enumerate(problems) if problem)
        raise CheckpointError(f"The checkpoint {path} was not written. {text}")
    if first != me:
        on_another_disk = _files.token_at(path) != tokens[first]  # the same name on another machine
        if on_another_disk:
            write_alone(path, snapshot, then)
        elif then is not None:
            then(path, False)


def write_alone(path: str, snapshot: Snapshot, then: OnWritten | None) -> None:
    """Write in this process, without the others."""
    _files.write(path, snapshot.saved, listed=then is not None)
    if then is not None:
        then(path, True)
