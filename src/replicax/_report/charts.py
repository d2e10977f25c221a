"""Charts as drawings: bars and points beside the names of rows, and lines.

Values are medians, with a range where there is one. Every series has one colour, and its name stands above the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from replicax._report.drawing import HUES, Circle, Drawing, Line, Rect, Text, width_of

Range: TypeAlias = tuple[float, float]
_MARGIN = 20.0


@dataclass(frozen=True)
class Value:
    """A number, and the range in which it lies.

    Args:
        value: the number.
        range: the least and the largest; None where they are unknown.
        text: what stands beside it.
    """

    value: float
    range: Range | None = None
    text: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a chart.

    Args:
        name: stands in front of it.
        values: by the name of the series.
        group: a heading for this row and those that follow it.
        mark: a value that is marked by a line, such as a limit.
        note: stands behind the row.
    """

    name: str
    values: dict[str, Value]
    group: str = ""
    mark: float | None = None
    note: str = ""


class Chart(Drawing):
    """A drawing with a horizontal axis.

    Args:
        title: stands above.
        description: for those who cannot see it.
        axis: what the axis counts.
        width: of the drawing.
    """

    def __init__(self, title: str, description: str, axis: str, width: float = 720):
        super().__init__(title, description, width)
        self._axis_name = axis
        self._y = _MARGIN + 16
        self.add(Text(_MARGIN, self._y, title, 15, bold=True))
        self._y += 16

    def legend(self, names: Sequence[str], hues: Sequence[str] = HUES) -> None:
        """Writes the names of series in their colours, above everything else."""
        x = _MARGIN
        for number, name in enumerate(names):
            wide = 18 + width_of(name, 12)
            if x > _MARGIN and x + wide > self.width - _MARGIN:
                x, self._y = _MARGIN, self._y + 18
            hue = hues[number % len(hues)]
            self.add(Rect(x, self._y, 11, 11, fill=hue, radius=2), Text(x + 16, self._y + 10, name, 12, fill="muted"))
            x += wide + 14
        self._y += 26

    def _place(
        self, rows: Sequence[Row], most: float, least: float = 0.0, log: bool = False
    ) -> Callable[[float], float]:
        """Returns the function from values to x, between the names of the rows and their notes."""
        left = _MARGIN + max(width_of(row.name, 12) for row in rows) + 14
        right = self.width - _MARGIN - max(12.0, *(width_of(row.note, 12) + 10 for row in rows))
        low, high = (math.log(least), math.log(most)) if log else (least, most)

        def x(value: float) -> float:
            there = math.log(value) if log else value
            return left + (min(max(there, low), high) - low) / (high - low) * (right - left)

        return x

    def _axis(
        self, x: Callable[[float], float], ticks: Sequence[float], top: float, marked: float | None = None
    ) -> None:
        """Draws the axis below the rows, and a thin line at each tick behind them."""
        lines = [
            Line([(x(tick), top), (x(tick), self._y + 4)], "edge" if tick == marked else "faint", 1) for tick in ticks
        ]
        self.shapes[:0] = lines
        for tick in ticks:
            self.add(Text(x(tick), self._y + 18, number(tick), 11, "middle", "muted"))
        self.add(Text((x(ticks[0]) + x(ticks[-1])) / 2, self._y + 36, self._axis_name, 12, "middle", "muted"))
        self.height = self._y + 36 + _MARGIN

    def _bars_of(self, row: Row, hues: Mapping[str, str], x: Callable[[float], float], stacked: bool) -> None:
        """Draws the bars of one row."""
        thick, start = 18.0 if stacked or len(hues) == 1 else 13.0, 0.0
        for name, value in row.values.items():
            end = start + value.value
            self.add(Rect(x(start), self._y, max(0.0, x(end) - x(start)), thick, fill=hues[name]))
            self._whisker(x, value.range, self._y + thick / 2)
            if value.text:
                right = max(end, value.range[1] if value.range else end)
                self.add(Text(x(right) + 6, self._y + thick - 4, value.text, 11, fill="muted"))
            if stacked:
                start = end
            else:
                self._y += thick + 1
        self._y += thick if stacked else 0

    def _whisker(self, x: Callable[[float], float], found: Range | None, y: float) -> None:
        if found is not None:
            low, high = x(found[0]), x(found[1])
            self.add(Line([(low, y), (high, y)], "ink", 1.5))
            self.add(*(Line([(end, y - 3), (end, y + 3)], "ink", 1.5) for end in (low, high)))


def number(value: float) -> str:
    """Returns a number of an axis as text.

    >>> number(0.5), number(1000.0), number(0.125), number(2000000)
    ('0.5', '1,000', '0.125', '2,000,000')
    """
    return f"{value:,.10g}"


def steps(most: float, count: int = 6) -> list[float]:
    """Returns round numbers from 0 on, of which the last is not less than `most`.

    >>> steps(4.1), steps(0.35), steps(950)
    ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0])
    """
    rough = max(most, 1e-12) / count
    power = math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 5, 10) if factor * 10.0**power >= rough * 0.999) * 10.0**power
    return [round(i * step, 12) for i in range(math.ceil(most / step - 1e-9) + 1)]


