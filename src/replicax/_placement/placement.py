"""`Placement`: which part of which array lies on which device, as data, as text and as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from replicax._placement.arrays import Place, PlacedArray


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled step.

    Attributes:
        kind: such as "all-reduce".
        arrays: the dtype and the shape of each array that it carries, such as "float32[256, 64]".
        bytes: of all that it works on, on one device: what goes into an all-reduce, what comes out of an all-gather.
        groups: the names of the devices that take part together. For a collective-permute, pairs of a device that
            sends and one that receives.
        times: how often it runs in a call, as far as the program's loops say how often they run.
        overlaps: whether other operations run between its start and its end.
        source: the operation of the program that it belongs to; empty where XLA does not say.
    """

    kind: str
    arrays: tuple[str, ...]
    bytes: int
    groups: tuple[tuple[str, ...], ...]
    times: int = 1
    overlaps: bool = False
    source: str = ""


@dataclass(frozen=True)
class Placement:
    """Which part of which array lies on which device, as `Strategy.visualize` and `show` return it.

    `str` of it is a table. In a notebook it is a picture. `rich.print` and `print` show the same text.

    Attributes:
        title: what is shown: the strategy, and of `show` the step.
        devices: this process's devices in order, and the other places that hold an array, such as the host.
        arrays: the arrays in order, each with its parts.
        collectives: of `show`: those of the compiled step, in the order in which they start.
        memory: of `show`: the bytes that the compiled step takes on each device, by XLA: "arguments", "results" (those
            that do not take the place of arguments), "temporaries" and, where XLA says it, "peak". Empty otherwise.
        other_devices: how many of the strategy's devices belong to other processes.
    """

    title: str
    devices: tuple[Place, ...]
    arrays: tuple[PlacedArray, ...]
    collectives: tuple[Collective, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    other_devices: int = 0

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of the arrays on each device."""
        return self.bytes_of()

    def bytes_of(self, group: str | None = None) -> dict[str, int]:
        """Returns the bytes of the arrays on each device.

        Args:
            group: "input" or "variable" for these arrays of `show` alone.
        """
        found = dict.fromkeys((place.name for place in self.devices), 0)
        for array in self.arrays:
            for name, part in array.parts.items() if group in (None, array.group) else ():
                found[name] += part.bytes
        return found

    @property
    def total_bytes(self) -> int:
        """The bytes of the arrays on the devices of all processes."""
        return sum(array.bytes + array.elsewhere for array in self.arrays)

    def __getitem__(self, name: str) -> PlacedArray:
        """Returns the array with this name.

        Raises:
            KeyError: there is none.
        """
        found = [array for array in self.arrays if array.name == name]
        if not found:
            raise KeyError(f"There is no array {name!r}; there are {', '.join(array.name for array in self.arrays)}.")
        return found[0]

    def text(self, width: int | None = None, arrays: int | None = 30, lines: bool | None = None) -> str:
        """Returns it as a table, with a row for each array and a column for each device.

        Args:
            width: the number of characters in a line; by default that of the terminal, or 120. Devices that do not fit
                have a table of their own below.
            arrays: how many arrays are listed, the largest of them; None for all.
            lines: whether to draw rules with the characters of boxes; by default where the output can show them.
        """
        from replicax._placement import text

        return text.text(self, width, arrays, lines)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def svg(self) -> str:
        """Returns it as a picture in the format SVG, which has its own colours for light and dark pages."""
        from replicax._placement import picture

        return picture.drawing(self).svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file.

        Args:
            path: the file. With the ending ".svg" it needs no library, with ".png" and others of matplotlib's it needs
                matplotlib.

        Raises:
            InvalidArgumentError: nothing can write a file with that ending.
            ImportError: matplotlib is not installed.
        """
        from replicax._placement import picture

        picture.drawing(self).save(path)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg()}</div>'

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]


def titled(strategy: object, replicas: int) -> str:
    """Returns the name of a strategy's class, with the number of its replicas."""
    return f"{type(strategy).__name__.removeprefix('_')}, {replicas} replica{'s' * (replicas > 1)}"
