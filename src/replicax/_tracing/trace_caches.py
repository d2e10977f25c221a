"""JAX's caches of what it traced: one set for each level of tracing, replaced where it would go stale.

JAX keeps what it traced of jitted functions, checkpointed functions and loop bodies, and takes it again for the same
function. What they read of variables is part of it. Its caches tell user contexts apart, so each level of tracing has
one of its own, and gets another as soon as a variable that such a function read is assigned or a tape follows other
variables. JAX keeps the contexts as well, which therefore are numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax

from replicax._base.thread_state import current

_scope: Any = jax.make_user_context(None)
_numbers = itertools.count()


class own:
    """A context in which nothing is taken that was traced outside of it."""

    def __enter__(self) -> None:
        self.read: set[int] = set()  # ids of the variables that functions read which JAX has traced
        self._current = _scope(next(_numbers))
        self._current.__enter__()
        current.trace_caches.append(self)

    def __exit__(self, *error: object) -> None:
        current.trace_caches.pop()
        self._current.__exit__(*error)

    def renew(self) -> None:
        """Lets nothing be taken that was traced before. For the innermost context only."""
        self.__exit__(None, None, None)
        self.__enter__()


def note_read(variable: int) -> None:
    """Notes that a variable of this id is read in a function that JAX is tracing."""
    if current.trace_caches:
        current.trace_caches[-1].read.add(variable)


def note_change(variable: int | None = None) -> None:
    """Notes that a variable of this id, or what is known of all of them, has changed."""
    scopes = current.trace_caches
    if scopes and (variable in (read := scopes[-1].read) or (variable is None and read)):
        scopes[-1].renew()
