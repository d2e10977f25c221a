"""A section of the output of `replicax info`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Section:
    """What one part of the command has found.

    Attributes:
        title: its heading.
        data: what it has found, for `--json`.
        rows: the same for people: a label and a text in each row. An empty label continues the row before.
        problems: what is wrong, each with what to do about it.
    """

    title: str
    data: dict[str, object] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def readable_bytes(count: float) -> str:
    """Returns a number of bytes in a unit that keeps it short.

    >>> readable_bytes(900), readable_bytes(16 * 1024**3)
    ('900 bytes', '16.0 GiB')
    """
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
