"""The plan of a step for one topology, from what the compiler measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replicax._benchmark import hlo_collectives
from replicax._benchmark.hlo_collectives import Collective
from replicax._plan import operations
from replicax._plan.chips import Topology

# XLA's errors, which name either all that a program needs or its temporaries alone.
_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", re.I)
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", re.I)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """The bytes that a step needs on each device.

    The first three are the sizes of the arrays; the others are the compiler's figures. It pads arrays, so `arguments`
    may be more than the first three together.

    Attributes:
        variables: trainable variables.
        state: the other variables: the optimizer's state, statistics, counters.
        batch: the step's other inputs.
        arguments: all inputs, as the compiler lays them out.
        outputs: results that do not replace an input.
        temporaries: what exists only during the step.
        code: the program.
    """

    variables: int
    state: int
    batch: int
    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def padding(self) -> int:
        """The bytes that the compiler adds to the inputs, less those of inputs that the step does not use."""
        return self.arguments - self.variables - self.state - self.batch

    @property
    def total(self) -> int:
        """The bytes of all."""
        return self.arguments + self.outputs + self.temporaries + self.code


@dataclass(frozen=True)
class Inputs:
    """The bytes of a step's inputs on a device, and of its arrays of which every replica has a copy.

    Attributes:
        variables, state, batch: as in `Memory`.
        copies: the bytes of the variables' arrays that are not sharded but can be, by name, each with its optimizer's
            state.
    """

    variables: int = 0
    state: int = 0
    batch: int = 0
    copies: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TopologyPlan:
    """What a step needs and does on one topology.

    Attributes:
        topology: the name.
        replicas: the number of replicas.
        memory: of each device; None if the compiler refused the step.
        needed: the bytes that a device would need.
        available: the bytes that a device has; None for CPU devices, which share the host's memory.
        collectives: every collective of a step.
        flops: the operations of a step on one device, by XLA's count, and those of matrix products and convolutions
            in further rounds of loops.
        bytes_moved: the bytes that the operations read and write, by XLA's count, which takes the body of a loop once.
        compile_seconds: what compiling took here.
        savings: the three arrays that would save most if they were sharded, with their optimizer's state: names, and
            bytes saved on each device.
        error: why the compiler refused the step, None if it did not.
        bounds: the seconds that a step takes at least for "computation", "memory" and "communication", each alone;
            empty for CPU devices, for which there are no figures.
    """

    topology: str
    replicas: int
    memory: Memory | None
    needed: float
    available: float | None
    collectives: tuple[Collective, ...]
    flops: float
    bytes_moved: float
    compile_seconds: float
    savings: tuple[tuple[str, int], ...]
    error: str | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory that the step needs."""
        return self.error is None and (self.available is None or self.needed <= self.available)

    @property
    def bound(self) -> tuple[str, float] | None:
        """The largest of the bounds, by name and in seconds; None for CPU devices."""
        if not self.bounds:
            return None
        name = max(self.bounds, key=lambda each: self.bounds[each])
        return name, self.bounds[name]


def report(topology: Topology, replicas: int, inputs: Inputs, measured: Mapping[str, Any]) -> TopologyPlan:
    """Returns the plan for one topology.

    Args:
        topology: what was compiled for.
        replicas: the number of replicas.
        inputs: the bytes of what goes into the step.
        measured: what `compiler.measured` says, or an error.
    """
    available = topology.memory
    savings = _savings(inputs.copies, replicas)
    known = {"variables": inputs.variables, "state": inputs.state, "batch": inputs.batch}
    if "error" in measured:
        needed, limit = _out_of_memory(measured["error"], sum(known.values()))
        return TopologyPlan(
            topology.name, replicas, None, needed, limit or available, (), 0.0, 0.0,
            measured["seconds"], savings, measured["error"],
        )  # fmt: skip
    sizes = measured["memory"]
    memory = Memory(
        **known,
        arguments=sizes["arguments"],
        outputs=sizes["outputs"] - sizes["aliased"],
        temporaries=sizes["temporaries"],
        code=sizes["code"],
    )
    found = tuple(hlo_collectives.collectives(measured["text"], topology.size))
    flops = measured["flops"] + operations.of_further_rounds(measured["text"])
    return TopologyPlan(
        topology.name, replicas, memory, memory.total, available, found, flops, measured["bytes"],
        measured["seconds"], savings, None, _bounds(topology, found, flops, measured["bytes"]),
    )  # fmt: skip


def _bounds(topology: Topology, collectives: Sequence[Collective], flops: float, moved: float) -> dict[str, float]:
    """Returns the roofline's bounds: the seconds that a step takes at least, if one thing alone limits it."""
    chip = topology.chip
    if chip is None:
        return {}
    return {
        "computation": flops / (chip.flops / chip.cores),
        "memory": moved / (chip.memory_speed / chip.cores),
        "communication": sum(each.sent for each in collectives) / (chip.link_speed / chip.cores / 2),
    }


def _savings(copies: Mapping[str, int], replicas: int) -> tuple[tuple[str, int], ...]:
    largest = sorted(copies.items(), key=lambda item: -item[1])[:3]
    return tuple((name, size - -(-size // replicas)) for name, size in largest if replicas > 1 and size)


def _out_of_memory(error: str, inputs: int) -> tuple[float, float]:
    """Returns the bytes that XLA needs and has by its error; if that names none, the bytes of the inputs, and 0.

    Args:
        error: the text.
        inputs: the bytes of the inputs.
    """
    whole, temporaries = _OUT_OF_MEMORY.search(error), _TEMPORARIES.search(error)
    if (found := whole or temporaries) is None:
        return float(inputs), 0.0
    used, unit, limit, limit_unit = found.groups()
    needed = float(used) * _UNITS[unit.upper()] + (0 if whole else inputs)
    return needed, float(limit) * _UNITS[limit_unit.upper()]
