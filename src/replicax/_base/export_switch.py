"""The switch of exporting: whether functions are traced for a model that another process runs on one device."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_for_one_device = contextvars.ContextVar("for_one_device", default=False)


def traces_for_one_device() -> bool:
    """Return whether on-read variables count as variables of one value in cross-replica context."""
    return _for_one_device.get()


@contextlib.contextmanager
def tracing_for_one_device() -> Iterator[None]:
    """Return a context in which they do. Functions have programs of their own in it."""
    token = _for_one_device.set(True)
    try:
        yield
    finally:
        _for_one_device.reset(token)
