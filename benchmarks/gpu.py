"""A step that fills one GPU: replicax's strategies beside JAX by hand, and PyTorch.

    python benchmarks/gpu.py                                # on the GPU
    python benchmarks/gpu.py --torch PYTHON                 # with an interpreter that has PyTorch beside it
    python benchmarks/gpu.py --quick --device cpu           # tiny models, to see whether it works

Two models in bfloat16, with parameters and optimizer state in float32: a residual CNN of ResNet-50's sizes with
momentum, and a transformer of GPT-2's with Adam. Each contender is a process of its own, which has the GPU to itself
while it takes its turn, round by round: all are started first, so that a round is one of all. PyTorch runs under
autocast to bfloat16, with `channels_last`, `torch.compile`, fused optimizers and its own attention kernels. The losses
of a few steps are compared.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import statistics
import sys
from typing import Any

from sides import TORCH, Side, Table, Target, finish, names, own_python_with, parsed, parser, ratio, take_turns

BY_HAND = "by hand"
OURS = ["OneDevice", "Mirrored", "CentralStorage"]


def measure(model: str, options: Any, versions: dict[str, str]) -> dict[str, Any]:
    size = "quick" if options.quick else "full"
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(sys.executable, "gpu_jax.py", options.device, size, name, model))
            for name in [*OURS, BY_HAND]
        }
        if options.torch:
            sides[TORCH] = stack.enter_context(Side(options.torch, "gpu_torch.py", options.device, size, model))
        losses, names_ = {}, {}
        for name, side in sides.items():
            answer = side.ask(do="build")
            losses[name], names_[name] = answer["losses"], answer["device"]
            versions |= answer["versions"]
            print(f"{model}, {name}: built", file=sys.stderr)
        right = losses[BY_HAND]
        for name, found in losses.items():
            if any(abs(a - b) > 0.03 * abs(b) for a, b in zip(found, right)):
                raise SystemExit(f"{name} computes something else: losses {found} where {right} are right ({model}).")
        times = take_turns(sides, options.rounds, options.seconds if options.quick else 2.0, least=3)
        memory = {name: side.ask(do="memory")["peak"] for name, side in sides.items()}
    return {"model": model, "device": names_[BY_HAND], "rounds": times, "peak": memory, "losses": losses}


def tables(found: dict[str, Any]) -> dict[str, Table]:
    head = ["model", "contender", "ms a step", "/ by hand", "/ PyTorch", "peak MB"]
    rows = []
    for r in found["gpu"]:
        for name, times in r["rounds"].items():
            peak = f"{r['peak'][name] / 1e6:.0f}" if r["peak"][name] else "–"
            against = [ratio(r["rounds"], name, other) for other in (BY_HAND, TORCH)]
            rows.append([r["model"], name, f"{1e3 * statistics.median(times):.2f}", *against, peak])
    return {"gpu": (f"A step on {found['gpu'][0]['device']}, {found['date']}", head, rows)}


def targets(found: dict[str, Any]) -> list[Target]:
    if not found["on_gpu"]:
        return [Target("GPU step against JAX by hand", 1.02, {})]
    seen = {
        f"{r['model']}, {name}": ratio(r["rounds"], name, BY_HAND)
        for r in found["gpu"]
        for name in ("OneDevice", "Mirrored")  # CentralStorage moves its variables between GPU and host
    }
    return [Target("GPU step against JAX by hand", 1.02, seen)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=["cnn", "transformer"])
    made.add_argument("--device", choices=["cpu", "gpu"], default="gpu")
    made.add_argument("--torch", metavar="PYTHON", default=os.environ.get("REPLICAX_TORCH_PYTHON"))
    options = parsed(made)
    if options.device == "cpu" and not options.quick:
        made.error("these models are too large for a CPU; add --quick.")
    options.torch = options.torch or own_python_with("torch")
    versions: dict[str, str] = {}
    results = [measure(model, options, versions) for model in options.models]
    today = datetime.date.today().isoformat()
    found = {"gpu": results, "date": today, "on_gpu": options.device == "gpu", "versions": versions}
    finish(options, options.device, ("jax", "optax", "numpy"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
