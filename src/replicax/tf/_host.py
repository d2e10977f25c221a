"""Tensors on the host: what functions of datasets compute with when they run in Python.

Such a function runs once for each element, often on arrays of another size each time: JAX would compile each operation
for each size. So its tensors are NumPy arrays with the methods of tensors, and `jnp` and `lax`, which the modules of
`replicax.tf` import from here, compute with NumPy where no argument is an array of JAX. The results have the dtypes
that JAX gives: where no operand has 64 bits, they have none.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from replicax.tf import _operations, _texts
from replicax.tf._core import (
    InvalidOperandError,
    Nested,
    Strings,
    TensorShape,
    Tree,
    array_conversion,
    as_strings,
    thread_state,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_state = thread_state.current


def is_on() -> bool:
    """Returns whether new tensors are made on the host."""
    return _state.on_host


class computing:
    """A context in which new tensors are made on the host."""

    def __init__(self, on: bool = True):
        self._on, self._before = on, False
        self._quiet = np.errstate(all="ignore")  # as in XLA, 1 / 0 is infinity without a word

    def __enter__(self) -> None:
        self._before, _state.on_host = _state.on_host, self._on
        self._quiet.__enter__()

    def __exit__(self, *_: object) -> None:
        self._quiet.__exit__(None, None, None)
        _state.on_host = self._before


class HostTensor(np.ndarray):
    """A NumPy array with the methods of a tensor."""

    __array_priority__ = 100
    _is_tensor = True  # for `array_conversion.holds_arrays`

    def numpy(self) -> np.ndarray | np.generic:
        """Returns a copy of the array as a plain numpy array, a scalar as a numpy scalar."""
        return np.array(self)[()]

    @property  # type: ignore[misc]
    def shape(self) -> TensorShape:  # type: ignore[override, misc]
        """The shape."""
        return tuple.__new__(TensorShape, self.view(np.ndarray).shape)

    def get_shape(self) -> TensorShape:
        """Returns the shape."""
        return self.shape

    def set_shape(self, shape: Iterable[int | None] | int | None) -> None:
        """Does nothing, since the shape is known; raises `ValueError` if it is another one."""
        if not TensorShape(shape).is_compatible_with(self.shape):
            raise ValueError(f"Tensor's shape {self.shape} is not compatible with supplied shape {shape}.")

    @property
    def at(self) -> Any:
        """JAX's way to update elements, of a JAX array with this value."""
        return as_jax(self).at

    def ref(self) -> Hashable:
        """Returns a hashable reference to the tensor."""
        from replicax.tf._core import Variable

        return Variable.ref(self)  # type: ignore[arg-type]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return _computed(getattr(ufunc, method), inputs, kwargs)
        except _OfJax:
            return getattr(jax.numpy, ufunc.__name__)(*map(as_jax, inputs))
        except ValueError as error:
            of = _operations.of_matmul if ufunc is np.matmul else _operations.of_broadcast
            raise InvalidOperandError(of(*inputs) or str(error)) from error

    def __getitem__(self, key: object) -> jax.Array:  # type: ignore[override]
        return hosted(self.view(np.ndarray)[_index(key)])

    def __iter__(self) -> Iterator[jax.Array]:  # type: ignore[override]
        return map(hosted, self.view(np.ndarray))

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError("'tf.Tensor' object does not support item assignment")

    def __eq__(self, other: object) -> jax.Array | bool:  # type: ignore[override]
        return _compared(np.equal, self, other, False)

    def __ne__(self, other: object) -> jax.Array | bool:  # type: ignore[override]
        return _compared(np.not_equal, self, other, True)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return _texts.tensor_str(self)

    def __repr__(self) -> str:
        return _texts.tensor_repr(self)

    def __reduce__(self) -> str | tuple[object, ...]:
        return self.view(np.ndarray).__reduce__()


def _rebinding(operate: Callable[[object, object], object]) -> Callable[[HostTensor, object], object]:
    return lambda self, other: operate(self, other)


# In-place operators make new tensors: the memory may be that of the dataset's source.
for _name in [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
]:
    setattr(HostTensor, f"__i{_name.strip('_')}__", _rebinding(getattr(operator, _name)))


def _compared(compare: np.ufunc, one: HostTensor, other: object, otherwise: bool) -> jax.Array | bool:
    if other is None:
        return otherwise
    try:
        elements: jax.Array = compare(one, other)
        return elements
    except InvalidOperandError:  # shapes that cannot be broadcast
        return hosted(np.asarray(otherwise))


