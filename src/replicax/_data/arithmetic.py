"""Simple arithmetic on whole batches, done by numpy.

What a `map` computes of a batch is often a cast, a factor and a difference. JAX makes a new array in each of these
operations, and moves a megabyte through the memory each time to do next to nothing with it. Numpy does one after the
other in one place, which stays in the processor's cache, in the thread that made the batch.

That is for operations alone whose results are, to the last bit, those of JAX's own on CPU devices, called one by one.
There is one exception: what is too small for a normal float (below 1.2e-38) stays, where they take it for 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np

from replicax._data.iterators import call, call_to_host
from replicax._recycled import LARGE, Pool, settle
from replicax._specs import has_64_bit_types

_SAME_ELEMENTS = {"reshape", "squeeze", "broadcast_in_dim", "copy", "copy_p"}
_OPERATIONS: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative}
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

PATIENCE = 0.2  # seconds that calls of a function take before it is looked at

_Step = Callable[[list[Any], Pool], None]  # computes one of a list of values


class Arithmetic:
    """A jaxpr of such operations, for arrays on the host. `steps` is None where there are others in it.

    >>> closed = jax.make_jaxpr(lambda x: x * 2 - 1.5)(np.zeros(3, np.float32))
    >>> Arithmetic(closed)([np.arange(3, dtype=np.float32)], Pool())
    [array([-1.5,  0.5,  2.5], dtype=float32)]
    """

    def __init__(self, closed: Any):
        jaxpr = closed.jaxpr
        self._places = {var: place for place, var in enumerate(jaxpr.invars)}
        self._last = {var: eqn for eqn in jaxpr.eqns for var in eqn.invars if not isinstance(var, jex.Literal)}
        self._own: set[int] = set()  # places of arrays that were made here and that no other place shares
        self._made_here: set[int] = set()  # and of all that were made here
        self.steps: list[_Step] | None = None
        if jaxpr.constvars or jaxpr.effects or not _are_variables(jaxpr.outvars):
            return
        self._last |= dict.fromkeys(jaxpr.outvars)
        steps: list[_Step] = []
        for eqn in jaxpr.eqns:
            if (step := self._step(eqn)) is None:
                return
            steps.append(step)
        self.steps, self._outputs = steps, [self._places[var] for var in jaxpr.outvars]

    def __call__(self, arrays: Sequence[np.ndarray], pool: Pool) -> list[np.ndarray]:
        """The results, which nobody may write; some may be arrays that went in."""
        assert self.steps is not None
        values: list[Any] = [*arrays, *[None] * len(self.steps)]
        with np.errstate(all="ignore"):
            for step in self.steps:
                step(values, pool)
        for place in self._made_here:
            settle(values[place])
        return [values[place] if place in self._made_here else pool.settled(values[place]) for place in self._outputs]

    def _step(self, eqn: Any) -> _Step | None:
        avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
        if len(eqn.outvars) != 1 or any(not hasattr(a, "dtype") or a.dtype.kind not in "biuf" for a in avals):
            return None
        (out,), name = eqn.outvars, eqn.primitive.name
        self._places[out] = place = len(self._places)
        shape, dtype, first = out.aval.shape, out.aval.dtype, avals[0]
        if name in _SAME_ELEMENTS and len(eqn.invars) == 1 and first.size == out.aval.size and first.shape:
            if name == "reshape" and eqn.params["dimensions"] is not None:
                return None
            return self._view(eqn, place, shape)
        if any(aval.shape not in (shape, ()) for aval in avals):
            return None
        if name == "convert_element_type" and _converts_alike(first.dtype, dtype):
            return self._made(eqn, place, lambda result, a: np.copyto(result, a, casting="unsafe"))
        if name == "div" and dtype in _FLOATS:
            divisor = eqn.invars[1]
            if not isinstance(divisor, jex.Literal):
                return self._made(eqn, place, _into(np.divide)) if first.shape == divisor.aval.shape else None
            with np.errstate(all="ignore"):
                factor = 1 / np.asarray(divisor.val, dtype)[()]
            # XLA multiplies by the reciprocal.
            if not np.isfinite(factor) or abs(factor) < np.finfo(dtype).tiny:
                return None
            return self._made(eqn, place, lambda result, a, _: np.multiply(a, factor, out=result))
        if name in _OPERATIONS and (dtype in _FLOATS or dtype.kind in "iu"):
            return self._made(eqn, place, _into(_OPERATIONS[name]))
        return None

    def _view(self, eqn: Any, place: int, shape: tuple[int, ...]) -> _Step | None:
        (operand,) = eqn.invars
        source = self._places[operand]
        self._own.discard(source)
        if source in self._made_here:
            self._made_here.add(place)

        def step(values: list[Any], pool: Pool) -> None:
            values[place] = values[source].reshape(shape)

        return step

    def _made(self, eqn: Any, place: int, compute: Callable[..., Any]) -> _Step:
        """The step that has `compute(result, *operands)` fill an array: a new one, or that of an operand."""
        aval: Any = eqn.outvars[0].aval
        shape, dtype = aval.shape, aval.dtype
        constants = [_constant(v) if isinstance(v, jex.Literal) else None for v in eqn.invars]
        sources = [-1 if isinstance(v, jex.Literal) else self._places[v] for v in eqn.invars]
        reused = next((self._places[v] for v in eqn.invars if self._is_free(v, eqn, shape, dtype)), None)
        self._own.add(place)
        self._made_here.add(place)

        large = aval.size * dtype.itemsize >= LARGE

        def step(values: list[Any], pool: Pool) -> None:
            if reused is not None:
                result = values[reused]
            else:
                result = pool.empty(shape, dtype) if large else np.empty(shape, dtype)
            compute(result, *(c if c is not None else values[source] for c, source in zip(constants, sources)))
            values[place] = result

        return step

    def _is_free(self, var: Any, eqn: Any, shape: tuple[int, ...], dtype: Any) -> bool:
        if isinstance(var, jex.Literal) or self._places[var] not in self._own or self._last[var] is not eqn:
            return False
        return var.aval.shape == shape and var.aval.dtype == dtype


def _constant(literal: Any) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)


def _are_variables(atoms: Sequence[Any]) -> bool:
    return not any(isinstance(atom, jex.Literal) for atom in atoms)


def _into(ufunc: Any) -> Callable[..., Any]:
    return lambda result, *operands: ufunc(*operands, out=result)


def _converts_alike(source: Any, target: Any) -> bool:
    """Whether numpy and XLA make the same of each value: not of floats that are too large for an integer, and NaN."""
    if target in _FLOATS:
        return source in _FLOATS or source.kind in "biu"
    return target.kind in "iu" and source.kind in "biu"


class Computed(NamedTuple):
    """What a function computes: a jaxpr, and which of its outputs make what structure."""

    jaxpr: Any
    structure: Any
    places: list[int]
    holds: Callable[[], bool]  # whether it still computes that


# Set by the engine: what a function computes of such arguments, where that is known.
computed: Callable[..., Computed | None] | None = None


_ROLE = "`map_func` of `Dataset.map`"


class Mapped:
    """A function of elements, on the host. Once its calls have taken a while, numpy does it, if it is as simple."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self._pool = function, Pool()
        self._spent = 0.0  # seconds
        self._simple: _Simple | None = None

    @property
    def is_simple(self) -> bool:
        """Whether calls are a matter of the host, and of a moment."""
        return self._simple is not None

    def __call__(self, element: Any) -> Any:
        simple = self._simple
        if simple is not None and not simple.holds():
            simple = self._simple = None
        if simple is not None and simple.takes(element):
            return simple.result(element, self._pool)
        begin = time.perf_counter()
        result = call_to_host(_ROLE, self._function, self._pool, element)
        self._spent += time.perf_counter() - begin
        if self._spent > PATIENCE and computed is not None:
            self._spent = -math.inf  # it is looked at once
            self._simple = self._as_simple(element)
        return result

    def _as_simple(self, element: Any) -> _Simple | None:
        assert computed is not None
        found, function = computed, self._function
        known = call(_ROLE, lambda *tensors: found(function, *tensors), element, self._pool)
        arithmetic = None if known is None else Arithmetic(known.jaxpr)
        return None if arithmetic is None or arithmetic.steps is None else _Simple(element, known, arithmetic)


class _Simple:
    """A function for elements of one kind."""

    def __init__(self, element: Any, known: Computed, arithmetic: Arithmetic):
        self.holds, self._known, self._arithmetic = known.holds, known, arithmetic
        self._kind, self._dtypes = _kind(element), [aval.dtype for aval in known.jaxpr.in_avals]

    def takes(self, element: Any) -> bool:
        """Whether this is such an element."""
        return self._kind == _kind(element)

    def result(self, element: Any, pool: Pool) -> Any:
        """What the function makes of it."""
        # As JAX does it, 64 bits become 32 where it is set to that.
        arrays = [a.astype(dtype, copy=False) for a, dtype in zip(jax.tree.leaves(element), self._dtypes)]
        results = self._arithmetic(arrays, pool)
        return self._known.structure.unflatten([results[place] for place in self._known.places])


def _kind(element: Any) -> Any:
    leaves, structure = jax.tree.flatten(element)
    return structure, [(getattr(a, "shape", None), getattr(a, "dtype", None)) for a in leaves], has_64_bit_types()
