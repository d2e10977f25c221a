"""TensorFlow 1's names, of which there is `distribute`, and what scripts of TensorFlow 2 still call."""

from __future__ import annotations

import importlib as _importlib
import types as _types
from typing import Any

from jax import Array as _Array

from replicax.tf._absent import missing_from as _missing_from
from replicax.tf._core import doc_pages
from replicax.tf.compat.v1 import _names
from replicax.tf.compat.v1 import distribute as distribute
from replicax.tf.compat.v1._sessions import ConfigProto as ConfigProto
from replicax.tf.compat.v1._sessions import GPUOptions as GPUOptions
from replicax.tf.compat.v1._sessions import InteractiveSession as InteractiveSession
from replicax.tf.compat.v1._sessions import Session as Session


def _cast(x: object, dtype: str, name: str) -> _Array:
    cast: _Array = _names.find("", "cast")(x, dtype, name)
    return cast


def enable_eager_execution(config: object = None, device_policy: object = None, execution_mode: object = None) -> None:
    """Nothing: operations run eagerly."""


def executing_eagerly_outside_functions() -> bool:
    """True."""
    return True


def enable_v2_behavior() -> None:
    """Nothing: TensorFlow 2's behaviour is the only one."""


def disable_eager_execution() -> None:
    """Raises `RuntimeError`: there are no graphs."""
    _refuse("disable_eager_execution")


def disable_v2_behavior() -> None:
    """Raises `RuntimeError`: there are no graphs."""
    _refuse("disable_v2_behavior")


def _refuse(name: str) -> None:
    raise RuntimeError(
        f"tf.compat.v1.{name} asks for TensorFlow 1's graphs and sessions, which replicax has none of. Leave the call "
        "out and write the training loop with functions: @tf.function compiles them. "
        f"See {doc_pages.page('how-to/migrate-from-tensorflow')}."
    )


def _logging() -> _types.ModuleType:
    """The logger "tensorflow" under TensorFlow 1's names."""
    import logging

    log = logging.getLogger("tensorflow")
    module = _types.ModuleType(f"{__name__}.logging", "The logger `tensorflow`.")
    levels = {name: getattr(logging, name) for name in ("DEBUG", "ERROR", "FATAL", "INFO", "WARN")}
    calls = {name: getattr(log, name) for name in ("debug", "error", "fatal", "info", "log", "warning")}
    module.__dict__.update(levels, **calls, warn=log.warning, set_verbosity=log.setLevel)
    module.__dict__.update(get_verbosity=log.getEffectiveLevel, __getattr__=_missing_from("compat.v1.logging"))
    return module


def enable_resource_variables() -> None:
    """Nothing: all variables are resources."""


def enable_tensor_equality() -> None:
    """Nothing: `==` compares the elements of tensors."""


def enable_v2_tensorshape() -> None:
    """Nothing: dimensions are ints or None."""


def reset_default_graph() -> None:
    """Nothing: there is no graph."""


def to_float(x: object, name: str = "ToFloat") -> _Array:
    """Casts to float32."""
    return _cast(x, "float32", name)


def to_int32(x: object, name: str = "ToInt32") -> _Array:
    """Casts to int32."""
    return _cast(x, "int32", name)


def to_int64(x: object, name: str = "ToInt64") -> _Array:
    """Casts to int64."""
    return _cast(x, "int64", name)


logging = _logging()


def _gfile() -> _types.ModuleType:
    """The functions of `tf.io.gfile` under TensorFlow 1's names."""
    files = _names.find("io", "gfile")
    module = _types.ModuleType(f"{__name__}.gfile", "Files on any file system, under TensorFlow 1's names.")
    old = "Copy=copy Exists=exists Glob=glob IsDirectory=isdir ListDirectory=listdir MakeDirs=makedirs MkDir=mkdir"
    more = "DeleteRecursively=rmtree FastGFile=GFile GFile=GFile Open=GFile Remove=remove Rename=rename Stat=stat"
    for name, new in (entry.split("=") for entry in f"{old} {more} Walk=walk".split()):
        setattr(module, name, getattr(files, new))
    module.__dict__["__getattr__"] = _missing_from("compat.v1.gfile")
    return module


def __getattr__(name: str) -> Any:
    if name in ("app", "flags"):
        return _importlib.import_module(f"absl.{name}")  # TensorFlow's are those
    return _gfile() if name == "gfile" else _names.find("", name)
