"""Nodes that write elements to files, or read them there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from replicax._base.atomic_files import replacing
from replicax._base.types import Tree
from replicax._data.element_files import CACHE, ElementFile, ElementWriter, PartOf, SavedDataset, is_saved, saving
from replicax._data.functions import ElementFunction
from replicax._data.nodes.functions import Interleave
from replicax._data.nodes.node import Node, Replayed
from replicax._data.reading import Reading


class CacheInFile(Replayed):
    """The elements, read from a file if it exists; the first complete pass writes it."""

    def __init__(self, source: Node, path: str):
        super().__init__(f"cache({os.path.basename(path)!r})", [source], source.cardinality)
        self._path, self.batch_size = path, source.batch_size

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        path = self._path
        if os.path.isfile(path):
            cached = ElementFile(path)
            yield from cached.elements(path, 0, cached.spec)
        elif reading.probing:
            yield from self.input.iterate(reading)
        elif not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
            raise FileNotFoundError(f"There is no folder {folder} for the file {path}. Create it first.")
        else:
            with replacing(path, CACHE) as new:
                yield from ElementWriter(new).through(self.input.iterate(reading))


class SavedPart(Replayed):
    """The elements of one part of a saved dataset."""

    def __init__(self, saved: SavedDataset, part: int, spec: Tree):
        super().__init__("load", cardinality=saved.parts[part], spec=spec)
        self._saved, self._part, self._saved_spec = saved, part, spec

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        return self._saved.elements(self._part, self._saved_spec)


class LoadedParts(Interleave):
    """The elements of all parts of a saved dataset, in turn; `parts` is the node of their datasets."""

    def __init__(self, parts: Node, saved: SavedDataset, spec: Tree):
        super().__init__(parts, ElementFunction("load", "reader_func", _same), parts.cardinality, 1)
        self.name, self.cardinality = "load", sum(saved.parts.values())
        self._saved_spec = spec

    def find_spec(self, may_call: bool) -> Tree:
        return self._saved_spec


def _same(part: Tree) -> Tree:
    return part


class Snapshot(Replayed):
    """The elements, which the first complete pass saves, and later ones read there.

    Args:
        source: the input.
        path: the folder.
        load: returns the node of a saved dataset.
        compression: of the file.
        part_of: gives the number of an element's part.
    """

    def __init__(
        self,
        source: Node,
        path: str,
        load: Callable[[SavedDataset, Tree], Node],
        compression: str | None,
        part_of: PartOf | None,
    ):
        super().__init__(f"snapshot({os.path.basename(path)!r})", [source], source.cardinality)
        self._path, self._load, self._compression, self._part_of = path, load, compression, part_of
        self.batch_size = source.batch_size

    def read_all(self, reading: Reading) -> Iterator[Tree]:
        if is_saved(self._path):
            saved = SavedDataset(self._path)
            yield from self._load(saved, saved.check(self.input.spec(True))).iterate(reading.child())
        elif reading.probing:
            yield from self.input.iterate(reading)
        else:
            # Of several processes the first one saves: another one may read what it saved already.
            yield from while_saving(self.input, reading, self._path, self._compression, self._part_of, first=True)


def while_saving(
    node: Node, reading: Reading, path: str, compression: str | None, part_of: PartOf | None, first: bool = False
) -> Iterator[Tree]:
    """Yield the elements of a node and save them at `path`; with `first`, unless that has been done meanwhile."""
    with saving(path, node.spec(True), compression, part_of, first) as writer:
        yield from writer.through(node.iterate(reading))
