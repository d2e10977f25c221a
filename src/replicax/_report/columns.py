"""Tables as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Row = Sequence[str] | None  # None is a rule


def columns(rows: Sequence[Row], left: Collection[int] | None = None, rule: str = "-") -> list[str]:
    """Return the lines of a table, in columns that are as wide as their widest cells.

    Args:
        rows: their cells; further cells of a short row are empty.
        left: the columns that begin at the left, where others end at the right; by default all of them.
        rule: the character of rules.

    >>> print("\\n".join(columns([["", "a"], None, ["step", "12 ms"], ["wait"]], left=[0])))
              a
    -----------
    step  12 ms
    wait
    """
    cells = [row for row in rows if row is not None]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if left is None or i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        return "  ".join(padded).rstrip()

    return [rule * (sum(widths) + 2 * (len(widths) - 1)) if row is None else line(row) for row in rows]
