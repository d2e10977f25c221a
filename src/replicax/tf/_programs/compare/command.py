"""The command `replicax compare`. It needs no JAX itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from replicax.tf._programs._core import TENSORFLOW, VARIABLE, program_arguments
from replicax.tf._programs.environment import environment as with_our_names

_EQUAL, _DIFFERENT, _WRONG, _FAILED, _INTERRUPTED = 0, 1, 2, 3, 130
_RUNNER = Path(__file__).with_name("_replicax_recorder") / "run.py"
_RTOL = 1e-3
_LINES = 20  # of a program's output that are shown if it fails

_DESCRIPTION = """\
Run a program of TensorFlow's twice, under TensorFlow and under replicax as `replicax run-tf` does, with the same
initial weights, the same order of data and the same random numbers. Print the results of each training step, and the
first step and variable that differ. The program really runs: the second run finds the files that the first has
written. See `replicax docs how-to/migrate-from-tensorflow`.
"""

_EPILOG = """\
examples:
  replicax compare --tensorflow ~/tensorflow/bin/python train.py
  replicax compare --steps 50 train.py --epochs 1
  replicax compare --keep-random -m project.train

exit status:
  0 when all steps agree; 1 when a step differs; 2 when an option is wrong, or no Python has TensorFlow; 3 when the
  program fails, takes too long or makes no step.
"""


def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of the options and of the program's own arguments."""
    result = program_arguments.parser(name, "[options]", _DESCRIPTION, _EPILOG)
    add = result.add_argument
    text = (
        f"a Python with TensorFlow and the program's libraries (default: {VARIABLE}, or what replicax export installs)"
    )
    python = os.environ.get(VARIABLE) or TENSORFLOW.find_python()
    add("--tensorflow", metavar="PYTHON", default=python, help=text)
    add("--steps", type=_positive, default=10, metavar="N", help="end both programs after N steps (default: 10)")
    text = "the tolerance: of results relative to their value, ten times that of variables relative to their change"
    add("--rtol", type=_tolerance, default=_RTOL, metavar="NUMBER", help=f"{text} (default: %(default)g)")
    text = "shuffle data and draw random numbers as the program does; both differ then"
    add("--keep-random", action="store_true", help=text)
    text = "the most seconds that each run takes (default: %(default)g)"
    add("--time-limit", type=float, default=600.0, metavar="SECONDS", help=text)
    text = "keep the records and the programs' output there (default: the output, in a temporary folder)"
    add("--folder", metavar="PATH", type=Path, help=text)
    return result


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


def main(arguments: Sequence[str], name: str) -> int:
    """Run the command, and return its exit status."""
    chosen = parser(name).parse_args(arguments)
    if problem := _problem(chosen):
        print(f"{name}: {problem}", file=sys.stderr)
        return _WRONG
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="replicax-compare-"))
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        return _compare(chosen, folder.absolute(), name)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        if chosen.folder is None:
            for record in ("tensorflow", "replicax"):
                shutil.rmtree(folder / record, ignore_errors=True)


def _exit(number: int, frame: object) -> NoReturn:
    """End this command at a signal, and through `finally` the program that it runs."""
    sys.exit(128 + number)


def _problem(chosen: argparse.Namespace) -> str | None:
    """Return what is wrong with the options; None if nothing is."""
    if not chosen.module and not os.path.exists(chosen.program):
        return f"There is no file {chosen.program} in {os.getcwd()}. For a module write -m {chosen.program}."
    if chosen.tensorflow is None:
        return (
            "There is no Python with TensorFlow. `replicax export --install tensorflow` installs one, apart from this "
            f"environment. Or name one by --tensorflow or {VARIABLE}. It also needs the program's other libraries."
        )
    if shutil.which(os.path.expanduser(chosen.tensorflow)) is None:
        return f"{chosen.tensorflow} cannot be run. --tensorflow or {VARIABLE} must name a Python that has TensorFlow."
    return None


def _compare(chosen: argparse.Namespace, folder: Path, name: str) -> int:
    """Run the program twice, print the report, and return the exit status."""
    from replicax.tf._programs.compare import comparison, report  # and NumPy, which the help does without

    for library in ("tensorflow", "replicax"):  # of an earlier comparison in this --folder
        (folder / library / "events.jsonl").unlink(missing_ok=True)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "KERAS_BACKEND": "tensorflow"}
    failed = _run(chosen, folder, "TensorFlow", os.path.expanduser(chosen.tensorflow), environment, {})
    if not failed:
        environment = with_our_names(os.environ)
        failed = _run(chosen, folder, "replicax", sys.executable, environment, {"replay": str(folder / "tensorflow")})
    theirs, ours = (comparison.Run.read(str(folder / library)) for library in ("tensorflow", "replicax"))
    compared = comparison.compare(theirs, ours, chosen.rtol)
    if failed:
        print(f"{name}: {failed}", file=sys.stderr)
    if text := report.text(compared, chosen.keep_random):
        print(text)
    print(f"Output of the programs: {folder}{os.sep}tensorflow.log and replicax.log")
    if failed or not compared.steps:
        return _FAILED
    return _EQUAL if compared.is_equal else _DIFFERENT


def _run(
    chosen: argparse.Namespace,
    folder: Path,
    library: str,
    python: str,
    environment: Mapping[str, str],
    options: Mapping[str, str],
) -> str | None:
    """Run the program under a library and record it; return what went wrong, None if nothing did."""
    record = folder / library.lower()
    record.mkdir(parents=True, exist_ok=True)
    recorded = {"folder": str(record), "steps": chosen.steps, "keep_random": chosen.keep_random, **options}
    variables = {**environment, "REPLICAX_COMPARE": json.dumps(recorded)}
    variables.pop("TF_CONFIG", None)  # one process is compared
    command = [python, str(_RUNNER), *(["-m"] if chosen.module else []), chosen.program, *chosen.arguments]
    log = folder / f"{library.lower()}.log"
    print(f"running {chosen.program} under {library} ...", file=sys.stderr, flush=True)
    begin = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(chosen.time_limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and processes that it has started
            process.wait()
    events = record / "events.jsonl"
    steps = events.read_text(encoding="utf-8").count('"event": "step"') if events.exists() else 0
    if status == 0:
        print(f"  {steps} steps in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
    end = (
        f"did not end within {chosen.time_limit:g} s (--time-limit)"
        if status is None
        else f"ended with status {status}"
    )
    text = f"under {library}, {chosen.program} {end}, after {steps} steps. The end of its output:\n"
    hint = "\nInstall TensorFlow for the Python that --tensorflow names." if _lacks_tensorflow(library, lines) else ""
    return text + "\n".join(f"  {line}" for line in lines) + hint


def _lacks_tensorflow(library: str, lines: Sequence[str]) -> bool:
    return library == "TensorFlow" and any("No module named 'tensorflow'" in line for line in lines)
