"""Comma-separated values: `tf.io.decode_csv`, `tf.data.experimental.CsvDataset` and `make_csv_dataset`."""

from __future__ import annotations

import collections
import csv
import functools
import glob
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax.tf._core import (
    Files,
    InvalidArgumentError,
    TensorSpec,
    Tree,
    as_dtype,
    as_host,
    as_tensor,
    data,
    names_of,
    opened,
    record_compression,
)
from replicax.tf._datasets import Dataset
from replicax.tf._features import Feature, default_of
from replicax.tf._parse import strings_of
from replicax.tf._types import DTypeLike, TensorLike
from replicax.tf._wire import BYTES

_Value: TypeAlias = "int | float | bytes | None"
_Default: TypeAlias = "TensorLike | DTypeLike"  # a dtype for a column that must have a value
_Pattern: TypeAlias = "str | bytes | os.PathLike[str] | Iterable[str | bytes | os.PathLike[str]]"
_STRING = np.dtype(object)
_CODE = ("utf-8", "surrogateescape")  # any bytes become text, and the same bytes again


class _Column:
    """What is known of a column: its dtype, and its default; `needed` where there is none."""

    def __init__(self, default: _Default):
        if isinstance(default, (type, np.dtype)):
            self.dtype, self.needed, self.default = as_dtype(default), True, None
        else:
            array = as_host(default)
            self.dtype, self.needed = array.dtype, not array.size
            self.default = array.ravel()[0] if array.size else None
        if self.dtype not in [np.dtype(x) for x in (np.float32, np.float64, np.int32, np.int64, object)]:
            raise TypeError(f"A column is of int32, int64, float32, float64 or string, got {self.dtype}.")
        parsers: dict[str, Callable[[str], _Value]] = {"i": self._integer, "f": float, "O": self._text}
        self.parse = parsers[self.dtype.kind]

    def _integer(self, text: str) -> int:
        number = int(text)
        if not np.iinfo(self.dtype).min <= number <= np.iinfo(self.dtype).max:
            raise ValueError
        return number

    @staticmethod
    def _text(text: str) -> bytes:
        return text.encode(*_CODE)

    def array(self, values: Sequence[_Value]) -> np.ndarray:
        """Returns values of the column as an array."""
        return default_of(values, BYTES) if self.dtype == _STRING else np.array(values, self.dtype)


class _Format:
    """How lines are divided into fields, and what the fields are."""

    def __init__(
        self, defaults: Iterable[_Default], delimiter: str, quotes: bool, na: str, chosen: Sequence[int] | None
    ):
        self.columns = [_Column(default) for default in defaults]
        self.na, self.chosen = na, None if chosen is None else list(chosen)
        if self.chosen is not None:
            if len(self.chosen) != len(self.columns):
                raise InvalidArgumentError(
                    f"record_defaults and select_cols differ in length: {len(self.columns)}, {len(self.chosen)}."
                )
            if any(b <= a for a, b in itertools.pairwise(self.chosen)):
                raise InvalidArgumentError("select_cols should be strictly increasing indices")
        self.reader = functools.partial(
            csv.reader, delimiter=delimiter, strict=True, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
        )
        field = rf'(?:"(?:[^"]|"")*"|[^"{re.escape(delimiter)}\r\n]*)'
        self._sound = re.compile(rf"{field}(?:{re.escape(delimiter)}{field})*\r?\n?") if quotes else None

    def fields(self, line: str) -> list[str]:
        """Returns the fields of one record."""
        if self._sound is not None and '"' in line and not self._sound.fullmatch(line):
            inside = re.search(r'"[^",]', line) and line.lstrip().startswith('"')
            what = "Quote inside a string has to be escaped by another quote"
            raise InvalidArgumentError(
                f"{what if inside else 'Unquoted fields cannot have quotes/CRLFs inside'}: {line[:80]!r}"
            )
        return next(_read(self.reader(io.StringIO(line, newline="")), "A record"), [])

    def values(self, fields: list[str], where: str) -> list[_Value]:
        """Returns the values of one record."""
        if self.chosen is None:
            if len(fields) != len(self.columns):
                raise InvalidArgumentError(f"Expect {len(self.columns)} fields but have {len(fields)} in {where}")
        else:
            if self.chosen and len(fields) <= self.chosen[-1]:
                raise InvalidArgumentError(f"Expect at least {self.chosen[-1] + 1} fields but have {len(fields)}")
            fields = [fields[i] for i in self.chosen]
        found = []
        for number, (text, column) in enumerate(zip(fields, self.columns)):
            if not text or text == self.na:
                if column.needed:
                    raise InvalidArgumentError(f"Field {number} is required but missing in {where}!")
                found.append(column.default)
                continue
            try:
                if "_" in text and column.dtype != _STRING:  # Python takes these for numbers
                    raise ValueError
                found.append(column.parse(text))
            except ValueError:
                raise InvalidArgumentError(f"Field {number} in {where} is not a valid {column.dtype}: {text}") from None
        return found


