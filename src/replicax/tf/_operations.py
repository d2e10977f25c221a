"""Conversion of arguments and of errors, which all operations of `replicax.tf` share.

Any argument may be a variable, even if a number is expected. Errors of JAX and numpy become an `InvalidArgumentError`,
which is also an instance of the original error's class, so that either can be caught.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax import export
from jax.typing import ArrayLike

from replicax.tf import _conversions
from replicax.tf._core import (
    IndexedSlices,
    InvalidArgumentError,
    InvalidOperandError,
    PerReplica,
    Variable,
    autograph_switch,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])
_LIBRARIES = {"jax", "jaxlib", "numpy", "opt_einsum"}


def operations(names: dict[str, Any], takes_composites: bool = False) -> None:
    """Make operations of all public functions of a module, whose names these are, and of those in its tables.

    Args:
        names: the names of the module.
        takes_composites: whether the functions themselves take ragged and sparse tensors.
    """
    functions = {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and isinstance(value, types.FunctionType) and value.__module__ == names["__name__"]
    }
    # One for each function, since a function may have several names.
    made: dict[types.FunctionType, Callable[..., Any]] = {}
    for name, function in functions.items():
        if function not in made:
            made[function] = operation(function, name, takes_composites)
        names[name] = made[function]
    for name, table in names.items():
        if name.isupper() and not name.startswith("_") and isinstance(table, dict):
            table.update({key: made.get(op) or operation(op, key, takes_composites) for key, op in table.items()})


def operation(op: Callable[..., Any], name: str, takes_composites: bool = False) -> Callable[..., Any]:
    """Wrap a function so that it takes variables, and raises `InvalidArgumentError` for errors of JAX.

    Unless the function takes ragged and sparse tensors itself, `_ragged_operations` computes its results for them.
    """

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if _kinds.get(type(x)) is not False and _may_hold(x):
                if not takes_composites and _holds(_composites, args, kwargs):
                    return _of_composites[0](call, name, args, kwargs)
                if name in of_strings and _holds(_strings, args, kwargs):
                    return of_strings[name](*args, **kwargs)
                if not any(
                    isinstance(x, PerReplica) for x in args
                ):  # JAX refuses it, with another message if there is a variable too
                    args, kwargs = tuple(map(value_of, args)), {name: value_of(x) for name, x in kwargs.items()}
                break
        try:
            return op(*args, **kwargs)
        except (TypeError, ValueError) as error:
            autograph_switch.advise(error)
            if not _is_complaint(error):
                raise
            shapes = [_dims(x) for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "shape")]
            raise InvalidOperandError(f"{name}: {error} (shapes: {', '.join(shapes) or 'none'})") from error

    call.__name__ = call.__qualname__ = name
    return call


# Forms of operations for tensors of strings, by name; and the class of these tensors.
of_strings: dict[str, Callable[..., Any]] = {}
_strings: set[type] = set()

# The classes of ragged and sparse tensors, and the function that computes an operation on them.
_composites: set[type] = set()
_of_composites: list[Callable[..., Any]] = []


def strings_are(kind: type) -> None:
    """Tells the class of tensors of strings."""
    _strings.add(kind)
    _kinds[kind] = True


def composites_are(kinds: Iterable[type], compute: Callable[..., Any]) -> None:
    """Set the classes of ragged and sparse tensors; `compute(op, name, args, kwargs)` computes an operation on them."""
    _composites.update(kinds)
    _kinds.update(dict.fromkeys(kinds, True))
    _of_composites[:] = [compute]


def _holds(kinds: Collection[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument, or an element of a list among them, is of one of these classes."""
    return any(type(part) in kinds for part in parts_of(args, kwargs))


