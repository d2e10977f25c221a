"""Damages files of each format that replicax stores, reads them, and prints what became of them.

python scripts/damage.py [TIMES]
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
    """Run the test with more files, then print one line a format."""
    times = sys.argv[1] if len(sys.argv) > 1 else "300"
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures"
        environment = {**os.environ, "REPLICAX_DAMAGES": times, "REPLICAX_FIGURES": str(figures)}
        command = [sys.executable, "-m", "pytest", "-q", "-o", "faulthandler_timeout=0", "tests/test_damage.py"]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        lines = figures.read_text(encoding="utf-8").splitlines() if figures.exists() else []
    for name, counts in map(json.loads, lines):
        became = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{name:25} {sum(counts.values()):4} damaged: {became}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
