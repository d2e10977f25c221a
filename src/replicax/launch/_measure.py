"""What `replicax bench` runs in a process of its own for each number of replicas."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import replicax as rx
from replicax.launch import _models


def measure(
    replicas: int, model: str, program: str | None, batch_size: int | None, rounds: int, steps: int, result: str
) -> None:
    """Measures a step on so many replicas, and writes the figures into the file `result`."""
    names = rx.config.list_devices()
    devices = [name for name in names if not name.startswith("CPU:")] or names
    strategy = rx.MirroredStrategy(devices[:replicas])
    if strategy.num_replicas_in_sync < replicas:
        raise SystemExit(f"replicax bench: there are {len(devices)} devices for {replicas} replicas: {devices}.")
    step, batch = _made(strategy, program, batch_size) if program else _models.make_step(strategy, model, batch_size)
    figures = strategy.benchmark(step, batch, rounds, steps)
    Path(result).write_text(json.dumps(figures.as_dict()), encoding="utf-8")


def _made(strategy: rx.Strategy, program: str, batch_size: int | None) -> tuple[Any, Any]:
    """What the user's program makes for this strategy: a step, and a batch or a dataset for it."""
    path, _, name = program.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))  # as where it is run
    make_step = runpy.run_path(path, run_name="replicax_bench").get(name)
    if not callable(make_step):
        raise SystemExit(f"replicax bench: {path} has no function {name}.")
    options = {} if batch_size is None else {"batch_size": batch_size}
    try:
        inspect.signature(make_step).bind(strategy, **options)
    except TypeError as error:
        raise SystemExit(
            f"replicax bench: {name} in {path} is called as {name}(strategy{', batch_size=...' if options else ''}), "
            f"which it does not take: {error}."
        ) from None
    made = make_step(strategy, **options)
    if not isinstance(made, tuple) or len(made) != 2:
        raise SystemExit(
            f"replicax bench: {name} in {path} returns a tuple of a step, and of a batch or a dataset for it; got "
            f"{type(made).__name__}."
        )
    return made


if __name__ == "__main__":
    measure(**json.loads(sys.argv[1]))
