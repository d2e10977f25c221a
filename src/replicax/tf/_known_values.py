"""Values of tensors that a function computes from constants alone, and that are known while it is traced.

Under `jax.jit` constants are tracers as well. The equations that a tracer results from say whether it depends on an
argument or a variable. If not, they are computed at once, so that the value can be a size.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax.tf._core import as_array, jax_internals, jaxprs

_Equation: TypeAlias = Any

_UNKNOWN: Any = object()  # in place of the value of a tracer that depends on an argument or a variable
# The value of each tracer that was asked for, by its id.
_values: dict[int, tuple[weakref.ref[Any], Any]] = {}


def remember(tensor: jax.Array, value: Any) -> None:
    """Store the value of a tracer."""
    key = id(tensor)
    _values[key] = weakref.ref(tensor, lambda _: _values.pop(key, None)), value


def value_of(tensor: object) -> np.ndarray | None:
    """Return the value of a tracer that was computed from constants alone; None for anything else."""
    if not isinstance(tensor, jax.core.Tracer):
        return None
    value = _find(tensor)
    return None if value is _UNKNOWN else np.asarray(value)


def _find(tensor: jax.core.Tracer[Any]) -> Any:
    """Return the value of a tracer or `_UNKNOWN`. Store it, and the values that were computed on the way."""
    path = [] if _look_up(tensor) is not None else [tensor]  # each tracer depends on the next one
    while path:
        operands = _operands_of(path[-1])
        values = [_look_up(operand) for operand in operands]
        missing = [operand for operand, value in zip(operands, values) if value is None]
        is_unknown = any(value is _UNKNOWN for value in values)
        if missing and not is_unknown:
            path.append(missing[0])
            continue
        value = _UNKNOWN if is_unknown else _compute(path[-1], values)
        for tracer in path if value is _UNKNOWN else path[-1:]:
            remember(tracer, value)
        path = [] if value is _UNKNOWN else path[:-1]
    return _look_up(tensor)


def _look_up(tracer: jax.core.Tracer[Any]) -> Any:
    """Return the value in the store, `_UNKNOWN`, or None if it was not asked for yet."""
    return None if (entry := _values.get(id(tracer))) is None else entry[1]


def _operands_of(tracer: jax.core.Tracer[Any]) -> list[jax.core.Tracer[Any]]:
    """Return the operands of a tracer's equation, or the outer function's tracer that is its constant."""
    equation, _, constant = jax_internals.origin_of(tracer)
    if equation is not None:
        return list(equation.in_tracers)
    return [constant] if isinstance(constant, jax.core.Tracer) else []


def _compute(tracer: jax.core.Tracer[Any], operands: list[Any]) -> Any:
    """Return the value of a tracer, given its operands' values; `_UNKNOWN` if it depends on more."""
    equation, place, constant = jax_internals.origin_of(tracer)
    if equation is None:
        if operands:
            return operands[0]
        if constant is None:
            return _UNKNOWN
        with jax_internals.untraced():
            return constant if isinstance(constant, jax.Array) else as_array(np.asarray(constant, tracer.dtype))
    if not all(map(_is_pure, (equation, *jaxprs.equations_in(equation)))):
        return _UNKNOWN
    try:
        with jax_internals.untraced():
            return jax_internals.rebind(equation, equation.params, operands)[place]
    except Exception:  # some operations need the surrounding program: symbolic sizes, for example
        return _UNKNOWN


def _is_pure(equation: _Equation) -> bool:
    """Return whether the results of an equation depend on its operands alone."""
    is_input = isinstance(equation.primitive, jax_internals.InputPrimitive)
    return not (is_input or equation.effects or jax_internals.callback_of(equation))


def source_of(tensor: jax.core.Tracer[Any]) -> str:
    """Return which operation made a value unknown, with the user's line."""
    source, unknown = None, [tensor]
    while unknown:
        equation, _, _ = jax_internals.origin_of(unknown[0])
        if equation is not None and not isinstance(equation.primitive, jax_internals.InputPrimitive):
            source = equation
        unknown = [operand for operand in _operands_of(unknown[0]) if _find(operand) is _UNKNOWN]
    if source is None:
        return "an argument of the function, or the value of a variable"
    name = str(source.params.get("name", source.primitive.name)).strip("_")
    return f"the result of `{name}` at {jax_internals.users_line(source)}"
