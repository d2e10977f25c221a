"""Plant faults in the source, one at a time, and report whether the tests catch them.

    python scripts/faults.py [NAME ...] [--results FILE] [--pytest ARGUMENTS]

scripts/faults.toml lists the faults. Each one is planted in a copy of the checkout, where pytest runs until the first
failure: first the tests that the fault names, then all others. Without NAME, all faults are planted that have no line
in FILE yet. `--pytest` gives arguments to pytest, such as `--pytest "--thorough"`; the interpreter that runs this
script runs the tests too. The exit status is 1 if a fault has survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".venv*", ".jax_cache", ".*_cache", "build", "dist", "__pycache__")
# No fault makes the suite slower than this; one that does has made a program hang.
LIMIT = 3600.0


class Fault(NamedTuple):
    """A change of one place in the source.

    Args:
        name: its name.
        file: the path of the changed file.
        kind: the kind of fault, such as "wrong sign".
        before: the text that it replaces, which the file has once.
        after: the new text.
        effect: what a user would see.
        tests: paths of the tests that run first.
    """

    name: str
    file: str
    kind: str
    before: str
    after: str
    effect: str
    tests: Sequence[str]

    def plant(self, tree: Path) -> None:
        """Write the fault into a copy of the checkout.

        Raises:
            ValueError: the file does not have the text exactly once.
        """
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.file} has the text to replace {text.count(self.before)} times")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")

    def remove(self, tree: Path) -> None:
        """Restore the file in a copy of the checkout."""
        shutil.copy(ROOT / self.file, tree / self.file)


def load() -> dict[str, Fault]:
    """Return the faults of faults.toml by their names."""
    entries = tomllib.loads((ROOT / "scripts" / "faults.toml").read_text(encoding="utf-8"))["fault"]
    return {entry["name"]: Fault(**entry) for entry in entries}


def run_pytest(tree: Path, arguments: Sequence[str]) -> str | None:
    """Return the first test that fails in a copy of the checkout, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return "the time limit"
    if done.returncode in (0, 5):  # 5: no tests were selected
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}"


def run_with(fault: Fault, tree: Path, arguments: Sequence[str]) -> dict[str, object]:
    """Return a line of the results: which test has caught a fault, if any, and after how many seconds."""
    begin = time.monotonic()
    fault.plant(tree)
    try:
        first = [path for path in fault.tests if (tree / path).exists()]
        test = run_pytest(tree, [*arguments, *first])
        stage = "the package's tests"
        if test is None:
            stage = "all tests"
            test = run_pytest(tree, [*arguments, *(f"--ignore={path}" for path in first)])
    finally:
        fault.remove(tree)
    return {"fault": fault.name, "caught_by": test, "stage": stage, "seconds": round(time.monotonic() - begin)}


def main() -> None:
    """Plant the faults, and print a line for each and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", type=Path, help="a file that gets a line of JSON for each fault")
    parser.add_argument("--pytest", default="-n 4 --dist worksteal", metavar="ARGUMENTS")
    options = parser.parse_args()
    faults = load()
    if unknown := set(options.names) - set(faults):
        parser.error(f"faults.toml has no fault named {', '.join(sorted(unknown))}")
    lines = []
    if options.results and options.results.exists():
        lines = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    done = {line["fault"] for line in lines}
    chosen = options.names or [name for name in faults if name not in done]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "replicax"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
        for name in chosen:
            line = run_with(faults[name], tree, shlex.split(options.pytest))
            lines.append(line)
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            print(f"{line['seconds']:5} s  {name:40} {line['caught_by'] or 'SURVIVED'}", flush=True)
    survivors = [line["fault"] for line in lines if line["caught_by"] is None]
    print(f"{len(lines) - len(survivors)} of {len(lines)} faults were caught.", *survivors, sep="\n  ")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
