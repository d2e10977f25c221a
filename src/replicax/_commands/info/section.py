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
