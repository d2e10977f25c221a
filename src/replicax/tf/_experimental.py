"""Names under `experimental` and in `tf.train` that say how operations run, most of which JAX decides itself."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

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


@dataclasses.dataclass
class CheckpointOptions:
    """Options of checkpoints. Only the callbacks have an effect.

    Args:
        experimental_io_device, experimental_enable_async_checkpoint, enable_async, experimental_skip_slot_variables,
            experimental_sharding_callback: accepted for compatibility.
        experimental_write_callbacks: functions that are called when a checkpoint has been written, with its path if
            they have a parameter.
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Any = None
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: Any = None
