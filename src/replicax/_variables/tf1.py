"""Names of `tf.Variable` that stem from TensorFlow 1's graphs and sessions, which there are none of here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax._base import errors


class GraphLeftovers:
    """Does what can be done without a graph, and raises `RuntimeError` for the rest."""

    value: Callable[[], Any]
    numpy: Callable[[], Any]
    assign: Callable[..., Any]
    assign_add: Callable[..., Any]
    ref: Callable[[], Any]

    @property
    def initial_value(self) -> Any:
        """Not kept: raises `RuntimeError`."""
        raise RuntimeError("The initial value is not kept; read the variable before its first assignment.")

    def initialized_value(self) -> Any:
        """The value: variables are always initialized."""
        return self.value()

    def eval(self, session: Any = None) -> Any:
        """The value as a numpy array."""
        return self.numpy()

    def load(self, value: Any, session: Any = None) -> None:
        """The same as `assign`, returning None."""
        self.assign(value)

    def count_up_to(self, limit: int) -> Any:
        """Adds 1 to an integer variable and returns its former value; `OutOfRangeError` at the limit."""
        before = self.numpy()
        if before >= limit:
            raise errors.OutOfRangeError(f"Reached limit of {limit}")
        self.assign_add(1)
        return before

    def experimental_ref(self) -> Any:
        """The older name of `ref`."""
        return self.ref()

    class SaveSliceInfo:
        """How a variable is a part of a larger one in a checkpoint; kept for compatibility."""

        def __init__(
            self,
            full_name: str | None = None,
            full_shape: Any = None,
            var_offset: Any = None,
            var_shape: Any = None,
            save_slice_info_def: Any = None,
            import_scope: str | None = None,
        ):
            self.full_name, self.full_shape = full_name, full_shape
            self.var_offset, self.var_shape = var_offset, var_shape

    def _no_graph(self, what: str) -> Any:
        raise RuntimeError(f"Variable.{what} belongs to TensorFlow's graphs and sessions, which replicax has none of.")

    @property
    def graph(self) -> Any:
        """Raises `RuntimeError`: there are no graphs."""
        return self._no_graph("graph")

    @property
    def op(self) -> Any:
        """Raises `RuntimeError`: there are no graphs."""
        return self._no_graph("op")

    @property
    def initializer(self) -> Any:
        """None: variables are always initialized."""
        return None

    def to_proto(self, export_scope: str | None = None) -> Any:
        """Raises `RuntimeError`: there are no graphs."""
        return self._no_graph("to_proto")

    @staticmethod
    def from_proto(variable_def: Any, import_scope: str | None = None) -> Any:
        """Raises `RuntimeError`: there are no graphs."""
        raise RuntimeError("Variable.from_proto belongs to TensorFlow's graphs, which replicax has none of.")
