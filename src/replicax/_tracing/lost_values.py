"""Variables whose values are gone, since a step that had taken their arrays over failed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import jax

from replicax._base import doc_pages
from replicax._base.errors import StepError
from replicax._tracing import frames
from replicax._tracing.protocols import Stored


class _Program(Protocol):
    """A compiled program, as far as an error tells of it."""

    name: str
    level: frames.TraceFrame


any_lost = False  # whether a failed step has ever taken the values of variables with it
programs: weakref.WeakSet[_Program] = weakref.WeakSet()  # the compiled programs that there are


def lose(storages: Iterable[Stored], step: str, error: BaseException) -> None:
    """Notes that the values in these storages are gone, since this step failed with that error."""
    global any_lost
    any_lost = True
    for storage in storages:
        storage.lost = step, error


class explaining:
    """A context in which the value of a variable is waited for: where the step that assigned it failed, a `StepError`.

    Only a program that has no callback, and fails all the same, leaves such values behind.
    """

    def __init__(self, variable: Any):
        self._variable = variable

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            key = id(container_of(self._variable))
            steps = sorted({program.name for program in programs if key in program.level.written})
            raise lost_error(self._variable.name, " or ".join(steps) or "a computation") from error


def lost_error(name: str, step: str) -> StepError:
    """Returns the error for a variable whose value is gone."""
    return StepError(
        f"{name} has no value: {step}, which assigns it, failed while it ran (see the error above). Restore a "
        "checkpoint, or assign all of the value, before it is read. "
        f"See {doc_pages.page('how-to/debugging#when-a-compiled-step-fails')}."
    )


def container_of(variable: Any) -> Any:
    """Returns the distributed variable that a component belongs to, else the argument itself."""
    parent = getattr(variable, "_parent", None)
    return variable if parent is None else parent
