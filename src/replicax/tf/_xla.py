"""`tf.xla.experimental`: what XLA compiles, which here is every `tf.function`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from replicax.tf import _nests
from replicax.tf._ops import convert_to_tensor


def compile(computation: Callable[..., Any], inputs: Sequence[Any] | None = None) -> Any:
    """Calls a function with `inputs`; in a `tf.function` it is part of the program that XLA compiles.

    Returns:
        The results: a list for a single tensor and for several, else the structure that the function returns.
    """
    found = computation(*(inputs or []))
    if found is None:
        return None
    results = _nests.map_structure(convert_to_tensor, found)
    nested = isinstance(found, dict) or any(map(_nests.is_nested, found if isinstance(found, (list, tuple)) else ()))
    return results if nested else list(results) if isinstance(found, (list, tuple)) else [results]


@contextlib.contextmanager
def jit_scope(compile_ops: bool = True, separate_compiled_gradients: bool = False) -> Iterator[None]:
    """Returns a context without effect: XLA compiles the operations of every `tf.function`."""
    yield
