"""Shows what is left of stored files by kills and by damage, and prints how many cases there were.

python scripts/storage.py [SAVES [TIMES]]

Restores from a copy of the folder before every system call that changes it, for each way to save, with so many saves.
Then damages so many files of each format that replicax stores, and reads them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run both tests, and print one line a case."""
    saves, times = (*sys.argv[1:], *["3", "300"][len(sys.argv) - 1 :])
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures"
        settings = {"REPLICAX_CRASH_SAVES": saves, "REPLICAX_DAMAGES": times, "REPLICAX_FIGURES": str(figures)}
        command = [sys.executable, "-m", "pytest", "--thorough", "-q", "-o", "faulthandler_timeout=0"]
        tests = ["tests/checkpoint/test_crash_points.py", "tests/checkpoint/test_damage.py"]
        status = subprocess.run([*command, *tests], cwd=ROOT, env={**os.environ, **settings}, check=False).returncode
        lines = figures.read_text(encoding="utf-8").splitlines() if figures.exists() else []
    for name, counts in map(json.loads, lines):
        became = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{name:40} {sum(counts.values()):4} cases: {became}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
