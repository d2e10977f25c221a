"""The program of several steps: that of one step, repeated by `lax.scan`, with the variables carried along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from replicax._base.array_conversion import strong

# What replaces the variables' arrays, and the results.
Returned: TypeAlias = tuple[list[jax.Array], list[jax.Array]]
# A function that JAX compiles: of replaced, donated, read and kept arrays of variables, of elements and of arguments.
Step: TypeAlias = Callable[..., Returned]

_TOKEN_SIZE = 256  # bytes; a larger result is not kept just to see whether its call has ended


def token_of(results: Sequence[jax.Array | jax.core.ShapedArray], repeats: int = 1) -> int:
    """Returns which result tells that a call has ended, where that is to be known; -1 for none of these types."""
    small = (i for i, x in enumerate(results) if repeats * x.size * x.dtype.itemsize <= _TOKEN_SIZE)
    return next(small, -1)


class RepeatedProgram:
    """The compiled program of several steps.

    Args:
        steps: how many.
        results: the types of what a step returns.
        awaited: whether others ask when a call ends.

    Attributes:
        compiled: the function that JAX compiles.
        is_compiled: whether it has been called.
        token: which result tells that a call has ended.
    """

    compiled: jax.stages.Wrapped

    def __init__(self, steps: int, results: Sequence[jax.core.ShapedArray], awaited: bool):
        self._steps, self._results = steps, len(results)
        self.token = token_of(results, steps)
        self._own_token = awaited and self.token == -1
        self.is_compiled = False

    def function(
        self,
        step: Step,
        types: Sequence[jax.ShapeDtypeStruct],
        rows: Sequence[bool],
        over_steps: Callable[[int, jax.Array], jax.Array],
    ) -> Step:
        """Returns the function to compile: as `step`, but for the elements, which are those of all steps.

        It gives the variables' last values, and the results of the steps stacked.

        Args:
            step: the program of one step, as `_engine.program` has it.
            types: of the variables' leaves that it gives and does not take, behind the others.
            rows: which of the elements' arrays have the replicas along their first axis.
            over_steps: makes of a result's place and the stacked results what is to be returned.
        """

        def program(
            replaced: list[jax.Array],
            donated: list[jax.Array],
            read: list[jax.Array],
            kept: list[jax.Array],
            pulled: list[jax.Array],
            dynamic: list[jax.Array],
        ) -> Returned:
            def body(carry: Returned, elements: list[jax.Array]) -> tuple[Returned, list[jax.Array]]:
                vectors, leaves = carry
                new, results = step(vectors, leaves[: len(donated)], read, kept, elements, dynamic)
                after = [strong(x) for x in new]
                return (after[: len(replaced)], after[len(replaced) :]), results[: self._results]

            # Variables that are only written have no value before.
            fresh = [jnp.zeros(kind.shape, kind.dtype) for kind in types]
            start = list(replaced), [*(strong(x) for x in donated), *fresh]
            elements = [jnp.moveaxis(x, 1, 0) if of_replicas else x for x, of_replicas in zip(pulled, rows)]
            (vectors, leaves), stacked = lax.scan(body, start, elements, length=self._steps)
            results = [over_steps(i, x) for i, x in enumerate(stacked)]
            return [*vectors, *leaves], [*results, jnp.zeros((), jnp.int8)] if self._own_token else results

        return program
