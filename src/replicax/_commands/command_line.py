"""The command `replicax`: finds the subcommand, or says which there are."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from itertools import groupby

from replicax import __version__
from replicax._base import doc_pages
from replicax._commands.table import COMMANDS, PROGRAM, find
from replicax._report.terminal import Style, has_colours, is_terminal

OPTIONS = {"--help": "show this overview", "--version": "show the version"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `replicax` with these arguments (by default those of the process), and returns the exit status."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command := find(name):
        try:
            return command.run(others)
        except KeyboardInterrupt:
            return 128 + 2
        except BrokenPipeError:  # who reads the output, such as `head`, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + 13
    if name == "help" and others and (command := find(others[0])):
        return command.run(["--help"])
    if name in ("-h", "--help", "help") and not others:
        print(overview(Style(has_colours(is_terminal(sys.stdout)))))
        return 0
    if name in ("--version", "-V"):
        print(f"{PROGRAM} {__version__}")
        return 0
    print(_unknown(others[0] if others and name in ("help", "-h", "--help") else name), file=sys.stderr)
    return 2


def overview(style: Style) -> str:
    """Returns what the command can do, with an example for each subcommand."""
    width = max(len(command.name) for command in COMMANDS) + 2
    lines = [
        f"{style.bold(f'{PROGRAM} {__version__}')}: the programming model of tf.distribute on JAX",
        "",
        f"usage: {PROGRAM} COMMAND [OPTIONS]",
    ]
    for group, commands in groupby(COMMANDS, key=lambda command: command.group):
        lines += ["", style.bold(group)]
        for command in commands:
            lines.append(f"  {command.name:{width}}{command.summary}")
            lines.append(f"  {'':{width}}{style.dim(f'$ {command.example}')}")
    return "\n".join(
        [
            *lines,
            "",
            f"`{PROGRAM} COMMAND --help` explains a command; `{PROGRAM} --version` shows the version.",
            f"Documentation: {doc_pages.page('index')}; `{PROGRAM} docs` lists its pages.",
        ]
    )


def _unknown(name: str) -> str:
    """Returns the message for something that is no subcommand."""
    names = [command.name for command in COMMANDS]
    close = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=1)
    if name.startswith("-"):
        lead = f"There is no option {name!r} here. Options of a command stand after it."
    else:
        lead = f"There is no command {name!r}."
    meant = f" Did you mean `{PROGRAM} {close[0]}`?" if close else ""
    return f"{PROGRAM}: {lead}{meant}\nThe commands are {', '.join(names)}; `{PROGRAM} --help` explains them."
