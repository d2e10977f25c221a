"""The door to the core for the commands: like `replicax.tf._core`, but without JAX."""

import importlib
from typing import TYPE_CHECKING

from replicax._base import program_arguments
from replicax._base.commands import Command, FrontEnd
from replicax._base.environment_variables import Variable
from replicax._base.exit_codes import ExitCode

if TYPE_CHECKING:
    from replicax._export.command import TENSORFLOW, VARIABLE
    from replicax._launch._environment import with_large_pages

__all__ = [
    "TENSORFLOW",
    "VARIABLE",
    "Command",
    "ExitCode",
    "FrontEnd",
    "Variable",
    "program_arguments",
    "with_large_pages",
]

# Where each name comes from that is imported on first use.
_LATER = {
    "TENSORFLOW": "replicax._export.command",
    "VARIABLE": "replicax._export.command",
    "with_large_pages": "replicax._launch._environment",
}


def __getattr__(name: str) -> object:
    """Import a name of `_LATER`."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LATER[name]), name)
    return value
