"""Reading a saved model: objects with the same attributes, variables, and functions that run the saved programs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import export

from replicax._base import doc_pages
from replicax._base.atomic_files import AnyPath, existing, path_text, read_record
from replicax._base.errors import CheckpointError
from replicax._base.types import Tree, VariableAggregation, VariableSynchronization
from replicax._checkpoint import reader
from replicax._saved_model import restored, saving, structures
from replicax._saved_model.asset import Asset
from replicax._saved_model.signatures import Signatures
from replicax._variables.variable import Variable, hide

_OF_TENSORFLOW = ("saved_model.pb", "saved_model.pbtxt")


class LoadedObject:
    """An object of a loaded model: its attributes are what the saved object had.

    `variables` and `trainable_variables` are all variables that can be reached from it, unless it had attributes of
    these names.
    """

    # No method, since objects of Keras have an attribute of this name.
    _tracked = property(lambda self: lambda: vars(self), doc="A function that returns the attributes.")

    def __getattr__(self, name: str) -> Any:
        if name == "variables":
            return list(_variables(self, set()))
        if name == "trainable_variables":
            return [variable for variable in _variables(self, set()) if variable.trainable]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class CallableObject(LoadedObject):
    """A `LoadedObject` that can be called, as the saved object could."""

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        return vars(self)["__call__"](*args, **kwargs)


def _variables(value: Any, seen: set[int]) -> Iterator[Variable]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Variable):
        yield value
    elif isinstance(value, (LoadedObject, dict, list)):
        children = vars(value).values() if isinstance(value, LoadedObject) else value
        for child in children.values() if isinstance(children, dict) else children:
            yield from _variables(child, seen)


def has_saved_model(export_dir: AnyPath) -> bool:
    """Returns whether there is a saved model that `load` can read."""
    return os.path.isfile(os.path.join(existing(path_text(export_dir, "saved model")), saving.RECORD))


def load(export_dir: AnyPath, tags: object, skip_values: bool = False) -> Any:
    """Return the object of a saved model, in the scope of a strategy with variables of the strategy."""
    files = SavedFiles(export_dir)
    given: Any = [tags] if isinstance(tags, str) else tags
    if given is not None and set(given) != {"serve"}:
        raise ValueError(
            f"Got an incompatible argument to `tags`: {given}. The SavedModel at {files.name} has one MetaGraph with "
            "tags ['serve']. You may omit the argument, pass 'None', or pass matching tags."
        )
    return _Loading(files, skip_values).root()


def _record(path: str, place: str) -> dict[str, Any]:
    try:
        record = read_record(os.path.join(place, saving.RECORD))
    except FileNotFoundError:
        if any(os.path.isfile(os.path.join(place, name)) for name in _OF_TENSORFLOW):
            raise NotImplementedError(
                f"{path} is a SavedModel of TensorFlow, whose graphs cannot be run here. Its variables can be read: "
                f"make the objects in code, and restore them by tf.train.Checkpoint(root).restore("
                f"{os.path.join(path, saving.VARIABLES)!r}), or list them by tf.train.list_variables of that path. "
                f"See {doc_pages.page('how-to/saved-models#a-savedmodel-of-tensorflow')}."
            ) from None
        raise OSError(
            f"SavedModel file does not exist at: {os.path.join(path, saving.RECORD)}. Such a folder is written by "
            "tf.saved_model.save."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The saved model {path} is damaged: {saving.RECORD} cannot be read ({error})."
        ) from error
    if record["format"] != saving.FORMAT:
        raise CheckpointError(f"{path} has format {record['format']}, which a newer replicax writes and reads.")
    return record


def _damaged(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"The saved model {path} is damaged: {what}. Load another copy of it.")


class SavedFiles:
    """The files of a saved model.

    Attributes:
        name: the path that was given.
        record: what `saving.save` has written about the objects, functions and signatures.
        values: the checkpoint of the variables.
    """

    def __init__(self, export_dir: AnyPath):
        self.name = path_text(export_dir, "saved model")
        self._place = existing(self.name)
        self.record = _record(self.name, self._place)
        self.values = reader.CheckpointReader(self.path(saving.VARIABLES))

    def path(self, name: str) -> str:
        """Return the path of one of its files."""
        return os.path.join(self._place, name)

    def program(self, entry: dict[str, Any]) -> export.Exported:
        """Return the program of a function, by the function's entry in the record."""
        with open(self.path(entry["file"]), "rb") as file:
            blob = file.read()
        if zlib.crc32(blob) != self.record["files"][entry["file"]]:
            raise CheckpointError(
                f"The saved model {self._place} is damaged: the checksum of {entry['file']} does not fit."
            )
        return export.deserialize(bytearray(blob))


