"""A placement as a drawing: a column for each device, a row for each array, and lines between devices for collectives.

In a row the same colour means the same values.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from replicax._base.quantities import size
from replicax._report import placement_text as in_text
from replicax._report.drawing import HUES, Circle, Drawing, Line, Rect, Shape, Text, shortened, width_of
from replicax._report.placement_data import Collective, Index, Part, Place, PlacedArray, PlacementData

_MOST_ARRAYS = 16
_MOST_COLLECTIVES = 12
_MOST_DEVICES = 16
_LONGEST = 34  # letters of a name or a type
_MARGIN, _TALL, _WIDE, _THIN = 20.0, 28.0, 46.0, 11.0  # of the drawing; of the picture of an array
_LANE = 9.0  # between two lines of one collective


def drawing(placement: PlacementData) -> Drawing:
    """Returns the drawing of a placement."""
    return _Picture(placement).made()


class _Picture:
    """Draws from top to bottom; `y` is where the next row begins."""

    def __init__(self, placement: PlacementData):
        self.placement = placement
        self.places = placement.devices[:_MOST_DEVICES]
        self.shown, self.rest = in_text.listed(placement.arrays, _MOST_ARRAYS)
        texts = [array.text(place.name) for array in self.shown for place in self.places]
        self.wide = max(92.0, *(width_of(text, 11, mono=True) + 16 for text in texts))
        labels = [*(shortened(array.name, _LONGEST) for array in self.shown), *(a.type for a in self.shown)]
        labels += [label for one in placement.collectives[:_MOST_COLLECTIVES] for label in _labels(one)]
        self.left = max(150.0, *(width_of(shortened(label, _LONGEST), 12, mono=True) + 16 for label in labels))
        self.drawing = Drawing(placement.title, _description(placement))
        self.drawing.width = 2 * _MARGIN + self.left + self.wide * len(self.places)
        self.y = _MARGIN

    def made(self) -> Drawing:
        """Returns the whole drawing."""
        self._head()
        groups = dict.fromkeys(array.group for array in self.placement.arrays)
        for group in groups:
            if group:
                self._heading(in_text.GROUPS[group])
            for array in self.shown:
                if array.group == group:
                    self._array(array)
        if self.rest:
            self._line_of_text(f"and {len(self.rest)} smaller arrays")
        self._bytes(list(groups))
        if self.placement.memory:
            self._heading("collectives of a call, in order")
            for number, one in enumerate(self.placement.collectives[:_MOST_COLLECTIVES], 1):
                self._collective(number, one)
            more = len(self.placement.collectives) - _MOST_COLLECTIVES
            if more > 0 or not self.placement.collectives:
                self._line_of_text(f"and {more} more" if more > 0 else "none")
        self.y += 6
        for note in _notes(self.placement):
            self._line_of_text(note)
        self.drawing.height = self.y + _MARGIN
        texts = [shape for shape in self.drawing.shapes if isinstance(shape, Text) and shape.anchor == "start"]
        longest = max(width_of(each.text, each.size, each.mono) + each.x for each in texts)
        self.drawing.width = max(self.drawing.width, longest + _MARGIN)
        return self.drawing

    def _add(self, *shapes: Shape) -> None:
        self.drawing.add(*shapes)

    def _middle(self, column: int) -> float:
        return _MARGIN + self.left + self.wide * (column + 0.5)

    def _head(self) -> None:
        self._add(Text(_MARGIN, self.y + 14, self.placement.title, 15, bold=True))
        self.y += 30
        for column, place in enumerate(self.places):
            middle = self._middle(column)
            self._add(
                Rect(middle - self.wide / 2 + 4, self.y, self.wide - 8, 40, fill="card", stroke="faint", radius=5)
            )
            of_replica = place.replica is not None
            self._add(Text(middle, self.y + (18 if of_replica else 25), place.name, 13, "middle", bold=True))
            if of_replica:
                self._add(Text(middle, self.y + 33, f"replica {place.replica}", 11, "middle", "muted"))
        self.y += 54

    def _heading(self, text: str) -> None:
        self._add(Text(_MARGIN, self.y + 11, text, 12, fill="muted", bold=True))
        self._add(Line([(_MARGIN, self.y + 18), (self.drawing.width - _MARGIN, self.y + 18)], "faint", 1))
        self.y += 28

    def _line_of_text(self, text: str) -> None:
        room = int((self.drawing.width - 2 * _MARGIN) / width_of("x", 12))
        for line in textwrap.wrap(re.sub(r"(\d) ([KMGTP]?i?B)\b", "\\1\u00a0\\2", text), max(room, 40)):
            self._add(Text(_MARGIN, self.y + 12, line, 12, fill="muted"))
            self.y += 18

    def _array(self, array: PlacedArray) -> None:
        tall = _tall(array)
        self._add(Text(_MARGIN, self.y + 14, shortened(array.name, _LONGEST), 12, bold=True, mono=True))
        self._add(Text(_MARGIN, self.y + 30, shortened(array.type, _LONGEST), 11, fill="muted", mono=True))
        colours = _colours(array)
        for column, place in enumerate(self.places):
            middle = self._middle(column)
            part = array.parts.get(place.name)
            if part is not None:
                self._add(*_picture_of(array, part, colours[place.name], middle, self.y + 6 + tall / 2))
            self._add(
                Text(
                    middle,
                    self.y + 20 + tall,
                    array.text(place.name),
                    11,
                    "middle",
                    "ink" if part else "muted",
                    mono=True,
                )
            )
        self.y += max(44.0, tall + 34)

    def _bytes(self, groups: list[str]) -> None:
        most = max(self.placement.bytes.values(), default=0) or 1
        self._add(Line([(_MARGIN, self.y), (self.drawing.width - _MARGIN, self.y)], "faint", 1))
        self._add(Text(_MARGIN, self.y + 19, "bytes", 12, bold=True))
        if len(groups) > 1:
            x = _MARGIN
            for group, fill in zip(groups, ("muted", "edge")):
                self._add(
                    Rect(x, self.y + 27, 9, 9, fill=fill),
                    Text(x + 13, self.y + 35.5, in_text.GROUPS[group], 11, fill="muted"),
                )
                x += 22 + width_of(in_text.GROUPS[group], 11)
        for column, place in enumerate(self.places):
            x, long = self._middle(column) - self.wide / 2 + 8, self.wide - 16
            self._add(Rect(x, self.y + 10, long, 9, fill="card", radius=2))
            for group, fill in zip(groups, ("muted", "edge")):
                part = self.placement.bytes_of(group)[place.name] / most * long
                if part:
                    self._add(Rect(x, self.y + 10, part, 9, fill=fill))
                    x += part
            total = size(self.placement.bytes[place.name])
            self._add(Text(self._middle(column), self.y + 35, total, 11, "middle", mono=True))
        self.y += 50

    def _collective(self, number: int, one: Collective) -> None:
        columns = {place.name: i for i, place in enumerate(self.places)}
        groups = [[columns[name] for name in group if name in columns] for group in one.groups]
        lanes = list(_lanes([group for group in groups if group]))
        names = _labels(one)
        self._add(Text(_MARGIN, self.y + 13, f"{number}  {names[0]}", 12, bold=True))
        self._add(Text(_MARGIN, self.y + 29, shortened(names[1], _LONGEST), 11, fill="muted", mono=True))
        self._add(Text(_MARGIN, self.y + 44, names[2], 11, fill="muted"))
        top = self.y + max(22.0 - _LANE * max((lane for _, lane in lanes), default=0) / 2, 8.0)
        for group, lane in lanes:
            y, hue = top + _LANE * lane, HUES[lane % len(HUES)]
            line = [(self._middle(group[0]), y), (self._middle(group[-1]), y)]
            moves = one.kind == "collective-permute" and len(group) == 2
            self._add(Line(line if moves else [(min(line)), max(line)], hue, 2, arrow=moves))
            self._add(*(Circle(self._middle(column), y, 4, hue) for column in (group[:1] if moves else group)))
        self.y += max(54.0, 30 + _LANE * (1 + max((lane for _, lane in lanes), default=0)))


def _labels(one: Collective) -> tuple[str, str, str]:
    often = f"{one.times} × " if one.times > 1 else ""
    arrays = one.arrays[0] if one.arrays else ""
    more = f" and {len(one.arrays) - 1} more" if len(one.arrays) > 1 else ""
    return f"{often}{one.kind}", arrays + more, size(one.bytes) + (", overlaps" if one.overlaps else "")


def _lanes(groups: Sequence[list[int]]) -> Iterator[tuple[list[int], int]]:
    """Yields each group of columns with a lane in which it crosses no other one."""
    ends: list[int] = []
    for group in groups:
        low, high = min(group), max(group)
        lane = next((i for i, end in enumerate(ends) if end < low), len(ends))
        ends[lane : lane + 1] = [high]
        yield group, lane


def _colours(array: PlacedArray) -> dict[str, str]:
    """Returns a colour for each part; equal parts have the same one."""
    found: dict[object, str] = {}
    colours = {}
    for i, (name, part) in enumerate(array.parts.items()):
        key = ("own", i) if part.index is None else tuple((one.start, one.stop) for one in part.index)
        colours[name] = found.setdefault(key, HUES[len(found) % len(HUES)])
    return colours


def _tall(array: PlacedArray) -> float:
    return _THIN if len(array.shape) < 2 else _TALL


def _picture_of(array: PlacedArray, part: Part, fill: str, x: float, y: float) -> list[Shape]:
    """Returns the outline of an array around a point, in which a part is filled."""
    dimensions = len(array.shape)
    wide, tall = _WIDE if dimensions else _THIN, _tall(array)
    left, top = x - wide / 2, y - tall / 2
    (down0, down1), (along0, along1) = (
        ((0.0, 1.0), (0.0, 1.0)) if part.index is None else _extent(array, part, part.index)
    )
    held = Rect(
        left + along0 * wide,
        top + down0 * tall,
        max(2.0, (along1 - along0) * wide),
        max(2.0, (down1 - down0) * tall),
        fill,
    )
    if along1 <= along0 or down1 <= down0:  # an empty part
        return [Rect(left, top, wide, tall, stroke="edge", dashed=True)]
    return [Rect(left, top, wide, tall, fill="card"), held, Rect(left, top, wide, tall, stroke="edge")]


def _extent(array: PlacedArray, part: Part, index: Index) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns where a part begins and ends in the picture of its array, from top to bottom and from left to right.

    The first dimension goes from top to bottom, or from left to right if it is the only one. Of the others the one is
    shown of which the part is smallest.
    """
    if part.flat:
        total = max(1, _product(array.shape))
        ranges = [(index[0].start / total, index[0].stop / total)]
    else:
        ranges = [(one.start / size, one.stop / size) if size else (0.0, 0.0) for one, size in zip(index, array.shape)]
    if len(array.shape) < 2:
        return (0.0, 1.0), (ranges[0] if ranges else (0.0, 1.0))
    return ranges[0], min(ranges[1:], key=lambda pair: pair[1] - pair[0], default=(0.0, 1.0))


def _product(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _notes(placement: PlacementData) -> list[str]:
    notes = [line for line in in_text.notes(placement, collectives=False) if line]
    return [*notes, "In a row the same colour means the same values."]


def _description(placement: PlacementData) -> str:
    """Returns what the picture shows, for those who cannot see it."""
    places = ", ".join(place.name for place in placement.devices[:_MOST_DEVICES])
    lines = [f"Columns are {places}."]
    for array in in_text.listed(placement.arrays, _MOST_ARRAYS)[0]:
        parts = ", ".join(f"{_said(array, place)}" for place in placement.devices[:_MOST_DEVICES])
        lines.append(f"{array.name} {array.type}: {parts}.")
    for i, one in enumerate(placement.collectives[:_MOST_COLLECTIVES], 1):
        kind, arrays, count = _labels(one)
        lines.append(f"Collective {i}: {kind} of {arrays}, {count}, {in_text.among(one, placement)}.")
    return " ".join(lines)


def _said(array: PlacedArray, place: Place) -> str:
    return f"{array.text(place.name)} on {place.name}"
