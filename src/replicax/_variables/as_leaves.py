"""Converts values that users give to variables to arrays of the variable's shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax._base import array_conversion, jax_internals, nest
from replicax._base.errors import InvalidArgumentError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.specs import as_dtype
from replicax._base.types import Leaf, Tree
from replicax._values import DistributedValues, is_array
from replicax._variables.array_protocol import ArrayProtocol

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
