"""Keras's preprocessing layers that are written in TensorFlow's operations, on ours.

These layers (`StringLookup`, `IntegerLookup`, `TextVectorization`, `Hashing`, `HashedCrossing`) ask for TensorFlow on
every backend. Here each of their modules finds `replicax.tf` under the name `tf`, and Keras's JAX backend in the place
of its TensorFlow backend. The layers themselves, their `adapt`, and their files are Keras's own.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.tf import _host
from replicax.tf._core import Original, RaggedTensor, SparseTensor, Strings, Tree, wrap
from replicax.tf._types import DTypeLike, Rows, TensorLike

_MODULES = ("string_lookup", "integer_lookup", "index_lookup", "text_vectorization", "hashing", "hashed_crossing")
_STAND_IN = "keras.src.backend.tensorflow"


class _TensorFlow:
    """`replicax.tf` as these layers see it."""

    available = True
    Tensor = _host.Tensor

    @staticmethod
    def executing_eagerly() -> bool:
        """True: tables are read at once."""
        return True

    @staticmethod
    def is_tensor(value: object) -> bool:
        """Returns whether a value is a tensor, of strings as well."""
        return isinstance(value, _host.Tensor) or _tf().is_tensor(value)

    @functools.cached_property
    def math(self) -> types.SimpleNamespace:
        """The functions of `tf.math`, of which `bincount` takes ragged values too."""
        return types.SimpleNamespace(**vars(importlib.import_module("replicax.tf._math")), bincount=_bincount)

    @staticmethod
    def map_fn(function: Callable[[Tree], Tree], elems: Tree) -> Tree:
        """Returns a function of each row, also of a RaggedTensor."""
        tf = _tf()
        ragged = isinstance(elems, tf.RaggedTensor)
        return tf.ragged.stack([function(row) for row in elems]) if ragged else tf.map_fn(function, elems)

    def __getattr__(self, name: str) -> Any:
        found = getattr(_tf(), name)
        setattr(self, name, found)  # so that it need not be asked for again
        return found


class _OnHost:
    """A module of Keras's JAX backend, with functions of ours for tensors on the host, strings among them."""

    def __init__(self, module: types.ModuleType, names: str):
        self._module, self._names = module, names.split()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in self._names:
            return found
        ours = getattr(_tf(), name)

        @functools.wraps(found)
        def call(x: object, *args: object, **kwargs: object) -> object:
            return (ours if isinstance(x, (Strings, _host.HostTensor)) else found)(x, *args, **kwargs)

        setattr(self, name, call)
        return call


@functools.cache
def _tf() -> Any:
    return importlib.import_module("replicax.tf")


def _bincount(inputs: TensorLike, **options: Any) -> Rows:
    """Returns `tf.math.bincount`, of each row of a RaggedTensor too."""
    tf = _tf()
    if not isinstance(inputs, RaggedTensor):
        plain: jax.Array = tf.math.bincount(inputs, **options)
        return plain
    depth = int(options["maxlength"])
    values, rows = np.asarray(inputs.values), np.asarray(inputs.value_rowids())
    inside = (values >= 0) & (values < depth)
    counts = np.zeros((inputs.nrows(), depth), np.int64)
    np.add.at(counts, (rows[inside], values[inside]), 1)
    of_rows: jax.Array = tf.convert_to_tensor(
        (np.minimum(counts, 1) if options.get("binary_output") else counts).astype(options["dtype"])
    )
    return of_rows


def _kept_if_strings(convert: Original, outputs: TensorLike, dtype: DTypeLike | None = None) -> TensorLike:
    """Converts the output of a layer to a tensor of the backend, unless it is made of strings or on the host."""
    return (
        outputs
        if isinstance(outputs, (Strings, RaggedTensor, SparseTensor, _host.HostTensor))
        else convert(outputs, dtype)
    )


# Layers of integers and strings, of which `Layer.__call__` converts nothing.
_LOOKUPS = {"StringLookup", "IntegerLookup", "TextVectorization", "Hashing", "HashedCrossing"}


def _call_layer(call: Original, layer: Any, /, *args: Tree, **kwargs: Tree) -> Tree:
    """Call a layer; call a lookup directly in a function of a dataset, where `Layer.__call__` would double its time."""
    args = tuple(map(_with_numpy_strings, args))
    kwargs = {name: _with_numpy_strings(value) for name, value in kwargs.items()}
    kind = type(layer)
    is_lookup = kind.__name__ in _LOOKUPS and kind.__module__.startswith("keras.")
    if is_lookup and _host.is_on() and layer.built and len(args) == 1 and not kwargs:
        return layer.call(*args)
    return call(layer, *args, **kwargs)


def _with_numpy_strings(inputs: Tree) -> Tree:
    """Convert a list with strings in it to NumPy arrays, since Keras refuses a mix of its tensors and other objects."""
    if isinstance(inputs, (list, tuple)) and any(isinstance(x, Strings) for x in inputs):
        return type(inputs)(np.asarray(x) for x in inputs)
    return inputs


def serve() -> None:
    """Changes Keras, which is loaded."""
    libraries = _TensorFlow()
    for name in _MODULES:
        importlib.import_module(f"keras.src.layers.preprocessing.{name}").tf = libraries  # type: ignore[attr-defined]
    importlib.import_module("keras.src.utils.tf_utils").tf = libraries  # type: ignore[attr-defined]
    wrap(importlib.import_module("keras.src.utils.backend_utils"), "convert_tf_tensor", _kept_if_strings)
    wrap(importlib.import_module("keras").layers.Layer, "__call__", _call_layer)
    backend: Any = importlib.import_module("keras.src.backend.jax")
    stand_in: Any = types.ModuleType(_STAND_IN)
    stand_in.__getattr__ = functools.partial(getattr, backend)
    stand_in.numpy = _OnHost(backend.numpy, "expand_dims squeeze reshape")
    stand_in.cast = _OnHost(backend, "cast").cast
    sys.modules[_STAND_IN] = stand_in
    importlib.import_module("keras.src.backend").tensorflow = stand_in  # type: ignore[attr-defined]
