"""`tf.Variable` methods of TensorFlow 1 that refer to graphs or sessions. They do nothing or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from replicax.tf._core import Leaf, Tree, Variable, errors


class GraphLeftovers:
    """The methods, which do what can be done without a graph, and raise `RuntimeError` for the rest."""

    value: Callable[[], Tree]
    numpy: Callable[[], Tree]
    dtype: Tree
    shape: Tree
    assign: Callable[..., Tree]
    assign_add: Callable[..., Tree]
    ref: Callable[[], object]

    @property
    def initial_value(self) -> NoReturn:
        """Not kept: raises `RuntimeError`.

        >>> import replicax.tf as tf
        >>> tf.Variable(1.0).initial_value
        Traceback (most recent call last):
        RuntimeError: The initial value is not kept; read the variable before its first assignment.
        """
        raise RuntimeError("The initial value is not kept; read the variable before its first assignment.")

    def initialized_value(self) -> Tree:
        """Returns the value: variables are always initialized.

        >>> import replicax.tf as tf
        >>> tf.Variable(1.0).initialized_value().item()
        1.0
        """
        return self.value()

    def eval(self, session: object = None) -> Tree:
        """Returns the value as a numpy array.

        >>> import replicax.tf as tf
        >>> tf.Variable([1.0, 2.0]).eval()
        array([1., 2.], dtype=float32)
        """
        return self.numpy()

    def load(self, value: Tree, session: object = None) -> None:
        """Assigns a value.

        >>> import replicax.tf as tf
        >>> v = tf.Variable(1.0)
        >>> v.load(2.0)
        >>> float(v)
        2.0
        """
        self.assign(value)

    def count_up_to(self, limit: int) -> Leaf:
        """Adds 1 to an integer variable and returns its former value; raises `OutOfRangeError` at the limit.

        >>> import replicax.tf as tf
        >>> v = tf.Variable(3)
        >>> int(v.count_up_to(5)), int(v)
        (3, 4)
        """
        if self.dtype not in (np.int32, np.int64) or self.shape != ():
            raise errors.InvalidArgumentError(
                f"count_up_to needs an int32 or int64 variable of shape (), got {self.dtype} and {self.shape}"
            )
        before = self.numpy()
        if before >= limit:
            raise errors.OutOfRangeError(f"Reached limit of {limit}")
        self.assign_add(1)
        return before

    def experimental_ref(self) -> object:
        """Returns `ref()`, of which this is the older name.

        >>> import replicax.tf as tf
        >>> v = tf.Variable(1.0)
        >>> v.experimental_ref() == v.ref()
        True
        """
        return self.ref()

    class SaveSliceInfo:
        """The place of a variable in a larger one in a checkpoint; kept for compatibility.

        >>> import replicax.tf as tf
        >>> tf.Variable.SaveSliceInfo(full_name="w").full_name
        'w'
        """

        def __init__(
            self,
            full_name: str | None = None,
            full_shape: object = None,
            var_offset: object = None,
            var_shape: object = None,
            save_slice_info_def: object = None,
            import_scope: str | None = None,
        ):
            self.full_name, self.full_shape = full_name, full_shape
            self.var_offset, self.var_shape = var_offset, var_shape

    @property
    def graph(self) -> NoReturn:
        """Raises `RuntimeError`: there are no graphs.

        >>> import replicax.tf as tf
        >>> tf.Variable(1.0).graph
        Traceback (most recent call last):
        RuntimeError: Variable.graph belongs to TensorFlow's graphs and sessions, which replicax has none of.
        """
        _refuse("graph")

    @property
    def op(self) -> NoReturn:
        """Raises `RuntimeError`: there are no graphs.

        >>> import replicax.tf as tf
        >>> tf.Variable(1.0).op
        Traceback (most recent call last):
        RuntimeError: Variable.op belongs to TensorFlow's graphs and sessions, which replicax has none of.
        """
        _refuse("op")

    @property
    def initializer(self) -> None:
        """None: variables are always initialized.

        >>> import replicax.tf as tf
        >>> tf.Variable(1.0).initializer is None
        True
        """
        return None

    def to_proto(self, export_scope: str | None = None) -> NoReturn:
        """Raises `RuntimeError`: there are no graphs.

        >>> import replicax.tf as tf
        >>> tf.Variable(1.0).to_proto()
        Traceback (most recent call last):
        RuntimeError: Variable.to_proto belongs to TensorFlow's graphs and sessions, which replicax has none of.
        """
        _refuse("to_proto")

    @staticmethod
    def from_proto(variable_def: object, import_scope: str | None = None) -> NoReturn:
        """Raises `RuntimeError`: there are no graphs.

        >>> import replicax.tf as tf
        >>> tf.Variable.from_proto(None)
        Traceback (most recent call last):
        RuntimeError: Variable.from_proto belongs to TensorFlow's graphs and sessions, which replicax has none of.
        """
        _refuse("from_proto")


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(f"Variable.{name} belongs to TensorFlow's graphs and sessions, which replicax has none of.")


def dress() -> None:
    """Give variables these methods."""
    for name, method in vars(GraphLeftovers).items():
        if not name.startswith("__"):
            setattr(Variable, name, method)
