"""The texts of tensors, as TensorFlow prints them."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf._core import array_text


def tensor_str(array: jax.Array | np.ndarray) -> str:
    """Return the text that `str` gives of a TensorFlow tensor."""
    if array.dtype == jax.dtypes.float0 or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return f"tf.Tensor(..., shape={array.shape}, dtype={array.dtype})"
    text = str(np.asarray(array))
    text = "\n" + text if "\n" in text else text
    return f"tf.Tensor({text}, shape={array.shape}, dtype={_name(array.dtype)})"


def tensor_repr(array: jax.Array | np.ndarray) -> str:
    """Return the text that `repr` gives of a TensorFlow tensor."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return f"<tf.Tensor: shape={array.shape}, dtype={array.dtype}>"
    numpy = array_text.numpy_text(array)
    return f"<tf.Tensor: shape={array.shape}, dtype={_name(array.dtype)}, numpy={numpy}>"


def _name(dtype: np.dtype) -> str:
    return "string" if dtype == np.dtype(object) else str(dtype)
