"""`tf.lookup`: tables from strings or integers to values.

They are dictionaries on the host. Tables that do not change also take integer keys in compiled code, by a search in the
sorted keys. Strings never enter compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf import _hashes
from replicax.tf._core import (
    FailedPreconditionError,
    InvalidArgumentError,
    Probe,
    RaggedTensor,
    SparseTensor,
    as_dtype,
    dtype_name,
)
from replicax.tf._ops import convert_to_tensor, known, string_tensor
from replicax.tf._table_initializers import Key, TableInitializerBase, as_rows
from replicax.tf._types import Composed, DTypeLike, TensorLike

_STRING, _INT64 = np.dtype(object), np.dtype(np.int64)
_Rows: TypeAlias = "dict[Key, Key | np.ndarray]"  # values by key: Python's numbers and bytes, or arrays


class _Table:
    """A table: its dtypes, and how keys are looked up."""

    _frozen = True  # whether what it has cannot change

    def __init__(self, key_dtype: DTypeLike, value_dtype: DTypeLike, default: TensorLike, name: str | None):
        self._key_dtype, self._value_dtype, self._name = as_dtype(key_dtype), as_dtype(value_dtype), name
        self._default = as_rows(default, self._value_dtype)
        self._rows: _Rows = {}

    @property
    def key_dtype(self) -> np.dtype:
        """The dtype of the keys."""
        return self._key_dtype

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self._value_dtype

    @property
    def name(self) -> str | None:
        """The name."""
        return self._name

    @property
    def resource_handle(self) -> _Table:
        """The table itself."""
        return self

    def size(self, name: str | None = None) -> jax.Array:
        """Returns the number of keys, int64."""
        return convert_to_tensor(np.int64(len(self._rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, keys: TensorLike) -> Composed:
        return self.lookup(keys)

    def lookup(self, keys: TensorLike, name: str | None = None) -> Composed:
        """Returns the values of keys, the default where there is none, in the keys' shape; also of ragged and sparse
        keys.

        Raises:
            TypeError: the keys have another dtype.
        """
        return on_values(functools.partial(self._found, default=None), keys)

    def _checked(self, keys: TensorLike) -> jax.Array:
        tensor = convert_to_tensor(keys) if hasattr(keys, "dtype") else convert_to_tensor(keys, self._key_dtype)
        if tensor.dtype != self._key_dtype:
            raise TypeError(
                f"Dtype of argument `keys` must be {dtype_name(self._key_dtype)}, received: {dtype_name(tensor.dtype)}"
            )
        return tensor

    def _found(self, keys: TensorLike, default: np.ndarray | None) -> jax.Array:
        tensor = self._checked(keys)
        if isinstance(tensor, jax.core.Tracer):
            return self._searched(tensor)
        array = np.asarray(tensor)
        rows, shape = self._rows, self._default.shape
        if default is not None and default.shape != shape:
            parts = default.reshape(-1, *shape)
            values = [rows.get(key, parts[i]) for i, key in enumerate(array.ravel().tolist())]
        else:
            missing: Key | np.ndarray = (self._default if default is None else default)[()]
            found = array.ravel().tolist()
            if rows and found and isinstance(found[0], Probe):  # specs are asked for: no string is unknown
                missing = next(iter(rows.values()))
            values = [rows.get(key, missing) for key in found]
        return _tensor(values, self._value_dtype, (*array.shape, *shape))

    def _searched(self, keys: jax.Array) -> jax.Array:
        """Looks traced keys up."""
        if not self._frozen or _STRING in (self._key_dtype, self._value_dtype) or self._default.shape:
            raise TypeError(
                "In compiled code a table that does not change is looked up, from integers to numbers: call `lookup` "
                "of others outside of it, such as in Dataset.map."
            )
        if not self._rows:
            return jnp.full(keys.shape, self._default)
        order = np.argsort(np.array(list(self._rows), self._key_dtype), kind="stable")
        known_keys = np.array(list(self._rows), self._key_dtype)[order]
        values = np.array(list(self._rows.values()), self._value_dtype)[order]
        place = jnp.clip(jnp.searchsorted(known_keys, keys), 0, len(values) - 1)
        found = jnp.asarray(known_keys, self._key_dtype)[place] == keys
        return jnp.where(found, jnp.asarray(values, self._value_dtype)[place], self._default)

    def export(self, name: str | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns all keys, and their values."""
        keys = _tensor(list(self._rows), self._key_dtype, (len(self._rows),))
        values = list(self._rows.values())
        return keys, _tensor(values, self._value_dtype, (len(values), *self._default.shape))


