"""Functions of a loaded model: which of the saved programs a call runs, and the call of one."""

from __future__ import annotations

import inspect
import pprint
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from replicax._base import array_conversion, nest
from replicax._base.errors import InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._data.elements import as_strings
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.function import Function, concrete_of
from replicax._saved_model import structures
from replicax._saved_model.structures import Place
from replicax._tracing.protocols import tree_of
from replicax._values import is_array
from replicax._variables.variable import Variable

_NUMBERS = (bool, int, float, complex)


class _Mismatch(Exception):
    """A call does not fit a program."""


class Concrete(NamedTuple):
    """A saved program.

    Attributes:
        name: of its function.
        program: the program.
        args, kwargs: the arguments that it takes, places for tensors.
        results: what it returns, places for tensors.
        read, written: the variables that it takes and gives new values.
    """

    name: str
    program: export.Exported
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    results: Tree
    read: list[Variable]
    written: list[Variable]

    def tensors(self, args: Sequence[Tree], kwargs: dict[str, Tree], converts: bool) -> list[jax.Array]:
        """Returns the tensors among arguments, in the order in which the program takes them.

        Args:
            args, kwargs: the arguments, as those of the program are given.
            converts: whether numbers may be taken for tensors.

        Raises:
            _Mismatch: they do not fit.
        """
        found: dict[int, jax.Array] = {}
        _match([list(self.args), self.kwargs], [list(args), dict(kwargs)], converts, found)
        return [found[number] for number in sorted(found)]

    def call(self, tensors: Sequence[jax.Array]) -> Tree:
        """Runs the program."""
        state = [leaf for variable in self.read for leaf in jax.tree.leaves(variable.value())]
        try:
            outputs = list(self.program.call(state, list(tensors)))
        except ValueError as error:
            if "polymorphic shapes" not in str(error):
                raise
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise InvalidArgumentError(
                f"{self.name} was saved for sizes of which some have to be equal, and none may be 0; got tensors of "
                f"shapes {shapes}. JAX says: {error}"
            ) from error
        for variable in self.written:
            count = len(jax.tree.leaves(variable.shape, is_leaf=lambda shape: isinstance(shape, tuple)))
            new, outputs = outputs[:count], outputs[count:]
            variable.assign(tree_of(variable).unflatten(new), read_value=False)
        return structures.mapped(lambda leaf: _result(leaf, outputs), self.results)


def _result(leaf: Leaf, outputs: Sequence[jax.Array]) -> Leaf:
    if isinstance(leaf, Place):
        return outputs[leaf.number]
    return as_strings(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype == np.dtype(object) else leaf


def _match(declared: Tree, given: Tree, converts: bool, found: dict[int, jax.Array]) -> None:
    """Finds the tensors at the places of a structure; raises `_Mismatch` where another one is given."""
    if isinstance(declared, Place):
        found[declared.number] = _tensor(declared.spec, given, converts)
        return
    if isinstance(declared, dict):
        if not isinstance(given, dict) or set(given) != set(declared):
            raise _Mismatch
        for key, item in declared.items():
            _match(item, given[key], converts, found)
    elif isinstance(declared, (list, tuple)):
        alike = type(given) is type(declared) or (nest.is_namedtuple(given) and nest.is_namedtuple(declared))
        if not alike or len(given) != len(declared):
            raise _Mismatch
        for item, other in zip(declared, given):
            _match(item, other, converts, found)
    elif declared is not structures.UNKNOWN and (is_array(given) or not nest.is_same(declared, given)):
        raise _Mismatch


def _tensor(spec: TensorSpec, given: Leaf, converts: bool) -> jax.Array:
    if isinstance(given, Variable) or (hasattr(given, "__jax_array__") and not is_array(given)):
        given = given.__jax_array__()
    if not is_array(given):
        if not converts or not isinstance(given, (*_NUMBERS, list, tuple)):
            raise _Mismatch
        try:
            given = array_conversion.own_array(given, spec.dtype)
        except (TypeError, ValueError, OverflowError):
            raise _Mismatch from None
    if not spec.is_compatible_with(given):
        raise _Mismatch
    return given if isinstance(given, jax.Array) else array_conversion.as_array(given)


class RestoredFunction(Function):
    """A function of a loaded model. It runs the saved program whose arguments fit."""

    def __init__(self, name: str, signature: inspect.Signature, declared: Any, programs: list[Concrete]):
        def dispatch(*args: Tree, **kwargs: Tree) -> Tree:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"Binding inputs to tf.function failed due to `{error}`. Received args: {args} and kwargs: "
                    f"{kwargs} for signature: {signature}."
                ) from None
            bound.apply_defaults()
            return _fitting(programs, bound.args, bound.kwargs)

        dispatch.__name__ = dispatch.__qualname__ = name
        dispatch.__signature__ = signature  # type: ignore[attr-defined]
        super().__init__(dispatch, declared)
        self._restored = programs
        self._programs.log.warns = False  # what is traced is the choice of a program alone

    @property
    def concrete_functions(self) -> list[ConcreteFunction]:
        """It for the arguments of each of the saved programs."""
        return self.all_concrete_functions()

    def all_concrete_functions(self) -> list[ConcreteFunction]:
        """Returns it for the arguments of each of the saved programs."""
        return [concrete_of(self, specs(each.args), specs(each.kwargs)) for each in self._restored]


