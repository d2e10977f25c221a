"""Runs when Python starts below `replicax run-tf`, in the program and in the processes that it starts.

The folder of this file is on their PYTHONPATH (`_programs/environment.py`). Nothing is imported until the program
imports TensorFlow or Keras, so that a process that needs neither starts as fast as ever.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.metadata import Distribution
    from types import ModuleType
    from typing import Any


class Waiting:
    """Waits in front of Python's finders for the first import of TensorFlow or Keras."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Installs `replicax.tf`, whose finder takes over from here."""
        return self._installed().find_spec(name, path, target) if name in ("tensorflow", "keras") else None

    def find_distributions(self, context: object = None) -> Iterable[Distribution]:
        """Finds what `importlib.metadata.version("tensorflow")` asks for."""
        wanted = getattr(context, "name", None) == "tensorflow"
        return self._installed().find_distributions(context) if wanted else ()

    def _installed(self) -> Any:
        sys.meta_path.remove(self)
        import replicax.tf

        replicax.tf.install()
        sys.excepthook = replicax.tf._imports.excepthook
        return sys.meta_path[0]


def the_next() -> None:
    """Runs the `sitecustomize` that this one hides, such as that of the operating system."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def write_report(target: str) -> None:
    """Writes the report of what the program used of TensorFlow, also where it has failed."""
    if "replicax.tf" in sys.modules:
        from replicax.tf import _report

        _report.write(target)


sys.meta_path.insert(0, Waiting())
if "REPLICAX_TF_REPORT" in os.environ:
    import atexit

    # It is of the program itself, not of the processes that it starts.
    atexit.register(write_report, os.environ.pop("REPLICAX_TF_REPORT"))
the_next()
