"""The options of `replicax plan`, which the command passes to the process that runs the program."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DEVICES = 256  # the most devices that a program sees: XLA has too few threads to run programs on more of a CPU
TIME_LIMIT = 1800.0  # seconds for one compilation


@dataclass(frozen=True)
class Options:
    """The options of a plan.

    Attributes:
        topologies: their names.
        step: the name of the function that is the step, None for the first that assigns variables.
        picture: the file to draw to, None for none.
        module: whether the program is a module.
        time_limit: the most seconds that one compilation takes.
    """

    topologies: list[str]
    step: str | None = None
    picture: str | None = None
    module: bool = False
    time_limit: float = TIME_LIMIT
