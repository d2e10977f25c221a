"""`Benchmark`: the figures of a benchmark as a table, and several side by side."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from typing import Any

from replicax._report import charts
from replicax._report.charts import Chart, Row, Value
from replicax._report.columns import columns

TIMES = {
    "step": "a step",
    "compute": "compute",
    "communication": "communication",
    "input": "input wait",
    "dispatch": "dispatch",
}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Where the time and the memory of a step go, as `strategy.benchmark` has measured it.

    `str` of it is a table; `rich.print` shows a nicer one.

    Attributes:
        step: the name of the function.
        strategy: the class of the strategy.
        replicas: how many there are, on all workers together.
        devices: the names of this process's devices that the step runs on.
        worker: the number of the worker that measured, 0 on one machine.
        rounds, steps: how many rounds of how many steps the medians are of.
        seconds: "step", "compute", "communication", "input" and "dispatch", as `Strategy.benchmark` explains them. None
            where it was not measured: without a dataset there is no "input", and where the communication cannot be
            taken out of the program, neither "compute" nor "communication".
        spread: for those that were measured in several rounds, half of the range in which the middle half of the rounds
            lies. A time that is not larger than its spread tells little: take more rounds, or a machine that does
            nothing else.
        bytes_per_device: "variables", and of the program's memory "arguments", "outputs", "in place" (of the outputs,
            what takes the place of arguments) and "temporary".
        flops: floating point operations of a device in a step, as XLA counts them; None where it does not.
        page_faults: how many pages the system gives the process in a step; None where it does not tell.
        collectives: "kind", number of "arrays" and "bytes" of each collective in the compiled program.
        collectives_left: how many of them could not be taken out, and count as compute.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
    >>> figures = strategy.benchmark(step, jnp.ones(3), rounds=2, steps=2)
    >>> isinstance(figures, rx.Benchmark), figures.replicas, figures.seconds["step"] > 0
    (True, 1, True)
    """

    step: str
    strategy: str
    replicas: int
    devices: list[str]
    worker: int
    rounds: int
    steps: int
    seconds: dict[str, float | None]
    spread: dict[str, float]
    bytes_per_device: dict[str, int]
    flops: float | None
    page_faults: float | None
    collectives: list[dict[str, Any]]
    collectives_left: int

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as numbers, strings, lists and dicts, for JSON; `Benchmark(**figures)` makes it again.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
        >>> figures = strategy.benchmark(step, jnp.ones(3), rounds=2, steps=2)
        >>> figures.as_dict()["rounds"], rx.Benchmark(**figures.as_dict()) == figures
        (2, True)
        """
        return dataclasses.asdict(self)

    def beside(self, *others: Benchmark) -> Benchmarks:
        """Returns this one and others, such as those of more replicas, as columns of one table.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
        >>> small, large = (strategy.benchmark(step, jnp.ones(size), rounds=2, steps=2) for size in (10, 1000))
        >>> len(small.beside(large).figures)
        2
        """
        return Benchmarks((self, *others))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture to a file; see `Benchmarks.save`.

        >>> import os, tempfile, jax.numpy as jnp, replicax as rx
        >>> path, strategy = tempfile.mkdtemp() + "/step.svg", rx.OneDeviceStrategy("cpu:0")
        >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
        >>> strategy.benchmark(step, jnp.ones(3), rounds=2, steps=2).save(path)
        >>> os.path.exists(path)
        True
        """
        Benchmarks((self,)).save(path)

    def _repr_html_(self) -> str:
        return Benchmarks((self,))._repr_html_()

    def __str__(self) -> str:
        return str(Benchmarks((self,)))

    def __rich__(self) -> object:
        return Benchmarks((self,)).__rich__()


