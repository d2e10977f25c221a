"""`ConcreteFunction`: a function of which some arguments are fixed, and the others declared by specs."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from replicax._base import nest, tracebacks
from replicax._base.errors import InvalidArgumentError
from replicax._base.jaxprs import Path
from replicax._base.specs import PerReplicaSpec, TensorShape, TensorSpec, conform, spec_of
from replicax._base.types import Leaf, Tree
from replicax._engine.general_trace import GeneralTrace, stand_in
from replicax._engine.program import Program
from replicax._tracing import frames
from replicax._values import PerReplica
from replicax._variables.variable import Variable, is_hidden

_SPECS = TensorSpec, PerReplicaSpec
_OF_PROGRAM = {
    "structured_outputs", "outputs", "output_shapes", "output_dtypes", "variables", "trainable_variables",
    "captured_inputs", "inputs",
}  # fmt: skip

# What stands for a dimension that is not known while a function is traced to see what it makes, and another time to see
# which dimensions of its results depend on it. The second pair is for functions that refuse rows so short.
_SIZES = (8, 12), (64, 96)


class _Argument(NamedTuple):
    """An argument: its leaves that are specs are given in each call, its others are kept."""

    name: str
    keyword: bool  # whether it is given by name alone
    value: Tree
    is_open: bool


class ConcreteFunction:
    """A function traced for arguments of one kind, made by `get_concrete_function` of a `function`.

    Arguments that were given as arrays, specs or variables are its own; the others keep the values that they had. It
    has been traced for them. Where a dimension of None could not be left open, it was a small number then.

    Attributes:
        structured_outputs: the specs of what it returns, in the same structure.
        outputs: those specs in a list.
        output_shapes, output_dtypes: the shapes and dtypes in the same structure.
        inputs: the specs of the arguments, and behind them those of `captured_inputs`.
        variables, trainable_variables, captured_inputs: what it reads and assigns.
        function: the function that it was made of.

    >>> import jax.numpy as jnp, replicax as rx
    >>> power = rx.function(lambda a, b: a**b).get_concrete_function(rx.TensorSpec([None]), b=2)
    >>> power(jnp.arange(3.0)).tolist(), power
    ([0.0, 1.0, 4.0], <ConcreteFunction <lambda>(a=TensorSpec(shape=(None,), dtype=float32, name='a'), b=2)>)
    >>> power.output_shapes, power.structured_input_signature[0][1]
    (TensorShape([None]), 2)
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        program_of: Callable[[tuple[Tree, ...], dict[str, Tree]], Program | None],
        general_of: Callable[[tuple[Tree, ...], dict[str, Tree]], GeneralTrace],
        python_function: Callable[..., Tree],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ):
        self.function, self._program_of, self._general_of = function, program_of, general_of
        self._signature = inspect.signature(python_function)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self._arguments = list(_arguments(self._signature, bound))
        self.name = getattr(python_function, "__name__", "function")
        self.not_general: Exception | None = None  # why it has no trace for all sizes
        self._program: Program | GeneralTrace | None = None if frames.is_tracing() else self._traced()

    # Its trace.

    @property
    def specs(self) -> list[TensorSpec]:
        """The specs of its arguments."""
        return [leaf for each in self._arguments for leaf in _leaves(each.value) if isinstance(leaf, TensorSpec)]

    def _traced(self) -> Program | GeneralTrace | None:
        """Returns its trace, for all sizes or for a first one where one is not known; None where there is none."""
        of_replicas = any(isinstance(leaf, PerReplicaSpec) for each in self._arguments for leaf in _leaves(each.value))
        if of_replicas or any(spec.shape.rank is None for spec in self.specs):
            return None  # the specs do not tell of which strategy's values, or how many dimensions
        if any(spec.dtype == np.dtype(object) for spec in self.specs):
            pass  # strings are known while a function is traced
        elif not all(spec.shape.is_fully_defined() for spec in self.specs):
            try:
                return self._general_of(*self._call({each.name: each.value for each in self._arguments}))
            except Exception as error:
                self.not_general = error
        self._sizes = _SIZES[0]
        try:
            return self._program_for(self._sizes[0])
        except Exception:
            if all(spec.shape.is_fully_defined() for spec in self.specs):
                raise
            self._sizes = _SIZES[1]
            with contextlib.suppress(Exception):
                return self._program_for(self._sizes[0])
            raise

    def _program_for(self, size: int) -> Program | None:
        values = {each.name: _mapped(lambda leaf: stand_in(leaf, size), each.value) for each in self._arguments}
        return self._program_of(*self._call(values))

    def _found(self, what: str) -> Program | GeneralTrace:
        if self._program is None:
            raise AttributeError(what)  # which Python takes to `__getattr__`
        return self._program

    @functools.cached_property
    def structured_outputs(self) -> Tree:
        """The specs of what it returns, in the same structure; None and what is no tensor as it is."""
        program = self._found("structured_outputs")
        specs = program.result_specs()
        if isinstance(program, GeneralTrace) or all(spec.shape.is_fully_defined() for spec in self.specs):
            return specs
        other = self._program_for(self._sizes[1])
        assert other is not None
        return nest.merge([specs, other.result_specs()], _common)

    @property
    def outputs(self) -> list[TensorSpec]:
        """The specs of the tensors that it returns."""
        return [leaf for leaf in nest.leaves(self.structured_outputs) if isinstance(leaf, TensorSpec)]

    @property
    def output_shapes(self) -> Tree:
        """The shapes of what it returns, in the same structure."""
        return nest.map_structure(lambda leaf: getattr(leaf, "shape", TensorShape(None)), self.structured_outputs)

    @property
    def output_dtypes(self) -> Tree:
        """The dtypes of what it returns, in the same structure; None for what is no tensor."""
        return nest.map_structure(lambda leaf: getattr(leaf, "dtype", None), self.structured_outputs)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that it reads or assigns."""
        variables = self._found("variables").level.variables.values()
        return tuple(v for v in variables if isinstance(v, Variable) and not is_hidden(v))

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Those of them that are trainable."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def captured_inputs(self) -> list[Variable]:
        """Its inputs beside its arguments: its variables. Arrays are constants of its program."""
        return list(self.variables)

    @property
    def inputs(self) -> list[TensorSpec]:
        """The specs of its arguments, and of what it captured."""
        return [*self.specs, *(TensorSpec(v.shape, v.dtype, v.name) for v in self.captured_inputs)]

    @property
    def structured_input_signature(self) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """The arguments by position and those by name, specs in place of tensors."""
        by_position = tuple(argument.value for argument in self._arguments if not argument.keyword)
        return by_position, {argument.name: argument.value for argument in self._arguments if argument.keyword}

    @property
    def trace(self) -> Program | GeneralTrace | None:
        """What it reads, computes and writes, for all sizes that its specs allow; None where it has no such trace."""
        general = isinstance(self._program, GeneralTrace)
        return self._program if general or all(s.shape.is_fully_defined() for s in self.specs) else None

    @property
    def arguments(self) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """The arguments that it was made for, specs in place of tensors, as the function takes them."""
        return self._call({argument.name: argument.value for argument in self._arguments})

    def retrace(self) -> ConcreteFunction:
        """Return the same function, traced with the settings of this moment."""
        again = copy.copy(self)
        vars(again).pop("structured_outputs", None)
        again.not_general, again._program = None, None
        again._program = again._traced()
        return again

    def of_rank(self, rank: int) -> ConcreteFunction:
        """Return the function for tensors of this rank, in place of each spec of unknown rank."""

        def with_rank(leaf: Leaf) -> Leaf:
            is_open = isinstance(leaf, TensorSpec) and leaf.shape.rank is None
            return TensorSpec([None] * rank, leaf.dtype, leaf.name) if is_open else leaf

        other = copy.copy(self)
        other._arguments = [argument._replace(value=_mapped(with_rank, argument.value)) for argument in self._arguments]
        return other.retrace()

    # Its calls.

    @tracebacks.boundary
    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        args, kwargs = self.bound(args, kwargs)
        return self.function(*args, **kwargs)

    def bound(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """Returns the arguments of `function` for a call of this one with these; raises what the call does."""
        given = self._given(args, kwargs)
        values = {}
        for argument in self._arguments:
            value = given.get(argument.name, argument.value)
            values[argument.name] = self._fitting(argument, value) if argument.is_open else value
        return self._call(values)

    def _given(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> dict[str, Tree]:
        """Returns the given arguments by their names: all of them in their order, or only those that are open."""
        everything = [argument for argument in self._arguments if not argument.keyword]
        opened = [argument for argument in self._arguments if argument.is_open]
        names = {a.value.name: a.name for a in opened if isinstance(a.value, TensorSpec)}
        names = {**names, **{argument.name: argument.name for argument in self._arguments}}
        named = {names.get(name, name): value for name, value in kwargs.items()}
        for order in (everything, opened):
            given = {**dict(zip([argument.name for argument in order], args)), **named}
            known = (
                len(args) <= len(order) and len(given) == len(args) + len(kwargs) and set(given) <= set(names.values())
            )
            kept = [a for a in self._arguments if a.name in given and not a.is_open]
            if (
                known
                and all(a.name in given for a in opened)
                and all(nest.is_same(given[a.name], a.value) for a in kept)
            ):
                return given
        raise TypeError(
            f"Binding inputs to tf.function failed due to arguments that do not fit: {self!r} takes "
            f"{[argument.name for argument in opened] or 'no arguments'}, and the others only with the values that "
            f"it was made for, got {args} and {kwargs}. For other values make another one, by "
            "`get_concrete_function`."
        )

    def _call(self, values: dict[str, Tree]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """Returns these arguments as the function takes them."""
        args = tuple(values[argument.name] for argument in self._arguments if not argument.keyword)
        return args, {argument.name: values[argument.name] for argument in self._arguments if argument.keyword}

    def _fitting(self, argument: _Argument, value: Tree) -> Tree:
        structure: PyTreeDef = jax.tree.structure(argument.value, is_leaf=_is_leaf)
        try:
            leaves = structure.flatten_up_to(value)
        except ValueError as error:
            raise TypeError(f"The argument {argument.name!r} of {self!r} has another structure: {error}") from error
        fitting = []
        for declared, leaf in zip(_leaves(argument.value), leaves):
            if isinstance(declared, _SPECS) and not isinstance(leaf, Variable):
                try:
                    leaf = conform(leaf, declared)
                except (TypeError, ValueError) as error:
                    message = f"The argument {argument.name!r} of {self!r} does not fit: {error}"
                    raise InvalidArgumentError(message) from error
            elif not isinstance(declared, _SPECS) and not nest.is_same(leaf, declared):
                raise TypeError(f"{self!r} was made for {declared!r} in {argument.name!r}, got {leaf!r}.")
            fitting.append(leaf)
        return structure.unflatten(fitting)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("graph", "function_def"):
            raise AttributeError(
                f"A ConcreteFunction has no {name!r}: there are no graphs. `lower(...)` of the function shows its "
                "program, `jax.export` writes it."
            )
        if name in _OF_PROGRAM and self._program is None:
            raise AttributeError(
                f"{name!r} of {self!r} is not known: it has no program of its own, since it loops over a distributed "
                "dataset or is driven from the host, takes PerReplica values, was declared without a rank, or was made "
                "in another function."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<ConcreteFunction {self.name}({', '.join(f'{a.name}={a.value!r}' for a in self._arguments)})>"


def _arguments(signature: inspect.Signature, bound: inspect.BoundArguments) -> Iterator[_Argument]:
    for name, parameter in signature.parameters.items():
        value = bound.arguments[name]
        keyword = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
        if parameter.kind is parameter.VAR_POSITIONAL:
            each = [(f"{name}_{i}", part) for i, part in enumerate(value)]
        else:
            each = list(value.items()) if parameter.kind is parameter.VAR_KEYWORD else [(name, value)]
        for own, part in each:
            declared = _declared(part, own)
            yield _Argument(own, keyword, declared, any(isinstance(leaf, _SPECS) for leaf in _leaves(declared)))


def _is_leaf(value: Tree) -> bool:
    return isinstance(value, (*_SPECS, PerReplica, Variable)) or value is None


def _leaves(value: Tree) -> list[Leaf]:
    return jax.tree.leaves(value, is_leaf=_is_leaf)


def _mapped(fn: Callable[[Leaf], Leaf], value: Tree) -> Tree:
    return jax.tree.map(fn, value, is_leaf=_is_leaf)


def _declared(value: Tree, name: str) -> Tree:
    """Returns the specs of what is given in each call, named by their places, and all else as it is."""

    def spec(path: Path, leaf: Leaf) -> Leaf:
        if isinstance(leaf, Variable):
            found = TensorSpec(leaf.shape, leaf.dtype)
        elif isinstance(leaf, PerReplica):
            return PerReplicaSpec(*spec_of(leaf.values))
        elif isinstance(leaf, (TensorSpec, jax.Array, np.ndarray)):
            found = leaf if isinstance(leaf, TensorSpec) else spec_of(leaf)
        else:
            return leaf
        place = "_".join([name, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)])
        return TensorSpec(found.shape if found.shape.rank is not None else None, found.dtype, found.name or place)

    return jax.tree_util.tree_map_with_path(spec, value, is_leaf=_is_leaf)


def _common(pair: Sequence[Leaf]) -> Leaf:
    """Returns the spec of both: None where their dimensions differ."""
    one, other = pair
    if isinstance(one, PerReplicaSpec):
        return PerReplicaSpec(*map(_common, zip(one.value_specs, other.value_specs)))
    if not isinstance(one, TensorSpec) or not isinstance(other, TensorSpec):
        return one
    if len(one.shape) != len(other.shape):
        return TensorSpec(None, one.dtype)
    return TensorSpec([a if a == b else None for a, b in zip(one.shape, other.shape)], one.dtype)
