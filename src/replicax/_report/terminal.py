"""Colours on a terminal: the one place that decides whether there are any."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TextIO

CHOICES = ("auto", "always", "never")


def has_colours(is_terminal: bool, choice: str = "auto", environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether a stream gets colours.

    Args:
        is_terminal: whether the stream is a terminal.
        choice: what the user asked for on the command line; `"auto"` leaves the decision to the environment.
        environment: the process's own by default. `NO_COLOR` turns colours off, `FORCE_COLOR` turns them on, and a
            terminal with `TERM=dumb` has none.

    >>> has_colours(True, environment={}), has_colours(False, environment={})
    (True, False)
    >>> has_colours(True, environment={"NO_COLOR": "1"}), has_colours(False, environment={"FORCE_COLOR": "1"})
    (False, True)
    >>> has_colours(False, "always", {"NO_COLOR": "1"})
    True
    """
    found = os.environ if environment is None else environment
    if choice != "auto":
        return choice == "always"
    if found.get("NO_COLOR"):
        return False
    if found.get("FORCE_COLOR"):
        return True
    return is_terminal and found.get("TERM") != "dumb"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--color` to the options of a command."""
    text = "colour the output: auto (the default) does so on a terminal, unless NO_COLOR is set"
    parser.add_argument("--color", choices=CHOICES, default="auto", metavar="WHEN", help=f"{text}; always; never")


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a stream is a terminal. One that is closed or missing is none."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


class Style:
    """Colours text, or leaves it as it is.

    Args:
        on: whether there are colours.

    >>> Style(False).bold("replicax")
    'replicax'
    """

    def __init__(self, on: bool):
        self.on = on

    def _in(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on and text else text

    def bold(self, text: str) -> str:
        """Returns the text in bold."""
        return self._in("1", text)

    def dim(self, text: str) -> str:
        """Returns the text in a fainter colour."""
        return self._in("2", text)

    def good(self, text: str) -> str:
        """Returns the text in green."""
        return self._in("32", text)

    def warning(self, text: str) -> str:
        """Returns the text in yellow."""
        return self._in("33", text)

    def alarm(self, text: str) -> str:
        """Returns the text in bold red."""
        return self._in("1;31", text)
