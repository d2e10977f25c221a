"""Datasets that read files, and how the files are divided among workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from replicax._data import UNKNOWN_CARDINALITY, Dataset, Maker, host_structure
from replicax._specs import TensorSpec


class _Share(threading.local):
    count, index = 1, 0


_share = _Share()


def shared(make: Maker, count: int, index: int) -> Maker:
    """The elements of the files number `index`, `index + count`, ... of what `make` reads."""

    def elements() -> Iterator[Any]:
        iterator = None
        while True:
            # Sources look at their share when they begin, which may be when the first element is asked for.
            before, (_share.count, _share.index) = (_share.count, _share.index), (count, index)
            try:
                iterator = make() if iterator is None else iterator
                element = next(iterator)
            except StopIteration:
                return
            finally:
                _share.count, _share.index = before
            yield element

    return elements


class TextLineDataset(Dataset):
    """The lines of text files, without their ends, as strings.

    Args:
        filenames: a name, or several in a list or array or `Dataset`.
        compression_type: `"GZIP"`, or None.
        buffer_size, num_parallel_reads, name: accepted for compatibility.

    Raises:
        ValueError: another compression.
        FileNotFoundError: at iteration, where there is no such file.

    >>> import pathlib, tempfile
    >>> import replicax as rx
    >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
    >>> _ = path.write_text("one\\ntwo\\n")
    >>> list(rx.data.TextLineDataset([str(path)]).as_numpy_iterator())
    [b'one', b'two']
    """

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ):
        if compression_type not in (None, "", "GZIP"):
            raise ValueError(f'`compression_type` is "GZIP" or None, got {compression_type!r}.')
        if isinstance(filenames, Dataset):
            names = [bytes(name) for name in filenames.as_numpy_iterator()]
        else:
            names = np.ravel(host_structure(filenames)).tolist()

        def make() -> Iterator[Any]:
            for path in names[_share.index :: _share.count]:
                with _opened(path, compression_type) as file:
                    for line in file:
                        yield host_structure(line.rstrip(b"\r\n"))

        super().__init__(make, lambda probe: TensorSpec((), np.object_), UNKNOWN_CARDINALITY, files=len(names))


def _opened(path: bytes, compression: str | None) -> Any:
    if compression == "GZIP":
        import gzip

        return gzip.open(path, "rb")
    return open(path, "rb")
