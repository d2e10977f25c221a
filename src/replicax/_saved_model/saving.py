"""Writing a saved model: its objects, the programs of its functions, its variables and its files."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import jax

from replicax._base import foreign_state, json_values, planning, thread_state, tracebacks
from replicax._base.atomic_files import AnyPath, Artifact, path_text, replacing, write_record
from replicax._base.types import Tree
from replicax._checkpoint import object_graph
from replicax._checkpoint.checkpoint import Checkpoint
from replicax._checkpoint.files import checksums, errors_of_disks
from replicax._checkpoint.restore import key_of
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.function import Function, called_with, calls_of
from replicax._saved_model import exporting, signatures, structures, tree
from replicax._saved_model.asset import Asset
from replicax._saved_model.exporting import Concrete, NotExportedError
from replicax._tracing import frames
from replicax._tracing.protocols import tree_of
from replicax._variables.distributed import SyncOnReadVariable
from replicax._variables.variable import Variable, is_hidden

RECORD = "saved_model.json"
FORMAT = 1
SAVED_MODEL = Artifact("saved model", RECORD)
RANKS = range(6)  # a function of unknown rank is saved for these
ASSETS, FUNCTIONS, VARIABLES = "assets", "functions", os.path.join("variables", "variables")


class _Saving:
    """What is written of one model.

    Attributes:
        nodes: its objects.
        variables: of each variable, by its id, its number among the nodes; those behind the nodes are hidden.
        functions: the programs, each with the entry of the record that tells of it.
    """

    def __init__(self, root: object):
        self.nodes = tree.nodes_of(root)
        self.variables = {id(n.value): i for i, n in enumerate(self.nodes) if isinstance(n.value, Variable)}
        self.hidden: list[Variable] = []
        self.functions: list[tuple[bytes, dict[str, Any]]] = []
        self._numbers: dict[int, tuple[int, object]] = {}  # of functions, by the id of what they were traced to

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for tracing functions, with on-read variables of one value if the model has any."""
        if any(isinstance(node.value, SyncOnReadVariable) for node in self.nodes):
            return thread_state.entered(for_one_device=True)
        return contextlib.nullcontext()

    def number_of(self, function: Concrete) -> int:
        """Returns the number of a function among those that are written; writes down a new one."""
        if id(function.trace) in self._numbers:
            return self._numbers[id(function.trace)][0]
        read, written = ([self._variable(v, function) for v in each] for each in (function.read, function.written))
        program, platforms, derivatives = exporting.exported(function)
        number = self._numbers[id(function.trace)] = len(self.functions), function.trace
        entry = {
            "name": function.name,
            "file": os.path.join(FUNCTIONS, f"{number[0]}.bin"),
            "args": structures.encoded([list(function.args), function.kwargs]),
            "results": structures.encoded(function.results),
            "read": read,
            "written": written,
            "platforms": list(platforms),
            "derivatives": derivatives,
        }
        self.functions.append((program, entry))
        return number[0]

    def _variable(self, variable: Any, function: Concrete) -> int:
        if id(variable) not in self.variables:
            if not is_hidden(variable):
                raise UnreachableError(
                    f"Tried to export a function which references an 'untracked' resource: {function.name} uses "
                    f"{variable!r}, which is not reachable from root. Keep the variable in an attribute of the object "
                    "that is saved, or of one in it."
                )
            self.variables[id(variable)] = len(self.nodes) + len(self.hidden)
            self.hidden.append(variable)
        return self.variables[id(variable)]

    def function_node(self, value: Function) -> dict[str, Any]:
        """Returns the entry of a function, after those of its concrete functions."""
        code, numbers = calls_of(value).code, []
        for made in _of_function(value):
            try:
                numbers.append(self.number_of(signatures.saved(made)))
            except NotExportedError as error:
                if value.input_signature is not None:
                    raise
                tracebacks.warn(f"A trace of {code.name} is not saved. {error}")
        declared = value.input_signature
        return {
            "kind": "function",
            "name": code.name,
            "parameters": structures.encoded_parameters(code.signature),
            "input_signature": None if declared is None else structures.encoded(list(declared)),
            "functions": numbers,
        }


class UnreachableError(AssertionError, KeyError):
    """A function uses a variable that is not saved: one of the errors that TensorFlow raises then."""

    __str__ = Exception.__str__


def _of_function(value: Function) -> Iterator[ConcreteFunction]:
    for made in value.all_concrete_functions():
        if made.trace is not None or value.input_signature is None:
            yield made
        elif of_ranks := _of_each_rank(made):
            yield from of_ranks
        elif calls := called_with(value):
            why = made.not_general or "a spec has no rank, and no rank from 0 to 5 fits"
            tracebacks.warn(
                f"{calls_of(value).code.name} is saved only for the shapes that it was called with, {len(calls)} in "
                f"number. No program for all sizes could be made: {str(why).splitlines()[0]}"
            )
            yield from calls
        else:
            yield made


