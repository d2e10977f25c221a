"""`tf.strings`: the common operations, and `tf.print`.

Tensors of strings are numpy arrays of bytes, and never part of compiled code.
"""

from __future__ import annotations

import builtins
import contextlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO, TypeGuard

import jax
import numpy as np

from replicax.tf import _host
from replicax.tf._core import (
    InvalidArgumentError,
    Leaf,
    Mirrored,
    PerReplica,
    Probe,
    RaggedTensor,
    Strings,
    Tree,
    Variable,
    as_dtype,
    as_strings,
    frames,
    nest,
    step_failures,
)
from replicax.tf._host import jnp
from replicax.tf._operations import on_values, operation
from replicax.tf._ops import as_array, as_axis, convert_to_tensor, known, string_tensor
from replicax.tf._types import DTypeLike, Rows, TensorLike


def _strings(value: TensorLike) -> np.ndarray:
    array = np.asarray(known(value, "A tensor of strings", "Use it outside of compiled code."), object)
    if all(type(x) is bytes for x in array.flat):
        return array
    return _filled([x if isinstance(x, bytes) else str(x).encode() for x in array.flat], array.shape, object)


def _filled(values: list[Any], shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns an array of these values; to let NumPy look for nested lists in them would take longer."""
    array = np.empty(len(values), dtype)
    array[:] = values
    return array.reshape(shape)


def _each(compute: Callable[..., object], *arrays: np.ndarray, dtype: DTypeLike = object) -> jax.Array:
    shape = arrays[0].shape
    if len(arrays) > 1:
        arrays = tuple(np.broadcast_arrays(*arrays))
        shape = arrays[0].shape
    result = _filled([compute(*values) for values in zip(*(a.flat for a in arrays))], shape, dtype)
    return string_tensor(result) if dtype is object else as_array(result)


def lower(input: TensorLike, encoding: str = "", name: str | None = None) -> jax.Array:
    """Converts to lower case; with the encoding "utf-8" for all letters, else for ASCII."""
    return _each(lambda x: x.decode().lower().encode() if encoding else x.lower(), _strings(input))


def upper(input: TensorLike, encoding: str = "", name: str | None = None) -> jax.Array:
    """Converts to upper case; with the encoding "utf-8" for all letters, else for ASCII."""
    return _each(lambda x: x.decode().upper().encode() if encoding else x.upper(), _strings(input))


def strip(input: TensorLike, name: str | None = None) -> jax.Array:
    """Removes white space at both ends."""
    return _each(bytes.strip, _strings(input))


def length(input: TensorLike, unit: str = "BYTE", name: str | None = None) -> jax.Array:
    """Counts bytes or, with the unit "UTF8_CHAR", characters; int32."""
    return _each(lambda x: len(x if unit == "BYTE" else x.decode()), _strings(input), dtype=np.int32)


def join(inputs: Iterable[TensorLike], separator: str = "", name: str | None = None) -> jax.Array:
    """Joins the strings at the same index of several tensors."""
    arrays = np.broadcast_arrays(*(_strings(x) for x in inputs))
    return _each(lambda *parts: separator.encode().join(parts), *arrays)


def reduce_join(
    inputs: TensorLike, axis: TensorLike = None, keepdims: bool = False, separator: str = "", name: str | None = None
) -> jax.Array:
    """Joins the strings along an axis, by default of the whole tensor."""
    array, along = _strings(inputs), as_axis(axis)
    if along is None:
        whole = np.array(separator.encode().join(array.reshape(-1)), object)
        return string_tensor(whole.reshape((1,) * array.ndim) if keepdims else whole)
    rows = np.moveaxis(array, along, -1)
    joined = np.empty(rows.shape[:-1], object)
    for place in np.ndindex(joined.shape):
        joined[place] = separator.encode().join(rows[place])
    return string_tensor(np.expand_dims(joined, along) if keepdims else joined)


def substr(
    input: TensorLike, pos: TensorLike, len: TensorLike, unit: str = "BYTE", name: str | None = None
) -> jax.Array:
    """Returns `len` bytes or, with the unit "UTF8_CHAR", characters, starting at `pos`."""

    def cut(x: bytes, start: int, count: int) -> bytes:
        whole = x if unit == "BYTE" else x.decode()
        if not -builtins.len(whole) <= start <= builtins.len(whole):
            raise InvalidArgumentError(f"pos {start} is out of range for string {x!r}.")
        first = start % builtins.len(whole) if start < 0 else start
        part = whole[first : first + count if count >= 0 else None]
        return part if isinstance(part, bytes) else part.encode()

    return _each(cut, _strings(input), np.asarray(pos), np.asarray(len))


def _parts(strings: np.ndarray, cut: Callable[[bytes], list[bytes]]) -> Rows:
    """Splits strings with `cut`: one string to a vector, several strings to a RaggedTensor."""
    if not strings.ndim:
        string = strings.item()
        found = [b""] * string.size if isinstance(string, Probe) else cut(string)
        out = np.empty(len(found), object)
        out[:] = found
        return string_tensor(out)
    rows = [_parts(np.array(string, object), cut) for string in strings.ravel()]
    splits = np.cumsum([0, *map(builtins.len, rows)])
    whole = RaggedTensor(np.concatenate([np.empty(0, object), *rows]), splits)
    for size in strings.shape[:0:-1]:  # the inner dimensions, each of one length
        whole = RaggedTensor(whole, np.arange(0, whole.nrows() + 1, size))
    tensors: RaggedTensor = jax.tree.map(lambda x: as_strings(x) if x.dtype == object else as_array(x), whole)
    return tensors


def split(input: TensorLike, sep: TensorLike = None, maxsplit: int = -1, name: str | None = None) -> Rows:
    """Splits at white space, or at `sep`: one string to a vector, several strings to a RaggedTensor."""
    separator = None if sep is None else _strings(sep).item() or None
    return _parts(_strings(input), lambda x: x.split(separator, maxsplit))


def bytes_split(input: TensorLike, name: str | None = None) -> Rows:
    """Splits into single bytes: one string to a vector, several strings to a RaggedTensor."""
    return _parts(_strings(input), lambda x: [x[i : i + 1] for i in builtins.range(builtins.len(x))])


def regex_replace(
    input: TensorLike, pattern: str, rewrite: str, replace_global: bool = True, name: str | None = None
) -> jax.Array:
    """Replaces all matches of a pattern, or the first one."""
    found = re.compile(pattern.encode())
    pieces = re.split(rb"\\([0-9\\])", rewrite.encode())  # every second part is a group's number or a backslash

    def rewritten(match: re.Match[bytes]) -> bytes:
        special = (b"\\" if piece == b"\\" else match[int(piece)] or b"" for piece in pieces[1::2])
        return b"".join(part for pair in zip(pieces[::2], [*special, b""]) for part in pair)

    return _each(lambda x: found.sub(rewritten, x, count=0 if replace_global else 1), _strings(input))


def regex_full_match(input: TensorLike, pattern: str, name: str | None = None) -> jax.Array:
    """Returns whether the whole string matches a pattern."""
    found = re.compile(pattern.encode())
    return _each(lambda x: found.fullmatch(x) is not None, _strings(input), dtype=np.bool_)


def to_number(input: TensorLike, out_type: DTypeLike = np.float32, name: str | None = None) -> jax.Array:
    """Converts strings to numbers; raises `InvalidArgumentError` for a string that is not a number."""
    dtype = np.dtype(as_dtype(out_type))

    def number(x: bytes) -> int | float:
        try:
            if b"_" in x:  # Python accepts these
                raise ValueError
            return dtype.type(int(x)) if dtype.kind == "i" else float(x)
        except (ValueError, OverflowError):
            text = x.decode(errors="replace")
            raise InvalidArgumentError(f"StringToNumberOp could not correctly convert string: {text}") from None

    return _each(number, _strings(input), dtype=dtype)


def as_string(
    input: TensorLike,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> jax.Array:
    """Converts numbers to strings: floats with six digits after the point unless `precision` is given."""
    array = known(convert_to_tensor(input), "A number that becomes text", "Use tf.print in compiled code.")

    def shown(x: Any) -> bytes:
        if array.dtype == np.bool_:
            text = "true" if x else "false"
        elif array.dtype.kind in "iu":
            text = str(int(x))
        elif isinstance(x, bytes):
            return x
        else:
            kind = "g" if shortest else "e" if scientific else "f"
            text = f"{float(x):{f'.{precision}' if precision >= 0 else ''}{kind}}"
        if width < 0:
            return text.encode()
        return (text.ljust(width) if fill == "-" else text.rjust(width, fill or " ")).encode()

    return _each(shown, array)


class _Text(str):
    """Text whose `repr` has no quotes."""

    __repr__ = str.__str__


def _element(x: Any) -> str:
    """Returns the text of an element: a float in the fewest digits that identify it, in the format of C's `%g`."""
    if isinstance(x, bytes):
        return f'"{x.decode(errors="replace")}"'
    if isinstance(x, np.bool_):
        return str(int(x))
    if not jnp.issubdtype(x.dtype, np.floating):
        return str(x)
    few, all_of_them = (15, 17) if x.dtype == np.float64 else (6, 9)
    text = f"{float(x):.{few}g}"
    return text if x.dtype.type(float(text)) == x else f"{float(x):.{all_of_them}g}"


def _shown(tensor: TensorLike, summarize: int) -> _Text:
    array = np.asarray(tensor)
    if not array.ndim:
        return _Text(_element(array[()]))
    threshold = sys.maxsize if summarize < 0 else 0
    shown = np.array2string(
        array, sys.maxsize, threshold=threshold, edgeitems=max(summarize, 0), formatter={"all": _element}
    )
    return _Text(shown)


def _is_distributed(x: object) -> TypeGuard[PerReplica | Mirrored]:
    """Returns whether a value has a component for each replica and is no variable."""
    return isinstance(x, (PerReplica, Mirrored))


def _in_order(value: Tree) -> Tree:
    """Returns the structure with dicts sorted by key."""
    if type(value) is dict:
        with contextlib.suppress(TypeError):
            value = dict(sorted(value.items()))
        return {key: _in_order(item) for key, item in value.items()}
    return type(value)(map(_in_order, value)) if type(value) in (list, tuple) else value


def print(
    *inputs: Tree,
    output_stream: TextIO | None = None,
    summarize: int = 3,
    sep: str = " ",
    end: str = "\n",
    name: str | None = None,
) -> None:
    """Prints when the program runs, in compiled code too; by default to the standard error stream.

    Args:
        inputs: tensors, structures of them, and other objects, which are printed as Python prints them. Strings have
            quotes, but for a tensor of one string that is the only input.
        output_stream: a file to write to.
        summarize: the number of elements that are shown at both ends of a long axis; a negative number shows all.
        sep: the text between the inputs.
        end: the text after them.
        name: accepted for compatibility.
    """

    def is_tensor(x: object) -> bool:
        return isinstance(x, (jax.Array, np.ndarray, bytes))

    def value(x: Leaf) -> Leaf:  # of a variable, Keras's included
        if _is_distributed(x):
            return x
        return convert_to_tensor(x) if isinstance(x, Variable) or hasattr(type(x), "__jax_array__") else x

    values = [nest.map_structure(value, x) for x in inputs]
    values = [_in_order(value) for value in values]
    components = {id(x): x.values for x in nest.leaves(values) if _is_distributed(x)}
    parts = [part for x in nest.leaves(values) for part in components.get(id(x), (x,))]
    arrays = [part for part in parts if isinstance(part, jax.Array)]
    only = values[0] if len(values) == 1 else None

    def show(*concrete: jax.Array) -> None:
        rest = iter(concrete)

        def text(x: Leaf) -> Leaf:
            if isinstance(only, Strings) and not only.ndim:
                return _Text(np.asarray(only).item().decode(errors="replace"))
            if _is_distributed(x):
                shown = [
                    _host.hosted(np.asarray(next(rest))) if isinstance(part, jax.Array) else part
                    for part in components[id(x)]
                ]
                return _Text(repr(type(x)(shown)))
            return _shown(next(rest) if isinstance(x, jax.Array) else x, summarize) if is_tensor(x) else x

        texts = [str(nest.map_structure(text, value)) for value in values]
        (output_stream or sys.stderr).write(sep.join(texts) + end)

    if frames.is_tracing():
        jax.debug.callback(step_failures.only_shows(show), *arrays)
    else:
        show(*arrays)


# Operations that compute each string by itself take ragged tensors too.
for _op in (as_string, length, lower, regex_full_match, regex_replace, strip, substr, to_number, upper):
    globals()[_op.__name__] = operation(on_values(1)(_op), _op.__name__)

STRINGS = """as_string bytes_split join length lower reduce_join regex_full_match regex_replace split strip substr
to_number upper"""
