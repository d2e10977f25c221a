"""Where a step's time goes on one replica and on several: `strategy.benchmark` for each number, side by side.

    python benchmarks/scaling.py --replicas 1,2,4 --plot scaling.svg
    python benchmarks/scaling.py --model transformer --json scaling.json
    python benchmarks/scaling.py --program train.py:make_step

`make_step(strategy)` returns a tuple: the step, and a batch or a dataset for it. With --batch-size it is called as
`make_step(strategy, batch_size=N)`. Each number of replicas is measured in a process of its own, on GPUs where there
are enough for the largest number, and otherwise on as many virtual devices of the CPU.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
from sides import environment

MODELS = ("mlp", "cnn", "transformer")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--model", choices=MODELS, default="mlp", help="one of benchmarks/models.py (default: mlp)")
    what.add_argument("--program", metavar="FILE.py:FUNCTION", help="a step of your own")
    made.add_argument("--replicas", type=_counts, default=[1, 2], metavar="N,...", help="default: 1,2")
    made.add_argument("--batch-size", type=int, metavar="N", help="examples of all replicas together")
    made.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds to measure (default: 20)")
    made.add_argument("--steps", type=int, default=5, metavar="N", help="steps of a round (default: 5)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture, such as scaling.svg")
    made.add_argument("--measure", type=int, metavar="N", help=argparse.SUPPRESS)  # in a process that this one starts
    return made


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.measure:
        options.json.write_text(json.dumps(measure(options, options.measure)))
        return
    import replicax as rx
    from replicax._launch._environment import visible_gpus

    virtual = max(options.replicas) > len(visible_gpus(environment()))
    figures = [rx.Benchmark(**_in_its_own_process(arguments, count, virtual)) for count in options.replicas]
    beside = rx.Benchmarks(figures)
    print(beside)
    if options.json:
        options.json.write_text(json.dumps(beside.as_dict(), indent=1) + "\n")
    if options.plot:
        beside.save(options.plot)


def _in_its_own_process(arguments: Sequence[str], replicas: int, virtual: bool) -> dict[str, Any]:
    print(f"measuring {replicas} replica{'s' * (replicas > 1)} ...", file=sys.stderr, flush=True)
    variables = environment()
    if virtual:
        variables.update(JAX_PLATFORMS="cpu", REPLICAX_VIRTUAL_DEVICES=f"CPU:{replicas}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        command = [sys.executable, __file__, *arguments, "--measure", str(replicas), "--json", str(result)]
        if status := subprocess.run(command, env=variables, check=False).returncode:
            sys.exit(f"The process that measures {replicas} replicas ended with {status}; see above.")
        return json.loads(result.read_text())


def measure(options: argparse.Namespace, replicas: int) -> dict[str, Any]:
    """The figures of a step on so many of this process's devices."""
    import replicax as rx

    names = rx.config.list_devices()
    devices = [name for name in names if not name.startswith("CPU:")] or names
    if len(devices) < replicas:
        sys.exit(f"There are {len(devices)} devices for {replicas} replicas: {devices}.")
    strategy = rx.MirroredStrategy(devices[:replicas])
    if options.program:
        path, _, function = options.program.rpartition(":")
        sys.path.insert(0, str(Path(path).resolve().parent))  # as where it is run
        sizes = {} if options.batch_size is None else {"batch_size": options.batch_size}
        step, batch = runpy.run_path(path)[function](strategy, **sizes)
    else:
        step, batch = make_step(strategy, options.model, options.batch_size)
    return strategy.benchmark(step, batch, options.rounds, options.steps).as_dict()


def make_step(strategy: Any, name: str, batch_size: int | None = None) -> tuple[Any, Any]:
    """A training step of a model with Adam, and a dataset of random examples for it."""
    import jax
    import optax

    import replicax as rx

    model, ops = models.MODELS[name], models.jax_ops()
    with strategy.scope():
        parameters = rx.Variable(model.parameters())
        optimizer = rx.Optimizer(optax.adam(1e-3), parameters)

    @rx.function
    def train_step(x: Any, y: Any) -> Any:
        def replica_step(x: Any, y: Any) -> Any:
            def loss_of(p: Any) -> Any:
                return models.loss(ops, model, p, x, y, strategy.num_replicas_in_sync)

            loss, gradients = jax.value_and_grad(loss_of)(parameters.value())
            optimizer.apply_gradients(gradients)
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    rows = models.batch(model, strategy.num_replicas_in_sync)
    size = batch_size or len(rows[0])
    return train_step, rx.data.Dataset.from_tensor_slices(rows).shuffle(len(rows[0])).repeat().batch(size)


if __name__ == "__main__":
    main(sys.argv[1:])
