"""The same arithmetic on many arrays, done at once on one vector.

An optimizer computes the same for each of its variables: small operations by the hundred, which cost their start
rather than their arithmetic. Where arrays are parts of one vector (a *pack* of variables, the sum of all gradients),
and what is computed of them is equation for equation the same, one equation on the vector does it.

A jaxpr is evaluated from its ends: from what is wanted as a vector back through equations that are alike in all its
parts, as far as these go, and from there on one by one. This is how compilers find vector instructions in scalar code
("superword level parallelism", Larsen and Amarasinghe, PLDI 2000), one level higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.jaxprs import Atom, kind_of
from replicax._passes.interpret import computed
from replicax._passes.jaxpr_graph import (
    Circle,
    Graph,
    Key,
    LiteralKey,
    ScopedEquation,
    aval_of,
    in_order,
    runs_replicas,
    scalar_operands,
)
from replicax._passes.primitives import SAME_ELEMENTS
from replicax._tracing import frames

_MOST_RUNS = 8  # stretches of one vector; where there are more, its elements are gathered one by one


class Piece:
    """An array that is a part of a vector; taken out of it when it is needed by itself."""

    __slots__ = ("_array", "dtype", "ndim", "shape", "size", "start", "vector")

    def __init__(self, vector: jax.Array, start: int, shape: Sequence[int]):
        self.vector, self.start, self.shape, self.dtype = vector, start, tuple(shape), vector.dtype
        self.size, self.ndim = math.prod(self.shape), len(self.shape)
        self._array: jax.Array | None = None

    def array(self) -> jax.Array:
        """Returns the array itself."""
        if self._array is None:
            part = self.vector
            if self.size != part.size:
                part = lax.slice(part, (self.start,), (self.start + self.size,))
            self._array = jnp.reshape(part, self.shape)
        return self._array


def whole(value: Value) -> jax.Array:
    """Returns a value as an array."""
    return value.array() if isinstance(value, Piece) else value


def pieces(vector: jax.Array, shapes: Iterable[Sequence[int]]) -> list[Piece]:
    """Arrays of these shapes, one behind the other in a vector."""
    found, start = [], 0
    for shape in shapes:
        found.append(Piece(vector, start, shape))
        start += found[-1].size
    return found


def joined(values: Sequence[Value]) -> jax.Array:
    """Concatenates all values to a vector; pieces of one vector that stand in order are taken from it as they are."""
    runs: list[tuple[jax.Array, int, int]] = []  # vectors, and from where to where
    for value in values:
        vector, start = (value.vector, value.start) if isinstance(value, Piece) else (jnp.ravel(value), 0)
        stop = start + value.size
        if runs and runs[-1][0] is vector and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((vector, start, stop))
    if len({id(vector) for vector, _, _ in runs}) == 1 and len(runs) > _MOST_RUNS:
        return runs[0][0][np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in runs])]
    parts = [
        vector if stop - start == vector.size else lax.slice(vector, (start,), (stop,)) for vector, start, stop in runs
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


Value = jax.Array | Piece
Operand = tuple[str, tuple[Key, ...]]  # "vector", "scalar" or "scalars", and the values


class _Group:
    """Equations alike, which one equation on vectors replaces."""

    def __init__(self, keys: tuple[Key, ...], first: ScopedEquation, operands: list[Operand]):
        self.keys, self.first = keys, first
        # What they compute with: arrays that make a vector, one scalar for all of them, or scalars, one for each.
        self.operands = operands
        self.shapes = [aval_of(key).shape for key in keys]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    def computed(self, operands: list[jax.Array]) -> jax.Array:
        """Returns the vector of all their results."""
        if self.first.name in SAME_ELEMENTS:
            (only,) = operands
            return only if only.ndim else lax.broadcast(only, (sum(self.sizes),))
        result: jax.Array = self.first.eqn.primitive.bind(*operands, **self.first.eqn.params)
        return result


Provider = _Group | ScopedEquation  # computes values


class Values:
    """The values of a jaxpr's variables, as far as they are known or were asked for.

    Equations in `taken_over` are evaluated by a function of their own. It is given places of outputs that are wanted as
    vectors, and sets the values of all outputs, and of what else is known (in `computed_beside`) to come with them.
    """

    def __init__(self, jaxpr: jex.Jaxpr, known: Iterable[tuple[jex.Var, Value]]):
        self.graph = Graph(jaxpr)
        self.values: dict[Key, Value] = {(0, var): value for var, value in known}
        # id of an equation -> what evaluates it, and which of its outputs can be parts of a vector
        self.taken_over: dict[int, tuple[Callable[[list[list[int]]], None], set[Key]]] = {}
        self.computed_beside: dict[Key, ScopedEquation] = {}  # what such an equation computes beside its own outputs

    def take_over(
        self,
        eqn: jex.JaxprEqn,
        run: Callable[[list[list[int]]], None],
        vectors: Iterable[jex.Var],
        also: Iterable[jex.Var],
    ) -> None:
        """Has `run` evaluate an equation: see above. Outputs in `vectors` may be parts of one."""
        self.taken_over[id(eqn)] = run, {(0, var) for var in vectors}
        node = self.graph.nodes[0, eqn.outvars[0]]
        self.computed_beside.update(((0, var), node) for var in also)

    def set(self, variables: Iterable[jex.Var], values: Iterable[Value]) -> None:
        self.values.update(((0, var), value) for var, value in zip(variables, values))

    def take_piece(self, eqn: jex.JaxprEqn) -> None:
        """Note the result of an equation that takes a part of a known vector, or gives it a shape."""
        if eqn.primitive.name not in ("slice", "reshape") or isinstance(eqn.invars[0], jex.Literal):
            return
        value, kind = self.values.get((0, eqn.invars[0])), kind_of(eqn.outvars[0])
        if eqn.primitive.name == "reshape":
            if isinstance(value, Piece) and eqn.params["dimensions"] is None:
                self.set(eqn.outvars, [Piece(value.vector, value.start, kind.shape)])
        elif value is not None and not isinstance(value, Piece) and value.ndim == 1 and eqn.params["strides"] is None:
            self.set(eqn.outvars, [Piece(value, eqn.params["start_indices"][0], kind.shape)])

    def of(self, atoms: Iterable[Atom]) -> list[Value]:
        """Returns the values of these variables and literals."""
        return self.arrays_and_vectors(atoms, ())[0]

    def arrays_and_vectors(
        self, atoms: Iterable[Atom], vectors: Iterable[Sequence[Atom]]
    ) -> tuple[list[Value], list[jax.Array]]:
        """Returns the values of variables and literals, and for each sequence of others a vector of all of them."""
        keys = [self.graph.key(atom) for atom in atoms]
        made = _Plan(self, keys, [tuple(map(self.graph.key, atoms)) for atoms in vectors]).run()
        return [self.value(key) for key in keys], made

    def value(self, key: Key) -> Value:
        key = self._known(key)
        return key.value if isinstance(key, LiteralKey) else self.values[key]

    def _known(self, key: Key) -> Key:
        while key not in self.values and key in self.graph.aliases:
            key = self.graph.aliases[key]
        return key

    def is_known(self, key: Key) -> bool:
        key = self._known(key)
        return isinstance(key, LiteralKey) or key in self.values


def updated_alike(closed: jex.ClosedJaxpr, outputs: dict[int, int]) -> list[list[int]]:
    """Find groups of outputs that are computed in the same way, element by element.

    Args:
        closed: a level's jaxpr.
        outputs: places of outputs, and for each the slot of the input that it replaces.
    """
    jaxpr = closed.jaxpr
    graph = Graph(jaxpr)
    slots = set(outputs.values())
    leaves = {graph.key(e.outvars[0]) for e in jaxpr.eqns if frames.is_input(e) and e.params["slot"] in slots}
    mapped = {id(eqn) for eqn in jaxpr.eqns if runs_replicas(eqn)}
    inside: dict[int, tuple[Graph, set[Key]]] = {}  # of replicas' programs
    groups: dict[tuple[int, int], list[int]] = {}
    for place in outputs:
        key = graph.source(graph.key(jaxpr.outvars[place]))
        node = graph.nodes.get(key)
        where, known = graph, leaves
        if node is not None and id(node.eqn) in mapped:
            eqn = node.eqn
            body = eqn.params["jaxpr"]
            if id(eqn) not in inside:
                own = Graph(body)
                inside[id(eqn)] = own, {own.key(var) for var, k in zip(body.invars, node.inputs) if k in leaves}
            where, known = inside[id(eqn)]
            key = where.key(body.outvars[node.outputs.index(key)])
        number = where.likeness(key, known)
        if not where.says_nothing(number):
            groups.setdefault((id(where), number), []).append(place)
    return list(groups.values())


class _Plan:
    """What to evaluate, and in which order, for some values and vectors."""

    def __init__(self, values: Values, needed: list[Key], wanted: list[tuple[Key, ...]]):
        self.values, self.graph = values, values.graph
        self.groups: dict[tuple[Key, ...], _Group] = {}
        self.members: dict[Key, _Group] = {}
        self.vectors_of: dict[int, list[tuple[Key, ...]]] = {}  # vectors that equations taken over are to give
        self.made: dict[int, list[Piece]] = {}  # by group
        wanted = [self._grouped(keys) for keys in wanted]
        self.needed = [key for key in needed if not values.is_known(key)]
        self.roots = [*wanted, *self.needed]
        self.wanted = wanted

    def _grouped(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        """Finds the groups behind a vector; returns its keys as they are called from now on."""
        root = self._sources(keys)
        waiting = [root]
        while waiting:
            keys = waiting.pop()
            if keys in self.groups or all(self.values.is_known(key) or key in self.members for key in keys):
                continue
            nodes = [node for node in map(self._node, keys) if node is not None]
            if len(nodes) < len(keys):
                continue
            taken_over = self.values.taken_over.get(id(nodes[0].eqn))
            if taken_over is not None:
                if all(node is nodes[0] and key in taken_over[1] for node, key in zip(nodes, keys)):
                    self.vectors_of.setdefault(id(nodes[0].eqn), []).append(keys)
                continue
            scalars = scalar_operands(nodes)
            if scalars is None:
                continue
            operands: list[Operand] = []
            for place, scalar in enumerate(scalars):
                inputs = self._sources(node.inputs[place] for node in nodes)
                if not scalar:
                    operands.append(("vector", inputs))
                elif len({self.graph.number(key) for key in inputs}) == 1:
                    operands.append(("scalar", inputs[:1]))
                else:
                    operands.append(("scalars", inputs))
            if nodes[0].name == "clamp" and len({kind for kind, _ in operands[::2]}) > 1:
                continue  # both limits are scalars, or neither is
            group = self.groups[keys] = _Group(keys, nodes[0], operands)
            for key in keys:
                self.members.setdefault(key, group)
            waiting += [inputs for kind, inputs in operands if kind == "vector"]
        return root

    def _sources(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        return tuple(key if self.values.is_known(key) else self.graph.source(key, self.values.is_known) for key in keys)

    def _node(self, key: Key) -> ScopedEquation | None:
        if self.values.is_known(key) or isinstance(key, LiteralKey):
            return None
        return self.values.computed_beside.get(key) or self.graph.nodes.get(key)

    def _provider(self, key: Key) -> Provider | None:
        """Returns the group or the equation that computes a value, None where it is known."""
        if self.values.is_known(key):
            return None
        key = self.graph.resolved(key)
        if key in self.members:
            return self.members[key]
        node = self._node(key)
        assert node is not None, f"nothing computes {key}"
        return node

    def _providers(self, keys: Provider) -> list[Provider | None]:
        if isinstance(keys, _Group):
            return [
                provider
                for kind, inputs in keys.operands
                for provider in (self._of_vector(inputs) if kind == "vector" else map(self._provider, inputs))
            ]
        return [self._provider(key) for key in keys.inputs]

    def _of_vector(self, keys: tuple[Key, ...]) -> Sequence[Provider | None]:
        return [self.groups[keys]] if keys in self.groups else [self._provider(key) for key in keys]

    def _order(self) -> list[Provider]:
        """Returns groups and equations, each after what it needs. A group that would need itself is no group."""
        while True:
            roots = [p for keys in self.wanted for p in self._of_vector(keys)]
            roots += [self._provider(key) for key in self.needed]
            try:
                return in_order(filter(None, roots), lambda one: filter(None, self._providers(one)))
            except Circle as circle:
                group = next(one for one in circle.ring if isinstance(one, _Group))
            del self.groups[group.keys]
            self.members = {key: other for key, other in self.members.items() if other is not group}

    def run(self) -> list[jax.Array]:
        """Evaluates all; returns the wanted vectors."""
        waiting: list[ScopedEquation] = []
        for one in self._order():
            if isinstance(one, _Group):
                self._compute(waiting)
                operands = [self._operand(one, kind, inputs) for kind, inputs in one.operands]
                parts = pieces(one.computed(operands), one.shapes)
                self.values.values.update((k, p) for k, p in zip(one.keys, parts) if self.members.get(k) is one)
                self.made[id(one)] = parts
            elif id(one.eqn) in self.values.taken_over:
                self._compute(waiting)
                run, _ = self.values.taken_over[id(one.eqn)]
                wanted = self.vectors_of.get(id(one.eqn), [])
                run([[one.outputs.index(key) for key in keys] for keys in wanted])
            elif not self._as_piece(one, waiting):
                if waiting and waiting[-1].scope != one.scope:
                    self._compute(waiting)
                waiting.append(one)
        self._compute(waiting)
        return [self._vector(keys) for keys in self.wanted]

    def _operand(self, group: _Group, kind: str, keys: tuple[Key, ...]) -> jax.Array:
        if kind == "vector":
            return self._vector(keys)
        scalars = [jnp.reshape(whole(self._array(key)), ()) for key in keys]  # a scalar may be a reshaped array
        if kind == "scalar":
            return scalars[0]
        return jnp.stack(scalars)[np.repeat(np.arange(len(scalars), dtype=np.int32), group.sizes)]

    def _vector(self, keys: tuple[Key, ...]) -> jax.Array:
        group = self.groups.get(keys)
        if group is not None:
            return joined(self.made[id(group)])
        return joined([self._array(key) for key in keys])

    def _array(self, key: Key) -> Value:
        value = self.values.value(key)
        return jnp.asarray(value, aval_of(key).dtype) if isinstance(key, LiteralKey) else value

    def _as_piece(self, node: ScopedEquation, waiting: list[ScopedEquation]) -> bool:
        """Returns whether an equation only takes a part of a vector; then that piece is its value."""
        if node.name not in ("slice", "reshape", "squeeze") or isinstance(node.inputs[0], LiteralKey):
            return False
        params, key = node.eqn.params, node.inputs[0]
        if not self.values.is_known(key):
            if not any(key in n.outputs or self.graph.resolved(key) in n.outputs for n in waiting):
                return False
            if node.name != "slice":
                return False
            self._compute(waiting)
        value, shape = self.values.value(key), aval_of(node.outputs[0]).shape
        vector, start = (value.vector, value.start) if isinstance(value, Piece) else (value, 0)
        if node.name == "slice":
            if len(aval_of(key).shape) != 1 or params["strides"] not in (None, (1,)):
                return False
            start += params["start_indices"][0]
        elif not isinstance(value, Piece) or not (node.name == "squeeze" or params["dimensions"] is None):
            return False
        self.values.values[node.outputs[0]] = Piece(vector, start, shape)
        return True

    def _compute(self, waiting: list[ScopedEquation]) -> None:
        """Evaluates equations of one scope as JAX does."""
        if not waiting:
            return
        nodes, scope = list(waiting), waiting[0].scope
        waiting.clear()
        eqns = [node.eqn for node in nodes]
        results = computed(nodes[0].jaxpr, eqns, lambda var: whole(self.values.value((scope, var))))
        self.values.values.update(((scope, var), result) for var, result in results)
