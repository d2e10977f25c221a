"""What an all-reduce costs: replicax beside JAX by hand, TensorFlow, PyTorch's Gloo, and a plain copy of the bytes.

    python benchmarks/collectives.py                                        # two processes; 2, 4 and 8 devices of one
    python benchmarks/collectives.py --tensorflow PYTHON --torch PYTHON     # with interpreters that have these
    python benchmarks/collectives.py --processes 2 --devices ''             # between processes alone

All sides take turns in one run, round by round, so that what else the machine does hits them alike. Every call is
awaited before the next; the inputs are arguments, and stay as they are. The
page on performance says what came out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from typing import Any

from payloads import PAYLOADS
from sides import (
    TENSORFLOW,
    TORCH,
    Side,
    finish,
    names,
    numbers,
    own_python_with,
    parsed,
    parser,
    ratio,
    show,
    take_turns,
)

PACKED = "by hand, packed"  # differs where there are several arrays


def sides_on(
    stack: contextlib.ExitStack, options: argparse.Namespace, workers: int, replicas: int, versions: dict[str, str]
) -> dict[str, Side]:
    """The contenders, started, on so many processes or on so many devices of one."""

    def started(python: str, script: str, quiet: bool = False) -> Side:
        return stack.enter_context(Side(python, script, str(replicas), workers=workers, quiet=quiet))

    ours = started(sys.executable, "collectives_jax.py")
    sides = dict.fromkeys(["replicax", "replicax eager", "by hand", PACKED], ours)
    if options.tensorflow:
        sides[TENSORFLOW] = started(options.tensorflow, "collectives_tensorflow.py", quiet=True)
        versions["tensorflow"] = sides[TENSORFLOW].ask(do="version")["version"]
    if options.torch and workers > 1:  # its Gloo works between processes alone
        sides[TORCH] = started(options.torch, "collectives_torch.py", quiet=True)
        versions["torch"] = sides[TORCH].ask(do="version")["version"]
    return {**sides, "copy": ours}


def measure(payload: str, sides: dict[str, Side], rounds: int, seconds: float) -> dict[str, Any]:
    """The rounds' times of each contender, and their medians; of the copy, which is a limit, the shortest."""
    sides = {name: side for name, side in sides.items() if name != PACKED or PAYLOADS[payload][0] > 1}
    sums = {name: side.ask(do="build", contender=name, payload=payload)["sums"] for name, side in sides.items()}
    for name, found in sums.items():
        if name != "copy" and any(abs(a - b) > 1e-5 for a, b in zip(found, sums["by hand"])):
            raise SystemExit(f"{name} computes something else for {payload}: {found}, not {sums['by hand']}.")
    times = take_turns(sides, rounds, seconds, least=3)
    for side in set(sides.values()):
        side.ask(do="drop")
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"payload": payload, "call": {**medians, "copy": min(times["copy"])}, "rounds": times}


def table(results: list[dict[str, Any]], sides: list[str]) -> tuple[list[str], list[list[str]]]:
    against = [name for name in ("by hand", PACKED, TENSORFLOW, TORCH) if name in sides]
    head = ["bytes", *sides, *(f"/ {name}" for name in against), "/ copy"]
    rows = []
    for r in results:
        call = r["call"]
        cells = [_three_digits(1e6 * call[side]) if side in call else "–" for side in sides]
        ratios = [ratio(r["rounds"], "replicax", name) for name in against]
        rows.append([r["payload"], *cells, *ratios, _three_digits(call["replicax"] / call["copy"])])
    return head, rows


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def compare(options: argparse.Namespace) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    places = [(f"{n} processes", n, n) for n in options.processes] + [(f"{n} devices", 1, n) for n in options.devices]
    for place, workers, replicas in places:
        with contextlib.ExitStack() as stack:
            sides = sides_on(stack, options, workers, replicas, versions)
            results = []
            for payload in options.payloads:
                results.append(measure(payload, sides, options.rounds, options.seconds / 2))
                print(f"{place}, {payload}: done", file=sys.stderr)
        show(f"Microseconds of an all-reduce between {place}", *table(results, list(sides)))
        found += [{"between": place, **result} for result in results]
    return {"collectives": found, "versions": versions}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--torch", metavar="PYTHON", default=os.environ.get("REPLICAX_TORCH_PYTHON"))
    made.add_argument("--processes", type=_some_numbers, metavar="N,N", default=[2], help="of one device each")
    made.add_argument("--devices", type=_some_numbers, metavar="N,N", default=[2, 4, 8], help="of one process")
    made.add_argument("--payloads", type=names, default=list(PAYLOADS), help=f"some of {', '.join(PAYLOADS)}")
    options = parsed(made)
    if unknown := [name for name in options.payloads if name not in PAYLOADS]:
        made.error(f"no such payload: {', '.join(unknown)}. There are {', '.join(PAYLOADS)}.")
    options.torch = options.torch or own_python_with("torch")
    finish(options, "cpu", ("jax", "numpy"), compare(options))


def _some_numbers(text: str) -> list[int]:
    return numbers(text) if text else []


if __name__ == "__main__":
    main()
