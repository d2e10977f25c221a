"""Runs the benchmarks of benchmarks/RESULTS.md one after the other, and writes all numbers into one file.

    python benchmarks/all.py --json results.json --tensorflow PYTHON    # some 20 minutes; nothing else should run
    python benchmarks/report.py results.json                            # the tables and pictures of the page
    python benchmarks/all.py --json results.json --only epoch,uneven    # these anew; the file's others stay
    python benchmarks/all.py --json results.json --quick                # few short rounds, to see whether all work

The file is written after each benchmark. One that fails is named at the end, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from report import BENCHMARKS
from sides import HERE, names, parser


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", type=names, metavar="NAME,NAME", help=f"some of {', '.join(BENCHMARKS)}")
    made.add_argument("--torch", metavar="PYTHON", help="an interpreter that has PyTorch, for the GPU's step")
    made.set_defaults(rounds=None)
    options = made.parse_args()
    compilers = bool(os.environ.get("REPLICAX_PLAN_PYTHON"))
    possible = {"gpu": bool(shutil.which("nvidia-smi")), "tpu": compilers, "gpu steps": compilers}
    chosen = options.only or [name for name in BENCHMARKS if possible.get(name, True)]
    if unknown := [name for name in chosen if name not in BENCHMARKS]:
        made.error(f"no such benchmark: {', '.join(unknown)}. There are {', '.join(BENCHMARKS)}.")
    file = Path(options.json or "results.json")
    results = json.loads(file.read_text()) if options.only and file.exists() else {}
    failed = []
    for name in chosen:
        since = time.perf_counter()
        found = run(name, options)
        print(f"{name}: {time.perf_counter() - since:.0f} s", file=sys.stderr)
        if found is None:
            failed.append(name)
            continue
        results[name] = {"date": date.today().isoformat(), "quick": options.quick, **found}
        file.write_text(json.dumps(results, indent=1))
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. What the others gave is in {file}.")


def run(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """The numbers of one benchmark, or None where it failed."""
    benchmark = BENCHMARKS[name]
    command = [sys.executable, str(HERE / f"{benchmark.script}.py"), *benchmark.arguments]
    command += ["--quick"] if options.quick else []
    command += ["--rounds", str(options.rounds)] if options.rounds else []
    for what in benchmark.takes:
        if getattr(options, what):
            command += [f"--{what}", getattr(options, what)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "numbers.json"
        if subprocess.run([*command, "--json", str(written)]).returncode:
            return None
        return json.loads(written.read_text())


if __name__ == "__main__":
    main()
