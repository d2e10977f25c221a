"""A program for any number of rows up to the one that it was traced for: other rows are computed, and masked.

The last batch of an epoch is padded to the size of the others, so that one program serves all. The program is traced
for that size and for another one, see `row_dims`. The first trace is computed, with the number of rows that count as an
input: constants that depend on it are computed from it, and wherever rows are combined (in sums, contractions, maxima),
those that do not count are masked. Whatever else is computed for them is never looked at. A replica may have no rows
that count: the mean of none is 0, in place of NaN.

A primitive has a rule in `row_rules` that says whether it treats each row by itself, or how to mask. One without a rule
is refused where it meets rows.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import jax_internals
from replicax._base.jaxprs import AnyJaxpr, Atom, checkpoint_like, jaxprs_in, kind_of, opened, scan_like
from replicax._passes import row_rules
from replicax._passes.one_row import (
    OF_SHAPES,
    Computed,
    Constant,
    Entry,
    Place,
    Table,
    does_nothing,
    is_constant,
    with_one_row,
)
from replicax._passes.primitives import CHECKPOINTS, COLLECTIVES, IN_CALLS
from replicax._passes.row_dims import NotExact, Rows, Sizes, are_alike, are_same, is_key
from replicax._tracing import frames
from replicax._values import Kind

_CONSTANT, _COUNT, _DATA = range(3)  # of what a value is computed: of constants, of the number of rows too, of others


class _Value(NamedTuple):
    array: jax.Array
    rows: Rows
    source: int
    place: Place  # of the value that is the same with one row


class _Constant(NamedTuple):
    """A constant that is not computed yet: only its use tells what it is with one row."""

    one: Any
    other: Any
    kind: Kind
    rows: Rows
    place: Constant


_Operand: TypeAlias = _Value | _Constant


def evaluated(
    closed: jex.ClosedJaxpr,
    *args: jax.Array,
    other: jex.ClosedJaxpr,
    alone: jex.ClosedJaxpr,
    sizes: Sizes,
    count: jax.Array,
    variables: Mapping[int, Hashable] = types.MappingProxyType({}),
    unforeseen: Callable[[], None] = lambda: None,
) -> list[jax.Array]:
    """Computes a jaxpr for rows of which the first `count` count.

    Args:
        closed: traced for `sizes.most` rows.
        args: its arguments, with so many rows.
        other, alone: the same, traced for `sizes.other` rows and for a single one.
        sizes: the numbers of rows.
        count: how many count, an int32 scalar.
        variables: for each slot of an input of the traces' levels, which leaf of a variable it is.
        unforeseen: called where the function treats a single row in a way of its own, see `Sizes.foresee`.

    Raises:
        NotExact: the rows that do not count would have a part in what is computed.
    """
    pairs = zip(args, closed.jaxpr.invars, other.jaxpr.invars, strict=True)
    values = [
        _Value(_given(array), sizes.rows_of(kind_of(one), kind_of(two)), _DATA, Computed()) for array, one, two in pairs
    ]
    program = _Program(sizes, count, variables, unforeseen)
    return [value.array for value in program.run_whole(closed, other, alone, values)]


def rows_of_outputs(closed: jex.ClosedJaxpr, other: jex.ClosedJaxpr, sizes: Sizes) -> list[Rows]:
    """Returns which axes of a jaxpr's outputs are of rows."""
    return [sizes.rows_of(kind_of(x), kind_of(y)) for x, y in zip(closed.jaxpr.outvars, other.jaxpr.outvars)]


def _given(array: jax.Array) -> jax.Array:
    return _undifferentiated(array) if jnp.issubdtype(array.dtype, jnp.inexact) else array


@jax.custom_jvp
def _undifferentiated(given: jax.Array) -> jax.Array:
    """Returns what is given to a padded program, through which no derivative passes.

    That of what is computed for rows which do not count may be NaN, and zero times that is no longer masked. Custom
    derivatives may combine rows.
    """
    return given


@_undifferentiated.defjvp
def _refuse_derivative(*_: object) -> NoReturn:
    raise ValueError(
        "What `strategy.run` computes of a padded batch (InputOptions(pad_last_batch=True)) cannot be differentiated "
        "outside of it: open the GradientTape, or call jax.grad, in the replica function, or leave pad_last_batch out."
    )


