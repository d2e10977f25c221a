"""Modules of Keras that are loaded when something in them is first asked for.

`import keras` loads scikit-learn and Matplotlib where they are installed, for wrappers and plots that few programs use.
That takes longer than the rest of Keras.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

_DEFERRED = ("keras.wrappers", "keras.visualization", "keras.src.visualization")
_loading = threading.RLock()


class _Deferred(types.ModuleType):
    """A module that is not loaded yet."""

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name != "__all__") or not self._load():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        self._load()
        return [*types.ModuleType.__dir__(self)]

    def _load(self) -> bool:
        """Loads the module; returns False where it is just being loaded, by this thread."""
        with _loading:
            loader: Any = self.__loader__
            if loader.state == "loading":
                return False
            if loader.state == "deferred":
                loader.state = "loading"
                try:
                    loader.original.exec_module(self)
                except BaseException:
                    loader.state = "deferred"
                    raise
                loader.state = "loaded"
                self.__class__ = types.ModuleType  # type: ignore[assignment]
            return True


class _Later(importlib.abc.Loader):
    """Makes a module, and leaves it to the module to load what is in it."""

    def __init__(self, original: Any):
        self.original, self.state = original, "deferred"

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are deferred."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in _DEFERRED else None
        if found is not None:
            found.loader = _Later(found.loader)
        return found


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """Returns a context in which Keras can be imported without them."""
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
