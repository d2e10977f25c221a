"""Several steps of a compiled function in one call.

The program of one step (see `function`) is repeated by `lax.scan` inside of one program, with the variables carried
from step to step and the elements of all steps put together before (see `multi_step`). Where that cannot be, since
the elements differ in shape, the data end or the function is no program at all, the steps run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import array_conversion, jax_internals, nest
from replicax._base.errors import OutOfRangeError
from replicax._control_flow.traced_block import strong
from replicax._data.calls import ends_data
from replicax._tracing.dataset_reads import Pull, element_arrays, outside, same_sources
from replicax._values import Mirrored, PerReplica, is_array, is_text, mesh_of

_TOKEN_SIZE = 256  # bytes; a larger result is not kept just to see whether its call has ended


def token_of(results: Sequence[Any], repeats: int = 1) -> int:
    """Returns which result tells that a call has ended, where that is to be known; -1 for none of these types."""
    small = (i for i, x in enumerate(results) if repeats * x.size * x.dtype.itemsize <= _TOKEN_SIZE)
    return next(small, -1)


class Repeated:
    """The program of so many steps.

    Args:
        steps: how many.
        results: the types of what a step returns.
        told: whether it is to be known when a call ends.
    """

    def __init__(self, steps: int, results: Sequence[Any], told: bool):
        self._steps, self._results = steps, len(results)
        self._token = token_of(results, steps)
        self._own_token = told and self._token == -1
        self._is_compiled = False
        self._compiled: Any = None

    def program(
        self,
        step: Callable[..., tuple[list[Any], list[Any]]],
        types: Sequence[Any],
        rows: Sequence[bool],
        over_steps: Callable[[int, Any], Any],
    ) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Returns the function to compile: as `step`, but for the elements, which are those of all steps.

        It gives the variables' last values, and the results of the steps stacked.

        Args:
            step: the program of one step, as `_engine.program` has it.
            types: of the variables' leaves that it gives and does not take, behind the others.
            rows: which of the elements' arrays have the replicas along their first axis.
            over_steps: makes of a result's place and the stacked results what is to be returned.
        """
        count, number = self._steps, self._results

        def program(
            replaced: list[Any], donated: list[Any], read: list[Any], kept: list[Any], pulled: Any, dynamic: Any
        ) -> tuple[list[Any], list[Any]]:
            def body(carry: tuple[list[Any], list[Any]], elements: list[Any]) -> Any:
                vectors, leaves = carry
                new, results = step(vectors, leaves[: len(donated)], read, kept, elements, dynamic)
                after = [strong(x) for x in new]
                return (after[: len(replaced)], after[len(replaced) :]), results[:number]

            # Variables that are only written have no value before.
            fresh = [jnp.zeros(kind.shape, kind.dtype) for kind in types]
            start = list(replaced), [*(strong(x) for x in donated), *fresh]
            elements = [jnp.moveaxis(x, 1, 0) if of_replicas else x for x, of_replicas in zip(pulled, rows)]
            (vectors, leaves), stacked = lax.scan(body, start, elements, length=count)
            results = [over_steps(i, x) for i, x in enumerate(stacked)]
            return [*vectors, *leaves], [*results, jnp.zeros((), jnp.int8)] if self._own_token else results

        return program


class Found(NamedTuple):
    """What a call of several steps runs: the program of one step, if there is one, and the elements."""

    entry: Any
    steps: int
    elements: list[Any]


NOT_TRACED = Found(None, 0, [])


def found(entries: Sequence[Any], count: int, arguments: list[Any]) -> Found | None:
    """Returns the next elements, with the program that takes them; None where the steps have to run one by one.

    `entries` are the programs of one step that there are. Where none takes the elements, it is `NOT_TRACED`, and they
    are to come yet.
    """
    first = entries[0]
    sources = [pull.source(arguments) for pull in first.pulls]
    if any(source is None for source in sources) or len({id(x) for x in sources}) < len(sources):
        return None
    pulled: list[Any] = []
    with outside():
        for source in sources:
            several = source._pull_block(count)
            if several is None:
                break
            pulled.append(several)
        elements = [several.element for several in pulled]
        entry = None
        if len(pulled) == len(sources):
            alike = (e for e in entries if same_sources(e.pulls, first.pulls))
            entry = next((e for e in alike if _takes(e.pulls, elements)), None)
        if entry is None or not repeatable(entry):
            for source, several in zip(sources, pulled):
                source._push_back(several)
            return NOT_TRACED if entry is None and len(pulled) == len(sources) else None
    return Found(entry, count, elements)


def _takes(pulls: Sequence[Pull], elements: Sequence[Any]) -> bool:
    """Returns whether the elements of all steps have the shapes and dtypes of those pulled while tracing."""
    for pull, element in zip(pulls, elements):
        before: Any = jax.tree.structure(pull.element)
        if before != jax.tree.structure(element):
            return False
        for one, several, leaf in zip(element_arrays(pull.element), element_arrays(element), nest.values(element)):
            axis = 1 if isinstance(leaf, PerReplica) else 0
            shape = (*several.shape[:axis], *several.shape[axis + 1 :])
            if (one.shape, one.dtype) != (shape, several.dtype):
                return False
    return True


def repeatable(entry: Any) -> bool:
    """Returns whether a program of one step can be part of one of several."""
    # What it prints or asserts is to come out after each step.
    return not entry.jaxpr.effects and not entry.level.local and entry.results.stackable


def has_more(entries: Sequence[Any] | None, arguments: list[Any]) -> bool:
    """Returns whether there are elements for one more step, as far as it is known where they come from."""
    sources = [pull.source(arguments) for pull in entries[0].pulls] if entries else []
    with outside():
        return all(source is None or source._has_next(sources.count(source)) for source in sources)


class Apart(list, nest.LeafBase):
    """A leaf of the results of several steps that are no one array, such as those of batches of other sizes."""


def one_by_one(count: int, step: Callable[[], Any], more: Callable[[], bool]) -> Any:
    """Runs so many steps, or as many as there are data for, and puts their results together."""
    results: list[Any] = []
    while len(results) < count and (not results or more()):
        try:
            results.append(step())
        except (OutOfRangeError, StopIteration) as error:
            if not results or not ends_data(error):
                raise
            break
    try:
        return nest.merge(results, _stacked)
    except AssertionError:  # of different structures
        return Apart(results)


def _stacked(leaves: Sequence[Any]) -> Any:
    """Returns the leaves of several results as one; a list where they differ in shape."""
    first = leaves[0]
    kind = type(first)
    if isinstance(first, (PerReplica, Mirrored)):
        if any(type(leaf) is not kind or len(leaf.values) != len(first.values) for leaf in leaves):
            return Apart(leaves)
        parts = [_stacked(column) for column in zip(*(leaf.values for leaf in leaves))]
        return Apart(leaves) if any(isinstance(part, Apart) for part in parts) else kind(parts, mesh_of(first))
    if isinstance(first, (bool, int, float, complex)):
        leaves = [
            array_conversion.as_array(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
            for leaf in leaves
        ]
    if not all(is_array(leaf) and not is_text(leaf) for leaf in leaves):
        return first if all(_is_same(leaf, first) for leaf in leaves) else Apart(leaves)
    if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
        return Apart(leaves)
    # The results of programs lie on all devices, those of eager code on one.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    return jnp.stack(leaves if traced else [jax_internals.first_copy(jnp.asarray(leaf)) for leaf in leaves])


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(np.all(one == other)))