def _tensor(values: Sequence[Key | np.ndarray], dtype: np.dtype, shape: tuple[int, ...]) -> jax.Array:
    if dtype == _STRING:
        out = np.empty(len(values), object)
        out[:] = values
        return string_tensor(out.reshape(shape))
    return convert_to_tensor(np.array(values, dtype).reshape(shape))


def on_values(compute: Callable[[TensorLike], Composed], keys: TensorLike) -> Composed:
    """Returns a function of a tensor; of the values of a ragged or sparse one, in the same places."""
    if isinstance(keys, SparseTensor):
        return SparseTensor(keys.indices, compute(keys.values), keys.dense_shape)
    if isinstance(keys, RaggedTensor):
        return RaggedTensor(on_values(compute, keys.values), keys.row_splits)  # type: ignore[arg-type]
    return compute(keys)


class StaticHashTable(_Table):
    """A table that an initializer fills once.

    Args:
        initializer: `KeyValueTensorInitializer` or `TextFileInitializer`.
        default_value: the value of keys that it lacks.
        name, experimental_is_anonymous: accepted for compatibility.

    Raises:
        FailedPreconditionError: a key has two different values.
    """

    def __init__(
        self, initializer: TableInitializerBase, default_value: TensorLike, name: str | None = None,
        experimental_is_anonymous: bool = False,
    ):  # fmt: skip
        super().__init__(initializer.key_dtype, initializer.value_dtype, default_value, name)
        initializer.initialize(self)

    def _fill(self, keys: list[Key], values: list[Key]) -> None:
        rows = self._rows
        for key, value in zip(keys, values):
            if rows.setdefault(key, value) != value:
                shown = key.decode(errors="replace") if isinstance(key, bytes) else key
                raise FailedPreconditionError(
                    f"HashTable has different value for same key. Key {shown} has {rows[key]!s} and trying to add "
                    f"value {value!s}"
                )

    @property
    def default_value(self) -> jax.Array:
        """The value of keys that it lacks."""
        return convert_to_tensor(self._default)


class StaticVocabularyTable(_Table):
    """A table from terms to numbers that gives other terms numbers too: those of `num_oov_buckets` further buckets.

    The bucket of a term follows from its Fingerprint64, as in TensorFlow.

    Args:
        initializer: what fills the table with int64 numbers from 0 on; None for none.
        num_oov_buckets: how many buckets there are.
        lookup_key_dtype: the dtype of the keys, by default the initializer's.
        name, experimental_is_anonymous: accepted for compatibility.
    """

    def __init__(
        self, initializer: TableInitializerBase | None, num_oov_buckets: int, lookup_key_dtype: DTypeLike | None = None,
        name: str | None = None, experimental_is_anonymous: bool = False,
    ):  # fmt: skip
        if num_oov_buckets <= 0:
            raise ValueError(f"`num_oov_buckets` must be > 0; use StaticHashTable. Received: {num_oov_buckets}")
        dtype = lookup_key_dtype or (_STRING if initializer is None else initializer.key_dtype)
        super().__init__(dtype, _INT64, -1, name)
        self._buckets = int(num_oov_buckets)
        if initializer is not None:
            if initializer.value_dtype != _INT64:
                raise TypeError(f"Invalid `value_dtype`, expected int64 but got {dtype_name(initializer.value_dtype)}.")
            initializer.initialize(self)

    _fill = StaticHashTable._fill

    def size(self, name: str | None = None) -> jax.Array:
        """Returns the number of terms and buckets, int64."""
        return convert_to_tensor(np.int64(len(self._rows) + self._buckets))

    def _found(self, keys: TensorLike, default: np.ndarray | None) -> jax.Array:
        tensor = self._checked(keys)
        array = np.asarray(known(tensor, "The bucket of a term", "Look it up outside of compiled code."))
        flat = array.ravel().tolist()
        numbers = np.array([self._rows.get(key, -1) for key in flat], np.int64).reshape(array.shape)
        if (missing := numbers < 0).any():
            terms = np.empty(int(missing.sum()), object)
            terms[:] = [key if isinstance(key, bytes) else str(key).encode() for key in array[missing].tolist()]
            hashes = _hashes.of_strings(_hashes.fingerprint64, terms) % np.uint64(self._buckets)
            numbers[missing] = hashes.astype(np.int64) + len(self._rows)
        return convert_to_tensor(numbers)


