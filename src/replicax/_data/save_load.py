"""Part of `Dataset`: `save`, `load` and `snapshot`."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from typing import Self

from replicax._base.atomic_files import path_text
from replicax._base.errors import InvalidArgumentError
from replicax._base.types import Tree
from replicax._data.calls import call_on_element, call_user
from replicax._data.element_files import PartOf, SavedDataset, checked_compression, is_saved, while_saving
from replicax._data.group_by import integer
from replicax._data.map_filter import Functions, returned_dataset
from replicax._data.reading import Maker, Reading, replayed
from replicax._data.specs import INFINITE_CARDINALITY, DatasetSpec


class Saving(Functions):
    """Methods of `Dataset`."""

    def save(
        self,
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
        if self._cardinality == INFINITE_CARDINALITY:
            raise InvalidArgumentError(
                "An infinite dataset cannot be saved: take a number of elements first, `dataset.take(count)`."
            )
        folder, kind = path_text(path, "saved dataset"), checked_compression(compression)
        collections.deque(while_saving(self, Reading(self._nodes), folder, kind, _part_of(shard_func)), maxlen=0)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        element_spec: Tree = None,
        compression: str | None = None,
        reader_func: Callable[[Self], Self] | None = None,
        wait: bool = False,
    ) -> Self:
        """Returns the dataset that was saved at `path`.

        Args:
            path: the folder that `save` wrote.
            element_spec: what the elements are; by default as they were saved. Named tuples get their class from it.
            compression: accepted for compatibility: the files tell theirs.
            reader_func: takes a dataset of datasets, one for each part, and returns one of elements. By default the
                parts are read in turn, one element of each at a time.
            wait: accepted for compatibility: datasets are there whole, or not at all.

        Raises:
            FileNotFoundError: there is nothing saved there.
            InvalidArgumentError: the elements are others than `element_spec` says.
            DataLossError: files are damaged, missing, or of something else; at iteration too.

        >>> import tempfile
        >>> from replicax.data import Dataset
        >>> path = tempfile.mkdtemp() + "/saved"
        >>> Dataset.range(3).save(path)
        >>> [int(x) for x in Dataset.load(path)]
        [0, 1, 2]
        """
        checked_compression(compression, "AUTO")
        saved = SavedDataset(path_text(path, "saved dataset"))
        return cls._loaded(saved, saved.check(element_spec), reader_func)

    def snapshot(
        self,
        path: str | os.PathLike[str],
        compression: str | None = "AUTO",
        reader_func: Callable[[Self], Self] | None = None,
        shard_func: Callable[..., Tree] | None = None,
        name: str | None = None,
    ) -> Self:
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
        folder, part_of = path_text(path, "snapshot"), _part_of(shard_func)
        kind = checked_compression(compression, "AUTO")

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            if is_saved(folder):
                saved = SavedDataset(folder)
                yield from self._loaded(saved, saved.check(self._spec(True)), reader_func)._make(reading.child())
            elif reading.probing:
                yield from self._make(reading)
            else:
                # Of several processes the first one saves: another one may read what it saved already.
                yield from while_saving(self, reading, folder, kind, part_of, first=True)

        return self._derived(make, self._cardinality, batch_size=self._batch_size)

    @classmethod
    def _loaded(cls, saved: SavedDataset, spec: Tree, reader_func: Callable[[Self], Self] | None) -> Self:
        def maker(part: int) -> Maker:
            return replayed(lambda reading: saved.elements(part, spec))

        parts = [cls._made(maker(part), lambda probe: spec, count) for part, count in saved.parts.items()]
        if not parts:
            return cls._of_list([], spec)
        if len(parts) == 1 and reader_func is None:
            return parts[0]
        datasets = cls._of_list(parts, DatasetSpec(spec))
        if reader_func is not None:
            read = call_user("`reader_func` of the saved dataset", reader_func, datasets)
            return returned_dataset("reader_func", read)
        together = datasets.interleave(lambda part: part, cycle_length=len(parts))
        return cls._made(together._make, lambda probe: spec, sum(saved.parts.values()))


def _part_of(function: Callable[..., Tree] | None) -> PartOf | None:
    if function is None:
        return None
    role = "`shard_func` of the dataset to save"
    return lambda element: integer("shard_func", call_on_element(role, function, element))
