"""The kinds of chips that there are plans for, with the figures that their maker publishes."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Any

from replicax._base.messages import received
from replicax._base.planning import PlanError

_TOPOLOGY = re.compile(r"(v\d+[a-z]*):(\d+(?:x\d+)*)")
_DEVICES = re.compile(r"(?:cpu:)?(\d+)")
MOST_DEVICES = 8192  # as many as the largest slice of TPUs has; a plan takes longer with each device


@dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Args:
        name: as in the name of a topology.
        memory: bytes of its HBM.
        flops: the most operations in a second, in bfloat16.
        memory_speed: the most bytes of HBM that are read or written in a second.
        link_speed: the most bytes that go to and from other chips in a second, over all links.
        cores: the number of JAX's devices on it.
        most: the grid of the largest slice.
        source: the page with these figures.
    """

    name: str
    memory: float
    flops: float
    memory_speed: float
    link_speed: float
    cores: int
    most: tuple[int, ...]
    source: str


_PAGE = "https://cloud.google.com/tpu/docs/"
_GIB = 2**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * _GIB, 275e12, 1228e9, 2400e9 / 8, 2, (16, 16, 16), f"{_PAGE}v4"),
        Chip("v5e", 16 * _GIB, 197e12, 819e9, 1600e9 / 8, 1, (16, 16), f"{_PAGE}v5e"),
        Chip("v5p", 95 * _GIB, 459e12, 2765e9, 4800e9 / 8, 1, (16, 16, 24), f"{_PAGE}v5p"),
        Chip("v6e", 32 * _GIB, 918e12, 1600e9, 3200e9 / 8, 1, (16, 16), f"{_PAGE}v6e"),
    )
}


@dataclass(frozen=True)
class Topology:
    """Devices to plan for: chips in a grid, or a number of virtual CPU devices.

    Attributes:
        name: as the user names it; "cpu:8" for eight virtual CPU devices.
        size: the number of JAX's devices.
        chip: None for CPU devices.
    """

    name: str
    size: int
    chip: Chip | None

    @property
    def platform(self) -> str:
        """The platform, as JAX names it."""
        return "cpu" if self.chip is None else "tpu"

    @property
    def memory(self) -> float | None:
        """The bytes of memory of a device; None for CPU devices, which share the host's."""
        return None if self.chip is None else self.chip.memory / self.chip.cores


def parse(topology: Any) -> Topology:
    """Returns the topology of this name, or of this number of CPU devices.

    Raises:
        PlanError: there is no such topology, or it has more devices than a plan can have.

    >>> parse("v5p:2x2x4").size, parse(8).name
    (16, 'cpu:8')
    """
    text = topology if isinstance(topology, str) else _digits(topology)
    if (match := _DEVICES.fullmatch(text)) and (digits := match[1].lstrip("0")):
        if len(digits) > len(str(MOST_DEVICES)) or int(digits) > MOST_DEVICES:
            raise PlanError(
                f"A plan has at most {MOST_DEVICES} virtual CPU devices, got {text[:40]}. Plan for fewer: what a "
                "device holds and sends changes little from there on."
            )
        return Topology(f"cpu:{digits}", int(digits), None)
    match = _TOPOLOGY.fullmatch(text)
    grid = [int(side) for side in match[2].split("x")] if match else [0]
    if match is None or match[1] not in CHIPS or not all(grid):
        raise PlanError(
            f"A topology is a kind of TPU and the grid of its chips, such as 'v5e:2x4' or 'v5p:4x4x8', or a number of "
            f"virtual CPU devices, such as 8 or 'cpu:8'; got {received(topology)}. The kinds are {', '.join(CHIPS)}."
        )
    chip = CHIPS[match[1]]
    sides = sorted([1] * (len(chip.most) - len(grid)) + grid)
    if len(sides) > len(chip.most) or any(side > most for side, most in zip(sides, chip.most)):
        most = "x".join(map(str, chip.most))
        raise PlanError(f"There is no {text}: the largest slice of {chip.name} is {chip.name}:{most} ({chip.source}).")
    return Topology(text, math.prod(grid) * chip.cores, chip)


def _digits(topology: Any) -> str:
    """Return a number as text, and an empty text for another object."""
    try:
        number = 0 if isinstance(topology, bool) else operator.index(topology)
    except TypeError:
        return ""
    return str(min(number, 10**40))  # Python refuses to write numbers of more than 4,300 digits
