"""The programming model of tf.distribute on JAX.

Write what one replica does; a `Strategy` runs it on every replica, keeps the variables in step, splits the input and
reduces the results. The names have docstrings with examples; `replicax docs` lists the pages of the documentation.
"""

import importlib as _importlib
import os as _os
import typing as _typing

from replicax._base.version import __version__ as __version__

_os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported

_unusable: dict[str, Exception] = {}  # what is wrong with settings in the environment


def _configure() -> None:
    """Apply the settings in the environment that JAX has to know before it starts, whoever starts it."""
    for variable, module in (
        ("REPLICAX_VIRTUAL_DEVICES", "devices"),
        ("REPLICAX_COMPILATION_CACHE", "compilation_cache"),
    ):
        if variable in _os.environ:
            try:
                _importlib.import_module(f"replicax._base.{module}").configure_from_environment()
            except Exception as error:  # raised when a name is used, since `replicax info` and `replicax docs` must run
                _unusable[variable] = error


_configure()

if _typing.TYPE_CHECKING:
    from replicax._api import *  # noqa: F403
    from replicax._api import _DefaultDistributionStrategy as _DefaultDistributionStrategy


def __getattr__(name: str) -> object:
    """Imports a name of `_api` when it is used, so that the launcher starts without JAX."""
    if _unusable and not name.startswith("__"):
        raise next(iter(_unusable.values()))
    if name in ("cluster_resolver", "coordinator", "train"):
        return _importlib.import_module(f"replicax.{name}")
    if name == "ParameterServerStrategy":
        return _importlib.import_module("replicax.coordinator").ParameterServerStrategy
    if not name.startswith("_") or name in ("__all__", "_DefaultDistributionStrategy"):
        api = _importlib.import_module("replicax._api")
        if hasattr(api, name):
            value: object = getattr(api, name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'replicax' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_importlib.import_module("replicax._api").__all__})
