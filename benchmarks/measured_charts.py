"""Charts of measurements alone: points on a logarithmic axis, and lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from replicax._report.charts import MARGIN, Chart, Range, Row, number
from replicax._report.drawing import HUES, Circle, Line, Text


def points(
    title: str, description: str, axis: str, rows: Sequence[Row], *, ticks: Sequence[float], marked: float
) -> Chart:
    """Returns a chart with a point for each value of a row, on a logarithmic axis with these ticks."""
    chart = Chart(title, description, axis)
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    chart.legend(names)
    x, top = chart.x_axis(rows, ticks[-1], ticks[0], log=True), chart.y
    for row in rows:
        if row.group:
            chart.y += 4 if chart.y > top else 0
            chart.add(Text(MARGIN, chart.y + 13, row.group, 12, bold=True))
            chart.y += 22
        y = chart.y + 8
        chart.add(Line([(x(ticks[0]), y), (x(ticks[-1]), y)], "faint", 1))
        chart.add(Text(x(ticks[0]) - 10, y + 4, row.name, 12, "end", "muted"))
        for name, value in row.values.items():
            chart.draw_range(x, value.range, y)
            chart.add(Circle(x(value.value), y, 5, HUES[names.index(name) % len(HUES)]))
        chart.y += 19
    chart.draw_axis(x, ticks, top, marked)
    return chart


def lines(
    title: str, description: str, axes: tuple[str, str], series: dict[str, Sequence[Range]], *, height: float = 320
) -> Chart:
    """Returns a chart with a line for each series of points (x, y), both axes logarithmic."""
    chart = Chart(title, description, axes[0])
    chart.legend(list(series))
    chart.add(Text(MARGIN, chart.y + 4, axes[1], 12, fill="muted"))
    chart.y += 16
    across = sorted({x for points in series.values() for x, _ in points})
    values = [y for points in series.values() for _, y in points]
    ups = _round_ticks(min(values), max(values))
    left, right, top, bottom = MARGIN + 52, chart.width - MARGIN - 12, chart.y, chart.y + height - 130

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
    chart.y = bottom
    chart.draw_axis(x_of, across, top)
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
