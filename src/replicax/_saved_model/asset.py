"""`Asset`: a file that belongs to a saved model."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from replicax._base.atomic_files import AnyPath, path_text
from replicax._data.elements import as_strings


class Asset:
    """A file that is copied into the folder of a saved model; a loaded model has the path of the copy.

    Args:
        path: the file.
    """

    def __init__(self, path: AnyPath):
        if isinstance(path, np.ndarray):  # a tensor of one string
            path = path.item()
        self.path = os.path.abspath(path_text(path, "asset"))

    @property
    def asset_path(self) -> Any:
        """The path, as a tensor."""
        return as_strings(np.asarray(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.path.encode(), object)

    def __fspath__(self) -> str:
        return self.path
