"""The table of subcommands: what help, shell completion and the reference pages are made from."""

from __future__ import annotations

import argparse

from replicax._base.commands import PROGRAM as PROGRAM
from replicax._base.commands import Command, front_ends

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
    *(command for added in front_ends() for command in added.commands),
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
