"""State that other libraries hold, as variables of the strategy.

A library joins through a module of ours that is imported once the library is loaded. What holds a variable tells it
by an attribute `__replicax_variable__`, which gradient tapes take among their sources.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

_MODULES = {"keras": "replicax._keras"}
_joined: set[str] = set()

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported


def join() -> None:
    """Has the libraries that are loaded by now join. Cheap where nothing has changed."""
    for name, module in _MODULES.items():
        if name not in _joined and _is_loaded(name):
            _joined.add(name)
            try:
                importlib.import_module(module).join()
            except BaseException:
                _joined.discard(name)
                raise


def load(name: str) -> Any:
    """One of these libraries, loaded and joined.

    Raises:
        ImportError: it is not installed.
        RuntimeError: it was loaded before, in a way that does not fit.
    """
    try:
        library = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: pip install 'replicax[{name}]'.", name=name) from error
    join()
    return library


def _is_loaded(name: str) -> bool:
    """Whether a library has been imported, not just begun to be."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def variable_of(value: Any) -> Any:
    """The variable that an object of another library holds; anything else as it is."""
    return getattr(value, "__replicax_variable__", value)
