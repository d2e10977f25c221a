"""Operations that change a tensor's dtype."""

from __future__ import annotations

import builtins
import functools
from typing import Any

import jax
import numpy as np

from replicax.tf import _operations
from replicax.tf._core import IndexedSlices, as_dtype
from replicax.tf._host import jnp
from replicax.tf._op_tables import of_dtype
from replicax.tf._ops import convert_to_tensor
from replicax.tf._static import static
from replicax.tf._types import DTypeLike, TensorLike


@static
@_operations.on_values(1)
def cast(x: TensorLike | IndexedSlices, dtype: DTypeLike, name: str | None = None) -> jax.Array:
    """Casts the tensor to another dtype: floats are truncated to integers, complex numbers to their real part."""
    if isinstance(x, IndexedSlices):
        return IndexedSlices(cast(x.values, dtype), x.indices, x.dense_shape)  # type: ignore[return-value]
    tensor, dtype = convert_to_tensor(x), as_dtype(dtype)
    if jnp.iscomplexobj(tensor) and not jnp.issubdtype(dtype, jnp.complexfloating) and dtype != np.bool_:
        tensor = jnp.real(tensor)
    return tensor.astype(dtype)


@_operations.on_values(1)
def saturate_cast(value: TensorLike, dtype: DTypeLike, name: str | None = None) -> jax.Array:
    """Casts like `cast`, but clips values to the range of the dtype."""
    tensor, dtype = convert_to_tensor(value), as_dtype(dtype)
    low, high = _range_of_both(np.dtype(tensor.dtype), np.dtype(dtype))
    return jnp.clip(tensor, of_dtype(low, tensor.dtype), of_dtype(high, tensor.dtype)).astype(dtype)


@functools.cache
def _range_of_both(own: np.dtype, dtype: np.dtype) -> tuple[Any, Any]:
    """Returns the smallest and the largest number of dtype `own` that `dtype` has too."""
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    limits = jnp.iinfo(own) if jnp.issubdtype(own, jnp.integer) else jnp.finfo(own)
    low, high = builtins.max(info.min, limits.min), builtins.min(info.max, limits.max)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(own, jnp.floating):
        while float(np.asarray(high, own)) > info.max:  # the largest float that the integer dtype can represent
            high = np.nextafter(np.asarray(high, own), np.asarray(0, own))
    return low, high


def bitcast(input: TensorLike, type: DTypeLike, name: str | None = None) -> jax.Array:
    """Returns the tensor's bytes as another dtype; if the item sizes differ, the last dimension changes."""
    return jax.lax.bitcast_convert_type(convert_to_tensor(input), as_dtype(type))


@_operations.on_values(2)
def complex(real: TensorLike, imag: TensorLike, name: str | None = None) -> jax.Array:
    """Returns complex numbers with these real and imaginary parts."""
    return jax.lax.complex(convert_to_tensor(real), convert_to_tensor(imag))


_operations.operations(globals())
