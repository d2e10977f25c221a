"""Checkpoints of TensorFlow as sources of values: bundles with an object graph, and those whose keys are names.

The graph is a message of tensorflow/core/protobuf/trackable_object_graph.proto. Objects are found by the names that
lead to them, as in replicax. Keras 3 has the same names on TensorFlow and here. Keras 2 had others for layers and their
weights, and its first optimizers had their slots by variable; these names are added to those of the objects here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from replicax._base.wire_format import fields
from replicax._checkpoint import object_graph
from replicax._checkpoint.files import NodeRecord
from replicax._checkpoint.object_graph import ObjectNode
from replicax._checkpoint.sources import GRAPH, Source, pairs_by_names
from replicax._checkpoint.tensor_bundle import TensorBundle

_VALUE = b"VARIABLE_VALUE"  # the name of a variable's value among the attributes of an object
_CONFIG = ".ATTRIBUTES/OBJECT_CONFIG_JSON"  # what Keras 2 notes of a layer, which nothing restores
# The attributes of Keras's optimizers, lists in the order of the variables, which had these slots in Keras 2.
_SLOTS = {
    "m": ("_momentums", "_m"),
    "v": ("_velocities", "_u"),
    "vhat": ("_velocity_hats",),
    "momentum": ("momentums", "_momentums"),
    "rms": ("_velocities",),
    "mg": ("_average_gradients",),
    "accumulator": ("_accumulators",),
    "accum_grad": ("_accumulated_grads",),
    "accum_var": ("_accumulated_delta_vars",),
    "linear": ("_linears",),
}


class _Arrays(Mapping[str, np.ndarray]):
    """The tensors of a bundle that are values of objects."""

    def __init__(self, bundle: TensorBundle):
        self._bundle = bundle
        self._keys = [key for key in bundle if key != GRAPH and not key.endswith(_CONFIG)]

    def __getitem__(self, key: str) -> np.ndarray:
        return self._bundle[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._bundle


class TensorFlowSource(Source):
    """A checkpoint of TensorFlow."""

    narrows = True  # Keras's counters have 64 bits on TensorFlow, and 32 on JAX
    can_be_sent = False  # objects are matched by more than their nodes

    def __init__(self, bundle: TensorBundle):
        self._bundle, self.arrays = bundle, _Arrays(bundle)
        self.save = f"TensorFlow's {bundle.digest}"
        self._spared: set[int] = set()  # the ids of variables that TensorFlow does not save
        self._slots: dict[int, list[tuple[int, str, int]]] = {}  # by optimizer: variable, name, slot
        self.by_name = GRAPH not in bundle
        self.nodes = []
        if self.by_name:
            self.nodes += [{"children": {}}, *(NodeRecord(children={}, key=key) for key in self.arrays)]
            return
        for number, value in fields(self._graph()):
            if number == 1 and isinstance(value, bytes):
                self._add_node(value)

    def _graph(self) -> bytes:
        graph: bytes = self._bundle[GRAPH].item()
        return graph

    def _add_node(self, message: bytes) -> None:
        """Adds a saved object (TrackableObject)."""
        node: NodeRecord = {"children": {}}
        for number, value in fields(message):
            told: dict[int, Any] = dict(fields(value)) if isinstance(value, bytes) else {}
            if number == 1:
                node["children"][told[2].decode()] = told.get(1, 0)
            elif number == 2 and told.get(1) == _VALUE:
                node["key"] = told[3].decode()
            elif number == 3:
                slot = (told.get(1, 0), told[2].decode(), told.get(3, 0))
                self._slots.setdefault(len(self.nodes), []).append(slot)
        self.nodes.append(node)

    def check(self) -> None:
        """Read all tensors; raise CheckpointError for a damaged one."""
        self._bundle.check()

    def type(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """Returns the shape and dtype of an array."""
        return self._bundle.shape(key), self._bundle.dtype(key)

    def graph(self) -> Any:
        """Returns the object graph as TensorFlow wrote it, a message; None where there is none."""
        return None if self.by_name else self._graph()

    def is_optional(self, node: ObjectNode) -> bool:
        """Returns whether an object that is there need not have a value."""
        in_keras = node.leaf is not None and node.leaf.identity[0] in self._spared
        return in_keras or (self.by_name and node.names == ("save_counter",))

    def _children(self, obj: object) -> dict[str, Any]:
        children = _children(obj)
        if object_graph.is_keras_object(obj) and any(hasattr(type(obj), name) for name in ("update_state", "next")):
            self._spared.update(map(id, children.values()))  # in metrics, and in generators of seeds
        return children

    def match(self, roots: Sequence[object]) -> tuple[list[ObjectNode], dict[int, int]]:
        """Returns the objects that are there, and by their numbers those of the saved nodes that belong to them."""
        if self.by_name:
            nodes = object_graph.graph_of(roots)
            numbers = {node.get("key"): number for number, node in enumerate(self.nodes)}
            found = {at: numbers.get(_name(node.leaf.owner)) for at, node in enumerate(nodes) if node.leaf is not None}
            return nodes, {at: number for at, number in found.items() if number is not None}
        self._spared.clear()
        nodes = object_graph.graph_of(roots, self._children)
        pairs = pairs_by_names(nodes, self.nodes)
        here = {saved: number for number, saved in pairs.items()}
        for optimizer, slots in self._slots.items():
            for variable, name, slot in slots if optimizer in here else ():
                if (number := _slot_of(nodes, here[optimizer], here.get(variable), name)) is not None:
                    pairs.setdefault(number, slot)
        return nodes, pairs


def _name(owner: Any) -> str:
    """Returns the name that TensorFlow gives a variable."""
    return str(getattr(owner, "path", None) or getattr(owner, "name", "")).removesuffix(":0")


def _slot_of(nodes: Sequence[ObjectNode], optimizer: int, variable: int | None, name: str) -> int | None:
    """Returns the number of the slot that an optimizer here has for a variable; None where there is none."""

    def items(attribute: str) -> dict[str, int]:
        number = nodes[optimizer].children.get(attribute)
        return {} if number is None else nodes[number].children

    places = [place for place, number in items("_trainable_variables").items() if number == variable]
    found = [items(attribute).get(place) for place in places for attribute in _SLOTS.get(name, ())]
    return next((number for number in found if number is not None), None)


def _children(obj: object) -> dict[str, Any]:
    """Returns the children of an object by the names that TensorFlow's checkpoints may have for them."""
    children = object_graph.trackable_children(obj)
    if hasattr(type(obj), "make_seeds"):  # a generator of random numbers, which are others here
        return {}
    if not object_graph.is_keras_object(obj):
        return children
    if hasattr(type(obj), "apply_gradients"):  # an optimizer
        # Where a Keras 3 model has layers in lists, TensorFlow's checkpoint has their weights in the optimizer alone.
        children["_trainable_variables"] = getattr(obj, "_trainable_variables", [])
        if "_variables" in children:  # last: their order is another one in Keras 2
            children["_variables"] = children.pop("_variables")
    others = {name[1:]: child for name, child in children.items() if name.startswith("_")}  # of the same in Keras 2
    if "_iterations" in children:
        others["iter"] = children["_iterations"]
    if "Depthwise" in type(obj).__name__ and "kernel" in children:
        others["depthwise_kernel"] = children["kernel"]
    others |= _layers(obj)
    return children | {name: child for name, child in others.items() if name not in children}


def _layers(model: Any) -> dict[str, Any]:
    """Returns the layers of a model by the names that they had in Keras 2."""
    layers = model.layers if hasattr(type(model), "layers") and hasattr(type(model), "fit") else []
    with_weights = [layer for layer in layers if layer.weights]
    return {f"layer_with_weights-{number}": layer for number, layer in enumerate(with_weights)} | {
        f"layer-{number}": layer for number, layer in enumerate(layers)
    }
