"""Arrays of which each replica has a part, and programs computed on the parts.

An array is *cut* for n replicas by raveling it, filling it up with zeros to a multiple of n, and giving each replica
one piece in order. What is small stays whole on each: its parts would save little memory and cost a program as much as
large ones, while whole arrays can stand in packs (see `_packs`).

`evaluate` computes any program on parts. Most of an optimizer goes element by element, and does so on the parts as on
the whole. A reduction to one number (a norm, "are all finite?") reduces the part and then meets the other replicas. All
else gets the whole array, gathered from all replicas, and so is right, if not cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _collectives, _packs, _vectors
from replicax._values import AXIS
from replicax._vectors import ELEMENTWISE

# Whose result has the elements of the operand in the same order, if it has as many.
_IN_ORDER = {"reshape", "squeeze", "broadcast_in_dim", "reshard", "sharding_constraint"}
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"}


FEWEST = 1 + _packs.LARGEST // 4  # elements: in float32 what is too large for a pack


def is_cut(kind: Any, count: int) -> bool:
    """Whether an array of this shape and dtype is cut for so many replicas."""
    if jnp.issubdtype(kind.dtype, jax.dtypes.extended) or len(kind.shape) == 0:
        return False
    return kind.size >= max(count, FEWEST) and count > 1


def length(kind: Any, count: int) -> int:
    """How many elements each part has."""
    return -(-kind.size // count)


def as_rows(array: Any, count: int) -> Any:
    """An array `[count, length]` whose rows are the parts."""
    module: Any = np if isinstance(array, np.ndarray) else jnp
    flat = module.ravel(array)
    padding = length(array, count) * count - array.size
    return module.reshape(module.pad(flat, (0, padding)) if padding else flat, (count, -1))


def of_rows(rows: Any, shape: Sequence[int]) -> Any:
    """The array whose parts are the rows."""
    size = int(np.prod(shape, dtype=np.int64))
    flat = jnp.ravel(rows)
    return jnp.reshape(flat if flat.size == size else lax.slice(flat, (0,), (size,)), shape)


class Part:
    """One replica's part of an array of this shape, inside of `shard_map`."""

    def __init__(self, part: Any, shape: Sequence[int], known: Any = None):
        self.part, self.shape = part, tuple(shape)
        self._whole = known

    def whole(self) -> Any:
        """The array, from all replicas."""
        if self._whole is None:
            self._whole = of_rows(lax.all_gather(self.part, AXIS), self.shape)
        return self._whole


class _Same:
    """An array that is the same at each place."""

    def __init__(self, value: Any, shape: Sequence[int]):
        self.value, self.shape = value, tuple(shape)


