"""The collectives of a compiled program, and the arrays that they carry, read from its HLO text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Asynchronous collectives are counted by their `-done`, the type of which is that of the result alone.
_INSTRUCTION = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?:-done)?\(")
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
        kind = instruction["type"]
        found.append(Collective(instruction["kind"], arrays_of(kind), bytes_of(kind)))
    return found


def arrays_of(type_text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the dtype and the shape of an array, or of all arrays of a tuple, by its type in HLO.

    >>> arrays_of("(f32[8,4]{1,0}, pred[])")
    (('f32', (8, 4)), ('pred', ()))
    """
    return tuple((array["dtype"], _shape_of(array)) for array in _ARRAY.finditer(type_text))


def bytes_of(type_text: str) -> int:
    """Returns the size of an array, or of all arrays of a tuple, by its type in HLO, without padding of its layout.

    >>> bytes_of("(f32[8,4]{1,0:T(8,128)}, bf16[3], pred[])")
    135
    """
    bits = sum(math.prod(_shape_of(array)) * int(array["bits"] or 8) for array in _ARRAY.finditer(type_text))
    return -(-bits // 8)


def _shape_of(array: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(size) for size in array["shape"].split(",") if size)