class Benchmarks:
    """Benchmarks side by side, such as those of 1 replica and of several.

    Attributes:
        figures: the benchmarks, each of which is a column.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
    >>> small, large = (strategy.benchmark(step, jnp.ones(size), rounds=2, steps=2) for size in (10, 1000))
    >>> print(rx.Benchmarks([small, large]))
    function, OneDeviceStrategy
                           1 replica  1 replica
    a step                ...
    a step, of the first  ...
    ...
    arguments, a device         40 B       4 kB
    ...
    """

    def __init__(self, figures: Sequence[Benchmark]):
        self.figures = tuple(figures)

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict with the dicts of the benchmarks under "figures".

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
        >>> figures = strategy.benchmark(step, jnp.ones(3), rounds=2, steps=2)
        >>> [one["replicas"] for one in rx.Benchmarks([figures]).as_dict()["figures"]]
        [1]
        """
        return {"figures": [one.as_dict() for one in self.figures]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a picture to an SVG file: a bar for each step, whose parts add up to it, and the spread at its end.

        Args:
            path: the file, with the ending ".svg".

        Raises:
            InvalidArgumentError: the file has another ending than ".svg", or there is no such folder.

        >>> import os, tempfile, jax.numpy as jnp, replicax as rx
        >>> path, strategy = tempfile.mkdtemp() + "/steps.svg", rx.OneDeviceStrategy("cpu:0")
        >>> step = rx.function(lambda x: strategy.run(lambda x: jnp.sum(x * x), args=(x,)))
        >>> figures = [strategy.benchmark(step, jnp.ones(size), rounds=2, steps=2) for size in (10, 1000)]
        >>> rx.Benchmarks(figures).save(path)
        >>> os.path.exists(path)
        True
        """
        self._chart().save(path)

    def _repr_html_(self) -> str:
        return self._chart().svg()

    def _chart(self) -> Chart:
        return chart(self._title(), self._names(), self.figures)

    def _title(self) -> str:
        return ", ".join(dict.fromkeys([*(one.step for one in self.figures), *(one.strategy for one in self.figures)]))

    def _names(self) -> list[str]:
        """Returns a name for each benchmark: the number of its replicas, and what else tells it from the others."""
        names = [f"{one.replicas} replica{'s' * (one.replicas > 1)}" for one in self.figures]
        for attribute in ("strategy", "step"):
            values = [getattr(one, attribute) for one in self.figures]
            if len(set(values)) > 1:
                names = [f"{value}, {name}" for value, name in zip(values, names)]
        return names

    def _rows(self) -> list[list[str]]:
        """Returns the table: a head, and rows of a name and a text for each benchmark."""
        all_of_them = self.figures
        rows = [["", *self._names()]]
        for key, name in TIMES.items():
            if any(one.seconds[key] is not None for one in all_of_them):
                rows.append([name, *(_time(one.seconds[key], one.spread.get(key)) for one in all_of_them)])
        if len(all_of_them) > 1:
            first = all_of_them[0].seconds["step"]
            rows.insert(2, ["a step, of the first", *(_ratio(one.seconds["step"], first) for one in all_of_them)])
        for key in dict.fromkeys(key for one in all_of_them for key in one.bytes_per_device):
            rows.append([f"{key}, a device", *(_bytes(one.bytes_per_device.get(key)) for one in all_of_them)])
        if any(one.flops is not None for one in all_of_them):
            rows.append(["operations, a device", *(_count(one.flops) for one in all_of_them)])
        if any(one.page_faults is not None for one in all_of_them):
            rows.append(["page faults", *(_count(one.page_faults) for one in all_of_them)])
        for kind in sorted({each["kind"] for one in all_of_them for each in one.collectives}):
            rows.append([kind, *(_sent(one, kind) for one in all_of_them)])
        return rows

    def _notes(self) -> list[str]:
        rounds = dict.fromkeys(f"{one.rounds} rounds of {one.steps} steps" for one in self.figures)
        notes = [f"medians of {', '.join(rounds)} ± spread"]
        for one in self.figures:
            if one.collectives_left:
                notes.append(
                    f"{one.replicas} replicas: {one.collectives_left} of {len(one.collectives)} collectives, which XLA "
                    "has put in itself, cannot be taken out and count as compute."
                )
        return notes

    def __str__(self) -> str:
        return "\n".join([self._title(), *columns(self._rows(), left=[0]), *self._notes()])

    def __rich__(self) -> object:
        table = importlib.import_module("rich.table").Table(
            title=self._title(), caption="\n".join(self._notes()), min_width=40
        )
        head, *rows = self._rows()
        for name in head:
            table.add_column(name, justify="right" if name else "left")
        for row in rows:
            table.add_row(*row)
        return table


def _time(seconds: float | None, spread: float | None) -> str:
    if seconds is None:
        return "-"
    unit, scale = ("ms", 1e3) if max(seconds, spread or 0) >= 1e-3 else ("µs", 1e6)
    digits = 2 if unit == "ms" and seconds < 0.1 else 0
    sides = "" if spread is None else f" ±{scale * spread:,.{digits}f}"
    return f"{scale * seconds:,.{digits}f}{sides} {unit}"


def _ratio(seconds: float | None, first: float | None) -> str:
    return f"{seconds / first:.2f}" if seconds and first else "-"


def _bytes(number: int | None) -> str:
    if number is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 100 * size else f"{number / size:,.0f} {unit}"
    return f"{number} B"


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number < 1e7 else f"{number:.3g}"


def _sent(figures: Benchmark, kind: str) -> str:
    sizes = [each["bytes"] for each in figures.collectives if each["kind"] == kind]
    return f"{len(sizes)} of {_bytes(sum(sizes))}" if sizes else "none"


def chart(title: str, names: Sequence[str], benchmarks: Sequence[Benchmark]) -> Chart:
    """Returns the chart of benchmarks with these names, in milliseconds.

    The parts of a bar add up to the step of the table. The line at its end is the spread: the range around the median
    in which the middle half of the rounds lies.
    """
    rows = [row for name, one in zip(names, benchmarks) for row in bars_of(name, one)]
    said = "; ".join(
        f"{row.group} {row.name}: {', '.join(f'{part} {value.value:.3g}' for part, value in row.values.items())}"
        for row in rows
    )
    return charts.bars(title, f"Milliseconds of a step. {said}.", "ms a step", rows, stacked=True)


def bars_of(name: str, one: Benchmark) -> list[Row]:
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
