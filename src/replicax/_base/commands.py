"""The subcommands of `replicax`, its own and those of front ends.

A front end is a package of replicax: `replicax.tf` is one. The record `ADDED` of its package `_programs` lists its
subcommands. `_programs` is imported without the front end, because the front end imports JAX.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replicax._base.environment_variables import Variable
from replicax._base.exit_codes import ExitCode

PROGRAM = "replicax"


@dataclass(frozen=True)
class Command:
    """A subcommand of `replicax`.

    Attributes:
        name: the word after `replicax` on the command line.
        group: the heading under which the overview lists it.
        summary: its purpose, in a few words.
        example: a typical command line.
        module: its module, which is imported when the command runs. The module has `parser(program)`, which returns the
            parser without running anything, and `main(arguments, program)`, which returns the exit status.
    """

    name: str
    group: str
    summary: str
    example: str
    module: str

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of its options; nothing is run."""
        result: argparse.ArgumentParser = importlib.import_module(self.module).parser(f"{PROGRAM} {self.name}")
        return result

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command, and return its exit status."""
        status: int = importlib.import_module(self.module).main(arguments, f"{PROGRAM} {self.name}")
        return status


Environment = Mapping[str, str]


@dataclass(frozen=True)
class FrontEnd:
    """The additions of a front end to the command `replicax`.

    Attributes:
        commands: its subcommands.
        option: the option of `replicax launch` and `replicax plan` for programs of this front end.
        help: the help of the option.
        environment: returns the environment of these programs, given the environment of other programs.
        exit_codes: the exit statuses of the subcommands.
        variables: the environment variables that only the front end reads.
    """

    commands: tuple[Command, ...]
    option: str
    help: str
    environment: Callable[[Environment], dict[str, str]]
    exit_codes: tuple[ExitCode, ...]
    variables: tuple[Variable, ...]


@functools.cache
def front_ends() -> tuple[FrontEnd, ...]:
    """Return the additions of each installed front end."""
    package = Path(__file__).parents[1]
    folders = (file.parent for file in sorted(package.glob("*/_programs/__init__.py")))
    return tuple(_import_alone(folder, f"{package.name}.{folder.parent.name}.{folder.name}") for folder in folders)


def _import_alone(folder: Path, name: str) -> FrontEnd:
    """Import a package without its parent, and return its record."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    added: FrontEnd = sys.modules[name].ADDED
    return added


def add_front_end_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of front ends. The parsed `front_end` is the given one's function `environment`, or None."""
    parser.set_defaults(front_end=None)
    for added in front_ends():
        parser.add_argument(
            added.option, dest="front_end", action="store_const", const=added.environment, help=added.help
        )
