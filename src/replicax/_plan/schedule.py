"""The schedule of a compiled program as a timeline: each operation takes its least time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replicax._benchmark.hlo_collectives import Collective, Scheduled, scheduled
from replicax._benchmark.hlo_module import Instruction, Module, called_by, rounds_of
from replicax._plan.chips import Topology
from replicax._plan.least_time import Cost, Costs, links_and_network, seconds_of
from replicax._plan.source_lines import SourceLines

MOST_EVENTS = 20_000  # of a timeline: a loop that has more is drawn as one round that takes as long as all


@dataclass(frozen=True)
class Event:
    """One operation of a step, at its least time.

    Attributes:
        name: the instruction of the compiled program, for example "all-gather-start.3".
        kind: "product", "convolution" or "other" for computation, or a kind of collective.
        start, end: seconds from the start of the step.
        exposed: the seconds while the computation waits for a collective; 0.0 for computation.
        operation: the operation of the user's program, for example "jit(f)/dot_general".
        line: the user's line, for example "train.py:31"; empty if it is unknown.
        size: the bytes that a collective sends, the operations of a product, or else the bytes read and written.
    """

    name: str
    kind: str
    start: float
    end: float
    exposed: float = 0.0
    operation: str = ""
    line: str = ""
    size: float = 0.0

    @property
    def exposed_bytes(self) -> float:
        """The bytes that are sent while the computation waits."""
        return self.size * self.exposed / (self.end - self.start) if self.end > self.start else 0.0


def timeline(module: Module, topology: Topology, lines: SourceLines) -> tuple[Event, ...]:
    """Return the events of a step in the order of their start; none for CPU devices, which have no published rates.

    Computation runs one operation at a time, and so do collectives beside it. A collective starts where the compiler
    has scheduled its start, and the computation waits for its end where the compiler has scheduled that.
    """
    if topology.chip is None:
        return ()
    scheduler = _Scheduler(module, topology, lines)
    scheduler.run(module.entry)
    return tuple(sorted(scheduler.events, key=lambda event: event.start))


class _Scheduler:
    """Plays the schedule of a program.

    Attributes:
        now: the time at which the next computation starts.
        links_free: the time at which the next collective can start.
        events: the operations that have run.
    """

    def __init__(self, module: Module, topology: Topology, lines: SourceLines):
        self._module, self._topology, self._lines = module, topology, lines
        self._costs = Costs(module, topology.platform)
        self._collectives: dict[str, list[Scheduled]] = {}
        self.now = self.links_free = 0.0
        self.events: list[Event] = []

    def run(self, computation: str) -> None:
        """Play one round of a computation."""
        instructions = self._module.computations.get(computation, [])
        if computation not in self._collectives:
            self._collectives[computation] = scheduled(self._module, computation, self._topology.size)
        starting, waiting = dict[int, list[Scheduled]](), dict[int, list[int]]()
        for collective in self._collectives[computation]:
            starting.setdefault(collective.start, []).append(collective)
        for place, instruction in enumerate(instructions):
            for starts in starting.get(place, []):
                waiting.setdefault(starts.end, []).append(len(self.events))
                self._start(instruction, starts.collective)
            self._compute(computation, instructions, instruction)
            for event in waiting.get(place, []):
                self._wait(event)

    def _start(self, instruction: Instruction, collective: Collective) -> None:
        links, network = links_and_network(collective, self._topology)
        start = max(self.now, self.links_free)
        self.links_free = start + max(links, network)
        event = Event(instruction.name, collective.kind, start, self.links_free, size=collective.sent)
        self.events.append(self._describe(event, instruction))

    def _wait(self, event: int) -> None:
        collective = self.events[event]
        if collective.end > self.now:
            exposed = min(collective.end - self.now, collective.end - collective.start)
            self.events[event] = replace(collective, exposed=exposed)
            self.now = collective.end

    def _compute(self, computation: str, instructions: Sequence[Instruction], instruction: Instruction) -> None:
        if instruction.opcode == "while":
            self._loop(instruction, rounds_of(self._module, list(instructions), instruction))
        elif instruction.opcode in ("call", "conditional"):
            for called in called_by(instruction):
                self.run(called)
        elif not instruction.opcode.endswith("-start"):  # other units copy and communicate beside the computation
            cost = self._costs.of(computation, instruction)
            if time := seconds_of(cost, self._topology):
                kind, size = _kind_of(instruction, cost)
                event = Event(instruction.name, kind, self.now, self.now + time, size=size)
                self.now += time
                self.events.append(self._describe(event, instruction))

    def _loop(self, instruction: Instruction, rounds: int) -> None:
        first, began, free = len(self.events), self.now, self.links_free
        for done in range(rounds):
            for called in called_by(instruction):
                self.run(called)
            if rounds > 1 and (len(self.events) - first) * rounds > (done + 1) * MOST_EVENTS:
                self._stretch(first, began, rounds / (done + 1))
                self.links_free = max(free, self.now)
                return

    def _stretch(self, first: int, began: float, factor: float) -> None:
        """Let the events since the start of a loop take the time of all its rounds."""
        for i in range(first, len(self.events)):
            event = self.events[i]
            start, end = (began + (time - began) * factor for time in (event.start, event.end))
            exposed, size = event.exposed * factor, event.size * factor
            self.events[i] = replace(event, start=start, end=end, exposed=exposed, size=size)
        self.now = began + (self.now - began) * factor

    def _describe(self, event: Event, instruction: Instruction) -> Event:
        return replace(event, operation=instruction.operation, line=self._lines.line_of(instruction.text))


def _kind_of(instruction: Instruction, cost: Cost) -> tuple[str, float]:
    """Return the kind of a computation, and its size."""
    if not (operations := sum(cost.products.values())):
        return "other", cost.bytes
    return "convolution" if "__cudnn$conv" in instruction.text else "product", operations


def exposed_communication(events: Sequence[Event]) -> tuple[float, float]:
    """Return the bytes that are sent while the computation waits, and the seconds that it waits."""
    waiting = [event for event in events if event.exposed]
    return sum(event.exposed_bytes for event in waiting), sum(event.exposed for event in waiting)


def bounds(
    topology: Topology, collectives: Sequence[Collective], products: Mapping[str, float], bytes_moved: float
) -> dict[str, float]:
    """Return the seconds that a step takes at least if one part of the device alone limits it.

    Args:
        topology: the devices.
        collectives: the collectives of a step.
        products: the operations of products by the type of their factors.
        bytes_moved: the bytes of memory that a step reads and writes.

    Returns:
        The bounds by "computation", "memory", "links" and "network"; the last only where there are several hosts, and
        none for CPU devices.
    """
    chip = topology.chip
    if chip is None:
        return {}
    busy = [(collective.times, *links_and_network(collective, topology)) for collective in collectives]
    seconds = {
        "computation": sum(count / chip.rate(kind) for kind, count in products.items()),
        "memory": bytes_moved / (chip.memory_speed / chip.cores),
        "links": sum(times * links for times, links, _ in busy),
    }
    return (
        seconds if topology.hosts == 1 else {**seconds, "network": sum(times * network for times, _, network in busy)}
    )