class MutableHashTable(_Table):
    """A table that can be changed. Checkpoints save it, if `checkpoint` is true.

    Args:
        key_dtype: the dtype of the keys.
        value_dtype: the dtype of the values.
        default_value: the value of keys that it lacks, whose shape all values have.
        name, experimental_is_anonymous: accepted for compatibility.
        checkpoint: whether checkpoints save it.
    """

    _frozen = False
    _stays_in_process = True  # see `_data/by_value.py`

    def __init__(
        self, key_dtype: DTypeLike, value_dtype: DTypeLike, default_value: TensorLike,
        name: str = "MutableHashTable", checkpoint: bool = True, experimental_is_anonymous: bool = False,
    ):  # fmt: skip
        super().__init__(key_dtype, value_dtype, default_value, name)
        self._checkpoint = checkpoint

    def lookup(  # type: ignore[override]
        self, keys: TensorLike, dynamic_default_values: TensorLike = None, name: str | None = None
    ) -> Composed:
        """Returns the values of keys; where there is none, the default, or that of `dynamic_default_values`."""
        default = None if dynamic_default_values is None else as_rows(dynamic_default_values, self._value_dtype)
        return on_values(functools.partial(self._found, default=default), keys)

    def insert(self, keys: TensorLike, values: TensorLike, name: str | None = None) -> None:
        """Sets the values of keys."""
        own = as_rows(self._checked(keys), self._key_dtype)
        new = as_rows(values, self._value_dtype)
        if new.shape != (*own.shape, *self._default.shape):
            raise InvalidArgumentError(
                f"Expected shape {[*own.shape, *self._default.shape]} for value, got {list(new.shape)}"
            )
        self._rows.update(zip(own.ravel().tolist(), self._parts(new)))

    def _parts(self, values: np.ndarray) -> list[Key | np.ndarray]:
        shape = self._default.shape
        return list(values.reshape(-1, *shape)) if shape else values.ravel().tolist()

    def remove(self, keys: TensorLike, name: str | None = None) -> None:
        """Removes keys; those that it lacks are passed over."""
        for key in as_rows(self._checked(keys), self._key_dtype).ravel().tolist():
            self._rows.pop(key, None)

    def save_state(self) -> list[np.ndarray] | None:
        """Returns the keys and values, for a checkpoint."""
        keys, values = self.export()
        return [np.asarray(keys), np.asarray(values)] if self._checkpoint else None

    def restore_state(self, state: Sequence[np.ndarray] | None) -> None:
        """Replaces the keys and values by those of `save_state`."""
        if state is not None:
            self._rows = dict(zip(state[0].tolist(), self._parts(state[1])))


class DenseHashTable(MutableHashTable):
    """A table that can be changed, with two keys that cannot be used. Here it is a dictionary, as the others are."""

    def __init__(
        self, key_dtype: DTypeLike, value_dtype: DTypeLike, default_value: TensorLike, empty_key: TensorLike,
        deleted_key: TensorLike, initial_num_buckets: int | None = None, name: str = "MutableDenseHashTable",
        checkpoint: bool = True, experimental_is_anonymous: bool = False,
    ):  # fmt: skip
        super().__init__(key_dtype, value_dtype, default_value, name, checkpoint)
        self._refused = {
            as_rows(key, self._key_dtype).ravel().tolist()[0]: what
            for key, what in ((deleted_key, "deleted_key"), (empty_key, "empty_key"))
        }

    def _checked(self, keys: TensorLike) -> jax.Array:
        tensor = super()._checked(keys)
        for key in set(np.asarray(tensor).ravel().tolist()) & set(self._refused):
            raise InvalidArgumentError(f"Using the {self._refused[key]} as a table key is not allowed")
        return tensor

    def insert_or_assign(self, keys: TensorLike, values: TensorLike, name: str | None = None) -> None:
        """Sets the values of keys."""
        self.insert(keys, values)

    def erase(self, keys: TensorLike, name: str | None = None) -> None:
        """Removes keys."""
        self.remove(keys)
