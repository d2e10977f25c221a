"""The command `replicax plan`. It needs no JAX itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from replicax._base import program_arguments
from replicax._base.commands import add_front_end_options
from replicax._base.planning import PlanError
from replicax._plan import chips, environment, options

_DESCRIPTION = """\
Run a program up to its training step, without values, and compile the step for devices that are not there: what memory
it needs on each, what it communicates, and how long it takes at least. Whatever the program does before its step really
happens, such as writing and deleting files. See `replicax docs how-to/planning`.
"""

_EPILOG = """\
examples:
  replicax plan --install gpu
  replicax plan --topology h100:8 train.py
  replicax plan --topology h100:2x8 --topology v5e:4x4 --step train_step train.py --batch-size 1024
  replicax plan --topology h100:8 --compare --largest-batch train.py
  replicax plan --topology 8 -m project.train

The strategy of the program has as many replicas as the first topology has devices, whichever devices the program names.
Plans for GPUs and TPUs need XLA's compiler for them. --install installs it once, apart from this environment.
"""


def parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of the options and of the program's own arguments."""
    result = program_arguments.parser(name, "--topology TOPOLOGY [options]", _DESCRIPTION, _EPILOG)
    add = result.add_argument
    text = "such as h100:8, h100:2x8 or v5e:2x4, or a number of virtual CPU devices; may be given several times"
    add("--topology", type=_topology, action="append", required=True, metavar="TOPOLOGY", help=text)
    text = "the function that is the step (default: the first compiled function that assigns variables)"
    add("--step", metavar="NAME", help=text)
    text = "install the compiler for GPUs or for TPUs in an environment of its own, in the user's cache"
    add("--install", action=_Install, choices=list(environment.KINDS), help=text)
    text = "the axes of the step's mesh, from the one that spans hosts to the one within a host, such as data,model"
    add("--axes", type=lambda names: names.split(","), metavar="AXES", help=text)
    text = "the most seconds that one compilation takes (default: %(default)g)"
    add("--time-limit", type=_seconds, default=options.TIME_LIMIT, metavar="SECONDS", help=text)
    text = "plan the step also with shard_optimizer_state and shard_variables, and without"
    add("--compare", action="store_true", help=text)
    text = "search the largest batch that fits the memory of a device, by further compilations"
    add("--largest-batch", action="store_true", help=text)
    add_front_end_options(result)
    add("--picture", metavar="FILE", help="draw the plan to this file, such as plan.svg")
    return result


def _topology(text: str) -> chips.Topology:
    try:
        return chips.parse(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        return options.check_time_limit(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Install(argparse.Action):
    """Installs a compiler and ends the command, which needs no program for it."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, kind: Any, *__: object) -> None:
        try:
            environment.compiler(kind).install()
        except PlanError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
        parser.exit(0)


def main(arguments: Sequence[str], name: str) -> int:
    """Runs the command, and returns its exit status."""
    given = parser(name).parse_args(arguments)
    first: chips.Topology = given.topology[0]
    chosen = options.Options(
        topologies=[each.name for each in given.topology],
        step=given.step,
        picture=given.picture,
        module=given.module,
        axes=given.axes,
        time_limit=given.time_limit,
        compare=given.compare,
        largest_batch=given.largest_batch,
        command=[given.program, *given.arguments],
    )
    devices = options.virtual_devices(first)
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "REPLICAX_VIRTUAL_DEVICES": devices}
    variables.pop("TF_CONFIG", None)  # the plan is made in one process
    variables = given.front_end(variables) if given.front_end else variables
    command = [sys.executable, "-m", "replicax._plan.program", json.dumps(dataclasses.asdict(chosen))]
    with subprocess.Popen([*command, *chosen.command], env=variables) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the program ends its compilers
            status = _interrupt(process)
    return status if status >= 0 else 128 - status  # as a shell reports the end by a signal


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program that the terminal has interrupted, or that is interrupted here; return its exit status."""
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()
