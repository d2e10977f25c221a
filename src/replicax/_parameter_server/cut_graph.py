"""The equations of a traced function as one list, with those of its calls in place of the calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from replicax._base import jax_internals
from replicax._base.jaxprs import AnyJaxpr, Atom, equations, equations_in, has_side_effects, kind_of, opened
from replicax._passes.primitives import CALLS, CHECKPOINTS, CUSTOM_DERIVATIVES, ELEMENTWISE, IN_CALLS
from replicax._tracing import frames

_OPENED = {**CALLS, **CUSTOM_DERIVATIVES}
_KEEP_VALUE = frozenset({"copy", "copy_p", "reshape", "broadcast_in_dim", "convert_element_type", "squeeze"})


class Value:
    """What an equation computes, an input of the function, or a constant.

    Attributes:
        aval: its shape and dtype.
        op: the equation that computes it, None for inputs and constants.
        constant: its value if it is a constant.
        leaves: the numbers of the leaves of variables that it depends on, as the bits of an integer.
        pure: whether nothing that calls Python or has another side effect has to do with it.
        is_input: whether it is given from outside.
    """

    __slots__ = ("aval", "constant", "is_input", "leaves", "op", "pure")

    def __init__(self, aval: jax.core.ShapedArray, op: Op | None = None, constant: Any = None, is_input: bool = False):
        self.aval, self.op, self.constant, self.is_input = aval, op, constant, is_input
        self.leaves: int = 0 if op is None else op.leaves
        self.pure: bool = op is None or op.pure

    @property
    def is_constant(self) -> bool:
        return self.op is None and not self.is_input

    @property
    def nbytes(self) -> int:
        return nbytes(self.aval)

    @property
    def number(self) -> int:
        """The place of its equation, -1 for inputs and constants."""
        return -1 if self.op is None else self.op.number

    def whole_constant(self) -> Any:
        """Returns a constant as JAX takes it."""
        if isinstance(self.constant, jax.Array):
            return self.constant
        return jnp.asarray(self.constant, self.aval.dtype)  # of this very type, also where it has 64 bits


class Op:
    """An equation with its operands, in the order of the program by `number`."""

    __slots__ = ("calls", "eqn", "inputs", "leaves", "number", "outputs", "pure", "stays")

    def __init__(self, eqn: jex.JaxprEqn, inputs: list[Value], number: int):
        self.eqn, self.inputs, self.number = eqn, inputs, number
        # Whether it does something, such as to print, that it is there for.
        self.stays = any(not isinstance(effect, jax_internals.named_axis_effect()) for effect in eqn.effects)
        self.calls = self.stays or calls_back(eqn)  # whether it does more than compute
        self.pure = not self.calls and all(value.pure for value in inputs)
        self.leaves = 0
        for value in inputs:
            self.leaves |= value.leaves
        self.outputs = [Value(kind_of(var), self) for var in eqn.outvars]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def compute(self, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
        """Returns what it computes of these operands, with these parameters in place of its own."""
        return jax_internals.rebind(self.eqn, self.eqn.params if params is None else params, operands)


def nbytes(aval: jax.core.ShapedArray | jax.ShapeDtypeStruct) -> int:
    """Returns the size of an array; 0 of what is no array."""
    size = math.prod(getattr(aval, "shape", ()))
    return size * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def calls_back(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation calls Python, by itself or somewhere in its jaxprs."""
    if jax_internals.callback_of(eqn) is not None:
        return True
    if eqn.primitive.name in ELEMENTWISE:
        return False
    return any(jax_internals.callback_of(inner) is not None for inner in equations_in(eqn))


