"""What fills the tables of `tf.lookup`: keys and values, or a text file."""

from __future__ import annotations

import os
from typing import Protocol, TypeAlias

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, NotFoundError, as_dtype, as_host, dtype_name
from replicax.tf._operations import value_of
from replicax.tf._ops import known
from replicax.tf._types import DTypeLike, TensorLike

_STRING, _INT64 = np.dtype(object), np.dtype(np.int64)


class TextFileIndex:
    """What of a line of a text file is a key or a value, where it is not the number of a column."""

    WHOLE_LINE = -2
    LINE_NUMBER = -1


def as_rows(value: TensorLike, dtype: np.dtype | None = None) -> np.ndarray:
    """Returns keys or values as an array of the table's dtype; raises TypeError where they would lose a part."""
    value = value_of(value)
    if isinstance(value, jax.core.Tracer):
        value = known(value, "What a table has", "Fill tables outside of compiled code.")
    array: np.ndarray = as_host(value)
    if dtype is None or array.dtype == dtype:
        return array
    if not array.size:
        return array.astype(dtype)
    kinds = ("iub", "iufb") if dtype.kind != "O" else ("", "")
    if array.dtype.kind not in kinds[dtype.kind == "f"]:
        raise TypeError(f"Cannot convert {array.dtype} to the table's dtype {dtype_name(dtype)}: {value!r:.80}")
    return array.astype(dtype)


Key: TypeAlias = "int | float | bytes"  # or a value


class Fillable(Protocol):
    """A table that an initializer fills."""

    def _fill(self, keys: list[Key], values: list[Key]) -> None: ...


class TableInitializerBase:
    """The base of what fills a table."""

    def __init__(self, key_dtype: DTypeLike, value_dtype: DTypeLike):
        self._key_dtype, self._value_dtype = as_dtype(key_dtype), as_dtype(value_dtype)

    @property
    def key_dtype(self) -> np.dtype:
        """The dtype of the keys."""
        return as_dtype(self._key_dtype)

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the values."""
        return as_dtype(self._value_dtype)

    def initialize(self, table: Fillable) -> None:
        """Fills a table."""
        raise NotImplementedError


class KeyValueTensorInitializer(TableInitializerBase):
    """Fills a table with keys and their values, two vectors; dtypes are those of the vectors by default."""

    def __init__(
        self,
        keys: TensorLike,
        values: TensorLike,
        key_dtype: DTypeLike | None = None,
        value_dtype: DTypeLike | None = None,
        name: str | None = None,
    ):
        self._keys = as_rows(keys, None if key_dtype is None else as_dtype(key_dtype))
        self._values = as_rows(values, None if value_dtype is None else as_dtype(value_dtype))
        if self._keys.shape != self._values.shape:
            raise InvalidArgumentError(
                f"Expected shape {list(self._keys.shape)} for value, got {list(self._values.shape)}"
            )
        super().__init__(self._keys.dtype, self._values.dtype)

    def initialize(self, table: Fillable) -> None:
        """Fills a table."""
        table._fill(self._keys.ravel().tolist(), self._values.ravel().tolist())


class TextFileInitializer(TableInitializerBase):
    """Fills a table from a text file, in which each line has a key and a value.

    Args:
        filename: the file.
        key_dtype: the dtype of the keys.
        key_index: the number of the keys' column, or `TextFileIndex.WHOLE_LINE`, or `LINE_NUMBER`.
        value_dtype: the dtype of the values.
        value_index: the same for the values.
        vocab_size: how many lines are read; all by default.
        delimiter: what separates columns.
        value_index_offset: what is added to numbers of lines that are values.

    Raises:
        ValueError: whole lines that are no strings, or numbers of lines that are no int64.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        key_dtype: DTypeLike,
        key_index: int,
        value_dtype: DTypeLike,
        value_index: int,
        vocab_size: int | None = None,
        delimiter: str = "\t",
        name: str | None = None,
        value_index_offset: int = 0,
    ):
        super().__init__(key_dtype, value_dtype)
        for what, index, dtype in (("key", key_index, self.key_dtype), ("value", value_index, self.value_dtype)):
            needed = {TextFileIndex.LINE_NUMBER: _INT64, TextFileIndex.WHOLE_LINE: _STRING}.get(index, dtype)
            if dtype != needed and not (index == TextFileIndex.WHOLE_LINE and dtype == _INT64):
                raise ValueError(
                    f"`{what}_dtype` must be {dtype_name(needed)} if `{what}_index` is {index}, received: "
                    f"{dtype_name(dtype)}"
                )
        name_of_file = as_host(filename)[()]
        self._filename: str = name_of_file.decode() if isinstance(name_of_file, bytes) else str(name_of_file)
        self._indices, self._size, self._offset = (key_index, value_index), vocab_size, value_index_offset
        self._delimiter = delimiter.encode()

    def initialize(self, table: Fillable) -> None:
        """Fills a table.

        Raises:
            NotFoundError: there is no such file.
            InvalidArgumentError: a line lacks a column, or has something else there than a number.
        """
        try:
            with open(self._filename, "rb") as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError as error:
            raise NotFoundError(f"{self._filename}; No such file or directory") from error
        lines = [line.removesuffix(b"\r") for line in (lines if lines[-1] else lines[:-1])][: self._size]
        if self._size is not None and len(lines) < self._size:
            raise InvalidArgumentError(
                f"Invalid vocab_size in {self._filename}: expected {self._size} but got {len(lines)}"
            )
        keys = [self._part(n, line, self._indices[0], self.key_dtype, 0) for n, line in enumerate(lines)]
        values = [self._part(n, line, self._indices[1], self.value_dtype, self._offset) for n, line in enumerate(lines)]
        table._fill(keys, values)

    def _part(self, number: int, line: bytes, index: int, dtype: np.dtype, offset: int) -> Key:
        if index == TextFileIndex.LINE_NUMBER:
            return number + offset
        part = line
        if index >= 0:
            columns = line.split(self._delimiter)
            if len(columns) <= index:
                raise InvalidArgumentError(
                    f"Invalid number of columns in {self._filename} line {number} ({line.decode(errors='replace')}) : "
                    f"expected at least {index + 1} got {len(columns)}"
                )
            part = columns[index]
        try:
            return part if dtype == _STRING else float(part) if dtype.kind == "f" else int(part)
        except ValueError as error:
            raise InvalidArgumentError(
                f"Field {part!r} in {self._filename} line {number} is not a valid {dtype_name(dtype)}."
            ) from error
