"""What is different where a program is only planned: devices that stand for others, and variables without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# Whether strategies take all devices that there are, whichever the program names. `replicax plan` starts a program so,
# with as many virtual devices as it plans for.
takes_all_devices = False

_abstract = False


class PlanError(ValueError):
    """A step cannot be planned."""


def are_abstract() -> bool:
    """Returns whether new variables have shapes in place of values."""
    return _abstract


@contextlib.contextmanager
def abstract_variables() -> Iterator[None]:
    """Returns a context in which new variables have shapes and dtypes, but no values, for steps that are only planned.

    So `plan` works for a model that is larger than the memory of this machine. An initial value that is given by a
    function is not computed. Such a variable reads as a `jax.ShapeDtypeStruct`, and what it is assigned is ignored. A
    step that has such variables can be planned, but not run.

    >>> import jax.numpy as jnp, replicax as rx
    >>> with rx.experimental.abstract_variables():
    ...     table = rx.Variable(lambda: jnp.zeros((10**9, 10**3)))  # 4 TB
    >>> table.shape, table.value()
    (TensorShape([1000000000, 1000]), ShapeDtypeStruct(shape=(1000000000, 1000), dtype=float32))
    """
    global _abstract
    before, _abstract = _abstract, True
    try:
        yield
    finally:
        _abstract = before
