"""Operations on the shapes of tensors of strings, which are numpy arrays: the forms that NumPy has of them.

`_operations.operation` calls these, by the name of the operation, where an argument is a tensor of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from replicax.tf import _operations
from replicax.tf._core import Strings, as_host, as_strings
from replicax.tf._types import DTypeLike

_Form: TypeAlias = "Callable[..., np.ndarray | list[Strings]]"


def _ints(value: ArrayLike) -> tuple[int, ...]:
    return tuple(np.ravel(np.asarray(value)).tolist())


def expand_dims(input: ArrayLike, axis: ArrayLike, name: str | None = None) -> np.ndarray:
    return np.expand_dims(as_host(input), _ints(axis))


def squeeze(input: ArrayLike, axis: ArrayLike | None = None, name: str | None = None) -> np.ndarray:
    squeezed: np.ndarray = np.squeeze(as_host(input), None if axis is None or not np.size(axis) else _ints(axis))
    return squeezed


def concat(values: Sequence[ArrayLike], axis: ArrayLike, name: str | None = "concat") -> np.ndarray:
    return np.concatenate([as_host(value) for value in values], _ints(axis)[0])


def stack(values: Sequence[ArrayLike], axis: int = 0, name: str | None = "stack") -> np.ndarray:
    return np.stack([as_host(value) for value in values], int(axis))


def unstack(value: ArrayLike, num: int | None = None, axis: int = 0, name: str | None = "unstack") -> list[Strings]:
    return [as_strings(part) for part in np.moveaxis(as_host(value), int(axis), 0)]


def split(
    value: ArrayLike, num_or_size_splits: ArrayLike, axis: int = 0, num: int | None = None, name: str = "split"
) -> list[Strings]:
    sizes = np.asarray(num_or_size_splits)
    parts = int(sizes) if not sizes.ndim else sizes.cumsum()[:-1]
    return [as_strings(part) for part in np.split(as_host(value), parts, int(axis))]


def gather_nd(
    params: ArrayLike, indices: ArrayLike, batch_dims: int = 0, name: str | None = None, **_: object
) -> np.ndarray:
    if batch_dims:
        raise NotImplementedError("gather_nd of strings takes no batch_dims: use tf.gather.")
    rows: np.ndarray = as_host(params)[tuple(np.moveaxis(np.asarray(indices), -1, 0))]
    return rows


def where(
    condition: ArrayLike, x: ArrayLike | None = None, y: ArrayLike | None = None, name: str | None = None
) -> np.ndarray:
    return np.where(np.asarray(condition), *map(np.asarray, (as_host(x), as_host(y))))


def zeros_like(
    input: ArrayLike, dtype: DTypeLike | None = None, name: str | None = None, layout: object = None
) -> np.ndarray:
    if dtype is not None and np.dtype(dtype) != np.dtype(object):
        return np.zeros(np.shape(input), dtype)
    return np.full(np.shape(input), b"", object)


def tile(input: ArrayLike, multiples: ArrayLike, name: str | None = None) -> np.ndarray:
    return np.tile(as_host(input), _ints(multiples))


def transpose(
    a: ArrayLike, perm: ArrayLike | None = None, conjugate: bool = False, name: str = "transpose"
) -> np.ndarray:
    return np.transpose(as_host(a), None if perm is None else _ints(perm))


def slice_(input_: ArrayLike, begin: ArrayLike, size: ArrayLike, name: str | None = None) -> np.ndarray:
    ends = [None if n == -1 else first + n for first, n in zip(_ints(begin), _ints(size))]
    window: np.ndarray = as_host(input_)[tuple(map(slice, _ints(begin), ends))]
    return window


def reverse(tensor: ArrayLike, axis: ArrayLike, name: str | None = None) -> np.ndarray:
    return np.flip(as_host(tensor), _ints(axis))


def pad(
    tensor: ArrayLike,
    paddings: ArrayLike,
    mode: str = "CONSTANT",
    constant_values: ArrayLike = b"",
    name: str | None = None,
) -> np.ndarray:
    array, widths = as_host(tensor), np.asarray(paddings)
    if mode.upper() != "CONSTANT":
        padded: np.ndarray = np.pad(array, widths, mode.lower())  # type: ignore[call-overload]
        return padded
    filler = b"" if constant_values == 0 else as_host(constant_values)[()]
    out = np.full([n + a + b for n, (a, b) in zip(array.shape, widths.tolist())], filler, object)
    out[tuple(slice(a, a + n) for n, (a, _) in zip(array.shape, widths.tolist()))] = array
    return out


def repeat(input: ArrayLike, repeats: ArrayLike, axis: ArrayLike | None = None, name: str | None = None) -> np.ndarray:
    return np.repeat(as_host(input), np.asarray(repeats), None if axis is None else int(np.asarray(axis)))


def broadcast_to(input: ArrayLike, shape: ArrayLike, name: str | None = None) -> np.ndarray:
    return np.broadcast_to(as_host(input), _ints(shape)).copy()


_FORMS = (expand_dims, squeeze, concat, stack, unstack, split, gather_nd, where, zeros_like, tile, transpose, reverse,
          pad, repeat, broadcast_to)  # fmt: skip


def plug_in() -> None:
    """Tells `_operations` of these forms."""

    def shown(form: _Form) -> _Form:
        def call(*args: ArrayLike, **kwargs: ArrayLike) -> np.ndarray | list[Strings]:
            found = form(*args, **kwargs)
            return as_strings(found) if isinstance(found, np.ndarray) and found.dtype == np.dtype(object) else found

        return call

    _operations.of_strings.update({form.__name__: shown(form) for form in _FORMS}, slice=shown(slice_))
    _operations.strings_are(Strings)
