"""The text of arrays, variables and dtypes: as JAX prints them or, with `replicax.tf`, as TensorFlow does."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

style = "jax"  # or "tensorflow", set by `replicax.tf`


def numpy_text(value: ArrayLike) -> str:
    """Returns the `repr` of a NumPy value, begun on a new line if it has several; a scalar without its type."""
    array = np.asarray(value)
    if not array.ndim:
        return str(array[()]) if array.dtype.kind not in "OSU" else repr(array[()])
    text = repr(array)
    return "\n" + text if "\n" in text else text


def variable_text(name: str, shape: Sequence[int | None], dtype: np.dtype, value: ArrayLike) -> str:
    """Returns the text of one array of a variable, with its name."""
    kind = "tf.Variable" if style == "tensorflow" else "Variable"
    shown = f"<{kind} '{name}' shape={tuple(shape)} dtype={dtype}"
    hidden = isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return f"{shown}>" if hidden else f"{shown}, numpy={numpy_text(value)}>"


def tensor_str(array: jax.Array) -> str:
    """Returns the text that `str` gives of a TensorFlow tensor."""
    if array.dtype == jax.dtypes.float0 or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return f"tf.Tensor(..., shape={array.shape}, dtype={array.dtype})"
    text = str(np.asarray(array))
    text = "\n" + text if "\n" in text else text
    return f"tf.Tensor({text}, shape={array.shape}, dtype={array.dtype})"


def tensor_repr(array: jax.Array) -> str:
    """Returns the text that `repr` gives of a TensorFlow tensor."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return f"<tf.Tensor: shape={array.shape}, dtype={array.dtype}>"
    return f"<tf.Tensor: shape={array.shape}, dtype={array.dtype}, numpy={numpy_text(array)}>"
