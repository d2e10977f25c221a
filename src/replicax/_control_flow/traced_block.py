"""Blocks of Python code that become branches and loops of a program (`cond_and_loops`): each traced once, by itself.

The values that a block takes and returns may hold numbers and other objects beside tensors, and it may read and assign
variables, for which it is traced on a level of its own (see `_tracing.frames`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike, DTypeLike

from replicax._base import array_conversion
from replicax._base.array_conversion import strong
from replicax._base.types import Leaf, Tree
from replicax._data.iterators import ElementIterator
from replicax._tracing import active_tapes, dataset_reads, frames
from replicax._tracing.protocols import State

Leaves: TypeAlias = dict[int, list[jax.Array]]  # the leaves of variables, by the variables' id
Pulled: TypeAlias = tuple[ElementIterator, Tree]  # an iterator and an element of it


class Undefined:
    """The value of a Python variable that has none."""

    __slots__ = ("symbol_name",)
    _replicax_key = "undefined"

    def __init__(self, symbol_name: str):
        self.symbol_name = symbol_name

    def read(self) -> NoReturn:
        """Raises `UnboundLocalError`, as a read of the variable does."""
        raise UnboundLocalError(f"'{self.symbol_name}' is used before assignment")


class UndefinedReturnValue:
    """The value of a function that has not come to a `return` yet."""


class DynamicRange:
    """A range whose length only the program knows; to loop over."""

    def __init__(self, start: ArrayLike, limit: ArrayLike, delta: ArrayLike = 1, dtype: DTypeLike | None = None):
        self.dtype = jnp.result_type(start, limit, delta) if dtype is None else dtype
        self._given: tuple[Any, ...] = start, limit, delta
        self.start, self.limit, self.delta = (jnp.asarray(x, self.dtype) for x in (start, limit, delta))

    def __jax_array__(self) -> jax.Array:
        if any(map(export.is_symbolic_dim, self._given)):
            start, limit, delta = self._given
            return jnp.arange(start, limit, delta, self.dtype)
        return jnp.arange(self.start, self.limit, self.delta)  # JAX's error says that a length must be known

    def __len__(self) -> int:
        return int(self.size())  # as does this

    def size(self) -> jax.Array:
        """Returns the number of elements."""
        steps = jnp.ceil((self.limit - self.start) / self.delta)
        return jnp.maximum(steps, 0).astype(jnp.int32)


def _operated(name: str) -> Callable[..., jax.Array]:
    return lambda self, *others: getattr(self.__jax_array__(), name)(*others)


_OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg getitem"""
for _name in _OPERATORS.split():
    setattr(DynamicRange, f"__{_name}__", _operated(f"__{_name}__"))


# Values: the tensors among them, and the rest.


class Tensor:
    """Stands for a tensor among the leaves of a value.

    Attributes:
        place: the index of its array.
        given: the number or variable that it was made of; None for an array.
    """

    __slots__ = ("place", "shape", "dtype", "given")

    def __init__(self, place: int, array: jax.Array, given: Leaf):
        self.place, self.shape, self.dtype = place, array.shape, array.dtype
        self.given = None if isinstance(given, jax.Array) else given

    def is_constant_like(self, other: Tensor) -> bool:
        """Returns True if both were made of the same Python number or of one variable."""
        if self.given is None or type(self.given) is not type(other.given):
            return False
        return self.given is other.given or (
            isinstance(self.given, (bool, int, float, complex)) and repr(self.given) == repr(other.given)
        )


