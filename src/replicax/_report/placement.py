"""`Placement`: which part of which array lies on which device, as data, as text and as a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass

from replicax._report import placement_picture, placement_text
from replicax._report.placement_data import PlacedArray, PlacementData


@dataclass(frozen=True, repr=False)
class Placement(PlacementData):
    """Which part of which array lies on which device, as `Strategy.visualize` and `show` return it.

    `str` of it is a table. In a notebook it is a picture.

    Attributes:
        title: what is shown: the strategy, and of `show` the step.
        devices: this process's devices in order, and the other places that hold an array, such as the host.
        arrays: the arrays in order, each with its parts.
        collectives: of `show`: those of the compiled step, in the order in which they start.
        memory: of `show`: the bytes that the compiled step takes on each device, by XLA: "arguments", "results" (those
            that do not take the place of arguments), "temporaries" and, where XLA says it, "peak". Empty otherwise.
        other_devices: how many of the strategy's devices belong to other processes.

    >>> import jax.numpy as jnp, replicax as rx
    >>> placement = rx.MirroredStrategy(["GPU:0", "GPU:1"]).visualize({"x": jnp.ones((4, 3))})
    >>> isinstance(placement, rx.Placement), [array.name for array in placement.arrays]
    (True, ['x'])
    """

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

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable([1.0, 2.0], name="v")
        >>> print(strategy.visualize(v).text(width=80, lines=False))
        MirroredStrategy, 2 replicas
        <BLANKLINE>
                           GPU:0      GPU:1
                           replica 0  replica 1
        ---------------------------------------
        v      float32[2]  whole      whole
        ---------------------------------------
        bytes              8 B        8 B
        <BLANKLINE>
        16 B on all devices together
        """
        return placement_text.text(self, width, arrays, lines)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def svg(self) -> str:
        """Returns it as a picture in the format SVG, which has its own colours for light and dark pages.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.OneDeviceStrategy("GPU:0").visualize(jnp.ones(3)).svg()[:4]
        '<svg'
        """
        return placement_picture.drawing(self).svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an SVG file.

        Args:
            path: the file, with the ending ".svg".

        Raises:
            InvalidArgumentError: the file has another ending than ".svg", or there is no such folder.

        >>> import os, tempfile, jax.numpy as jnp, replicax as rx
        >>> path = tempfile.mkdtemp() + "/placement.svg"
        >>> rx.OneDeviceStrategy("GPU:0").visualize(jnp.ones(3)).save(path)
        >>> os.path.exists(path)
        True
        """
        placement_picture.drawing(self).save(path)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg()}</div>'

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]
