"""Variables: state that outlives a step and that every replica sees in step.

`Variable(...)` asks the current strategy for the right kind. A `MirroredVariable` is one replicated array, written
on all replicas alike; a `SyncOnReadVariable` is one stacked array in which each replica has a row of its own, put
together when it is read from outside; a `ResourceVariable` is one array on one device. Values are read and written
through frames (`_levels`), so that the same variable works eagerly, on one eager replica, and in compiled code.

As a pytree a variable is its value: `jnp.sum(v)`, `jax.grad(f)(v)` and `optax` take it as they take an array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import (
    _collectives,
    _context,
    _creation,
    _devices,
    _display,
    _errors,
    _late,
    _levels,
    _nest,
    _packs,
    _pickling,
    _private,
    _step_failures,
    _tape,
)
from replicax._indexed_slices import IndexedSlices
from replicax._specs import SINGLE_DTYPES, TensorShape, as_dtype
from replicax._types import (
    VariableAggregation,
    VariableSynchronization,
    as_aggregation,
    as_synchronization,
)
from replicax._values import AXIS, DistributedValues, Mirrored, PerReplica, ReplicaMesh, is_array

_NONE = VariableAggregation.NONE


class _VariableType(type):
    """`Variable(...)` makes a variable of the kind that the current strategy has."""

    def __call__(cls, *args, **kwargs):
        if cls is not Variable:
            return super().__call__(*args, **kwargs)
        arguments = _arguments(*args, **kwargs)
        return _creation.through_creators(_context.get_strategy().extended._create_variable, inside_scope=None)(
            **arguments
        )


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of `Variable` by name, checked, without those that have no effect."""
    bound = _SIGNATURE.bind(None, *args, **kwargs)
    bound.apply_defaults()
    given = {name: bound.arguments[name] for name in _EFFECTIVE}
    if bound.arguments["copies_may_differ"] is not None:  # creators of other libraries do not know it
        given["copies_may_differ"] = bound.arguments["copies_may_differ"]
    if given["initial_value"] is None:
        raise ValueError("`initial_value` must be given: an array, a number, a pytree, or a function that makes it.")
    as_synchronization(given["synchronization"], given["name"]), as_aggregation(given["aggregation"], given["name"])
    return given


_EFFECTIVE = ("initial_value", "trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")


def _initial_tree(initial_value: Any, dtype: Any) -> tuple[list[Any], Any, bool]:
    """The leaves of an initial value as concrete arrays, their tree, and whether somebody else may have their buffers.

    (JAX's arrays of numpy's, and of numbers, are copies.)
    """
    with _private.at_once():
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, Variable):
            value = value.value()
        if isinstance(value, DistributedValues):
            value = value.values[0]
        if is_array(value) or _is_number_list(value):
            return [_new_array(value, dtype)], jax.tree.structure(0), isinstance(value, jax.Array)
        leaves, tree = jax.tree.flatten(value)
        for number, leaf in enumerate(leaves):
            if not is_array(leaf) and hasattr(leaf, "__jax_array__"):  # Keras's variables
                leaves[number] = leaf.__jax_array__()
            elif not (is_array(leaf) or isinstance(leaf, (bool, int, float, complex))):
                raise TypeError(
                    f"A variable holds an array or a pytree of arrays; got a leaf {leaf!r} of type "
                    f"{type(leaf).__name__} in {type(value).__name__}."
                )
        lent = any(isinstance(leaf, jax.Array) for leaf in leaves)
        return [_new_array(leaf, dtype) for leaf in leaves], tree, lent


def _is_number_list(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and not _nest.is_namedtuple(value):
        return all(_is_number_list(item) for item in value)
    return isinstance(value, (bool, int, float, complex, np.generic))


def _new_array(value: Any, dtype: Any) -> jax.Array:
    if isinstance(value, jax.core.Tracer):
        raise RuntimeError(
            "The initial value of a variable is a traced value of jax.jit or another JAX transformation, which has no "
            "value of its own. Make the variable outside of it, or use replicax.function in place of jax.jit."
        )
    dtype = None if dtype is None else as_dtype(dtype)
    if dtype is not None and not isinstance(value, jax.Array):
        return _context.own_array(value, dtype)
    array = _context.as_array(value)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):  # a PRNG key
        return array
    return array.astype(array.dtype if dtype is None else dtype)  # of a firm type also where `value` is a number


