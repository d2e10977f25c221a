"""The user's lines of the instructions of a compiled program."""

from __future__ import annotations

import re
from pathlib import PurePath

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3.", f"{PurePath(__file__).parents[1]}/")


class SourceLines:
    """Finds the user's line of an instruction by the tables at the head of a program's text.

    Args:
        text: the program, as `compiled.as_text()` gives it.
    """

    def __init__(self, text: str):
        self._files: dict[int, str] = {}
        self._locations: dict[int, tuple[int, int]] = {}  # of a file and a line
        self._frames: dict[int, tuple[int, int]] = {}  # a location, and the frame that called it
        table = ""
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                break
            if match := _TABLE.match(line):
                table = match[1]
            elif match := re.match(r"(\d+) (.*)", line):
                self._add(table, int(match[1]), match[2])

    def _add(self, table: str, number: int, row: str) -> None:
        values = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
        if table == "FileNames":
            self._files[number] = row.strip('"')
        elif table == "FileLocations":
            self._locations[number] = values["file_name_id"], values["line"]
        elif table == "StackFrames":
            # XLA counts parents from one, so that zero can mean that a frame has no parent.
            self._frames[number] = values["file_location_id"], values.get("parent_frame_id", 1) - 1

    def line_of(self, instruction: str) -> str:
        """Return the user's line of an instruction, for example "train.py:31"; empty if it is unknown.

        It is the innermost line outside of libraries.
        """
        if (source := re.search(r'source_file="([^"]+)" source_line=(\d+)', instruction)) and is_users(source[1]):
            return f"{PurePath(source[1]).name}:{source[2]}"
        match = re.search(r"stack_frame_id=(\d+)", instruction)
        frame, seen = int(match[1]) if match else 0, set[int]()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, frame = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            if is_users(name := self._files.get(file, "")):
                return f"{PurePath(name).name}:{line}"
        return ""


def is_users(file: str) -> bool:
    """Return whether a source file belongs to the user, and not to a library."""
    return bool(file) and not any(part in file for part in _LIBRARIES)