class _Program:
    """Computes jaxprs of the first trace, beside those of the second."""

    def __init__(
        self, sizes: Sizes, count: jax.Array, variables: Mapping[int, Hashable], unforeseen: Callable[[], None]
    ):
        self._sizes, self._count, self._variables, self._unforeseen = sizes, count, variables, unforeseen

    def run_whole(self, jaxpr: AnyJaxpr, other: AnyJaxpr, alone: AnyJaxpr, args: Sequence[_Value]) -> list[_Value]:
        """Computes a jaxpr that is one of its own in the trace with one row as well."""
        if len(opened(alone)[0].invars) != len(args):
            raise NotExact(_OTHER_WAY_ALONE)
        table = Table(alone, [value.place for value in args], self._variables)
        found = [*map(self._resolved, self._run(jaxpr, other, table, args), table.results)]
        shapes = [with_one_row(kind_of(x).shape, value.rows) for x, value in zip(opened(jaxpr)[0].outvars, found)]
        if [kind_of(x).shape for x in opened(alone)[0].outvars] != shapes:
            raise NotExact("the shapes of what the function returns are others with a single row")
        return found

    def _run(self, jaxpr: AnyJaxpr, other: AnyJaxpr, table: Table, args: Sequence[_Operand]) -> list[_Operand]:
        (first, consts), (second, other_consts) = opened(jaxpr), opened(other)
        if len(first.eqns) != len(second.eqns) or len(consts) != len(other_consts):
            raise NotExact("the function takes another way with another number of rows")
        known: dict[jex.Var, _Operand] = {}
        twins: dict[jex.Var, Atom] = {}

        def add(variables: Sequence[jex.Var], others: Sequence[jex.Var], values: Sequence[_Operand]) -> None:
            known.update(zip(variables, values))
            twins.update(zip(variables, others))

        def value_of(atom: Atom, twin: Atom) -> _Operand:
            if isinstance(atom, jex.Literal) and isinstance(twin, jex.Literal):
                return self._constant(atom.val, twin.val, kind_of(atom), kind_of(twin), table)
            if isinstance(atom, jex.Literal) or twins[atom] is not twin:
                raise NotExact("the function computes with other values with another number of rows")
            return known[atom]

        kinds, other_kinds = map(kind_of, first.constvars), map(kind_of, second.constvars)
        constants = [self._constant(*each, table) for each in zip(consts, other_consts, kinds, other_kinds)]
        add(first.constvars, second.constvars, constants)
        add(first.invars, second.invars, args)
        for eqn, twin in zip(first.eqns, second.eqns):
            try:
                if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
                    raise NotExact("the function takes another way with another number of rows")
                operands = [*map(value_of, eqn.invars, twin.invars)]
                add(eqn.outvars, twin.outvars, self._equation(eqn, twin, table, operands))
            except NotExact as error:
                error.where = error.where or jax_internals.users_line(eqn)
                raise
        return [*map(value_of, first.outvars, second.outvars)]

    def _constant(self, one: Any, other: Any, kind: Kind, twin: Kind, table: Table) -> _Operand:
        rows = self._sizes.rows_of(kind, twin)
        if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
            if one is not other:
                raise NotExact("the function computes with other values with another number of rows")
            return _Value(_given(one), rows, _DATA, table.of_tracer(one))
        place = Constant(self._sizes.constant_of_one_row(one, other, kind, rows))
        return _Constant(one, other, kind, rows, place)

    def _resolved(self, operand: _Operand, alone: Place | None) -> _Value:
        """Returns the value of an operand that has this place with one row; None if that does not matter."""
        if isinstance(alone, Constant):
            if isinstance(operand, _Constant):
                return self._computed_constant(operand, alone.value)
            if isinstance(operand.place, Constant) and is_constant(operand.place, alone.value):
                return operand
        elif alone is None or operand.place is alone:
            return operand if isinstance(operand, _Value) else self._computed_constant(operand, None)
        raise NotExact(_OTHER_WAY_ALONE)

    def _computed_constant(self, constant: _Constant, alone: Any) -> _Value:
        one, other, kind, rows, place = constant
        as_alone = alone is None or is_constant(place, alone)
        if one is other or is_key(one) or is_key(other):
            is_same = one is other or is_constant(Constant(one), other)
        else:
            one, other = (np.asarray(value, kind.dtype) for value in (one, other))
            is_same = are_same(one, other[tuple(map(slice, one.shape))])
        if is_same and as_alone:
            return _Value(one, rows, _CONSTANT, place)
        if any(rows) or is_key(one):
            raise NotExact(f"a constant {kind.dtype}{list(kind.shape)} is another with another number of rows")
        last = None if alone is None else np.asarray(alone, kind.dtype).reshape(kind.shape)
        one, other = np.asarray(one), np.asarray(other)
        if last is not None and not self._sizes.foresee(one, other, last):
            self._unforeseen()
        value = self._sizes.constant(one, other, last, self._count)
        return _Value(value, rows, _COUNT, place)

    def _equation(
        self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, table: Table, given: list[_Operand]
    ) -> Sequence[_Operand]:
        name = eqn.primitive.name
        if name in IN_CALLS:
            inner = [each.params[IN_CALLS[name]] for each in (eqn, twin)]
            if name in CHECKPOINTS:
                return self._checkpoint(eqn, lambda operands: self._run(inner[0], inner[1], table, operands), given)
            return self._run(inner[0], inner[1], table, given)
        rows = [self._sizes.rows_of(kind_of(x), kind_of(y)) for x, y in zip(eqn.outvars, twin.outvars)]
        if frames.is_input(eqn):
            if table.of_input(eqn) is not table.of_input(twin):
                raise NotExact("the function reads other variables with another number of rows")
            (array,) = jax_internals.rebind(eqn, eqn.params, [])
            return [_Value(_given(array), rows[0], _DATA, table.of_input(eqn))]
        found = self._looked_up(eqn, table, given, rows)
        entry, places, operands = found or (None, (), [self._resolved(operand, None) for operand in given])
        source = max((operand.source for operand in operands), default=_CONSTANT)
        arrays = [operand.array for operand in operands]
        of_rows = any(any(each) for each in [*rows, *(operand.rows for operand in operands)])
        has_jaxprs = any(jaxprs_in([*eqn.params.values()]))
        if has_jaxprs and name in _NESTED:
            if eqn.params.get("length") != twin.params.get("length"):
                raise NotExact("a loop goes over the rows one by one")
            if entry is None:
                raise NotExact(_OTHER_WAY_ALONE)
            if of_rows or not _are_all_alike(eqn, twin, entry.eqn):
                arrays, source = _NESTED[name](self, eqn, twin, entry.eqn, operands), _DATA
            else:
                arrays, source = jax_internals.rebind(eqn, eqn.params, arrays), _DATA
        elif of_rows:
            if name in COLLECTIVES:
                raise NotExact(f"the replicas exchange rows by themselves, in {name!r}; combine each replica's first")
            _refuse_other_params(eqn, twin)
            arrays = row_rules.computed(eqn, arrays, [operand.rows for operand in operands], rows, self._masked)
            source = max(source, _COUNT)
        else:
            of_alone = [entry.eqn] if entry is not None and has_jaxprs else []
            if not _are_all_alike(eqn, twin, *of_alone):
                raise NotExact(f"parameters of {name!r} depend on the number of rows")
            if name == "div" and operands[1].source == _COUNT:  # by no rows
                arrays[1] = jnp.where(self._count == 0, jnp.ones_like(arrays[1]), arrays[1])
            arrays = jax_internals.rebind(eqn, eqn.params, arrays)
            source = _DATA if name in COLLECTIVES or not eqn.invars else source
        if found is None:
            raise NotExact(_OTHER_WAY_ALONE)
        return [*map(_Value, arrays, rows, [source] * len(arrays), places)]

    def _looked_up(
        self, eqn: jex.JaxprEqn, table: Table, operands: list[_Operand], rows: list[Rows]
    ) -> tuple[Entry | None, list[Place], list[_Value]] | None:
        """Returns the same equation with one row (None if it does nothing then), its results, and the operands.

        Returns None if it does not occur there.
        """
        ins = [with_one_row(kind_of(x).shape, operand.rows) for x, operand in zip(eqn.invars, operands)]
        outs = [with_one_row(kind_of(x).shape, each) for x, each in zip(eqn.outvars, rows)]
        places = [operand.place for operand in operands]
        if does_nothing(eqn, ins, outs):
            return None, places, [self._resolved(operand, None) for operand in operands]
        entry = table.find(eqn, places, ins, outs)
        if entry is None:
            return None
        constants = iter(entry.constants)
        alone = [next(constants) if isinstance(place, Constant) else place for place in places]
        return entry, entry.results, [*map(self._resolved, operands, alone)]

    def _masked(self, array: jax.Array, rows: Rows, axes: Sequence[int], fill: object) -> jax.Array:
        """Returns an array with `fill` in the place of what does not count along these axes."""
        for axis in axes:
            if rows[axis]:
                shape = [1] * array.ndim
                shape[axis] = array.shape[axis]
                counts = lax.broadcasted_iota(jnp.int32, shape, axis) < rows[axis] * self._count
                array = jnp.where(counts, array, jnp.asarray(fill, array.dtype))
        return array

    @staticmethod
    def _checkpoint(
        eqn: jex.JaxprEqn, run: Callable[[list[_Operand]], list[_Operand]], given: list[_Operand]
    ) -> list[_Operand]:
        """Computes what derivatives recompute, in an equation that says so."""
        results: list[_Operand] = []

        def inner(*own: jax.Array) -> list[jax.Array]:
            arrays = iter(own)
            results[:] = run([x._replace(array=next(arrays)) if isinstance(x, _Value) else x for x in given])
            return [value.array for value in results if isinstance(value, _Value)]

        operands = [value.array for value in given if isinstance(value, _Value)]
        arrays = iter(checkpoint_like(eqn, inner, operands))
        return [x._replace(array=next(arrays)) if isinstance(x, _Value) else x for x in results]

    # Equations with jaxprs in them, in which rows occur.

    def _body(self, jaxpr: AnyJaxpr, other: AnyJaxpr, alone: AnyJaxpr) -> Callable[..., list[jax.Array]]:
        """Returns a function that computes a jaxpr, as the body of a branch or loop."""
        variables = opened(jaxpr)[0].invars, opened(other)[0].invars
        rows = [self._sizes.rows_of(kind_of(x), kind_of(y)) for x, y in zip(*variables)]

        def body(*args: jax.Array) -> list[jax.Array]:
            values = [_Value(array, each, _DATA, Computed()) for array, each in zip(args, rows)]
            kinds = [kind_of(variable) for variable in opened(jaxpr)[0].outvars]
            found = self.run_whole(jaxpr, other, alone, values)
            return [jnp.asarray(value.array, kind.dtype) for value, kind in zip(found, kinds)]

        return body

    def _cond(
        self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, alone: jex.JaxprEqn, operands: list[_Value]
    ) -> list[jax.Array]:
        branches = [*map(self._body, *(each.params["branches"] for each in (eqn, twin, alone)))]
        index, *arrays = (operand.array for operand in operands)
        found: list[jax.Array] = lax.switch(index, branches, *arrays)
        return found

    def _while(
        self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, alone: jex.JaxprEqn, operands: list[_Value]
    ) -> list[jax.Array]:
        params = eqn.params
        cond, body = (
            self._body(*(each.params[f"{name}_jaxpr"] for each in (eqn, twin, alone))) for name in ("cond", "body")
        )
        arrays = [operand.array for operand in operands]
        split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body, carry = arrays[: split[0]], arrays[split[0] : split[1]], arrays[split[1] :]
        if kind_of(opened(params["cond_jaxpr"])[0].outvars[0]).ndim:
            raise NotExact("each row has a loop of its own, with another number of iterations")
        found: list[jax.Array] = lax.while_loop(lambda c: cond(*of_cond, *c)[0], lambda c: body(*of_body, *c), carry)
        return found

    def _scan(
        self, eqn: jex.JaxprEqn, twin: jex.JaxprEqn, alone: jex.JaxprEqn, operands: list[_Value]
    ) -> list[jax.Array]:
        body = self._body(*(each.params["jaxpr"] for each in (eqn, twin, alone)))
        return scan_like(eqn, body, [operand.array for operand in operands])


_NESTED = {"cond": _Program._cond, "while": _Program._while, "scan": _Program._scan}

_OTHER_WAY_ALONE = "the function takes another way with a single row"


def _are_all_alike(*eqns: jex.JaxprEqn) -> bool:
    return all(are_alike(eqns[0].params, eqn.params) for eqn in eqns[1:] if eqn is not eqns[0])


def _refuse_other_params(eqn: jex.JaxprEqn, twin: jex.JaxprEqn) -> None:
    """Refuses an equation whose parameters depend on the number of rows, but for those that are shapes."""
    for name, value in eqn.params.items():
        if name not in OF_SHAPES and not are_alike(value, twin.params.get(name)):
            raise NotExact(f"the parameter {name!r} of {eqn.primitive.name!r} depends on the number of rows")
