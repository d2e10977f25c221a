"""How arrays, variables and dtypes print: as JAX's own, or (with `replicax.tf`) as TensorFlow's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

style = "jax"  # or "tensorflow"; set by `use_tensorflow`


def numpy_text(value: Any) -> str:
    """The `repr` of a numpy value, on a line of its own where it has several."""
    text = repr(np.asarray(value)) if np.ndim(value) else repr(np.asarray(value).item())
    return "\n" + text if "\n" in text else text


def dtype_text(dtype: Any) -> str:
    """A dtype's name, `tf.`-style inside of specs."""
    name = "string" if np.dtype(dtype).kind in "OSU" else np.dtype(dtype).name
    return f"tf.{name}" if style == "tensorflow" else name


def variable_text(name: str, shape: Any, dtype: Any, value: Any) -> str:
    """One array of a variable, with its name."""
    kind = "tf.Variable" if style == "tensorflow" else "Variable"
    if isinstance(value, jax.core.Tracer):
        return f"<{kind} '{name}' shape={tuple(shape)} dtype={np.dtype(dtype).name}>"
    return f"<{kind} '{name}' shape={tuple(shape)} dtype={np.dtype(dtype).name}, numpy={numpy_text(value)}>"
