"""The assertions of `tf.test.TestCase` about tensors, arrays, and structures of them.

An argument is a tensor, an array, a number, a list, or a structure of these. All of them are compared as NumPy's
arrays.
"""

from __future__ import annotations

import contextlib
import math
import re
import unittest
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from replicax.tf import _device_specs, _host, _nests, _ops
from replicax.tf._core import InvalidArgumentError, RaggedTensor, ReplicaxError, Tree
from replicax.tf._types import DTypeLike, TensorLike

_Expected: TypeAlias = "str | re.Pattern[str] | Callable[[Exception], object]"
_WRONG_SHAPES = "Incompatible shapes|Dimensions must be equal|required broadcastable shapes"
_SHOWN = 10  # how many elements a message lists


def as_array(value: TensorLike) -> np.ndarray:
    """Returns a value as an array; lists of rows of different lengths are an array of objects."""
    if hasattr(value, "numpy"):
        value = value.numpy()  # type: ignore[union-attr]
    elif hasattr(value, "__jax_array__"):  # variables of Keras
        value = _ops.convert_to_tensor(value)
    try:
        return np.asarray(value)
    except ValueError:
        values = list(value)  # type: ignore[arg-type]
        rows: np.ndarray = np.empty(len(values), dtype=object)
        rows[:] = [as_array(row) for row in values]
        return rows