class _readonly:
    """A method that an assignment to its name does not replace (users of Flax write `variable.value = x`)."""

    def __init__(self, method: Callable[..., Any]):
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._method if instance is None else self._method.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError("A variable's value() is a method. To replace the value, call variable.assign(...).")


_ARRAY = jax.tree.structure(0)  # of a variable that holds one array

SCATTER: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scatter_add": lambda x, i, u: x.at[i].add(u),
    "scatter_sub": lambda x, i, u: x.at[i].add(-u),
    "scatter_mul": lambda x, i, u: x.at[i].multiply(u),
    "scatter_div": lambda x, i, u: x.at[i].divide(u),
    "scatter_update": lambda x, i, u: x.at[i].set(u),
    "scatter_max": lambda x, i, u: x.at[i].max(u),
    "scatter_min": lambda x, i, u: x.at[i].min(u),
}


def replacing(old: Any, new: Any) -> Any:
    """How `assign` combines the old value with the new one."""
    return new


class Variable(_nest.Leaf, metaclass=_VariableType):
    """State that replicas share: an array, or a whole pytree such as Flax parameters or an Optax state.

    Args:
        initial_value: an array, a number, a nest of numbers, a pytree of arrays, or a function that makes one
            (called once). A list that holds arrays is a pytree; a list of numbers is an array.
        trainable: whether gradient tapes watch it; by default yes, but for ON_READ.
        name: by default "Variable".
        dtype: by default the initial value's; float32 and int32 for Python numbers.
        synchronization: see `VariableSynchronization`.
        aggregation: how values that replicas assign are combined.
        copies_may_differ: whether replicas may assign different values without an aggregation, each to its own copy;
            by default they may not, see `config.refuse_different_assignments`.
        validate_shape, caching_device, variable_def, import_scope, constraint, shape,
        experimental_enable_variable_lifting: accepted for compatibility; `constraint` is kept for optimizers.

    Raises:
        ValueError: no initial value, or a synchronization or aggregation that the strategy does not have.
        TypeError: the initial value is no array.

    >>> import replicax as rx
    >>> v = rx.Variable([1.0, 2.0], name="w")
    >>> v.assign_add([1.0, 1.0]).tolist()
    [2.0, 3.0]
    >>> (v * 2).tolist(), v.shape, v.name
    ([4.0, 6.0], TensorShape([2]), 'w:0')
    """

    _replicax_variable = True
    _mesh: ReplicaMesh | None = None
    _stacked = False  # whether the global form has a row for each replica
    _strategy: Any = None
    _equal_by_contract = False  # whether it is an error that replicas assign different values
    _slots: dict[int, Any] | None = None  # the places of leaves that stand in packs (see _packs.py)
    _late: bool | None = False  # whether a restored checkpoint may have a value for it (see _late.py)
    _place: Any = None  # the one device that it stays on, where its strategy has one
    _lost: Any = None  # the step that has taken the value with it, and its error
    __hash__: Any
    __array_priority__ = 100

    _hidden = False  # whether users do not see it, as the counters of random numbers

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: Any = None,
        name: str | None = None,
        variable_def: Any = None,
        dtype: Any = None,
        import_scope: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = _NONE,
        shape: Any = None,
        experimental_enable_variable_lifting: bool = True,
        *,
        copies_may_differ: bool | None = None,
    ):
        self._synchronization = as_synchronization(synchronization, name)
        self._aggregation = as_aggregation(aggregation, name)
        on_read = self._synchronization is VariableSynchronization.ON_READ
        self._trainable = (not on_read) if trainable is None else bool(trainable)
        self._name = "/".join([*_creation.state.names, name or "Variable"])
        self._constraint, self._copies_may_differ = constraint, copies_may_differ
        # Whether someone outside may hold a buffer of ours, so that it must not be donated.
        leaves, self._treedef, self._lent = _initial_tree(initial_value, dtype)
        self._types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._store(leaves)
        self._late = _late.is_late()

    # What it is.

    @property
    def name(self) -> str:
        """The name, with `:0` behind it."""
        return f"{self._name}:0"

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch it by themselves."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When its copies are brought into step."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How values that replicas assign are combined."""
        return self._aggregation

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """The function given as `constraint`."""
        return self._constraint

    @property
    def shape(self) -> Any:
        """The array's shape, a `TensorShape`, which is a tuple; for a pytree, a pytree of shapes."""
        return self._of_leaves([TensorShape(leaf.shape) for leaf in self._types])

    @property
    def dtype(self) -> Any:
        """The array's dtype; for a pytree, a pytree of dtypes."""
        return self._of_leaves([SINGLE_DTYPES.get(leaf.dtype, leaf.dtype) for leaf in self._types])

    @property
    def ndim(self) -> int:
        """The array's number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> str:
        """The full name of the device that the value read here and now lies on."""
        return _devices.full_names([self._device()])[0]

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was made, None outside of any."""
        return self._strategy

    def get_shape(self) -> Any:
        """The shape."""
        return self.shape

    def set_shape(self, shape: Any) -> None:
        """Checks that `shape` is the variable's; `ValueError` otherwise."""
        if tuple(shape) != tuple(self.shape):
            raise ValueError(f"{self.name} has shape {self.shape}, which is not {tuple(shape)}.")

    # Reading.

    @_readonly
    def value(self) -> Any:
        """The value here: the replica's own in replica context; else the first copy, or the aggregated value."""
        if self._late is not False:
            _late.settle(self)
        with _levels.lock:
            leaves = self._read()
        _levels.warn_of_constant(self.name)
        return self._of_leaves(_tape.on_read(self, leaves))

    def read_value(self) -> Any:
        """The same as `value()`."""
        return self.value()

    def numpy(self) -> Any:
        """The value as a numpy array (for a pytree, a pytree of them)."""
        if self._late is not False:
            _late.settle(self)
        with _levels.lock:
            leaves = self._read()
        with _levels.explaining(self):
            return self._of_leaves([_numpy(leaf) for leaf in leaves])

    @property
    def initial_value(self) -> Any:
        """Not kept: raises `RuntimeError`."""
        raise RuntimeError("The initial value is not kept; read the variable before its first assignment.")

    def initialized_value(self) -> Any:
        """The value: variables are always initialized."""
        return self.value()

    def is_initialized(self) -> jax.Array:
        """True: variables are always initialized."""
        return jnp.asarray(True)

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """The rows at `indices`."""
        self._require_array("sparse_read")
        return jnp.take(self.value(), jnp.asarray(indices), axis=0)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """The elements or slices at `indices`, whose last dimension counts through the variable's first ones."""
        self._require_array("gather_nd")
        return self.value()[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]

    def eval(self, session: Any = None) -> Any:
        """The value as a numpy array."""
        return self.numpy()

    # Writing.

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
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
        """
        return self._updated(replacing, value, read_value, "assign")

    def assign_add(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True):
        """Adds `delta`; see `assign`."""
        return self._updated(lambda old, new: old + new, delta, read_value, "assign_add")

    def assign_sub(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True):
        """Subtracts `delta`; see `assign`."""
        return self._updated(lambda old, new: old - new, delta, read_value, "assign_sub")

    def _assign_alike(self, value: Any) -> None:
        """Assigns what every replica assigns, so that there is nothing to combine."""
        self.assign(value, read_value=False)

    def _updated(self, combine: Callable[[Any, Any], Any], value: Any, read_value: bool, method: str) -> Any:
        self._be_settled()
        return self._update(combine, value, read_value, method)

    def _be_settled(self) -> None:
        """Before it is written: whatever a checkpoint has for it comes first, and not any more after that."""
        if self._late is not False:
            _late.settle(self)
            self._late = False
        if _levels.awaited and not _levels.is_tracing() and not _step_failures.in_callback():
            with _levels.lock:
                _levels.wait_until_free({id(self)})

    def load(self, value: Any, session: Any = None) -> None:
        """The same as `assign`, returning None."""
        self.assign(value)

    def count_up_to(self, limit: int) -> Any:
        """Adds 1 to an integer variable and returns its former value; `OutOfRangeError` at the limit."""
        before = self.numpy()
        if before >= limit:
            raise _errors.OutOfRangeError(f"Reached limit of {limit}")
        self.assign_add(1)
        return before

    def _scatter(self, method: str, slices: Any) -> Any:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {slices!r}")
        self._be_settled()
        return self._update_slices(method, slices)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Adds rows to those at their indices."""
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Subtracts rows from those at their indices."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Multiplies the rows at the indices."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Divides the rows at the indices."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """Replaces the rows at the indices."""
        return self._scatter("scatter_update", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """The larger of each row's elements and the given ones."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        """The smaller of each row's elements and the given ones."""
        return self._scatter("scatter_min", sparse_delta)

    def batch_scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None):
        """Replaces elements along the last indexed axis, for each batch of indices."""
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {sparse_delta}")
        self._require_array("batch_scatter_update")
        indices, values = jnp.asarray(sparse_delta.indices), jnp.asarray(sparse_delta.values)
        batch = jnp.indices(indices.shape)[:-1]
        return self.assign(self.value().at[(*batch, indices)].set(values))

    def _require_array(self, method: str) -> None:
        if self._treedef != _ARRAY:
            raise TypeError(
                f"`{method}` is for variables of one array, and {self.name} holds a pytree: {self._treedef}. Take the "
                "leaf of its value that you mean, and assign the changed pytree."
            )

    def _scatter_nd(self, indices: Any, updates: Any, method: str) -> Any:
        self._require_array(f"scatter_nd_{method}")
        at = self.value().at[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]
        updates = _context.own_array(updates, self.dtype)
        return self.assign(at.set(updates) if method == "update" else at.add(updates if method == "add" else -updates))

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Adds to the elements or slices at `indices`, whose last dimension counts through the first ones."""
        return self._scatter_nd(indices, updates, "add")

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Subtracts from the elements or slices at `indices`."""
        return self._scatter_nd(indices, updates, "sub")

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Any:
        """Replaces the elements or slices at `indices`."""
        return self._scatter_nd(indices, updates, "update")

    # Identity.

    class _Reference:
        def __init__(self, variable: Variable):
            self._variable = variable

        def deref(self) -> Variable:
            """The variable."""
            return self._variable

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self)) and other._variable is self._variable

        def __lt__(self, other: object) -> bool:
            return id(self._variable) < id(other._variable) if isinstance(other, type(self)) else NotImplemented

        def __hash__(self) -> int:
            return id(self._variable)

        def __repr__(self) -> str:
            return f"<Reference wrapping {self._variable!r}>"

    def ref(self) -> _Reference:
        """A hashable reference; `ref().deref()` is the variable."""
        return Variable._Reference(self)

    def experimental_ref(self) -> _Reference:
        """The older name of `ref`."""
        return self.ref()

    def __hash__(self) -> int:  # type: ignore[no-redef]
        raise TypeError(f"Variable is unhashable. Instead, use variable.ref() as the key. (Variable: {self!r})")

    def __copy__(self) -> Variable:
        return self  # as in TensorFlow: one variable, by another name

    def __deepcopy__(self, memo: dict) -> Variable:
        if _levels.any_lost:
            _levels.refuse_lost(self)
        clone = type(self).__new__(type(self))
        with _levels.lock:
            clone.__dict__.update(self.__dict__)
            clone._lent = self._lent = True
            if self._slots:
                clone._slots = None
                clone._write_global(self._read_global())
        memo[id(self)] = clone
        return clone

    def __getstate__(self) -> dict[str, Any]:
        state = self.__deepcopy__({}).__dict__  # with leaves of its own, wherever they stand
        return {**state, "_leaves": _pickling.stored(state["_leaves"])} if "_leaves" in state else state

    # Graphs and sessions, which there are none of.

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

    # As an array.

    def __jax_array__(self) -> Any:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __getitem__(self, index: Any) -> Any:
        value = self.value()
        return value if index is Ellipsis else value[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __float__(self) -> float:
        with _levels.explaining(self):
            return float(self.value())

    def __int__(self) -> int:
        with _levels.explaining(self):
            return int(self.value())

    def __bool__(self) -> bool:
        with _levels.explaining(self):
            return bool(self.value())

    def __index__(self) -> int:
        return self.value().__index__()

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec) if spec else str(self)

    def __neg__(self) -> Any:
        return -self.value()

    def __abs__(self) -> Any:
        return abs(self.value())

    def __invert__(self) -> Any:
        return ~self.value()

    # For the engine: how values are stored, and how they go through frames.

    def _adopt(self, arrays: Sequence[np.ndarray]) -> None:
        """Replaces the leaves by arrays of the host that nobody writes any more: devices may share their memory."""
        self._be_settled()
        with _levels.lock:
            self._take_from_host([np.asarray(array, kind.dtype) for array, kind in zip(arrays, self._types)])
            self._lent, self._lost = False, None

    def _take_from_host(self, arrays: list[Any]) -> None:
        leaves = [jnp.asarray(array, dtype=kind.dtype) for array, kind in zip(arrays, self._types)]
        self._update(lambda old, new: new, self._of_leaves(leaves), False, "assign")

    def _of_leaves(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._treedef, leaves)

    def _store(self, leaves: list[jax.Array]) -> None:
        """Keeps the initial value."""
        raise NotImplementedError

    def _leaf_types(self, local: bool) -> list[jax.ShapeDtypeStruct]:
        return self._types

    def _has_rows(self, index: int) -> bool:
        """Whether this leaf's global form has a row for each replica."""
        return self._stacked

    def _read_global(self) -> list[Any]:
        raise NotImplementedError

    def _stored_global(self) -> list[Any]:
        """The global form where it is stored, for compiled programs."""
        return self._read_global()

    def _entering(self, leaf: Any) -> Any:
        """A leaf of `_stored_global` inside of compiled code, where the program may compute with it."""
        return leaf

    def _leaving(self, leaves: list[Any]) -> list[Any]:
        """New leaves inside of compiled code, as the program has to return them."""
        return leaves

    def _copied(self, leaves: list[Any]) -> list[Any]:
        """Copies of leaves of `_stored_global`, which a program may take over."""
        return _packs.copies(leaves)

    def _write_global(self, leaves: list[Any]) -> None:
        raise NotImplementedError

    def _pack_home(self, index: int) -> Any:
        """Where a pack lies that this leaf may stand in; None if it may not."""
        return None

    def _is_shelvable(self, spread: bool) -> bool:
        """Whether its leaves may stand on the shelf of a program, which may be spread over several devices."""
        return False

    def _own_leaves(self, indices: Sequence[int]) -> list[Any]:
        """Of the global form leaves; None for those whose values stand in packs or on shelves."""
        raise NotImplementedError

    def _write_own(self, indices: Sequence[int], leaves: Sequence[Any]) -> None:
        """Replaces leaves that stand in no pack by what a compiled program returned."""
        raise NotImplementedError

    def _give_up(self, index: int) -> None:
        """Lets go of a leaf's array: its value stands elsewhere."""
        raise NotImplementedError

    def _leave_packs(self) -> None:
        """Before it is written from outside of a compiled program: no leaf's value stands elsewhere any more."""
        for slot in (self._slots or {}).values():
            slot.store.replaced.add(slot)

    def _kept(self, indices: Sequence[int]) -> list[Any]:
        """Leaves that stand in no pack, for a program that leaves them as they are."""
        assert self._slots is not None
        leaves = zip(indices, self._own_leaves(indices))
        return [self._slots[i].store.arrays[self._slots[i].place] if leaf is None else leaf for i, leaf in leaves]

    def _taken(self, indices: Sequence[int]) -> list[Any]:
        """Leaves that stand in no pack, for a program that takes them over."""
        assert self._slots is not None
        slots = (self._slots.get(index) for index in indices)
        lent = self._lent or any(slot is not None and slot.place in slot.store.lent for slot in slots)
        return self._copied(self._kept(indices)) if lent else self._kept(indices)

    def _read_component(self, replica: int) -> list[Any]:
        raise NotImplementedError

    def _write_component(self, replica: int, leaves: list[Any]) -> None:
        raise NotImplementedError

    def _get(self) -> list[Any]:
        return _levels.frame().read(self)

    def _put(self, leaves: list[Any]) -> None:
        _levels.frame().write(self, leaves)

    def _combined(self, combine: Callable[[Any, Any], Any], leaves: list[Any]) -> list[Any]:
        """The leaves here and now, combined with these."""
        if combine is replacing and not isinstance(_levels.frame(), _levels.Level):
            return leaves  # what is packed is not cut out for nothing
        return [combine(old, leaf) for old, leaf in zip(self._get(), leaves)]

    def _read(self) -> list[Any]:
        """The leaves as the user sees them here."""
        raise NotImplementedError

    def _update(self, combine: Callable[[Any, Any], Any], value: Any, read_value: bool, method: str) -> Any:
        raise NotImplementedError

    def _update_slices(self, method: str, slices: IndexedSlices) -> Any:
        raise NotImplementedError

    def _device(self) -> Any:
        frame = _levels.frame()
        if isinstance(frame, _levels.ReplicaFrame) and frame.mesh is self._mesh and self._mesh is not None:
            return self._mesh.local_devices[frame.replica]
        if self._mesh is not None:
            return self._mesh.local_devices[0]
        leaf: Any = self._get()[0] if self._types else None
        return jax.local_devices()[0] if not hasattr(leaf, "devices") or _traced(leaf) else next(iter(leaf.devices()))

    def _convert(self, value: Any) -> list[Any]:
        """`value` as leaves of the variable's shapes and dtypes; distributed values as they are."""
        if isinstance(value, Variable):
            value = value.value()
        if isinstance(value, DistributedValues):
            return [value]
        if self._treedef == _ARRAY:
            return [self._convert_leaf(value, self._types[0])]
        leaves, tree = jax.tree.flatten(value)
        if tree != self._treedef:
            raise ValueError(
                f"Cannot assign to variable '{self.name}': its structure is {self._treedef}, the value's {tree}."
            )
        return [self._convert_leaf(leaf, kind) for leaf, kind in zip(leaves, self._types)]

    def _convert_leaf(self, value: Any, kind: jax.ShapeDtypeStruct) -> Any:
        if isinstance(value, IndexedSlices):
            value = value.to_dense()
        elif not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):  # a Keras variable
            value = value.__jax_array__()
        if isinstance(value, jax.Array):
            if value.dtype != kind.dtype:
                if not (value.weak_type and np.can_cast(value.dtype, kind.dtype, "same_kind")):
                    raise ValueError(
                        f"Tensor conversion requested dtype {kind.dtype} for Tensor with dtype {value.dtype}: {value!r}"
                    )
                value = value.astype(kind.dtype)
        else:
            try:
                if getattr(value, "dtype", np.dtype("O")).kind == "f" and jnp.issubdtype(kind.dtype, jnp.integer):
                    raise TypeError("it has a fraction")
                value = _context.own_array(value, kind.dtype)
            except (TypeError, ValueError) as error:
                raise TypeError(f"Cannot convert {value!r} to an array of dtype {kind.dtype}.") from error
        if value.shape != kind.shape:
            raise ValueError(
                f"Cannot assign value to variable ' {self.name}': Shape mismatch.The variable shape {kind.shape}, and "
                f"the assigned value shape {value.shape} are incompatible."
            )
        return value

    def _text_of(self, name: str, leaves: Sequence[Any]) -> str:
        if self._treedef == _ARRAY:
            kind = self._types[0]
            with _levels.explaining(self):
                return _display.variable_text(name, kind.shape, kind.dtype, leaves[0])
        size = sum(kind.size * kind.dtype.itemsize for kind in self._types)
        return f"<Variable '{name}' pytree of {len(self._types)} arrays, {size} bytes>"

    def __repr__(self) -> str:
        with _levels.lock:
            leaves = self._read()
        return self._text_of(self.name, leaves)


