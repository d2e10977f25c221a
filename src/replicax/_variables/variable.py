"""Variables: state that outlives a step and that the replicas share.

`Variable(...)` asks the current strategy for the right kind. A `MirroredVariable` is one replicated array, written
on all replicas alike; a `SyncOnReadVariable` is one stacked array in which each replica has a row of its own, put
together when it is read from outside; a `ResourceVariable` is one array on one device. Values are read and written
through frames (`_tracing.frames`), so that the same variable works eagerly, on one eager replica, and in compiled code.

As a pytree a variable is its value: `jnp.sum(v)`, `jax.grad(f)(v)` and `optax` take it as they take an array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax._base import array_text, devices, nest, planning
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.living import Living
from replicax._base.specs import SINGLE_DTYPES, TensorShape
from replicax._base.thread_state import current
from replicax._base.types import (
    Leaf,
    Tree,
    VariableAggregation,
    VariableSynchronization,
    as_variable_option,
)
from replicax._report.notebooks import Displayed
from replicax._tracing import active_tapes, context, frames, lost_values, step_failures
from replicax._values import Mirrored, PerReplica, ReplicaMesh
from replicax._variables import creators, deferred_restore
from replicax._variables.array_protocol import ArrayProtocol
from replicax._variables.as_leaves import ARRAY, WrongShapeError, abstract_tree, convert_leaf, initial_tree
from replicax._variables.combine import check_arithmetic, combined
from replicax._variables.homes import Converted
from replicax._variables.scattering import Scattering
from replicax._variables.storage import Leaves, Storage

_NONE = VariableAggregation.NONE
living: Living[Variable] = Living()


class _VariableType(type):
    """Has `Variable(...)` make a variable of the kind that the current strategy has, and variables be pytree nodes."""

    def __init__(cls, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        jax.tree_util.register_pytree_node(cls, lambda v: ((v.value(),), None), lambda _, children: children[0])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Variable:
            return super().__call__(*args, **kwargs)
        arguments = _arguments(*args, **kwargs)
        make = context.get_strategy().extended._create_variable
        return creators.through_creators(make)(**arguments)


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Tree]:
    """Returns the arguments of `Variable` by name, checked, without those that have no effect."""
    bound = _SIGNATURE.bind(None, *args, **kwargs)
    bound.apply_defaults()
    given = {name: bound.arguments[name] for name in _EFFECTIVE}
    if bound.arguments["copies_may_differ"] is not None:  # creators of other libraries do not know it
        given["copies_may_differ"] = bound.arguments["copies_may_differ"]
    if given["initial_value"] is None:
        raise ValueError("`initial_value` must be given: an array, a number, a pytree, or a function that makes it.")
    as_variable_option(VariableSynchronization, given["synchronization"], given["name"])
    as_variable_option(VariableAggregation, given["aggregation"], given["name"])
    return given


_EFFECTIVE = ("initial_value", "trainable", "name", "dtype", "constraint", "synchronization", "aggregation", "shape")


class _readonly:
    """A method that an assignment to its name does not replace (users of Flax write `variable.value = x`)."""

    def __init__(self, method: Callable[[Variable], Tree]):
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Variable | None, owner: type | None = None) -> Callable[..., Tree]:
        return self._method if instance is None else self._method.__get__(instance, owner)

    def __set__(self, instance: Variable, value: object) -> None:
        raise AttributeError("A variable's value() is a method. To replace the value, call variable.assign(...).")


class Variable(ArrayProtocol, Scattering, nest.LeafBase, Displayed, metaclass=_VariableType):
    """State that replicas share: an array, or a whole pytree such as Flax parameters or an Optax state.

    Args:
        initial_value: an array, a number, a nest of numbers, a pytree of arrays, or a function that makes one
            (called once). A list that holds arrays is a pytree; a list of numbers is an array. A callable pytree,
            for example a module of Equinox, is a value and is not called.
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
    _stays_in_process = True  # see `_data/by_value.py`
    _mesh: ReplicaMesh | None = None
    _strategy: context.StrategyLike | None = None
    _storage: Storage  # where the arrays are
    _late: bool | None = False  # whether a restored checkpoint may have a value for it (see `deferred_restore`)
    _hidden = False  # whether users do not see it, as the counters of random numbers
    _changed = False  # whether it was written since it was set up
    _changed_by_input = False  # and by a function of a dataset

    def __init__(
        self,
        initial_value: Tree = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        variable_def: object = None,
        dtype: DTypeLike | None = None,
        import_scope: object = None,
        constraint: Callable[[Tree], Tree] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = _NONE,
        shape: object = None,
        experimental_enable_variable_lifting: bool = True,
        *,
        copies_may_differ: bool | None = None,
    ):
        self._synchronization = as_variable_option(VariableSynchronization, synchronization, name)
        self._aggregation = as_variable_option(VariableAggregation, aggregation, name)
        on_read = self._synchronization is VariableSynchronization.ON_READ
        self._trainable = (not on_read) if trainable is None else bool(trainable)
        self._name = "/".join([*current.names, name or "Variable"])
        self._constraint, self._copies_may_differ = constraint, copies_may_differ
        if planning.are_abstract():
            self._types, self._treedef = abstract_tree(initial_value, dtype)
            self._storage = self._new_storage([], False).abstract()
        else:
            leaves, self._treedef, lent = initial_tree(initial_value, dtype)
            self._types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            self._storage = self._new_storage(leaves, lent)
        self._late = deferred_restore.is_late()
        living.add(self)

    # Properties.

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
        return self._of_leaves([TensorShape(leaf.shape) for leaf in self._types])

    @property
    def dtype(self) -> Tree:
        """The array's dtype; for a pytree, a pytree of dtypes.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).dtype
        dtype('float32')
        """
        return self._of_leaves([SINGLE_DTYPES.get(leaf.dtype, leaf.dtype) for leaf in self._types])

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

    # Reading.

    @_readonly
    def value(self) -> Tree:
        """Returns the value: the replica's own in replica context; else the first copy, or the aggregated value.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).value()
        Array([1., 2.], dtype=float32)
        """
        if self._late is not False:
            deferred_restore.settle(self)
        with frames.lock:
            leaves = self._read()
        frames.warn_of_constant(self.name)
        return self._of_leaves(active_tapes.on_read(self, leaves))

    def read_value(self) -> Tree:
        """Returns `value()`.

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).read_value().tolist()
        [1.0, 2.0]
        """
        return self.value()

    def numpy(self) -> Tree:
        """Returns a copy of the value as a numpy array (for a pytree, a pytree of them).

        >>> import replicax as rx
        >>> rx.Variable([1.0, 2.0]).numpy()
        array([1., 2.], dtype=float32)
        """
        if self._late is not False:
            deferred_restore.settle(self)
        with frames.lock:
            leaves = self._read()
        with lost_values.explaining(self):
            return self._of_leaves([_numpy(leaf) for leaf in leaves])

    def is_initialized(self) -> jax.Array:
        """Returns True: variables are always initialized.

        >>> import replicax as rx
        >>> bool(rx.Variable(1.0).is_initialized())
        True
        """
        return jnp.asarray(True)

    # Writing.

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
        return self._updated("assign", value, read_value)

    def assign_add(
        self, delta: Tree, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Tree:
        """Adds `delta`; see `assign`.

        >>> import replicax as rx
        >>> rx.Variable(1.0).assign_add(0.5).item()
        1.5
        """
        return self._updated("assign_add", delta, read_value)

    def assign_sub(
        self, delta: Tree, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Tree:
        """Subtracts `delta`; see `assign`.

        >>> import replicax as rx
        >>> rx.Variable(1.0).assign_sub(0.5).item()
        0.5
        """
        return self._updated("assign_sub", delta, read_value)

    def _assign_alike(self, value: Tree) -> None:
        """Assigns what every replica assigns, so that there is nothing to combine."""
        self.assign(value, read_value=False)

    def _updated(self, method: str, value: Tree, read_value: bool) -> Tree:
        try:
            if method != "assign" and any(kind.dtype == np.bool_ for kind in self._types):
                self._convert(value)  # a number that is no bool is another error
                check_arithmetic(method, np.dtype(np.bool_), self._name)
            self._be_settled()
            return self._update(method, value, read_value)
        except WrongShapeError as error:  # which `assign` and the other methods of TensorFlow raise as two classes
            raise (ValueError if method == "assign" else InvalidArgumentError)(str(error)) from None

    def _be_settled(self) -> None:
        """Gives it, before it is written, what a checkpoint has for it, which it takes no more after that."""
        if self._late is not False:
            deferred_restore.settle(self)
            self._late = False
        if frames.awaited and not frames.is_tracing() and not step_failures.in_callback():
            with frames.lock:
                frames.wait_until_free({id(self)})

    # Identity.

    class _Reference:
        def __init__(self, variable: Variable):
            self._variable = variable

        def deref(self) -> Variable:
            """Returns the variable."""
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
        """Returns a hashable reference; `ref().deref()` is the variable.

        >>> import replicax as rx
        >>> v = rx.Variable(1.0)
        >>> {v.ref(): "v"}[v.ref()], v.ref().deref() is v
        ('v', True)
        """
        return Variable._Reference(self)

    def __hash__(self) -> int:  # type: ignore[no-redef]
        raise TypeError(f"Variable is unhashable. Instead, use variable.ref() as the key. (Variable: {self!r})")

    def __copy__(self) -> Variable:
        return self  # as in TensorFlow: one variable, by another name

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        clone = type(self).__new__(type(self))
        with frames.lock:
            clone.__dict__.update(self.__dict__)
            clone._storage = self._storage.clone()
        memo[id(self)] = clone
        living.add(clone)
        return clone

    def __getstate__(self) -> dict[str, object]:
        return self.__deepcopy__({}).__dict__  # with leaves of its own, wherever they stand

    # For the engine: how values are stored, and how they go through frames.

    @property
    def _equal_by_contract(self) -> bool:
        """True if it is an error that replicas assign different values."""
        return False

    def _abstract_storage(self) -> Storage:
        """Return a storage with shapes in place of arrays, as the variable's strategy would create it now."""
        return self._storage.abstract()

    def _adopt(self, arrays: Sequence[np.ndarray]) -> None:
        """Replaces the leaves by arrays of the host that nobody writes any more: devices may share their memory."""
        self._be_settled()
        with frames.lock:
            self._take_from_host([np.asarray(array, kind.dtype) for array, kind in zip(arrays, self._types)])
            self._storage.lent, self._storage.lost = False, None

    def _take_from_host(self, arrays: list[np.ndarray]) -> None:
        leaves = [jnp.asarray(array, dtype=kind.dtype) for array, kind in zip(arrays, self._types)]
        self._update("assign", self._of_leaves(leaves), read_value=False)

    def _of_leaves(self, leaves: Sequence[object]) -> Tree:
        return jax.tree.unflatten(self._treedef, leaves)

    def _new_storage(self, leaves: Leaves, lent: bool) -> Storage:
        """Returns a storage for the initial value."""
        raise NotImplementedError

    def _get(self) -> Leaves:
        return frames.frame().read(self)

    def _put(self, leaves: Leaves) -> None:
        frames.frame().write(self, leaves)

    def _combined(self, method: str, leaves: Leaves) -> Leaves:
        """Returns the leaves of the current frame, combined with these."""
        if method == "assign" and frames.frame().replaces_unread:
            return leaves  # what stands in a shared vector is not cut out for nothing
        return combined(method, self._get(), leaves)

    def _read(self) -> Leaves:
        """Returns the leaves as the user sees them here."""
        raise NotImplementedError

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        """Combines the value here with a user's as the method does, and returns the new one if it is to be read."""
        raise NotImplementedError

    def _update_slices(self, method: str, slices: IndexedSlices) -> Tree:
        """Combines rows of the value here with a user's as the method of this name does, and returns the new value."""
        raise NotImplementedError

    def _device(self) -> jax.Device | str:
        if self._mesh is not None:
            return self._mesh.local_devices[frames.frame().replica_on(self._mesh)]
        leaves = self._get()
        if not leaves or isinstance(leaves[0], jax.core.Tracer):
            return jax.local_devices()[0]
        return next(iter(leaves[0].devices()))

    def _convert(self, value: Tree) -> Sequence[Converted]:
        """Returns a value as leaves of the variable's shapes and dtypes, a distributed value as it is."""
        if isinstance(value, Variable):
            value = value.value()
        return [value] if isinstance(value, (PerReplica, Mirrored)) else self._as_leaves(value)

    def _as_leaves(self, value: Tree) -> Leaves:
        """Returns a value that is not distributed as leaves of the variable's shapes and dtypes."""
        if self._treedef == ARRAY:
            return [convert_leaf(value, self._types[0], self.name)]
        leaves, tree = jax.tree.flatten(value)
        self._check_structure(tree)
        return [convert_leaf(leaf, kind, self.name) for leaf, kind in zip(leaves, self._types)]

    def _check_structure(self, tree: jax.tree_util.PyTreeDef) -> None:
        if tree != self._treedef:
            raise ValueError(
                f"Cannot assign to variable '{self.name}': its structure is {self._treedef}, the value's {tree}."
            )

    def _text_of(self, name: str, leaves: Leaves) -> str:
        if self._treedef == ARRAY:
            kind = self._types[0]
            with lost_values.explaining(self):
                return array_text.variable_text(name, kind.shape, kind.dtype, leaves[0])
        size = sum(kind.size * kind.dtype.itemsize for kind in self._types)
        return f"<Variable '{name}' pytree of {len(self._types)} arrays, {size} bytes>"

    def __repr__(self) -> str:
        with frames.lock:
            leaves = self._read()
        return self._text_of(self.name, leaves)


def _numpy(leaf: jax.Array) -> Leaf:
    if isinstance(leaf, jax.core.Tracer):
        raise NotImplementedError("numpy() has no value inside of compiled code; use value().")
    if isinstance(leaf, jax.ShapeDtypeStruct):  # NumPy would make an array of an object of it, which can be saved
        raise planning.PlanError("numpy() has no value of a variable that is only planned for; it has a shape alone.")
    array = np.array(leaf)  # a copy: users may write to what TensorFlow gives them
    return array if array.ndim else array[()]


_SIGNATURE = inspect.signature(Variable.__init__)
__test__ = {"Variable.value": Variable.value}  # which doctest does not take for a method
