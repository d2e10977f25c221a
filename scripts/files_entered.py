"""Print the files of replicax that the first call and a later call of a compiled step enter.

python scripts/files_entered.py [STEP ...]

A reader who follows a call has to open these files. A file counts if the calling thread calls one of its functions.
tests/engine/test_files_entered.py holds the limits in LIMITS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType

# The most files that the first and a later call of each step may enter. A slow compilation enters one file more, and so
# does memory that the host frees meanwhile.
LIMITS = {"plain": (47, 19), "training": (57, 26), "nnx": (60, 26)}

os.environ.setdefault("REPLICAX_VIRTUAL_DEVICES", "GPU:2")

import replicax as rx  # noqa: E402 - the devices come first

rx.get_replica_context, rx.GradientTape, rx.share_of_mean  # noqa: B018 - `import replicax` imports a name when it is used

SOURCE = Path(rx.__file__).parent
Step = Callable[[], object]


def plain_step() -> Step:
    """Return a step that computes a gradient with JAX, sums it over the replicas and assigns a variable."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    strategy = rx.MirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(jnp.ones(3), aggregation=rx.VariableAggregation.MEAN)

    def replica_step(x: jax.Array) -> jax.Array:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights.value())
        gradient = rx.get_replica_context().all_reduce("mean", gradient)
        weights.assign_sub(0.1 * gradient)
        return loss

    @rx.function
    def step(x: jax.Array) -> jax.Array:
        return strategy.reduce("mean", strategy.run(replica_step, args=(x,)), axis=None)

    dataset = rx.data.Dataset.from_tensor_slices(np.ones((8, 3), np.float32)).batch(8)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    return lambda: step(batch)


def training_step() -> Step:
    """Return a step that takes a batch of a distributed dataset and applies its gradients with an optimizer."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    strategy = rx.MirroredStrategy()
    dataset = rx.data.Dataset.from_tensor_slices(np.ones((64, 3), np.float32)).repeat().batch(8)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        weights = rx.Variable(jnp.ones(3))
        optimizer = rx.Optimizer(optax.adam(0.1), [weights])

    def replica_step(x: object) -> object:
        with rx.GradientTape() as tape:
            loss = rx.share_of_mean((x @ weights) ** 2)
        optimizer.apply_gradients(tape.gradient(loss, [weights]))
        return loss

    @rx.function
    def step() -> object:
        return strategy.reduce("sum", strategy.run(replica_step, args=(next(batches),)), axis=None)

    return step


def nnx_step() -> Step:
    """Return a step that trains a Flax NNX model with an optimizer of NNX."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    strategy = rx.MirroredStrategy()
    dataset = rx.data.Dataset.from_tensor_slices(np.ones((64, 3), np.float32)).repeat().batch(8)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def replica_step(x: object) -> object:
        loss, gradient = nnx.value_and_grad(lambda model: rx.share_of_mean(jnp.sum(model(x) ** 2, axis=-1)))(model)
        optimizer.update(model, rx.get_replica_context().all_reduce("sum", gradient))
        return loss

    @rx.function
    def step() -> object:
        return strategy.reduce("sum", strategy.run(replica_step, args=(next(batches),)), axis=None)

    return step


STEPS = {"plain": plain_step, "training": training_step, "nnx": nnx_step}


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Collect the files of replicax whose functions this thread calls in the context."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before, entered = sys.getprofile(), set[str]()
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        entered.update(str(Path(file).relative_to(SOURCE)) for file in files if file.startswith(f"{SOURCE}{os.sep}"))


def files_of(step: Step) -> tuple[set[str], set[str]]:
    """Return the files that the first call of a step enters, and those of the fourth."""
    with recorded() as first:
        step()
    step()
    step()
    with recorded() as later:
        step()
    return first, later


def show(files: set[str]) -> None:
    """Print files by package."""
    for package, group in groupby(sorted(files), lambda file: file.rpartition("/")[0]):
        names = [file.rpartition("/")[2].removesuffix(".py") for file in group]
        print(f"  {package or '.':18} {len(names):2}  {' '.join(names)}")


def main() -> None:
    """Print the files of each step's first and later call."""
    for name in sys.argv[1:] or STEPS:
        first, later = files_of(STEPS[name]())
        print(f"{name}: a first call enters {len(first)} files (at most {LIMITS[name][0]})")
        show(first)
        print(f"{name}: a later call enters {len(later)} files (at most {LIMITS[name][1]})")
        show(later)


if __name__ == "__main__":
    main()
