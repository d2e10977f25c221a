"""The compiled form of a program: its jaxpr with the arguments of a layout, rewritten by the passes, for `jax.jit`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from replicax._base import jax_internals, nest
from replicax._base.array_conversion import strong
from replicax._engine.argument_layout import Arrays, Layout, Taped, layout_of
from replicax._engine.program_outputs import ProgramOutputs
from replicax._passes import pipeline
from replicax._passes.facts import Facts
from replicax._tracing import frames, lost_values
from replicax._tracing.dataset_reads import DatasetRead
from replicax._values import PerReplica

Returned: TypeAlias = tuple[Arrays, Arrays]  # arrays that replace those of variables, and the results
# A function that JAX compiles: of replaced and read arrays of variables, of elements and of the call's arguments.
Compute: TypeAlias = Callable[[Arrays, Arrays, Arrays, Arrays], Returned]

_TOKEN_SIZE = 256  # bytes; a larger result is not kept just to see whether its call has ended


def token_of(results: Sequence[jax.Array | jax.core.ShapedArray], repeats: int = 1) -> int:
    """Return which result tells that a call has ended, if that is to be known; -1 if all of them are too large."""
    small = (i for i, x in enumerate(results) if repeats * x.size * x.dtype.itemsize <= _TOKEN_SIZE)
    return next(small, -1)


@dataclass
class Compiled:
    """A function that JAX compiles.

    Args:
        function: the function.
        layout: the layout of its arguments.
        token: which result tells that a call has ended.
        is_compiled: whether it has been called.
    """

    function: jax.stages.Wrapped
    layout: Layout
    token: int
    is_compiled: bool = False


class Executable:
    """The functions that JAX compiles of a program: for one step, for several, and for a call under a gradient tape.

    Args:
        name: the function's.
        level: the level of tracing, with the variables that the program reads and writes.
        jaxpr: its jaxpr: the new leaves of variables, and behind them the results.
        reads: the elements of datasets that it takes.
        results: the results.
        facts: the facts for the passes.
        is_spread: whether it runs on several devices.
        donates: whether it may take over the arrays that it replaces.
    """

    def __init__(
        self,
        name: str,
        level: frames.TraceFrame,
        jaxpr: jex.ClosedJaxpr,
        reads: Sequence[DatasetRead],
        results: ProgramOutputs,
        facts: Facts,
        is_spread: bool,
        donates: bool,
    ):
        self._name, self._level, self._jaxpr, self._facts = name, level, jaxpr, facts
        self._reads, self._results, self._is_spread = reads, results, is_spread
        self._donated = (0,) if donates else ()
        self._count = sum(len(variable._types) for variable in level.written.values())  # of new leaves
        self._token = token_of(jaxpr.out_avals[self._count :])
        tape = Taped(level)
        self.taped = Compiled(
            jax.jit(self._with_name(functools.partial(self._compute, tape, facts))), tape, self._token
        )
        self._by_steps: dict[int, Compiled] = {}
        self._layout: Layout | None = None
        self._is_stale = True
        self.for_steps(1)

    def leaves_moved(self) -> None:
        """Mark the layout as stale after a leaf has moved into a shared store or out of it."""
        self._is_stale = True

    def layouts_changed(self) -> None:
        """Note that JAX compiles again, as arrays of variables are split over devices in another way."""
        for compiled in self._by_steps.values():
            compiled.is_compiled = False

    def for_steps(self, steps: int) -> Compiled:
        """Return the function that takes so many steps, for the places where the variables lie now."""
        if self._is_stale:
            self._arrange()
        if steps not in self._by_steps:
            layout = self._layout
            assert layout is not None
            facts = replace(self._facts, vectors=layout.vector_results, is_loop=steps > 1)
            compute: Compute = functools.partial(self._compute, layout, facts)
            token = token_of(self._jaxpr.out_avals[self._count :], steps)
            if steps > 1:
                compute = self._repeat(compute, layout, steps)
            function = jax.jit(self._with_name(compute), donate_argnums=self._donated)
            self._by_steps[steps] = Compiled(function, layout, token)
        return self._by_steps[steps]

    def _arrange(self) -> None:
        """Lay out the arguments anew; keep what is compiled if it fits the new layout."""
        with frames.lock:
            self._is_stale = False
            for variable in self._level.variables.values():
                variable._storage.watchers.add(self)
            layout = layout_of(self._level, self._is_spread)
        if self._layout is None or self._layout.form != layout.form:
            self._by_steps = {}
        for compiled in self._by_steps.values():
            compiled.layout = layout
        self._layout = layout

    def _with_name(self, compute: Compute) -> Compute:
        def program(*args: Arrays) -> Returned:
            return compute(*args)

        program.__name__ = program.__qualname__ = self._name
        return program

    def _compute(
        self, layout: Layout, facts: Facts, replaced: Arrays, read: Arrays, pulled: Arrays, dynamic: Arrays
    ) -> Returned:
        """Compute one step: return the arrays that replace `replaced`, and the results."""
        facts = replace(facts, applied=[])
        jaxpr, count = self._with_layout(layout, replaced, read, pulled)
        outputs = pipeline.evaluate(jaxpr, facts, [*replaced, *read, *pulled, *dynamic])
        self._level.passes.update(dict.fromkeys((facts.stage, name) for name in facts.applied))
        return outputs[:count], self._with_token(outputs[count:], self._token)

    def _with_layout(
        self, layout: Layout, replaced: Arrays, read: Arrays, pulled: Arrays
    ) -> tuple[jex.ClosedJaxpr, int]:
        """Return the jaxpr with a layout's arguments and results, and the number of results that replace arguments."""
        body, slots = frames.with_arguments(self._jaxpr)

        def enter(replaced: Arrays, read: Arrays, pulled: Arrays) -> Arrays:
            leaves = self.leaves(layout, replaced, read, pulled)
            return [leaves[slot] for slot in slots]

        before = jax.make_jaxpr(enter)(replaced, read, pulled)
        after = jax.make_jaxpr(layout.results)(replaced, body.out_avals[: self._count])
        arguments = before.jaxpr.invars
        dynamic = body.jaxpr.invars[len(slots) :]
        eqns: list[jex.JaxprEqn] = []
        leaves = jax_internals.append_jaxpr(eqns, before.jaxpr, arguments)
        outputs = jax_internals.append_jaxpr(eqns, body.jaxpr, [*leaves, *dynamic])
        new, results = outputs[: self._count], outputs[self._count :]
        new = jax_internals.append_jaxpr(eqns, after.jaxpr, [*arguments[: len(replaced)], *new])
        constants = {
            var: const for closed in (body, before, after) for var, const in zip(closed.jaxpr.constvars, closed.consts)
        }
        inputs, outputs = [*arguments, *dynamic], [*new, *results]
        return jax_internals.part_of_jaxpr(body.jaxpr, eqns, inputs, outputs, constants), len(new)

    def leaves(self, layout: Layout, replaced: Arrays, read: Arrays, pulled: Arrays) -> dict[int, jax.Array]:
        """Return the inputs of the level by their slots: the leaves of variables and the elements of datasets."""
        elements = zip((slot for read in self._reads for slot in read.slots), pulled)
        return {**layout.leaves(replaced, read), **dict(elements)}

    def _with_token(self, results: Arrays, token: int) -> Arrays:
        return [*results, jnp.zeros((), jnp.int8)] if self._facts.mesh is not None and token == -1 else results

    def _repeat(self, step: Compute, layout: Layout, steps: int) -> Compute:
        """Return the function of several steps: with the elements of all steps, it returns their results stacked."""
        types = layout.fresh_types()  # of leaves that are written and not read
        rows = [isinstance(leaf, PerReplica) for read in self._reads for leaf in nest.values(read.element)]
        results = self._jaxpr.out_avals[self._count :]

        def compute(replaced: Arrays, read: Arrays, pulled: Arrays, dynamic: Arrays) -> Returned:
            def body(state: Arrays, elements: Arrays) -> Returned:
                new, returned = step(state[: len(replaced)], read, elements, dynamic)
                return [strong(x) for x in new], returned[: len(results)]

            start = [strong(x) for x in replaced] + [jnp.zeros(kind.shape, kind.dtype) for kind in types]
            elements = [jnp.moveaxis(x, 1, 0) if has_rows else x for x, has_rows in zip(pulled, rows)]
            last, stacked = lax.scan(body, start, elements, length=steps)
            stacked = [self._results.over_steps(i, x) for i, x in enumerate(stacked)]
            return last, self._with_token(stacked, token_of(results, steps))

        return compute

    def call(
        self, compiled: Compiled, function: Callable[..., Returned], arguments: Sequence[Arrays], frame: frames.Frame
    ) -> Arrays:
        """Call a compiled function, store the new arrays of variables, also if it is interrupted; return the results.

        A KeyboardInterrupt comes as soon as the function has returned, since Python does nothing else most of the time.
        By then what it returned is in a list, as both are one step for Python.
        """
        returned: list[Returned] = []
        try:
            returned.extend(itertools.starmap(function, (arguments,)))
            self.put(compiled, frame, returned[0][0])
        except BaseException as error:
            if returned:
                self.put(compiled, frame, returned[0][0])
            elif any(array.is_deleted() for array in arguments[0]):
                lost_values.lose(compiled.layout.lost(), self._name, error)
                error.add_note(
                    f"When {self._name} failed, its program had already taken over the values of the variables that it "
                    "assigns. They are lost: restore them from a checkpoint, or assign all of them."
                )
            raise
        return returned[0][1]

    def put(self, compiled: Compiled, frame: frames.Frame, new: Arrays) -> None:
        """Store arrays that a compiled function returned in place of those of the variables."""
        if lost_values.any_lost:
            for variable in self._level.written.values():
                variable._storage.lost = None
        compiled.layout.put(frame, new)