class Value:
    """The value of a Python variable: a pytree, each leaf of which is a `Tensor` or any other object."""

    __slots__ = ("name", "tree", "leaves")

    def __init__(self, name: str, value: Tree, arrays: list[jax.Array]):
        self.name = name
        self.tree: Any
        self.leaves, self.tree = jax.tree.flatten(value, is_leaf=lambda x: x is None or active_tapes.is_variable(x))
        for i, leaf in enumerate(self.leaves):
            array = _as_tensor(leaf)
            if array is not None:
                self.leaves[i] = Tensor(len(arrays), array, leaf)
                arrays.append(array)

    def lone(self) -> Leaf:
        """Returns the value where it is a single leaf."""
        return self.leaves[0] if len(self.leaves) == 1 and self.tree == _LEAF else _NOTHING

    def rebuilt(self, arrays: Sequence[jax.Array]) -> Tree:
        """Returns the value with these arrays in place of its tensors."""
        leaves = [arrays[leaf.place] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


_LEAF = jax.tree.structure(0)
_NOTHING = object()


def _as_tensor(leaf: Leaf) -> jax.Array | None:
    """Returns a number, an array or a variable as an array that is not weakly typed; None for anything else."""
    if active_tapes.is_variable(leaf):
        leaf = leaf.read_value()
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jnp.asarray(leaf)
    elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        leaf = array_conversion.as_array(leaf)
    if not isinstance(leaf, jax.Array):
        return None
    return strong(leaf)


def flattened(names: Sequence[str], values: Sequence[Tree]) -> tuple[list[Value], list[jax.Array]]:
    """Returns these values with their names, and the arrays of all their tensors."""
    arrays: list[jax.Array] = []
    return [Value(name, value, arrays) for name, value in zip(names, values)], arrays


@jax.custom_jvp
def _carrier(x: jax.Array) -> jax.Array:
    """Returns zeros with the gradient of `x`."""
    return jnp.zeros_like(x)


_carrier.defjvp(lambda primals, tangents: (_carrier(*primals), *tangents))


class _BlockFrame(frames.TraceFrame):
    """The frame of a block.

    Under a tape around the block, each read of a variable in it counts by itself, as elsewhere: the gradient goes to
    the variable, not through the values assigned to it. So the gradient of the value is stopped, and a *carrier* is
    added, zeros that are an input of the block and take the gradient.
    """

    def __init__(self, outer: frames.Frame):
        super().__init__(outer.local, outer.mesh)
        self.carriers: dict[int, list[int]] = {}  # slots, of each variable's leaves that have gradients
        self._tracers: dict[int, list[jax.Array]] = {}
        self._before = {id(tape) for tape in active_tapes.entered()}

    def read(self, variable: State) -> list[jax.Array]:
        key, leaves = id(variable), super().read(variable)
        if not any(id(tape) in self._before for tape in active_tapes.followers(variable)):
            return leaves
        if key not in self.carriers:
            inputs = [self.new_input(leaf) for leaf in leaves if _is_inexact(leaf)]
            self.carriers[key] = [slot for slot, _ in inputs]
            self._tracers[key] = [tracer for _, tracer in inputs]
            self.variables[key] = variable
        carriers = iter(self._tracers[key])
        with jex.set_current_trace(self.trace):
            return [lax.stop_gradient(leaf) + next(carriers) if _is_inexact(leaf) else leaf for leaf in leaves]

    def forget(self) -> None:
        """Drops the references to tracers."""
        self.values.clear()
        self.shared.clear()
        self._tracers.clear()


def _is_inexact(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


class TracedBlock:
    """Python code traced by itself: its jaxpr, the values it returns, and the frame with the variables it used.

    Args:
        code: takes tracers, returns one value for each of the names.
        inputs: arrays of the tracers' types.
        pulled: the iterators and elements of each `next(iterator)` in the code, in order; new ones are appended. None:
            there can be no `next(iterator)` in the code.
    """

    def __init__(
        self,
        names: Sequence[str],
        code: Callable[..., Sequence[Tree]],
        inputs: Sequence[jax.Array] = (),
        pulled: list[Pulled] | None = None,
    ):
        outer = frames.frame()
        self.level = level = _BlockFrame(outer)
        self.pulled = pulled
        self.slots: list[list[int]] = []  # of the leaves of each element
        outer_reader = dataset_reads.reader()

        def read(iterator: ElementIterator) -> Tree:
            if frames.frame() is not level or outer_reader is None or level.local:
                return NotImplemented
            if pulled is None:
                raise dataset_reads.DrivenFromHost
            if len(self.slots) == len(pulled):
                with frames.entered(outer):
                    pulled.append((iterator, pulled_outside(outer_reader, iterator)))
            self.slots.append([])
            return dataset_reads.as_inputs(pulled[len(self.slots) - 1][1], level, self.slots[-1])

        def traced(*tracers: jax.Array) -> list[jax.Array]:
            level.trace = frames.untaped_trace()
            with frames.entered(level):
                self.values, arrays = flattened(names, code(*tracers))
                self.count = len(arrays)
                written = [strong(leaf) for key in level.written for leaf in level.values[key]]
            return [*arrays, *written]

        with dataset_reads.reading_by(read):
            self.jaxpr = jax.make_jaxpr(traced)(*inputs)
        self.sizes = {key: len(level.values[key]) for key in level.written}
        level.forget()
        if isinstance(outer, frames.TraceFrame):
            outer.meshes += level.meshes

    def run(
        self,
        inputs: Sequence[jax.Array],
        state: Leaves,
        written: Iterable[int] = (),
        elements: Sequence[Sequence[jax.Array]] = (),
        consts: Sequence[jax.Array] | None = None,
    ) -> tuple[list[jax.Array], Leaves]:
        """Returns the arrays of the code's results, and the leaves of written variables after it.

        Args:
            inputs: the arrays that the code takes.
            state: of `state_of`.
            written: the ids of the variables that are asked for; the code need not assign all of them.
            elements: the arrays of the elements that the code pulls.
            consts: in place of the jaxpr's own, which the code closes over.
        """
        supplied = {slot: state[key][i] for key, slots in self.level.inputs.items() for i, slot in enumerate(slots)}
        for key, slots in self.level.carriers.items():
            supplied.update(zip(slots, state[_carriers_of(key)]))
        for slots, arrays in zip(self.slots, elements):
            supplied.update(zip(slots, arrays))
        jaxpr = self.jaxpr if consts is None else jex.ClosedJaxpr(self.jaxpr.jaxpr, consts)
        results = self.level.replay(jaxpr, supplied, *inputs)
        rest = iter(results[self.count :])
        assigned = {key: [next(rest) for _ in range(size)] for key, size in self.sizes.items()}
        return results[: self.count], {key: assigned.get(key, state[key]) for key in written}


def pulled_outside(reader: dataset_reads.Reader, iterator: ElementIterator) -> Tree:
    """Pulls an element as an input of the trace outside; raises `DrivenFromHost` where it cannot be one."""
    element = reader(iterator)
    if element is NotImplemented:
        raise dataset_reads.DrivenFromHost
    return element


def _carriers_of(key: int) -> int:
    """Returns the key of the carriers of a variable in a state."""
    return -key


def state_of(*blocks: TracedBlock) -> tuple[Leaves, dict[int, State]]:
    """Returns the current leaves of all variables that the blocks use, and the variables that they assign."""
    state: Leaves = {}
    written: dict[int, State] = {}
    frame = frames.frame()
    for block in blocks:
        for key, variable in block.level.variables.items():
            leaves = frame.read(variable)
            # For tapes around, a read inside is a read here.
            seen = key in block.level.inputs or key in block.level.carriers
            state[key] = active_tapes.on_read(variable, leaves) if seen else state.get(key, list(leaves))
            if key in block.level.carriers:
                state[_carriers_of(key)] = [_carrier(leaf) for leaf in state[key] if _is_inexact(leaf)]
        written.update(block.level.written)
    return {key: [strong(leaf) for leaf in leaves] for key, leaves in state.items()}, written


def write(written: dict[int, State], state: Leaves) -> None:
    """Assigns the leaves of a state to variables."""
    for key, variable in written.items():
        frames.frame().write(variable, state[key])
