"""The objects of a saved model: what leads from one to the next, and what is a variable, a function or a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from replicax._base import foreign_state
from replicax._checkpoint import object_graph
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.function import Function
from replicax._saved_model.asset import Asset
from replicax._variables.variable import Variable

Known: TypeAlias = Variable | Function | ConcreteFunction | Asset


class Node:
    """An object, and its children's numbers by name."""

    def __init__(self, value: Any, names: tuple[str, ...]):
        self.value, self.names = value, names
        self.children: dict[str, int] = {}

    @property
    def kind(self) -> str:
        """The kind of object that stands for it in a loaded model."""
        return next((name for kind, name in _KINDS if isinstance(self.value, kind)), "object")


# As in TensorFlow, a tuple comes back as a list.
_KINDS: tuple[tuple[type, str], ...] = (
    (Variable, "variable"),
    (Function, "function"),
    (ConcreteFunction, "concrete function"),
    (Asset, "asset"),
    (dict, "dict"),
    (list, "list"),
    (tuple, "list"),
)


def nodes_of(root: object) -> list[Node]:
    """Returns the objects that can be reached from a root, each once; the root is the first."""
    nodes = [Node(root, ())]
    numbers = {id(root): 0}
    for node in nodes:
        for name, child in _children(node.value):
            child = foreign_state.variable_of(child)
            if not (isinstance(child, Known) or object_graph.has_children(child)):
                continue
            if id(child) not in numbers:
                numbers[id(child)] = len(nodes)
                nodes.append(Node(child, (*node.names, name)))
            node.children[name] = numbers[id(child)]
    return nodes


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Known):
        return
    yield from object_graph.trackable_children(value).items()
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, Function):  # a method, which each object has for itself
                yield name, getattr(value, name)