class Graph:
    """The equations of a closed jaxpr, calls opened.

    Args:
        jaxpr: of a level of tracing.
        leaf_of: the numbers of the leaves of variables by the slots of the inputs that they are.

    Attributes:
        ops: the equations.
        inputs: the inputs by their slots.
        args: the jaxpr's arguments.
        outputs: what it returns.
    """

    def __init__(self, jaxpr: jex.ClosedJaxpr, leaf_of: Mapping[int, int]):
        self.ops: list[Op] = []
        self.inputs: dict[int, Value] = {}
        self._leaf_of = leaf_of
        self._constants: dict[int, Value] = {}
        self.args = [Value(kind_of(var), is_input=True) for var in jaxpr.jaxpr.invars]
        self.outputs = self._entered(jaxpr, self.args)

    def _entered(self, jaxpr: AnyJaxpr, args: Sequence[Value]) -> list[Value]:
        inner, consts = opened(jaxpr)
        known = dict(zip(inner.constvars, map(self._constant, inner.constvars, consts)))
        known.update(zip(inner.invars, args))

        def value_of(atom: Atom) -> Value:
            return Value(kind_of(atom), constant=atom.val) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in inner.eqns:
            operands = [*map(value_of, eqn.invars)]
            known.update(zip(eqn.outvars, self._outputs(eqn, operands)))
        return [*map(value_of, inner.outvars)]

    def _constant(self, var: jex.Var, value: Any) -> Value:
        return self._constants.setdefault(id(value), Value(kind_of(var), constant=value))

    def _outputs(self, eqn: jex.JaxprEqn, operands: list[Value]) -> list[Value]:
        if frames.is_input(eqn):
            return [self._input(eqn)]
        if self._opens(eqn, operands):
            return self._entered(eqn.params[IN_CALLS[eqn.primitive.name]], operands)
        if eqn.primitive.name == "cond" and all(map(_is_light, eqn.params["branches"])):
            return self._selected(eqn, operands)
        return self._added(eqn, operands)

    def _added(self, eqn: jex.JaxprEqn, operands: list[Value]) -> list[Value]:
        op = Op(eqn, operands, len(self.ops))
        self.ops.append(op)
        return op.outputs

    def _selected(self, eqn: jex.JaxprEqn, operands: list[Value]) -> list[Value]:
        """Computes all branches, which go element by element, and selects: then a server can do so."""
        which, *others = operands
        cases = [self._entered(branch, others) for branch in eqn.params["branches"]]
        if len(cases) == 1:
            return cases[0]
        return [self._added(_selection(which, each), [which, *each])[0] for each in zip(*cases)]

    def _input(self, eqn: jex.JaxprEqn) -> Value:
        slot = eqn.params["slot"]
        if slot not in self.inputs:
            self.inputs[slot] = value = Value(kind_of(eqn.outvars[0]), is_input=True)
            if slot in self._leaf_of:
                value.leaves = 1 << self._leaf_of[slot]
        return self.inputs[slot]

    def _opens(self, eqn: jex.JaxprEqn, operands: list[Value]) -> bool:
        """Returns whether a call is opened. Of checkpoints, which save memory, those that look up rows of a leaf."""
        name = eqn.primitive.name
        if name in CHECKPOINTS:
            shapes = {value.aval.shape for value in operands if value.op is None and value.leaves}
            inner = equations(eqn.params[CHECKPOINTS[name]])
            return any(e.primitive.name == "gather" and kind_of(e.invars[0]).shape in shapes for e in inner)
        return name in _OPENED


def _is_light(jaxpr: AnyJaxpr) -> bool:
    """Returns whether a jaxpr, calls and branches in it included, does nothing but go element by element."""
    return all(
        not eqn.effects
        and (
            (name := eqn.primitive.name) in ELEMENTWISE
            or name == "broadcast_in_dim"
            or (name in _OPENED and _is_light(eqn.params[_OPENED[name]]))
            or (name == "cond" and all(map(_is_light, eqn.params["branches"])))
        )
        for eqn in opened(jaxpr)[0].eqns
    )


def _selection(which: Value, cases: Sequence[Value]) -> jex.JaxprEqn:
    """Returns the equation that selects one of some arrays."""
    kinds = [jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype) for value in (which, *cases)]
    return jax.make_jaxpr(jax.lax.select_n)(*kinds).jaxpr.eqns[0]


def same_value(value: Value) -> Value:
    """Follows a value back through copies, to what it is a copy of."""
    while value.op is not None and value.op.name in _KEEP_VALUE and len(value.op.inputs) == 1:
        before = value.op.inputs[0]
        if before.aval.shape != value.aval.shape or before.aval.dtype != value.aval.dtype:
            break
        if value.op.name == "reshape" and value.op.eqn.params["dimensions"] is not None:  # which transposes
            break
        value = before
    return value


def needed_ops(
    wanted: Iterable[Value],
    ops: Sequence[Op],
    stop: Callable[[Op], Sequence[Value] | None] = lambda op: None,
    effects: bool = True,
) -> tuple[list[Op], dict[Value, None]]:
    """Finds what computes some values.

    Args:
        wanted: the values.
        ops: all equations.
        stop: returns for an equation that is not to be computed what is needed in its place, None for others.
        effects: whether what does more than compute is needed too.

    Returns:
        The equations in their order, with those that `stop`, and the inputs that are needed.
    """
    needed = dict.fromkeys(wanted)
    found = []
    for op in reversed(ops):
        if (effects and op.stays) or any(output in needed for output in op.outputs):
            instead = stop(op)
            needed.update(dict.fromkeys(op.inputs if instead is None else instead))
            found.append(op)
    return found[::-1], {value: None for value in needed if value.is_input}


def is_pure_branch(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation is a branch that neither loops nor does anything but compute."""
    if eqn.primitive.name != "cond" or calls_back(eqn):
        return False
    return not any(has_side_effects(opened(branch)[0]) for branch in eqn.params["branches"]) and all(
        inner.primitive.name not in ("while", "scan", "ffi_call")
        for branch in eqn.params["branches"]
        for inner in equations(branch)
    )