def own_part(value: Any, count: int) -> Any:
    """This replica's part of a value, as an array."""
    if isinstance(value, Part):
        return value.part
    if isinstance(value, _Same):
        size = int(np.prod(value.shape, dtype=np.int64))
        return jnp.broadcast_to(value.value, (-(-size // count),))
    return lax.dynamic_index_in_dim(as_rows(value, count), lax.axis_index(AXIS), keepdims=False)


def whole(value: Any) -> Any:
    """A value as an array with all its elements."""
    if isinstance(value, Part):
        return value.whole()
    return jnp.broadcast_to(value.value, value.shape) if isinstance(value, _Same) else value


def known_part(array: Any, count: int) -> Any:
    """This replica's part of an array that all replicas have; what is not cut as it is."""
    return Part(own_part(array, count), array.shape, array) if is_cut(array, count) else array


def sums(
    leaves: Sequence[Any],
    count: int,
    packs: Callable[[list[Any]], list[list[int]]],
    scatter: Callable[[Any], Any],
    apart: bool = False,
) -> list[Any]:
    """This replica's parts of the sums over the replicas of leaves that are cut.

    Those of one pack are the columns of one array `[count, ...]`, of which `scatter` leaves each replica the sum of one
    row.
    """
    results: list[Any] = [None] * len(leaves)
    before: Any = None
    for group in reversed(packs(list(leaves))):
        columns = [as_rows(leaves[i], count) for i in group]
        block = columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1)
        total = scatter(block if before is None else _collectives.after(before, block))
        before = total if apart and total.size else before
        start = 0
        for i, column in zip(group, columns):
            results[i] = lax.slice(total, (start,), (start + column.shape[1],))
            start += column.shape[1]
    return results


def gathered(
    values: Sequence[Any],
    packs: Callable[[list[Any]], list[list[int]]] = _collectives.packs_by_dtype,
    apart: bool = False,
) -> list[Any]:
    """The whole arrays of some values, the parts of one pack in one message; a pack is of one dtype."""
    results = [None if isinstance(value, Part) else whole(value) for value in values]
    parts = [i for i, value in enumerate(values) if isinstance(value, Part)]
    before: Any = None
    for group in packs([jax.ShapeDtypeStruct(values[i].shape, values[i].part.dtype) for i in parts]) if parts else ():
        own = [values[parts[j]] for j in group]
        sent = own[0].part if len(own) == 1 else jnp.concatenate([x.part for x in own])
        rows = lax.all_gather(sent if before is None else _collectives.after(before, sent), AXIS)
        before = rows if apart and rows.size else before
        start = 0
        for j, value in zip(group, own):
            end = start + value.part.size
            results[parts[j]] = of_rows(lax.slice(rows, (0, start), (rows.shape[0], end)), value.shape)
            start = end
    return results


def evaluate(closed: Any, args: Sequence[Any], count: int) -> list[Any]:
    """What the program of a closed jaxpr computes of arrays and parts, for so many replicas: arrays and parts."""
    return _Evaluation(count).run(closed.jaxpr, closed.consts, args)


_NOTHING: Any = None  # in place of the first output's type, where there is none


class _Evaluation:
    def __init__(self, count: int):
        self._count = count

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))

        def of(atom: Any) -> Any:
            kind: Any = atom.aval
            return jnp.asarray(atom.val, kind.dtype) if isinstance(atom, jex.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._outputs(jaxpr, eqn, [of(atom) for atom in eqn.invars])))
        return [of(atom) for atom in jaxpr.outvars]

    def _outputs(self, jaxpr: Any, eqn: Any, args: list[Any]) -> list[Any]:
        name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else _NOTHING
        if name in _CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)
        if name == "broadcast_in_dim" and is_cut(out, self._count) and _is_number(args[0]):
            return [_Same(_array(args[0]), out.shape)]
        if not any(isinstance(arg, (Part, _Same)) for arg in args):
            return _computed(jaxpr, eqn, args)
        if name == "cond" and any(isinstance(arg, Part) for arg in args):
            return self._branches(eqn, args)
        result: Any = None
        if name in ELEMENTWISE and any(isinstance(arg, Part) for arg in args):
            result = Part(eqn.primitive.bind(*(self._aligned(arg, out) for arg in args), **eqn.params), out.shape)
        elif name in ELEMENTWISE and all(_is_number(arg) for arg in args):
            result = _Same(eqn.primitive.bind(*(_array(arg) for arg in args), **eqn.params), out.shape)
        elif name in _IN_ORDER and isinstance(args[0], Part) and out.size == _size(args[0].shape):
            if eqn.params.get("dimensions") is None or name == "squeeze":  # else `reshape` transposes first
                result = Part(args[0].part, out.shape)
        elif name in _REDUCTIONS and isinstance(args[0], Part) and out.size == 1:
            result = self._reduced(name, args[0], out)
        elif name == "dot_general" and out.ndim == 0:
            result = self._product(eqn, args, out)
        return [result] if result is not None else _computed(jaxpr, eqn, [whole(arg) for arg in args])

    def _aligned(self, arg: Any, out: Any) -> Any:
        """The part of an operand, which is as large as the result or repeated along some dimensions."""
        if tuple(arg.shape) != tuple(out.shape):
            arg = _Same(_array(arg), out.shape) if _is_number(arg) else jnp.broadcast_to(whole(arg), out.shape)
        return own_part(arg, self._count)

    def _product(self, eqn: Any, args: list[Any], out: Any) -> Any:
        """The sum of the products of all elements; None for another product."""
        (left, right), _ = eqn.params["dimension_numbers"]
        if not tuple(left) == tuple(right) == tuple(range(len(args[0].shape))):
            return None
        first, second = (own_part(arg, self._count).astype(out.dtype) for arg in args)
        return self._reduced("reduce_sum", Part(first * second, args[0].shape), out)

    def _reduced(self, name: str, value: Part, out: Any) -> Any:
        """All elements of an array reduced to one; None for what is not done on parts."""
        part, size = value.part, _size(value.shape)
        if name in ("reduce_and", "reduce_or"):
            if part.dtype != jnp.bool_:
                return None
            part = part.astype(jnp.int32)
        elif jnp.issubdtype(part.dtype, jnp.complexfloating) and name != "reduce_sum":
            return None
        neutral, reduce, meet = _REDUCTIONS[name]
        if part.size * self._count != size:
            place = lax.axis_index(AXIS) * part.size + jnp.arange(part.size)
            part = jnp.where(place < size, part, neutral(part.dtype))
        return jnp.reshape(meet(reduce(part)), out.shape).astype(out.dtype)

    def _branches(self, eqn: Any, args: list[Any]) -> list[Any]:
        """A branch on a number that is the same on all replicas."""
        kinds = [var.aval for var in eqn.outvars]

        def branch(closed: Any) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                own = [Part(arg.part, arg.shape) if isinstance(arg, Part) else arg for arg in args[1:]]
                results = self.run(closed.jaxpr, closed.consts, own)
                return [
                    own_part(x, self._count) if is_cut(k, self._count) else whole(x) for x, k in zip(results, kinds)
                ]

            return run

        results = lax.switch(args[0], [branch(closed) for closed in eqn.params["branches"]])
        return [Part(x, kind.shape) if is_cut(kind, self._count) else x for x, kind in zip(results, kinds)]


def _is_number(value: Any) -> bool:
    """Whether a value is the same at each place."""
    return isinstance(value, _Same) or (not isinstance(value, Part) and value.ndim == 0)


def _array(value: Any) -> Any:
    return value.value if isinstance(value, _Same) else value


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _computed(jaxpr: Any, eqn: Any, args: list[Any]) -> list[Any]:
    """The outputs of one equation of whole arrays."""
    known = {atom: arg for atom, arg in zip(eqn.invars, args) if not isinstance(atom, jex.Literal)}
    results = dict(_vectors.computed(jaxpr, [eqn], known.__getitem__))
    return [results.get(var) for var in eqn.outvars]


def _least(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _min_of_all(x: Any) -> Any:
    return lax.pmin(x, AXIS)


def _max_of_all(x: Any) -> Any:
    return lax.pmax(x, AXIS)


# For each reduction, what changes nothing in it, and how it is made on a part and on all replicas' results.
_REDUCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "reduce_sum": (lambda dtype: 0, lambda x: jnp.sum(x, dtype=x.dtype), _collectives.local_sum),
    "reduce_max": (_least, jnp.max, _max_of_all),
    "reduce_min": (_greatest, jnp.min, _min_of_all),
    "reduce_and": (lambda dtype: 1, jnp.min, _min_of_all),
    "reduce_or": (lambda dtype: 0, jnp.max, _max_of_all),
}
