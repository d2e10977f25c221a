"""Making jaxprs that name the user's functions and arguments, and reading the jaxprs and equations in them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex

from replicax._base import jax_internals
from replicax._base.types import Tree

Atom = jex.Var | jex.Literal
AnyJaxpr = jex.Jaxpr | jex.ClosedJaxpr


def opened(jaxpr: AnyJaxpr) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """Returns a jaxpr without its constants, and these."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def kind_of(atom: Atom) -> jax.core.ShapedArray:
    """Returns the shape and dtype of a variable or literal."""
    kind: jax.core.ShapedArray = atom.aval  # type: ignore[assignment]  # JAX's own types are wider
    return kind


def jaxprs_in(value: object) -> Iterator[AnyJaxpr]:
    """Yields the jaxprs in a parameter of an equation, or in a list of parameters."""
    if isinstance(value, AnyJaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from jaxprs_in(item)


def equations(jaxpr: AnyJaxpr) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a jaxpr, and those of the jaxprs in them."""
    for eqn in opened(jaxpr)[0].eqns:
        yield eqn
        yield from equations_in(eqn)


def equations_in(eqn: jex.JaxprEqn) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of the jaxprs in an equation."""
    for inner in jaxprs_in([*eqn.params.values()]):
        yield from equations(inner)


def parts_of_scan(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a `lax.scan` are constants, and how many are carried; the rest is scanned over.

    What is scanned over has one dimension less in the body. Of the others, those that are carried are outputs.
    """
    body, _ = opened(eqn.params["jaxpr"])
    carried = sum(kind_of(out).ndim == kind_of(inner).ndim for out, inner in zip(eqn.outvars, body.outvars))
    scanned = sum(kind_of(arg).ndim != kind_of(inner).ndim for arg, inner in zip(eqn.invars, body.invars))
    return len(eqn.invars) - carried - scanned, carried


def checkpoint_like(
    eqn: jex.JaxprEqn, inside: Callable[..., list[jax.Array]], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Computes a `jax.checkpoint` with another body, and returns its results."""
    closed = jax.make_jaxpr(inside)(*operands)
    jaxpr = closed.jaxpr
    body = jax_internals.part_of_jaxpr(jaxpr, jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)
    return jax_internals.rebind(eqn, {**eqn.params, "jaxpr": body.jaxpr}, [*closed.consts, *operands])


def scan_like(
    eqn: jex.JaxprEqn, inside: Callable[..., list[jax.Array]], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Computes a `lax.scan` with another body, and returns its results."""
    consts, carried = parts_of_scan(eqn)

    def step(carry: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = inside(*operands[:consts], *carry, *xs)
        return outs[:carried], outs[carried:]

    init, xs = operands[consts : consts + carried], operands[consts + carried :]
    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(step, list(init), list(xs), **params)
    return [*last, *stacked]


def has_side_effects(jaxpr: jex.Jaxpr | jex.JaxprEqn) -> bool:
    """Returns whether a jaxpr, or an equation, does more than compute, such as print."""
    return any(not isinstance(effect, _NAMED_AXIS) for effect in jaxpr.effects)


_NAMED_AXIS = jax_internals.named_axis_effect()


# The path of a leaf, as `jax.tree_util` gives it.
Path: TypeAlias = tuple[Any, ...]


class _Text(str):
    """The name of a parameter that may be any text, such as "batch['image']"."""

    def isidentifier(self) -> bool:
        return True


def identifier(function: object) -> str:
    """Return the name that a function has in programs and traces."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "function"


def named(flat: Callable[..., Tree], function: Callable[..., Tree], paths: Sequence[Path]) -> Callable[..., Tree]:
    """Returns `flat`, which takes arrays alone, with the name and place of `function`, and names of its arguments.

    Args:
        flat: what JAX is to trace.
        function: the user's function that it calls.
        paths: for each parameter of `flat`, where it stands in `(args, kwargs)` of `function`.
    """

    @functools.wraps(function, updated=())
    def traced(*arrays: jax.Array) -> Tree:
        return flat(*arrays)

    parameters = [inspect.Parameter(_Text(name), inspect.Parameter.POSITIONAL_ONLY) for name in _names(function, paths)]
    traced.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return traced


def _names(function: Callable[..., Tree], paths: Sequence[Path]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def name(path: Path) -> str:
        group, first, *inside = path
        if group.idx == 1:
            root = str(first.key)
        elif first.idx < len(positional):
            root = positional[first.idx]
        else:
            root = f"{rest}[{first.idx - len(positional)}]"
        return root + jax.tree_util.keystr(tuple(inside))

    names = [name(path) for path in paths]
    return [n if names.count(n) == 1 else f"{n}.{names[:i].count(n)}" for i, n in enumerate(names)]
