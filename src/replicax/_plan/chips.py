"""The kinds of chips that there are plans for, with the figures that their maker publishes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from replicax._base.planning import PlanError

_TOPOLOGY = re.compile(r"(v\d+[a-z]*):(\d+(?:x\d+)*)")
_DEVICES = re.compile(r"(?:cpu:)?(\d+)")


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


def parse(topology: str | int) -> Topology:
    """Returns the topology of this name, or of this number of CPU devices.

    Raises:
        PlanError: there is no such topology.

    >>> parse("v5p:2x2x4").size, parse(8).name
    (16, 'cpu:8')
    """
    text = str(topology)
    if (match := _DEVICES.fullmatch(text)) and int(match[1]) > 0 and not isinstance(topology, bool):
        return Topology(f"cpu:{int(match[1])}", int(match[1]), None)
    match = _TOPOLOGY.fullmatch(text)
    grid = [int(side) for side in match[2].split("x")] if match else [0]
    if match is None or match[1] not in CHIPS or not all(grid):
        raise PlanError(
            f"A topology is a kind of TPU and the grid of its chips, such as 'v5e:2x4' or 'v5p:4x4x8', or a number of "
            f"virtual CPU devices, such as 8 or 'cpu:8'; got {topology!r}. The kinds are {', '.join(CHIPS)}."
        )
    chip = CHIPS[match[1]]
    sides = sorted([1] * (len(chip.most) - len(grid)) + grid)
    if len(sides) > len(chip.most) or any(side > most for side, most in zip(sides, chip.most)):
        most = "x".join(map(str, chip.most))
        raise PlanError(f"There is no {text}: the largest slice of {chip.name} is {chip.name}:{most} ({chip.source}).")
    return Topology(text, math.prod(grid) * chip.cores, chip)
