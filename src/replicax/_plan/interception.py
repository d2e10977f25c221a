"""Plans the step of a program when the program calls it, and answers its other calls with zeros."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from replicax._base import nest
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._engine.function import Function
from replicax._plan import api, chips
from replicax._plan import picture as drawing
from replicax._plan.lowering import Step
from replicax._plan.options import Options
from replicax._plan.plans import Plan
from replicax._tracing import frames
from replicax._values import PerReplica


class Planned(SystemExit):
    """Ends a program the step of which has been planned."""


class Planner:
    """Plans the step of a program when the program calls it."""

    def __init__(self, options: Options):
        self._options = options
        self._topologies = [chips.parse(each) for each in options.topologies]
        api.check(self._topologies)  # before anything takes time
        if options.picture is not None:
            drawing.check(options.picture)
        self._passed: dict[str, None] = {}  # the names of the functions that were called and were not the step

    @contextlib.contextmanager
    def in_calls(self) -> Iterator[None]:
        """Returns a context in which `call` handles every call of a compiled function from outside of a trace."""
        before = Function.__call__

        def called(function: Function, *args: Tree, **kwargs: Tree) -> Tree:
            if frames.is_tracing():
                return before(function, *args, **kwargs)
            return self.call(function, args, kwargs)

        setattr(Function, "__call__", called)  # noqa: B010 - types do not know that classes change
        try:
            yield
        finally:
            setattr(Function, "__call__", before)  # noqa: B010

    def call(self, function: Function, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """Plans the step and ends the program; returns zeros in place of the results of another function."""
        step = Step(function, args, kwargs)
        is_step = step.assigns if self._options.step is None else step.name == self._options.step
        if not is_step:
            self._passed[step.name] = None
            return nest.map_structure(_zeros, step.results)
        plan = Plan(step.name, tuple(api.compile_all(step, self._topologies, self._options.time_limit)))
        print(plan, flush=True)
        if self._options.picture is not None:
            plan.draw(self._options.picture)
        raise Planned(0)

    def advice(self) -> str:
        """Returns what to say of a program that has ended without its step."""
        if not self._passed:
            return "The program has ended and called no function of `replicax.function`: there is no step to plan."
        names = ", ".join(self._passed)
        wanted = "assigns variables" if self._options.step is None else f"has the name {self._options.step!r}"
        return f"No compiled function that the program calls {wanted}. Choose a step with --step NAME from: {names}."


def _zeros(leaf: Leaf) -> Leaf:
    if isinstance(leaf, PerReplicaSpec):
        return PerReplica([_zeros(spec) for spec in leaf.value_specs])
    return np.zeros(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, TensorSpec) else leaf
