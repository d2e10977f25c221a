"""Compiled programs as text: their computations, and how often their loops run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_SAME = {"copy", "bitcast", "convert"}  # whose result is their operand


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    text: str

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found[1] if found else None

    @property
    def target(self) -> str:
        """The name of the function that a custom call runs; empty for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.text)
        return match[1] if match else ""

    @property
    def operation(self) -> str:
        """The operation of the user's program, such as "jit(step)/dot_general"; empty where the compiler names none."""
        match = re.search(r'op_name="([^"]*)"', self.text)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        inside = self.text[self.text.index(f" {self.opcode}(") + len(self.opcode) + 2 :]
        return re.findall(r"%([\w.\-]+)", inside[: closing(inside)])


class Module:
    """The computations of a module's text, and the name of the first that runs."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if line[:1] in ("%", "E", "_") or (line[:1].isalpha() and line.endswith("{")):
                if not line.endswith("{") or line.startswith("HloModule"):
                    continue
                name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
                current = self.computations[name] = []
                if line.startswith("ENTRY "):
                    self.entry = name
            elif (match := _INSTRUCTION.match(line)) and (opcode := _opcode_of(match[2])):
                current.append(Instruction(match[1], match[2][: opcode.start()], opcode[1], f" {match[2]}"))


def called_by(one: Instruction) -> list[str]:
    """Returns the names of the computations that an instruction runs."""
    attributes = {
        "fusion": ["calls"],
        "async-start": ["calls"],
        "while": ["condition", "body"],
        "call": ["to_apply"],
        "conditional": ["true_computation", "false_computation"],
    }
    branches = re.search(r"branch_computations=\{([^}]*)\}", one.text) if one.opcode == "conditional" else None
    names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
    return [*names, *(name for name in map(one.attribute, attributes.get(one.opcode, [])) if name)]


def rounds_of(module: Module, within: list[Instruction], loop: Instruction) -> int:
    """Returns how often a `while` runs; 1 where its text does not say it.

    XLA for CPUs writes the number down. Elsewhere the loop counts, as JAX's `scan` does: its condition compares an
    element of its state with a constant, and its body adds a constant to that element.
    """
    if known := re.search(r"known_trip_count\D+(\d+)", loop.text):
        return int(known[1])
    condition, body, state = _Values(module, loop.attribute("condition")), _Values(module, loop.attribute("body")), None
    outside = _Values(module, None, within)
    if loop.operands and (state := outside.made_by(loop.operands[0])) is not None and state.opcode == "tuple":
        given = {index: outside.constant(name) for index, name in enumerate(state.operands)}
        condition.given = body.given = given
        compare, ended = condition.last, body.last
        if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.text:
            return 1
        index, end = condition.element(compare.operands[0]), condition.constant(compare.operands[1])
        if index is None or end is None or ended is None or ended.opcode != "tuple":
            return 1
        start, step = given.get(index), body.added_to(index, ended.operands[index])
        if start is not None and step is not None and step > 0:
            return max(1, -(-(end - start) // step))
    return 1


class _Values:
    """The integers of a computation that are constants, or elements of its parameter of which the values are given."""

    given: Mapping[int, int | None] = {}

    def __init__(self, module: Module, name: str | None, instructions: list[Instruction] | None = None):
        found = module.computations.get(name or "", []) if instructions is None else instructions
        self._by_name = {one.name: one for one in found}
        self.last = found[-1] if found else None

    def made_by(self, name: str) -> Instruction | None:
        """Returns the instruction that makes a value, which is not one that hands on what another has made."""
        one = self._by_name.get(name)
        while one is not None and one.opcode in _SAME and one.operands:
            one = self._by_name.get(one.operands[0])
        return one

    def element(self, name: str) -> int | None:
        """Returns which element of the parameter a value is."""
        one = self.made_by(name)
        if one is None or one.opcode != "get-tuple-element":
            return None
        source = self.made_by(one.operands[0])
        index = re.search(r"index=(\d+)", one.text)
        return int(index[1]) if index and source is not None and source.opcode == "parameter" else None

    def constant(self, name: str) -> int | None:
        """Returns the value as a number, if it is known."""
        one = self.made_by(name)
        if one is not None and one.opcode == "constant":
            number = re.search(r"constant\((-?\d+)\)", one.text)
            return int(number[1]) if number else None
        index = self.element(name)
        return None if index is None else self.given.get(index)

    def added_to(self, index: int, name: str) -> int | None:
        """Returns what is added to an element of the parameter to make this value; None if it is made otherwise."""
        one = self.made_by(name)
        if one is None or one.opcode != "add" or len(one.operands) != 2:
            return None
        first, second = one.operands
        for element, number in ((first, second), (second, first)):
            if self.element(element) == index:
                return self.constant(number)
        return None


def _opcode_of(text: str) -> re.Match[str] | None:
    """Returns where the opcode stands, behind a shape that may have parentheses itself."""
    start = closing(text[1:]) + 1 if text.startswith("(") else 0
    return _OPCODE.search(text, start)


def closing(text: str) -> int:
    """Returns where the parenthesis closes that was opened before the text."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    return len(text)