def specs(arguments: Tree) -> Tree:
    """Returns arguments with specs for places."""
    return structures.mapped(lambda leaf: leaf.spec if isinstance(leaf, Place) else leaf, arguments)


def _fitting(programs: Sequence[Concrete], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
    if not programs:
        raise ValueError("Found zero restored functions for caller function.")
    for converts in (False, True):
        for each in programs:
            try:
                return each.call(each.tensors(args, kwargs, converts))
            except _Mismatch:
                pass
    options = "\n\n".join(
        f"Option {i}:\n{_described(specs(list(each.args)), specs(each.kwargs))}" for i, each in enumerate(programs, 1)
    )
    raise ValueError(
        f"Could not find matching concrete function to call loaded from the SavedModel. Got:\n"
        f"{_described(_as_specs(list(args)), _as_specs(kwargs))}\n\n Expected these arguments to match one of the "
        f"following {len(programs)} option(s):\n\n{options}"
    )


def _as_specs(arguments: Tree) -> Tree:
    return structures.mapped(lambda leaf: TensorSpec.from_tensor(leaf) if is_array(leaf) else leaf, arguments)


def _described(args: Sequence[Tree], kwargs: dict[str, Tree]) -> str:
    lines = "\n".join(f"    * {pprint.pformat(arg)}" for arg in args)
    return f"  Positional arguments ({len(args)} total):\n{lines}\n  Keyword arguments: {kwargs}"


def function(entry: dict[str, Any], programs: list[Concrete]) -> RestoredFunction:
    """Returns a loaded function."""
    declared = None if entry["input_signature"] is None else structures.decoded(entry["input_signature"])
    return RestoredFunction(entry["name"], structures.decoded_signature(entry["parameters"]), declared, programs)


def concrete(program: Concrete) -> ConcreteFunction:
    """Returns a loaded concrete function."""
    names = [f"arg{i}" for i in range(len(program.args))]
    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in names]
    parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in program.kwargs]
    made = RestoredFunction(program.name, inspect.Signature(parameters), None, [program])
    return made.all_concrete_functions()[0]


def signature(program: Concrete, entry: dict[str, Any]) -> ConcreteFunction:
    """Returns a signature of a loaded model."""
    names: list[str] = entry["inputs"]
    outputs = structures.decoded(entry["outputs"])
    own = program._replace(results=outputs)

    def signature_wrapper(**tensors: jax.Array) -> dict[str, Tree]:
        results: dict[str, Tree] = own.call([tensors[each] for each in names])
        return results

    places = sorted(structures.places([program.args, program.kwargs]))
    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in names]
    signature_wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    declared = {each: place.spec for each, place in zip(names, places)}
    return Function(signature_wrapper).get_concrete_function(**declared)
