"""Names under `experimental` that say how operations run, most of which JAX decides itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def async_scope() -> Iterator[None]:
    """Returns a context at whose end all operations have run, so that their errors are raised there.

    Operations of JAX always run asynchronously, in such a context or not.
    """
    yield
    jax.effects_barrier()


def async_clear_error() -> None:
    """Does nothing: an error of an operation is raised once."""
