"""The part of a program that one parameter server runs: what it reads, replaces, takes and answers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicax._parameter_server.cut_flow import Facts, explored, shipped_nodes
from replicax._parameter_server.cut_graph import Value
from replicax._parameter_server.cut_rules import Node, constant_of, pair_operands, replaces
from replicax._parameter_server.cut_sums import compute, whole

Place = tuple[int, int]  # the number of a leaf, and of a part of it


class Side:
    """What a server does, and what it needs for that.

    Args:
        here: the parts of leaves that lie on the server, by the nodes that they are.
        targets: the new values of such parts.
        unread: returns how many bytes more a worker reads if it computes what needs these leaves.
        dear: leaves that a worker is to ship as little of as can be, as the bits of an integer.

    Attributes:
        shipped: the nodes that it takes, in the order in which the program computes them.
        read: the parts whose old values it needs.
        stale: the parts of whose new values some elements are made of the old ones that the worker saw alone.
    """

    def __init__(
        self,
        here: Mapping[Node, Place],
        targets: Mapping[Place, Node],
        unread: Callable[[int], int],
        dear: int = 0,
    ):
        self._here, self.targets = here, targets
        wanted = [*targets.values()]
        facts = explored(wanted, lambda node: node in here)
        own = functools.reduce(operator.or_, (1 << leaf for leaf, _ in here.values()), 0)
        cut = shipped_nodes(wanted, facts, lambda node, fact: _cost(node, fact, lambda x: unread(x & own), dear))
        self._steps = {node: fact.step for node, fact in facts.items() if fact.step is not None and node not in cut}
        used = self._slice(wanted)
        self._steps = {node: step for node, step in self._steps.items() if node in used}
        self._order = {node: i for i, node in enumerate(self._steps)}
        self.shipped = [node for node in facts if node in used and node in cut]
        self._shipped = frozenset(self.shipped)
        self.read = [here[node] for node in facts if node in used and node in here]
        olds = {place: node for node, place in here.items()}
        self.stale = [place for place in targets if place in olds and self._is_stale(place, olds[place])]

    def _needs(self, node: Node) -> Sequence[Node]:
        return self._steps[node].operands if node in self._steps else ()

    def _slice(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns all nodes that some are computed from on the server."""
        found, waiting = set[Node](), [*nodes]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += self._needs(node)
        return found

    def reads_leaves(self, place: Place) -> bool:
        """Returns whether the new value of a part is computed from what the server has."""
        return any(node in self._here for node in self._slice([self.targets[place]]))

    def _is_stale(self, place: Place, old: Node) -> bool:
        """Returns whether a new value, or some of its elements, is made of the old one that the worker saw alone.

        A gradient, which is made of that too, is combined with the old value that is there.

        Args:
            place: the part.
            old: its old value.
        """
        target, bit = self.targets[place], 1 << place[0]
        found = self._slice([target])
        # For each node whether it has to do with the old value that is there, and whether it is stale itself.
        known = {node: (False, bool(shipped_leaves(node) & bit)) for node in found & self._shipped}
        if not any(stale for _, stale in known.values()):
            return False
        known[old] = True, False
        for node in sorted(found & self._steps.keys(), key=self._order.__getitem__):
            op = self._steps[node].op
            operands = [known.get(operand, (False, False)) for operand in self._needs(node)]
            combined, stale = any(fresh for fresh, _ in operands), any(stale for _, stale in operands)
            if op.name == "select_n":
                stale = any(stale for _, stale in operands[1:])
            elif combined and not replaces(op):
                stale = (True, True) in operands
            known[node] = combined, stale
        return known.get(target, (False, False))[1]

    def function(
        self, writes: Sequence[Place], reads: Sequence[Place], answered: Sequence[Place]
    ) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Returns the program of (written old values, read old values, shipped) that returns (new values, answers)."""
        nodes = {place: node for node, place in self._here.items()}

        def update(olds: Sequence[Any], others: Sequence[Any], shipped: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            known: dict[Node, Any] = {}

            def value_of(node: Node) -> Any:
                return known[node] if node in known else constant_of(node)

            known.update((nodes[place], array) for place, array in zip(writes, olds) if place in nodes)
            known.update((nodes[place], array) for place, array in zip(reads, others))
            remaining = iter(shipped)
            for node in self.shipped:
                known[node] = (next(remaining), next(remaining)) if node.pairs else next(remaining)
            for node, step in self._steps.items():
                if node not in known:
                    results = compute(step, [value_of(operand) for operand in step.operands])
                    known.update((Node(value, node.rows), result) for value, result in zip(step.op.outputs, results))
            news = {place: whole(value_of(node)) for place, node in self.targets.items()}
            return [news[place] for place in writes], [news[place] for place in answered]

        return update


def side_of(here: Mapping[Node, Place], targets: Mapping[Place, Node], unread: Callable[[int], int]) -> Side:
    """Returns what a server does: such that few bytes travel and, if that can be, no new value is stale."""
    side = Side(here, targets, unread)
    if side.stale:
        other = Side(here, targets, unread, functools.reduce(operator.or_, (1 << leaf for leaf, _ in side.stale)))
        if len(other.stale) < len(side.stale):
            return other
    return side


def _cost(node: Node, fact: Facts, unread: Callable[[int], int], dear: int) -> int:
    """Returns what it costs to ship a node, in bytes."""
    size = shipped_bytes(node) + (unread(node.value.leaves) if fact.reads else 0)
    return 2 * size + 1 if node.value.leaves & dear else size


def _shipped_values(node: Node) -> Sequence[Value]:
    if not node.pairs:
        return [node.value]
    assert node.value.op is not None
    return pair_operands(node.value.op)


def shipped_leaves(node: Node) -> int:
    """Returns the leaves that what is shipped depends on, as the bits of an integer."""
    return functools.reduce(operator.or_, (value.leaves for value in _shipped_values(node)), 0)


def shipped_bytes(node: Node) -> int:
    """Returns how many bytes of a node travel; of pairs, as many as if they were spread evenly."""
    size = sum(value.nbytes for value in _shipped_values(node))
    return max(1, size if node.rows is None else size * node.rows.many // max(1, node.rows.size))
