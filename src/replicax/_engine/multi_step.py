"""Several steps of a compiled function in one call.

The program of one step (see `function`) is repeated inside of one program (see `repeated_program`), with the elements
of all steps put together before (see `_data.multi_step`). Where that cannot be, since
the elements differ in shape, the data end or the function is no program at all, the steps run one by one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from replicax._base import array_conversion, jax_internals, nest
from replicax._base.errors import OutOfRangeError
from replicax._base.types import Leaf, Tree
from replicax._data.calls import ends_data
from replicax._data.iterators import ElementIterator, has_next, pull_block, push_back
from replicax._data.multi_step import Block
from replicax._engine.program import Program
from replicax._tracing.dataset_reads import DatasetRead, element_arrays, outside, same_sources
from replicax._values import Mirrored, PerReplica, is_numeric, mesh_of


class Several(NamedTuple):
    """The program of one step that a call of several steps repeats, and the elements of all steps."""

    entry: Program
    steps: int
    elements: list[Tree]


class NotTraced(enum.Enum):
    """Says that there is no program yet that takes the elements."""

    NOT_TRACED = 0


NOT_TRACED = NotTraced.NOT_TRACED


def found(entries: Sequence[Program], count: int, arguments: Sequence[ElementIterator]) -> Several | NotTraced | None:
    """Returns the next elements, with the program that takes them; None where the steps have to run one by one.

    `entries` are the programs of one step that there are. Where none takes the elements, it is `NOT_TRACED`, and they
    are to come yet.
    """
    first = entries[0]
    sources = [source for read in first.reads if (source := read.source(arguments)) is not None]
    if len({id(source) for source in sources}) < len(first.reads):  # one is gone, or comes twice
        return None
    pulled: list[tuple[ElementIterator, Block]] = []
    with outside():
        for source in sources:
            block = pull_block(source, count)
            if block is None:
                break
            pulled.append((source, block))
        all_came = len(pulled) == len(sources)
        elements = [block.element for _, block in pulled]
        alike = [e for e in entries if same_sources(e.reads, first.reads)] if all_came else []
        entry = next((e for e in alike if _takes(e.reads, elements)), None)
        if entry is not None and entry.is_repeatable:
            return Several(entry, count, elements)
        for source, block in pulled:
            push_back(source, block)
    return NOT_TRACED if entry is None and all_came else None


def _takes(reads: Sequence[DatasetRead], elements: Sequence[Tree]) -> bool:
    """Returns whether the elements of all steps have the shapes and dtypes of those pulled while tracing."""
    for read, element in zip(reads, elements):
        structures = {jax.tree.structure(read.element), jax.tree.structure(element)}
        if len(structures) > 1:
            return False
        for one, stacked, leaf in zip(element_arrays(read.element), element_arrays(element), nest.values(element)):
            axis = 1 if isinstance(leaf, PerReplica) else 0
            shape = (*stacked.shape[:axis], *stacked.shape[axis + 1 :])
            if (one.shape, one.dtype) != (shape, stacked.dtype):
                return False
    return True


def has_more(entries: Sequence[Program] | None, arguments: Sequence[ElementIterator]) -> bool:
    """Returns whether there are elements for one more step, as far as it is known where they come from."""
    sources = [read.source(arguments) for read in entries[0].reads] if entries else []
    with outside():
        return all(source is None or has_next(source, sources.count(source)) for source in sources)


class SeparateResults(list[Leaf], nest.LeafBase):
    """A leaf of the results of several steps that are no one array, such as those of batches of other sizes."""


def one_by_one(count: int, step: Callable[[], Tree], more: Callable[[], bool]) -> Tree:
    """Runs so many steps, or as many as there are data for, and puts their results together."""
    results: list[Tree] = []
    while len(results) < count and (not results or more()):
        try:
            results.append(step())
        except (OutOfRangeError, StopIteration) as error:
            if not results or not ends_data(error):
                raise
            break
    return together(results)


def together(results: list[Tree]) -> Tree:
    """Returns the results of several steps as what a call of several steps returns."""
    try:
        return nest.merge(results, _stacked)
    except AssertionError:  # of different structures
        return SeparateResults(results)


def _stacked(leaves: Sequence[Leaf]) -> Leaf:
    """Returns the leaves of several results as one; a list where they differ in shape."""
    first = leaves[0]
    kind = type(first)
    if isinstance(first, (PerReplica, Mirrored)):
        if any(type(leaf) is not kind or len(leaf.values) != len(first.values) for leaf in leaves):
            return SeparateResults(leaves)
        parts = [_stacked(column) for column in zip(*(leaf.values for leaf in leaves))]
        are_one = not any(isinstance(part, SeparateResults) for part in parts)
        return kind(parts, mesh_of(first)) if are_one else SeparateResults(leaves)
    if isinstance(first, (bool, int, float, complex)):
        leaves = [
            array_conversion.as_array(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
            for leaf in leaves
        ]
    if not all(map(is_numeric, leaves)):
        return first if all(nest.is_same(leaf, first) for leaf in leaves) else SeparateResults(leaves)
    if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
        return SeparateResults(leaves)
    # The results of programs lie on all devices, those of eager code on one.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    return jnp.stack(leaves if traced else [jax_internals.first_copy(jnp.asarray(leaf)) for leaf in leaves])
