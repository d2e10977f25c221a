"""The environment variables that replicax reads: one list, for `replicax info` and the reference page."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PREFIX = "REPLICAX_"


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: its name.
        group: the heading under which the reference page lists it.
        values: the values it takes, as the user writes them.
        default: what holds where it is not set.
        meaning: what it does, in one sentence.
        pattern: a regular expression for its values, whose case does not count; empty for any.
        is_secret: its value is never shown.
        is_for_users: users set it; other variables are set by replicax for processes that it starts.
    """

    name: str
    group: str
    values: str
    default: str
    meaning: str
    pattern: str = ""
    is_secret: bool = False
    is_for_users: bool = True

    def shown(self, value: str) -> str:
        """Returns the value as it may be shown."""
        return "(set, not shown)" if self.is_secret and value.lower() != "none" else value

    def problem(self, value: str) -> str | None:
        """Returns what is wrong with a value, and what would be right; None if nothing is."""
        if not self.pattern or not value.strip() or re.fullmatch(self.pattern, value.strip(), re.IGNORECASE):
            return None
        return f"{self.name} takes {self.values}; got {self.shown(value)!r}."


_DEVICES, _JOBS = "Devices and compiled programs", "Jobs of several processes"
_MESSAGES, _OTHERS, _INTERNAL = "Messages", "Datasets and plans", "Set by replicax for processes that it starts"
_SECONDS = r"\d+\.?\d*(e[+-]?\d+)?"
_PORT = r"\d{1,5}"

VARIABLES = (
    Variable(
        "REPLICAX_VIRTUAL_DEVICES", _DEVICES, "TYPE:COUNT, separated by commas, such as GPU:4", "none",
        "gives CPU devices the names of accelerators, to try a program without them",
        r"[a-z_]+:[1-9]\d*(\s*,\s*[a-z_]+:[1-9]\d*)*",
    ),
    Variable(
        "REPLICAX_COMPILATION_CACHE", _DEVICES, "a folder, default or off", "off; default under replicax run-tf",
        "keeps compiled programs in a folder from one start to the next",
    ),
    Variable(
        "REPLICAX_START_TIMEOUT", _JOBS, "seconds", "300", "how long all processes may take to join the job", _SECONDS
    ),
    Variable(
        "REPLICAX_HEARTBEAT_TIMEOUT", _JOBS, "seconds", "30",
        "after how long a process that does not answer counts as lost; process 0's value holds for all", _SECONDS,
    ),
    Variable(
        "REPLICAX_STEP_TIMEOUT", _JOBS, "seconds, or none", "300", "how long a call may wait for other processes",
        rf"{_SECONDS}|none",
    ),
    Variable(
        "REPLICAX_PREFLIGHT", _JOBS, "on, quiet or off", "on",
        "whether processes compare their programs before training (quiet: without printing the table)", "on|quiet|off",
    ),
    Variable(
        "REPLICAX_ARGUMENTS_MAY_DIFFER", _JOBS, "options, or all", "none",
        "arguments of the program, such as --seed,--data, that may differ between processes; process 0's value counts",
    ),
    Variable(
        "REPLICAX_JOB_ID", _JOBS, "text", "none; under replicax launch, the program and its arguments",
        "the job's name: processes and launchers of another job are refused",
    ),
    Variable(
        "REPLICAX_COORDINATION_PORT", _JOBS, "a port", "any free one",
        "the port of JAX's coordination service on process 0", _PORT,
    ),
    Variable("REPLICAX_TPU_PORT", _JOBS, "a port", "8482", "the port of process 0 on a TPU slice", _PORT),
    Variable(
        "REPLICAX_JOB_SECRET", _JOBS, "text of at least 16 bytes, or none", "one of this user, on one machine",
        "the secret by which the tasks of a job with parameter servers know each other; none turns encryption off",
        is_secret=True,
    ),
    Variable(
        "REPLICAX_JOB_SECRET_FILE", _JOBS, "the path of a file", "none", "the file that has the job's secret"
    ),
    Variable(
        "REPLICAX_LOG_COMPILES", _MESSAGES, "seconds, or off", "1",
        "reports each compilation that takes at least this long", rf"{_SECONDS}|off|none",
    ),
    Variable(
        "REPLICAX_PROGRESS", _MESSAGES, "0 or 1", "1 on a terminal",
        "whether progress is shown of what takes more than two seconds", "0|1|on|off",
    ),
    Variable(
        "REPLICAX_HINT_SHORT_STEPS", _MESSAGES, "on or off", "on",
        "whether a hint is printed when short steps would be faster several at a time", "on|off",
    ),
    Variable(
        "REPLICAX_INPUT_PROCESSES", _OTHERS, "a whole number", "chosen for each dataset",
        "how many processes call the Python functions of datasets; 0 for none", r"\d+",
    ),
    Variable(
        "REPLICAX_PLAN_PYTHON", _OTHERS, "the path of a Python, or several joined by colons",
        "those of replicax plan --install", "the Python that has XLA's compiler for GPUs or TPUs, for plans",
    ),
    Variable(
        "REPLICAX_TENSORFLOW_PYTHON", _OTHERS, "the path of a Python",
        "that of replicax export --install", "the Python that has TensorFlow, for replicax export and replicax compare",
    ),
    Variable(
        "REPLICAX_REPORT_DIR", _INTERNAL, "a folder", "none",
        "where a process that fails writes its report; replicax launch sets it, and other launchers may", "",
    ),
    Variable(
        "REPLICAX_RESTART_COUNT", _INTERNAL, "a whole number", "not set",
        "how often replicax launch has restarted all workers", is_for_users=False,
    ),
    Variable(
        "REPLICAX_TASK_RESTART_COUNT", _INTERNAL, "a whole number", "not set",
        "with --ps: how often replicax launch has restarted this task", is_for_users=False,
    ),
)  # fmt: skip


def find(name: str, variables: Iterable[Variable] = VARIABLES) -> Variable | None:
    """Return the variable of that name, or None."""
    return next((variable for variable in variables if variable.name == name), None)


def problems(environment: Mapping[str, str], variables: Sequence[Variable] = VARIABLES) -> list[str]:
    """Return what is wrong with the values and the names of variables that begin with `REPLICAX_`.

    >>> problems({"REPLICAX_STEP_TIMEOUT": "60", "REPLICAX_STEP_TIMOUT": "60"})
    ['REPLICAX_STEP_TIMOUT is set, but replicax reads no such variable. Did you mean REPLICAX_STEP_TIMEOUT?']
    """
    found = []
    for name, value in sorted(environment.items()):
        if variable := find(name, variables):
            if wrong := variable.problem(value):
                found.append(wrong)
        elif name.startswith(PREFIX) and (meant := meant_by(name, variables)):
            found.append(f"{name} is set, but replicax reads no such variable. Did you mean {meant}?")
    return found


def meant_by(name: str, variables: Iterable[Variable] = VARIABLES) -> str | None:
    """Return the variable whose name is nearly this one, or None. Programs may have variables of their own."""
    names = [variable.name for variable in variables]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.87)), None)