def parts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call, the elements of lists in place of the lists."""
    return [part for x in (*args, *kwargs.values()) for part in (x if type(x) in (list, tuple) else (x,))]


def on_values(operands: int) -> Callable[[_F], _F]:
    """Mark an operation on elements: for ragged tensors it computes with their values.

    Args:
        operands: the number of tensors that it takes, its first parameters.
    """

    def mark(op: _F) -> _F:
        op.operands = operands  # type: ignore[attr-defined]
        return op

    return mark


# The class of the dimensions of symbolic shapes, which stay dimensions, though JAX can make arrays of them.
_SYMBOLIC_SIZE = type(export.symbolic_shape("n")[0])

# Whether arguments of a type may be or contain variables, or tensors that are no arrays of JAX: others stay fast.
_kinds: dict[type, bool] = {list: True, tuple: True}


def _may_hold(x: Any) -> bool:
    """Return whether an argument may be or contain a variable, or a tensor that is no array of JAX."""
    if (kind := type(x)) is not list and kind is not tuple:
        return _may_be(kind)
    kinds = {*map(type, x)}  # few, however long the list is
    return any(map(_may_hold, x)) if list in kinds or tuple in kinds else any(map(_may_be, kinds))


def _may_be(kind: type) -> bool:
    return _may_hold_variables(kind) if (may := _kinds.get(kind)) is None else may


def _may_hold_variables(kind: type) -> bool:
    arrays = jax.Array, jax.core.Tracer, IndexedSlices, PerReplica, _SYMBOLIC_SIZE
    plain = issubclass(kind, arrays) or not hasattr(kind, "__jax_array__")
    _kinds[kind] = issubclass(kind, Variable) or not plain
    return _kinds[kind]


def value_of(x: Any) -> Any:
    """Returns the value of a variable (Keras's too) and of variables in a list; anything else unchanged."""
    if _kinds.get(type(x)) is False:
        return x
    if isinstance(x, Variable):
        found = _conversions.converted(x) if _conversions.registered else x
        return x.value() if found is x else found
    if type(x) in (list, tuple):
        return type(x)(map(value_of, x))
    if (may := _kinds.get(type(x))) is None:
        may = _may_hold_variables(type(x))
    return x.__jax_array__() if may and hasattr(x, "__jax_array__") else x


def _is_complaint(error: Exception) -> bool:
    """Returns whether an error was raised in JAX or numpy, other than an error for a missing value while tracing."""
    if isinstance(error, (InvalidArgumentError, jax.errors.JAXTypeError)):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    return name == "replicax.tf._host" or name.partition(".")[0] in _LIBRARIES  # it calls numpy's compiled functions


def fitting(compute: Callable[_P, _R], text: Callable[..., str | None]) -> Callable[_P, _R]:
    """Wraps a function of tensors so that it raises `InvalidArgumentError` with TensorFlow's text for wrong shapes.

    Args:
        compute: the function.
        text: called with the same arguments after an error; returns the message, or None if it does not apply.
    """

    @functools.wraps(compute)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return compute(*args, **kwargs)
        except (TypeError, ValueError) as error:
            autograph_switch.advise(error)
            said = None if isinstance(error, (InvalidArgumentError, jax.errors.JAXTypeError)) else text(*args, **kwargs)
            if said is None:
                raise
            raise InvalidOperandError(said) from error

    return call


# TensorFlow's messages.


def _dims(x: ArrayLike) -> str:
    return "[" + ",".join(map(str, np.shape(x))) + "]"


def of_broadcast(x: ArrayLike, y: ArrayLike) -> str | None:
    """Returns an error message for two operands that cannot be broadcast, or None."""
    try:
        np.broadcast_shapes(np.shape(x), np.shape(y))
    except ValueError:
        return f"Incompatible shapes: {_dims(x)} vs. {_dims(y)}"
    return None


def of_matmul(a: ArrayLike, b: ArrayLike, **_: object) -> str | None:
    """Returns an error message for matrices, or stacks of matrices, that cannot be multiplied, or None."""
    if min(np.ndim(a), np.ndim(b)) == 0 or np.shape(a)[-1] != np.shape(b)[max(np.ndim(b) - 2, 0)]:
        return f"Matrix size-incompatible: In[0]: {_dims(a)}, In[1]: {_dims(b)}"
    return None


def of_reshape(tensor: ArrayLike, shape: tuple[int, ...]) -> str | None:
    """Returns an error message for a shape to which a tensor cannot be reshaped, or None."""
    size, count = int(np.prod(np.shape(tensor))), int(np.prod([n for n in shape if n != -1]))
    said = f"Input to reshape is a tensor with {size} values, but the requested shape"
    if shape.count(-1) == 1:
        return f"{said} requires a multiple of {count}" if count and size % count else None
    return f"{said} has {count}" if -1 not in shape and size != count else None


def of_concat(values: list[ArrayLike], axis: int) -> str | None:
    """Returns an error message for tensors that cannot be concatenated, or None."""
    first, rank = values[0], np.ndim(values[0])
    for i, other in enumerate(values):
        found = f"shape[0] = {_dims(first)} vs. shape[{i}] = {_dims(other)}"
        if np.ndim(other) != rank:
            return f"ConcatOp : Ranks of all input tensors should match: {found}"
        for n in range(rank):
            if -rank <= axis < rank and n != axis % rank and np.shape(first)[n] != np.shape(other)[n]:
                return f"ConcatOp : Dimension {n} in both shapes must be equal: {found}"
    if not -rank <= axis < rank:
        return f"ConcatOp : Expected concatenating dimensions in the range [{-rank}, {rank}), but got {axis}"
    return None


def of_stack(values: list[ArrayLike], axis: int) -> str | None:
    """Returns an error message for tensors that cannot be stacked, or None."""
    for i, other in enumerate(values):
        if np.shape(other) != np.shape(values[0]):
            found = f"values[0].shape = {_dims(values[0])} != values[{i}].shape = {_dims(other)}"
            return f"Shapes of all inputs must match: {found}"
    return None


def of_squeeze(tensor: ArrayLike, axis: int | tuple[int, ...] | None) -> str | None:
    """Returns an error message for axes that cannot be squeezed, or None."""
    shape, rank = np.shape(tensor), np.ndim(tensor)
    for i in np.atleast_1d(() if axis is None else axis):
        if not -rank <= i < rank:
            return f"Tried to squeeze dim index {i} for tensor with {rank} dimensions."
        if shape[i] != 1:
            return f"Can not squeeze dim[{i}], expected a dimension of 1, got {shape[i]}"
    return None


def of_expand_dims(tensor: ArrayLike, axis: int | tuple[int, ...] | None) -> str | None:
    """Returns an error message for an axis that cannot be inserted, or None."""
    return f"Tried to expand dim index {axis} for tensor with {np.ndim(tensor)} dimensions."


def of_broadcast_to(tensor: ArrayLike, shape: tuple[int, ...]) -> str | None:
    """Returns an error message for a shape to which a tensor cannot be broadcast, or None."""
    return f"Incompatible shapes: {_dims(tensor)} vs. [{','.join(map(str, shape))}]"
