"""What convolutions cost on CPU devices, as XLA has them and in the forms that replicax gives them.

They are transposed convolutions, which are gradients of strided ones too, the gradients of their kernels, and those of
the kernels of plain convolutions.

python benchmarks/convolutions.py
"""

from __future__ import annotations

import statistics
import time

from sides import finish, parsed, parser, ratio

SIDES = ["as XLA has it", "faster form"]
SHAPES = [(7, 64, 64), (14, 64, 32), (14, 32, 1), (28, 32, 16)]  # height and width, features before and after


def main() -> None:
    options = parsed(parser(__doc__))

    import jax
    import jax.numpy as jnp
    from jax import lax

    from replicax._passes import pipeline
    from replicax._passes.facts import Facts, Stage

    jax.config.update("jax_platforms", "cpu")

    def transposed(x, kernel, weights):
        padding, numbers = [(3, 2), (3, 2)], ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), padding, (2, 2), dimension_numbers=numbers)

    def gradient(x, kernel, weights):
        return jax.grad(lambda kernel: jnp.vdot(transposed(x, kernel, weights), weights))(kernel)

    def plain_gradient(x, kernel, weights):
        numbers = ("NHWC", "HWIO", "NHWC")
        images = weights[:, : x.shape[1], : x.shape[2]]

        def total(kernel):
            return jnp.vdot(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers), images)

        return jax.grad(total)(kernel)

    kinds = {
        "transposed convolution": transposed,
        "its kernel's gradient": gradient,
        "a convolution's kernel's gradient": plain_gradient,
    }

    def seconds(function, *args) -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        return time.perf_counter() - start

    found = []
    for kind, function in kinds.items():
        for size, before, after in SHAPES:
            shapes = (64, size, size, before), (5, 5, before, after), (64, 2 * size, 2 * size, after)
            args = [jnp.full(shape, 0.5) for shape in shapes]
            other = pipeline.rewrite(jax.make_jaxpr(function)(*args), Facts(Stage.FUNCTION, "cpu", optimizes=True))
            functions = dict(zip(SIDES, [jax.jit(function), jax.jit(jax.extend.core.jaxpr_as_fun(other))]))
            rounds: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(options.rounds + 1):
                for side, compiled in functions.items():
                    taken = seconds(compiled, *args)
                    if number:
                        rounds[side].append(taken)
            found.append({"kind": kind, "shapes": shapes, "rounds": rounds})
    cells = [
        [r["kind"], *(" x ".join(map(str, shape)) for shape in r["shapes"][:2])]
        + [f"{1e3 * statistics.median(r['rounds'][side]):.1f}" for side in SIDES]
        + [ratio(r["rounds"], SIDES[1], SIDES[0])]
        for r in found
    ]
    table = "Milliseconds", ["computes", "images", "kernel", *SIDES, "ratio"], cells
    finish(options, "cpu", ("jax", "numpy"), {"convolutions": found}, {"convolutions": table})


if __name__ == "__main__":
    main()
