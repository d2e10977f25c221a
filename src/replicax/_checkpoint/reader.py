"""`CheckpointReader`: the values of a checkpoint, without any objects to restore them into."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from replicax._base.atomic_files import path_text
from replicax._checkpoint import lists
from replicax._checkpoint.files import Path
from replicax._checkpoint.restore import abbreviated, open_checkpoint
from replicax._checkpoint.sources import GRAPH, REPLICAS
from replicax._job import background


class CheckpointReader:
    """The values of a checkpoint, by their keys: the names that lead to each, and a fixed ending."""

    def __init__(self, path: str):
        background.wait()
        self._source = open_checkpoint(path)
        self._graph = np.array(self._source.graph(), object)
        # The shapes and dtypes.
        self._types: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        if self._graph[()] is not None:
            self._types[GRAPH] = (), self._graph.dtype
        self._types |= {key: self._source.type(key) for key in self._source.arrays if not key.endswith(REPLICAS)}

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shape of each value."""
        return {key: list(shape) for key, (shape, _) in self._types.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any]]:
        """Returns the dtype of each value."""
        return {key: dtype for key, (_, dtype) in self._types.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns True if there is a value with this key."""
        return tensor_str in self._types

    def get_tensor(self, tensor_str: str) -> Any:
        """Returns a value, as a numpy array or number.

        Strings are an array of objects, which are bytes.

        Raises:
            KeyError: there is no such key.
            CheckpointError: the value is damaged.
        """
        if tensor_str not in self._types:
            raise KeyError(f"Key {tensor_str} not found in checkpoint; it has {abbreviated(sorted(self._types))}.")
        return (self._graph if tensor_str == GRAPH else self._source.arrays[tensor_str])[()]


def load_checkpoint(ckpt_dir_or_file: Path) -> CheckpointReader:
    """Returns a reader of the values of a checkpoint, or of a folder's newest one that is not damaged.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged.

    >>> import os, tempfile
    >>> import replicax as rx
    >>> path = rx.train.Checkpoint(v=rx.Variable(3.0)).write(os.path.join(tempfile.mkdtemp(), "ckpt"))
    >>> float(rx.train.load_checkpoint(path).get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE"))
    3.0
    """
    path = path_text(ckpt_dir_or_file, "checkpoint")
    latest = lists.latest_checkpoint(path) if os.path.isdir(path) else None
    return CheckpointReader(path if latest is None else latest)


def list_variables(ckpt_dir_or_file: Path) -> list[tuple[str, list[int]]]:
    """Returns the keys and shapes of the values of a checkpoint, or of a folder's newest one, sorted by key.

    >>> import tempfile, replicax as rx
    >>> path = rx.train.Checkpoint(v=rx.Variable([3.0, 4.0])).write(tempfile.mkdtemp() + "/ckpt")
    >>> [entry for entry in rx.train.list_variables(path) if entry[0].startswith("v/")]
    [('v/.ATTRIBUTES/VARIABLE_VALUE', [2])]
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: Path, name: str) -> Any:
    """Returns one value of a checkpoint, or of a folder's newest one; raises `KeyError` where the key is not there.

    >>> import tempfile, replicax as rx
    >>> path = rx.train.Checkpoint(v=rx.Variable([3.0, 4.0])).write(tempfile.mkdtemp() + "/ckpt")
    >>> rx.train.load_variable(path, "v/.ATTRIBUTES/VARIABLE_VALUE")
    array([3., 4.], dtype=float32)
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)
