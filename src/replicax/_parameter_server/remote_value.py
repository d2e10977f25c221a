"""The result of a function that was scheduled, which comes later."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax._base import nest
from replicax._base.types import Leaf, Tree
from replicax._engine.multi_step import together
from replicax._parameter_server.arrays import is_key


class RemoteValue:
    """The result of a scheduled function: `ClusterCoordinator.schedule` returns it at once.

    `fetch()` waits for the function and returns the result as numpy arrays, `get()` as tensors.

    >>> import jax.numpy as jnp, replicax as rx
    >>> result = coordinator.schedule(rx.function(lambda: jnp.int32(7)))
    >>> isinstance(result, rx.coordinator.RemoteValue), result.fetch()
    (True, np.int32(7))
    """

    def fetch(self) -> Tree:
        """Waits for the function and returns its result with numpy arrays; raises what the function raised.

        >>> import jax.numpy as jnp, replicax as rx
        >>> coordinator.schedule(rx.function(lambda: jnp.arange(3))).fetch()
        array([0, 1, 2], dtype=int32)
        """
        return nest.map_structure(_numpy, self.get())

    def get(self) -> Tree:
        """Waits for the function and returns its result with arrays; raises what the function raised.

        >>> import jax.numpy as jnp, replicax as rx
        >>> coordinator.schedule(rx.function(lambda: jnp.arange(3))).get()
        Array([0, 1, 2], dtype=int32)
        """
        raise NotImplementedError("Must be implemented in subclasses.")


class RemoteValueImpl(RemoteValue):
    """The result of a closure.

    Args:
        waiting: a context in which somebody waits for it.
    """

    def __init__(self, waiting: Callable[[threading.Event], None]):
        self._ended = threading.Event()
        self._wait = waiting
        self._result: Tree = None
        self._make: Callable[[], Tree] | None = None  # makes the result, until somebody has asked for it
        self._error: BaseException | None = None
        self._traceback: types.TracebackType | None = None  # of the error, before anybody was told

    def set_result(self, make: Callable[[], Tree]) -> None:
        """Notes the end of the closure, and what makes its result, for which nobody may ask."""
        if not self._ended.is_set():
            self._make = make
            self._ended.set()

    def set_error(self, error: BaseException) -> None:
        """Notes the error of the closure."""
        if not self._ended.is_set():
            self._error, self._traceback = error, error.__traceback__
            self._ended.set()

    def get(self) -> Tree:
        if not self._ended.is_set():
            self._wait(self._ended)
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # else that of each call before would be part of it
        if (make := self._make) is not None:
            self._result = make()
            self._make = None
        return self._result


class SeveralSteps(RemoteValue):
    """The result of a function that takes several steps in a call: of as many closures.

    Args:
        values: of the steps, in order.
    """

    def __init__(self, values: Sequence[RemoteValueImpl]):
        self._values = values

    def get(self) -> Tree:
        results = [value.get() for value in self._values]
        return together([result for result in results if result is not OVER])


OVER = object()  # the result of a step for which there were no elements left, behind others


def _numpy(leaf: Leaf) -> Any:
    if not isinstance(leaf, jax.Array) or is_key(leaf):
        return leaf
    array = np.asarray(leaf)
    return array if array.ndim else array[()]
