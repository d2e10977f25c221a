"""Numbers of bytes, of operations and of seconds as text."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float) -> str:
    """Returns a number of bytes as text.

    >>> size(1536), size(3 * 2**30), size(-12)
    ('1.50 KiB', '3.00 GiB', '-12 B')
    """
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def number(count: float) -> str:
    """Returns a large number as text.

    >>> number(2.5e12), number(31)
    ('2.50 T', '31')
    """
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E")).rstrip()


def seconds(time: float) -> str:
    """Returns a time as text.

    >>> seconds(0.00125), seconds(3.0)
    ('1.25 ms', '3.00 s')
    """
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if time * f >= 1), ("µs", 1e6))
    return f"{time * factor:.2f} {unit}"


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    if count < 0:
        return f"-{_scaled(-count, base, units)}"
    place = 0
    while count >= base and place < len(units) - 1:
        count, place = count / base, place + 1
    return f"{count:.0f} {units[0]}" if place == 0 else f"{count:.2f} {units[place]}"
