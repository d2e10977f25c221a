"""What a program used of TensorFlow, at its end: `replicax run-tf --report`."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from replicax.tf import _absent, _imports, _verdicts
from replicax.tf._findings import Findings

# Libraries that mention TensorFlow and do without it here.
_WITHOUT = {"etils", "flax", "grain", "jax", "keras", "malt", "opt_einsum", "optax", "orbax", "replicax"}


def write(target: str) -> None:
    """Writes the report to a file, or to stderr where the target is "-"."""
    asked = list(_absent.asked)  # before the report asks for the same names
    findings = Findings()
    for path in sorted({path for module in list(sys.modules.values()) if (path := _file(module)) is not None}):
        findings.add(path, _shown(path))
    findings.files = len({each.file for each in findings.found})
    text = "\n".join(
        [
            "Names of TensorFlow in the files of the program that were loaded:",
            findings.as_text(every=True),
            *(["Names that the program asked for and did not find:"] if asked else []),
            *(f"  {name} ({place}): {_verdicts.of_name(name).text}" for name, place in asked),
        ]
    )
    if target == "-":
        print(text, file=sys.stderr)
    else:
        Path(target).write_text(f"{text}\n", encoding="utf-8")


def _file(module: types.ModuleType) -> Path | None:
    """Returns the file of a module that imports TensorFlow for itself."""
    name, path = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if name == "__main__":
        path = _imports.program()  # Python takes it away again when the program has failed
    if not isinstance(path, str) or not path.endswith(".py") or str(name).partition(".")[0] in _WITHOUT:
        return None
    try:
        return Path(path) if b"tensorflow" in Path(path).read_bytes() else None
    except OSError:
        return None


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return os.fspath(path)
