"""Paths of NNX's variables, by which a strategy's rules know them: those in the object that is being made.

A path is known when the constructor of the whole model returns, and with it the layout that a rule gives the variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from replicax._base.foreign_state import Original
from replicax._base.thread_state import current
from replicax._tracing import context as _context
from replicax._tracing import protocols

if TYPE_CHECKING:
    from flax import nnx


class Paths:
    """Tells the variables of an object their paths in it, once it is made.

    Args:
        found: called with each variable and its path.
    """

    def __init__(self, found: Callable[[nnx.Variable, str], None]):
        self._found = found

    def are_coming(self) -> bool:
        """Returns True if variables that are made now will be told their paths."""
        return current.nnx_constructors > 0 and _rules_by_name()

    def make(self, make: Original, cls: type, /, *args: object, **kwargs: object) -> nnx.Pytree:
        """Makes an object of NNX."""
        current.nnx_constructors += 1
        try:
            node: nnx.Pytree = make(cls, *args, **kwargs)
        finally:
            current.nnx_constructors -= 1
        if not current.nnx_constructors and _rules_by_name():
            from flax import nnx

            for path, value in nnx.iter_graph(node):
                if isinstance(value, nnx.Variable):
                    self._found(value, "/".join(map(str, path)))
        return node


def of_optimizer(
    optimizer: nnx.Optimizer, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[nnx.Variable, nnx.Variable]]:
    """Yields the variables of an optimizer's state and those of the model that they belong to: their paths end alike.

    `kind` is the class of NNX's variables; `args` and `kwargs` are the arguments of which the optimizer was made.
    """
    from flax import nnx

    def is_variable(node: object) -> bool:
        return isinstance(node, kind)

    graph = {"graph": kwargs["graph"]} if "graph" in kwargs else {}
    state = nnx.state(kwargs["model"] if "model" in kwargs else args[0], optimizer.wrt, **graph)
    variables = dict(jax.tree.leaves_with_path(state, is_leaf=is_variable))
    for path, slot in jax.tree.leaves_with_path(optimizer.opt_state, is_leaf=is_variable):
        of = next((found for start in range(len(path)) if (found := variables.get(path[start:])) is not None), None)
        if of is not None and is_variable(slot):
            yield slot, of


def _rules_by_name() -> bool:
    return _context.has_strategy() and protocols.rules_of(_context.get_strategy()) is not None
