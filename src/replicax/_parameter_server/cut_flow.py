"""What a server computes for the new values of its leaves, and what has to be shipped to it: a minimum cut by bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from replicax._parameter_server.cut_rules import Kind, Node, Step, is_small, step_of

_LARGEST = 2**30  # the sum of all capacities: SciPy computes with 32 bits


@dataclass
class Facts:
    """What is known of a node on a server.

    Args:
        step: how the server computes it, None where it cannot or need not.
        given: whether a worker has to ship it, or something that it is computed from.
        follows: whether it depends on a leaf of the server through operations that go element by element: then the
            server computes it.
        reads: whether it depends on a leaf of the server at all.
        closed: whether it needs nothing from a worker.
    """

    step: Step | None = None
    given: bool = False
    follows: bool = False
    reads: bool = False
    closed: bool = False


def explored(targets: Iterable[Node], is_leaf: Callable[[Node], bool]) -> dict[Node, Facts]:
    """Returns the nodes that a server could compute some targets from, each after those that it needs."""
    steps: dict[Node, Step | None] = {}
    waiting = list(targets)
    while waiting:
        node = waiting.pop()
        if node not in steps:
            steps[node] = step = None if is_leaf(node) or node.value.is_constant else step_of(node)
            waiting += step.operands if step is not None else ()
    facts: dict[Node, Facts] = {}
    for node in sorted(steps, key=lambda node: (node.value.number, not node.pairs)):
        facts[node] = _facts(node, steps[node], facts, is_leaf)
    return facts


def _facts(node: Node, step: Step | None, facts: dict[Node, Facts], is_leaf: Callable[[Node], bool]) -> Facts:
    if is_leaf(node):
        return Facts(follows=True, reads=True, closed=True)
    if node.value.is_constant:
        return Facts(closed=True)
    operands = [facts[operand] for operand in step.operands] if step is not None else []
    reads, closed = any(f.reads for f in operands), all(f.closed for f in operands)
    if step is None or not _is_allowed(step, operands, reads, closed):
        return Facts(given=True)
    follows = {
        Kind.LIGHT: any(f.follows for f in operands),
        Kind.SCATTER: bool(operands) and operands[0].follows,
    }.get(step.kind, False)
    return Facts(step, False, follows, reads, closed)


def _is_allowed(step: Step, operands: Sequence[Facts], reads: bool, closed: bool) -> bool:
    small = closed and is_small(step.op)
    if step.kind is Kind.SCATTER:  # into a leaf, or into zeros
        return operands[0].reads or operands[0].closed
    if step.kind is Kind.REDUCTION:  # others are smaller when shipped
        return reads or small
    if step.kind is Kind.LOOKUP:
        return operands[0].reads or small
    return step.kind is Kind.LIGHT or small


def shipped_nodes(targets: Sequence[Node], facts: dict[Node, Facts], cost: Callable[[Node, Facts], int]) -> set[Node]:
    """Returns the nodes to ship to a server, so that it can compute the targets and the fewest bytes travel.

    Where it makes no difference, a worker computes rather than the server.
    """
    places = {node: 2 * i + 2 for i, node in enumerate(facts)}  # the value as it comes; one more as it is used
    edges: dict[tuple[int, int], float] = {}
    for node, fact in facts.items():
        place = places[node]
        if fact.given:
            edges[0, place] = math.inf
        edges[place, place + 1] = math.inf if fact.follows or fact.closed else cost(node, fact)
        for operand in fact.step.operands if fact.step else ():
            edges[places[operand] + 1, place] = math.inf
    for target in targets:
        edges[places[target] + 1, 1] = math.inf
    behind = _behind_the_cut(edges, 2 * len(facts) + 2)
    return {node for node, place in places.items() if not behind[place] and behind[place + 1]}


def _behind_the_cut(edges: dict[tuple[int, int], float], count: int) -> np.ndarray:
    """Returns for each place whether the sink, 1, is reached from it after the maximum flow from the source, 0."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    total = sum(capacity for capacity in edges.values() if capacity < math.inf)
    scale = max(1.0, 2 * total / _LARGEST)
    sizes = [_LARGEST if c == math.inf else max(1, math.ceil(c / scale)) for c in edges.values()]
    graph = csr_matrix((np.asarray(sizes, np.int32), tuple(zip(*edges))), (count, count))
    found = maximum_flow(graph, 0, 1)
    remaining = (graph - found.flow).tocsr()
    remaining.eliminate_zeros()
    reached, _ = breadth_first_order(remaining.T.tocsr(), 1, directed=True)
    behind = np.zeros(count, bool)
    behind[reached] = True
    return behind
