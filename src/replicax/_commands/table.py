"""The table of subcommands: what help, shell completion and the reference pages are made from."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

PROGRAM = "replicax"


@dataclass(frozen=True)
class Command:
    """A subcommand of `replicax`.

    Attributes:
        name: what follows `replicax` on the command line.
        group: the heading under which the overview lists it.
        summary: what it does, in a few words.
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
        """Returns the parser of its options; nothing is run."""
        result: argparse.ArgumentParser = importlib.import_module(self.module).parser(f"{PROGRAM} {self.name}")
        return result

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command, and returns its exit status."""
        status: int = importlib.import_module(self.module).main(arguments, f"{PROGRAM} {self.name}")
        return status


COMMANDS = (
    Command(
        "launch",
        "Run a program",
        "start a program as several workers of one job",
        "replicax launch --workers 4 train.py",
        "replicax._launch._cli",
    ),
    Command(
        "plan",
        "Run a program",
        "tell what a training step needs on devices you do not have",
        "replicax plan --topology v5e:2x4 train.py",
        "replicax._plan.command",
    ),
    Command(
        "export",
        "Run a program",
        "convert a saved model for TensorFlow Serving and TensorFlow Lite",
        "replicax export model served/model/1 --to tensorflow",
        "replicax._export.command",
    ),
    Command(
        "info",
        "Find out what is there",
        "show versions, devices, extras, the cluster and settings, and what is wrong",
        "replicax info",
        "replicax._commands.info.command",
    ),
    Command(
        "docs",
        "Find out what is there",
        "show a page of the documentation, or find the words of an error message",
        "replicax docs how-to/launch",
        "replicax._commands.docs",
    ),
    Command(
        "check-tf",
        "Programs of TensorFlow",
        "list what a program needs of TensorFlow, and what is missing",
        "replicax check-tf train.py",
        "replicax._commands.check_tf",
    ),
    Command(
        "run-tf",
        "Programs of TensorFlow",
        "run a program written for TensorFlow, unchanged",
        "replicax run-tf train.py",
        "replicax._commands.run_tf",
    ),
    Command(
        "compare",
        "Programs of TensorFlow",
        "run a program under TensorFlow and here, and compare its training steps",
        "replicax compare --tensorflow ~/tensorflow/bin/python train.py",
        "replicax._commands.compare.command",
    ),
    Command(
        "completion",
        "Set up this terminal",
        "print a script that completes command lines in bash, zsh or fish",
        "replicax completion bash",
        "replicax._commands.completion",
    ),
)


def find(name: str) -> Command | None:
    """Returns the subcommand of that name, or None.

    >>> find("launch").summary
    'start a program as several workers of one job'
    """
    return next((command for command in COMMANDS if command.name == name), None)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each subcommand by its name.

    >>> parsers()["launch"].prog
    'replicax launch'
    """
    return {command.name: command.parser() for command in COMMANDS}
