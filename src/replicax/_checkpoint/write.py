"""Writing a checkpoint: the values of its objects at one moment, and which worker of a job writes them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence

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


def _position_of(leaf: PositionLeaf, kept: Positions | None) -> str:
    """Returns the position that is saved: the one that was kept, if any were."""
    if kept is None or not hasattr(leaf.owner, "__next__"):
        return leaf.packed()
    if leaf.identity in kept:
        return kept[leaf.identity][1]
    return leaf.packed_at_beginning()  # it was made later, for an epoch that begins with the next step


def snapshot(nodes: Sequence[ObjectNode], together: bool, kept: Positions | None) -> _files.Saved:
    """Returns what is to be written. The arrays of a pytree become nodes below the object that has it."""
    saved: list[_files.NodeRecord] = [{"children": dict(node.children)} for node in nodes]
    arrays: dict[str, np.ndarray] = {}
    for number, node in enumerate(nodes):
        if isinstance(node.leaf, PositionLeaf):
            position = _position_of(node.leaf, kept)
            positions = workers.all_gather(position) if together else [position]
            saved[number]["key"] = key = key_of(node.names, POSITION)
            arrays[key] = np.frombuffer(json.dumps(positions).encode(), np.uint8)
        elif node.leaf is not None:
            for names, array in node.leaf.read().items():
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
    return _files.Saved(saved, arrays, token, token)


def write_together(path: str, saved: _files.Saved, then: OnWritten | None) -> None:
    """Writes in a job of several processes: of those that give the same path, the first writes."""
    me, where = jax.process_index(), os.path.abspath(path)
    given = [text.rsplit(" ", 1) for text in workers.all_gather(f"the checkpoint {where} {saved.token}")]
    first = [other for other, _ in given].index(given[me][0])
    saved = saved._replace(save=given[0][1])
    problem = ""
    if first == me:
        try:
            write_alone(path, saved, then)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    problems = [
        text.split("\n", 1)[1] for text in workers.all_gather(f"the writing of the checkpoint {where}\n{problem}")
    ]
    if any(problems):
        text = "; ".join(f"{workers.name(i)}: {problem}" for i, problem in enumerate(problems) if problem)
        raise CheckpointError(f"The checkpoint {path} was not written. {text}")
    if first != me:
        on_another_disk = _files.token_at(path) != given[first][1]  # the same name on another machine
        if on_another_disk:
            write_alone(path, saved, then)
        elif then is not None:
            then(path, False)


def write_alone(path: str, saved: _files.Saved, then: OnWritten | None) -> None:
    _files.write(path, saved, listed=then is not None)
    if then is not None:
        then(path, True)
