"""New variables of a strategy, which the user's creators see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from replicax._base.thread_state import current
from replicax._base.types import Tree
from replicax._tracing import context
from replicax._tracing.context import StrategyLike
from replicax._variables import creators
from replicax._variables.distributed import DistributedVariable
from replicax._variables.variable import Variable


def create(strategy: StrategyLike, new_variable: Callable[..., Variable], kwargs: dict[str, Tree]) -> Variable:
    """Create a variable by `new_variable(**kwargs)`; inside of the strategy's `run` one for all replicas."""

    def create_and_show(**kwargs: Tree) -> Variable:
        variable = new_variable(**kwargs)
        return _show_to_creators(variable, kwargs) if current.creators else variable

    variable: Variable = creators.create_together(strategy, create_and_show, kwargs)
    return variable


def _show_to_creators(variable: Variable, kwargs: dict[str, Tree]) -> Variable:
    """Show a new variable to the creators that were entered outside of the scope; return the variable to use.

    They see each component of a variable that has components. Of any other they see the variable itself, and may
    replace it.
    """
    if not isinstance(variable, DistributedVariable):
        seen: Variable = creators.through_creators(_returning(variable), components=True)(**kwargs)
        return seen
    for index, component in enumerate(variable.values):
        suffix = f"/replica_{index}/" if index else ""
        make = creators.through_creators(_returning(component), components=True)
        make(**{**kwargs, "name": (kwargs["name"] or "Variable") + suffix})
    return variable


def _returning(variable: Variable) -> Callable[..., Variable]:
    return lambda **kwargs: variable


@contextlib.contextmanager
def colocated(strategy: StrategyLike, is_own: Callable[[Variable], bool], variable: object) -> Iterator[None]:
    """Check that the strategy's scope is entered and that the variable is its own."""
    if context.get_strategy() is not strategy:
        raise RuntimeError(f'Need to be inside "with strategy.scope()" for {strategy!r}')
    if not (isinstance(variable, Variable) and is_own(variable)):
        raise ValueError(
            "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), "
            f"not: {variable!r}"
        )
    yield
