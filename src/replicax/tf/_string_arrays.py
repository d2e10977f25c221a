"""Operations on the shapes of tensors of strings, which are numpy arrays: the forms that NumPy has of them.

`_operations.operation` calls these, by the name of the operation, where an argument is a tensor of strings.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.tf import _operations
from replicax.tf._core import Strings, as_host, as_strings


def _known(value: Any) -> Any:
    return None if value is None else np.asarray(value)


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(np.ravel(np.asarray(value)).tolist())


def _axis(axis: Any) -> Any:
    return None if axis is None else tuple(_ints(axis)) if np.ndim(axis) else int(axis)


def expand_dims(input: Any, axis: Any, name: str | None = None) -> Any:
    return np.expand_dims(as_host(input), _axis(axis))


def squeeze(input: Any, axis: Any = None, name: str | None = None) -> Any:
    return np.squeeze(as_host(input), _axis(axis if axis is None or np.size(axis) else None))


def concat(values: Any, axis: Any, name: str | None = "concat") -> Any:
    return np.concatenate([as_host(value) for value in values], int(axis))


def stack(values: Any, axis: int = 0, name: str | None = "stack") -> Any:
    return np.stack([as_host(value) for value in values], int(axis))


def unstack(value: Any, num: int | None = None, axis: int = 0, name: str | None = "unstack") -> Any:
    return [as_strings(part) for part in np.moveaxis(as_host(value), int(axis), 0)]


def split(value: Any, num_or_size_splits: Any, axis: int = 0, num: int | None = None, name: str = "split") -> Any:
    sizes = np.asarray(num_or_size_splits)
    parts = int(sizes) if not sizes.ndim else sizes.cumsum()[:-1]
    return [as_strings(part) for part in np.split(as_host(value), parts, int(axis))]


def gather_nd(params: Any, indices: Any, batch_dims: int = 0, name: str | None = None, **_: Any) -> Any:
    if batch_dims:
        raise NotImplementedError("gather_nd of strings takes no batch_dims: use tf.gather.")
    return as_host(params)[tuple(np.moveaxis(np.asarray(indices), -1, 0))]


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Any:
    return np.where(np.asarray(condition), as_host(x), as_host(y))


def zeros_like(input: Any, dtype: Any = None, name: str | None = None, layout: Any = None) -> Any:
    if dtype is not None and np.dtype(dtype) != np.dtype(object):
        return np.zeros(np.shape(input), dtype)
    return np.full(np.shape(input), b"", object)


def tile(input: Any, multiples: Any, name: str | None = None) -> Any:
    return np.tile(as_host(input), _ints(multiples))


def transpose(a: Any, perm: Any = None, conjugate: bool = False, name: str = "transpose") -> Any:
    return np.transpose(as_host(a), None if perm is None else _ints(perm))


def slice_(input_: Any, begin: Any, size: Any, name: str | None = None) -> Any:
    ends = [None if n == -1 else first + n for first, n in zip(_ints(begin), _ints(size))]
    return as_host(input_)[tuple(map(slice, _ints(begin), ends))]


def reverse(tensor: Any, axis: Any, name: str | None = None) -> Any:
    return np.flip(as_host(tensor), _axis(axis))


def pad(tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = b"", name: str | None = None) -> Any:
    array, widths = as_host(tensor), np.asarray(paddings)
    if mode.upper() != "CONSTANT":
        return np.pad(array, widths, mode.lower())  # type: ignore[call-overload]
    filler = b"" if constant_values == 0 else as_host(constant_values)[()]
    out = np.full([n + a + b for n, (a, b) in zip(array.shape, widths.tolist())], filler, object)
    out[tuple(slice(a, a + n) for n, (a, _) in zip(array.shape, widths.tolist()))] = array
    return out


def repeat(input: Any, repeats: Any, axis: Any = None, name: str | None = None) -> Any:
    return np.repeat(as_host(input), _known(repeats), _axis(axis))


def broadcast_to(input: Any, shape: Any, name: str | None = None) -> Any:
    return np.broadcast_to(as_host(input), _ints(shape)).copy()


_FORMS = (expand_dims, squeeze, concat, stack, unstack, split, gather_nd, where, zeros_like, tile, transpose, reverse,
          pad, repeat, broadcast_to)  # fmt: skip


def plug_in() -> None:
    """Tells `_operations` of these forms."""

    def shown(form: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = form(*args, **kwargs)
            return as_strings(found) if isinstance(found, np.ndarray) and found.dtype == np.dtype(object) else found

        return call

    _operations.of_strings.update({form.__name__: shown(form) for form in _FORMS}, slice=shown(slice_))
    _operations.strings_are(Strings)
