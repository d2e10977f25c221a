"""Reads the text of a compiled program: its collectives, their bytes, and whether they overlap with computation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from replicax._benchmark.hlo import KINDS, arrays_of, bytes_of
from replicax._benchmark.hlo_module import Instruction, Module, called_by, rounds_of

_COMPUTES = {"fusion", "dot", "convolution", "reduce", "reduce-window", "scatter", "gather", "sort", "while", "call"}


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as often as it runs in a step.

    Attributes:
        kind: such as "all-reduce".
        bytes: of all that it works on, on one device: what goes into an all-reduce, what comes out of an all-gather.
        devices: the number of devices in each group.
        overlaps: whether other operations run between its start and its end.
        times: how often it runs in a step, as far as the program's loops say how often they run.
        source: the operation of the user's program that it belongs to, empty where the compiler does not say.
        arrays: the dtype, in XLA's short form, and the shape of each array that comes out of it on one device.
        groups: the numbers of the devices that take part together. For a collective-permute, the pairs of a device
            that sends and one that receives.
    """

    kind: str
    bytes: int
    devices: int
    overlaps: bool
    times: int = 1
    source: str = ""
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def sent(self) -> float:
        """The bytes that a device sends, where they go round in a ring."""
        share = (self.devices - 1) / self.devices
        return self.bytes * self.times * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def collectives(program: str | Module, devices: int) -> list[Collective]:
    """Returns the collectives of a compiled program, in the order in which they start.

    Args:
        program: its text, as `compiled.as_text()` gives it, or its module.
        devices: how many devices it runs on.
    """
    module = Module(program) if isinstance(program, str) else program
    return list(_with_called(module, module.entry, devices, 1))


@dataclass(frozen=True)
class Scheduled:
    """A collective at its place in a computation.

    Attributes:
        start: the place of the instruction that starts it.
        end: the place of the instruction that waits for its end.
        collective: as often as it runs in one round of the computation.
    """

    start: int
    end: int
    collective: Collective


def scheduled(module: Module, computation: str, devices: int) -> list[Scheduled]:
    """Return the collectives of a computation itself, without those of loops and calls in it."""
    instructions, found = module.computations.get(computation, []), list[Scheduled]()
    for place, one in enumerate(instructions):
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS:
            end = place if kind == one.opcode else _place_of_done(instructions, place)
            overlaps = _computes(instructions[place + 1 : end])
            found.append(Scheduled(place, end, _collective(one, kind, instructions[end].shape, devices, overlaps)))
        elif one.opcode in ("fusion", "async-start"):
            found += _of_called(module, instructions, place, devices)
    return found


def _with_called(module: Module, computation: str, devices: int, times: int) -> Iterator[Collective]:
    """Yield the collectives of a computation and of all that it runs, in the order in which they start."""
    instructions = module.computations.get(computation, [])
    own: dict[int, list[Collective]] = {}
    for each in scheduled(module, computation, devices):
        own.setdefault(each.start, []).append(each.collective)
    for place, one in enumerate(instructions):
        for collective in own.get(place, []):
            yield replace(collective, times=times)
        if one.opcode in ("while", "call", "conditional"):
            rounds = rounds_of(module, instructions, one) if one.opcode == "while" else 1
            for called in called_by(one):
                yield from _with_called(module, called, devices, times * rounds)


def _of_called(module: Module, instructions: list[Instruction], place: int, devices: int) -> list[Scheduled]:
    """Return the collectives in the computation that a fusion, or an asynchronous call, consists of.

    XLA for TPUs spreads a collective over several fusions, which compute other things beside it: a first one starts it,
    a last one ends it. They belong to one chain.
    """
    one, end = instructions[place], place
    inside = module.computations.get(one.attribute("calls") or "", [])
    own = [each for each in inside if each.opcode.removesuffix("-start") in KINDS]
    if not own:
        return []
    targets = {each.target for each in inside}
    if one.opcode == "async-start":
        end = _place_of_done(instructions, place)
    elif "AsyncCollectiveStart" in targets:
        end = _end_of_chain(module, instructions, place)
    elif _chain(own[0]) is not None:  # a later part of one that has been counted
        return []
    overlaps = _computes(instructions[place + 1 : end])
    kinds = [each.opcode.removesuffix("-start") for each in own]
    return [
        Scheduled(place, end, _collective(each, kind, each.shape, devices, overlaps)) for each, kind in zip(own, kinds)
    ]


def _chain(instruction: Instruction) -> str | None:
    found = re.search(r'chain_id="(\d+)"', instruction.text)
    return found[1] if found else None


def _end_of_chain(module: Module, instructions: list[Instruction], place: int) -> int:
    """Returns the place of the fusion that ends the chain which one at this place starts."""
    for later in range(place + 1, len(instructions)):
        inside = module.computations.get(instructions[later].attribute("calls") or "", [])
        if any(x.target == "AsyncCollectiveDone" for x in inside) and _follows(instructions, place, later):
            return later
    return place + 1


def _follows(instructions: list[Instruction], place: int, later: int) -> bool:
    """Returns whether the later instruction depends on the earlier one."""
    known = {instructions[place].name}
    for one in instructions[place + 1 : later + 1]:
        if known.intersection(one.operands):
            known.add(one.name)
    return instructions[later].name in known


def _place_of_done(instructions: list[Instruction], place: int) -> int:
    """Returns the place of the instruction that ends what one at this place starts."""
    name = instructions[place].name
    for later in range(place + 1, len(instructions)):
        one = instructions[later]
        if one.opcode.endswith("-done") and name in one.operands:
            return later
        if one.opcode == "async-update" and name in one.operands:
            name = one.name
    return place


def _computes(between: list[Instruction]) -> bool:
    return any(one.opcode in _COMPUTES for one in between)


def _collective(one: Instruction, kind: str, shape: str, devices: int, overlaps: bool) -> Collective:
    groups, size = groups_of(one.text, devices), bytes_of(shape)
    among = devices if kind == "collective-permute" else len(groups[0])
    whole = size * among if kind == "reduce-scatter" else size
    return Collective(kind, whole, among, overlaps, 1, one.operation, arrays_of(shape), groups)


def groups_of(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the devices that take part together in a collective, in whichever way its text says it.

    >>> groups_of("replica_groups={{0,2},{1,3}}", 4)
    ((0, 2), (1, 3))
    >>> groups_of("replica_groups=[2,2]<=[4]", 4)
    ((0, 1), (2, 3))
    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> groups_of("replica_groups=mesh['replica'=2,'model'=2] {'replica'}", 4)
    ((0, 2), (1, 3))
    >>> groups_of("replica_groups={}", 3)
    ((0, 1, 2),)
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = np.arange(devices).reshape([int(size) for size in tiled[3].split(",")])
        if tiled[4]:
            numbers = numbers.transpose([int(axis) for axis in tiled[4].split(",")])
        return tuple(map(tuple, numbers.reshape(int(tiled[1]), int(tiled[2])).tolist()))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        inside = [axis for axis in re.findall(r"'([^']+)'", named[2]) if axis in sizes]
        order = [list(sizes).index(axis) for axis in [*(axis for axis in sizes if axis not in inside), *inside]]
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values())).transpose(order)
        return tuple(map(tuple, numbers.reshape(-1, math.prod(sizes[axis] for axis in inside)).tolist()))
    return (tuple(range(devices)),)
