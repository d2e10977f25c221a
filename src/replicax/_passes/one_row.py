"""Programs as they are with a single row, held against those for more.

Traced with one row, a function may go another way than with several: JAX leaves out what is needless then, such as the
sum over an axis of one element, and the user's code may treat a single row in its own way. The trace with one row is
therefore a table of what is computed of what (`Table`), without the reshapes and sums that do nothing. What the other
traces compute is looked up in it, equation by equation. If the results are found, the way is the same, and differing
constants are known.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from replicax._base.jaxprs import AnyJaxpr, Atom, jaxprs_in, kind_of, opened
from replicax._passes.jaxpr_graph import key_of
from replicax._passes.primitives import IN_CALLS
from replicax._passes.row_dims import Rows, are_same, as_constant, is_key
from replicax._tracing import frames
from replicax._values import Kind

# Parameters that repeat the shapes of operands and results, which are compared by themselves.
OF_SHAPES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "reps"})

_OF_LAYOUT = frozenset({"sharding", "out_sharding"})  # which change no values


class Constant(NamedTuple):
    """A constant, as it is with one row; None if that is not known."""

    value: Any


class Computed:
    """A value that a program computes of its inputs."""

    __slots__ = ()


Place: TypeAlias = Constant | Computed


class Entry:
    """An equation of the trace with one row: its operands that are constants, its results, and itself."""

    __slots__ = ("constants", "eqn", "is_used", "results")

    def __init__(self, constants: list[Constant], eqn: jex.JaxprEqn, results: list[Place]):
        self.constants, self.eqn, self.results, self.is_used = constants, eqn, results, False


class Table:
    """What a jaxpr computes with one row.

    Args:
        jaxpr: traced with one row.
        args: the places of its arguments.
        variables: for each slot of an input of the level, which leaf of a variable it is.

    Attributes:
        results: the places of its results.
    """

    def __init__(self, jaxpr: AnyJaxpr, args: Sequence[Place], variables: Mapping[int, Hashable]):
        self._entries: dict[Hashable, list[Entry]] = {}
        self._objects: dict[Hashable, Place] = {}
        self._variables = variables
        self.results = self._take(jaxpr, args)

    def of_tracer(self, value: object) -> Place:
        """Returns the place of a value from outside of the function."""
        return self._objects.setdefault(("tracer", id(value)), Computed())

    def of_input(self, eqn: jex.JaxprEqn) -> Place:
        """Returns the place of an input of the level, the same for all traces."""
        return self._objects.setdefault(self._variables.get(eqn.params["slot"], eqn.params["slot"]), Computed())

    def _constant(self, value: Any, kind: Kind) -> Place:
        return self.of_tracer(value) if isinstance(value, jax.core.Tracer) else Constant(as_constant(value, kind))

    def _take(self, jaxpr: AnyJaxpr, args: Sequence[Place]) -> list[Place]:
        body, consts = opened(jaxpr)
        known: dict[jex.Var, Place] = dict(zip(body.invars, args, strict=True))
        known.update(zip(body.constvars, map(self._constant, consts, map(kind_of, body.constvars))))

        def place_of(atom: Atom) -> Place:
            return self._constant(atom.val, kind_of(atom)) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in body.eqns:
            operands = [*map(place_of, eqn.invars)]
            if (name := eqn.primitive.name) in IN_CALLS:
                results = self._take(eqn.params[IN_CALLS[name]], operands)
            elif frames.is_input(eqn):
                results = [self.of_input(eqn)]
            else:
                results = self._results(eqn, operands)
            known.update(zip(eqn.outvars, results))
        return [*map(place_of, body.outvars)]

    def _results(self, eqn: jex.JaxprEqn, operands: list[Place]) -> list[Place]:
        ins, outs = [kind_of(x).shape for x in eqn.invars], [kind_of(x).shape for x in eqn.outvars]
        if does_nothing(eqn, ins, outs):
            return operands[:1]
        entries = self._entries.setdefault(_key(eqn, operands, ins, outs), [])
        constants = [place for place in operands if isinstance(place, Constant)]
        for entry in entries:
            if all(is_constant(one, other.value) for one, other in zip(constants, entry.constants)):
                return entry.results
        entries.append(Entry(constants, eqn, [Computed() for _ in eqn.outvars]))
        return entries[-1].results

    def find(
        self, eqn: jex.JaxprEqn, operands: list[Place], ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]
    ) -> Entry | None:
        """Returns the equation that computes the same of the same, but for constants; None if there is none.

        Args:
            eqn: the equation of another trace.
            operands: the places of its operands.
            ins, outs: the shapes of operands and results with one row.
        """
        entries = self._entries.get(_key(eqn, operands, ins, outs), [])
        constants = [place for place in operands if isinstance(place, Constant)]
        for entry in entries:
            if all(is_constant(one, other.value) for one, other in zip(constants, entry.constants)):
                return entry
        found = next((entry for entry in entries if not entry.is_used), None)
        if found is not None:
            found.is_used = True
        return found


def with_one_row(shape: Sequence[int], rows: Rows) -> tuple[int, ...]:
    """Returns the shape that an array of a trace has with one row."""
    return tuple(k or size for size, k in zip(shape, rows))


def is_constant(place: Constant, value: Any) -> bool:
    """Returns whether a constant has this value, whatever dimensions of size 1 there are."""
    one = place.value
    if one is None or one is value:
        return one is value
    if is_key(one) or is_key(value):
        return is_key(one) and is_key(value) and are_same(one, value)
    one, value = np.asarray(one).ravel(), np.asarray(value).ravel()
    if one.shape != value.shape or one.astype(value.dtype).tobytes() == value.tobytes():
        return bool(one.shape == value.shape)
    is_floating = bool(jnp.issubdtype(value.dtype, jnp.floating))
    return is_floating and bool(np.allclose(one, value, 1e-6, 0.0))


def does_nothing(eqn: jex.JaxprEqn, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> bool:
    """Returns whether an equation only adds or removes dimensions of size 1, of one array."""
    name = eqn.primitive.name
    if name == "transpose":
        kept = [axis for axis in eqn.params["permutation"] if ins[0][axis] != 1]
        return kept == sorted(kept)
    if name not in _RESHAPES and name not in _REDUCTIONS:
        return False
    return len(ins) == 1 and len(outs) == 1 and math.prod(ins[0]) == math.prod(outs[0]) and 0 not in ins[0]


_RESHAPES = frozenset({"reshape", "squeeze", "broadcast_in_dim", "expand_dims", "tile"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})


def _key(
    eqn: jex.JaxprEqn, operands: Sequence[Place], ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]
) -> Hashable:
    params: dict[str, Hashable] = {
        name: key_of(value, exact=False)
        for name, value in eqn.params.items()
        if name not in OF_SHAPES and name not in _OF_LAYOUT and not any(jaxprs_in(value))
    }
    name = eqn.primitive.name
    if name in _REDUCTIONS:
        params["axes"] = _of_wide(ins[0], eqn.params["axes"])
    elif name == "broadcast_in_dim":
        dims = [axis for axis, size in zip(eqn.params["broadcast_dimensions"], ins[0]) if size != 1]
        params["broadcast_dimensions"] = _of_wide(outs[0], dims)
    elif name == "transpose":
        params["permutation"] = _of_wide(ins[0], eqn.params["permutation"])
    elif name == "dot_general":
        pairs = eqn.params["dimension_numbers"]
        params["dimension_numbers"] = tuple(_of_wide(ins[i], pair[i]) for pair in pairs for i in range(2))
    elif "dimension_numbers" in params and "mode" in params:  # of indices into rows, which JAX leaves out
        del params["dimension_numbers"]
    shapes = [tuple(n for n in shape if n != 1) for shape in outs]
    kinds = tuple(kind_of(x).dtype for x in eqn.outvars)
    return (
        eqn.primitive,
        tuple(sorted(params.items())),
        tuple(
            kind_of(atom).dtype if isinstance(place, Constant) else place for atom, place in zip(eqn.invars, operands)
        ),
        tuple(shapes),
        kinds,
    )


def _of_wide(shape: tuple[int, ...], axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the places of axes among those of more than one element."""
    wide = [axis for axis, size in enumerate(shape) if size != 1]
    return tuple(wide.index(axis) for axis in axes if axis in wide)
