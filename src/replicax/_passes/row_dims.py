"""What of a program depends on the number of rows, found out by tracing it for two numbers of rows.

Dimensions and constants that are the same in both traces do not depend on it. Dimensions that differ are `k * n`, and
constants that do are a few functions of `n`; everything else is refused. A constant may be another one with one row,
see `one_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from replicax._passes.jaxpr_graph import key_of, key_of_constant
from replicax._values import Kind

# For each axis of an array how many of its elements there are to a row of the batch; 0 where it has nothing to do with
# rows. Along an axis with k of them the first k * n elements are those of rows that count.
Rows = tuple[int, ...]


class NotExact(Exception):
    """A program does not compute the same with rows added that do not count; the message says why.

    Attributes:
        where: the user's line; empty if it is not known.
    """

    where = ""


class Sizes(NamedTuple):
    """The numbers of rows of two traces of a program: of the one that is computed, and of the one beside it."""

    most: int
    other: int

    @classmethod
    def of(cls, most: int) -> Sizes:
        """Returns the sizes of programs for at most so many rows.

        The other one is small, so that a way that the program goes with few rows alone is seen. One of them is even.
        """
        return cls(most, 3 if most % 2 == 0 else 2)

    @property
    def between(self) -> Sizes:
        """The same with 2 rows beside in place of 3, or 3 in place of 2."""
        return self._replace(other=5 - self.other)

    def rows_of(self, kind: Kind, other: Kind) -> Rows:
        """Returns which axes of an array are of rows, of its shapes in both traces."""
        if len(kind.shape) != len(other.shape) or kind.dtype != other.dtype:
            raise NotExact(f"an array is {kind.dtype}{list(kind.shape)} or {other.dtype}{list(other.shape)}")
        return tuple(map(self._factor, kind.shape, other.shape))

    def _factor(self, size: int, other: int) -> int:
        if size == other:
            return 0
        if size % self.most == 0 and size // self.most * self.other == other:
            return size // self.most
        raise NotExact(
            f"a dimension is {size} of {self.most} rows and {other} of {self.other}, which is no multiple of the rows"
        )

    def constant(self, one: np.ndarray, other: np.ndarray, alone: np.ndarray | None, count: jax.Array) -> jax.Array:
        """Returns a constant that is other in the two traces, as it is with `count` rows.

        Args:
            one, other: the constant in the two traces.
            alone: the same with one row; None if that is not known.
            count: the number of rows that count.
        """
        forms = self._forms(one, other, alone)
        wide = count if one.dtype.kind in "iub" else count.astype(jnp.promote_types(one.dtype, jnp.float32))
        value = jnp.asarray(one)
        for fits, form in forms:
            value = jnp.where(fits, jnp.asarray(form(wide)).astype(one.dtype), value)
        value = value if alone is None else jnp.where(count == 1, jnp.asarray(alone), value)
        return jnp.where(count == self.most, jnp.asarray(one), value)

    def constant_of_one_row(self, one: Any, other: Any, kind: Kind, rows: Rows) -> Any:
        """Returns a constant of the two traces as it is to be with one row; None if that cannot be told."""
        if one is other and not any(rows):
            return as_constant(one, kind)
        if is_key(one) or is_key(other):
            return one if not any(rows) and are_same(one, other) else None
        shape = tuple(slice(k or None) for k in rows)
        first, second = (np.asarray(x, kind.dtype)[shape] for x in (one, other))
        if are_same(first, second):
            return first
        try:
            forms = [] if any(rows) else self._forms(first, second, None)
        except NotExact:
            return None
        return _with_one_row(first, forms) if forms else None

    def foresee(self, one: np.ndarray, other: np.ndarray, alone: np.ndarray) -> bool:
        """Returns whether the two traces foretell the constant of one row.

        If they do not, the function treats few rows in a way of its own, and it is unknown up to how many: a trace with
        `between` has to tell. So it has for 4 rows, where functions of other kinds happen to fit three numbers.
        """
        if self.most <= 3:
            return True
        forms = self._forms(one, other, alone)
        if not forms:
            return are_same(one, alone)
        found, expected = (x.astype(np.float64) for x in (_with_one_row(one, forms), alone))
        return self.most != 4 and np.allclose(found, expected, 4 * _near(one.dtype), 0.0, equal_nan=True)

    def _forms(
        self, one: np.ndarray, other: np.ndarray, alone: np.ndarray | None
    ) -> list[tuple[np.ndarray, Callable[[Any], Any]]]:
        """Returns functions of the number of rows, each with the elements that it computes; all others are the same.

        Two numbers tell apart what is proportional, or inversely, or one more or less; with a third one a few others.
        """
        dtype, (most, few) = one.dtype, self
        if one.shape != other.shape or dtype != other.dtype:
            raise NotExact(f"a constant is {_text(one)} or {_text(other)}")
        left = ~np.asarray(one == other)
        forms: list[tuple[np.ndarray, Callable[[Any], Any]]] = []
        if not (left.any() and (dtype.kind in "iuf" or dtype == jnp.bfloat16)):
            return forms if not left.any() else self._refuse(one, other)
        exact, eps, near = dtype.kind in "iu", _eps(dtype), _near(dtype)
        x, y = one.astype(np.float64), other.astype(np.float64)

        def add(fits: np.ndarray, coefficients: Sequence[np.ndarray], form: Callable[..., Any]) -> None:
            nonlocal left
            whole = [np.all(c % 1 == 0) if exact else True for c in coefficients]
            fits = fits & left
            if not fits.any() or not all(whole):
                return
            types = np.int64 if exact else np.float64
            own = [np.where(fits, c, 0).astype(types) for c in coefficients]
            forms.append((fits, lambda n: form(n, *(c.astype(n.dtype) for c in own))))
            left = left & ~fits

        with np.errstate(all="ignore"):
            last = np.broadcast_to(np.nan, x.shape) if alone is None else alone.astype(np.float64)
            # Quotients that are rounded to whole numbers may be proportional by chance.
            linear = np.isclose(x / most, last, 4 * near, 0.0) | (x % most == 0) | (alone is None)
            add(linear & np.isclose(x * few, y * most, near, 0.0), [x / most], lambda n, c: c * n)
            shifted = (y - x == few - most) & (abs(x - most) == 1)
            # Four rows or three tell too little.
            if most == 4 and alone is not None:
                shifted = shifted & (alone - y == 1 - few)
            add(shifted, [x - most], lambda n, c: n + c)
            if not exact:
                inverse = np.isclose(x * most, last, 4 * near, 0.0) | (alone is None)
                add(inverse & np.isclose(x * most, y * few, near, 0.0), [x * most], lambda n, c: c / _at_least_one(n))
            if alone is not None and (exact or eps < 1e-4):
                z, slope = alone.astype(np.float64), (x - y) / (most - few)
                offset = x - slope * most
                add(np.isclose(slope + offset, z, 4 * near, 0.0), [slope, offset], lambda n, a, b: a * n + b)
                fits = np.isclose(z * most * most, x, 4 * near, 0.0) & np.isclose(z * few * few, y, 4 * near, 0.0)
                add(fits, [z], lambda n, c: c * n * n)
                half = x / (most * (most - 1) / 2)
                fits = (most != 4) & (z == 0) & np.isclose(half * few * (few - 1) / 2, y, 4 * near, 0.0)
                add(fits, [half], lambda n, c: c * (n * (n - 1) / 2 if not exact else n * (n - 1) // 2))
                if not exact:
                    fits = np.isclose(z, x * most * most, 4 * near, 0.0) & np.isclose(z, y * few * few, 4 * near, 0.0)
                    add(fits, [z], lambda n, c: c / _at_least_one(n * n))
        return forms if not left.any() else self._refuse(one, other)

    def _refuse(self, one: np.ndarray, other: np.ndarray) -> NoReturn:
        raise NotExact(
            f"a constant is {_text(one)} with {self.most} rows and {_text(other)} with {self.other}: no multiple of "
            "the number of rows, and no multiple of its inverse"
        )


def _eps(dtype: np.dtype) -> float:
    return 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _near(dtype: np.dtype) -> float:
    eps = _eps(dtype)
    return 4 * eps if eps < 1e-4 else 1.01 * eps


def _with_one_row(one: np.ndarray, forms: Sequence[tuple[np.ndarray, Callable[[Any], Any]]]) -> np.ndarray:
    """Returns a constant that these functions compute, as it is with one row."""
    value, alone = one, np.ones((), np.int64 if one.dtype.kind in "iu" else np.float64)
    for fits, form in forms:
        value = np.where(fits, form(alone).astype(one.dtype), value)
    return value


def _at_least_one(n: Any) -> Any:
    return n + (n == 0).astype(n.dtype)


def _text(array: np.ndarray) -> str:
    return str(array.item()) if array.size == 1 else f"an array {array.dtype}{list(array.shape)}"


def are_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two constants are the same."""
    return key_of_constant(one, exact=False) == key_of_constant(other, exact=False)


def are_alike(one: object, other: object) -> bool:
    """Returns whether parameters, or jaxprs, are the same in both traces, so that they do not depend on the rows."""
    return key_of(one, exact=False) == key_of(other, exact=False)


def as_constant(value: Any, kind: Kind) -> Any:
    """Returns a constant as an array of its kind: an array as it is, so that it can be recognized."""
    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value, kind.dtype)


def is_key(value: object) -> bool:
    """Returns whether a constant is a key of random numbers, which is no array of NumPy."""
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))
