"""The comparison of the programs' arguments on the processes of a job.

Workers with different learning rates train different variables without an error. So different arguments are an error,
but for options that say which process this is, and for options that the user names in an environment variable.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the launcher imports no JAX
    from replicax._job.state import Job

MAY_DIFFER = "REPLICAX_ARGUMENTS_MAY_DIFFER"
JOB_ID = "REPLICAX_JOB_ID"
_LONGEST = 200  # characters of a job's name
_ANY = "all"
# Options that may have the number, task type or address of their own process as their value.
_SAYS_WHICH = re.compile(r"task|job_?name|worker|rank|process|node|host|machine", re.IGNORECASE)


class Argument(NamedTuple):
    """An option with its value; the name is empty for a positional argument."""

    name: str
    value: str


def parse_arguments(arguments: Sequence[str]) -> list[Argument]:
    """Return the options and positional arguments of a command line.

    >>> parse_arguments(["--lr", "0.1", "--task=1", "--fast", "data"])
    [Argument(name='--lr', value='0.1'), Argument(name='--task', value='1'), Argument(name='--fast', value='data')]
    """
    result: list[Argument] = []
    takes_value = False  # whether the last argument is an option without a value
    for text in arguments:
        is_option = text.startswith("-") and not re.fullmatch(r"-[\d.].*", text)
        if is_option:
            name, equals, value = text.partition("=")
            result.append(Argument(name, value))
            takes_value = not equals
        elif takes_value:
            result[-1] = Argument(result[-1].name, text)
            takes_value = False
        else:
            result.append(Argument("", text))
    return result


def default_job_id(program: str, arguments: Sequence[str]) -> str:
    """Return the name of a job that was given none: its program, and the arguments that must be equal.

    >>> default_job_id("project/train.py", ["--lr", "0.1", "--node_rank", "1"])
    'train.py --lr 0.1'
    """
    line = [argument for argument in _must_be_equal(arguments) or () if not _SAYS_WHICH.search(argument.name)]
    return " ".join([os.path.basename(program), *(text for argument in line for text in argument if text)])[:_LONGEST]


def _must_be_equal(arguments: Sequence[str]) -> list[Argument] | None:
    """Return the arguments that must be equal; None if `REPLICAX_ARGUMENTS_MAY_DIFFER` allows any difference."""
    allowed = {name.strip().lstrip("-") for name in os.environ.get(MAY_DIFFER, "").split(",")} - {""}
    if _ANY in allowed:
        return None
    return [argument for argument in parse_arguments(arguments) if argument.name.lstrip("-") not in allowed]


def compare(said: Mapping[int, Mapping[str, Any]], job: Job) -> tuple[dict[int, str], list[str]]:
    """Return the command line of each process as text, equal where it need not differ, and the options that differ.

    Args:
        said: the description of each process; "arguments" is its command line.
        job: the job.
    """
    lines: dict[int, list[Argument]] = {}
    for process, record in said.items():
        try:
            words = shlex.split(record["arguments"])
        except ValueError:  # no process of ours sends an open quotation
            words = record["arguments"].split()
        line = _must_be_equal(words)
        if line is None or record["program"] == "-":  # a notebook has arguments of its own
            return dict.fromkeys(said, ""), []
        lines[process] = line
    options = [[argument.name for argument in line] for line in lines.values()]
    if any(names != options[0] for names in options):
        different = [set(names).symmetric_difference(options[0]) for names in options]
        return _as_text(lines), sorted(set.union(*different)) or [_ANY]
    result = []
    for place, name in enumerate(options[0]):
        values = {process: line[place].value for process, line in lines.items()}
        if len(set(values.values())) == 1:
            continue
        own = all(value in _own_values(process, said[process], job) for process, value in values.items())
        if own and _SAYS_WHICH.search(name):
            for line in lines.values():
                line[place] = Argument(name, "...")
        else:
            result.append(name or _ANY)
    return _as_text(lines), list(dict.fromkeys(result))


def _as_text(lines: Mapping[int, Sequence[Argument]]) -> dict[int, str]:
    return {
        process: " ".join(text for argument in line for text in argument if text) for process, line in lines.items()
    }


def _own_values(process: int, record: Mapping[str, Any], job: Job) -> set[str]:
    """Return the texts by which a command line may call its own process."""
    (kind, index), address = job.tasks[process], job.addresses[process]
    host, _, port = address.rpartition(":")
    return {str(process), str(index), kind, f"{kind}:{index}", address, host, port, record["host"]}
