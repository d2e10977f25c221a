"""What the sources of datasets are made of: names of files, and signatures of elements."""

from __future__ import annotations

import glob
import os
import re

import numpy as np

from replicax._base.messages import received
from replicax._base.specs import TensorShape, TensorSpec
from replicax._base.types import Tree
from replicax._data.base import Base
from replicax._data.composite_rows import host_spec_of
from replicax._data.elements import host_structure
from replicax._data.ragged import RaggedTensorSpec
from replicax._data.sparse import SparseTensorSpec


def names_of(files: object) -> list[bytes]:
    """Returns the names in a name, a list or array of them, or a dataset."""
    if isinstance(files, Base):
        return [bytes(name) for name in files.as_numpy_iterator()]
    paths = [os.fspath(f) for f in files] if isinstance(files, list | tuple) else files
    return np.ravel(host_structure(os.fspath(paths) if isinstance(paths, os.PathLike) else paths)).tolist()


def folder_of(pattern: str) -> str | None:
    """Returns the folder before the first wildcard of a pattern, as TensorFlow writes it; None without a wildcard.

    >>> folder_of("data/*/a?.txt"), folder_of("a?.txt"), folder_of("data/a.txt")
    ('data/', './', None)
    """
    fixed = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    return None if fixed == pattern else fixed[: fixed.rfind("/") + 1] or "./"


def matching_files(pattern: str) -> list[str]:
    """Returns the files that match a pattern. Their names begin as it does."""
    here = folder_of(pattern) == "./" and not pattern.startswith("./")
    return glob.glob(f"./{pattern}" if here else pattern)


def as_spec(spec: Tree) -> Tree:
    """Returns a leaf of a signature as a spec; raises TypeError for what is none."""
    if isinstance(spec, (RaggedTensorSpec, SparseTensorSpec)):
        return host_spec_of(spec)
    if isinstance(getattr(spec, "shape", None), TensorShape):
        return spec
    if hasattr(spec, "shape") and hasattr(spec, "dtype"):
        return TensorSpec.from_spec(spec)
    raise TypeError(
        "`output_signature` is a TensorSpec, or a nest of them in the structure of the elements; it has a leaf "
        f"{received(spec)}."
    )
