"""TensorFlow 1's names, of which there is `distribute`, and what scripts of TensorFlow 2 still call."""

from __future__ import annotations

import types as _types
from typing import Any

from replicax.tf._absent import missing_from
from replicax.tf.compat.v1 import distribute as distribute


def enable_eager_execution(config: Any = None, device_policy: Any = None, execution_mode: Any = None) -> None:
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
        "out and write the training loop with functions: @tf.function compiles them."
    )


def _logging() -> _types.ModuleType:
    """The logger "tensorflow" under TensorFlow 1's names."""
    import logging

    log = logging.getLogger("tensorflow")
    module = _types.ModuleType(f"{__name__}.logging", "The logger `tensorflow`.")
    levels = {name: getattr(logging, name) for name in ("DEBUG", "ERROR", "FATAL", "INFO", "WARN")}
    calls = {name: getattr(log, name) for name in ("debug", "error", "fatal", "info", "log", "warning")}
    module.__dict__.update(levels, **calls, warn=log.warning, set_verbosity=log.setLevel)
    module.__dict__.update(get_verbosity=log.getEffectiveLevel, __getattr__=missing_from("compat.v1.logging"))
    return module


logging = _logging()
__getattr__ = missing_from("compat.v1")
