"""TensorFlow's names of variables, which all kinds of variables have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from replicax._base import devices
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.specs import SINGLE_DTYPES, TensorShape
from replicax._base.types import Leaf, Tree, VariableAggregation, VariableSynchronization
from replicax._tracing import context
from replicax._variables.leaves import ArrayProtocol, Signature, as_indices, check_arithmetic, convert_dtype


class Reference:
    """A hashable reference to a variable."""

    def __init__(self, variable: Any):
        self._variable = variable

    def deref(self) -> Any:
        """Return the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other.deref() is self._variable

    def __lt__(self, other: object) -> bool:
        return id(self._variable) < id(other.deref()) if isinstance(other, Reference) else NotImplemented

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference wrapping {self._variable!r}>"


class Interface(ArrayProtocol):
    """What `Variable` does under TensorFlow's names."""

    _signature: Signature
    _name: str
    _trainable: bool
    _synchronization: VariableSynchronization
    _aggregation: VariableAggregation
    _constraint: Callable[[Tree], Tree] | None
    _strategy: context.StrategyLike | None
    _assign: Callable[[str, Tree, bool], Tree]
    _assign_parts: Callable[[str, jax.Array], Tree]
    _device: Callable[[], jax.Device | str]

    @property
    def name(self) -> str:
        """The name, with `:0` behind it.

        >>> import replicax as rx
        >>> rx.Variable(1.0, name="w").name
        'w:0'
        """
        return f"{self._name}:0"

    @property
    def trainable(self) -> bool:
        """True if gradient tapes watch it by themselves.

        >>> import replicax as rx
        >>> rx.Variable(1.0, trainable=False).trainable
        False
        """
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """The time at which its copies are made equal.

        >>> import replicax as rx
        >>> rx.Variable(1.0).synchronization
        <VariableSynchronization.AUTO: 0>
        """
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The way in which values that replicas assign are combined.

        >>> import replicax as rx
        >>> rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN).aggregation.name
        'MEAN'
        """
        return self._aggregation

    @property
    def constraint(self) -> Callable[[Tree], Tree] | None:
        """The function given as `constraint`.

        >>> import replicax as rx
        >>> rx.Variable(1.0, constraint=abs).constraint
        <built-in function abs>
        """
        return self._constraint

    @property
    def shape(self) -> Tree:
        """The array's shape, a `TensorShape`, which is a tuple; for a pytree, a pytree of shapes.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).shape
        TensorShape([2])
        """
        return self._signature.unflatten([TensorShape(leaf.shape) for leaf in self._signature.types])

    @property
    def dtype(self) -> Tree:
        """The array's dtype; for a pytree, a pytree of dtypes.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).dtype
        dtype('float32')
        """
        return self._signature.unflatten([SINGLE_DTYPES.get(leaf.dtype, leaf.dtype) for leaf in self._signature.types])

    @property
    def ndim(self) -> int:
        """The array's number of dimensions.

        >>> import replicax as rx
        >>> rx.Variable([[1.0, 2.0]]).ndim
        2
        """
        return len(self.shape)

    @property
    def device(self) -> str:
        """The full name of the device that the value read here and now lies on.

        >>> import replicax as rx
        >>> with rx.OneDeviceStrategy("GPU:1").scope():
        ...     rx.Variable(1.0).device
        '/job:localhost/replica:0/task:0/device:GPU:1'
        """
        return devices.full_names([self._device()])[0]

    @property
    def distribute_strategy(self) -> context.StrategyLike | None:
        """The strategy in whose scope it was made, None outside of any.

        >>> import replicax as rx
        >>> rx.Variable(1.0).distribute_strategy is None
        True
        """
        return self._strategy

    def get_shape(self) -> Tree:
        """Returns the shape.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).get_shape()
        TensorShape([2])
        """
        return self.shape

    def set_shape(self, shape: Iterable[int]) -> None:
        """Checks that `shape` is the variable's; raises `ValueError` otherwise.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).set_shape([3])
        Traceback (most recent call last):
        ValueError: Variable:0 has shape (2,), which is not (3,).
        """
        if tuple(shape) != tuple(self.shape):
            raise ValueError(f"{self.name} has shape {self.shape}, which is not {tuple(shape)}.")

    def read_value(self) -> Tree:
        """Returns `value()`.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).read_value().tolist()
        [1.0, 2.0]
        """
        return self.value()

    def is_initialized(self) -> jax.Array:
        """Returns True: variables are always initialized.

        >>> import replicax as rx
        >>> bool(rx.Variable(1.0).is_initialized())
        True
        """
        return jnp.asarray(True)

    def assign(self, value: Tree, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Tree:
        """Replaces the value.

        Args:
            value: of the variable's shape and dtype (a pytree of them); Python numbers and numpy arrays are cast.
                In cross-replica context also a mirrored or per-replica value, taken component by component.
            use_locking, name: accepted for compatibility.
            read_value: False to return None.

        Returns:
            The new value: in replica context the replica's, else a mirrored variable's `Mirrored` value.

        Raises:
            ValueError: another shape, dtype or structure, or an aggregation that does not allow it. Raised by
                `strategy.run`: the replicas assign different values without an aggregation.
            RuntimeError: a scope of another strategy, or a JAX transformation out of which the value cannot come.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).assign([3.0, 4.0]).tolist()
        [3.0, 4.0]
        """
        return self._assign("assign", value, read_value)

    def assign_add(
        self, delta: Tree, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Tree:
        """Adds `delta`; see `assign`.

        >>> import replicax as rx
        >>> rx.Variable(1.0).assign_add(0.5).item()
        1.5
        """
        return self._assign("assign_add", delta, read_value)

    def assign_sub(
        self, delta: Tree, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Tree:
        """Subtracts `delta`; see `assign`.

        >>> import replicax as rx
        >>> rx.Variable(1.0).assign_sub(0.5).item()
        0.5
        """
        return self._assign("assign_sub", delta, read_value)

    def ref(self) -> Reference:
        """Returns a hashable reference; `ref().deref()` is the variable.

        >>> import replicax as rx
        >>> v = rx.Variable(1.0)
        >>> {v.ref(): "v"}[v.ref()], v.ref().deref() is v
        ('v', True)
        """
        return Reference(self)

    def __hash__(self) -> int:
        raise TypeError(f"Variable is unhashable. Instead, use variable.ref() as the key. (Variable: {self!r})")

    def __copy__(self) -> Interface:
        return self  # as in TensorFlow: one variable, by another name

    def sparse_read(self, indices: Leaf, name: str | None = None) -> jax.Array:
        """Returns the rows at `indices`, integers: an array `[*indices.shape, *shape[1:]]`.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4], [5, 6]]).sparse_read([2, 0]).tolist()
        [[5, 6], [1, 2]]
        """
        shape = self._signature.array_type("sparse_read").shape
        places = as_indices("sparse_read", indices, shape, nd=False)
        return jnp.take(self.value(), places, axis=0, mode="fill", fill_value=0)

    def gather_nd(self, indices: Leaf, name: str | None = None) -> Leaf:
        """Returns the elements or slices at `indices`, whose last dimension counts through the first ones.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).gather_nd([[0, 1], [1, 0]]).tolist()
        [2, 3]
        """
        shape = self._signature.array_type("gather_nd").shape
        places = as_indices("gather_nd", indices, shape, nd=True)
        return self.value().at[tuple(jnp.moveaxis(places, -1, 0))].get(mode="fill", fill_value=0)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Adds rows to those at their indices.

        Args:
            sparse_delta: the rows, and their indices along axis 0. Rows at one index are all added.
            use_locking, name: accepted for compatibility.

        Returns:
            The new value.

        Raises:
            TypeError: `sparse_delta` is no `IndexedSlices`, or the variable holds a pytree.
            ValueError: rows of another dtype.
            InvalidArgumentError: rows of another shape, or, except in compiled code, an index out of range.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_add(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [11, 2, 23]
        """
        return self._assign("scatter_add", sparse_delta, True)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Subtracts rows from those at their indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_sub(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [-9, 2, -17]
        """
        return self._assign("scatter_sub", sparse_delta, True)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Multiplies the rows at the indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_mul(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [10, 2, 60]
        """
        return self._assign("scatter_mul", sparse_delta, True)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Divides the rows at the indices, integers towards zero; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1.0, 2.0]).scatter_div(rx.IndexedSlices(jnp.array([4.0]), jnp.array([1]))).tolist()
        [1.0, 0.5]
        """
        return self._assign("scatter_div", sparse_delta, True)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Replaces the rows at the indices; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_update(rx.IndexedSlices(jnp.array([10, 20]), jnp.array([0, 2]))).tolist()
        [10, 2, 20]
        """
        return self._assign("scatter_update", sparse_delta, True)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Replaces the rows at the indices by the larger of each two elements; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_max(rx.IndexedSlices(jnp.array([2, 2]), jnp.array([0, 2]))).tolist()
        [2, 2, 3]
        """
        return self._assign("scatter_max", sparse_delta, True)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Tree:
        """Replaces the rows at the indices by the smaller of each two elements; see `scatter_add`.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.Variable([1, 2, 3]).scatter_min(rx.IndexedSlices(jnp.array([2, 2]), jnp.array([0, 2]))).tolist()
        [1, 2, 2]
        """
        return self._assign("scatter_min", sparse_delta, True)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Tree:
        """Replaces elements along the last indexed axis, for each batch of indices.

        Args:
            sparse_delta: `indices` `[*batch, n]`, which count along the axis behind the batch's, and as many `values`.
            use_locking, name: accepted for compatibility.

        Returns:
            The new value.

        >>> import jax.numpy as jnp, replicax as rx
        >>> slices = rx.IndexedSlices(jnp.array([[10], [20]]), jnp.array([[1], [0]]))
        >>> rx.Variable([[1, 2], [3, 4]]).batch_scatter_update(slices).tolist()
        [[1, 10], [20, 4]]
        """
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {sparse_delta!r}")
        values = convert_dtype(sparse_delta.values, self._signature.array_type("batch_scatter_update").dtype)
        indices = jnp.asarray(sparse_delta.indices)
        batch = jnp.indices(indices.shape)[:-1]
        return self.scatter_nd_update(jnp.stack([*batch.astype(indices.dtype), indices], -1), values)

    def scatter_nd_add(self, indices: Leaf, updates: Leaf, name: str | None = None) -> Tree:
        """Adds to the elements or slices at `indices`, whose last dimension counts through the first ones.

        Args:
            indices: `[..., k]` integers, of the first `k` axes.
            updates: `[..., *shape[k:]]`.

        Returns:
            The new value.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).scatter_nd_add([[0, 1], [1, 0]], [10, 20]).tolist()
        [[1, 12], [23, 4]]
        """
        return self._scatter_nd("scatter_nd_add", indices, updates)

    def scatter_nd_sub(self, indices: Leaf, updates: Leaf, name: str | None = None) -> Tree:
        """Subtracts from the elements or slices at `indices`; see `scatter_nd_add`.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).scatter_nd_sub([[0, 1], [1, 0]], [10, 20]).tolist()
        [[1, -8], [-17, 4]]
        """
        return self._scatter_nd("scatter_nd_sub", indices, updates)

    def scatter_nd_update(self, indices: Leaf, updates: Leaf, name: str | None = None) -> Tree:
        """Replaces the elements or slices at `indices`; see `scatter_nd_add`.

        >>> import replicax as rx
        >>> rx.Variable([[1, 2], [3, 4]]).scatter_nd_update([[0, 1], [1, 0]], [10, 20]).tolist()
        [[1, 10], [20, 4]]
        """
        return self._scatter_nd("scatter_nd_update", indices, updates)

    def _scatter_nd(self, method: str, indices: Leaf, updates: Leaf) -> Tree:
        kind = self._signature.array_type(method)
        updates = convert_dtype(updates, kind.dtype)
        check_arithmetic(method, kind.dtype, self.name)
        places = as_indices(method, indices, kind.shape, nd=True)
        expected = (*places.shape[:-1], *kind.shape[places.shape[-1] :])
        if updates.shape != expected:
            raise InvalidArgumentError(
                f"{method} of {self.name}: updates must have shape {expected}, that is indices.shape[:-1] + "
                f"params_shape[indices.shape[-1]:], got {updates.shape}"
            )
        at = self.value().at[tuple(jnp.moveaxis(places, -1, 0))]
        if method == "scatter_nd_update":
            return self._assign_parts(method, at.set(updates))
        return self._assign_parts(method, at.add(updates if method == "scatter_nd_add" else -updates))
