"""Results of TensorFlow 2.21, which tests/recorded keeps, since TensorFlow takes seconds to start.

Each result is stored with a digest of what it depends on. A program that is new or was changed has no valid record: it
runs under TensorFlow, and the test fails where there is none. `make record` stores the results of such programs and
leaves all other lines as they are:

    make record                                             # all programs without a valid record
    make record PYTEST_ARGS="tests/tf/test_tf_ops.py -k erf"  # of these tests
    make record PYTEST_ARGS="tests/tf" REPLICAX_RECORD=all  # also programs with a valid record
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "recorded"


def from_tensorflow(
    name: str,
    programs: Mapping[str, str],
    run: Callable[[list[str]], Mapping[str, Any]],
    chosen: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return what programs give under TensorFlow, by their names: the recorded results, or those of `run`.

    Args:
        name: the name of the record, a file of tests/recorded.
        programs: all programs of the record: for each name, all text that its result depends on.
        run: runs the programs of these names under TensorFlow and returns their results, as JSON has them.
        chosen: names of the programs whose results are needed; all if not given.
    """
    path = FOLDER / f"{name}.json"
    lines = _read(path)
    digests = {program: hashlib.sha256(text.encode()).hexdigest()[:16] for program, text in programs.items()}
    mode = os.environ.get("REPLICAX_RECORD", "")

    def is_valid(program: str) -> bool:
        return program in lines and json.loads(lines[program])[0] == digests[program]

    needed = [program for program in programs if chosen is None or program in chosen]
    absent = [program for program in needed if mode == "all" or not is_valid(program)]
    if absent and "REPLICAX_TENSORFLOW_PYTHON" not in os.environ:
        names = ", ".join(map(repr, absent[:3])) + ", ..." * (len(absent) > 3)
        pytest.fail(
            f"{path.name} has no valid record of {names}: run `make record` and commit the result", pytrace=False
        )
    results = dict(run(absent)) if absent else {}
    if mode:
        lines |= {program: json.dumps([digests[program], results[program]]) for program in absent}
        _write(path, {program: lines[program] for program in programs if program in lines})
    return {program: results[program] if program in results else json.loads(lines[program])[1] for program in needed}


def sample(programs: Sequence[str], count: int = 20) -> list[str]:
    """Return some of the programs, spread evenly, for a comparison of their records with TensorFlow."""
    return list(programs[:: max(1, len(programs) // count)])


def _read(path: Path) -> dict[str, str]:
    """Return the text of each result of a record."""
    if not path.exists():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {program: json.dumps(entry) for program, entry in entries.items()}


def _write(path: Path, lines: Mapping[str, str]) -> None:
    """Write a record, one line for each program."""
    path.parent.mkdir(exist_ok=True)
    text = ",\n".join(f"{json.dumps(program)}: {line}" for program, line in lines.items())
    path.write_text("{\n" + text + "\n}\n", encoding="utf-8")


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Return the values of a parameter in the tests of this file that the session runs."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(i.callspec.params[parameter] for i in items if parameter in i.callspec.params))
