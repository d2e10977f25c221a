"""Runs the injection tests of jobs of several processes many times in a row, and prints how long workers took to end.

python scripts/injections.py [TIMES] [-k EXPRESSION ...]
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the tests, then print one line a case: runs, and seconds from the injection to the last worker's end."""
    times, *rest = sys.argv[1:] or ["20"]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures"
        settings = {"REPLICAX_REPEAT": times, "REPLICAX_FIGURES": str(figures), "REPLICAX_TEST_FRESH": "1"}
        environment = {**os.environ, **settings}
        command = [sys.executable, "-m", "pytest", "--thorough", "-q", "tests/job/test_no_silent_hang.py", *rest]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        lines = figures.read_text(encoding="utf-8").splitlines() if figures.exists() else []
    cases: dict[str, list[float]] = collections.defaultdict(list)
    for line in lines:
        figure = json.loads(line)
        cases[figure["case"]].append(max(figure["seconds"].values()))
    print(f"{'seconds to the end of the last worker':70} runs  least  median  most")
    for case, seconds in sorted(cases.items()):
        seconds.sort()
        middle = seconds[len(seconds) // 2]
        print(f"{case[:70]:70} {len(seconds):4} {seconds[0]:6.2f} {middle:7.2f} {seconds[-1]:5.2f}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
