"""The methods of `Dataset` that save elements, and the reading of saved datasets."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import TypeVar

from replicax._base.atomic_files import path_text
from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.calls import call_on_element, call_user
from replicax._data.element_files import PartOf, SavedDataset, checked_compression
from replicax._data.nodes.functions import node_returned_by
from replicax._data.nodes.group import integer
from replicax._data.nodes.node import Node
from replicax._data.nodes.saved import LoadedParts, SavedPart, Snapshot, while_saving
from replicax._data.nodes.sources import Items
from replicax._data.reading import Reading
from replicax._data.specs import INFINITE_CARDINALITY, DatasetSpec

D = TypeVar("D", bound=Base)


def save(
    self: D,
    path: str | os.PathLike[str],
    compression: str | None = None,
    shard_func: Callable[..., Tree] | None = None,
    checkpoint_args: object = None,
) -> None:
    """Writes the elements to a file in the folder `path`, for `load`. It takes the place of one saved before.

    Args:
        path: the folder. It comes into place whole.
        compression: `"GZIP"`, or None.
        shard_func: takes an element and returns the number of its part; by default there is one part.
        checkpoint_args: accepted for compatibility. Saving that was cut off begins anew.

    Raises:
        InvalidArgumentError: the dataset has no end.
        FileExistsError: there is something at the path that is no saved dataset, or has other files in it.

    >>> import tempfile
    >>> from replicax.data import Dataset
    >>> path = tempfile.mkdtemp()
    >>> Dataset.range(3).save(path + "/saved")
    >>> list(Dataset.load(path + "/saved").as_numpy_iterator())
    [np.int64(0), np.int64(1), np.int64(2)]
    """
    if self._node.cardinality == INFINITE_CARDINALITY:
        raise InvalidArgumentError(
            "An infinite dataset cannot be saved: take a number of elements first, `dataset.take(count)`."
        )
    folder, kind = path_text(path, "saved dataset"), checked_compression(compression)
    saved = while_saving(self._node, Reading(self._node.memories), folder, kind, _part_of(shard_func))
    collections.deque(saved, maxlen=0)


def snapshot(
    self: D,
    path: str | os.PathLike[str],
    compression: str | None = "AUTO",
    reader_func: Callable[[D], D] | None = None,
    shard_func: Callable[..., Tree] | None = None,
    name: str | None = None,
) -> D:
    """Returns a dataset of these elements, which the first complete pass saves at `path` and later ones read there.

    So do other programs that find it. Where the data or what is done to them have changed, delete it.

    Args:
        path: the folder, as of `save`.
        compression: `"GZIP"`; for None and `"AUTO"` there is none.
        reader_func: see `load`.
        shard_func: see `save`.

    >>> import tempfile
    >>> from replicax.data import Dataset
    >>> path = tempfile.mkdtemp() + "/saved"
    >>> [int(x) for x in Dataset.range(3).snapshot(path)]
    [0, 1, 2]
    >>> [int(x) for x in Dataset.load(path)]
    [0, 1, 2]
    """

    def load(saved: SavedDataset, spec: Tree) -> Node:
        return loaded(self._of, saved, spec, reader_func)

    folder, kind = path_text(path, "snapshot"), checked_compression(compression, "AUTO")
    return self._then(Snapshot(self._node, folder, load, kind, _part_of(shard_func)))


def loaded(of: Callable[[Node], D], saved: SavedDataset, spec: Tree, reader_func: Callable[[D], D] | None) -> Node:
    """Return the node of a saved dataset; `of` makes the dataset of a node, for `reader_func`."""
    parts: list[Node] = [SavedPart(saved, part, spec) for part in saved.parts]
    if not parts:
        return Items("load", [], spec)
    if len(parts) == 1 and reader_func is None:
        return parts[0]
    of_parts = Items("parts", [of(part) for part in parts], DatasetSpec(spec))
    if reader_func is None:
        return LoadedParts(of_parts, saved, spec)
    read = call_user("`reader_func` of the saved dataset", reader_func, of(of_parts))
    return node_returned_by("reader_func", read)


def _part_of(function: Callable[..., Tree] | None) -> PartOf | None:
    if function is None:
        return None
    role = "`shard_func` of the dataset to save"
    return lambda element: integer("shard_func", call_on_element(role, function, element))