class _Loading:
    def __init__(self, files: SavedFiles, skip_values: bool):
        self._files, self._record, self._skip_values = files, files.record, skip_values
        entries = self._record["nodes"]
        self._nodes: list[Any] = [self._made(entry) for entry in entries]
        self._functions = [self._program(entry) for entry in self._record["functions"]]
        for number, entry in enumerate(entries):
            if entry["kind"] == "function":
                self._nodes[number] = restored.function(entry, [self._functions[i] for i in entry["functions"]])
            elif entry["kind"] == "concrete function":
                self._nodes[number] = restored.concrete(self._functions[entry["functions"][0]])
        for number, entry in enumerate(entries):
            self._attach(number, entry)

    def root(self) -> Any:
        """Returns the loaded object, with the signatures."""
        found = self._nodes[0]
        made = {
            name: restored.signature(self._functions[e["function"]], e)
            for name, e in self._record["signatures"].items()
        }
        if not isinstance(found, Variable):
            found.signatures = Signatures(made)
        return found

    def _made(self, entry: dict[str, Any]) -> Any:
        kind = entry["kind"]
        if kind == "variable":
            return self._variable(entry)
        if kind == "asset":
            return Asset(self._files.path(entry["file"]))
        if kind in ("dict", "list"):
            return {} if kind == "dict" else []
        return CallableObject() if "__call__" in entry.get("children", ()) else LoadedObject()

    def _variable(self, entry: dict[str, Any]) -> Variable:
        arrays = [self._array(key) for key in entry["keys"]]
        value = arrays if entry["structured"] else arrays[0]
        made = Variable(
            value,
            trainable=entry["trainable"],
            name=entry["name"],
            synchronization=VariableSynchronization[entry["synchronization"]],
            aggregation=VariableAggregation[entry["aggregation"]],
            copies_may_differ=True,
        )
        if made.aggregation is VariableAggregation.SUM:  # which is that of the replicas' values, in a scope
            made.assign(value, read_value=False)
        if entry["hidden"]:
            hide(made)
        return made

    def _attach(self, number: int, entry: dict[str, Any]) -> None:
        value, children = self._nodes[number], {n: self._nodes[i] for n, i in entry.get("children", {}).items()}
        if entry["kind"] == "list":
            value.extend(children.values())
        elif entry["kind"] == "dict":
            value.update(zip(map(structures.decoded, entry["keys"]), children.values()))
        else:
            vars(value).update(children)

    def _array(self, key: str) -> Any:
        if self._skip_values:
            values = self._files.values
            return np.zeros(values.get_variable_to_shape_map()[key], values.get_variable_to_dtype_map()[key])
        return self._files.values.get_tensor(key)

    def _program(self, entry: dict[str, Any]) -> restored.Concrete:
        args, kwargs = structures.decoded(entry["args"])
        variables = [[self._nodes[i] for i in entry[which]] for which in ("read", "written")]
        program = self._files.program(entry)
        return restored.Concrete(entry["name"], program, args, kwargs, structures.decoded(entry["results"]), *variables)
