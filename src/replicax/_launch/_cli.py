"""The command `replicax launch`: its options."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from replicax._base import program_arguments
from replicax._base.commands import add_front_end_options
from replicax._base.errors import JobError
from replicax._job.channel import parse
from replicax._job.command_lines import JOB_ID, default_job_id
from replicax._launch._environment import LaunchError, check_open_files
from replicax._launch._launcher import TASK_RESTARTS, Launcher, Plan
from replicax._launch._leader import offers
from replicax._launch._output import Screen
from replicax._report import terminal

_DESCRIPTION = """\
Start the same program as several workers of one job, and act as one with them: TF_CONFIG is set for each, their output
comes with their names in front, and when one of them fails all are ended and the first error is shown.
"""

_EPILOG = """\
examples:
  replicax launch --workers 4 train.py --epochs 3
  replicax launch --workers 2 --devices-per-worker 2 --max-restarts 3 -m project.train

  On two machines, the first of which the other one reaches as 10.0.0.1:
    10.0.0.1$  replicax launch --workers 2 --coordinator 10.0.0.1:4000 --worker-rank 0 train.py
    10.0.0.2$  replicax launch --workers 2 --coordinator 10.0.0.1:4000 --worker-rank 1 train.py

  With two parameter servers, and a chief, whose end is that of the job:
    replicax launch --workers 3 --ps 2 train.py

exit status:
  0 when every worker ended with 0. Otherwise that of the worker that failed first, 128 + N if signal N killed it;
  128 + N when signal N ended the launcher; 2 when nothing could be started, or worker 0's launcher was lost.
  With --ps it is the chief's.

A worker finds in its environment: TF_CONFIG, REPLICAX_RESTART_COUNT (0, then 1, ...) and REPLICAX_REPORT_DIR. With --ps
a task also finds REPLICAX_TASK_RESTART_COUNT (its own restarts) and, on one machine, REPLICAX_JOB_SECRET.
`python -m replicax.launch` is the same command.
"""


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the options and of the program's own arguments."""
    result = program_arguments.parser(program, "--workers N [options]", _DESCRIPTION, _EPILOG)
    add = result.add_argument
    add("--workers", type=_positive, required=True, metavar="N", help="how many workers there are on all machines")
    add(
        "--devices-per-worker",
        dest="devices",
        type=_positive,
        metavar="D",
        help="devices of each worker: so many of this machine's GPUs or, where there are none, CPU devices (default: "
        "an even share of the GPUs; one CPU device)",
    )
    add(
        "--max-restarts",
        type=_not_negative,
        default=0,
        metavar="N",
        help="start all workers again after a failure, at most so many times (default: 0)",
    )
    text = """exit statuses of workers that were preempted and have saved their state: with --max-restarts above 0 all
        workers are started again, and it does not count as a failure (default: 42,143; none for none)"""
    known = _codes("42,143")
    add("--preempt-exit-codes", dest="preempt_codes", type=_codes, default=known, metavar="CODES", help=text)
    add(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        help="time from SIGTERM to SIGKILL for workers that are to end (default: 2 after a failure, 30 when the "
        "launcher gets a signal)",
    )
    add(
        "--no-tuning",
        dest="tuning",
        action="store_false",
        help="leave NPROC and GLIBC_TUNABLES as they are; else they are set so that JAX is safe and fast on CPU",
    )
    add_front_end_options(result)
    text = """a name for the job: launchers and workers of other jobs are refused (default: REPLICAX_JOB_ID, or else
        the program and its arguments)"""
    add("--job-id", dest="job", default=os.environ.get(JOB_ID, ""), metavar="ID", help=text)
    terminal.add_option(result)
    _add_servers(result)
    _add_machines(result)
    return result


def _add_servers(parser: argparse.ArgumentParser) -> None:
    title = (
        "Variables are on servers, and a chief has workers compute. All tasks run PROGRAM, which finds its role in "
        "TF_CONFIG."
    )
    add = parser.add_argument_group("parameter servers", title).add_argument
    text = "start so many parameter servers on all machines, and a chief"
    add("--ps", type=_positive, default=0, metavar="P", help=text)
    add("--evaluator", action="store_true", help="start an evaluator beside the chief")
    text = f"restart a worker, ps or evaluator that fails, at most N times each (default: {TASK_RESTARTS})"
    add("--max-task-restarts", type=_not_negative, metavar="N", help=text)


