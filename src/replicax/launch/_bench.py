"""`replicax bench`: where a step's time goes, on one replica and on several."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from replicax._figures import Benchmark, Benchmarks
from replicax._help import install
from replicax.launch._cluster import visible_gpus, with_large_pages

_MODELS = ("mlp", "cnn", "transformer")
_DESCRIPTION = """\
Measure where the time of a training step goes: compute, communication and input, on one replica and on several, each
in a process of its own; and what a device holds in memory. Where there are too few GPUs, the replicas are on as many
virtual devices of this machine's CPU. docs/profiling.md says what the figures mean.
"""
_EPILOG = """\
examples:
  replicax bench --replicas 1,2,4 --plot bench.png
  replicax bench --program train.py:make_step --json bench.json

  make_step(strategy) returns a tuple: the step, and a batch or a dataset for it. With --batch-size it is called as
  make_step(strategy, batch_size=N).
"""


def parser(program: str) -> argparse.ArgumentParser:
    """The parser of the options."""
    result = argparse.ArgumentParser(
        program,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = result.add_mutually_exclusive_group()
    what.add_argument("--model", choices=_MODELS, default="mlp", help="a small model of its own (default: mlp)")
    what.add_argument("--program", metavar="FILE.py:FUNCTION", help="the user's own step")
    result.add_argument(
        "--replicas",
        type=_counts,
        metavar="N,...",
        help="numbers of replicas to measure (default: 1, and the number of GPUs or 2)",
    )
    result.add_argument("--batch-size", type=_positive, metavar="N", help="examples of all replicas together")
    result.add_argument("--rounds", type=_positive, default=20, metavar="N", help="rounds to measure (default: 20)")
    result.add_argument("--steps", type=_positive, default=5, metavar="N", help="steps of a round (default: 5)")
    result.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture, such as bench.png")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    return result


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1; got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(_positive(part.strip()) for part in text.split(",")))


class _Failed(Exception):
    """What the user has to know or to change; its text is all that is shown."""


def bench(arguments: Sequence[str], program: str) -> int:
    """Measures, and prints the table.

    Args:
        arguments: those of the command line.
        program: the command's name, for its help.

    Returns:
        The exit status.
    """
    options = parser(program).parse_args(arguments)
    try:
        gpus = len(visible_gpus(os.environ))
        counts = options.replicas or list(dict.fromkeys([1, gpus or 2]))
        _check(options, max(counts))
        figures = Benchmarks([_measured(options, count, max(counts) > gpus) for count in counts])
    except _Failed as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    _print(figures)
    if options.json:
        options.json.write_text(json.dumps(figures.as_dict(), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        figures.plot(options.plot)
    return 0


def _check(options: argparse.Namespace, replicas: int) -> None:
    """What would fail only after a while is found before anything is measured."""
    if options.batch_size and options.batch_size < replicas:
        raise _Failed(f"{replicas} replicas cannot share a batch of {options.batch_size} examples.")
    for name, path in (("--plot", options.plot), ("--json", options.json)):
        if path is not None and not _can_be_written(path):
            raise _Failed(f"{name} names a file in a folder that can be written; got {path}.")
    needed = [("--plot", "matplotlib")] if options.plot else []
    if options.program:
        path, _, function = options.program.rpartition(":")
        if not path or not function.isidentifier():
            raise _Failed(f"--program is FILE.py:FUNCTION, such as train.py:make_step; got {options.program}.")
        if not Path(path).is_file():
            raise _Failed(f"There is no file {path} in {os.getcwd()}.")
    else:
        needed.append((f"--model {options.model}", "optax"))
    for name, library in needed:
        if importlib.util.find_spec(library) is None:
            raise _Failed(f"{name} needs {library}: {install('bench')}.")
    if options.plot:
        kinds = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
        if options.plot.suffix and options.plot.suffix[1:].lower() not in kinds:
            known = ", ".join(sorted(kinds))
            raise _Failed(f"--plot names a picture of a kind that matplotlib draws ({known}); got {options.plot}.")


def _can_be_written(path: Path) -> bool:
    """Whether this can become a file, or is one that may be replaced."""
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)


def _measured(options: argparse.Namespace, replicas: int, virtual: bool) -> Benchmark:
    """The figures for so many replicas, from a process of its own."""
    what = f"{replicas} replica{'s' * (replicas > 1)}"
    print(f"measuring {what} ...", file=sys.stderr, flush=True)
    environment = dict(os.environ)
    if virtual:
        environment.update(JAX_PLATFORMS="cpu", REPLICAX_VIRTUAL_DEVICES=f"CPU:{replicas}")
    environment = with_large_pages(environment)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        request = {
            "replicas": replicas,
            "model": options.model,
            "program": options.program,
            "batch_size": options.batch_size,
            "rounds": options.rounds,
            "steps": options.steps,
            "result": str(result),
        }
        command = [sys.executable, "-m", "replicax.launch._measure", json.dumps(request)]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status or not result.exists():
            raise _Failed(f"the process that measures {what} ended with {status}; see above.")
        return Benchmark(**json.loads(result.read_text(encoding="utf-8")))


def _print(figures: Benchmarks) -> None:
    try:
        import rich
    except ImportError:
        print(figures)
    else:
        rich.print(figures)
