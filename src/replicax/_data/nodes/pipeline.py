"""The nodes of a dataset as text."""

from __future__ import annotations

from replicax._data.nodes.node import Node
from replicax._data.specs import INFINITE_CARDINALITY, tensor_spec


def pipeline_text(node: Node) -> str:
    """Return a line for each node up to this one, sources first: its name, the number of elements and their spec.

    The inputs of a node with several inputs are marked by dashes.
    """
    lines = _lines(node)
    names = max(len(name) for name, _ in lines)
    counts = max(len(_count(node)) for _, node in lines)
    return "\n".join(f"{name:{names}}  {_count(node):{counts}}  {_spec(node)}" for name, node in lines)


def _lines(node: Node) -> list[tuple[str, Node]]:
    lines = []
    for source in node.inputs:
        input_lines = _lines(source)
        if len(node.inputs) > 1:
            input_lines = [(("  " if i else "- ") + name, part) for i, (name, part) in enumerate(input_lines)]
        lines += input_lines
    return [*lines, (node.name, node)]


def _count(node: Node) -> str:
    if node.cardinality < 0:
        return "without end" if node.cardinality == INFINITE_CARDINALITY else "unknown number"
    return f"{node.cardinality} element{'' if node.cardinality == 1 else 's'}"


def _spec(node: Node) -> str:
    spec = node.spec(False)
    return "?" if spec is None else repr(tensor_spec(spec)).replace(", name=None", "")
