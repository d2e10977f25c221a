"""Arguments of commands that run a program: their own options, the program, and the program's own arguments."""

from __future__ import annotations

import argparse


def parser(command: str, options: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Returns a parser for the program and its arguments, without options of the command but `--module`.

    Args:
        command: the command's name.
        options: its options, as they stand in its usage.
        description, epilog: what its help says before and after the options, shown as they are.
    """
    result = argparse.ArgumentParser(
        command,
        usage=f"{command} {options} [-m] PROGRAM [ARGUMENTS ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("program", metavar="PROGRAM", help="a Python file or, after -m, the name of a module")
    own = result.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="the program's own")
    own.required = False  # Python names it among the missing ones otherwise
    result.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as in python -m")
    return result
