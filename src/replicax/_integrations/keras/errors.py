"""Errors of JAX in layers of Keras.

| in Keras | what changes |
|---|---|
| `utils.traceback_utils.inject_argument_info_in_traceback` | errors of JAX's stay as they are |
| `backend.compute_output_spec` | errors of JAX's become a TypeError with their text |

Keras makes an error anew, with a text that has the layer's name and arguments. Those of JAX's cannot be made of a text,
and a function that needs a value while it is traced is known by them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from replicax._base.foreign_state import Original, wrap
from replicax._base.types import Tree


def join() -> None:
    """Changes Keras as the table above says."""
    import keras

    wrap(keras.src.utils.traceback_utils, "inject_argument_info_in_traceback", _but_for_errors_of_jax)
    wrap(keras.src.backend, "compute_output_spec", _with_errors_that_can_be_made_anew)


def _is_of_jax(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "jax"


def _but_for_errors_of_jax(inject: Original, fn: Callable[..., Tree], object_name: str | None = None) -> Tree:
    @functools.wraps(fn)
    def call(*args: Tree, **kwargs: Tree) -> Tree:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            if _is_of_jax(error):
                error._keras_call_info_injected = True  # type: ignore[attr-defined]
            raise

    return inject(call, object_name)


def _with_errors_that_can_be_made_anew(compute: Original, /, *args: Tree, **kwargs: Tree) -> Tree:
    try:
        return compute(*args, **kwargs)
    except Exception as error:
        if _is_of_jax(error):
            raise TypeError(str(error)) from error
        raise
