"""The programming model of tf.distribute on JAX.

Write what one replica does; a `Strategy` runs it on every replica, keeps the variables in step, splits the input and
reduces the results. The names have docstrings with examples; `replicax docs` lists the pages of the documentation.
"""

import importlib as _importlib
import os as _os
import typing as _typing

from replicax._base.version import __version__ as __version__

_os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported

if "REPLICAX_VIRTUAL_DEVICES" in _os.environ:  # to be known before JAX starts, whoever starts it
    from replicax._base import devices

    devices.configure_from_environment()
if "REPLICAX_COMPILATION_CACHE" in _os.environ:
    from replicax._base import compilation_cache

    compilation_cache.configure_from_environment()

if _typing.TYPE_CHECKING:
    from replicax._api import *  # noqa: F403
    from replicax._api import _DefaultDistributionStrategy as _DefaultDistributionStrategy


def __getattr__(name: str) -> object:
    """Imports a name of `_api` when it is used, so that the launcher starts without JAX."""
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
