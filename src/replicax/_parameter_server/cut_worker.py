"""The part of a program that a worker runs: what it asks for, reads and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicax._parameter_server.cut_gathers import Lookup, lookup_of, pays
from replicax._parameter_server.cut_graph import Graph, Op, Value, needed_ops
from replicax._parameter_server.cut_rules import pair_operands, pairs_of
from replicax._parameter_server.cut_types import Stage

Output = tuple[Value, bool]  # a value, or (True) what a scatter that gives it changes, as ids and rows


class Worker:
    """What a worker does.

    Args:
        graph: the program.
        outputs: what it computes.
        olds: the values of leaves that the program reads, None of others.
        others: the inputs that the worker has, None of those that the program does not use.

    Attributes:
        reads: the numbers of the leaves that it reads whole.
        avals: of the arrays that each output is.
        has_callbacks: whether it calls Python.
    """

    def __init__(
        self, graph: Graph, outputs: Sequence[Output], olds: Sequence[Value | None], others: Sequence[Value | None]
    ):
        self._graph, self._outputs, self._olds, self._others = graph, outputs, olds, others
        self._lookups: dict[Op, Lookup] = {}
        leaf_of = {old: i for i, old in enumerate(olds) if old is not None}
        wanted = [value for output in outputs for value in _values_of(output)]
        if leaf_of:
            self._look_up(wanted, leaf_of)
        self._ops, inputs = needed_ops(wanted, graph.ops, self._instead)
        self.reads = sorted(leaf_of[value] for value in inputs if value in leaf_of)
        self.avals = [output_avals(output) for output in outputs]
        computed = [op for op in self._ops if op not in self._lookups]
        self.has_callbacks = any(op.calls for op in computed)
        # Lookups of the same rows ask once.
        self._asked = list({lookup.key: lookup for lookup in self._lookups.values()}.values())

    def _instead(self, op: Op) -> Sequence[Value] | None:
        return self._lookups[op].needs if op in self._lookups else None

    def _look_up(self, wanted: Sequence[Value], leaf_of: Mapping[Value, int]) -> None:
        """Finds the lookups that pay, of leaves that are not read whole anyway."""
        for op in self._graph.ops:
            lookup = lookup_of(op, leaf_of)
            if lookup is not None:
                self._lookups[op] = lookup
        values = {i: value for value, i in leaf_of.items()}
        while True:
            ops, inputs = needed_ops(wanted, self._graph.ops, self._instead)
            found = {op: self._lookups[op] for op in ops if op in self._lookups}
            by_leaf: dict[int, list[Lookup]] = {}
            for lookup in found.values():
                by_leaf.setdefault(lookup.leaf, []).append(lookup)
            kept = {i for i, each in by_leaf.items() if values[i] not in inputs and pays(each, values[i])}
            before, self._lookups = self._lookups, {op: x for op, x in found.items() if x.leaf in kept}
            if len(self._lookups) == len(before):
                return

    def index(self) -> Stage | None:
        """Returns the program of (others, args) that returns the ids of each gather."""
        if not self._asked:
            return None
        sources = [lookup.source for lookup in self._asked if lookup.source is not None]
        ops, _ = needed_ops(sources, self._graph.ops, effects=False)

        def indices(others: Sequence[Any], args: Sequence[Any]) -> list[Any]:
            known = self._given(others, args)
            _run(ops, known)
            sources = ((x, None if x.source is None else _value_of(known, x.source)) for x in self._asked)
            return [lookup.ids(source) for lookup, source in sources]

        return Stage(indices, (_kinds(self._others), _kinds(self._graph.args)))

    def gathers(self) -> list[tuple[int, int, jax.ShapeDtypeStruct]]:
        """Returns the rows that it asks for: the number of the leaf, that of the ids, and the kind of the rows."""
        found = []
        for k, lookup in enumerate(self._asked):
            leaf = self._olds[lookup.leaf]
            assert leaf is not None
            rows = jax.ShapeDtypeStruct((*lookup.shape, *leaf.aval.shape[1:]), leaf.aval.dtype)
            found.append((lookup.leaf, k, rows))
        return found

    def compute(self) -> Stage:
        """Returns the program of (others, args, gathered, read) that returns all outputs."""
        asked = {lookup.key: k for k, lookup in enumerate(self._asked)}

        def run(others: Sequence[Any], args: Sequence[Any], gathered: Sequence[Any], read: Sequence[Any]) -> list[Any]:
            known = self._given(others, args)
            known.update((self._olds[leaf], array) for leaf, array in zip(self.reads, read))

            def looked_up(op: Op) -> list[Any] | None:
                if op not in self._lookups:
                    return None
                lookup = self._lookups[op]
                source = None if lookup.source is None else _value_of(known, lookup.source)
                return [lookup.finished(gathered[asked[lookup.key]], source)]

            _run(self._ops, known, looked_up)
            return [array for output in self._outputs for array in _arrays(known, output)]

        rows = tuple(aval for _, _, aval in self.gathers())
        read = _kinds([self._olds[leaf] for leaf in self.reads])
        return Stage(run, (_kinds(self._others), _kinds(self._graph.args), rows, read))

    def _given(self, others: Sequence[Any], args: Sequence[Any]) -> dict[Value | None, Any]:
        return {**dict(zip(self._others, others)), **dict(zip(self._graph.args, args))}


Known = dict[Value | None, Any]


def _values_of(output: Output) -> Sequence[Value]:
    value, pairs = output
    if not pairs:
        return [value]
    assert value.op is not None
    return pair_operands(value.op)


def _arrays(known: Known, output: Output) -> Sequence[Any]:
    value, pairs = output
    arrays = [_value_of(known, value) for value in _values_of(output)]
    return pairs_of(value.op, *arrays) if pairs else arrays  # type: ignore[arg-type]


def output_avals(output: Output) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the kinds of the arrays of an output."""
    value, pairs = output
    if not pairs:
        return (jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype),)
    with jax.enable_x64(True):  # as when it is computed
        made = jax.eval_shape(lambda *arrays: pairs_of(value.op, *arrays), *_kinds(_values_of(output)))  # type: ignore[arg-type]
    return tuple(jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in made)


def _value_of(known: Known, value: Value) -> Any:
    return value.whole_constant() if value.is_constant else known[value]


def _run(ops: Sequence[Op], known: Known, otherwise: Callable[[Op], list[Any] | None] = lambda op: None) -> None:
    """Computes operations of what is known."""
    for op in ops:
        results = otherwise(op)
        if results is None:
            results = op.compute([_value_of(known, value) for value in op.inputs])
        known.update(zip(op.outputs, results))


def _kinds(values: Sequence[Value | None]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the kinds of arrays; of those that are not used, an empty one's."""
    return tuple(
        jax.ShapeDtypeStruct((), "float32") if v is None else jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in values
    )
