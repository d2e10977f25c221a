"""What programs gave under TensorFlow 2.21, kept in tests/recorded, since TensorFlow takes seconds to start.

Each result is kept with a digest of what it depends on. A program that is new or was changed has no such record, and
runs under TensorFlow each time until it is recorded:

    REPLICAX_RECORD=1 REPLICAX_TENSORFLOW_PYTHON=.venv-tensorflow/bin/python pytest tests/conformance
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recorded"


def from_tensorflow(
    name: str, programs: Mapping[str, str], run: Callable[[list[str]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns what programs give under TensorFlow, by their names: what is recorded, and of the others what `run` says.

    Args:
        name: of the record, a file of tests/recorded.
        programs: for each program's name all the text that its result depends on.
        run: runs the programs of these names under TensorFlow; results are such as JSON has.
    """
    path = FOLDER / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    digests = {program: hashlib.sha256(text.encode()).hexdigest()[:16] for program, text in programs.items()}
    anew = "REPLICAX_RECORD" in os.environ
    found = {
        program: record[program][1]
        for program, digest in digests.items()
        if not anew and record.get(program, [None])[0] == digest
    }
    if absent := [program for program in programs if program not in found]:
        found |= run(absent)
    if anew:
        lines = [f"{json.dumps(p)}: {json.dumps([digests[p], found[p]])}" for p in programs]
        FOLDER.mkdir(exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return found
