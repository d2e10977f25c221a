"""One checkpoint for all workers of a job: choosing it, sending it to workers that lack it, comparing restored values.

Disks that are not shared may hold different checkpoints, and in a shared folder the read of one worker may fail.
Workers that restored different checkpoints would train different variables and overwrite good checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import doc_pages, jax_internals
from replicax._base.errors import CheckpointError, CheckpointFailedElsewhere
from replicax._checkpoint.object_graph import ObjectNode, PositionLeaf
from replicax._checkpoint.sources import SAVE_COUNTER, ReplicaxSource, Source
from replicax._input.iterator import DistributedIterator
from replicax._job import exchange, state
from replicax._tracing.protocols import storage_of
from replicax._values import mesh_of
from replicax._variables.distributed import MirroredVariable

_T = TypeVar("_T")
_TOPIC = "checkpoints"
_BLOCK, _TURNS = 1 << 12, 64  # bytes of a block, and the number of saves in which each block is compared once
name = exchange.name  # of a worker, by its process


def _variable_of(owner: object) -> object:
    """Return the variable that a variable of Keras or Flax NNX holds; other objects as they are."""
    held = getattr(owner, "__replicax_variable__", None)
    return owner if held is None else held


def is_shared(owner: object) -> bool:
    """Return True for an object that belongs to several processes."""
    mesh = mesh_of(_variable_of(owner))
    of_several = isinstance(owner, DistributedIterator) or getattr(owner, "_saved_together", False)
    return bool(of_several or (mesh is not None and not mesh.all_local))


def may_differ(owner: object) -> bool:
    """Return True for a variable whose copies may differ, since it was created so."""
    variable = _variable_of(owner)
    divided = isinstance(variable, MirroredVariable) and storage_of(variable).home.is_cut
    return bool(getattr(variable, "_copies_may_differ", False)) and not divided


def is_of_several(nodes: Iterable[ObjectNode]) -> bool:
    """Return True if some of the objects belong to several processes, which all save and restore together."""
    shared = any(node.leaf is not None and is_shared(node.leaf.owner) for node in nodes)
    return shared and jax_internals.backend_started() and jax.process_count() > 1


def all_gather(label: str, value: object = None) -> list[Any]:
    """Return the JSON values of all workers, by process. The label names the exchange in reports of the job."""
    texts = exchange.all_gather(f"{label}\n{json.dumps(value)}", _TOPIC)
    return [json.loads(text.rpartition("\n")[2]) for text in texts]


class Candidate(NamedTuple):
    """The newest checkpoint that one worker can read.

    Attributes:
        path: the path on that worker; empty if it has none.
        is_ours: whether the checkpoint has the name of the manager.
        saves: the count of calls of `save` in the checkpoint, larger for a newer one.
        save: names the call of `save` that wrote the checkpoint; equal for its copies on several disks.
        can_be_sent: False for a checkpoint of TensorFlow.
        damaged: what is wrong with an older or newer one; empty if none is damaged.
    """

    path: str = ""
    is_ours: bool = False
    saves: int = -1
    save: str = ""
    can_be_sent: bool = True
    damaged: str = ""


def describe(source: Source, path: str, is_ours: bool, damaged: str) -> Candidate:
    """Return the candidate for a checkpoint that was read."""
    number = re.search(r"-?\d+$", os.path.basename(path))
    saves = int(source.arrays[SAVE_COUNTER]) if SAVE_COUNTER in source.arrays else int(number[0] if number else 0)
    return Candidate(path, is_ours, saves, source.save, source.can_be_sent, damaged)


def choose(candidate: Candidate) -> tuple[int, list[Candidate]]:
    """Return the worker whose newest checkpoint all restore, and the candidates of all workers.

    The checkpoint with the most saves is chosen; the lowest process has it first. So a machine whose disk is new goes
    on from the checkpoints of the others, whichever machine it is.
    """
    candidates = [Candidate(*values) for values in all_gather("the newest checkpoint", candidate)]
    return max(range(len(candidates)), key=lambda i: (candidates[i].is_ours, candidates[i].saves, -i)), candidates


def list_damage(candidates: Sequence[Candidate]) -> str:
    """Return sentences about damaged checkpoints, with the names of their workers; empty if none is damaged."""
    return " ".join(f"{name(i)}: {candidate.damaged}" for i, candidate in enumerate(candidates) if candidate.damaged)


def fetch(source: Source | None, sender: int, candidates: Sequence[Candidate]) -> Source:
    """Return the sender's checkpoint, on all workers; a worker without a copy receives the content.

    Args:
        source: the newest checkpoint that this worker can read.
        sender: the worker whose newest checkpoint all restore.
        candidates: the newest checkpoints of all workers.

    Raises:
        CheckpointError: a checkpoint of TensorFlow is not on every disk.
    """
    chosen, me = candidates[sender], jax.process_index()
    lacking = [i for i, candidate in enumerate(candidates) if candidate.save != chosen.save]
    if lacking and not chosen.can_be_sent:
        others = "; ".join(f"{name(i)} has {candidates[i].path or 'no checkpoint that it can read'}" for i in lacking)
        raise CheckpointError(
            f"The workers have different checkpoints: {name(sender)} has {chosen.path}, of TensorFlow; "
            f"{others}. Nothing has been restored. Copy the folder to each machine."
        )
    if lacking:
        sent = _send(source if me == sender else None, sender)
        source = sent if me in lacking else source
    assert source is not None
    return source


def _send(source: Source | None, sender: int) -> Source:
    """Send a checkpoint from the worker that passes one, and return it on all workers."""
    header = ""
    if source is not None:
        types = {key: [list(array.shape), array.dtype.name] for key, array in source.arrays.items()}
        header = json.dumps({"nodes": source.nodes, "save": source.save, "arrays": types})
    record = json.loads(exchange.broadcast(header.encode(), sender, "the objects of a checkpoint"))
    arrays: dict[str, np.ndarray] = {}
    for key, (shape, dtype) in record["arrays"].items():
        content = b"" if source is None else source.arrays[key].tobytes()
        content = exchange.broadcast(content, sender, "an array of a checkpoint")
        arrays[key] = np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
    return ReplicaxSource(record["nodes"], arrays, record["save"])


def compare(path: str, digests: Mapping[str, int], problem: str = "") -> None:
    """Raise CheckpointError on all workers where they would restore different values, or where one cannot restore.

    Args:
        path: the checkpoint of this worker; empty if it restores none.
        digests: a digest of each value for an object that belongs to several workers, by the object's name.
        problem: why this worker cannot restore. It raises its own error itself.
    """
    call = state.begin("a restore of a checkpoint")
    try:
        restores = all_gather("the restore of", [path, problem, digest_of(digests)])
    finally:
        if call is not None:
            call.ended()
    problems = [f"{name(process)}: {text}" for process, (_, text, _) in enumerate(restores) if text]
    if problem:
        return
    if problems:
        text = f"Nothing has been restored, since not all workers can restore. {'; '.join(problems)}"
        raise CheckpointFailedElsewhere(text)
    if len({digest for _, _, digest in restores}) > 1:
        shown = "; ".join(f"{names} restores {at or 'nothing'}" for at, names in _groups([at for at, _, _ in restores]))
        _, values = different_values(digests)
        raise CheckpointError(
            f"The workers restore different checkpoints: {shown}. {f'{values}. ' if values else ''}Nothing has been "
            "restored. All workers must restore the same checkpoint. CheckpointManager.restore_or_initialize chooses "
            "it for all workers and sends it to those that lack it; create the variables before. See "
            f"{doc_pages.page('how-to/checkpoints#several-workers')}."
        )


def digest_of(digests: Mapping[str, int]) -> int:
    """Return one digest of several."""
    return zlib.crc32(json.dumps(digests, sort_keys=True).encode())


def different_values(digests: Mapping[str, int]) -> tuple[list[str], str]:
    """Return the names of the values that differ, and a text about them, after an exchange that all have to join."""
    workers = all_gather("the values", dict(digests))
    keys = dict.fromkeys(key for values in workers for key in values)
    different = [key for key in keys if len({values.get(key) for values in workers}) > 1]
    if not different:
        return [], ""
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    groups = _groups([values.get(different[0]) for values in workers])
    return different, f"{different[0]}{more} differs between {' and '.join(names for _, names in groups)}"


def compare_saved(digests: Mapping[str, int], loose: Collection[str]) -> None:
    """Raise CheckpointError on all workers, or warn, if copies of variables differ between the workers.

    Args:
        digests: a digest of the value of each shared object that is saved, by its name.
        loose: names of variables whose copies may differ, for which a warning will do.
    """
    different, text = different_values(digests)
    text = f"The workers do not train the same values: {text}."
    if set(different) <= set(loose):
        warnings.warn(f"{text} The checkpoint has the values of one worker.", stacklevel=2)
        return
    raise CheckpointError(
        f"{text} Nothing has been saved. Restore an older checkpoint, and look for what differs between the workers: "
        "numbers from files, arguments or the environment, random numbers without a seed, gradients that are not "
        f"reduced. See {doc_pages.page('how-to/checkpoints#several-workers')}."
    )


def _groups(values: Sequence[_T]) -> list[tuple[_T, str]]:
    """Return each different value with the names of its workers."""
    groups = []
    for value in dict.fromkeys(values):
        names = [name(i) for i, other in enumerate(values) if other == value]
        groups.append((value, ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")))
    return groups


def checksum(arrays: Iterable[np.ndarray], turn: int | None = None) -> int:
    """Return a CRC of the bytes of arrays.

    Args:
        arrays: the arrays.
        turn: if given, one block of 4 KiB in 64 counts in arrays of 256 KiB and more: block `turn % 64`, and every 64th
            after it. Each block counts once in 64 calls with consecutive turns.
    """
    result = 0
    for array in arrays:
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        blocks = content[: content.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
        rest = content[blocks.size :]
        if turn is not None and len(blocks) >= _TURNS:
            blocks = np.ascontiguousarray(blocks[turn % _TURNS :: _TURNS])
        result = zlib.crc32(rest.data, zlib.crc32(blocks.data, result))
    return result


def shared_digests(values: Iterable[tuple[str, ObjectNode, Mapping[Any, np.ndarray]]]) -> dict[str, int]:
    """Return a digest of each value that belongs to several workers, by the name of its object."""
    return {
        key: checksum(arrays.values())
        for key, node, arrays in values
        if node.leaf is not None
        and not isinstance(node.leaf, PositionLeaf)
        and (node.names == ("save_counter",) or is_shared(node.leaf.owner))
    }
