"""Cuts a traced function into the parts that a worker and the parameter servers run.

The worker asks for the rows that it looks up (`Cut.index`, `Cut.gathers`) and for whole leaves (`Cut.reads`), computes
gradients and results (`Cut.compute`), and ships to each server what that one's program (`Cut.updates`) makes new values
of. All four together compute what the whole program does. Nothing here runs anything.

A server does what goes element by element, adds rows in their places, and reduces what it has itself; what it takes is
a minimum cut by bytes. What depends on a leaf through operations of the first kind is done where the leaf lies, so that
updates of several workers add up. Everything else is computed by the worker, and its result shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex

from replicax._base import jax_internals
from replicax._parameter_server.cut_graph import Graph, Op, Value, needed_ops, same_value
from replicax._parameter_server.cut_rules import Node, Rows, step_of
from replicax._parameter_server.cut_server import Side, side_of
from replicax._parameter_server.cut_types import Callback, Cut, Exchange, Gather, ServedLeaf, Stage, Take, Update
from replicax._parameter_server.cut_worker import Worker, output_avals

_Part = tuple[int, int]  # the numbers of a leaf and of a part of it


def cut(jaxpr: jex.ClosedJaxpr, leaves: Sequence[ServedLeaf], others: Sequence[int], results: Sequence[int]) -> Cut:
    """Cuts a function into the parts that a worker and parameter servers run.

    Args:
        jaxpr: of a level of tracing; its arguments are `args` of the stages.
        leaves: the leaves of variables on servers.
        others: the slots of the inputs that the worker has, such as elements of datasets.
        results: which of the jaxpr's outputs are results.

    Raises:
        ValueError: the function has inputs that are neither of these.
    """
    return _Cutting(jaxpr, leaves, others, results).cut()


class _Cutting:
    def __init__(
        self, jaxpr: jex.ClosedJaxpr, leaves: Sequence[ServedLeaf], others: Sequence[int], results: Sequence[int]
    ):
        self._leaves, self._results = leaves, results
        graph = self._graph = Graph(jaxpr, {x.slot: i for i, x in enumerate(leaves) if x.slot is not None})
        unknown = graph.inputs.keys() - {x.slot for x in leaves} - {*others}
        if unknown:
            raise ValueError(f"Inputs of the program are neither of variables on servers nor of datasets: {unknown}.")
        self._olds = [None if x.slot is None else graph.inputs.get(x.slot) for x in leaves]
        self._news = [None if x.output is None else graph.outputs[x.output] for x in leaves]
        self._others = [graph.inputs.get(slot) for slot in others]
        self._callbacks, self._operands = self._without_callbacks()
        self._unread = self._bytes_unread()
        self._sides = {server: self._side(server) for server in self._servers()}
        self._answers = self._answered()
        # What is shipped, by the value, or by the sum that takes the pairs.
        nodes = [node for side in self._sides.values() for node in side.shipped]
        self._shipped = {key: i for i, key in enumerate(dict.fromkeys((node.value, node.pairs) for node in nodes))}

    def cut(self) -> Cut:
        computed = [result for result in self._results if result not in self._answers]
        outputs = [*self._shipped, *((self._graph.outputs[place], False) for place in computed)]
        outputs += [(value, False) for value in self._operands]
        worker = Worker(self._graph, outputs, self._olds, self._others)
        updates = [self._update(server, side) for server, side in self._sides.items()]
        servers = list(self._sides)
        exchange = Exchange(
            gathers=tuple(Gather(self._leaves[leaf].place, ids, aval) for leaf, ids, aval in worker.gathers()),
            reads=tuple(self._leaves[leaf].place for leaf in worker.reads),
            shipped=tuple(worker.avals[: len(self._shipped)]),
            updates=tuple(update for update, _ in updates),
            computed=tuple(computed),
            answers=tuple(
                (result, servers.index(server), self._answered_by(server).index((leaf, number)))
                for result, leaf in self._answers.items()
                for number, (server, _, _) in enumerate(self._leaves[leaf].place.parts)
            ),
        )
        return Cut(
            exchange=exchange,
            index=worker.index(),
            compute=worker.compute(),
            programs=[program for _, program in updates],
            callbacks=self._callbacks,
            has_callbacks=worker.has_callbacks,
        )

    # What is to be computed.

    def _without_callbacks(self) -> tuple[list[Callback], list[Value]]:
        """Takes callbacks whose results nobody needs out of the program; returns them and their operands."""
        graph, callbacks, operands = self._graph, list[Callback](), list[Value]()
        used = {value for op in graph.ops for value in op.inputs} | {*graph.outputs}
        kept: list[Op] = []
        for op in graph.ops:
            called = jax_internals.callback_of(op.eqn)
            if called is None or not op.stays or not used.isdisjoint(op.outputs):
                kept.append(op)
                continue
            callbacks.append(Callback(called[0], len(op.inputs), called[1]))
            operands += op.inputs
        graph.ops[:] = kept
        return callbacks, operands

    def _bytes_unread(self) -> Callable[[int], int]:
        """Returns a function that tells how many bytes of some leaves a worker would read for nothing else."""
        roots = {same_value(new) for new in self._news if new is not None}
        results = [self._graph.outputs[i] for i in self._results]
        read = 0
        for value in (*(v for v in results if same_value(v) not in roots), *self._operands):
            read |= value.leaves
        ops, _ = needed_ops([new for new in self._news if new is not None], self._graph.ops)
        for op in ops:
            if op.stays or not op.outputs or step_of(Node(op.outputs[0])) is None:
                read |= op.leaves
        sizes = {1 << i: old.nbytes for i, old in enumerate(self._olds) if old is not None and not read >> i & 1}
        others = sum(sizes)
        return lambda leaves: sum(size for bit, size in sizes.items() if leaves & bit) if leaves & others else 0

    def _servers(self) -> list[int]:
        """Returns the servers that have something to update."""
        return sorted({part.server for leaf in self._leaves if leaf.output is not None for part in leaf.place.parts})

    def _node(self, value: Value, part: _Part) -> Node:
        """Returns the node that a part of a leaf is, of its old or new value."""
        leaf, number = part
        place = self._leaves[leaf].place
        if not place.is_sharded:
            return Node(value)
        _, start, stop = place.parts[number]
        return Node(value, Rows(value.aval.shape[0], start, stop))

    def _side(self, server: int) -> Side:
        here: dict[Node, _Part] = {}
        targets: dict[_Part, Node] = {}
        for i, leaf in enumerate(self._leaves):
            for number in (number for number, part in enumerate(leaf.place.parts) if part.server == server):
                old, new = self._olds[i], self._news[i]
                if old is not None:
                    here[self._node(old, (i, number))] = i, number
                if new is not None:
                    targets[i, number] = self._node(new, (i, number))
        return side_of(here, targets, self._unread)

    def _answered(self) -> dict[int, int]:
        """Returns the results that are new values of leaves, which servers know best, and these leaves."""
        leaf_of = {same_value(new): i for i, new in enumerate(self._news) if new is not None and self._is_made(i)}
        roots = {result: same_value(self._graph.outputs[result]) for result in self._results}
        return {result: leaf_of[root] for result, root in roots.items() if root in leaf_of and root.op is not None}

    def _is_made(self, leaf: int) -> bool:
        """Returns whether the new value of a leaf is computed from what its servers have."""
        parts = enumerate(self._leaves[leaf].place.parts)
        return all(self._sides[part.server].reads_leaves((leaf, number)) for number, part in parts)

    def _answered_by(self, server: int) -> list[_Part]:
        """Returns the parts whose new values a server answers."""
        leaves = sorted({*self._answers.values()})
        parts = ((leaf, number, part) for leaf in leaves for number, part in enumerate(self._leaves[leaf].place.parts))
        return [(leaf, number) for leaf, number, part in parts if part.server == server]

    # The parts of the program.

    def _update(self, server: int, side: Side) -> tuple[Update, Stage]:
        writes = list(side.targets)
        reads = [part for part in side.read if part not in side.targets]
        takes, avals = list[Take](), list[jax.ShapeDtypeStruct]()
        for node in side.shipped:
            rows, number = node.rows, self._shipped[node.value, node.pairs]
            takes.append(Take(number, node.pairs, *(() if rows is None else rows[1:])))
            for aval in output_avals((node.value, node.pairs)):
                shape = aval.shape if rows is None or node.pairs else (rows.many, *aval.shape[1:])
                avals.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        update = Update(server, self._names(writes), self._names(reads), tuple(takes), self._names(side.stale))
        function = side.function(writes, reads, self._answered_by(server))
        return update, Stage(function, (self._avals(writes), self._avals(reads), tuple(avals)))

    def _names(self, parts: Sequence[_Part]) -> tuple[str, ...]:
        return tuple(self._leaves[leaf].place.names[number] for leaf, number in parts)

    def _avals(self, parts: Sequence[_Part]) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self._leaves[leaf].place.part(number).kind for leaf, number in parts)
