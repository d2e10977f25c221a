"""What the benchmarks share: the processes that hold contenders, the rounds in which they take turns, and tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TENSORFLOW, TORCH = "TensorFlow", "PyTorch"
BY_HAND = ["by hand, packed", "by hand, apart", "by hand, NamedSharding"]  # forms of a step, of which the best counts

Table = tuple[str, list[str], list[list[str]]]  # title, head, rows


class Target(NamedTuple):
    """What a figure has to be, and what it is, as `ratio` gives it, in each of the cases that were measured."""

    figure: str
    limit: float
    seen: Mapping[str, str]
    least: bool = False  # whether the limit is the least that will do, not the most

    def row(self) -> list[str]:
        numbers = {case: float(text) for case, text in self.seen.items() if text != "–"}
        limit = f"at {'least' if self.least else 'most'} {self.limit:g}"
        if not numbers:
            return [self.figure, limit, "–", "–", "not measured"]
        worst = (min if self.least else max)(numbers, key=numbers.__getitem__)
        reached = numbers[worst] >= self.limit if self.least else numbers[worst] <= self.limit
        middle = f"{statistics.median(numbers.values()):.2f}"
        return [self.figure, limit, middle, f"{numbers[worst]:.2f} ({worst})", "yes" if reached else "not yet"]


TARGET_COLUMNS = ["figure", "target", "median of the cases", "worst case", "reached"]


class Side:
    """Processes that hold contenders, in a `with`: one or, as workers of one job, several that are asked the same.

    Args:
        command: an interpreter, one of the scripts here, and its arguments.
        workers: how many processes; several get what `replicax launch` gives its workers.
        devices: how many CPU devices each of several workers has.
        quiet: whether to drop what they say on stderr.
        deadline: seconds for an answer.
    """

    def __init__(self, *command: str, workers: int = 1, devices: int = 1, quiet: bool = False, deadline: float = 300.0):
        python, script, *arguments = command
        self._command = [python, str(HERE / script), *arguments]
        self._workers, self._devices, self._deadline = workers, devices, deadline
        self._stderr = subprocess.DEVNULL if quiet else None
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Side:
        for one in self._environments():
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=one,
                start_new_session=True,  # as the launcher does it; Linux shares the cores between sessions
            )
            self._processes.append(process)
        return self

    def _environments(self) -> Iterator[dict[str, str]]:
        if self._workers == 1:
            yield environment()
            return
        from replicax._launch._environment import Ports, worker_environment

        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        ports = Ports(self._workers)
        ports.release()
        cluster = [f"127.0.0.1:{port}" for port in ports.numbers]
        base = {**environment(), "JAX_PLATFORMS": "cpu", "REPLICAX_PREFLIGHT": "quiet"}
        for worker in range(self._workers):
            yield worker_environment(
                base, cluster=cluster, worker=worker, devices=self._devices, gpus=None, report_folder=folder, attempt=0,
                tuning=True,
            )  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of the first process, with the longest time of all."""
        for process in self._processes:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        answers = [self._answer(process, request) for process in self._processes]
        longest = {"seconds": max(a["seconds"] for a in answers)} if "seconds" in answers[0] else {}
        return {**answers[0], **longest}

    def _answer(self, process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
        assert process.stdout
        if not select.select([process.stdout], [], [], self._deadline)[0]:
            raise SystemExit(f"{self._command[1:]} has not answered {request} for {self._deadline:.0f} s.")
        if not (line := process.stdout.readline()):
            raise SystemExit(f"The process of {self._command[1:]} ended with {process.wait()} at {request}.")
        return json.loads(line)

    def __exit__(self, kind: Any, *_: object) -> None:
        for process in self._processes:
            assert process.stdin and process.stdout
            if kind is not None:
                process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()


def environment() -> dict[str, str]:
    """That of all sides alike: the C library keeps large buffers, as the launcher has it for workers.

    Python keeps bytecode, as it comes with an installed package, even where it is told to keep none: to compile our
    sources takes longer than to import them, while those of the installed libraries are compiled already.
    """
    from replicax._launch._environment import with_large_pages

    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return with_large_pages({**kept, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def take_turns(sides: dict[str, Side], rounds: int, seconds: float, least: int = 5) -> dict[str, list[float]]:
    """The seconds of a step of each contender, round by round; a round lasts about `seconds`, or `least` steps."""
    steps, times = {}, {name: [] for name in sides}  # type: ignore[var-annotated]
    for name, side in sides.items():
        side.ask(do="run", contender=name, steps=least)
        once = side.ask(do="run", contender=name, steps=2 * least)["seconds"] / (2 * least)
        steps[name] = max(least, int(seconds / once))
    for round_ in range(rounds):
        order = list(sides) if round_ % 2 == 0 else list(sides)[::-1]
        for name in order:
            took = sides[name].ask(do="run", contender=name, steps=steps[name])["seconds"]
            times[name].append(took / steps[name])
    return times


def ratio(rounds: dict[str, list[float]], of: str, to: str) -> str:
    """The median of the rounds' ratios: what slows the machine for a while slows both sides of a round."""
    if of not in rounds or to not in rounds:
        return "–"
    return f"{statistics.median(a / b for a, b in zip(rounds[of], rounds[to])):.2f}"


def spread(rounds: dict[str, list[float]], of: str, to: str) -> str:
    """The median of the rounds' ratios, with the range in which the middle half of them lies.

    >>> spread({"a": [2.0, 3.0, 4.0], "b": [2.0, 2.0, 2.0]}, "a", "b")
    '1.50 (1.25–1.75)'
    """
    if of not in rounds or to not in rounds or len(rounds[to]) < 2:
        return ratio(rounds, of, to)
    low, _, high = statistics.quantiles([a / b for a, b in zip(rounds[of], rounds[to])], n=4, method="inclusive")
    return f"{ratio(rounds, of, to)} ({low:.2f}–{high:.2f})"


def best(rounds: dict[str, list[float]], among: Sequence[str]) -> str:
    """The one of these contenders with the shortest median; the first one, where none was measured."""
    return min((name for name in among if name in rounds), key=lambda n: statistics.median(rounds[n]), default=among[0])


def show(title: str, head: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        print(f"\n{title}")
        for row in [head, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
        return
    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def parser(about: str | None) -> argparse.ArgumentParser:
    """What every benchmark can be told."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--tensorflow", metavar="PYTHON", default=os.environ.get("REPLICAX_TENSORFLOW_PYTHON"))
    made.add_argument("--quick", action="store_true", help="few short rounds, to see whether it works")
    made.add_argument("--json", metavar="FILE", help="write every number there")
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    options = made.parse_args()
    options.seconds = 0.03 if options.quick else 0.2
    options.rounds = min(options.rounds, 3) if options.quick else options.rounds
    sys.path.insert(0, str(HERE.parent / "src"))
    return options


def own_python_with(module: str) -> str | None:
    """This interpreter, if it has the module."""
    return sys.executable if importlib.util.find_spec(module) else None


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def finish(
    options: argparse.Namespace,
    device: str,
    packages: Sequence[str],
    found: dict[str, Any],
    tables: Mapping[str, Table] | None = None,
    targets: Sequence[Target] = (),
) -> None:
    """Shows the tables and how the targets fare, says on what all of it was measured, and writes it down."""
    from importlib.metadata import version

    for table in (tables or {}).values():
        show(*table)
    if targets:
        show("Targets", TARGET_COLUMNS, [target.row() for target in targets])
    versions = {name: version(name) for name in packages}
    versions = {**versions, **found.pop("versions", {}), "python": platform.python_version()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {device}"
    print(f"{machine}; " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine, "versions": versions, **found}, indent=1))
