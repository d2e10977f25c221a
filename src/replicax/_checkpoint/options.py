"""Options of saves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class CheckpointOptions:
    """Options of `save` and `write`, for `Checkpoint` and `CheckpointManager`.

    With `enable_async=True`, a save copies the values to the host's memory and returns; a thread writes the checkpoint
    while training goes on. The program may change all variables at once. The next save or restore, and any other call
    that needs the checkpoint, waits for the thread. If the writing failed, that call raises its error. The end of the
    program waits too. `sync()` of the `Checkpoint` waits and does nothing else.

    Args:
        experimental_io_device: accepted for compatibility.
        experimental_enable_async_checkpoint: the same as `enable_async`.
        experimental_write_callbacks: functions that are called when a checkpoint has been written, with its path if
            they have a parameter. An asynchronous save calls them in its thread.
        enable_async: whether to write while training goes on.
        experimental_skip_slot_variables, experimental_sharding_callback: accepted for compatibility.

    >>> import tempfile, replicax as rx
    >>> v = rx.Variable(1.0)
    >>> checkpoint, options = rx.train.Checkpoint(v=v), rx.train.CheckpointOptions(enable_async=True)
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt", options)
    >>> _ = v.assign(2.0)  # while the checkpoint is written
    >>> _ = checkpoint.restore(path)  # waits for it
    >>> float(v)
    1.0
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[..., object]] | None = None
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: Any = None

    def __post_init__(self) -> None:
        self.enable_async = self.enable_async or self.experimental_enable_async_checkpoint
        self.experimental_enable_async_checkpoint = self.enable_async


def is_async(options: object) -> bool:
    """Return whether options, or None, ask for an asynchronous save."""
    names = "enable_async", "experimental_enable_async_checkpoint"
    return any(getattr(options, name, False) for name in names)


def call_back(options: object, path: str) -> None:
    """Call the callbacks of options, or of None, with the path of the new checkpoint if they have a parameter."""
    for callback in getattr(options, "experimental_write_callbacks", None) or ():
        callback(path) if inspect.signature(callback).parameters else callback()
