"""Plans of the examples' training steps for GPUs or TPUs: how long they take, and what they say of memory.

    replicax plan --install gpu                              # the compiler for GPUs, once
    python benchmarks/plans.py                               # h100; TPUs with --kind v5e or v5p
    python benchmarks/plans.py --only digits,nnx

Each plan is a run of `replicax plan` of its own. Its times are those of the whole command: the program up to its step,
its trace, and the compiler in its process. The processor's time tells more on a machine that is busy.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

from sides import HERE, environment, finish, names, parsed, parser

EXAMPLES = ["custom_training", "digits", "keras_fit", "multi_worker", "nnx", "preemption", "tpu"]
TOPOLOGIES = {
    "h100": ["h100:8", "h100:2x8", "h100:8x8"],
    "v5e": ["v5e:2x4", "v5e:8x8", "v5e:16x16"],
    "v5p": ["v5p:2x2x2", "v5p:4x4x4", "v5p:4x8x8"],
}
COMMAND = "import sys; from replicax._commands import main; sys.exit(main())"
ROWS = ["replicas", "variables", "optimizer and other state", "temporaries", "program", "needed", "compiled in"]


def planned(example: str, topology: str) -> dict[str, str | float]:
    """The rows of a plan's table, and the seconds that the command took."""
    program = HERE.parent / "examples" / f"{example}.py"
    command = [sys.executable, "-c", COMMAND, "plan", "--topology", topology, str(program)]
    began, busy = time.perf_counter(), processor_seconds()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    seconds, busy = time.perf_counter() - began, processor_seconds() - busy
    if done.returncode:
        raise SystemExit(f"The plan of {example} for {topology} failed:\n{done.stderr}")
    lines = [line.strip() for line in done.stdout.splitlines()]
    found = {row: next(line for line in lines if line.startswith(f"{row} ")).removeprefix(row).strip() for row in ROWS}
    return {"example": example, "topology": topology, "seconds": seconds, "processor": busy, **found}


def processor_seconds() -> float:
    """Those of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(plans: list[dict[str, str | float]]) -> tuple[list[str], list[list[str]]]:
    texts = ["example", "topology", *ROWS]
    rows = [[str(plan[name]) for name in texts] for plan in plans]
    times = [[f"{plan[name]:.1f} s" for name in ("seconds", "processor")] for plan in plans]
    return [*texts, "whole command", "of the processor"], [[*row, *time] for row, time in zip(rows, times)]


def main() -> None:
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument("--kind", choices=TOPOLOGIES, default="h100")
    made.add_argument(
        "--only", type=names, default=EXAMPLES, metavar="NAME,NAME", help=f"some of {', '.join(EXAMPLES)}"
    )
    options = parsed(made)
    topologies = TOPOLOGIES[options.kind][:1] if options.quick else TOPOLOGIES[options.kind]
    plans = [planned(example, topology) for example in options.only for topology in topologies]
    shown = {"plans": ("Plans of the examples", *table(plans))}
    finish(options, "XLA's compiler for TPUs", ["jax"], {"plans": plans}, shown)


if __name__ == "__main__":
    main()
