"""Imports of TensorFlow's modules, served by `replicax.tf`: what `install` and `replicax run-tf` rest on.

A module is the same object under all its names: `tensorflow`, `tensorflow.compat.v2` and `replicax.tf` are one.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from replicax.tf import _absent, _deferred, _names, _private
from replicax.tf._core import doc_pages, specs, tracebacks

_TENSORFLOW = "tensorflow"
_OURS = "replicax.tf"


class _Served(importlib.abc.Loader):
    """Loads a module that is there already."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        if self._spec is not None:  # Python has just put that of the second name there
            module.__spec__ = self._spec


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata.version("tensorflow")` finds."""

    def read_text(self, filename: str) -> str | None:
        return (
            f"Metadata-Version: 2.1\nName: {_TENSORFLOW}\nVersion: {_names.VERSION}\n"
            if filename == "METADATA"
            else None
        )

    def locate_file(self, path: str | os.PathLike[str]) -> NoReturn:
        raise FileNotFoundError(f"{_TENSORFLOW} is served by {_OURS}, and has no files of its own: {path}")


_ANY = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules below a name, which may be TensorFlow's, among those of `replicax.tf`."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._root and not fullname.startswith(f"{self._root}."):
            return None
        module = _module(fullname[len(self._root) + 1 :])
        return importlib.machinery.ModuleSpec(fullname, _Served(module), is_package=True)


class _StandIn(_Finder):
    """Finds TensorFlow's modules, and has Keras run on JAX."""

    _deferred = _deferred.Finder()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "keras" and os.environ.get("KERAS_BACKEND", _TENSORFLOW) == _TENSORFLOW:
            os.environ["KERAS_BACKEND"] = "jax"  # programs set it too, before they import Keras
        if fullname in _ONCE_LOADED:
            found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            return _and_then(found, _ONCE_LOADED[fullname])
        if fullname.partition(".")[0] == "tf_keras":  # Keras 2 on TensorFlow's graphs: Keras 3 stands in for it
            module = _module(fullname.removeprefix("tf_"))
            _as_keras_2()
            return importlib.machinery.ModuleSpec(fullname, _Served(module), is_package=True)
        return super().find_spec(fullname, path, target) or self._deferred.find_spec(fullname, path, target)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterator[importlib.metadata.Distribution]:
        if context.name == _TENSORFLOW:
            yield _Distribution()


def _module(inner: str) -> types.ModuleType:
    """Returns the module of ours with a dotted name inside of `tensorflow`."""
    # The name in an error is always TensorFlow's: Python drops an error of `from replicax.tf import name` whose name
    # is `replicax.tf.name`, and says only that it cannot import it.
    fullname = f"{_TENSORFLOW}.{inner}"
    found = importlib.import_module(_OURS)
    parts = inner.split(".") if inner else []
    if parts and parts[0] in _private.ROOTS:
        return _private.module(inner)
    for index, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ModuleNotFoundError(_absent.message(".".join(parts[: index + 1])), name=fullname) from None
        if not isinstance(found, types.ModuleType):
            raise ModuleNotFoundError(f"{'.'.join(parts[: index + 1])} is no module, but {found!r}", name=fullname)
    return found


def _and_then(
    spec: importlib.machinery.ModuleSpec | None, then: Callable[[types.ModuleType], None]
) -> importlib.machinery.ModuleSpec | None:
    """Has a function be called with a module once it is loaded."""
    loader: Any = spec and spec.loader
    if loader is not None:
        load = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            then(module)

        loader.exec_module = exec_module
    return spec


class _ForKeras:
    """TensorFlow as Keras sees it on its JAX backend: functions that it calls are there, graphs are not."""

    @staticmethod
    def executing_eagerly() -> bool:
        """True: in a function that JAX compiles Keras goes on with JAX, and not with operations of TensorFlow."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_OURS), name)


def _seed_with_keras(seeds: Any) -> None:
    # keras.utils.set_random_seed seeds TensorFlow's generators, too, where TensorFlow is there.
    seeds.tf = types.SimpleNamespace(available=True, random=_ForKeras().random)


def _introduce_to_keras(libraries: Any) -> None:
    # Keras asks whether TensorFlow is there where it would then use graphs, or classes that are not public.
    libraries.tensorflow.module = _ForKeras()
    libraries.tensorflow._available = False


def _give_shapes(core: Any) -> None:
    # Keras's variables on TensorFlow have a shape with `rank` and `as_list()`.
    plain = core.Variable.shape
    if not getattr(plain.fget, "_is_ours", False):

        def shape(self: Any) -> specs.TensorShape:
            return specs.TensorShape(plain.fget(self))

        shape._is_ours = True  # type: ignore[attr-defined]
        core.Variable.shape = property(shape)


def _quiet(record: logging.LogRecord) -> bool:
    """Returns whether a message is the program's, or a warning: programs that use absl.app log all of Orbax's steps."""
    folders = Path(record.pathname).parts
    return record.levelno >= logging.WARNING or "orbax" not in folders


def _quieten(absl_logging: Any) -> None:
    absl_logging.get_absl_logger().addFilter(_quiet)
    if (jax := logging.getLogger("jax")).level == logging.NOTSET:
        jax.setLevel(logging.WARNING)


def _have_shapes_as_leaves(tree: Any) -> None:
    """Has dm-tree take shapes for leaves of structures, as those of TensorFlow are.

    dm-tree asks once for each class whether its objects are sequences, and remembers the answer. A shape is one, since
    JAX needs a tuple: so it has to be asked while no shape looks like one.
    """
    check = abc.ABCMeta.__instancecheck__
    shape = specs.TensorShape([])
    abc.ABCMeta.__instancecheck__ = lambda cls, value: value is not shape and check(cls, value)  # type: ignore
    try:
        tree.is_nested(shape)
    finally:
        abc.ABCMeta.__instancecheck__ = check  # type: ignore[method-assign]


variable_classes: list[type] = []  # of which `tf.Variable` counts the instances as its own, besides its subclasses


def _as_keras_2() -> None:
    """Has Keras 3 answer as Keras 2 does in what libraries of that time ask: its variables are `tf.Variable`s."""
    keras: Any = importlib.import_module("keras")
    if keras.Variable not in variable_classes:
        variable_classes.append(keras.Variable)
        keras.metrics.Metric.reset_states = keras.metrics.Metric.reset_state


# What is done to modules of other libraries when they are loaded. Keras uses other libraries through that one.
_KERAS = {
    "keras.src.backend.jax.core": _give_shapes,
    "keras.src.utils.module_utils": _introduce_to_keras,
    "keras.src.utils.rng_utils": _seed_with_keras,
}
_ONCE_LOADED = {**_KERAS, "absl.logging": _quieten, "tree": _have_shapes_as_leaves}


def introduce_to_keras() -> None:
    """Has Keras, which is loaded, use `replicax.tf` where it uses TensorFlow on the side."""
    for name, then in _KERAS.items():
        then(sys.modules[name])


_installed: list[_StandIn] = []
_program: list[str | None] = []


def program() -> str | None:
    """Returns the file of the program that is run, as it was when TensorFlow's names were first served."""
    return _program[0] if _program else None


def install() -> None:
    """Serves TensorFlow's modules by `replicax.tf` from now on: `import tensorflow as tf` imports this one.

    This holds for the program and for the libraries that it imports, whether or not TensorFlow is installed. `replicax
    run-tf` calls it before it runs a program. Called again, it does nothing.

    Raises:
        RuntimeError: TensorFlow itself has been imported already.
    """
    loaded = sys.modules.get(_TENSORFLOW)
    if loaded is not None and loaded is not sys.modules[_OURS]:
        raise RuntimeError(
            f"TensorFlow itself was imported already, from {getattr(loaded, '__file__', None)}. Call "
            "replicax.tf.install() before anything imports it, or start the program with `replicax run-tf`. "
            f"See {doc_pages.page('how-to/migrate-from-tensorflow#2-run-it-as-it-is')}."
        )
    if _installed:
        return
    _program.append(getattr(sys.modules.get("__main__"), "__file__", None))
    finder = _StandIn(_TENSORFLOW)
    _installed.append(finder)
    sys.meta_path.insert(0, finder)
    for name in _ONCE_LOADED.keys() & sys.modules.keys():
        _ONCE_LOADED[name](sys.modules[name])


def is_installed() -> bool:
    """Returns whether TensorFlow's modules are served."""
    return bool(_installed)


def uninstall() -> None:
    """Serves TensorFlow's modules no more; what has imported them keeps them."""
    variable_classes.clear()
    for finder in _installed:
        sys.meta_path.remove(finder)
    _installed.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in (_TENSORFLOW, "tf_keras")]:
        del sys.modules[name]


def excepthook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
    """Shows an error that ends the program as Python does, without the frames of replicax and JAX."""
    tracebacks.filter_traceback(error)
    sys.__excepthook__(kind, error, error.__traceback__)


def serve_own_names() -> None:
    """Has namespaces of `replicax.tf` that are no files be importable too: `from replicax.tf.math import add`."""
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.append(_Finder(_OURS))