def _index(key: object) -> Any:
    """Returns an index for NumPy: arrays of JAX and variables become NumPy's, a list of numbers a tuple."""
    if isinstance(key, tuple):
        return tuple(map(_index, key))
    if isinstance(key, HostTensor):
        return key.view(np.ndarray)
    if isinstance(key, slice) or key is None or key is Ellipsis or isinstance(key, (int, np.ndarray)):
        return key
    return np.asarray(key)


def hosted(array: np.ndarray | np.generic) -> jax.Array:
    """Returns a NumPy array or scalar as a tensor on the host."""
    array = array if type(array) is np.ndarray else np.asarray(array)
    # Tensors of all classes have the methods of `jax.Array`, and this type in the annotations of `replicax.tf`.
    return as_strings(array) if array.dtype.hasobject else array.view(HostTensor)  # type: ignore[return-value]


def as_hosted(value: Tree) -> Tree:
    """Returns the leaves of an element as tensors on the host."""
    if type(value) is np.ndarray:  # most elements; to look for leaves takes longer than all the rest
        return hosted(value)
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, Nested) else hosted(leaf), value)


def settled(value: _R) -> _R:
    """Returns a JAX array as a tensor on the host, where tensors are made there."""
    if not _state.on_host or not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    return hosted(np.asarray(value))  # type: ignore[return-value]


class _TensorType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (jax.Array, HostTensor, Strings))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, (jax.Array, HostTensor, Strings))


class Tensor(metaclass=_TensorType):
    """The class of which all tensors are instances: arrays of JAX, and those of functions of datasets."""


# NumPy in place of JAX


_NARROW = {np.dtype(wide): np.dtype(narrow) for wide, narrow in zip("dlLD", "fiIF")}


class _OfJax(Exception):
    """An argument is an array of JAX, or may turn into one."""


# Types of arguments that NumPy takes as they are, and that have no 64-bit dtype of their own.
_PLAIN = {bool, int, float, complex, str, type(None), slice, type(Ellipsis)}


def _taken(value: Any, wide: list[bool]) -> Any:
    """Returns an argument as NumPy takes it; `wide` gets an entry if it has 64 bits.

    Raises:
        _OfJax: it is an array of JAX, or may turn into one.
    """
    kind = type(value)
    if kind is HostTensor or kind is np.ndarray or kind is Strings:
        if value.dtype in _NARROW:
            wide.append(True)
        return value.view(np.ndarray)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return kind([_taken(x, wide) for x in value])
    if isinstance(value, jax.Array) or hasattr(value, "__jax_array__"):
        raise _OfJax
    if isinstance(value, (np.generic, np.dtype)) or (isinstance(value, type) and issubclass(value, np.generic)):
        dtype = value.dtype if isinstance(value, np.generic) else np.dtype(value)
        if dtype in _NARROW:
            wide.append(True)
    return value


def _result(found: Any, wide: bool) -> Any:
    if isinstance(found, (np.ndarray, np.generic)):
        array = np.asarray(found)
        if not wide and array.dtype in _NARROW:
            array = array.astype(_NARROW[array.dtype])
        return hosted(array)
    return type(found)(_result(x, wide) for x in found) if type(found) in (list, tuple) else found