def decode_csv(
    records: TensorLike,
    record_defaults: Sequence[_Default],
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    name: str | None = None,
) -> list[jax.Array]:
    """Parses lines of comma-separated values.

    Args:
        records: strings, of any shape.
        record_defaults: for each column a default; one without elements for a column that must have a value.
        field_delim: what separates fields.
        use_quote_delim: whether double quotes enclose fields.
        na_value: what else stands for a missing value.
        select_cols: the numbers of the columns to parse; all by default.

    Returns:
        a tensor for each column, in the shape of `records`.

    Raises:
        InvalidArgumentError: a line has another number of fields, or a field is missing or no number.
    """
    lines = strings_of(records)
    form = _Format(record_defaults, field_delim, use_quote_delim, na_value, select_cols)
    rows = [
        form.values(form.fields(line.decode(*_CODE)), f"record {i}") for i, line in enumerate(lines.ravel().tolist())
    ]
    values = zip(*rows) if rows else [()] * len(form.columns)
    return [as_tensor(c.array(list(found)).reshape(lines.shape)) for c, found in zip(form.columns, values)]


class CsvDataset(Dataset):
    """The lines of CSV files, as tuples of their fields.

    Args:
        filenames: a name, or several in a list or array or `Dataset`.
        record_defaults: for each column a default, or a dtype for one that must have a value.
        compression_type: `"GZIP"`, `"ZLIB"`, or None.
        buffer_size: accepted for compatibility.
        header: whether the first line of each file is passed over.
        field_delim, use_quote_delim, na_value, select_cols: as in `decode_csv`.
        exclude_cols: the numbers of the columns to leave out; not together with `select_cols`.

    Raises:
        InvalidArgumentError: at iteration, as `decode_csv`.
    """

    def __init__(
        self,
        filenames: object,
        record_defaults: Iterable[_Default],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,
        field_delim: str = ",",
        use_quote_delim: bool = True,
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
        exclude_cols: Sequence[int] | None = None,
    ):
        if select_cols is not None and exclude_cols is not None:
            raise InvalidArgumentError("Either select_cols or exclude_cols should be empty")
        form = _Format(record_defaults, field_delim, use_quote_delim, na_value, select_cols)
        kind, names = record_compression(compression_type), names_of(filenames)
        left_out = set(exclude_cols or ())

        def rows(name: bytes) -> Iterator[Tree]:
            with io.TextIOWrapper(opened(name, kind), *_CODE, newline="") as file:
                lines = form.reader(file)
                for number, fields in enumerate(_read(lines, repr(os.fsdecode(name)))):
                    if header and not number or not fields:
                        continue
                    if left_out:
                        fields = [field for i, field in enumerate(fields) if i not in left_out]
                    values = form.values(fields, f"record {number} of {os.fsdecode(name)!r}")
                    yield tuple(c.array([value]).reshape(()) for c, value in zip(form.columns, values))

        spec = tuple(TensorSpec((), column.dtype) for column in form.columns)
        self._begin(Files("CsvDataset", names, rows, spec))


