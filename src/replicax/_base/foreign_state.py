"""State that other libraries hold, as variables of the strategy.

A library joins through a function of ours that is called once the library is loaded. What holds a variable tells it
by an attribute `__replicax_variable__` (None: it holds none), which gradient tapes take among their sources.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from replicax._base import doc_pages, errors
from replicax._base.types import Leaf, Tree

_joining: dict[str, Callable[[], None]] = {}
_joined: set[str] = set()


def plug_in(name: str, joining: Callable[[], None]) -> None:
    """Plugs in the function that is called once when the library with this name is loaded."""
    _joining[name] = joining


def join() -> None:
    """Joins the libraries that are loaded by now. Cheap where nothing has changed."""
    if not _joining:
        raise errors.not_plugged_in("The joining of Keras and Flax NNX")
    for name in _joining:
        if name not in _joined and _is_loaded(name):
            _join(name)


def _join(name: str) -> None:
    _joined.add(name)
    try:
        _joining[name]()
    except BaseException:
        _joined.discard(name)
        raise


class JoinOnImport(importlib.abc.MetaPathFinder):
    """A context in which a library joins at the end of its import, before the program makes objects of it."""

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a library of ours by the other finders, and have it join when it is loaded."""
        if name not in _joining or name in _joined:
            return None
        finders = [finder for finder in sys.meta_path if not isinstance(finder, JoinOnImport)]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _JoiningLoader(spec.loader)
        return spec


class _JoiningLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _join(module.__name__)


def load(name: str) -> types.ModuleType:
    """Returns one of these libraries, loaded and joined.

    Raises:
        ImportError: it is not installed.
        RuntimeError: it was loaded before, in a way that does not fit.
    """
    try:
        library = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: {doc_pages.install(name)}.", name=name) from error
    join()
    return library


def _is_loaded(name: str) -> bool:
    """Returns whether a library has been imported, and is not just being imported."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def holds_variable(value: Leaf) -> bool:
    """Returns whether an object of another library holds a variable."""
    return hasattr(type(value), "__replicax_variable__") and value.__replicax_variable__ is not None


def variable_of(value: Leaf) -> Leaf:
    """Returns the variable that an object of another library holds; anything else as it is."""
    return value.__replicax_variable__ if holds_variable(value) else value


def in_the_form_of(holder: Leaf, value: Leaf) -> Leaf:
    """Returns `value`, or None, as the library represents values of `holder`: in an object like it, or as it is."""
    tree: Any = jax.tree.structure(holder)
    if variable_of(holder) is holder or jax.tree_util.treedef_is_leaf(tree):
        return value
    return jax.tree.unflatten(tree, [None] * tree.num_leaves if value is None else jax.tree.leaves(value))


# A function of a library, which a wrapper of ours may call.
Original: TypeAlias = Callable[..., Tree]


def wrap(owner: object, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a library's function by `wrapper(original, ...)`; a method in the class that has it.

    Libraries look which class defines a method, to see whether a user overrides it.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(next(kind for kind in getattr(owner, "__mro__", [owner]) if name in vars(kind)), name, replacement)
