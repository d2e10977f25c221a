"""The work of the command `replicax check-tf`, whose options are in `_programs/check_tf.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicax.tf._findings import Findings
from replicax.tf._programs import check_tf

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def main(arguments: Sequence[str]) -> int:
    """Runs the command, and returns its exit status."""
    given = check_tf.parser("replicax check-tf").parse_args(arguments)
    findings = Findings()
    for path in given.paths:
        if not path.exists():
            print(f"replicax check-tf: There is no {path} in {os.getcwd()}.", file=sys.stderr)
            return 2
        for file in _files(path):
            findings.add(file, str(file))
    print(findings.as_json() if given.json else findings.as_text(given.all))
    return 0 if findings.good else 1


def _files(path: Path) -> Iterator[Path]:
    """Yields the files of Python code at a path, without those of installed and hidden folders below it."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        hidden = [name for name in folders if name in _SKIPPED or name.startswith(".")]
        folders[:] = sorted(name for name in folders if name not in hidden and not name.endswith(".egg-info"))
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        yield from (Path(folder, name) for name in sorted(files) if name.endswith((".py", ".ipynb")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
