"""`CheckpointReader`: the values of a checkpoint, without any objects to restore them into."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from replicax._base.atomic_files import path_text
from replicax._checkpoint import files as _files
from replicax._checkpoint.files import Path
from replicax._checkpoint.restore import REPLICAS, abbreviated

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class CheckpointReader:
    """The values of a checkpoint, by their keys: the names that lead to each, and a fixed ending."""

    def __init__(self, path: str):
        self._saved = _files.read(path)
        graph = np.array(json.dumps(self._saved.nodes).encode(), object)
        self._values = {GRAPH: graph}
        self._values.update((key, array) for key, array in self._saved.arrays.items() if not key.endswith(REPLICAS))

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shape of each value."""
        return {key: list(array.shape) for key, array in self._values.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any]]:
        """Returns the dtype of each value."""
        return {key: array.dtype for key, array in self._values.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns True if there is a value with this key."""
        return tensor_str in self._values

    def get_tensor(self, tensor_str: str) -> Any:
        """Returns a value, as a numpy array or number; raises `KeyError` where there is none."""
        if tensor_str not in self._values:
            raise KeyError(f"Key {tensor_str} not found in checkpoint; it has {abbreviated(sorted(self._values))}.")
        return self._values[tensor_str][()]


def load_checkpoint(ckpt_dir_or_file: Path) -> CheckpointReader:
    """Returns a reader of the values of a checkpoint, or of a folder's newest one that is not damaged.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is damaged, or in TensorFlow's own format.

    >>> import os, tempfile
    >>> import replicax as rx
    >>> path = rx.train.Checkpoint(v=rx.Variable(3.0)).write(os.path.join(tempfile.mkdtemp(), "ckpt"))
    >>> float(rx.train.load_checkpoint(path).get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE"))
    3.0
    """
    path = path_text(ckpt_dir_or_file, "checkpoint")
    latest = _files.latest_checkpoint(path) if os.path.isdir(path) else None
    return CheckpointReader(path if latest is None else latest)


def list_variables(ckpt_dir_or_file: Path) -> list[tuple[str, list[int]]]:
    """Returns the keys and shapes of the values of a checkpoint, or of a folder's newest one, sorted by key."""
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: Path, name: str) -> Any:
    """Returns one value of a checkpoint, or of a folder's newest one; raises `KeyError` where the key is not there."""
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)