def _read(lines: Iterator[list[str]], source: str) -> Iterator[list[str]]:
    try:
        yield from lines
    except csv.Error as error:
        raise InvalidArgumentError(f"{source} is no CSV: {error}") from error


_KINDS = tuple(np.dtype(x) for x in (np.int32, np.int64, np.float32, np.float64, object))


def _kind_of(text: str) -> int:
    """Returns the number of the first dtype that a field may have."""
    for number, dtype in enumerate(_KINDS[:4]):
        try:
            value = (int if dtype.kind == "i" else float)(text)
        except ValueError:
            continue
        limits: Any = np.iinfo(dtype) if dtype.kind == "i" else np.finfo(dtype)
        if "_" not in text and limits.min <= value <= limits.max:
            return number
    return 4


def make_csv_dataset(
    file_pattern: _Pattern,
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[_Default] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[str | int] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
    encoding: str = "utf-8",
) -> data.Dataset:
    """Returns a dataset of batches of the lines of CSV files: dicts from the names of columns to vectors.

    Args:
        file_pattern: names of files, which may have wildcards.
        batch_size: how many lines a batch has.
        column_names: the columns' names; by default those in the first line.
        column_defaults: as `record_defaults` of `decode_csv`; by default dtypes are inferred from the first lines.
        label_name: the column that becomes the second element of a pair.
        select_columns: names or numbers of the columns to read.
        header: whether the files have a first line with names.
        num_epochs: how often the lines are repeated; without end by default, in full batches.
        shuffle, shuffle_buffer_size, shuffle_seed: whether and how the lines are shuffled.
        ignore_errors: whether lines with errors are left out.
        field_delim, use_quote_delim, na_value, compression_type: as in `CsvDataset`.
        num_rows_for_inference: how many lines of each file dtypes are inferred from; all for None.
        prefetch_buffer_size, num_parallel_reads, sloppy, encoding: accepted for compatibility.

    Raises:
        ValueError: no file, or no such column.
    """
    files, kind = _matching(file_pattern), record_compression(compression_type)
    form = _Format([], field_delim, use_quote_delim, na_value, None)

    def head(name: str, count: int | None) -> list[list[str]]:
        with io.TextIOWrapper(opened(name, kind), *_CODE, newline="") as file:
            return list(itertools.islice(_read(form.reader(file), repr(name)), count))

    if column_names is None:
        if not header:
            raise ValueError("`column_names` must be given where the files have no header.")
        if (column_names := next(iter(head(files[0], 1)), None)) is None:
            raise InvalidArgumentError(f"Failed when reading the header line of {files[0]}. Is it an empty file?")
    names = list(column_names)
    chosen = range(len(names)) if select_columns is None else _select_columns(select_columns, names)
    if column_defaults is None:
        count = None if num_rows_for_inference is None else num_rows_for_inference + header
        rows = (row for name in files for row in head(name, count)[int(header) :])
        sample = _check_lengths(list(filter(None, rows)), len(names))
        kinds = [max((_kind_of(row[i]) for row in sample if row[i] not in ("", na_value)), default=0) for i in chosen]
        column_defaults = [[b""] if k == 4 else np.zeros(1, _KINDS[k]) for k in kinds]
    elif select_columns is not None and len(column_defaults) == len(names) != len(chosen):
        column_defaults = [column_defaults[i] for i in chosen]
    own = [names[i] for i in chosen]
    if label_name not in (None, *own):
        raise ValueError(f"`label_name` provided must be one of the columns: {own}. Received: {label_name}.")
    lines: Dataset = CsvDataset(
        files, column_defaults, compression_type, header=header, field_delim=field_delim,
        use_quote_delim=use_quote_delim, na_value=na_value, select_cols=None if len(own) == len(names) else chosen,
    )  # fmt: skip
    lines = lines.ignore_errors() if ignore_errors else lines
    batches = _batches(lines, batch_size, num_epochs, shuffle_buffer_size if shuffle else None, shuffle_seed)

    def named(*columns: Tree) -> Tree:
        features = collections.OrderedDict(zip(own, columns))
        return features if label_name is None else (features, features.pop(label_name))

    return batches.map(named).prefetch(1)


