"""The environment in which `import tensorflow` gives a program `replicax.tf`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Variables that say where compiled programs are kept (`_base/compilation_cache.py`): the first is ours.
_CACHES = "REPLICAX_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
# The folder of the `sitecustomize` that serves TensorFlow's names.
_AT_START = Path(__file__).parents[1] / "_at_start"


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a Python, and of those that it starts, in which TensorFlow's names are ours."""
    old = [folder for folder in base.get("PYTHONPATH", "").split(os.pathsep) if folder]
    folders = [str(_AT_START), *(folder for folder in old if folder != str(_AT_START))]
    # A process may import Keras alone, which asks for its backend first of all.
    made = {**base, "PYTHONPATH": os.pathsep.join(folders), "KERAS_BACKEND": "jax"}
    if not any(name in base for name in _CACHES):
        made[_CACHES[0]] = "default"
    return made
