"""Traces of a function for arguments whose sizes are not known: a dimension of None is one of JAX's symbolic shapes.

A jaxpr with such dimensions is exported once for all sizes. Most functions can be traced in this way. Those that need a
size as a number, or that use sizes in a way that JAX cannot compare, cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax import export

from replicax._base import foreign_state
from replicax._base.specs import TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._engine.modes import CreatesVariables, PythonCode
from replicax._engine.program_outputs import ProgramOutputs
from replicax._engine.signature import CallSignature, argument_leaves
from replicax._engine.trace_function import Tracing
from replicax._tracing import frames

# How the dimensions of None of several arguments are named, as a function of argument and axis. Arguments that are
# added to each other have to have equal names; the fewer are equal, the more calls fit.
_NAMINGS: tuple[Callable[[int, int], str], ...] = (
    lambda argument, axis: f"n{argument}_{axis}",
    lambda argument, axis: "batch" if axis == 0 else f"n{argument}_{axis}",
    lambda argument, axis: f"n{axis}",
)


class GeneralTrace(NamedTuple):
    """What a function reads, computes and writes, for arguments of some specs.

    Attributes:
        level: what it reads and writes of variables.
        jaxpr: what it computes; the new values of variables are its first outputs.
        results: what it returns.
        arguments: the shapes and dtypes of its arguments, with symbolic dimensions.
    """

    level: frames.TraceFrame
    jaxpr: jex.ClosedJaxpr
    results: ProgramOutputs
    arguments: list[jax.core.ShapedArray]

    @property
    def state_count(self) -> int:
        """The number of the jaxpr's first outputs that are new values of variables."""
        return sum(len(variable._types) for variable in self.level.written.values())

    def result_specs(self) -> Tree:
        """Returns the specs of what a call returns; what is no tensor as it is."""
        return self.results.specs(self.jaxpr.out_avals[self.state_count :])


def traced(code: PythonCode, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> GeneralTrace:
    """Traces a function for these arguments, specs among them.

    The Python code runs once; again, with fewer dimensions that differ from each other, where it raises an error.

    Raises:
        ValueError: a spec has no rank, or is one of strings.
        Exception: that of the function, where it cannot be traced.
    """
    specs = [leaf for leaf in argument_leaves(args, kwargs) if isinstance(leaf, TensorSpec)]
    for spec in specs:
        if spec.shape.rank is None or spec.dtype == np.dtype(object):
            raise ValueError(f"No program can be made for {spec}: it has to have a rank, and a dtype of numbers.")
    first: Exception | None = None
    for shapes in _symbolic(specs):
        try:
            return _traced(code, args, kwargs, shapes)
        except CreatesVariables:
            raise
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _symbolic(specs: Sequence[TensorSpec]) -> Iterator[list[tuple[Any, ...]]]:
    """Yields the shapes of specs with symbolic dimensions, in different ways; the most general first."""
    found: list[list[list[str]]] = []
    for naming in _NAMINGS:
        named = [
            [naming(i, axis) if n is None else str(n) for axis, n in enumerate(s.shape)] for i, s in enumerate(specs)
        ]
        if named in found:
            continue
        found.append(named)
        scope = export.SymbolicScope()
        yield [tuple(export.symbolic_shape(",".join(shape), scope=scope)) if shape else () for shape in named]


def _named(naming: Callable[[int, int], str], argument: int, spec: TensorSpec) -> list[str]:
    return [naming(argument, axis) if n is None else str(n) for axis, n in enumerate(spec.shape)]


def _traced(
    code: PythonCode, args: tuple[Tree, ...], kwargs: dict[str, Tree], shapes: Sequence[tuple[Any, ...]]
) -> GeneralTrace:
    foreign_state.join()
    small_args, small_kwargs = jax.tree.map(lambda leaf: stand_in(leaf, 2), (args, kwargs))
    call = CallSignature(small_args, small_kwargs)
    symbolic = iter(shapes)
    leaves = [leaf for leaf in argument_leaves(args, kwargs) if isinstance(leaf, (TensorSpec, jax.Array, np.ndarray))]
    avals = [
        jax.core.ShapedArray(next(symbolic) if isinstance(leaf, TensorSpec) else leaf.shape, leaf.dtype)
        for leaf in leaves
    ]
    assert len(avals) == len(call.dynamic)
    call.dynamic = avals  # type: ignore[assignment]  # of which tracing takes shapes and dtypes
    tracing = Tracing(call, [], lambda: False)
    with code.entered():
        jaxpr = tracing.run(code)
    tracing.close()
    return GeneralTrace(tracing.level, jaxpr, tracing.results, avals)


def stand_in(leaf: Leaf, size: int) -> Leaf:
    """Returns an array that a spec describes, with this size for the dimensions that are not known."""
    if not isinstance(leaf, TensorSpec):
        return leaf
    shape = tuple(size if n is None else n for n in leaf.shape)
    if leaf.dtype == np.dtype(object):
        return np.full(shape, b"", object)
    return np.ones(shape, leaf.dtype) if leaf.dtype.kind in "fcV" else np.zeros(shape, leaf.dtype)
