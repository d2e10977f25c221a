"""The plan of a step for one topology, from the compiler's measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replicax._base.planning import PlanError
from replicax._benchmark import hlo_collectives
from replicax._benchmark.hlo_collectives import Collective
from replicax._benchmark.hlo_module import Module
from replicax._plan import schedule
from replicax._plan.chips import Topology
from replicax._plan.least_time import Costs
from replicax._plan.live_buffers import Buffer, largest_buffers
from replicax._plan.schedule import Event
from replicax._plan.source_lines import SourceLines

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
        temporaries: the arrays that exist only during the step.
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
        """The bytes that the compiler adds to the inputs, less the inputs that the step does not use."""
        return self.arguments - self.variables - self.state - self.batch

    @property
    def total(self) -> int:
        """The bytes of all."""
        return self.arguments + self.outputs + self.temporaries + self.code


@dataclass(frozen=True)
class Inputs:
    """The bytes of a step's inputs on a device, and of the arrays that every replica has whole.

    Attributes:
        variables, state, batch: as in `Memory`.
        copies: the bytes of the variables' arrays that are not sharded but can be, by name, each with its optimizer's
            state.
        arguments: for a step of `jax.jit`, the bytes of each argument, by name. The ones that it returns with new
            values are `variables`, and the others `batch`.
        advice: sentences for the user.
    """

    variables: int = 0
    state: int = 0
    batch: int = 0
    copies: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, int] = field(default_factory=dict)
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class TopologyPlan:
    """The needs and the work of a step on one topology.

    Attributes:
        topology: the name.
        replicas: the number of replicas.
        memory: the bytes of each device; None if the compiler refused the step.
        needed: the bytes that a device would need.
        available: the bytes that a device has; None for CPU devices, which share the host's memory.
        collectives: every collective of a step.
        flops: the operations of a step on one device: XLA's count, and the products in further rounds of loops. XLA for
            GPUs counts nothing, so there it is the products alone.
        bytes_moved: the bytes of memory that the operations read and write. For CPU devices it is XLA's count, which
            takes the body of a loop once.
        compile_seconds: the seconds that compiling took here.
        savings: the three arrays that would save most if they were sharded, with their optimizer's state: names, and
            bytes saved on each device.
        error: why the compiler refused the step, None if it did not.
        bounds: the seconds that a step takes at least for "computation", "memory", "links" within a host or a slice,
            and "network" between hosts, each alone; empty for CPU devices, which have no published rates.
        products: the operations of matrix products and convolutions by the type of their factors, for example
            "bfloat16". "tf32" is float32 as GPUs compute it by default.
        largest: the ten largest temporaries at the moment when they take most memory.
        timeline: the operations of a step in the order of the compiler's schedule; empty for CPU devices.
        arguments: for a step of `jax.jit`, the bytes of each argument on a device, by name.
        advice: sentences on how the step would need less.
        layout: where the axes of the mesh lie, for example "data 2x4, model 1x2" for hosts x devices; empty for one
            axis on one host.
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
    products: Mapping[str, float] = field(default_factory=dict)
    largest: tuple[Buffer, ...] = ()
    timeline: tuple[Event, ...] = field(default=(), repr=False)
    arguments: Mapping[str, int] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    layout: str = ""

    @property
    def fits(self) -> bool:
        """Whether a device has the memory that the step needs."""
        return self.error is None and (self.available is None or self.needed <= self.available)

    @property
    def bound(self) -> tuple[str, float] | None:
        """The largest of the bounds, by name and in seconds; None for CPU devices."""
        if not self.bounds:
            return None
        name = max(self.bounds, key=lambda bound: self.bounds[bound])
        return name, self.bounds[name]

    @property
    def scheduled_seconds(self) -> float:
        """The seconds of the timeline: each operation at its least time, one after the other where they wait."""
        return max((event.end for event in self.timeline), default=0.0)

    @property
    def exposed(self) -> float:
        """The bytes of collectives that a device sends while its computation waits, by the timeline."""
        return schedule.exposed_communication(self.timeline)[0]

    @property
    def exposed_seconds(self) -> float:
        """The seconds while the computation waits for collectives, by the timeline."""
        return schedule.exposed_communication(self.timeline)[1]


def report(
    topology: Topology, replicas: int, inputs: Inputs, measured: Mapping[str, Any], layout: str = ""
) -> TopologyPlan:
    """Return the plan for one topology.

    Args:
        topology: the devices that XLA compiled for.
        replicas: the number of replicas.
        inputs: the bytes of the step's inputs.
        measured: the result of `compiler.measure`, or an error.
        layout: see `TopologyPlan`.

    Raises:
        PlanError: XLA refused the step for another reason than its memory.
    """
    available = topology.memory
    savings = _savings(inputs.copies, replicas)
    sizes_of_inputs = {"variables": inputs.variables, "state": inputs.state, "batch": inputs.batch}
    if "error" in measured:
        size, limit = _out_of_memory(measured["error"], sum(sizes_of_inputs.values()))
        if not limit:
            raise PlanError(_does_not_compile(measured["error"], topology))
        return TopologyPlan(
            topology=topology.name,
            replicas=replicas,
            memory=None,
            needed=size,
            available=limit or available,
            collectives=(),
            flops=0.0,
            bytes_moved=0.0,
            compile_seconds=measured["seconds"],
            savings=savings,
            error=measured["error"],
            arguments=inputs.arguments,
            advice=inputs.advice,
            layout=layout,
        )
    sizes, text = measured["memory"], measured["text"]
    memory = Memory(
        **sizes_of_inputs,
        arguments=sizes["arguments"],
        outputs=sizes["outputs"] - sizes["aliased"],
        temporaries=sizes["temporaries"],
        code=sizes["code"],
    )
    module, lines = Module(text), SourceLines(text)
    collectives = tuple(hlo_collectives.collectives(module, topology.size))
    costs = Costs(module, topology.platform)
    cost, once = costs.total(), costs.total(all_rounds=False)
    of_products = sum(cost.products.values())
    flops = measured["flops"] + of_products - sum(once.products.values()) if measured["flops"] else of_products
    moved = measured["bytes"] if topology.chip is None else cost.bytes
    return TopologyPlan(
        topology=topology.name,
        replicas=replicas,
        memory=memory,
        needed=memory.total,
        available=available,
        collectives=collectives,
        flops=flops,
        bytes_moved=moved,
        compile_seconds=measured["seconds"],
        savings=savings,
        bounds=schedule.bounds(topology, collectives, cost.products, moved),
        products=dict(cost.products),
        largest=largest_buffers(module, lines),
        timeline=schedule.timeline(module, topology, lines),
        arguments=inputs.arguments,
        advice=inputs.advice,
        layout=layout,
    )


def _does_not_compile(error: str, topology: Topology) -> str:
    """Return the message about a step that XLA refuses: XLA's line, and the user's where XLA names it."""
    said = " ".join(error.split())[:300] or "it says nothing."
    users = SourceLines(error).line_of(error)
    operation = re.search(r'op_name="([^"]*)"', error)
    where = f" at {users}" if users else f" at {operation[1]}" if operation else ""
    return f"XLA does not compile the step for {topology.name}{where}: {said}"


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
    if (match := whole or temporaries) is None:
        return float(inputs), 0.0
    used, unit, limit, limit_unit = match.groups()
    size = float(used) * _UNITS[unit.upper()] + (0 if whole else inputs)
    return size, float(limit) * _UNITS[limit_unit.upper()]
