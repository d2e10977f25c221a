"""Checkpoints of either format, opened: what values they have, and which of these belong to which objects.

A restore walks the objects that are there and asks the source for each object's value. Those of
TensorFlow are in `_checkpoint.tensorflow_source`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax._checkpoint import object_graph
from replicax._checkpoint.files import NodeRecord
from replicax._checkpoint.object_graph import ObjectNode

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # the key under which readers show the object graph
VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
POSITION = ".ATTRIBUTES/ITERATOR_STATE"
REPLICAS = ".ATTRIBUTES/REPLICA_VALUES"  # beside VALUE: of each replica, where these differ
SAVE_COUNTER = f"save_counter/{VALUE}"  # the number of calls of `save`


class Source:
    """A checkpoint that was opened.

    Attributes:
        nodes: the saved objects, each with its children's numbers and the key of its array.
        arrays: the arrays by their keys; a damaged one raises CheckpointError when it is asked for.
        narrows: whether an integer may be restored into a variable of fewer bits.
        save: names the call of `save` that wrote it; equal for the copies that several workers have of it.
        can_be_sent: whether `nodes` and `arrays` are all that another worker needs of it.
    """

    nodes: list[NodeRecord]
    arrays: Mapping[str, np.ndarray]
    narrows = False
    save: str
    can_be_sent = True

    def check(self) -> None:
        """Raise CheckpointError for a damaged array; those of replicax were checked when the source was opened."""

    def match(self, roots: Sequence[object]) -> tuple[list[ObjectNode], dict[int, int]]:
        """Returns the objects that are there, and by their numbers those of the saved nodes that belong to them."""
        nodes = object_graph.graph_of(roots)
        return nodes, pairs_by_names(nodes, self.nodes)

    def is_optional(self, node: ObjectNode) -> bool:
        """Returns whether an object that is there need not have a value."""
        return False

    def type(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """Returns the shape and dtype of an array."""
        return self.arrays[key].shape, self.arrays[key].dtype

    def graph(self) -> Any:
        """Returns the object graph as a reader shows it, None where there is none."""
        return json.dumps(self.nodes).encode()


class ReplicaxSource(Source):
    """A checkpoint of replicax that was read here, or by another worker that has sent it."""

    def __init__(self, nodes: list[NodeRecord], arrays: Mapping[str, np.ndarray], save: str):
        self.nodes, self.arrays, self.save = nodes, arrays, save


def pairs_by_names(here: Sequence[ObjectNode], saved: Sequence[NodeRecord]) -> dict[int, int]:
    """Returns the numbers of the saved nodes that have the same names as those that are here, by the numbers of these.

    Names that are nearer to the root come first.
    """
    pairs, waiting = {0: 0}, [0]
    for number in waiting:
        children = saved[pairs[number]]["children"]
        for name, child in here[number].children.items():
            if name in children and child not in pairs:
                pairs[child] = children[name]
                waiting.append(child)
    return pairs
