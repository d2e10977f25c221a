"""Charts as drawings: bars beside the names of rows.

Values are medians, with a range where there is one. Every series has one colour, and its name stands above the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from replicax._report.drawing import HUES, Drawing, Line, Rect, Text, width_of

Range: TypeAlias = tuple[float, float]
MARGIN = 20.0


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
        self.y = MARGIN + 16
        self.add(Text(MARGIN, self.y, title, 15, bold=True))
        self.y += 16

    def legend(self, names: Sequence[str], hues: Sequence[str] = HUES) -> None:
        """Writes the names of series in their colours, above everything else."""
        x = MARGIN
        for number, name in enumerate(names):
            wide = 18 + width_of(name, 12)
            if x > MARGIN and x + wide > self.width - MARGIN:
                x, self.y = MARGIN, self.y + 18
            hue = hues[number % len(hues)]
            self.add(Rect(x, self.y, 11, 11, fill=hue, radius=2), Text(x + 16, self.y + 10, name, 12, fill="muted"))
            x += wide + 14
        self.y += 26

    def x_axis(
        self, rows: Sequence[Row], most: float, least: float = 0.0, log: bool = False
    ) -> Callable[[float], float]:
        """Returns the function from values to x, between the names of the rows and their notes."""
        left = MARGIN + max(width_of(row.name, 12) for row in rows) + 14
        right = self.width - MARGIN - max(12.0, *(width_of(row.note, 12) + 10 for row in rows))
        low, high = (math.log(least), math.log(most)) if log else (least, most)

        def x(value: float) -> float:
            there = math.log(value) if log else value
            return left + (min(max(there, low), high) - low) / (high - low) * (right - left)

        return x

    def draw_axis(
        self, x: Callable[[float], float], ticks: Sequence[float], top: float, marked: float | None = None
    ) -> None:
        """Draws the axis below the rows, and a thin line at each tick behind them."""
        lines = [
            Line([(x(tick), top), (x(tick), self.y + 4)], "edge" if tick == marked else "faint", 1) for tick in ticks
        ]
        self.shapes[:0] = lines
        for tick in ticks:
            self.add(Text(x(tick), self.y + 18, number(tick), 11, "middle", "muted"))
        self.add(Text((x(ticks[0]) + x(ticks[-1])) / 2, self.y + 36, self._axis_name, 12, "middle", "muted"))
        self.height = self.y + 36 + MARGIN

    def draw_bars(self, row: Row, hues: Mapping[str, str], x: Callable[[float], float], stacked: bool) -> None:
        """Draws the bars of one row."""
        thick, start = 18.0 if stacked or len(hues) == 1 else 13.0, 0.0
        for name, value in row.values.items():
            end = start + value.value
            self.add(Rect(x(start), self.y, max(0.0, x(end) - x(start)), thick, fill=hues[name]))
            self.draw_range(x, value.range, self.y + thick / 2)
            if value.text:
                right = max(end, value.range[1] if value.range else end)
                self.add(Text(x(right) + 6, self.y + thick - 4, value.text, 11, fill="muted"))
            if stacked:
                start = end
            else:
                self.y += thick + 1
        self.y += thick if stacked else 0

    def draw_range(self, x: Callable[[float], float], found: Range | None, y: float) -> None:
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
    chart.y += 4
    ticks = steps(max(max(_end(row, stacked), row.mark or 0.0) for row in rows))
    x, top = chart.x_axis(rows, ticks[-1]), chart.y
    for row in rows:
        if row.group:
            chart.y += 6 if chart.y > top else 0
            chart.add(Text(MARGIN, chart.y + 11, row.group, 12, fill="muted", bold=True))
            chart.y += 20
        began = chart.y
        chart.draw_bars(row, hues, x, stacked)
        middle = (began + chart.y) / 2 + 4
        chart.add(Text(x(0) - 8, middle, row.name, 12, "end"))
        if row.note:
            chart.add(Text(x(ticks[-1]) + 10, middle, row.note, 12, fill="muted"))
        if row.mark is not None:
            chart.add(Line([(x(row.mark), began - 3), (x(row.mark), chart.y + 3)], "ink", 2.5))
        chart.y += 10
    chart.draw_axis(x, ticks, top - 4)
    return chart


def _end(row: Row, stacked: bool) -> float:
    """Returns the largest number of a row's bars and ranges."""
    ends, start = [0.0], 0.0
    for value in row.values.values():
        ends += [start + value.value, value.range[1] if value.range else 0.0]
        start += value.value if stacked else 0.0
    return max(ends)
