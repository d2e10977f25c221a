"""The operations of a compiled program's loops, of which XLA counts one round."""

from __future__ import annotations

import math
import re

from replicax._benchmark.hlo_module import Instruction, Module, called_by, rounds_of


def of_further_rounds(text: str) -> float:
    """Returns the operations of matrix products and convolutions in loops, but for each loop's first round.

    It is a lower bound: of a convolution whose window is padded or dilated, one place of the window is counted.
    """
    module = Module(text)
    return _operations(module, module.entry, True) - _operations(module, module.entry, False)


def _operations(module: Module, name: str, all_rounds: bool) -> float:
    instructions = module.computations.get(name, [])
    shapes = {one.name: one.shape for one in instructions}
    total = 0.0
    for one in instructions:
        if one.opcode in ("dot", "convolution"):
            total += 2 * math.prod(_dimensions(one.shape)) * _terms(one, shapes)
        rounds = rounds_of(module, instructions, one) if one.opcode == "while" and all_rounds else 1
        total += rounds * sum(_operations(module, each, all_rounds) for each in called_by(one))
    return total


def _terms(one: Instruction, shapes: dict[str, str]) -> int:
    """Returns how many products are added up for an element of the result."""
    left, right = (_dimensions(shapes.get(operand, "")) for operand in one.operands[:2])
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
        axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
        return math.prod(left[axis] for axis in axes if axis < len(left))
    labels = re.search(r"dim_labels=\w+_(\w+)->", one.text)
    if labels is None or len(labels[1]) != len(right):
        return 1
    plain = "pad=" not in one.text and "dilate=" not in one.text
    return math.prod(size for label, size in zip(labels[1], right) if label == "i" or (label != "o" and plain))


def _dimensions(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in found[1].split(",") if size] if found else []
