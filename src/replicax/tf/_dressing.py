"""Methods, shapes, dtypes and printing of TensorFlow's tensors, which `replicax.tf` adds to JAX's arrays."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf import _conversions, _dtypes, _op_tables, _operations, _ops, _string_arrays, _texts, _variable_slices
from replicax.tf._core import (
    InvalidOperandError,
    TensorShape,
    Variable,
    autograph_switch,
    jax_internals,
    pickling,
    specs,
)
from replicax.tf._types import TensorLike

_R = TypeVar("_R")


def numpy(self: jax.Array) -> np.ndarray | np.generic:
    """Returns a copy of the array as a numpy array, a scalar as a numpy scalar."""
    from replicax.tf import _debugging

    value = np.array(self)[()]
    _debugging.raise_failures()  # of assertions in the program that computed it
    return value


def get_shape(self: jax.Array) -> TensorShape:
    """Returns the static shape."""
    return TensorShape(self.shape)


def set_shape(self: jax.Array, shape: Iterable[int | None] | int | None) -> None:
    """Does nothing, since each tensor has a known shape; raises `ValueError` if that is another one."""
    if not TensorShape(shape).is_compatible_with(self.shape):
        raise ValueError(f"Tensor's shape {tuple(self.shape)} is not compatible with supplied shape {shape}.")


def tensor_shape(shape: property) -> property:
    """Returns JAX's property `shape` with a value that is a tuple with the methods of `tf.TensorShape`."""
    get, make = shape.__get__, tuple.__new__
    return property(lambda self: make(TensorShape, get(self)), doc=shape.__doc__)


def single_dtype(dtype: Any) -> property:
    """Returns JAX's property `dtype`, changed to return one object for each dtype, also for pickled and copied
    arrays.
    """
    get, single = dtype.fget, specs.SINGLE_DTYPES.get
    return property(lambda self: single(found := get(self), found), doc=dtype.__doc__)


def magnitude(x: jax.Array) -> jax.Array:
    """Returns the absolute value. Its gradient at 0 is 0, as in TensorFlow; in JAX it is 1."""
    return x * jnp.sign(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


def indexing(method: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns JAX's method `__getitem__`, extended to indices with variables, and slices with tensors as bounds."""

    @functools.wraps(method)
    def call(self: jax.Array, index: object) -> jax.Array:
        return method(self, index if type(index) is int else _ops.as_index(index))

    return call


def operator(name: str, method: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns JAX's method of an operator, extended to lists as operands; it raises `InvalidArgumentError`."""
    operate = _operations.fitting(method, _operations.of_matmul if "matmul" in name else _operations.of_broadcast)
    if name in ("__eq__", "__ne__"):
        operate = _equality(operate, name == "__ne__")

    # Integer exponents stay Python numbers, for which JAX multiplies.
    numbers = (float, complex) if name == "__pow__" else (int, float, complex)

    @functools.wraps(method)
    def call(self: jax.Array, other: TensorLike) -> jax.Array:
        if _conversions.registered:
            other = _conversions.converted(other)
        # JAX would convert a Python number to 32 bits first, even if the other operand has 64.
        if isinstance(other, (list, tuple)) or (isinstance(other, numbers) and self.dtype.itemsize >= 8):
            other = _op_tables.beside(other, self)
        return operate(self, other)

    return call


def _equality(method: Callable[..., jax.Array], unequal: bool) -> Callable[..., jax.Array]:
    """Compares elementwise; tensors whose shapes cannot be broadcast are not equal."""

    def call(self: jax.Array, other: TensorLike) -> jax.Array:
        try:
            return method(self, other)
        except InvalidOperandError:
            return _ops.convert_to_tensor(unequal)

    return call


def advising(method: Callable[..., _R]) -> Callable[..., _R]:
    """Return a tracer's method; its errors say what to do with a tensor that a compiled function has left behind."""

    @functools.wraps(method)
    def call(self: jax.core.Tracer[Any], *args: object, **kwargs: object) -> _R:
        try:
            return method(self, *args, **kwargs)
        except jax.errors.JAXTypeError as error:
            _advise_on_value(error)
            raise

    return call


def naming_numpy(method: Callable[..., object]) -> Callable[..., object]:
    """Return a tracer's method `__getattr__`; its error for `numpy` says where values are known."""

    @functools.wraps(method)
    def call(self: jax.core.Tracer[Any], name: str) -> object:
        if name != "numpy":
            return method(self, name)
        text = "numpy() has no value inside of compiled code. Return the tensor, and call numpy() on the result."
        try:
            np.array(self)
        except jax.errors.UnexpectedTracerError as error:
            text = f"numpy() has no value. {error}"
        except jax.errors.JAXTypeError:
            pass
        raise AttributeError(text, name=name, obj=self)

    return call


def _advise_on_value(error: Exception) -> None:
    """Raise `UnexpectedTracerError` for an error of JAX about a value that is asked for while nothing is traced.

    The tensor is then one that a compiled function has left behind.
    """
    if isinstance(error, autograph_switch.NEEDS_VALUES) and jax_internals.is_eager(jax_internals.current_trace()):
        raise jax.errors.UnexpectedTracerError(f"{autograph_switch.LEFT_BEHIND} {error}") from None
    autograph_switch.advise(error)


_ADVISING = "__abs__ __array__ __bool__ __complex__ __float__ __getitem__ __index__ __int__ __invert__ __neg__"
_OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and rand
or ror xor rxor eq ne lt le gt ge"""


def dress() -> None:
    """Adds these methods to JAX's arrays, and allows 64-bit types where they are requested."""
    array_type: Any = jax_internals.array_type()
    array_type.numpy, array_type.ref = numpy, Variable.ref
    copyreg.pickle(array_type, pickling.reduced)
    kinds: list[Any] = [array_type, jax.core.Tracer]
    for kind in kinds:
        kind.get_shape, kind.set_shape, kind.__abs__ = get_shape, set_shape, magnitude
        kind.__getitem__ = indexing(kind.__getitem__)
        for name in [f"__{name}__" for name in _OPERATORS.split()]:
            setattr(kind, name, operator(name, getattr(kind, name)))
        kind.shape, kind.dtype = tensor_shape(kind.shape), single_dtype(kind.dtype)
    tracer: Any = jax.core.Tracer
    for name in _ADVISING.split():
        setattr(tracer, name, advising(getattr(tracer, name)))
    tracer.__getattr__ = naming_numpy(tracer.__getattr__)
    _variable_slices.dress(kinds)
    array_type.__str__, array_type.__repr__ = _texts.tensor_str, _texts.tensor_repr
    _string_arrays.plug_in()
    _dtypes.dress()
    jax.config.update("jax_explicit_x64_dtypes", "allow")
