"""Turns docstrings, which are plain text with code between backticks, into reStructuredText."""

from __future__ import annotations

import re

CODE = re.compile(r"``(.+?)``|`([^`]+)`")
# Arguments that are accepted and described together, over two lines.
CONTINUED = re.compile(r"^( +)([\w*]+(?:, [\w*]+)*),\n\1 *(?=[\w*]+(?:, [\w*]+)*: )", re.MULTILINE)


def as_markup(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring as reStructuredText.

    Code between backticks may go over the end of a line and be followed by a letter, as in `Client`s. Outside of code
    `|`, `*` and a trailing `_` are themselves. Examples stay as they are.
    """
    written: list[str] = []
    text: list[str] = []
    example = False
    for line in [*lines, ">>>"]:
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            text.append(line)
            continue
        if text:
            written += _converted("\n".join(text)).split("\n")
            text.clear()
        written.append(line)
    return written[:-1]


def _converted(text: str) -> str:
    parts = CODE.split(CONTINUED.sub(r"\1\2, ", text))
    result = ""
    for place in range(0, len(parts), 3):
        result += re.sub(r"(?<!\\)([|*]|(?<=\w)_(?=\W|$))", r"\\\1", parts[place])
        if place + 1 < len(parts):
            code = re.sub(r"\s*\n\s*", " ", parts[place + 1] or parts[place + 2]).replace("\\", "\\\\")
            before = "\\ " if result[-1:].isalnum() else ""
            after = "\\ " if parts[place + 3][:1].isalnum() else ""
            result += f"{before}:name:`{code}`{after}"
    return result