def bars(title: str, description: str, axis: str, rows: Sequence[Row], *, stacked: bool, width: float = 720) -> Chart:
    """Returns a chart with a bar for each value of a row: behind each other (`stacked`), or below each other."""
    chart = Chart(title, description, axis, width)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    if len(names) > 1:
        chart.legend(names)
    hues = dict(zip(names, HUES * len(names)))
    chart._y += 4
    ticks = steps(max(max(_end(row, stacked), row.mark or 0.0) for row in rows))
    x, top = chart._place(rows, ticks[-1]), chart._y
    for row in rows:
        if row.group:
            chart._y += 6 if chart._y > top else 0
            chart.add(Text(_MARGIN, chart._y + 11, row.group, 12, fill="muted", bold=True))
            chart._y += 20
        began = chart._y
        chart._bars_of(row, hues, x, stacked)
        middle = (began + chart._y) / 2 + 4
        chart.add(Text(x(0) - 8, middle, row.name, 12, "end"))
        if row.note:
            chart.add(Text(x(ticks[-1]) + 10, middle, row.note, 12, fill="muted"))
        if row.mark is not None:
            chart.add(Line([(x(row.mark), began - 3), (x(row.mark), chart._y + 3)], "ink", 2.5))
        chart._y += 10
    chart._axis(x, ticks, top - 4)
    return chart


def _end(row: Row, stacked: bool) -> float:
    """Returns the largest number of a row's bars and ranges."""
    ends, start = [0.0], 0.0
    for value in row.values.values():
        ends += [start + value.value, value.range[1] if value.range else 0.0]
        start += value.value if stacked else 0.0
    return max(ends)


def points(
    title: str, description: str, axis: str, rows: Sequence[Row], *, ticks: Sequence[float], marked: float
) -> Chart:
    """Returns a chart with a point for each value of a row, on a logarithmic axis with these ticks."""
    chart = Chart(title, description, axis)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    chart.legend(names)
    x, top = chart._place(rows, ticks[-1], ticks[0], log=True), chart._y
    for row in rows:
        if row.group:
            chart._y += 4 if chart._y > top else 0
            chart.add(Text(_MARGIN, chart._y + 13, row.group, 12, bold=True))
            chart._y += 22
        y = chart._y + 8
        chart.add(Line([(x(ticks[0]), y), (x(ticks[-1]), y)], "faint", 1))
        chart.add(Text(x(ticks[0]) - 10, y + 4, row.name, 12, "end", "muted"))
        for name, value in row.values.items():
            chart._whisker(x, value.range, y)
            chart.add(Circle(x(value.value), y, 5, HUES[names.index(name) % len(HUES)]))
        chart._y += 19
    chart._axis(x, ticks, top, marked)
    return chart


def lines(
    title: str, description: str, axes: tuple[str, str], series: dict[str, Sequence[Range]], *, height: float = 320
) -> Chart:
    """Returns a chart with a line for each series of points (x, y), both axes logarithmic."""
    chart = Chart(title, description, axes[0])
    chart.legend(list(series))
    chart.add(Text(_MARGIN, chart._y + 4, axes[1], 12, fill="muted"))
    chart._y += 16
    across = sorted({x for points in series.values() for x, _ in points})
    values = [y for points in series.values() for _, y in points]
    ups = _round_ticks(min(values), max(values))
    left, right, top, bottom = _MARGIN + 52, chart.width - _MARGIN - 12, chart._y, chart._y + height - 130

    def x_of(x: float) -> float:
        return left + (math.log(x / across[0]) / (math.log(across[-1] / across[0]) or 1.0)) * (right - left)

    def y_of(y: float) -> float:
        return bottom - (math.log(y / ups[0]) / math.log(ups[-1] / ups[0])) * (bottom - top)

    for tick in ups:
        chart.add(Line([(left, y_of(tick)), (right, y_of(tick))], "faint", 1))
        chart.add(Text(left - 8, y_of(tick) + 4, number(tick), 11, "end", "muted"))
    for hue, points in zip(HUES, series.values()):
        placed = [(x_of(x), y_of(y)) for x, y in points]
        chart.add(Line(placed, hue, 2.5), *(Circle(x, y, 4, hue) for x, y in placed))
    chart._y = bottom
    chart._axis(x_of, across, top)
    return chart


def _round_ticks(least: float, most: float) -> list[float]:
    """Returns round numbers around a range, each some times as large as the one before.

    >>> _round_ticks(130, 2600), _round_ticks(1.2, 88)
    ([100, 200, 500, 1000, 2000, 5000], [1, 2, 5, 10, 20, 50, 100])
    """
    known = [f * 10**p if p >= 0 else f * 10.0**p for p in range(-9, 10) for f in (1, 2, 5)]
    low = max(tick for tick in known if tick <= least)
    high = min(tick for tick in known if tick >= most and tick > low)
    return [tick for tick in known if low <= tick <= high]
