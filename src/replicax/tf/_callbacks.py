"""Calls of Python code from programs: `tf.py_function` and `tf.numpy_function`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import io_callback

from replicax.tf._core import TensorSpec, Tree, as_dtype, frames, modes, shown
from replicax.tf._host import jnp
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import DTypeLike, TensorLike

# The dtypes or specs of results: of one, or of several.
_Kind: TypeAlias = "TensorSpec | DTypeLike | None"
_Kinds: TypeAlias = "_Kind | list[_Kind] | tuple[_Kind, ...]"
_Function: TypeAlias = "Callable[..., Tree] | None"
_Inputs: TypeAlias = "Iterable[TensorLike] | None"
_INSTEAD = "Pass `Tout` as tf.TensorSpec with known shapes, or call it outside of compiled code."


def _called(func: Callable[..., Tree], inp: _Inputs, tout: _Kinds, given: Callable[[TensorLike], object]) -> Tree:
    """Calls `func` with the inputs, converted by `given`, and converts its results (one, a list or none) to `tout`."""
    modes.check_state()
    several = isinstance(tout, (list, tuple))
    kinds: list[_Kind] = list(tout) if isinstance(tout, (list, tuple)) else [tout]

    def results(*inputs: TensorLike) -> list[TensorLike]:
        found = func(*map(given, inputs))
        if not several or not kinds:
            return [found] * len(kinds)
        values = list(found) if isinstance(found, (list, tuple)) else [found]
        if len(values) != len(kinds):
            raise ValueError(f"`Tout` names {len(kinds)} results, and {shown(func)} returned {len(values)}.")
        return values

    if frames.is_tracing():
        out = _from_program(results, [convert_to_tensor(x) for x in inp or ()], kinds)
    else:
        inputs = [convert_to_tensor(x) for x in inp or ()]
        out = [_as(value, _dtype(kind)) for value, kind in zip(results(*inputs), kinds)]
    return out if several else out[0]


def _from_program(
    results: Callable[..., list[TensorLike]], inputs: list[jax.Array], kinds: list[_Kind]
) -> list[jax.Array]:
    specs = [kind for kind in kinds if isinstance(kind, TensorSpec) and kind.shape.is_fully_defined()]
    if len(specs) < len(kinds):
        for value in [*inputs, jnp.zeros(())]:  # the function around it then runs on the host
            known(value, "An argument of a Python function", _INSTEAD)
    shapes = [jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype) for spec in specs]

    def on_host(*arrays: jax.Array) -> list[np.ndarray]:
        values = results(*map(np.asarray, arrays))
        return [np.asarray(value, shape.dtype).reshape(shape.shape) for value, shape in zip(values, shapes)]

    result: list[jax.Array] = io_callback(on_host, shapes, *inputs)
    return result


def _dtype(kind: _Kind) -> np.dtype:
    return as_dtype(kind.dtype if isinstance(kind, TensorSpec) else kind)


def _as(value: TensorLike, dtype: np.dtype) -> jax.Array:
    if dtype == np.dtype(object):
        return convert_to_tensor(value)
    return convert_to_tensor(np.asarray(value).astype(dtype))


def py_function(func: _Function = None, inp: _Inputs = None, Tout: _Kinds = None, name: str | None = None) -> Tree:
    """Calls a Python function with tensors, whenever the program runs; also a decorator, `@tf.py_function(Tout=...)`.

    It is not differentiable.

    Args:
        func: the function.
        inp: its arguments.
        Tout: the dtypes of its results, one or a list. In compiled code `tf.TensorSpec` with known shapes; without
            them the function that calls it runs on the host.
        name: accepted for compatibility.
    """
    if func is None:
        return lambda func: lambda *args: py_function(func, args, Tout)
    return _called(func, inp, Tout, convert_to_tensor)


def numpy_function(
    func: _Function = None,
    inp: _Inputs = None,
    Tout: _Kinds = None,
    stateful: bool = True,
    name: str | None = None,
) -> Tree:
    """Calls a Python function that takes and returns numpy arrays, like `py_function`."""
    if func is None:
        return lambda func: lambda *args: numpy_function(func, args, Tout)
    return _called(func, inp, Tout, np.array)  # a copy, to which the function may write