def _comparable(array: np.ndarray) -> np.ndarray:
    """Returns an array in a dtype in which NumPy computes tolerances: float32 for bfloat16 and smaller floats."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _listed(where: np.ndarray, *columns: tuple[str, np.ndarray]) -> str:
    """Returns a line for each element of the first places where something holds."""
    places = np.argwhere(where)
    lines = [f"  {place.tolist()}: " + ", ".join(f"{n} {a[tuple(place)]}" for n, a in columns) for place in places]
    rest = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *rest])


def _said(msg: object) -> str:
    return f" {msg}" if msg else ""


if TYPE_CHECKING:
    _Case: TypeAlias = unittest.TestCase
else:
    _Case = object


class TensorAssertions(_Case):
    """Assertions about tensors, for a class of test cases of unittest."""

    # Equal, and close.

    def assertAllEqual(self, a: TensorLike, b: TensorLike, msg: object = None) -> None:
        """Asserts that two arrays have the same shape and the same elements; NaN equals NaN."""
        if isinstance(a, RaggedTensor) or isinstance(b, RaggedTensor):
            self.assertEqual(_as_lists(a), _as_lists(b), msg)
            return
        one, other = _pair(self, a, b, msg)
        same = np.asarray(one == other)
        if one.dtype.kind in "fcV":
            same = same | (np.isnan(one) & np.isnan(other))
        if not np.all(same):
            self.fail(f"Not equal:{_said(msg)}\n{_listed(~same, ('first', one), ('second', other))}")

    def assertNotAllEqual(self, a: TensorLike, b: TensorLike, msg: object = None) -> None:
        """Asserts that two arrays differ in shape or in an element."""
        try:
            self.assertAllEqual(a, b)
        except AssertionError:
            return
        self.fail(f"The two values are equal at all elements.{_said(msg)}")

    def assertAllClose(
        self, a: TensorLike, b: TensorLike, rtol: float = 1e-6, atol: float = 1e-6, msg: object = None
    ) -> None:
        """Asserts that two arrays, or the arrays of two structures, differ by at most `atol + rtol * abs(b)`.

        Raises:
            ValueError: only one of the values is a dict.
        """
        _close(self, a, b, rtol, atol, msg, "")

    def assertAllCloseAccordingToType(
        self,
        a: TensorLike,
        b: TensorLike,
        rtol: float = 1e-6,
        atol: float = 1e-6,
        float_rtol: float = 1e-6,
        float_atol: float = 1e-6,
        half_rtol: float = 1e-3,
        half_atol: float = 1e-3,
        bfloat16_rtol: float = 1e-2,
        bfloat16_atol: float = 1e-2,
        msg: object = None,
    ) -> None:
        """Asserts as `assertAllClose` does, with the tolerance of the less precise of the two dtypes."""
        one, other = as_array(a), as_array(b)
        found = {one.dtype.name, other.dtype.name}
        table = [("float32 complex64", float_rtol, float_atol), ("float16", half_rtol, half_atol)]
        for names, relative, absolute in [*table, ("bfloat16", bfloat16_rtol, bfloat16_atol)]:
            if found & {*names.split()}:
                rtol, atol = max(rtol, relative), max(atol, absolute)
        self.assertAllClose(one, other, rtol, atol, msg)

    def assertNotAllClose(
        self, a: TensorLike, b: TensorLike, rtol: float = 1e-6, atol: float = 1e-6, msg: object = None
    ) -> None:
        """Asserts that two arrays or structures differ by more in an element."""
        try:
            self.assertAllClose(a, b, rtol, atol)
        except AssertionError:
            return
        self.fail(f"The two values are close at all elements.{_said(msg)}")

    def assertNear(self, f1: TensorLike, f2: TensorLike, err: float, msg: object = None) -> None:
        """Asserts that two numbers differ by at most `err`."""
        one, other = float(np.squeeze(as_array(f1))), float(np.squeeze(as_array(f2)))
        if one != other and not math.fabs(one - other) <= err:
            self.fail(f"{one} and {other} differ by {math.fabs(one - other)}, more than {err}.{_said(msg)}")

    def assertArrayNear(
        self, farray1: Sequence[float], farray2: Sequence[float], err: float, msg: object = None
    ) -> None:
        """Asserts that two lists of numbers have the same length, and differ by at most `err` in each."""
        self.assertEqual(len(farray1), len(farray2), msg)
        for one, other in zip(farray1, farray2):
            self.assertNear(one, other, err, msg)

    def assertNDArrayNear(self, ndarray1: TensorLike, ndarray2: TensorLike, err: float, msg: object = None) -> None:
        """Asserts that the norm of the difference of two arrays is less than `err`."""
        distance = np.linalg.norm(as_array(ndarray1) - as_array(ndarray2))
        if not distance < err:
            self.fail(f"The norm of the difference is {distance}, not less than {err}.{_said(msg)}")

    def assertDictEqual(  # type: ignore[override]  # of values that are tensors
        self, a: Mapping[Any, TensorLike], b: Mapping[Any, TensorLike], msg: object = None
    ) -> None:
        """Asserts that two dicts have the same keys, and equal values; floats are compared as by `assertAllClose`."""
        self.assertCountEqual(a.keys(), b.keys(), msg)
        for key, value in a.items():
            floating = as_array(value).dtype.kind in "fcV"
            (self.assertAllClose if floating else self.assertAllEqual)(value, b[key], msg=key)

    # Bounds.

    def assertAllGreater(self, a: TensorLike, comparison_target: TensorLike) -> None:
        """Asserts that all elements are greater than a number."""
        self.assertGreater(np.min(as_array(a)), as_array(comparison_target))

    def assertAllLess(self, a: TensorLike, comparison_target: TensorLike) -> None:
        """Asserts that all elements are less than a number."""
        self.assertLess(np.max(as_array(a)), as_array(comparison_target))

    def assertAllGreaterEqual(self, a: TensorLike, comparison_target: TensorLike) -> None:
        """Asserts that all elements are greater than a number, or equal to it."""
        self.assertGreaterEqual(np.min(as_array(a)), as_array(comparison_target))

    def assertAllLessEqual(self, a: TensorLike, comparison_target: TensorLike) -> None:
        """Asserts that all elements are less than a number, or equal to it."""
        self.assertLessEqual(np.max(as_array(a)), as_array(comparison_target))

    def assertAllInRange(
        self,
        target: TensorLike,
        lower_bound: ArrayLike,
        upper_bound: ArrayLike,
        open_lower_bound: bool = False,
        open_upper_bound: bool = False,
    ) -> None:
        """Asserts that all elements are between two numbers, which belong to the range unless it is open there."""
        array = as_array(target)
        if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
            self.fail(f"The dtype {array.dtype} has no order: {array}.")
        above = array > lower_bound if open_lower_bound else array >= lower_bound
        below = array < upper_bound if open_upper_bound else array <= upper_bound
        outside = ~(above & below)  # of NaN both are false
        if outside.any():
            bounds = (
                f"{'(' if open_lower_bound else '['}{lower_bound!s}, {upper_bound!s}{')' if open_upper_bound else ']'}"
            )
            listed = _listed(outside, ("value", array))
            self.fail(f"{outside.sum()} of {array.size} elements are outside of the range {bounds}:\n{listed}")

    def assertAllInSet(self, target: TensorLike, expected_set: Collection[object]) -> None:
        """Asserts that all elements are among some values."""
        others = np.setdiff1d(as_array(target), list(expected_set))
        if others.size:
            self.fail(f"{others.size} different elements are not in {expected_set}: {others[:_SHOWN]}")

    # Shapes, dtypes and devices.

    def assertShapeEqual(self, input_a: TensorLike, input_b: TensorLike, msg: object = None) -> None:
        """Asserts that two tensors or arrays have the same shape; raises `TypeError` for other values."""
        for name, value in zip(("input_a", "input_b"), (input_a, input_b)):
            if not isinstance(value, (np.ndarray, np.generic, _host.Tensor)):
                raise TypeError(f"{name} must be an array of NumPy or a tensor, got {type(value).__name__}.")
        self.assertEqual(as_array(input_a).shape, as_array(input_b).shape, msg)

    def assertDTypeEqual(self, target: TensorLike, expected_dtype: DTypeLike) -> None:
        """Asserts that a value has a dtype."""
        self.assertEqual(as_array(target).dtype, np.dtype(expected_dtype))

    def assertDeviceEqual(
        self,
        device1: _device_specs.DeviceSpec | str | None,
        device2: _device_specs.DeviceSpec | str | None,
        msg: object = None,
    ) -> None:
        """Asserts that two names or `tf.DeviceSpec`s stand for the same device."""
        one, other = _device_specs.canonical_name(device1), _device_specs.canonical_name(device2)
        self.assertEqual(one, other, f"Devices {device1} and {device2} are not equal.{_said(msg)}")

    # Errors.

    @contextlib.contextmanager
    def assertRaisesWithPredicateMatch(
        self, exception_type: type[Exception], expected_err_re_or_predicate: _Expected
    ) -> Iterator[None]:
        """Returns a context that must raise an error whose text matches a pattern, or for which a function is true."""
        expected = expected_err_re_or_predicate
        try:
            yield
        except Exception as error:
            matches = expected if callable(expected) else lambda error: re.search(expected, str(error))
            if not isinstance(error, exception_type) or not matches(error):
                wanted = f"{exception_type.__name__} that matches {expected!r}"
                raise AssertionError(f"Expected {wanted}, got {type(error).__name__}: {error}") from error
        else:
            self.fail(f"{exception_type.__name__} was not raised.")

    def assertRaisesOpError(self, expected_err_re_or_predicate: _Expected) -> AbstractContextManager[None]:
        """Returns a context that must raise a `tf.errors.OpError` which matches."""
        return self.assertRaisesWithPredicateMatch(ReplicaxError, expected_err_re_or_predicate)

    def assertRaisesIncompatibleShapesError(
        self, exception_type: type[Exception] = InvalidArgumentError
    ) -> AbstractContextManager[None]:
        """Returns a context that must raise an error about shapes that do not fit together."""
        return self.assertRaisesWithPredicateMatch(exception_type, _WRONG_SHAPES)


def _pair(case: unittest.TestCase, a: TensorLike, b: TensorLike, msg: object) -> tuple[np.ndarray, np.ndarray]:
    one, other = as_array(a), as_array(b)
    if one.shape != other.shape:
        contents = f", with contents {other}" if other.size < 500 else ""
        case.fail(f"Shape mismatch: expected {one.shape}, got {other.shape}{contents}.{_said(msg)}")
    return one, other


def _close(case: unittest.TestCase, a: Tree, b: Tree, rtol: float, atol: float, msg: object, where: str) -> None:
    a, b = _plain(a), _plain(b)
    if isinstance(a, Mapping) != isinstance(b, Mapping):
        raise ValueError(f"Can't compare dict to non-dict, a{where} vs b{where}.{_said(msg)}")
    if isinstance(a, Mapping):
        case.assertCountEqual(a.keys(), b.keys(), f"The keys of a{where} and b{where} differ.{_said(msg)}")
        for key in a:
            _close(case, a[key], b[key], rtol, atol, msg, f"{where}[{key}]")
        return
    nested = isinstance(a, (list, tuple)) and (_holds_structures(a) or as_array(a).dtype == object)
    if nested:
        if len(a) != len(b):
            case.fail(f"Mismatched length: a{where} has {len(a)} items, but b{where} has {len(b)}.{_said(msg)}")
        for index, (one, other) in enumerate(zip(a, b)):
            _close(case, one, other, rtol, atol, msg, f"{where}[{index}]")
        return
    one, other = map(_comparable, _pair(case, a, b, msg))
    close = np.isclose(one, other, rtol, atol, equal_nan=True)
    if not close.all():
        off = np.abs(one - other)
        listed = _listed(~close, ("first", one), ("second", other), ("difference", off))
        case.fail(
            f"Not equal to tolerance rtol={rtol}, atol={atol}: a{where} is different from b{where}.{_said(msg)}\n"
            f"{listed}\nof dtype {one.dtype}, shape {one.shape}"
        )


def _plain(value: Tree) -> Tree:
    """Returns a named tuple as a dict, and ragged rows as lists."""
    if hasattr(value, "_asdict"):
        return value._asdict()
    return _as_lists(value) if isinstance(value, RaggedTensor) else value


def _holds_structures(values: Sequence[Tree]) -> bool:
    return any(isinstance(leaf, RaggedTensor) for leaf in _nests.flatten(values)) or any(
        isinstance(value, Mapping) for value in values
    )


def _as_lists(value: TensorLike) -> object:
    return value.to_list() if isinstance(value, RaggedTensor) else as_array(value).tolist()
