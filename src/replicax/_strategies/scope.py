"""The scope of a strategy."""

from __future__ import annotations

import contextlib
import threading
import types
from typing import Any

from replicax._base import foreign_state
from replicax._strategies.extended import StrategyExtended
from replicax._tracing import context


class Scope(contextlib.AbstractContextManager[Any]):
    """A context in which a strategy is current, in cross-replica context."""

    def __init__(self, strategy: context.StrategyLike, extended: StrategyExtended):
        self._strategy, self._extended, self._entered = strategy, extended, False

    def __enter__(self) -> context.StrategyLike:
        if self._entered:
            raise RuntimeError("A scope object is entered once. Call strategy.scope() for each `with`.")
        context.require_cross_replica(self._strategy)
        foreign_state.join()
        self._entered = True
        self._thread = threading.get_ident()
        self._context = contextlib.ExitStack()
        self._context.enter_context(self._extended._scope_context())
        self._context.enter_context(foreign_state.JoinOnImport())
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        if not self._entered:
            raise RuntimeError("The scope is left without having been entered. Write `with strategy.scope():`.")
        if self._thread != threading.get_ident():
            raise RuntimeError("The scope is left in another thread than the one that has entered it.")
        self._context.__exit__(kind, error, traceback)
