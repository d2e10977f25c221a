"""A placement as text: a row for each array, a column for each device."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from replicax._base.quantities import size
from replicax._report.columns import Row, columns
from replicax._report.placement_data import Collective, Place, PlacedArray, PlacementData

GROUPS = {"input": "inputs", "variable": "variables"}
_MOST_DEVICES = 16  # that are shown; further ones are alike


def text(placement: PlacementData, width: int | None, arrays: int | None, lines: bool | None) -> str:
    """Returns the text of `Placement.text`."""
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    if lines is None:
        lines = can_show(getattr(sys.stdout, "encoding", None))
    shown, rest = listed(placement.arrays, arrays)
    left = [row[:2] if row else None for row in _rows(placement, (), shown, rest)]
    of_devices = [
        [row[2] if row else "" for row in _rows(placement, (place,), shown, rest)]
        for place in placement.devices[:_MOST_DEVICES]
    ]
    parts = [placement.title, ""]
    for block in _blocks(left, of_devices, width):
        rows = [None if row is None else [*row, *(column[i] for column in block)] for i, row in enumerate(left)]
        parts += [*columns(rows, rule="─" if lines else "-"), ""]
    parts += notes(placement)
    return "\n".join(parts).rstrip()


def can_show(encoding: str | None) -> bool:
    """Returns whether characters that draw boxes can be written in an encoding."""
    try:
        return "─".encode(encoding or "ascii") != b""
    except (UnicodeEncodeError, LookupError):
        return False


def listed(arrays: Sequence[PlacedArray], most: int | None) -> tuple[list[PlacedArray], list[PlacedArray]]:
    """Returns the largest arrays, in their order, and the others."""
    largest = sorted(range(len(arrays)), key=lambda i: -arrays[i].bytes)[:most]
    return [arrays[i] for i in sorted(largest)], [arrays[i] for i in range(len(arrays)) if i not in set(largest)]


def _rows(
    placement: PlacementData, places: Sequence[Place], shown: list[PlacedArray], rest: list[PlacedArray]
) -> Iterator[Row]:
    """Yields the rows of the table: name and type of an array, and its part on each of some devices."""
    yield ["", "", *(place.name for place in places)]
    if any(place.replica is not None for place in placement.devices):
        yield ["", "", *("" if place.replica is None else f"replica {place.replica}" for place in places)]
    yield None
    groups = list(dict.fromkeys(array.group for array in placement.arrays))
    for group in groups:
        if group:
            yield [GROUPS[group], "", *("" for _ in places)]
        for array in (array for array in shown if array.group == group):
            yield [_indented(array.name, group), array.type, *(array.text(place.name) for place in places)]
        if others := [array for array in rest if array.group == group]:
            sums = (sum(each.parts[p.name].bytes for each in others if p.name in each.parts) for p in places)
            yield [_indented(f"{len(others)} smaller ones", group), "", *map(size, sums)]
    yield None
    for group in groups if len(groups) > 1 else ():
        yield [f"{GROUPS[group]}, bytes", "", *(size(placement.bytes_of(group)[place.name]) for place in places)]
    yield ["all bytes" if len(groups) > 1 else "bytes", "", *(size(placement.bytes[place.name]) for place in places)]


def _indented(name: str, group: str) -> str:
    return f"  {name}" if group else name


def _blocks(left: Sequence[Row], of_devices: list[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Yields the columns of devices that fit beside each other."""
    used = sum(max((len(row[i]) for row in left if row), default=0) + 2 for i in range(2))
    block: list[list[str]] = []
    room = width - used
    for column in of_devices:
        wide = max(map(len, column)) + 2
        if block and room < wide:
            yield block
            block, room = [], width - used
        block.append(column)
        room -= wide
    yield block


def notes(placement: PlacementData, collectives: bool = True) -> list[str]:
    """Returns what is to be said below the table: totals, the program's memory and its collectives."""
    lines = [f"{len(placement.arrays)} arrays, {size(placement.total_bytes)} on all devices together"]
    if len(placement.arrays) == 1:
        lines = [f"{size(placement.total_bytes)} on all devices together"]
    if placement.other_devices:
        here = sum(place.replica is not None for place in placement.devices)
        lines[0] += f", of which {here} are here and {placement.other_devices} belong to other processes"
    if (hidden := len(placement.devices) - _MOST_DEVICES) > 0:
        lines.append(f"{hidden} more devices are not shown: {placement.devices[-1].name} is the last one")
    if placement.memory:
        named = (f"{name} {size(count)}" for name, count in placement.memory.items())
        lines.append(f"memory of the program on each device, by XLA: {', '.join(named)}")
        lines += ["", *_collectives(placement)] if collectives else []
    return lines


def _collectives(placement: PlacementData) -> list[str]:
    found = placement.collectives
    if not found:
        return ["The program has no collectives."]
    number = len(str(len(found)))
    described = [[f"  {i:{number}}", *described_parts(each, placement)] for i, each in enumerate(found, 1)]
    return ["collectives of a call, in order", *columns(described)]


def described_parts(one: Collective, placement: PlacementData) -> list[str]:
    """Returns what there is to say of a collective: kind, arrays, bytes, devices."""
    arrays = ", ".join(one.arrays[:2]) + (f" and {len(one.arrays) - 2} more" if len(one.arrays) > 2 else "")
    often = f"{one.times} × " if one.times > 1 else ""
    beside = "overlaps" if one.overlaps else ""
    return [f"{often}{one.kind}", arrays, size(one.bytes), among(one, placement), beside]


def among(one: Collective, placement: PlacementData) -> str:
    """Returns which devices take part in a collective, as text."""
    count = sum(place.replica is not None for place in placement.devices) + placement.other_devices
    if one.kind == "collective-permute":
        pairs = ", ".join(" to ".join(pair) for pair in one.groups[:4])
        return f"from {pairs}" + (" and so on" if len(one.groups) > 4 else "")
    if len(one.groups) == 1 and len(one.groups[0]) == count:
        return f"among all {count} devices"
    groups = "; ".join(_joined(group) for group in one.groups[:4])
    return f"among {groups}" + (f" and {len(one.groups) - 4} more groups" if len(one.groups) > 4 else "")


def _joined(names: Sequence[str]) -> str:
    few = names if len(names) <= 4 else [*names[:3], "...", names[-1]]
    return ", ".join(few)
