"""The leaves of variables: what values that users give become, and how the methods of variables combine them.

A value is converted to arrays of the variable's `Signature` before it is assigned. An `ArrayProtocol` stands for its
value where an array is expected.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from replicax._base import array_conversion, array_text, frontend, jax_internals, nest
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.specs import as_dtype
from replicax._base.types import Leaf, Tree
from replicax._collectives.arithmetic import first_component
from replicax._tracing import lost_values
from replicax._values import (
    ArrayOperators,
    DistributedValues,
    Mirrored,
    PerReplica,
    global_array,
    is_array,
    is_whole,
    mesh_of,
    traced_component,
)
from replicax._variables.homes import Converted
from replicax._variables.storage import Leaves, Types

# For each method, the new value of a leaf, from its old value and the argument.
COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "assign": lambda old, new: new,
    "assign_add": operator.add,
    "assign_sub": operator.sub,
}


def _divide(array: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Divide rows of an array; integers as in C, one row after the other, since a product may be too large."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array.at[indices].divide(rows)
    rows = jnp.broadcast_to(rows, (*indices.shape, *array.shape[1:]))

    def divide_row(array: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, divisor = row
        return array.at[index].set(lax.div(array[index], divisor)), None

    return lax.scan(divide_row, array, (indices.reshape(-1), rows.reshape(-1, *array.shape[1:])))[0]


# For each method, the new value of an array, from its old value, indices along axis 0 and the rows for them.
SCATTER: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "scatter_add": lambda x, i, u: x.at[i].add(u),
    "scatter_sub": lambda x, i, u: x.at[i].add(-u),
    "scatter_mul": lambda x, i, u: x.at[i].multiply(u),
    "scatter_div": _divide,
    "scatter_update": lambda x, i, u: x.at[i].set(u),
    "scatter_max": lambda x, i, u: x.at[i].max(u),
    "scatter_min": lambda x, i, u: x.at[i].min(u),
}


def combine(method: str, old: Sequence[jax.Array], new: Sequence[Leaf]) -> list[jax.Array]:
    """Return the new leaves of a variable; the old ones of a variable that has only shapes."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in old):
        return list(old)
    if method in SCATTER:
        return [SCATTER[method](leaf, rows.indices, rows.values) for leaf, rows in zip(old, new)]
    return list(map(COMBINE[method], old, new))


def check_arithmetic(method: str, dtype: np.dtype, name: str) -> None:
    """Raise `InvalidArgumentError` for arithmetic with bools, and for the maximum or minimum of complex numbers."""
    if method.endswith(("assign", "update")):
        return
    if dtype == np.bool_ or (method.endswith(("max", "min")) and jnp.issubdtype(dtype, jnp.complexfloating)):
        raise InvalidArgumentError(f"{method} of {name}: a variable of dtype {dtype} can only be assigned")


class ArrayProtocol(ArrayOperators):
    """Makes an object that has a value usable in place of its value."""

    value: Callable[[], Tree]
    numpy: Callable[[], Tree]

    def _operand(self) -> Tree:
        return self.value()

    def _check_other(self, other: object) -> None:
        if isinstance(other, PerReplica):
            raise AttributeError(
                "A PerReplica value has no dtype and is no operand of arithmetic outside of a replica: pass it to "
                "`strategy.run` and compute there."
            )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __getitem__(self, index: Tree) -> Leaf:
        part = super().__getitem__(index)
        if (note_part := frontend.current.note_part) is not None:
            note_part(part, self, index)
        return part

    def _waiting(self) -> lost_values.explaining:
        return lost_values.explaining(self)


ARRAY = jax.tree.structure(0)  # of a variable that holds one array


class WrongShapeError(InvalidArgumentError):
    """A value for a variable has another shape. Methods of variables raise a class of TensorFlow's in its place."""


def initial_tree(initial_value: Tree, dtype: DTypeLike | None) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef, bool]:
    """Returns the leaves of an initial value as concrete arrays, its structure, and whether others may hold the arrays.

    (JAX's arrays of numpy's, and of numbers, are copies.)
    """
    with jax_internals.untraced():
        leaves, tree = _flattened(_evaluate(initial_value))
        lent = any(isinstance(leaf, jax.Array) for leaf in leaves)
        return [_new_array(leaf, dtype) for leaf in leaves], tree, lent


