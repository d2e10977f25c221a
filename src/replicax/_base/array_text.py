"""The text of arrays and variables."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from replicax._base import frontend


def numpy_text(value: ArrayLike) -> str:
    """Returns the `repr` of a NumPy value, begun on a new line if it has several; a scalar without its type."""
    array = np.asarray(value)
    if not array.ndim:
        return str(array[()]) if array.dtype.kind not in "OSU" else repr(array[()])
    text = repr(array)
    return "\n" + text if "\n" in text else text


def variable_text(name: str, shape: Sequence[int | None], dtype: np.dtype, value: ArrayLike) -> str:
    """Returns the text of one array of a variable, with its name."""
    shown = f"<{frontend.current.variable_class} '{name}' shape={tuple(shape)} dtype={dtype}"
    hidden = isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return f"{shown}>" if hidden else f"{shown}, numpy={numpy_text(value)}>"
