"""What the gradient of a transposed convolution's kernel costs on CPU devices, as XLA has it and as replicax has it.

python benchmarks/convolutions.py
"""

from __future__ import annotations

import statistics
import time

from sides import finish, parsed, parser, ratio

SIDES = ["as XLA has it", "exchanged"]
SHAPES = [(7, 64, 64), (14, 64, 32), (14, 32, 1), (28, 32, 16)]  # height and width, features before and after


def main() -> None:
    options = parsed(parser(__doc__))

    import jax
    import jax.numpy as jnp
    from jax import lax

    from replicax._passes import cpu_convolutions

    jax.config.update("jax_platforms", "cpu")

    def gradient(x, kernel, weights):
        def total(kernel):
            padding, numbers = [(3, 2), (3, 2)], ("NHWC", "HWIO", "NHWC")
            out = lax.conv_general_dilated(x, kernel, (1, 1), padding, (2, 2), dimension_numbers=numbers)
            return jnp.vdot(out, weights)

        return jax.grad(total)(kernel)

    def seconds(function, *args) -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        return time.perf_counter() - start

    found = []
    for size, before, after in SHAPES:
        shapes = (64, size, size, before), (5, 5, before, after), (64, 2 * size, 2 * size, after)
        args = [jnp.full(shape, 0.5) for shape in shapes]
        other = cpu_convolutions.exchanged(jax.make_jaxpr(gradient)(*args))
        functions = dict(zip(SIDES, [jax.jit(gradient), jax.jit(jax.extend.core.jaxpr_as_fun(other))]))
        rounds: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(options.rounds + 1):
            for side, function in functions.items():
                taken = seconds(function, *args)
                if number:
                    rounds[side].append(taken)
        found.append({"shapes": shapes, "rounds": rounds})
    cells = [
        [f"{r['shapes'][0]}", f"{r['shapes'][1]}"]
        + [f"{1e3 * statistics.median(r['rounds'][side]):.1f}" for side in SIDES]
        + [ratio(r["rounds"], SIDES[1], SIDES[0])]
        for r in found
    ]
    table = "Milliseconds", ["images", "kernel", *SIDES, "ratio"], cells
    finish(options, "cpu", ("jax", "numpy"), {"convolutions": found}, {"convolutions": table})


if __name__ == "__main__":
    main()
