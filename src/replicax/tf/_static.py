"""Operations that compute with shapes while a function is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from replicax.tf import _known_values
from replicax.tf._core import array_conversion, frames, jax_internals
from replicax.tf._ops import is_shape, is_tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def static(op: Callable[_P, _R]) -> Callable[_P, _R]:
    """Computes with shapes while tracing, so that they can still be used as shapes.

    Under `jax.jit` even a constant becomes a tracer. `tf.shape` therefore returns a numpy array there, and an operation
    whose operands are all such arrays returns a numpy array again.
    """

    @functools.wraps(op)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if frames.is_tracing():
            leaves: list[Any]
            leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_tensor)
            if any(is_shape(x) or array_conversion.has_symbolic_sizes(x) for x in leaves):
                constants = [_known_values.value_of(x) for x in leaves]
                leaves = [x if constant is None else constant for x, constant in zip(leaves, constants)]
                if not any(is_tensor(x) for x in leaves):
                    args, kwargs = jax.tree.unflatten(structure, leaves)
                    if any(map(array_conversion.has_symbolic_sizes, leaves)):
                        symbolic = _SYMBOLIC.get(op.__name__)
                        return op(*args, **kwargs) if symbolic is None else symbolic(*args, **kwargs)
                    with jax_internals.untraced():
                        result: _R = jax.tree.map(lambda x: np.asarray(x)[()], op(*args, **kwargs))
                        return result
        return op(*args, **kwargs)

    return wrapper


def _concat(values: Sequence[Any], axis: int = 0, name: str | None = None) -> np.ndarray:
    return np.concatenate([np.asarray(value, object) for value in values], axis)


def _stack(values: Sequence[Any], axis: int = 0, name: str | None = None) -> np.ndarray:
    return np.stack([np.asarray(value, object) for value in values], axis)


# What operations do with sizes of which some are symbolic dimensions.
_SYMBOLIC: dict[str, Callable[..., Any]] = {"concat": _concat, "stack": _stack}
