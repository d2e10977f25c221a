"""The equations of a jaxpr as a graph: what computes a value, and which values are computed in the same way.

Keys compare jaxprs of several traces: what is computed alike has equal keys. Unless they are `exact`, constants are
compared by their values, and any two Python functions are taken to be the same: made anew in each trace, constants and
Python functions of custom derivatives are other objects and yet the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from replicax._base.jaxprs import AnyJaxpr, Atom, has_side_effects, kind_of, opened
from replicax._passes.primitives import CALLS, CUSTOM_DERIVATIVES, ELEMENTWISE, SAME_ELEMENTS
from replicax._values import AXIS

_OF_SHAPES = frozenset(
    {"shape", "new_sizes", "dimensions", "broadcast_dimensions", "sharding", "context_mesh", "layout"}
    | {"unconstrained_dims"}
)
_CALLS = {**CALLS, **CUSTOM_DERIVATIVES}  # not checkpoints, which would no longer recompute
_DEEPEST = 64  # equations behind each other that tell apart what is computed


class LiteralKey:
    """The key of a literal of a jaxpr."""

    def __init__(self, literal: jex.Literal):
        self.value, self.aval = literal.val, kind_of(literal)


Key = tuple[int, jex.Var] | LiteralKey  # a variable of a jaxpr and the scope that it belongs to, or a literal


class ScopedEquation:
    """An equation, in the scope of the call that it stands in."""

    __slots__ = ("eqn", "inputs", "jaxpr", "outputs", "scope")

    def __init__(self, eqn: jex.JaxprEqn, scope: int, jaxpr: jex.Jaxpr, inputs: list[Key], outputs: Sequence[Key]):
        self.eqn, self.scope, self.jaxpr, self.inputs, self.outputs = eqn, scope, jaxpr, inputs, outputs

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


class Graph:
    """The equations of a jaxpr by what they compute. Calls are opened, and theirs join in, where one looks through."""

    def __init__(self, jaxpr: jex.Jaxpr):
        self.nodes: dict[Key, ScopedEquation] = {}  # by their outputs
        self.aliases: dict[Key, Key] = {}  # of the inputs and outputs of calls that were opened
        self._scopes = itertools.count()
        self._numbers: dict[Hashable, int] = {}  # of scalars: equal numbers, equal values
        self._number_of: dict[Key, int] = {}
        self._alike: dict[Key, int] = {}
        self.scope = self._enter(jaxpr)

    def _enter(self, jaxpr: jex.Jaxpr) -> int:
        scope = next(self._scopes)
        for eqn in jaxpr.eqns:
            inputs = [self.key(atom, scope) for atom in eqn.invars]
            outputs: list[Key] = [(scope, var) for var in eqn.outvars]
            self.nodes.update(dict.fromkeys(outputs, ScopedEquation(eqn, scope, jaxpr, inputs, outputs)))
        return scope

    def key(self, atom: Atom, scope: int = 0) -> Key:
        """Returns the key of a variable or a literal of the jaxpr."""
        return LiteralKey(atom) if isinstance(atom, jex.Literal) else (scope, atom)

    def resolved(self, key: Key) -> Key:
        """Returns the key that the value has in the innermost call that was opened."""
        while key in self.aliases:
            key = self.aliases[key]
        return key

    def seen_through(self, key: Key) -> Key:
        """Opens the call that computes a value, if one does that can be opened; returns what is `resolved` then."""
        while True:
            key = self.resolved(key)
            node = self.nodes.get(key)
            if node is None or not self._open(node):
                return key

    def source(self, key: Key, is_end: Callable[[Key], bool] = lambda key: False) -> Key:
        """Follows a value back through equations that keep its elements, as far as they go or to an end."""
        while True:
            key = self.seen_through(key)
            node = self.nodes.get(key)
            if is_end(key) or node is None or node.name not in SAME_ELEMENTS or scalar_operands([node]) != [False]:
                return key
            key = node.inputs[0]

    def _open(self, node: ScopedEquation) -> bool:
        if node.name not in _CALLS:
            return False
        jaxpr, _ = opened(node.eqn.params[_CALLS[node.name]])
        if jaxpr.constvars or jaxpr.effects:
            return False
        scope = self._enter(jaxpr)
        self.aliases.update(((scope, var), key) for var, key in zip(jaxpr.invars, node.inputs))
        for key, atom in zip(node.outputs, jaxpr.outvars):
            del self.nodes[key]
            self.aliases[key] = self.key(atom, scope)
        return True

    def number(self, key: Key) -> int:
        """Returns a number that scalars share which are computed in the same way."""
        key = self.resolved(key)
        if key not in self._number_of:
            node = self.nodes.get(key)
            what: tuple[Hashable, ...] | None = None
            if isinstance(key, LiteralKey):
                what = ("literal", str(key.aval), str(key.value))
            elif node is not None and all(aval_of(k).shape == () for k in node.inputs) and not node.eqn.effects:
                if self._open(node):
                    return self.number(key)
                inputs = tuple(self.number(k) for k in node.inputs)
                what = (node.name, _frozen(node.eqn.params), node.outputs.index(key), inputs)
            self._number_of[key] = self._number(what or ("only", key))
        return self._number_of[key]

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def likeness(self, key: Key, leaves: Container[Key], depth: int = 0) -> int:
        """Returns a number that arrays share which are computed in the same way from leaves and scalars."""
        key = self.source(key)
        if key in leaves:
            return self._number("leaf")
        if key not in self._alike:
            node, what = self.nodes.get(key), None
            if node is not None and depth < _DEEPEST and (plan := scalar_operands([node])) is not None:
                inputs = [
                    self._scalar(x)
                    if scalar and self.resolved(x) not in leaves
                    else self.likeness(x, leaves, depth + 1)
                    for x, scalar in zip(node.inputs, plan)
                ]
                what = (node.name, _frozen(node.eqn.params), *(str(aval_of(x).dtype) for x in node.inputs), *inputs)
            self._alike[key] = self._number(what or "other")
        return self._alike[key]

    def _scalar(self, key: Key) -> Hashable:
        """Returns what a scalar adds to a likeness: which literal it is; other scalars may differ."""
        key = self.resolved(key)
        return ("scalar", self.number(key) if isinstance(key, LiteralKey) else None)

    def says_nothing(self, number: int) -> bool:
        """Returns whether a likeness says nothing, because the arrays are not computed element by element."""
        return number in (self._numbers.get("other"), self._numbers.get("leaf"))


def aval_of(key: Key) -> jax.core.ShapedArray:
    """Returns the shape and dtype of what has this key."""
    return key.aval if isinstance(key, LiteralKey) else kind_of(key[1])


def _frozen(params: dict[str, Any]) -> tuple[Hashable, ...]:
    return tuple((name, key_of(value)) for name, value in sorted(params.items()) if name not in _OF_SHAPES)


def scalar_operands(nodes: Sequence[ScopedEquation]) -> list[bool] | None:
    """Returns for each operand whether it is a scalar for the whole array; None if the equations are not alike."""
    first = nodes[0]
    name = first.name
    if name not in ELEMENTWISE and name not in SAME_ELEMENTS and name != "broadcast_in_dim":
        return None  # before its parameters are looked at, which may be whole programs
    if len({id(node) for node in nodes}) < len(nodes):
        return None
    if any(n.name != name or len(n.outputs) != 1 or len(n.inputs) != len(first.inputs) for n in nodes):
        return None
    params, dtypes = _frozen(first.eqn.params), [aval_of(key).dtype for key in first.inputs]
    if any(_frozen(n.eqn.params) != params or [aval_of(key).dtype for key in n.inputs] != dtypes for n in nodes[1:]):
        return None
    if name == "broadcast_in_dim" and all(aval_of(n.inputs[0]).shape == () for n in nodes):
        return [True] if len(first.inputs) == 1 else None
    if name in SAME_ELEMENTS:
        same = len(first.inputs) == 1 and all(
            math.prod(aval_of(n.inputs[0]).shape) == math.prod(aval_of(n.outputs[0]).shape) for n in nodes
        )
        return [False] if same and first.eqn.params.get("dimensions") is None or name == "squeeze" and same else None
    if name not in ELEMENTWISE:
        return None
    found = []
    for place in range(len(first.inputs)):
        if all(aval_of(n.inputs[place]).shape == aval_of(n.outputs[0]).shape for n in nodes):
            found.append(False)
        elif all(aval_of(n.inputs[place]).shape == () for n in nodes):
            found.append(True)
        else:
            return None
    return found


T = TypeVar("T")


class Circle(Exception):
    """Some things need each other."""

    def __init__(self, ring: Sequence[object]):
        super().__init__(ring)
        self.ring = ring


def in_order(roots: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """Returns things and all that they need, each after what it needs; told apart by their ids.

    Raises:
        Circle: there is no such order.
    """
    done: dict[int, T] = {}
    path: dict[int, T] = {}  # each needs the next
    stack = [iter(roots)]
    while stack:
        following = next(stack[-1], None)
        if following is None:
            stack.pop()
            if path:
                done.update([path.popitem()])
        elif id(following) in path:
            raise Circle(list(path.values())[list(path).index(id(following)) :])
        elif id(following) not in done:
            path[id(following)] = following
            stack.append(iter(needs(following)))
    return list(done.values())


def key_of(value: object, exact: bool = True) -> Hashable:
    """Returns a key that equal parameters of equations share, and jaxprs that are alike."""
    if isinstance(value, AnyJaxpr):
        return key_of_jaxpr(*opened(value), exact)
    if isinstance(value, (tuple, list)):
        return (type(value), *(key_of(item, exact) for item in value))
    if isinstance(value, dict):
        return tuple((key, key_of(value[key], exact)) for key in sorted(value, key=str))
    if not exact and (hasattr(value, "call_wrapped") or (callable(value) and not isinstance(value, type))):
        return callable
    if isinstance(value, (float, np.floating)) and value != value:
        return "NaN"  # which equals nothing
    try:
        hash(value)
    except TypeError:
        return key_of_constant(value, exact)
    return value


def key_of_constant(value: Any, exact: bool) -> Hashable:
    """Returns a key of an array: which object it is or, unless `exact`, its values."""
    if exact or isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return object, id(value)
    host = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return value.shape, value.dtype, np.asarray(host).tobytes()


def key_of_jaxpr(jaxpr: jex.Jaxpr, consts: Sequence[Any], exact: bool) -> Hashable:
    """Returns a key of what a jaxpr computes with these constants."""
    places: dict[jex.Var, int] = {}

    def atom_key(atom: Atom) -> Hashable:
        if isinstance(atom, jex.Literal):
            return key_of_literal(atom)
        return places.setdefault(atom, len(places)), kind_of(atom).shape, kind_of(atom).dtype

    keys = [*map(atom_key, [*jaxpr.constvars, *jaxpr.invars])]
    for eqn in jaxpr.eqns:
        keys.append((eqn.primitive, key_of(eqn.params, exact), *map(atom_key, [*eqn.invars, *eqn.outvars])))
    constants = (key_of_constant(value, exact) for value in consts)
    return ("jaxpr", *constants, *keys, *map(atom_key, jaxpr.outvars))


def key_of_literal(literal: jex.Literal) -> Hashable:
    """Returns a key of a literal: its kind and value."""
    return "literal", kind_of(literal).shape, kind_of(literal).dtype, np.asarray(literal.val).tobytes()


def runs_replicas(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation runs replicas and its jaxpr may be computed in another order."""
    if eqn.primitive.name != "shard_map" or AXIS not in eqn.params["mesh"].axis_names:
        return False
    return not eqn.params["jaxpr"].constvars and not has_side_effects(eqn.params["jaxpr"])


def returns_rows(mapped: jex.JaxprEqn, place: int) -> bool:
    """Returns whether an output of a `shard_map` has one row for each replica."""
    axes = tuple(mapped.params["out_specs"][place])
    inside = mapped.params["jaxpr"].outvars[place]
    return axes[:1] == (AXIS,) and not any(axes[1:]) and kind_of(inside).shape[0] == 1