def abstract_tree(
    initial_value: Tree, dtype: DTypeLike | None
) -> tuple[list[jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
    """Returns the shapes and dtypes of the leaves of an initial value, and its structure; computes nothing if it can.

    A function that needs concrete values is called as it is.
    """
    with jax_internals.untraced():
        found: list[tuple[list[jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]] = []

        def evaluate() -> None:
            leaves, tree = _flattened(_evaluate(initial_value))
            found.append(([_new_kind(leaf, dtype) for leaf in leaves], tree))

        try:
            jax.eval_shape(evaluate)
        except jax.errors.JAXTypeError:
            evaluate()
        return found[-1]


def _evaluate(initial_value: Tree) -> Tree:
    """Call an initializer and return its result; return a value unchanged.

    Only a callable leaf is an initializer. A callable that JAX flattens, for example a module of Equinox, is a value.
    """
    is_initializer = callable(initial_value) and jax.tree_util.all_leaves([initial_value])
    return initial_value() if is_initializer else initial_value


def _flattened(value: Tree) -> tuple[list[Leaf], jax.tree_util.PyTreeDef]:
    """Returns the leaves of an initial value, arrays or numbers, and its structure."""
    if isinstance(value, ArrayProtocol):
        value = value.value()
    if isinstance(value, DistributedValues):
        value = value.values[0]
    if is_array(value) or _is_number_list(value) or isinstance(value, jax.ShapeDtypeStruct):
        return [value], ARRAY
    leaves, tree = jax.tree.flatten(value)
    for number, leaf in enumerate(leaves):
        if not is_array(leaf) and hasattr(leaf, "__jax_array__"):  # Keras's variables
            leaves[number] = leaf.__jax_array__()
        elif not (is_array(leaf) or isinstance(leaf, (bool, int, float, complex, jax.ShapeDtypeStruct))):
            advice = " Keep functions out of it: equinox.filter(module, equinox.is_array)." if callable(leaf) else ""
            raise TypeError(
                f"A variable holds an array or a pytree of arrays; got a leaf {leaf!r} of type "
                f"{type(leaf).__name__} in {type(value).__name__}.{advice}"
            )
    return leaves, tree


def _new_kind(value: Leaf, dtype: DTypeLike | None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the array that `_new_array` makes."""
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        value = np.asarray(value)
        dtype = jax.dtypes.canonicalize_dtype(value.dtype) if dtype is None else dtype
    return jax.ShapeDtypeStruct(value.shape, value.dtype if dtype is None else as_dtype(dtype))


def _is_number_list(value: Tree) -> bool:
    if isinstance(value, (list, tuple)) and not nest.is_namedtuple(value):
        return all(_is_number_list(item) for item in value)
    return isinstance(value, (bool, int, float, complex, np.generic))


def _new_array(value: Leaf, dtype: DTypeLike | None) -> jax.Array:
    if isinstance(value, jax.core.Tracer):
        raise RuntimeError(
            "The initial value of a variable is a traced value of jax.jit or another JAX transformation, which has no "
            "value of its own. Make the variable outside of it, or use replicax.function in place of jax.jit."
        )
    if dtype is None and isinstance(value, (bool, int, float, complex)):
        dtype = jax.dtypes.result_type(value)  # as `jnp.asarray` chooses it, which without one compiles a program
    dtype = None if dtype is None else as_dtype(dtype)
    if dtype is not None and not isinstance(value, jax.Array):
        is_array_value = hasattr(value, "dtype")
        return array_conversion.own_array(value, dtype) if is_array_value else convert_dtype(value, dtype)
    array = array_conversion.as_array(value)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):  # a PRNG key
        return array
    return array.astype(array.dtype if dtype is None else dtype)  # of a firm type also where `value` is a number


def convert_leaf(value: Leaf, kind: jax.ShapeDtypeStruct, name: str) -> jax.Array:
    """Return `value` as a leaf of this shape and dtype of the variable of that name.

    Raises:
        WrongShapeError: the value has another shape; for other errors see `convert_dtype`.
    """
    array = convert_dtype(value, kind.dtype)
    if array.shape != kind.shape:
        raise WrongShapeError(
            f"Cannot assign value to variable ' {name}': Shape mismatch.The variable shape {kind.shape}, and the "
            f"assigned value shape {array.shape} are incompatible."
        )
    return array


def convert_dtype(value: Leaf, dtype: np.dtype) -> jax.Array:
    """Return a value as an array of a dtype; arrays must have it, Python numbers and NumPy arrays must fit.

    Raises:
        ValueError: an array of another dtype, or None.
        TypeError: numbers that the dtype cannot represent, or no numbers.
    """
    if isinstance(value, IndexedSlices):
        value = value.to_dense()
    elif not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):  # a Keras variable
        value = value.__jax_array__()
    if isinstance(value, jax.Array):
        if value.dtype == dtype:
            return value
        if not (value.weak_type and np.can_cast(value.dtype, dtype, "same_kind")):
            raise ValueError(
                f"Tensor conversion requested dtype {dtype} for Tensor with dtype {value.dtype}: {value!r}"
            )
        return value.astype(dtype)
    if value is None:
        raise ValueError(f"Attempt to convert a value (None) with an unsupported type to an array of dtype {dtype}.")
    try:
        if getattr(value, "dtype", np.dtype("O")).kind == "f" and jnp.issubdtype(dtype, jnp.integer):
            raise TypeError("it has a fraction")
        if dtype == np.bool_ and not hasattr(value, "dtype") and not _are_bools(value):
            raise TypeError("it is no bool")
        return array_conversion.own_array(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"Cannot convert {value!r} to an array of dtype {dtype}.") from error


def _are_bools(value: Tree) -> bool:
    """Return whether a nested list holds only bools and arrays, which are checked one by one."""
    if isinstance(value, (list, tuple)):
        return all(map(_are_bools, value))
    return isinstance(value, bool) or not isinstance(value, (int, float, complex))


def refuse_split(leaves: Iterable[jax.Array], name: str) -> None:
    """Raises `ValueError` if an initial value is split over devices, for a variable that is not."""
    for leaf in leaves:
        if not leaf.sharding.is_fully_replicated:
            raise ValueError(
                f"The initial value of {name} is an array that is split over devices, {leaf.sharding}, and a variable "
                "of this kind is whole on each of its devices. Pass `numpy.asarray(array)`, or, to keep it split, make "
                "a variable that all replicas assign alike under a strategy with these devices."
            )


@dataclasses.dataclass(frozen=True)
class Signature:
    """The name, shapes, dtypes and structure of a variable.

    Attributes:
        name: the variable's name, for errors.
        types: the shape and dtype of each leaf.
        tree: the structure of the value; `ARRAY` for one array.
    """

    name: str
    types: Types
    tree: jax.tree_util.PyTreeDef

    def unflatten(self, leaves: Sequence[object]) -> Tree:
        """Return a value with these leaves."""
        return jax.tree.unflatten(self.tree, leaves)

    def flatten(self, value: Tree) -> list[Leaf]:
        """Return the leaves of a value, distributed values as they are; raise `ValueError` for another structure."""
        if self.tree == ARRAY:
            return [value]
        if isinstance(value, ArrayProtocol):
            value = value.value()
        leaves, tree = jax.tree.flatten(value, is_leaf=nest.is_leaf)
        if tree != self.tree:
            raise ValueError(
                f"Cannot assign to variable '{self.name}': its structure is {self.tree}, the value's {tree}."
            )
        return leaves

    def convert(self, method: str, value: Tree) -> list[Leaf]:
        """Return the leaves of a method's argument with the variable's shapes and dtypes, or the rows to scatter.

        Raises:
            TypeError: a leaf cannot be converted, or has components for replicas.
            ValueError: another structure, shape or dtype.
        """
        leaves = self.convert_components(method, value)
        for leaf in leaves:
            if isinstance(leaf, (PerReplica, Mirrored)):
                raise TypeError(f"{self.name} takes one value, got a {type(leaf).__name__} value.")
        return leaves

    def convert_components(self, method: str, value: Tree) -> list[Leaf]:
        """Do as `convert`, but allow distributed values with components of the variable's shapes and dtypes."""
        if method in SCATTER:
            return [self.convert_rows(method, value)]
        return [self._convert_leaf(leaf, kind) for leaf, kind in zip(self.flatten(value), self.types)]

    def convert_first(self, value: Tree) -> Leaves:
        """Do as `convert` for `assign`, with the first component of distributed values."""
        if not isinstance(value, ArrayProtocol):
            value = nest.map_structure(first_component, value)
        return self.convert("assign", value)

    def _convert_leaf(self, leaf: Leaf, kind: jax.ShapeDtypeStruct) -> Converted:
        if not isinstance(leaf, (PerReplica, Mirrored)):
            return convert_leaf(leaf, kind, self.name)
        component = traced_component(leaf)
        if component is not None:
            shape, dtype = component.shape, component.dtype
        elif is_whole(leaf) and (array := global_array(leaf)) is not None:
            shape, dtype = array.shape[1:] if isinstance(leaf, PerReplica) else array.shape, array.dtype
        else:
            return type(leaf)([convert_leaf(part, kind, self.name) for part in leaf.values], mesh_of(leaf))
        if shape != kind.shape or dtype != kind.dtype:
            raise ValueError(
                f"Cannot assign value to variable ' {self.name}': its shape is {kind.shape} and its dtype "
                f"{kind.dtype}, the components of the assigned {type(leaf).__name__} value have shape {shape} and "
                f"dtype {dtype}."
            )
        return leaf

    def convert_rows(self, method: str, slices: IndexedSlices) -> IndexedSlices:
        """Return rows of the variable's dtype for a scatter method.

        Raises:
            TypeError: no `IndexedSlices`, or the variable holds a pytree.
            ValueError: rows of another dtype.
            InvalidArgumentError: rows of another shape, a divisor of 0, or, outside of compiled code, an index that is
                out of range.
        """
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {slices!r}")
        kind = self.array_type(method)
        values = convert_dtype(slices.values, kind.dtype)
        check_arithmetic(method, kind.dtype, self.name)
        indices = as_indices(method, slices.indices, kind.shape, nd=False)
        if values.shape not in ((), (*indices.shape, *kind.shape[1:])):
            raise InvalidArgumentError(
                f"{method} of {self.name}: Must have updates.shape = indices.shape + params.shape[1:] or "
                f"updates.shape = [], got updates.shape {values.shape}, indices.shape {indices.shape}, params.shape "
                f"{kind.shape}"
            )
        if method == "scatter_div" and not isinstance(values, jax.core.Tracer) and not np.all(np.asarray(values)):
            raise InvalidArgumentError(f"{method} of {self.name}: updates must not contain 0, got {values}")
        return IndexedSlices(values, indices, slices.dense_shape)

    def array_type(self, method: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a variable of one array; raise `TypeError` for a method that needs one."""
        if self.tree != ARRAY:
            raise TypeError(
                f"`{method}` is for variables of one array, and {self.name} holds a pytree: {self.tree}. Take the leaf "
                "of its value that you mean, and assign the changed pytree."
            )
        return self.types[0]

    def text(self, name: str, leaves: Leaves) -> str:
        """Return what `repr` shows of a variable, or of a component with that name."""
        if self.tree == ARRAY:
            return array_text.variable_text(name, self.types[0].shape, self.types[0].dtype, leaves[0])
        size = sum(kind.size * kind.dtype.itemsize for kind in self.types)
        return f"<Variable '{name}' pytree of {len(self.types)} arrays, {size} bytes>"


def as_indices(method: str, indices: Leaf, shape: tuple[int, ...], nd: bool) -> jax.Array:
    """Return indices of rows of an array of this shape, or with `nd` of its elements or slices, as an array.

    Raises:
        InvalidArgumentError: they are no integers, have too many dimensions, or one is out of range. Compiled code
            does not know them: it writes nothing for an index that is too large, and reads 0.
    """
    places = jnp.asarray(indices)
    if not jnp.issubdtype(places.dtype, jnp.integer):
        raise InvalidArgumentError(f"{method}: indices must be integers, got dtype {places.dtype}")
    depth = (places.shape[-1] if places.ndim else 0) if nd else 1
    if depth > len(shape) or (nd and not places.ndim):
        raise InvalidArgumentError(f"{method}: indices of shape {places.shape} do not fit a variable of shape {shape}")
    if not isinstance(places, jax.core.Tracer):
        numbers = np.asarray(places)
        wrong = numbers[(numbers < 0) | (numbers >= (np.array(shape[:depth], np.int64) if nd else shape[0]))]
        if wrong.size:
            raise InvalidArgumentError(f"{method}: indices[...] = {wrong[0]} is not in a variable of shape {shape}")
    return places
