"""The collectives of a compiled program, and the arrays that they carry, read from its HLO text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
# Asynchronous collectives are counted by their `-done`, the type of which is that of the result alone.
_INSTRUCTION = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{_KINDS})(?:-done)?\(")
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")


class Collective(NamedTuple):
    """A collective of a compiled program: its kind, and dtype and shape of each array that comes out of it.

    >>> text = "%sum = (f32[4097]{0}, s32[]) all-reduce(%a, %b), channel_id=1"
    >>> [(one.kind, one.arrays, one.bytes) for one in collectives(text)]
    [('all-reduce', (('f32', (4097,)), ('s32', ())), 16392)]
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    bytes: int


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of a program, given by `compiled.as_text()`; one in a loop counts once."""
    found = []
    for instruction in _INSTRUCTION.finditer(text):
        arrays, bits = [], 0
        for array in _ARRAY.finditer(instruction["type"]):
            shape = tuple(int(size) for size in array["shape"].split(",") if size)
            arrays.append((array["dtype"], shape))
            bits += math.prod(shape) * int(array["bits"] or 8)
        found.append(Collective(instruction["kind"], tuple(arrays), -(-bits // 8)))
    return found
