"""Restores from a copy of the folder before every system call that changes it, for each way to save; prints how many.

python scripts/crash_points.py [SAVES]
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
    """Run the test on all points, then print one line a way to save."""
    saves = sys.argv[1] if len(sys.argv) > 1 else "4"
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures"
        environment = {**os.environ, "REPLICAX_CRASH_SAVES": saves, "REPLICAX_FIGURES": str(figures)}
        command = [sys.executable, "-m", "pytest", "-q", "-o", "faulthandler_timeout=0", "tests/test_crash_points.py"]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        counts = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    for way, (count, found) in counts.items():
        print(f"{way:45} {count:5} points, all restored or before the first save; {found} with a checkpoint or dataset")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
