"""The command `replicax check-tf`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicax.tf._findings import Findings

_DESCRIPTION = """\
Read Python code, without running it, and say which names of TensorFlow it uses that replicax.tf has, which of them
differ from TensorFlow's, which are missing and what stands for them, and which libraries it imports that need
TensorFlow itself. Methods of tensors, datasets and other objects are not checked.
"""

_EPILOG = """\
examples:
  replicax check-tf train.py
  replicax check-tf --json project > names.json

exit status:
  0 when everything is there; 1 when something is missing, or a file cannot be read; 2 when there is no such path.
"""

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def main(arguments: Sequence[str]) -> int:
    """Runs the command, and returns its exit status."""
    parser = argparse.ArgumentParser(
        "replicax check-tf",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a file, a notebook, or a folder of them")
    parser.add_argument("--all", action="store_true", help="list the names that are there, too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(arguments)
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
