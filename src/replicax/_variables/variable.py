"""Variables: state that outlives a step and that the replicas share.

`Variable(...)` asks the current strategy for the right kind. A `MirroredVariable` is one replicated array, written
on all replicas alike; a `SyncOnReadVariable` is one stacked array in which each replica has a row of its own, put
together when it is read from outside; a `ResourceVariable` is one array on one device. Values are read and written
through frames (`_tracing.frames`), so that the same variable works eagerly, on one eager replica, and in compiled code.

As a pytree a variable is its value: `jnp.sum(v)`, `jax.grad(f)(v)` and `optax` take it as they take an array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax._base import nest, planning
from replicax._base.errors import InvalidArgumentError
from replicax._base.thread_state import current
from replicax._base.tracebacks import Living
from replicax._base.types import (
    Leaf,
    Tree,
    VariableAggregation,
    VariableSynchronization,
    as_variable_option,
)
from replicax._report.notebooks import Displayed
from replicax._tracing import active_tapes, context, frames, lost_values, step_failures
from replicax._values import ReplicaMesh
from replicax._variables import creators, deferred_restore
from replicax._variables.interface import Interface
from replicax._variables.leaves import (
    Signature,
    WrongShapeError,
    abstract_tree,
    check_arithmetic,
    combine,
    initial_tree,
)
from replicax._variables.storage import Leaves, Storage, Types

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


class Variable(Interface, nest.LeafBase, Displayed, metaclass=_VariableType):
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
            self._signature = Signature(self.name, *abstract_tree(initial_value, dtype))
            self._storage = self._new_storage([], False).abstract()
        else:
            leaves, tree, lent = initial_tree(initial_value, dtype)
            types = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            self._signature = Signature(self.name, types, tree)
            self._storage = self._new_storage(leaves, lent)
        self._late = bool(deferred_restore.waiting)
        living.add(self)

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
        if current.tapes or current.tapes_outside:
            leaves = active_tapes.on_read(self, leaves)
        return self._signature.unflatten(leaves)

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
            return self._signature.unflatten([_numpy(leaf) for leaf in leaves])

    # Writing.

    def _assign(self, method: str, value: Tree, read_value: bool) -> Tree:
        """Update the variable as the method of this name does; return the new value if it is to be read.

        `assign` has one value for all elements, a scatter method has `IndexedSlices`.
        """
        try:
            if method.startswith("assign_") and any(kind.dtype == np.bool_ for kind in self._types):
                self._signature.convert_components(method, value)  # a number that is no bool is another error
                check_arithmetic(method, np.dtype(np.bool_), self.name)
            self._settle()
            return self._update(method, value, read_value)
        except WrongShapeError as error:  # TensorFlow raises different classes
            raise (ValueError if method == "assign" else InvalidArgumentError)(str(error)) from None

    def _assign_parts(self, method: str, value: jax.Array) -> Tree:
        """Assign a value of which only some parts differ from the value here."""
        return self.assign(value)

    def _assign_alike(self, value: Tree) -> None:
        """Assign a value that is the same in every replica, so that there is nothing to combine."""
        self.assign(value, read_value=False)

    def _settle(self) -> None:
        """Before a write, assign the value of a waiting checkpoint, and wait for a program that computes the value."""
        if self._late is not False:
            deferred_restore.settle(self)
            self._late = False
        if step_failures.awaited and not frames.is_tracing() and not step_failures.in_callback():
            with frames.lock:
                step_failures.wait_until_free({id(self)})

    def _write(self, method: str, leaves: list[Leaf]) -> Leaves:
        """Combine the leaves of the current frame with converted ones; write and return the result."""
        with frames.lock:
            # A leaf of a shared vector is not cut out of it only to be replaced.
            if method != "assign" or not frames.frame().replaces_unread:
                leaves = combine(method, self._get(), leaves)
            self._put(leaves)
        return leaves

    # Copies.

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

    # For frames and the engine.

    @property
    def _types(self) -> Types:
        return self._signature.types

    @property
    def _treedef(self) -> jax.tree_util.PyTreeDef:
        return self._signature.tree

    @property
    def _equal_by_contract(self) -> bool:
        """True if it is an error that replicas assign different values."""
        return False

    def _abstract_storage(self) -> Storage:
        """Return a storage with shapes in place of arrays, as the variable's strategy would create it now."""
        return self._storage.abstract()

    def _adopt(self, arrays: Sequence[np.ndarray]) -> None:
        """Replaces the leaves by arrays of the host that nobody writes any more: devices may share their memory."""
        self._settle()
        with frames.lock:
            self._take_from_host([np.asarray(array, kind.dtype) for array, kind in zip(arrays, self._types)])
            self._storage.lent, self._storage.lost = False, None

    def _take_from_host(self, arrays: list[np.ndarray]) -> None:
        leaves = [jnp.asarray(array, dtype=kind.dtype) for array, kind in zip(arrays, self._types)]
        self._update("assign", self._signature.unflatten(leaves), read_value=False)

    def _get(self) -> Leaves:
        return frames.frame().read(self)

    def _put(self, leaves: Leaves) -> None:
        frames.frame().write(self, leaves)

    def _device(self) -> jax.Device | str:
        if self._mesh is not None:
            return self._mesh.local_devices[frames.frame().replica_on(self._mesh)]
        leaves = self._get()
        if not leaves or isinstance(leaves[0], jax.core.Tracer):
            return jax.local_devices()[0]
        return next(iter(leaves[0].devices()))

    def __repr__(self) -> str:
        with frames.lock:
            leaves = self._read()
        with lost_values.explaining(self):
            return self._signature.text(self.name, leaves)

    # For the kinds of variables.

    def _new_storage(self, leaves: Leaves, lent: bool) -> Storage:
        """Returns a storage for the initial value."""
        raise NotImplementedError

    def _read(self) -> Leaves:
        """Return the leaves as the user sees them here."""
        raise NotImplementedError

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        """Convert and combine the values of all replicas if need be, write them, and return what `assign` returns."""
        raise NotImplementedError


def hide(variable: Variable) -> None:
    """Keep a variable out of checkpoints and of lists of variables."""
    variable._late, variable._hidden = False, True


def is_hidden(variable: Variable) -> bool:
    """Return whether `hide` has hidden the variable."""
    return variable._hidden


def _numpy(leaf: jax.Array) -> Leaf:
    if isinstance(leaf, jax.core.Tracer):
        raise NotImplementedError("numpy() has no value inside of compiled code; use value().")
    if isinstance(leaf, jax.ShapeDtypeStruct):  # NumPy would make an array of an object of it, which can be saved
        raise planning.PlanError("numpy() has no value of a variable that is only planned for; it has a shape alone.")
    array = np.array(leaf)  # a copy: users may write to what TensorFlow gives them
    return array if array.ndim else array[()]


_SIGNATURE = inspect.signature(Variable.__init__)
__test__ = {"Variable.value": Variable.value}  # which doctest does not take for a method
