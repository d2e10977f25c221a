"""What the gradient of a layer's weights costs on CPU devices, as XLA computes it and in the order of replicax.

    python benchmarks/products.py --replicas 2

The product `x.T @ g` of activations [rows, inputs] and gradients [rows, outputs] of each replica is added up over the
replicas and subtracted from weights.
"""

from __future__ import annotations

import itertools
import statistics
import time

from sides import finish, numbers, parsed, parser, ratio

SIDES = ["as XLA has it", "in order"]
SHAPES = [(64, 64), (64, 256), (256, 64), (256, 256), (256, 1024), (1024, 256), (512, 2048), (2048, 512), (2048, 2048)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--replicas", type=int, default=2)
    made.add_argument("--rows", type=numbers, default=[32, 128, 512, 2048])
    options = parsed(made)

    import jax
    import jax.numpy as jnp
    from jax import lax

    import replicax as rx

    jax.config.update("jax_platforms", "cpu")
    rx.config.set_virtual_devices({"CPU": options.replicas})
    strategy = rx.MirroredStrategy(jax.devices())

    def step_of(rows: int, inputs: int, outputs: int, optimize: bool):
        rx.config.optimize_programs(optimize)
        with strategy.scope():
            weights = rx.Variable(jnp.zeros((inputs, outputs)))

        @rx.function
        def step():
            def replica():
                x = jnp.full((rows, inputs), 1.0 + weights.value()[0, 0])
                g = jnp.full((rows, outputs), 2.0 + weights.value()[0, 0])
                gradient = lax.transpose(lax.dot_general(g, x, (((0,), (0,)), ((), ()))), (1, 0))
                weights.assign_sub(1e-9 * rx.get_replica_context().all_reduce("sum", gradient))

            strategy.run(replica)

        def run(steps: int) -> float:
            rx.config.optimize_programs(optimize)
            start = time.perf_counter()
            for _ in range(steps):
                step()
                jax.block_until_ready([c.value() for c in weights.values])
            return (time.perf_counter() - start) / steps

        run(2)
        return run

    found = []
    for rows, (inputs, outputs) in itertools.product(options.rows, SHAPES):
        runs = dict(zip(SIDES, (step_of(rows, inputs, outputs, optimize) for optimize in (False, True))))
        rounds: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, run in runs.items():
                rounds[side].append(run(3))
        found.append({"rows": rows, "inputs": inputs, "outputs": outputs, "rounds": rounds})
    cells = [
        [f"{r['rows']}", f"{r['inputs']} x {r['outputs']}"]
        + [f"{1e6 * statistics.median(r['rounds'][side]):.0f}" for side in SIDES]
        + [ratio(r["rounds"], SIDES[1], SIDES[0])]
        for r in found
    ]
    table = f"Microseconds, {options.replicas} replicas", ["rows", "weights", *SIDES, "ratio"], cells
    finish(options, "cpu", ("jax", "numpy"), {"products": found}, {"products": table})


if __name__ == "__main__":
    main()
