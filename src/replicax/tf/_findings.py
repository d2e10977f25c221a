"""What code uses of TensorFlow, with a verdict on each name, as text and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicax.tf import _uses, _verdicts
from replicax.tf._verdicts import DIFFERS, MISSING, RUNS


@dataclass(frozen=True)
class Finding:
    """The use of a name in a file; `place` is its line, with the cell's number in a notebook."""

    file: str
    place: str
    verdict: _verdicts.Verdict
    caught: bool


@dataclass
class Findings:
    """The uses of TensorFlow's names in several files."""

    found: list[Finding] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    files: int = 0

    def add(self, path: Path, shown: str) -> None:
        """Reads a file of Python code or a notebook; `shown` is its name in the report."""
        self.files += 1
        try:
            code, places = _code(path)
            found = _uses.uses(code, shown)
        except (SyntaxError, ValueError, OSError, RecursionError) as error:
            self.unreadable[shown] = str(error)
            return
        for use in found:
            if use.member:
                verdict: _verdicts.Verdict | None = _verdicts.of_member(use.name)
            elif use.library:
                verdict = _verdicts.of_library(use.name)
            else:
                verdict = _verdicts.of_name(use.name, use.keywords)
            if verdict is not None:
                self.found.append(Finding(shown, places[use.line - 1], verdict, use.caught))

    @property
    def missing(self) -> list[Finding]:
        """What is not there, where the code does not go on without it."""
        return [each for each in self.found if each.verdict.status == MISSING and not each.caught]

    @property
    def good(self) -> bool:
        """Whether everything is there."""
        return not self.missing and not self.unreadable

    def summary(self) -> dict[str, int]:
        """Returns the numbers of files, and of names and places by their status."""
        result = {"files": self.files, "unreadable": len(self.unreadable)}
        for status in (RUNS, DIFFERS, MISSING):
            some = self.missing if status == MISSING else [each for each in self.found if each.verdict.status == status]
            result |= {f"names_{status}": len({each.verdict.name for each in some}), f"places_{status}": len(some)}
        return result

    def as_json(self) -> str:
        """Returns everything as JSON: the findings by file, and the summary."""
        by_file: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for each in self.found:
            entry = {"line": each.place, "name": each.verdict.name, "status": each.verdict.status}
            by_file[each.file].append({**entry, "text": each.verdict.text, "caught": each.caught})
        everything = {"files": by_file, "unreadable": self.unreadable, "summary": self.summary()}
        return json.dumps(everything, indent=2)

    def as_text(self, every: bool = False) -> str:
        """Returns what is missing and what differs, by file and line, and the summary; with `every`, all names."""
        wanted = {MISSING, DIFFERS, *([RUNS] if every else [])}
        lines: list[str] = []
        by_file: dict[str, list[Finding]] = defaultdict(list)
        for each in self.found:
            if each.verdict.status in wanted:
                by_file[each.file].append(each)
        for file, found in by_file.items():
            lines += [file, *_lines_of(found), ""]
        lines += [f"{file}: not read: {why}" for file, why in self.unreadable.items()]
        return "\n".join([*lines, *self._summary_lines()])

    def _summary_lines(self) -> Iterator[str]:
        count = self.summary()
        names = sum(count[f"names_{status}"] for status in (RUNS, DIFFERS, MISSING))
        places = sum(count[f"places_{status}"] for status in (RUNS, DIFFERS, MISSING))
        yield (
            f"{_several(self.files, 'file')}: {_several(names, 'name')} of TensorFlow at {_several(places, 'place')}: "
            f"{count['names_runs']} run, {count['names_differs']} run and differ, {count['names_missing']} are missing."
        )
        if self.files == 1:
            return  # the lines above have named all
        by_name: dict[str, list[Finding]] = defaultdict(list)
        for each in self.missing:
            by_name[each.verdict.name].append(each)
        for name, found in sorted(by_name.items(), key=lambda item: -len(item[1])):
            yield f"  missing {name} ({_several(len(found), 'place')}): {found[0].verdict.text}"


def _lines_of(found: Iterable[Finding]) -> Iterator[str]:
    """Yields the text on a file's findings: each name once, with all lines."""
    places: dict[tuple[bool, _verdicts.Verdict], list[str]] = defaultdict(list)
    for each in found:
        if each.place not in (known := places[each.caught, each.verdict]):
            known.append(each.place)
    for (caught, verdict), lines in places.items():
        status = f"{verdict.status}, which the code expects" if caught and verdict.status == MISSING else verdict.status
        text = f": {verdict.text}" if verdict.text else ""
        yield f"  {verdict.name}, line {', '.join(lines)}: {status}{text}"


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _code(path: Path) -> tuple[str | bytes, list[str]]:
    """Returns the code of a file, and the names of its lines; of a notebook all cells, with lines such as "3:1"."""
    content = path.read_bytes()
    if path.suffix != ".ipynb":
        return content, [str(number + 1) for number in range(content.count(b"\n") + 1)]
    lines: list[str] = []
    places: list[str] = []
    cells = [cell for cell in json.loads(content).get("cells", ()) if cell.get("cell_type") == "code"]
    for number, cell in enumerate(cells, 1):
        found = _without_commands("".join(cell.get("source", "")).split("\n"))
        lines += found
        places += [f"{number}:{line + 1}" for line in range(len(found))]
    return "\n".join(lines), places


def _without_commands(lines: list[str]) -> list[str]:
    """Returns the lines of a cell; those for the shell or the notebook, such as `!pip install`, do nothing."""
    if lines[0].startswith("%%"):
        return [""] * len(lines)
    result: list[str] = []
    goes_on = False
    for line in lines:
        code = line.lstrip()
        command = code.startswith(("!", "%", "?"))
        result.append("" if goes_on else f"{line[: len(line) - len(code)]}pass" if command else line)
        goes_on = (command or goes_on) and line.rstrip().endswith("\\")
    return result
