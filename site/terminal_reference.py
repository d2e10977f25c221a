"""Writes the pages of the command line, of environment variables and of exit statuses, from the tables in replicax."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

from replicax._base.commands import front_ends
from replicax._base.environment_variables import VARIABLES
from replicax._base.exit_codes import EXIT_CODES
from replicax._commands.table import COMMANDS, PROGRAM

os.environ["COLUMNS"] = "100"  # argparse lays out help for the width of the terminal
os.environ["NO_COLOR"] = "1"


def write(folder: Path) -> None:
    """Writes the pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "command-line.md").write_text(command_line(), encoding="utf-8")
    (folder / "environment.md").write_text(environment(), encoding="utf-8")
    (folder / "exit-codes.md").write_text(exit_codes(), encoding="utf-8")


def command_line() -> str:
    """Returns the page of the commands: what each does, an example, and its help."""
    lines = [
        "# Command line",
        "",
        f"`{PROGRAM}` alone lists its commands, and `{PROGRAM} COMMAND --help` explains one.",
    ]
    lines += ["[Exit statuses](exit-codes.md) says how they end.", ""]
    for command in COMMANDS:
        lines += [f"## {PROGRAM} {command.name}", "", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
        lines += ["```sh", command.example, "```", "", "```text", command.parser().format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def environment() -> str:
    """Returns the page of the environment variables."""
    lines = [
        "# Environment variables",
        "",
        "`replicax info` shows which of them are set, and what is wrong with them.",
        "",
    ]
    all_variables = (*VARIABLES, *(variable for added in front_ends() for variable in added.variables))
    for group, variables in groupby(all_variables, key=lambda variable: variable.group):
        lines += [f"## {group}", ""]
        for variable in variables:
            meaning = _with_code(f"{variable.meaning[0].upper()}{variable.meaning[1:]}.")
            lines += [f"### {variable.name}", "", meaning, ""]
            lines += [_with_code(f"Values: {variable.values}. By default: {variable.default}."), ""]
    return "\n".join(lines)


def _with_code(text: str) -> str:
    """Returns a text with its commands and options as code."""
    return re.sub(
        r"replicax(?: [a-z-]+)?(?: --\w+)|--\w+|replicax (?:launch|run-tf|info|plan|docs)\b", r"`\g<0>`", text
    )


def exit_codes() -> str:
    """Returns the page of the exit statuses."""
    lines = ["# Exit statuses", "", "What a command, or a program that uses replicax, ends with.", ""]
    all_codes = (*EXIT_CODES, *(code for added in front_ends() for code in added.exit_codes))
    for command, codes in groupby(all_codes, key=lambda code: code.command):
        title = f"{command[0].upper()}{command[1:]}" if command.startswith("a ") else command
        lines += [f"## {title}", "", "| status | meaning |", "|---|---|"]
        lines += [f"| {code.status} | {_with_code(code.meaning)} |" for code in codes] + [""]
    return "\n".join(lines)
