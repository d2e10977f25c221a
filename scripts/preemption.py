"""Preempts a job of three workers N times at random moments, and prints what was seen.

python scripts/preemption.py [N] [--seed SEED] [--fresh]

Each time SIGTERM goes to one worker or two. All workers have to stop at one step with the same weights, to end with
exit status 42, and to begin there the next time. In the end the job is run to some later step, and the weights have to
be those of a job that nobody has disturbed, bit for bit. `--fresh` starts each worker in a new interpreter.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Prints a line for each notice, and a summary; exit status 1 if anything was lost or differed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("notices", type=int, nargs="?", default=50)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--fresh", action="store_true")
    chosen = options.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if chosen.fresh:
        os.environ["REPLICAX_TEST_FRESH"] = "1"
    from preemptions import finish, preempt

    choice, good, seconds = random.Random(chosen.seed), 0, []
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), [0, ["0x0.0p+0"] * 3]
        for run in range(chosen.notices):
            seen, output = preempt(folder / "preempted", run, choice)
            right = seen.at_one_step and seen.begun == (expected,) * 3
            good, expected = good + right, seen.stopped[0] or expected
            seconds.append(seen.seconds)
            to = " and ".join(map(str, seen.workers))
            verdict = "one step on all, nothing lost" if right else f"WRONG: {seen}\n{output}"
            print(f"{run + 1:3}: SIGTERM to {to:7} stopped at {expected[0]:5} after {seen.seconds:.2f} s: {verdict}")
            sys.stdout.flush()
        last = expected[0] + 5
        same = finish(folder / "preempted", last) == finish(folder / "undisturbed", last)
    seconds.sort()
    print(f"{good} of {chosen.notices} notices: one step on all workers, nothing lost.")
    middle = seconds[len(seconds) // 2]
    print(f"From the signal to the end of the last worker: median {middle:.2f} s, most {seconds[-1]:.2f} s")
    print(f"At step {last} the weights {'are' if same else 'ARE NOT'} those of an undisturbed job.")
    raise SystemExit(0 if same and good == chosen.notices else 1)


if __name__ == "__main__":
    main()
