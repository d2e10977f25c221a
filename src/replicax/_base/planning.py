"""The switches of planning: whether strategies take all devices, and whether new variables have no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# Whether strategies take all devices of the process, whichever the program names. `replicax plan` sets it in a process
# that has as many virtual devices as the first topology.
takes_all_devices = False

_abstract = 0  # contexts of `abstract_variables` that are open, in all threads


class PlanError(ValueError):
    """A step cannot be planned."""


def are_abstract() -> bool:
    """Returns whether new variables have shapes in place of values."""
    return _abstract > 0


def refuse_saving(method: str) -> None:
    """Raises `PlanError` if new variables have no values, before the method of this name opens a file."""
    if are_abstract():
        raise PlanError(
            f"{method} is called where variables have no values: in `abstract_variables()`, or by a program that is "
            "planned, before its step. Call it after the step."
        )


@contextlib.contextmanager
def abstract_variables() -> Iterator[None]:
    """Returns a context in which new variables have shapes and dtypes, but no values, for steps that are only planned.

    This lets `plan` work for a model that is larger than the memory of this machine. A function that gives an initial
    value is only traced, unless it needs concrete values. The value of such a variable is a `jax.ShapeDtypeStruct`, and
    assignments to it are ignored. A step with such variables can be planned, but not run. The context holds for
    variables that any thread makes meanwhile.

    >>> import jax.numpy as jnp, replicax as rx
    >>> with rx.experimental.abstract_variables():
    ...     table = rx.Variable(lambda: jnp.zeros((10**9, 10**3)))  # 4 TB
    >>> table.shape, table.value()
    (TensorShape([1000000000, 1000]), ShapeDtypeStruct(shape=(1000000000, 1000), dtype=float32))
    """
    global _abstract
    _abstract += 1
    try:
        yield
    finally:
        _abstract -= 1