def _of_each_rank(function: ConcreteFunction) -> list[ConcreteFunction]:
    """Return a function with specs of unknown rank for each rank of RANKS that it can be saved for."""
    of_ranks = []
    for rank in RANKS if any(spec.shape.rank is None for spec in function.specs) else ():
        with contextlib.suppress(Exception):  # the function does not take tensors of this rank
            of_rank = function.of_rank(rank)
            signatures.saved(of_rank)
            of_ranks.append(of_rank)
    return of_ranks


def save(obj: object, export_dir: AnyPath, given: object = None) -> None:
    """Write the variables and the compiled functions of an object as a saved model."""
    path = path_text(export_dir, "saved model")
    if frames.is_tracing():
        raise AssertionError(
            "`tf.saved_model.save` is not supported inside a traced @tf.function. Move the call to the outer "
            "eagerly-executed context."
        )
    planning.refuse_saving("saved_model.save")
    if isinstance(obj, (dict, list, tuple)) or not (isinstance(obj, tree.Known) or object_graph.has_children(obj)):
        raise ValueError(
            "Expected an object of type `Trackable`, such as `tf.Module` or a subclass of the `Trackable` class, for "
            f"export. Got {obj!r} with type {type(obj)}."
        )
    saving = _Saving(obj)
    with saving.tracing():
        chosen = signatures.chosen(given, saving.nodes)
        entries = {name: _signature(saving, name, function) for name, function in chosen.items()}
        nodes = [_node(saving, node) for node in saving.nodes]
    with errors_of_disks(f"saved model {path}"), replacing(path, SAVED_MODEL) as new:
        os.makedirs(new)
        _write_files(saving, new, nodes)
        entries_of_nodes = nodes + [_variable_entry(v) for v in saving.hidden]
        _write_variables(saving, obj, new, entries_of_nodes)
        record = {
            "format": FORMAT,
            "jax": jax.__version__,
            "time": time.time(),
            "nodes": entries_of_nodes,
            "functions": [entry for _, entry in saving.functions],
            "signatures": entries,
        }
        write_record(os.path.join(new, RECORD), {**record, "files": checksums(new)})


def _signature(saving: _Saving, name: str, function: ConcreteFunction) -> dict[str, Any]:
    found = signatures.saved(function)
    outputs = signatures.outputs_of(name, found)
    return {
        "function": saving.number_of(found),
        "inputs": signatures.inputs_of(name, found),
        "outputs": structures.encoded(outputs),
    }


def _node(saving: _Saving, node: tree.Node) -> dict[str, Any]:
    value = node.value
    if isinstance(value, Variable):
        return _variable_entry(value)
    if isinstance(value, Function):
        return saving.function_node(value)
    if isinstance(value, ConcreteFunction):
        return {"kind": node.kind, "functions": [saving.number_of(signatures.saved(value))]}
    if isinstance(value, Asset):
        return {"kind": node.kind, "file": value.path}
    entry = {"kind": node.kind, "children": node.children}
    if isinstance(value, dict):
        entry["keys"] = [_key(key) for key in value if str(key) in node.children]
    return entry


def _key(key: Tree) -> Any:
    try:
        return json_values.encoded(key)
    except TypeError:
        return str(key)


def _variable_entry(variable: Variable) -> dict[str, Any]:
    return {
        "kind": "variable",
        "name": variable.name.removesuffix(":0"),
        "trainable": variable.trainable,
        "synchronization": variable.synchronization.name,
        "aggregation": variable.aggregation.name,
        "structured": not jax.tree_util.treedef_is_leaf(tree_of(variable)),
        "hidden": is_hidden(variable),
    }


def _write_files(saving: _Saving, new: str, nodes: list[dict[str, Any]]) -> None:
    os.makedirs(os.path.join(new, FUNCTIONS))
    for program, entry in saving.functions:
        with open(os.path.join(new, entry["file"]), "wb") as file:
            file.write(program)
    taken: set[str] = set()
    for entry in nodes:
        if entry["kind"] == "asset":
            os.makedirs(os.path.join(new, ASSETS), exist_ok=True)
            name, end = os.path.splitext(os.path.basename(entry["file"]))
            copied = next(n for i in range(len(nodes)) if (n := f"{name}{f'_{i}' if i else ''}{end}") not in taken)
            taken.add(copied)
            source, entry["file"] = entry["file"], os.path.join(ASSETS, copied)
            shutil.copyfile(source, os.path.join(new, entry["file"]))


def _write_variables(saving: _Saving, obj: object, new: str, entries: list[dict[str, Any]]) -> None:
    """Writes a checkpoint of the object, and adds the keys of its arrays to the variables' entries."""
    further: dict[str, object] = {"hidden_variables": list(saving.hidden)} if saving.hidden else {}
    root = obj if object_graph.has_children(obj) else None
    if isinstance(obj, Variable):
        further["variable"] = obj
    checkpoint = Checkpoint(root, **further)
    for node in object_graph.graph_of(checkpoint._roots()):
        if isinstance(node.leaf, object_graph.PytreeLeaf):
            held = foreign_state.variable_of(node.leaf.owner)
            if id(held) in saving.variables:
                keys = [key_of((*node.names, *names)) for names in node.leaf.types()]
                entries[saving.variables[id(held)]]["keys"] = keys
    checkpoint.write(os.path.join(new, VARIABLES))
