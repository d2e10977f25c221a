"""Signatures of a saved model: functions that take tensors by name and return a dict of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from replicax._base.thread_state import current
from replicax._base.types import Tree
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.function import Function
from replicax._saved_model.exporting import Concrete, NotExportedError, concrete
from replicax._saved_model.structures import Place
from replicax._saved_model.tree import Node

DEFAULT = "serving_default"
_OUTPUTS = (
    "Outputs for functions used as signatures must be a single Tensor, a sequence of Tensors, or a dictionary from "
    "string to Tensor."
)


class Signatures(Mapping[str, Any]):
    """The signatures of a loaded model, by name; they cannot be changed."""

    def __init__(self, functions: dict[str, ConcreteFunction]):
        self._functions = functions

    def __getitem__(self, key: str) -> ConcreteFunction:
        return self._functions[key]

    def __len__(self) -> int:
        return len(self._functions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __repr__(self) -> str:
        return f"_SignatureMap({self._functions})"


def chosen(signatures: object, nodes: list[Node]) -> dict[str, ConcreteFunction]:
    """Returns the functions that are to be signatures, by name.

    Args:
        signatures: those given to `save`: None, a function or a mapping from names to functions.
        nodes: the objects to save. Of a root that has one function with specs, that is the signature by default.

    Raises:
        ValueError: something else is given, or a function without specs.
    """
    if signatures is None:
        return _by_default(nodes)
    given = signatures if isinstance(signatures, Mapping) else {DEFAULT: signatures}
    found = {}
    for name, function in given.items():
        if not isinstance(name, str):
            raise ValueError(f"The names of signatures are strings, got {name!r}.")
        found[name] = _concrete(function)
    return found


def _by_default(nodes: list[Node]) -> dict[str, ConcreteFunction]:
    values = [nodes[number].value for number in nodes[0].children.values()]
    if any(isinstance(value, Signatures) for value in values):
        return dict(next(value for value in values if isinstance(value, Signatures)))
    if (by_keras := getattr(nodes[0].value, "_default_save_signature", None)) is not None:
        return {DEFAULT: _concrete(by_keras)}
    found = []
    for value in values:
        if isinstance(value, ConcreteFunction) or (isinstance(value, Function) and value.input_signature is not None):
            found.append(_concrete(value))
    if len(found) != 1:
        return {}
    try:
        outputs_of(DEFAULT, saved(found[0]))
    except ValueError:
        return {}
    return {DEFAULT: found[0]}


def _concrete(function: object) -> ConcreteFunction:
    if isinstance(function, Function) and function.input_signature is not None:
        return function.get_concrete_function()
    if isinstance(function, ConcreteFunction):
        return function
    raise ValueError(
        f"Expected a TensorFlow function for which to generate a signature, but got {function!r}. Only `tf.functions` "
        "with an input signature or concrete functions can be used as a signature."
    )


def saved(function: ConcreteFunction) -> Concrete:
    """Returns what a concrete function is saved as.

    Raises:
        NotExportedError: it has no program for all that its specs allow, or takes or returns what cannot be saved.
    """
    if current.for_one_device:
        function = function.retrace()
    if any(spec.dtype == np.dtype(object) for spec in function.specs):
        raise NotExportedError(
            f"{function.name} takes tensors of strings, which are computed on the host: no program can be saved. Keep "
            "what it does with strings outside of the function."
        )
    if any(spec.shape.rank is None for spec in function.specs):
        raise NotExportedError(
            f"{function.name} cannot be saved for a spec of unknown rank: a program has one number of dimensions. "
            "Declare it, such as two in TensorSpec([None, 3])."
        )
    if function.trace is None:
        why = str(function.not_general or "it has no program of its own").splitlines()[0]
        raise NotExportedError(
            f"{function.name} cannot be saved for all sizes that its specs allow: {why}. Give specs without "
            "dimensions of None, or save it for the sizes that it was called with."
        ) from function.not_general
    return concrete(function.name, function.trace, *function.arguments)


def inputs_of(name: str, function: Concrete) -> list[str]:
    """Returns the names under which a signature takes its tensors, in the order of the program."""
    names = [str(place.spec.name) for place in function.inputs]
    if len(set(names)) < len(names):
        raise ValueError(f"Two arguments of the signature {name!r} have the same name: {names}. Name the specs apart.")
    return names


def outputs_of(name: str, function: Concrete) -> dict[str, Tree]:
    """Returns the tensors that a signature returns, by name.

    Raises:
        ValueError: it returns something else.
    """
    results = function.results
    if isinstance(results, Mapping):
        outputs = dict(results)
    elif isinstance(results, (list, tuple)) and not isinstance(results, Place):
        outputs = {f"output_{i}": value for i, value in enumerate(results)}
    else:
        outputs = {"output_0": results}
    for key, value in outputs.items():
        if not isinstance(key, str):
            raise ValueError(
                f"Got a dictionary with a non-string key {key!r} in the output of the function {function.name} used to "
                f"generate the SavedModel signature {name!r}."
            )
        if not isinstance(value, Place) and not hasattr(value, "dtype"):
            raise ValueError(
                f"Got a non-Tensor value {value!r} for key {key!r} in the output of the function {function.name} used "
                f"to generate the SavedModel signature {name!r}. {_OUTPUTS}"
            )
    return outputs