def _traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _numpy(leaf: Any) -> Any:
    if _traced(leaf):
        raise NotImplementedError("numpy() has no value inside of compiled code; use value().")
    array = np.asarray(leaf)
    return array if array.ndim else array[()]


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Variable, other: Any) -> Any:
        if isinstance(other, Variable):
            other = other.value()
        if isinstance(other, (PerReplica, Mirrored)):
            if isinstance(other, PerReplica):
                raise AttributeError(
                    "A PerReplica value has no dtype and is no operand of arithmetic outside of a replica: pass it to "
                    "`strategy.run` and compute there."
                )
            other = other.__jax_array__()
        value = self.value()
        if isinstance(other, (list, tuple, np.ndarray)):
            other = jnp.asarray(other)
        result = getattr(value, name)(other)
        return result

    method.__name__ = name
    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor eq ne lt le gt ge"
)


for _name in _OPERATORS.split():
    setattr(Variable, f"__{_name}__", _binary(f"__{_name}__"))


_SIGNATURE = inspect.signature(Variable.__init__)


class ResourceVariable(Variable):
    """A variable that has one copy: an ordinary one, or one component of a distributed one."""

    _parent: Variable | None = None
    _index = 0

    @classmethod
    def _component(cls, parent: Variable, index: int) -> ResourceVariable:
        self = cls.__new__(cls)
        for attribute in ("_synchronization", "_aggregation", "_trainable", "_constraint", "_treedef", "_types"):
            setattr(self, attribute, getattr(parent, attribute))
        self._parent, self._index, self._lent = parent, index, True
        self._name = parent._name + (f"/replica_{index}" if index else "")
        return self

    _leaves: list[Any]  # None for one that stands in a pack

    def _store(self, leaves: list[jax.Array]) -> None:
        self._leaves = leaves

    def _read_global(self) -> list[Any]:
        if _levels.any_lost:
            _levels.refuse_lost(self)
        if self._slots:
            return [self._slots[i].read() if leaf is None else leaf for i, leaf in enumerate(self._leaves)]
        return self._leaves

    def _pack_home(self, index: int) -> Any:
        leaf = self._leaves[index]
        if self._parent is not None or type(self) is not ResourceVariable or not leaf.is_fully_addressable:
            return None
        (device, *others) = leaf.devices()
        return None if others else _packs.Home(device, committed=leaf.committed, stays=self._place is not None)

    def _own_leaves(self, indices: Sequence[int]) -> list[Any]:
        return [self._leaves[index] for index in indices]

    def _write_own(self, indices: Sequence[int], leaves: Sequence[Any]) -> None:
        self._leaves = list(self._leaves)
        for index, leaf in zip(indices, leaves):
            self._leaves[index] = _packs.stored(self._slots, index, _packs.on_one_device(leaf, self._place))

    def _is_shelvable(self, spread: bool) -> bool:
        return self._parent is None and type(self) is ResourceVariable and not spread

    def _give_up(self, index: int) -> None:
        self._leaves = [None if i == index else leaf for i, leaf in enumerate(self._leaves)]

    def _write_global(self, leaves: list[Any]) -> None:
        self._leave_packs()
        self._leaves, self._lent = [_packs.on_one_device(leaf, self._place) for leaf in leaves], True

    def _get(self) -> list[Any]:
        if self._parent is None:
            return super()._get()
        frame = _levels.frame()
        if frame.local:
            return frame.read(self._parent)
        if not isinstance(frame, _levels.Level):
            return self._parent._read_component(self._index)
        leaves = frame.read(self._parent)
        return [leaf[self._index] for leaf in leaves] if self._parent._stacked else leaves

    def _put(self, leaves: list[Any]) -> None:
        if self._parent is None:
            return super()._put(leaves)
        frame = _levels.frame()
        if frame.local:
            return frame.write(self._parent, leaves)
        if isinstance(frame, _levels.Level):
            raise RuntimeError(
                f"One component of {self._parent.name} is assigned in compiled code, outside of any replica. Assign "
                "it in the replica function, or through `strategy.extended.update`."
            )
        _levels.note(self._parent)
        self._parent._write_component(self._index, leaves)

    def _read(self) -> list[Any]:
        if not isinstance(_levels.frame(), _levels.Level):
            self._lent = True
        return self._get()

    def _device(self) -> Any:
        if self._parent is None or self._parent._mesh is None:
            return super()._device()
        return self._parent._mesh.local_devices[self._index]

    def _update(self, combine, value, read_value, method):
        leaves = self._convert(value)
        if any(isinstance(leaf, DistributedValues) for leaf in leaves):
            raise TypeError(f"{self.name} takes one value, got a {type(leaves[0]).__name__} value.")
        with _levels.lock:
            level = self._level_of_sharing_replicas()
            leaves = self._in_turn(level, combine, leaves, method) if level else self._combined(combine, leaves)
            self._put(leaves)
        return self._of_leaves(leaves) if read_value else None

    def _level_of_sharing_replicas(self) -> _levels.Level | None:
        """Returns the level of the compiled replicas that share this variable and assign to it, None elsewhere."""
        frame = _levels.frame()
        if not isinstance(frame, _levels.Level) or not frame.local or self._parent is not None:
            return None
        return None if _context.in_cross_replica_context() else frame

    def _in_turn(
        self, level: _levels.Level, combine: Callable[[Any, Any], Any], leaves: list[Any], method: str
    ) -> list[Any]:
        """In compiled code, what the process's replicas' assignments come to when they are made one after the other.

        Each would see what those before it have assigned, which replicas that compute side by side do not: where that
        makes a difference it is refused when all is traced (`_control_flow.check_shared`), but for branches and loops.
        """
        level.shared.append((self, method, leaves))
        old = self._get()
        zero = [jnp.zeros_like(leaf) for leaf in old]
        groups = level.mesh.groups
        if method == "assign":  # the last replica's value stays
            lasts = [group[-1] for group in groups] if groups else [lax.axis_size(AXIS) - 1]
            last = jnp.isin(lax.axis_index(AXIS), jnp.array(lasts))
            return [_collectives.local_sum(jnp.where(last, leaf, z), groups) for leaf, z in zip(leaves, zero)]
        return [x + _collectives.local_sum(combine(z, leaf), groups) for x, z, leaf in zip(old, zero, leaves)]

    def _update_slices(self, method, slices):
        indices, values = jnp.asarray(slices.indices), jnp.asarray(slices.values)
        if level := self._level_of_sharing_replicas():
            level.shared.append((self, method, [indices, values]))
            groups = level.mesh.groups
            indices, values = (_collectives.local_gather(x, 0, groups) for x in (indices, values))
        with _levels.lock:
            new = SCATTER[method](self._get()[0], indices, values)
            self._put([new])
        return new


def register(cls: type) -> None:
    """Makes variables of this class stand for their values in pytrees."""
    jax.tree_util.register_pytree_node(cls, lambda v: ((v.value(),), None), lambda _, children: children[0])


for _cls in (Variable, ResourceVariable):
    register(_cls)
