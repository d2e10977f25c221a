"""Writes a SavedModel of TensorFlow. This file runs as a program, and needs only TensorFlow:

    python to_tensorflow.py REQUEST.json OUT

The Python of an environment with TensorFlow runs it (see `command`), so it imports nothing of replicax. The module
`request` writes the request.

A function's program, in StableHLO, becomes one operation, XlaCallModule, which TensorFlow compiles for the sizes of
each call. Variables become TensorFlow's variables.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
import re
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

_SIZES = 2, 32  # the sizes that `Program.check` tries for dimensions of None


class RefusedError(Exception):
    """A model cannot be converted."""


class UnknownKindError(Exception):
    """An argument or a result is of a kind that TensorFlow's functions do not have."""


class Place(NamedTuple):
    """Stands for a tensor among a function's arguments or results: its number and its spec."""

    number: int
    spec: tf.TensorSpec


def decode(value: Any) -> Any:
    """Return a value that `replicax._saved_model.structures` has encoded.

    Raises:
        UnknownKindError: TensorFlow's functions have no values of its kind.
    """
    if not isinstance(value, dict):
        return value
    if "place" in value:
        number, shape, dtype, name = value["place"]
        return Place(number, tf.TensorSpec(shape, dtype, name))
    if "dict" in value:
        return {decode(key): decode(item) for key, item in value["dict"]}
    if "list" in value:
        return [decode(item) for item in value["list"]]
    if "tuple" in value:
        return tuple(decode(item) for item in value["tuple"])
    if "array" in value:
        content = base64.b64decode(value["array"])
        return np.frombuffer(content, tf.as_dtype(value["dtype"]).as_numpy_dtype).reshape(value["shape"])
    if "named" in value:
        name, fields = value["named"]
        return namedtuple(name, fields)(**{field: decode(item) for field, item in fields.items()})
    raise UnknownKindError(next(iter(value)))


