"""Benchmarks as a chart: a bar for each, of the parts that a step's time consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from replicax._report import charts
from replicax._report.charts import Chart, Row, Value


class Figures(Protocol):
    """The figures of a benchmark that the chart shows."""

    @property
    def seconds(self) -> Mapping[str, float | None]: ...
    @property
    def spread(self) -> Mapping[str, float]: ...


def chart(title: str, names: Sequence[str], benchmarks: Sequence[Figures]) -> Chart:
    """Returns the chart of benchmarks with these names, in milliseconds.

    The parts of a bar add up to the step of the table. The line at its end is the spread: the range around the median
    in which the middle half of the rounds lies.
    """
    rows = [row for name, one in zip(names, benchmarks) for row in _rows(name, one)]
    said = "; ".join(
        f"{row.group} {row.name}: {', '.join(f'{part} {value.value:.3g}' for part, value in row.values.items())}"
        for row in rows
    )
    return charts.bars(title, f"Milliseconds of a step. {said}.", "ms a step", rows, stacked=True)


def _rows(name: str, one: Figures) -> list[Row]:
    """Returns the bar of a step and, where it was measured, that of the wait for input."""
    ms = {part: None if seconds is None else 1e3 * seconds for part, seconds in one.seconds.items()}
    step, communication, wait = ms["step"] or 0.0, ms["communication"], ms["input"]

    def ending(value: float, end: float, kind: str) -> Value:
        half = 1e3 * one.spread[kind] if kind in one.spread else None
        return Value(value, None if half is None else (max(0.0, end - half), end + half), f"{end:.3g}")

    if communication is None:  # it cannot be taken out of the program
        parts = {"compute and communication": ending(step, step, "step")}
    else:
        communication = min(communication, step)
        parts = {"compute": Value(step - communication), "communication": ending(communication, step, "step")}
    rows = [Row("step", parts, name)]
    if wait is not None:
        rows.append(Row("input wait", {"input wait": ending(wait, wait, "input")}))
    return rows