def _computed(compute: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> Any:
    wide: list[bool] = []
    taken = [_taken(x, wide) for x in args]
    named = {name: _taken(x, wide) for name, x in kwargs.items()} if kwargs else kwargs
    return _result(compute(*taken, **named), bool(wide))


def as_jax(value: Any) -> Any:
    """Returns an argument for a function of JAX, which would cut 64 bits off NumPy's arrays."""
    if type(value) in (list, tuple):
        return type(value)(map(as_jax, value))
    return array_conversion.as_array(value.view(np.ndarray)) if isinstance(value, HostTensor) else value


def on_jax(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function that computes with JAX alone, for what NumPy has no counterpart of."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _state.on_host:
            return function(*args, **kwargs)
        with computing(False):
            found = function(*map(as_jax, args), **{name: as_jax(x) for name, x in kwargs.items()})
        return settled(found)

    return call


class _Twin:
    """A module of JAX, whose functions take and return tensors on the host in functions of datasets.

    Those that have a twin compute with NumPy, the others with JAX.
    """

    def __init__(self, module: types.ModuleType, twins: dict[str, Callable[..., object]]):
        self._module, self._twins = module, twins

    def __getattr__(self, name: str) -> Any:
        real: Any = getattr(self._module, name)
        if isinstance(real, types.ModuleType):
            real = _Twin(real, {})
        elif callable(real) and not isinstance(real, type) and hasattr(real, "__name__"):
            real = _either(real, self._twins.get(name))
        setattr(self, name, real)
        return real


def _either(real: Callable[..., Any], twin: Callable[..., object] | None) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: object, **kwargs: object) -> Any:
        if not _state.on_host:
            return real(*args, **kwargs)
        if twin is not None:
            with contextlib.suppress(_OfJax):
                return _computed(twin, args, kwargs)
        found = real(*map(as_jax, args), **{name: as_jax(x) for name, x in kwargs.items()})
        return type(found)(map(settled, found)) if type(found) in (list, tuple) else settled(found)

    return call


def _without(function: Callable[..., _R], *dropped: str) -> Callable[..., _R]:
    """Returns a function of NumPy that ignores these arguments of JAX's."""

    def call(*args: object, **kwargs: object) -> _R:
        return function(*args, **{name: x for name, x in kwargs.items() if name not in dropped})

    return call


def _argsort(a: np.ndarray, axis: int = -1, *, stable: bool = True, descending: bool = False) -> np.ndarray:
    if not descending:
        return np.argsort(a, axis, kind="stable")
    order = np.argsort(np.flip(a, axis), axis, kind="stable")
    return np.flip(a.shape[axis] - 1 - order, axis)


def _sort(a: np.ndarray, axis: int = -1, *, stable: bool = True, descending: bool = False) -> np.ndarray:
    found = np.sort(a, axis, kind="stable")
    return np.flip(found, axis) if descending else found


_SAME = """abs add all any arccos arccosh arcsin arcsinh arctan arctan2 arctanh array asarray arange bitwise_and
bitwise_or bitwise_xor broadcast_to ceil clip concatenate conj cos cosh cross diag diagonal divide einsum
equal exp expand_dims expm1 eye flip floor floor_divide full full_like greater greater_equal imag invert iscomplexobj
isfinite isinf isnan left_shift less less_equal linspace log log1p logical_and logical_not logical_or
logical_xor matmul max maximum mean meshgrid min minimum mod moveaxis multiply negative nextafter not_equal
ones ones_like pad power prod ravel real repeat reshape right_shift rint roll round searchsorted sign sin
sinh split sqrt square squeeze stack std subtract sum swapaxes tan tanh tensordot tile trace
transpose tril triu unravel_index var where zeros zeros_like rot90 cumsum cumprod"""
_NUMPY = {name: getattr(np, name) for name in _SAME.split()}
_NUMPY |= {"argsort": _argsort, "sort": _sort, "": _without(np.take_along_axis, "mode")}
_NUMPY |= {
    name: _without(_NUMPY[name], "preferred_element_type", "precision") for name in ("einsum", "matmul", "tensordot")
}


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if np.issubdtype(np.result_type(x, y), np.integer):
        return np.asarray(np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)))
    return np.asarray(np.divide(x, y))


def _extreme(
    reduce: Callable[..., np.ndarray | np.generic], infinity: float, operand: npt.ArrayLike, axes: Iterable[int]
) -> np.ndarray | np.generic:
    """Return the largest or smallest elements; of no elements, `infinity` or the limit of an integer dtype."""
    array, limit = np.asarray(operand), infinity
    if array.size:
        return reduce(array, axis=tuple(axes))
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        limit = limits.min if infinity < 0 else limits.max
    return reduce(array, axis=tuple(axes), initial=limit)


_LAX: dict[str, Callable[..., object]] = {
    "add": np.add,
    "concatenate": lambda operands, dimension: np.concatenate(operands, dimension),
    "div": _divided,
    "max": np.maximum,
    "min": np.minimum,
    "reduce_max": functools.partial(_extreme, np.max, -np.inf),
    "reduce_min": functools.partial(_extreme, np.min, np.inf),
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "slice_in_dim": lambda operand, start, limit, stride=1, axis=0: operand[
        (slice(None),) * axis + (slice(start, limit, stride),)
    ],
    "slice": lambda operand, start, limit, strides=None: operand[
        tuple(map(slice, start, limit, [None] * len(start) if strides is None else strides))
    ],
    "stop_gradient": lambda x: x,
}

if TYPE_CHECKING:
    from jax import lax as lax
    from jax import numpy

    jnp = numpy
else:
    jnp = _Twin(jax.numpy, _NUMPY)
    lax = _Twin(jax.lax, _LAX)
