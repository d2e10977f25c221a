"""The command `replicax check-tf`: its options. `replicax.tf._check` does the work, in a process that imports JAX."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTION = """\
Read Python code, without running it, and say which names of TensorFlow it uses that replicax.tf has, which of them
differ from TensorFlow's, which are missing and what stands for them, and which libraries it imports that need
TensorFlow itself. Members and arguments that Keras 3 dropped are found by their names; other methods of tensors,
datasets and objects are not checked.
"""

_EPILOG = """\
examples:
  replicax check-tf train.py
  replicax check-tf --json project > names.json

exit status:
  0 when everything is there; 1 when something is missing, or a file cannot be read; 2 when there is no such path.
"""


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    result = argparse.ArgumentParser(
        program,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a file, a notebook, or a folder of them")
    result.add_argument("--all", action="store_true", help="list the names that are there, too")
    result.add_argument("--json", action="store_true", help="print everything as JSON")
    return result


def main(arguments: Sequence[str], program: str) -> int:
    """Runs the command in another process, which asks JAX's operations for their names; returns its exit status."""
    parser(program).parse_args(arguments)
    command_line = [sys.executable, "-m", "replicax.tf._check", *arguments]
    return subprocess.run(command_line, check=False).returncode
