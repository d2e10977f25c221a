"""Functions and elements on their way to other processes, as bytes: by value, with all that they use.

What a function refers to in modules of the user's goes with it, and is not imported there: the import would run the
user's program, and would not see what the program has set since. Installed libraries are imported.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import random
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replicax._data.shared_memory import Place

# A class whose objects belong to this process, since they change here: it has this attribute.
STAYS = "_stays_in_process"
# The most bytes that a function may have.
_MOST = 1 << 26

_lock = threading.Lock()


class CannotShip(Exception):
    """Something cannot be sent to another process: it says why."""


class _Bounded(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + len(memoryview(data)) > _MOST:
            raise CannotShip(f"it has more than {_MOST >> 20} MiB")
        return super().write(data)


@functools.cache
def _pickler() -> Any:
    """Returns cloudpickle's pickler, which refuses what belongs to this process."""
    try:
        import cloudpickle
    except ImportError:
        raise CannotShip("cloudpickle is not installed: `pip install cloudpickle`") from None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            name = getattr(obj, "__name__", kind.__qualname__)
            home = name if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
            if hasattr(kind, STAYS) or f"{home}".partition(".")[0] == "keras":
                raise CannotShip(f"it uses `{name}`, which belongs to this process")
            return super().reducer_override(obj)

    return Pickler


def shipped(value: object) -> bytes:
    """Returns an object as bytes, from which `pickle.loads` makes it in another process.

    Raises:
        CannotShip: there is no cloudpickle, it is too large, it cannot be pickled, or it belongs to this process.
    """
    out, pickler = _Bounded(), _pickler()
    with _lock, _modules_by_value():
        _dump(pickler, out, value)
    return out.getvalue()


def pickled(value: object) -> bytes:
    """Returns elements as bytes, those of classes that the user's program defines by value.

    Raises:
        CannotShip: they cannot be pickled, or belong to this process.
    """
    if _is_plain(value):
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    out = io.BytesIO()
    _dump(_pickler(), out, value)
    return out.getvalue()


def _dump(pickler: Any, out: io.BytesIO, value: object) -> None:
    try:
        pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except CannotShip:
        raise
    except Exception as error:
        raise CannotShip(f"it cannot be pickled: {error}") from error


def _is_plain(value: Any) -> bool:
    """Returns whether a value is made of arrays, in dicts, tuples and lists alone."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_plain(part) for key, part in value.items())
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    return kind is np.ndarray or kind is Place or kind is int or kind is bool or value is None


@contextlib.contextmanager
def _modules_by_value() -> Iterator[None]:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    added = [m for m in list(sys.modules.values()) if _is_of_user(m) and m.__name__ not in before]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _is_of_user(module: object) -> bool:
    """Returns whether a module is part of the user's program, and no installed library."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, types.ModuleType) or not isinstance(file, str) or module.__name__ == "__main__":
        return False
    return sys.modules.get(module.__name__) is module and not _is_library(file)


@functools.lru_cache(1 << 14)
def _is_library(file: str) -> bool:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [Path(__file__).parents[1], *(Path(path) for kind in kinds if (path := sysconfig.get_path(kind)))]
    own = Path(file).resolve()
    parts = {"site-packages", "dist-packages"} & set(own.parts)
    return bool(parts) or any(own.is_relative_to(folder.resolve()) for folder in folders)


def random_state() -> bytes:
    """Returns the state of the random numbers that Python and NumPy keep for the whole process."""
    return pickle.dumps((np.random.get_state(legacy=False), random.getstate()))
