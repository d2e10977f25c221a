"""The command `replicax run-tf`, which is also `python -m replicax.tf`. It needs no JAX itself."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from replicax.tf._programs import environment
from replicax.tf._programs._core import program_arguments, with_large_pages

_DESCRIPTION = """\
Run a program of TensorFlow's as it is, on JAX: `import tensorflow` gives it, and the libraries that it imports,
replicax.tf. All else is as with `python PROGRAM ARGUMENTS`. See `replicax docs how-to/migrate-from-tensorflow`.
"""

_EPILOG = """\
examples:
  replicax run-tf train.py --epochs 3
  replicax run-tf --report -m project.train
  replicax run-tf --report=names.txt train.py

Processes that the program starts get the same names. `replicax launch --tf` starts the workers of a job like this, and
`replicax check-tf` says beforehand what a program needs.
"""


def parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of the options and of the program's own arguments."""
    result = program_arguments.parser(name, "[--report[=FILE]] [--no-tuning]", _DESCRIPTION, _EPILOG)
    text = (
        """when the program ends, say which names of TensorFlow it uses, and which are missing: on stderr, or in FILE"""
    )
    result.add_argument("--report", metavar="FILE", nargs="?", const="-", help=text)
    text = "leave GLIBC_TUNABLES as it is; else Linux's C library keeps large buffers for the next step"
    result.add_argument("--no-tuning", action="store_true", help=text)
    return result


def main(arguments: Sequence[str], name: str) -> int:
    """Runs the program in place of this process, where the system can; returns its exit status where not."""
    given = parser(name).parse_args(_with_values(arguments))
    variables = environment.environment(os.environ)
    if not given.no_tuning:
        variables = with_large_pages(variables)
    if given.report is not None:
        variables["REPLICAX_TF_REPORT"] = given.report if given.report == "-" else os.path.abspath(given.report)
    command = [sys.executable, *(["-m"] if given.module else []), given.program, *given.arguments]
    if os.name == "posix":
        os.execve(sys.executable, command, variables)
    return subprocess.run(command, env=variables, check=False).returncode


def _with_values(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--report` as `--report=-`: what follows it is the program, not its value."""
    found = list(arguments)
    for index, argument in enumerate(arguments):
        if not argument.startswith("-") or argument == "-m":
            break
        found[index] = "--report=-" if argument == "--report" else argument
    return found