def fill(structure: Any, replace: Callable[[Place], Any]) -> Any:
    """Return a structure of dicts, lists and tuples with other values for its places."""
    if isinstance(structure, Place):
        return replace(structure)
    if isinstance(structure, dict):
        return {key: fill(item, replace) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        items = [fill(item, replace) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return structure


def fill_results(structure: Any, outputs: list[tf.Tensor]) -> Any:
    """Return a structure with a program's tensors for its places."""
    return fill(structure, lambda place: outputs[place.number])


def match(declared: Any, actual: Any, tensors: dict[int, Any]) -> bool:
    """Return whether arguments fit the arguments of a program, and add their tensors by number."""
    if isinstance(declared, Place):
        tensors[declared.number] = actual
        spec = declared.spec
        return tf.is_tensor(actual) and actual.dtype == spec.dtype and actual.shape.as_list() == spec.shape.as_list()
    if isinstance(declared, dict) and isinstance(actual, dict):
        return declared.keys() == actual.keys() and all(match(declared[key], actual[key], tensors) for key in declared)
    if isinstance(declared, (list, tuple)) and isinstance(actual, (list, tuple)):
        return len(declared) == len(actual) and all(match(*pair, tensors) for pair in zip(declared, actual))
    return type(declared) is type(actual) and bool(declared == actual)


class Program:
    """A function's program, and the variables that it reads and assigns."""

    def __init__(self, entry: dict[str, Any], folder: Path, variables: dict[int, list[tf.Variable]]):
        self.entry, self.name = entry, entry["name"]
        self._module = (folder / entry["module"]).read_bytes()
        self._read = [variable for number in entry["read"] for variable in variables[number]]
        self._written = [variable for number in entry["written"] for variable in variables[number]]

    @functools.cached_property
    def arguments(self) -> list[Any]:
        """The positional and the keyword arguments, places for tensors."""
        arguments: list[Any] = decode(self.entry["args"])
        return arguments

    def _call_module(self, operands: list[Any]) -> list[tf.Tensor]:
        shapes, dtypes = zip(*self.entry["outputs"]) if self.entry["outputs"] else ((), ())
        return list(
            xla.call_module(
                [operands[i] for i in self.entry["kept"]],
                version=self.entry["version"],
                module=self._module,
                Tout=[tf.as_dtype(dtype) for dtype in dtypes],
                Sout=list(shapes),
                platforms=[platform.upper() for platform in self.entry["platforms"]],
            )
        )

    def call(self, tensors: dict[int, Any]) -> list[tf.Tensor]:
        """Run the program for tensors by their number, assign its variables, and return its tensors."""
        operands: list[Any] = [variable.read_value() for variable in self._read]
        for number, (_, dtype) in zip(sorted(tensors), self.entry["tensors"]):
            operands.append(tf.cast(tensors[number], dtype))
        outputs = self._call_module(operands)
        for variable, value in zip(self._written, outputs):
            variable.assign(value, read_value=False)
        return outputs[len(self._written) :]

    def check(self) -> str | None:
        """Run the program for zeros, without assigning variables, since TensorFlow may lack an operation of it.

        Returns:
            None, or why the program could not be tried.

        Raises:
            RefusedError: TensorFlow does not run it.
        """
        if "cpu" not in self.entry["platforms"]:
            return f"{self.name} has not been tried, since it runs only on {', '.join(self.entry['platforms'])}"
        state = [tf.zeros(variable.shape, variable.dtype) for variable in self._read]
        types, message = self.entry["tensors"], ""
        for size in _SIZES if any(None in shape for shape, _ in types) else _SIZES[:1]:
            tensors = [tf.zeros([size if n is None else n for n in shape], dtype) for shape, dtype in types]
            try:
                self._call_module([*state, *tensors])
            except (tf.errors.OpError, NotImplementedError) as error:
                message = str(error)
            else:
                return None
        if "polymorphic shapes" in message:
            return f"{self.name} has not been tried, since it takes neither size {_SIZES[0]} nor {_SIZES[1]}"
        raise RefusedError(f"{self.name} cannot be converted: TensorFlow {tf.__version__} does not run it. {message}")

    def signature(self, entry: dict[str, Any]) -> Any:
        """Return the program as a signature, which takes tensors by name and returns a dict of tensors."""
        places = sorted(find_places(self.arguments))
        results = decode(entry["outputs"])
        names = [re.sub(r"\W", "_", name) for name in entry["inputs"]]  # TensorFlow takes them for parameters
        if len(set(names)) < len(names):
            raise RefusedError(f"{self.name} has inputs whose names TensorFlow cannot tell apart: {entry['inputs']}.")

        def signature(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            outputs = self.call({place.number: tensors[name] for name, place in zip(names, places)})
            filled: dict[str, Any] = fill_results(results, outputs)
            return {name: tf.convert_to_tensor(value) for name, value in filled.items()}

        specs = {name: tf.TensorSpec(place.spec.shape, place.spec.dtype, name) for name, place in zip(names, places)}
        return tf.function(signature, autograph=False).get_concrete_function(**specs)


def find_places(structure: Any) -> list[Place]:
    """Return the places of a structure."""
    places: list[Place] = []
    fill(structure, places.append)
    return places


def make_function(name: str, declared: list[Any], programs: list[Program]) -> Any:
    """Return a function of the saved object, with a trace for each of its programs.

    Args:
        name: the function's name.
        declared: name, kind and default of each parameter; no default is an empty list.
        programs: the programs, each for its own arguments.

    Raises:
        UnknownKindError: TensorFlow's functions have no values of the kind of an argument or result.
    """

    def run(*args: Any, **kwargs: Any) -> Any:  # traced anew when the model is saved, in any order
        for program in programs:
            tensors: dict[int, Any] = {}
            if match(program.arguments, [args, kwargs], tensors):
                return fill_results(decode(program.entry["results"]), program.call(tensors))
        raise AssertionError(f"{name} has no program for {args}, {kwargs}")

    parameters = []
    for parameter, kind, default in declared:
        value = decode(default[0]) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(parameter, getattr(inspect.Parameter, kind), default=value))
    run.__name__ = name
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function = tf.function(run, autograph=False)
    for program in programs:
        args, kwargs = fill(program.arguments, lambda place: place.spec)
        function.get_concrete_function(*args, **kwargs)
    return function


class Model:
    """The objects of a request, made again of TensorFlow's variables and functions.

    Attributes:
        programs: the programs of the functions.
        notes: notes for the user about the result.
        root: the object to save.
        signatures: its signatures, by name.
    """

    def __init__(self, request: dict[str, Any], folder: Path):
        self.notes: list[str] = []
        entries = request["nodes"]
        self._variables = {i: _make_variables(node, folder) for i, node in enumerate(entries) if "arrays" in node}
        self.programs = [Program(entry, folder, self._variables) for entry in request["programs"]]
        self._nodes = [self._make_node(number, entry) for number, entry in enumerate(entries)]
        for entry, value in zip(entries, self._nodes):  # containers first: objects wrap them as they are then
            if entry["kind"] in ("dict", "list"):
                children = self._children(entry)
                value.update(children) if entry["kind"] == "dict" else value.extend(children.values())
        for entry, value in zip(entries, self._nodes):
            if entry["kind"] == "object":
                for name, child in self._children(entry).items():
                    setattr(value, name, child)
        self.root = self._nodes[0] if entries[0]["kind"] == "object" else tf.Module()
        self.root._all_variables = [variable for variables in self._variables.values() for variable in variables]
        self.signatures = {
            name: self.programs[entry["function"]].signature(entry) for name, entry in request["signatures"].items()
        }

    def _children(self, entry: dict[str, Any]) -> dict[str, Any]:
        children = {name: self._nodes[number] for name, number in entry["children"].items()}
        return {name: child for name, child in children.items() if child is not None}

    def _make_node(self, number: int, entry: dict[str, Any]) -> Any:
        kind = entry["kind"]
        if kind == "variable":
            variables = self._variables[number]
            return variables if entry["structured"] else variables[0]
        if kind == "asset":
            return tf.saved_model.Asset(entry["file"])
        if kind in ("function", "concrete function"):
            return self._make_function(entry)
        return {"dict": dict, "list": list}.get(kind, tf.__internal__.tracking.AutoTrackable)()

    def _make_function(self, entry: dict[str, Any]) -> Any:
        """Return a function or a concrete function, or None with a note."""
        programs = [self.programs[i] for i in entry["functions"]]
        try:
            if entry["kind"] == "function":
                return make_function(entry["name"], entry["parameters"], programs)
            args, kwargs = programs[0].arguments
            named = [[f"arg{i}", "POSITIONAL_OR_KEYWORD", []] for i in range(len(args))]
            named += [[name, "KEYWORD_ONLY", []] for name in kwargs]
            return make_function(programs[0].name, named, programs).get_concrete_function()
        except UnknownKindError as error:
            name = entry.get("name", "a concrete function")
            self.notes.append(f"{name} is left out: it has an argument or a result of the kind {error}")
            return None


def _make_variables(node: dict[str, Any], folder: Path) -> list[tf.Variable]:
    variables = []
    for array in node["arrays"]:
        dtype = tf.as_dtype(array["dtype"])
        value = np.fromfile(folder / array["file"], dtype.as_numpy_dtype).reshape(array["shape"])
        variables.append(tf.Variable(value, trainable=node["trainable"], name=node["name"], dtype=dtype))
    return variables


def convert(request: Path, out: str) -> list[str]:
    """Write the SavedModel of a request, and return notes for the user.

    Raises:
        RefusedError: the model cannot be converted.
    """
    content = json.loads(request.read_text(encoding="utf-8"))
    newest = xla.call_module_maximum_supported_version()
    if too_new := [entry["version"] for entry in content["programs"] if entry["version"] > newest]:
        raise RefusedError(
            f"TensorFlow {tf.__version__} is too old: it takes programs up to version {newest} of JAX's calling "
            f"convention, and these have version {max(too_new)}. Use a newer TensorFlow."
        )
    try:
        model = Model(content, request.parent)
    except UnknownKindError as error:
        raise RefusedError(f"A signature cannot be converted: it has a result of the kind {error}.") from None
    tried = {program.entry["module"]: program for program in model.programs}
    model.notes += filter(None, (program.check() for program in tried.values()))
    if not model.signatures:
        model.notes.append("the model has no signatures, which TensorFlow Serving needs")
    tf.saved_model.save(model.root, out, signatures=model.signatures)
    return model.notes


def main(request: Path, out: str) -> None:
    """Convert a request, and write the notes or the error beside it."""
    try:
        result: dict[str, Any] = {"notes": convert(request, out)}
    except RefusedError as error:
        result = {"error": str(error)}
    request.with_suffix(".result").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