def _select_columns(columns: Sequence[str | int], names: Sequence[str]) -> Sequence[int]:
    """Return the sorted numbers of columns that are given by name or number."""
    for column in columns:
        if column not in names and not isinstance(column, int):
            raise ValueError(f"`select_columns` has {column!r}, which is none of the columns: {names}.")
    return sorted(names.index(column) if isinstance(column, str) else int(column) for column in columns)


def _check_lengths(rows: list[list[str]], expected: int) -> list[list[str]]:
    """Return rows of the expected number of fields; raise InvalidArgumentError for another number."""
    for number, row in enumerate(rows):
        if len(row) != expected:
            raise InvalidArgumentError(
                f"Problem inferring types: CSV row {number} has {len(row)} number of fields. Expected: {expected}."
            )
    return rows


def _matching(file_pattern: _Pattern) -> list[str]:
    """Returns the names of the files that match a pattern, or one of several."""
    patterns = [file_pattern] if isinstance(file_pattern, (str, bytes, os.PathLike)) else list(file_pattern)
    files = sorted({name for pattern in patterns for name in glob.glob(os.fsdecode(pattern))})
    if not files:
        raise ValueError(f"No files match `file_pattern` {file_pattern!r}.")
    return files


def _batches(
    rows: data.Dataset, size: int, epochs: int | None, buffer: int | None, seed: int | None, full: bool = False
) -> data.Dataset:
    """Return batches of rows, shuffled in a buffer unless it is None; only full batches of rows without an end."""
    rows = rows if buffer is None else rows.shuffle(buffer, seed)
    rows = rows.repeat(epochs) if epochs != 1 else rows
    return rows.batch(size, drop_remainder=full or epochs is None)


def make_batched_features_dataset(
    file_pattern: _Pattern,
    batch_size: int,
    features: Mapping[str, Feature],
    reader: Callable[..., data.Dataset] | None = None,
    label_key: str | None = None,
    reader_args: Sequence[object] | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    reader_num_threads: int | None = None,
    parser_num_threads: int | None = None,
    sloppy_ordering: bool = False,
    drop_final_batch: bool = False,
) -> data.Dataset:
    """Returns a dataset of batches of `tf.train.Example`s, parsed: dicts of tensors by the keys of `features`.

    Args:
        file_pattern: names of TFRecord files, which may have wildcards.
        batch_size: how many records a batch has.
        features: what `tf.io.parse_example` takes.
        reader: a class of datasets of records; `tf.data.TFRecordDataset` by default.
        label_key: the feature that becomes the second element of a pair.
        reader_args: further arguments of `reader`.
        num_epochs: how often the records are repeated; without end by default.
        shuffle, shuffle_buffer_size, shuffle_seed: whether and how the records are shuffled.
        drop_final_batch: whether a last, smaller batch is dropped; it is, where the records have no end.
        prefetch_buffer_size, reader_num_threads, parser_num_threads, sloppy_ordering: accepted for compatibility.
    """
    from replicax.tf._core import TFRecordDataset
    from replicax.tf._parse import parse_example

    if label_key is not None and label_key not in features:
        raise ValueError(f"`label_key` provided must be one of the features: {list(features)}, got {label_key!r}.")
    files = _matching(file_pattern)
    records = (reader or TFRecordDataset)(files, *(reader_args or ()))  # type: ignore[arg-type]
    buffer = shuffle_buffer_size if shuffle else None
    batches = _batches(records, batch_size, num_epochs, buffer, shuffle_seed, drop_final_batch)

    def parsed(serialized: Tree) -> Tree:
        found = parse_example(serialized, features)
        return found if label_key is None else (found, found.pop(label_key))

    return batches.map(parsed).prefetch(1)
