"""The largest temporary buffers of a compiled program at the moment when it needs most memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replicax._benchmark.hlo_module import Instruction, Module, called_by
from replicax._plan.least_time import arrays_in_memory
from replicax._plan.source_lines import SourceLines

_NO_BUFFER = {"parameter", "constant", "after-all", "partition-id", "replica-id"}
_NAMES = {"get-tuple-element", "tuple", "bitcast"}  # which read no buffer
_SAME_BUFFER = {"bitcast", "opt-barrier", "while", "dynamic-update-slice"}

Buffers = tuple[frozenset[str], ...]  # for each array of a value, the names of the buffers that it may be in


@dataclass(frozen=True)
class Buffer:
    """A temporary buffer.

    Attributes:
        size: bytes.
        name: the instruction of the compiled program that fills it.
        operation: the operation of the user's program, for example "jit(train_step)/dot_general"; empty if unknown.
        line: the user's line, for example "train.py:31"; empty if unknown.
        count: how many buffers have this size, operation and line.
        is_workspace: whether it is the workspace of a library, for example cuBLAS.
    """

    size: int
    name: str
    operation: str = ""
    line: str = ""
    count: int = 1
    is_workspace: bool = False


def largest_buffers(module: Module, lines: SourceLines, number: int = 10) -> tuple[Buffer, ...]:
    """Return the largest temporaries that exist at the peak of a program's memory, the largest first.

    The compiler does not publish where it puts buffers. So they are followed through its schedule: a buffer exists from
    the instruction that fills it to the last one that reads it. Buffers of the same operation and line are one entry.
    """
    merged: dict[tuple[object, ...], Buffer] = {}
    for instruction, size in _Computation(module, module.entry, is_entry=True).peak():
        is_workspace = "custom_call_target" in instruction.text and size != arrays_in_memory(instruction.shape)[0]
        kind = size, instruction.operation, lines.line_of(instruction.text), is_workspace
        first = merged.get(kind, Buffer(size, instruction.name, *kind[1:3], count=0, is_workspace=is_workspace))
        merged[kind] = replace(first, count=first.count + 1)
    return tuple(sorted(merged.values(), key=lambda buffer: -buffer.size * buffer.count)[:number])


class _Computation:
    """The buffers of one computation, as its schedule uses them.

    Args:
        module: the program.
        name: the computation.
        is_entry: whether it is the program itself. Otherwise its parameters and its results are buffers of its caller.
    """

    def __init__(self, module: Module, name: str, *, is_entry: bool = False):
        self._module, self._instructions = module, module.computations.get(name, [])
        self._sizes: dict[str, int] = {}
        self._filled_by: dict[str, Instruction] = {}
        self._last_use: dict[str, int] = {}
        self._buffers: dict[str, Buffers] = {}
        ends = {
            operand: place for place, instruction in enumerate(self._instructions) for operand in instruction.operands
        }
        for place, instruction in enumerate(self._instructions):
            self._buffers[instruction.name] = self._buffers_of(instruction, place, ends)
            for operand in instruction.operands if instruction.opcode not in _NAMES else ():
                for buffer in frozenset().union(*self._buffers.get(operand, ())):
                    self._last_use[buffer] = place
        results = self._buffers[self._instructions[-1].name] if self._instructions else ()
        for buffer in frozenset().union(*results):  # results of a step are no temporaries
            self._sizes.pop(buffer, None)

    def _buffers_of(self, instruction: Instruction, place: int, ends: Mapping[str, int]) -> Buffers:
        operands = [self._buffers.get(operand, ()) for operand in instruction.operands]
        sizes = arrays_in_memory(instruction.shape)
        if instruction.opcode in _NO_BUFFER:
            return tuple(frozenset() for _ in sizes)
        if instruction.opcode == "tuple":
            return tuple(frozenset().union(*operand) for operand in operands)
        if instruction.opcode == "get-tuple-element" and operands:
            index = int((re.search(r"index=(\d+)", instruction.text) or ["0", "0"])[1])
            return operands[0][index : index + 1] if index < len(operands[0]) else ()
        if instruction.opcode in _SAME_BUFFER and operands:
            return operands[0]
        if instruction.opcode.endswith("-done") and operands:
            return (frozenset().union(*operands[0]),)
        if instruction.opcode.endswith("-start"):
            sizes = [0] * (len(sizes) - 1) + sizes[-1:] if instruction.opcode != "copy-start" else sizes[:1]
        if (reused := self._reuse(instruction, place, ends, sizes)) is not None:
            return (reused,)
        return tuple(self._fill(f"{instruction.name}/{i}", instruction, size) for i, size in enumerate(sizes))

    def _fill(self, buffer: str, instruction: Instruction, size: int) -> frozenset[str]:
        if not size:
            return frozenset()
        self._sizes[buffer], self._filled_by[buffer] = size, instruction
        return frozenset((buffer,))

    def _reuse(
        self, instruction: Instruction, place: int, ends: Mapping[str, int], sizes: Sequence[int]
    ) -> frozenset[str] | None:
        """Return the buffer of an operand that ends here and can take the result of an elementwise operation."""
        is_elementwise = instruction.opcode == "fusion" and "kind=kLoop" in instruction.text
        if len(sizes) != 1 or not (is_elementwise or "all-reduce" in instruction.opcode):
            return None
        for operand in instruction.operands:
            buffers = frozenset().union(*self._buffers.get(operand, ()))
            if ends.get(operand) == place and len(buffers) == 1 and self._sizes.get(next(iter(buffers))) == sizes[0]:
                return buffers
        return None

    def peak(self) -> list[tuple[Instruction, int]]:
        """Return the instructions that fill the buffers, and their bytes, at the moment when they take most."""
        largest, best, live = 0, list[tuple[Instruction, int]](), dict[str, int]()
        starts: dict[str, list[str]] = {}
        for buffer, instruction in self._filled_by.items():
            if buffer in self._sizes:
                starts.setdefault(instruction.name, []).append(buffer)
        for place, instruction in enumerate(self._instructions):
            live.update({buffer: self._sizes[buffer] for buffer in starts.get(instruction.name, [])})
            called = called_by(instruction) if instruction.opcode in ("while", "call", "conditional") else []
            inside = max(
                (_Computation(self._module, name).peak() for name in called),
                key=lambda merged: sum(size for _, size in merged),
                default=[],
            )
            total = sum(live.values()) + sum(size for _, size in inside)
            if total > largest:
                largest, best = total, [(self._filled_by[buffer], size) for buffer, size in live.items()] + inside
            for buffer in [buffer for buffer in live if self._last_use.get(buffer, place) <= place]:
                del live[buffer]
        return best
