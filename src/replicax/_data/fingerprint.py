"""Part of `Dataset`: fingerprints, and datasets as values.

Each public method that makes a dataset leaves on it what it was called with: its *recipe*. A fingerprint is a hash of
that, and of the recipes of the datasets that it was made of.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pickle
import types
from typing import Any

import jax
import numpy as np

from replicax._data.core import Base
from replicax._data.elements import as_tensor


class Variant:
    """A dataset as one value, which `to_variant` gives and `from_variant` and `Dataset` take."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __repr__(self) -> str:
        return f"<Variant {self.dataset!r}>"


def to_variant(dataset: Any) -> Variant:
    """The dataset as one value."""
    if not isinstance(dataset, Base):
        raise TypeError(f"`to_variant` takes a dataset, got {dataset!r} of type {type(dataset).__name__}.")
    return Variant(dataset)


def from_variant(variant: Any, structure: Any) -> Any:
    """The dataset that was made one value; `structure` is its elements' spec."""
    from replicax._data import Dataset

    return Dataset(variant)


class Fingerprints(Base):
    """Methods of `Dataset`."""

    def __init__(self, variant_tensor: Any):
        if not isinstance(variant_tensor, Variant):
            raise TypeError(
                "`Dataset(variant_tensor)` takes what tf.data.experimental.to_variant returned, got "
                f"{variant_tensor!r:.80} of type {type(variant_tensor).__name__}. To make a dataset of data, use "
                "Dataset.from_tensor_slices or another one of its static methods."
            )
        vars(self).update(vars(variant_tensor.dataset))

    def fingerprint(self) -> Any:
        """A uint64 that two datasets share if they are made alike: of the same data, by the same calls.

        It is the same in other processes of one version of Python. Functions count by their code, what they close
        over and the global values that they name; random seeds that were not given do not count.

        >>> from replicax.data import Dataset
        >>> one, other = (Dataset.range(4).map(lambda x: x + 1).batch(2) for _ in range(2))
        >>> bool(one.fingerprint() == other.fingerprint()), bool(one.fingerprint() == one.skip(1).fingerprint())
        (True, False)
        """
        hashed = _Hash()
        hashed.add(self)
        return as_tensor(np.frombuffer(hashed.digest(), "<u8").reshape(()))


def remembering(cls: type) -> type:
    """Has the methods of this class that return datasets leave their recipes on these."""
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        plain = method.__func__ if isinstance(method, staticmethod) else method
        if name.startswith("_") or name == "apply" or not isinstance(plain, types.FunctionType):
            continue
        if str(plain.__annotations__.get("return")) == "Dataset":
            wrapped: Any = _remembered(name, plain)
            setattr(cls, name, staticmethod(wrapped) if isinstance(method, staticmethod) else wrapped)
    return cls


def _remembered(name: str, method: Any) -> Any:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        dataset = method(*args, **kwargs)
        if all(dataset is not value for value in (*args, *kwargs.values())):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments.pop("name", None)
            dataset._recipe = (name, tuple(bound.arguments.items()))
        return dataset

    return call


class _Hash:
    """A hash that is the same in each process."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._within: list[Any] = []  # what is being added, which may refer to itself

    def digest(self) -> bytes:
        """The bytes of it."""
        return self._hash.digest()

    def _put(self, *parts: Any) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: Any) -> None:
        """Adds a value of any kind."""
        for depth, outer in enumerate(self._within):
            if outer is value:
                return self._put("within", depth)
        self._within.append(value)
        try:
            self._add(value)
        finally:
            self._within.pop()

    def _all(self, kind: str, values: Any) -> None:
        values = list(values)
        self._put(kind, len(values))
        for value in values:
            self.add(value)

    def _add(self, value: Any) -> None:
        if isinstance(value, Base):
            self._put("dataset")
            self.add(getattr(value, "_recipe", None))
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, type(...), np.dtype)):
            self._put(type(value).__name__, value if isinstance(value, bytes) else repr(value))
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
            array = np.asarray(value)
            self._put("array", array.dtype, array.shape)
            self._put(repr(array.tolist())) if array.dtype.hasobject else self._put(array.tobytes())
        elif isinstance(value, dict):
            self._all("dict", sorted(value.items(), key=lambda item: repr(item[0])))
        elif isinstance(value, (list, tuple)):
            self._all(type(value).__name__, value)
        elif isinstance(value, (set, frozenset)):
            self._all("set", sorted(value, key=repr))
        elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            self._put("named", getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
        elif isinstance(value, types.CodeType):
            self._all("code", [value.co_code, value.co_consts, value.co_names, value.co_varnames[: value.co_argcount]])
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._all("method", [value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self._all("partial", [value.func, value.args, value.keywords])
        elif hasattr(value, "__wrapped__"):
            self.add(value.__wrapped__)
        elif callable(getattr(value, "numpy", None)):  # variables, and tensors of other libraries
            self.add(np.asarray(value.numpy()))
        else:
            self._add_object(value)

    def _add_function(self, function: Any) -> None:
        self._all("function", [function.__code__, function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not filled yet
                self._put("empty")
        for name in _names(function.__code__):
            if name in function.__globals__:
                self._put(name)
                self.add(function.__globals__[name])

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        self._put("object", kind.__module__, kind.__qualname__)
        try:
            self._put(pickle.dumps(value, protocol=4))
        except Exception:  # pickling calls what objects define
            self.add(getattr(value, "__dict__", None))


def _names(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return [*code.co_names, *inner]
