"""The timeline of a step: bars in lanes, computation above and collectives below, and their picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from replicax._base.quantities import seconds
from replicax._plan.schedule import Event
from replicax._report.charts import Chart, steps
from replicax._report.drawing import Bars, Line, Rect, Text, width_of

# Words and colours of the kinds of computation. Every other kind of event is a collective.
COMPUTATION = {
    "product": ("matrix products", "blue"),
    "convolution": ("convolutions", "purple"),
    "other": ("other computation", "edge"),
}
OVERLAPPED, EXPOSED = ("overlapped communication", "teal"), ("exposed communication", "red")
CAPTION = "ms, in the order of the compiled program, each operation at its least time"

_WIDTH, _MARGIN, _GAP = 720.0, 20.0, 5.0
_COMPUTATION_HEIGHT, _COLLECTIVE_HEIGHT = 40.0, 18.0
_OVERLAPPED_HEIGHT = 10.0  # less than an exposed part, so that they differ without colours, too
_SHORT = 0.5  # pixels
_BRIEF = 0.03  # of the step: a shorter phase has no name


@dataclass(frozen=True)
class Bar:
    """One operation, or neighbours of one kind that are too short to be told apart.

    Attributes:
        start: in seconds.
        length: the least time of all events together, in seconds.
        exposed: the seconds at the end of the bar while the computation waits.
        kind: of all events.
        events: in their order.
    """

    start: float
    length: float
    exposed: float
    kind: str
    events: tuple[Event, ...]

    @property
    def end(self) -> float:
        """The end, in seconds."""
        return self.start + self.length

    @property
    def exposed_start(self) -> float:
        """The start of the exposed part, in seconds."""
        return self.end - self.exposed


@dataclass(frozen=True)
class Lane:
    """Bars that do not overlap.

    Attributes:
        name: "computation", or a kind of collective; empty for its further lanes.
        bars: in the order of time.
    """

    name: str
    bars: tuple[Bar, ...]

    @property
    def computes(self) -> bool:
        """Whether this is the lane of computation."""
        return self.name == "computation"


def has_bars(events: Sequence[Event]) -> bool:
    """Return whether there is a timeline to draw."""
    return any(event.end > 0 for event in events)


def end_of(events: Sequence[Event]) -> float:
    """Return the seconds of the step."""
    return max(event.end for event in events)


def lanes(events: Sequence[Event], shortest: float) -> list[Lane]:
    """Return the lanes of a timeline: computation, then one kind of collective after the other.

    Args:
        events: of the step.
        shortest: in seconds; neighbours that are shorter are merged.
    """
    ordered = sorted(events, key=lambda event: (event.start, event.end))
    computation = [event for event in ordered if event.kind in COMPUTATION]
    result = [Lane("computation", tuple(_merge(computation, shortest)))]
    for kind in dict.fromkeys(event.kind for event in ordered if event.kind not in COMPUTATION):
        rows: list[list[Event]] = []
        for event in (event for event in ordered if event.kind == kind):
            row = next((row for row in rows if row[-1].end <= event.start), None)
            if row is None:
                rows.append(row := [])
            row.append(event)
        result += [Lane("" if i else kind, tuple(_merge(row, shortest))) for i, row in enumerate(rows)]
    return result


def waits(lanes: Sequence[Lane]) -> list[tuple[float, float]]:
    """Return the start and end of each time while the computation waits, in seconds."""
    return [(bar.exposed_start, bar.end) for lane in lanes for bar in lane.bars if bar.exposed]


def _merge(events: Sequence[Event], shortest: float) -> Iterator[Bar]:
    """Yield the bars of one lane. Groups of short neighbours are sorted by kind, so that every kind keeps its time."""
    group: list[Event] = []
    for event in events:
        short = event.end - event.start < shortest
        near = bool(group) and event.start - group[-1].end < shortest and event.end - group[0].start < 4 * shortest
        if not (short and near):
            yield from _bars(group)
            group = []
        group.append(event)
        if not short:
            yield from _bars(group)
            group = []
    yield from _bars(group)


def _bars(group: Sequence[Event]) -> Iterator[Bar]:
    start = group[0].start if group else 0.0
    for kind in dict.fromkeys(event.kind for event in group):
        events = tuple(event for event in group if event.kind == kind)
        length, exposed = sum(event.end - event.start for event in events), sum(event.exposed for event in events)
        yield Bar(start, length, exposed, kind, events)
        start += length


def totals(events: Sequence[Event]) -> dict[tuple[str, str], float]:
    """Return the seconds of each kind of computation and of communication, by their words and colours."""
    times = {label: _time(events, {kind}) for kind, label in COMPUTATION.items()}
    times[EXPOSED] = sum(event.exposed for event in events)
    times[OVERLAPPED] = _time(events, {event.kind for event in events} - set(COMPUTATION)) - times[EXPOSED]
    order = [*COMPUTATION.values(), OVERLAPPED, EXPOSED]
    return {label: times[label] for label in order if times[label] > 1e-6 * end_of(events)}


def _time(events: Sequence[Event], kinds: set[str]) -> float:
    return sum(event.end - event.start for event in events if event.kind in kinds)


def summary(events: Sequence[Event]) -> str:
    """Return a sentence on how much of the communication is exposed."""
    times = totals(events)
    exposed = times.get(EXPOSED, 0.0)
    total = exposed + times.get(OVERLAPPED, 0.0)
    if not total:
        return "The step has no communication."
    if not exposed:
        return f"All {seconds(total)} of communication overlap with computation."
    share = f"{100 * exposed / total:.0f} %" if exposed > 0.01 * total else "less than 1 %"
    part = f"{seconds(exposed)} ({share})"
    return f"Of {seconds(total)} of communication, {part} are exposed: the computation waits for them."


def phases(events: Sequence[Event]) -> list[tuple[str, float, float]]:
    """Return the phases that JAX's names of operations tell: "forward", "backward" and "update", with start and end.

    XLA moves some operations into another phase. So the two borders are where most of the time agrees with the names.
    """
    named = [event for event in events if event.kind in COMPUTATION and event.operation]
    named.sort(key=lambda event: event.start)
    sums = {phase: [0.0] for phase in ("forward", "backward", "update")}
    for event in named:
        for phase, times in sums.items():
            times.append(times[-1] + (event.end - event.start) * (_phase(event) == phase))
    forward, backward, update = sums.values()
    places = range(len(named) + 1)
    before = list(accumulate((forward[i] - backward[i] for i in places), max))
    last = max(places, key=lambda i: before[i] + backward[i] - update[i])
    first = max(places[: last + 1], key=lambda i: forward[i] - backward[i])
    borders = {"forward": (0, first), "backward": (first, last), "update": (last, len(named))}
    least = _BRIEF * end_of(events)
    if sums["backward"][last] - sums["backward"][first] < least:
        return []
    return [
        (phase, named[start].start, named[stop - 1].end)
        for phase, (start, stop) in borders.items()
        if sums[phase][stop] - sums[phase][start] >= least
    ]


def _phase(event: Event) -> str:
    """Return the phase of an operation; an empty text for one in a loop that has lost the names around it."""
    if "transpose(" in event.operation or "/checkpoint/" in event.operation:
        return "backward"
    return "forward" if "jvp(" in event.operation else "" if "/while/" in event.operation else "update"


def chart(step: str, topology: str, events: Sequence[Event]) -> Chart:
    """Return the picture of a step's timeline on one topology.

    Args:
        step: the function's name.
        topology: its name.
        events: of the step.
    """
    return _Timeline(f"{step} on {topology}: {seconds(end_of(events))} in the order of the compiler", events)


class _Timeline(Chart):
    """Draws from top to bottom; `y` is the start of the next lane."""

    def __init__(self, title: str, events: Sequence[Event]):
        self.end, times = end_of(events), totals(events)
        listed = "; ".join(f"{words}: {seconds(time)}" for (words, _), time in times.items())
        super().__init__(title, f"{summary(events)} {listed}.", CAPTION, _WIDTH)
        self._sentence(summary(events))
        communication = [label for label in times if label in (OVERLAPPED, EXPOSED)]
        for labels in ([label for label in times if label not in communication], communication):
            if labels:
                self.legend([f"{label[0]} {seconds(times[label])}" for label in labels], [hue for _, hue in labels])
                self.y -= 6
        names = {"computation", *(event.kind for event in events if event.kind not in COMPUTATION)}
        self.left, self.right = _MARGIN + max(width_of(name, 12) for name in names) + 10, self.width - _MARGIN
        self.y += 10
        self._phases(phases(events))
        top, rows = self.y, lanes(events, _SHORT / (self.right - self.left) * self.end)
        for lane in rows:
            self._lane(lane, waits(rows))
        ticks = [tick for tick in steps(1e3 * self.end, 8) if tick <= 1e3 * self.end]
        self.draw_axis(lambda tick: self._x(tick / 1e3), ticks, top)

    def _x(self, time: float) -> float:
        return self.left + time / self.end * (self.right - self.left)

    def _sentence(self, text: str) -> None:
        for line in textwrap.wrap(text, int((self.width - 2 * _MARGIN) / width_of("x", 12))):
            self.add(Text(_MARGIN, self.y + 10, line, 12))
            self.y += 18
        self.y += 4

    def _phases(self, named: Sequence[tuple[str, float, float]]) -> None:
        top, bottom = self.y + 16, self.y + 20
        for name, start, end in named:
            x0, x1 = self._x(start) + 1, self._x(end) - 1
            if width_of(name, 11) < x1 - x0:
                self.add(Line([(x0, bottom), (x0, top), (x1, top), (x1, bottom)], "edge", 1))
                self.add(Text((x0 + x1) / 2, top - 5, name, 11, "middle", "muted"))
        self.y += 24 if named else 0

    def _lane(self, lane: Lane, waits: Sequence[tuple[float, float]]) -> None:
        height = _COMPUTATION_HEIGHT if lane.computes else _COLLECTIVE_HEIGHT
        if lane.name:
            self.add(Text(self.left - 10, self.y + height / 2 + 4, lane.name, 12, "end"))
        self.add(Rect(self.left, self.y, self.right - self.left, height, fill="card"))
        if lane.computes:
            self._bars(waits, EXPOSED[1], height, 2)
            for kind, (_, hue) in COMPUTATION.items():
                self._bars([(bar.start, bar.end) for bar in lane.bars if bar.kind == kind], hue, height, height)
        else:
            covered = [(bar.start, bar.exposed_start) for bar in lane.bars if bar.exposed < bar.length]
            self._bars(covered, OVERLAPPED[1], height, _OVERLAPPED_HEIGHT)
            self._bars([(bar.exposed_start, bar.end) for bar in lane.bars if bar.exposed], EXPOSED[1], height, height)
        self.y += height + _GAP

    def _bars(self, times: Sequence[tuple[float, float]], hue: str, lane_height: float, height: float) -> None:
        """Add bars of one colour in the middle of the lane."""
        spans = [(self._x(start), self._x(end) - self._x(start)) for start, end in times]
        if spans:
            self.add(Bars(self.y + (lane_height - height) / 2, height, spans, hue))