def _add_machines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several machines", "Start the launcher on each of them.").add_argument
    text = "worker 0's machine, as the others reach it, and a free port there"
    add("--coordinator", type=_address, metavar="HOST:PORT", help=text)
    text = "the number of the first worker on this machine"
    add("--worker-rank", dest="first", type=_not_negative, default=-1, metavar="R", help=text)
    text = "how many workers run on this machine (default: 1)"
    add("--workers-here", dest="here", type=_positive, default=0, metavar="K", help=text)
    add("--host", metavar="ADDRESS", help="this machine's address for the workers (default: found by connecting)")
    text = "time for the launchers of all machines to come together (default: 300)"
    add("--start-timeout", type=_seconds, default=300.0, metavar="SECONDS", help=text)


def _address(text: str) -> tuple[str, int]:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    return _number(text, 1)


def _not_negative(text: str) -> int:
    return _number(text, 0)


def _codes(text: str) -> frozenset[int]:
    codes = frozenset(_positive(code) for code in text.split(",")) if text != "none" else frozenset()
    if codes and max(codes) > 255:
        raise argparse.ArgumentTypeError(f"expected exit statuses from 1 to 255; got {text!r}")
    return codes


def _number(text: str, least: int) -> int:
    # No job has so many of anything, and Python does not read numbers of thousands of digits.
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        limit = " and of 9 digits at most" if text.isdecimal() and len(text) > 9 else ""
        raise argparse.ArgumentTypeError(f"expected a whole number, at least {least}{limit}; got {text[:80]!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, at least 0; got {text!r}")
    return value


def complete(plan: Plan) -> None:
    """Fills in what follows from the options; `LaunchError` if they contradict each other or name what is not there."""
    if plan.devices is not None and (virtual := os.environ.get("REPLICAX_VIRTUAL_DEVICES")):
        raise LaunchError(
            f"--devices-per-worker {plan.devices} and REPLICAX_VIRTUAL_DEVICES={virtual} in the environment both say "
            "which devices a worker has. Leave one of them out."
        )
    if plan.coordinator is None:
        several = {"--worker-rank": plan.first >= 0, "--workers-here": plan.here > 0, "--host": plan.host is not None}
        if given := [name for name, is_given in several.items() if is_given]:
            raise LaunchError(f"{given[0]} is for several machines and needs --coordinator HOST:PORT.")
        plan.first, plan.here = 0, plan.workers
    elif plan.first < 0:
        raise LaunchError(
            "--coordinator needs --worker-rank: the number of the first worker on this machine, 0 on the coordinator's "
            "own."
        )
    plan.here = plan.here or 1
    if plan.first + plan.here > plan.workers:
        raise LaunchError(
            f"--workers {plan.workers} are numbered 0 to {plan.workers - 1}, but --worker-rank {plan.first} and "
            f"--workers-here {plan.here} ask for {plan.first} to {plan.first + plan.here - 1} on this machine."
        )
    if not plan.ps and (plan.evaluator or plan.max_task_restarts is not None):
        name = "--evaluator" if plan.evaluator else "--max-task-restarts"
        raise LaunchError(f"{name} is for jobs with parameter servers, and needs --ps.")
    check_open_files(plan.here + offers(plan.ps) + plan.evaluator)
    plan.command = _command(plan)
    plan.job = plan.job or default_job_id(plan.program, plan.arguments)
    if plan.front_end is not None:
        os.environ.update(plan.front_end(os.environ))


def _command(plan: Plan) -> tuple[str, ...]:
    if not plan.module:
        path = Path(plan.program)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise LaunchError(f"{plan.program} is a folder without a __main__.py; name a Python file.")
        if not path.exists():
            raise LaunchError(
                f"There is no file {plan.program} in {os.getcwd()}. Options of the launcher stand in front of the "
                f"program; for a module write -m {plan.program}."
            )
        return (sys.executable, plan.program, *plan.arguments)
    # The top package alone is looked for: to look further would run it.
    package = plan.program.partition(".")[0]
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        missing = not package or importlib.util.find_spec(package) is None
    finally:
        del sys.path[0]
    if missing:
        raise LaunchError(f"There is no module {plan.program}: no {package!r} in {os.getcwd()} or in this Python.")
    return (sys.executable, "-m", plan.program, *plan.arguments)


def main(arguments: Sequence[str], program: str) -> int:
    """Launches the workers, and returns the exit status; `program` is the command's name, for its help."""
    screen = Screen()
    launcher = None
    try:
        if os.name != "posix":
            raise LaunchError(
                "this command needs Linux or macOS. Set TF_CONFIG for each worker, and start them by hand."
            )
        plan = parser(program).parse_args(arguments, Plan())
        screen.colour(plan.color)
        complete(plan)
        launcher = Launcher(plan, screen)
        status = launcher.run()
    except (LaunchError, JobError) as error:
        screen.say(f"error: {error}", alarm=True)
        status = 2
    # Who has asked the launcher to end does not wait for a reader who may never read.
    with contextlib.suppress(KeyboardInterrupt):
        screen.close(5.0 if launcher is not None and launcher.interrupted else None)
    return status
