"""Blocks of Python code that become branches and loops of a program (`cond_and_loops`): each traced once, by itself.

The values that a block takes and returns may hold numbers and other objects beside tensors, and it may read and assign
variables, for which it is traced on a level of its own (see `_tracing.frames`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import array_conversion
from replicax._tracing import active_tapes, dataset_reads, frames


class Undefined:
    """The value of a Python variable that has none."""

    __slots__ = ("symbol_name",)
    _replicax_key = "undefined"

    def __init__(self, symbol_name: str):
        self.symbol_name = symbol_name

    def read(self) -> Any:
        """What happens where the variable is read."""
        raise UnboundLocalError(f"'{self.symbol_name}' is used before assignment")


class UndefinedReturnValue:
    """The value of a function that has not come to a `return` yet."""


class DynamicRange:
    """Numbers from `start` to before `limit` of which only the program knows how many they are; to loop over."""

    def __init__(self, start: Any, limit: Any, delta: Any = 1, dtype: Any = None):
        self.dtype = jnp.result_type(start, limit, delta) if dtype is None else dtype
        self.start, self.limit, self.delta = (jnp.asarray(x, self.dtype) for x in (start, limit, delta))

    def __jax_array__(self) -> jax.Array:
        return jnp.arange(self.start, self.limit, self.delta)  # JAX says that this cannot be

    def __len__(self) -> int:
        return int(self.size())  # and that this cannot

    def size(self) -> jax.Array:
        """How many numbers there are."""
        steps = jnp.ceil((self.limit - self.start) / self.delta)
        return jnp.maximum(steps, 0).astype(jnp.int32)


def _operated(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.__jax_array__(), name)(*others)


_OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg getitem"""
for _name in _OPERATORS.split():
    setattr(DynamicRange, f"__{_name}__", _operated(f"__{_name}__"))


# Values: the tensors among them, and the rest.


class Tensor:
    """Stands for a tensor among the leaves of a value. `given`: the number or variable that it was made of."""

    __slots__ = ("place", "shape", "dtype", "given")

    def __init__(self, place: int, array: Any, given: Any):
        self.place, self.shape, self.dtype = place, array.shape, array.dtype
        self.given = None if isinstance(given, jax.Array) else given

    def is_constant_like(self, other: Tensor) -> bool:
        """Whether both were made of the same Python number or of one variable."""
        if self.given is None or type(self.given) is not type(other.given):
            return False
        return self.given is other.given or (
            isinstance(self.given, (bool, int, float, complex)) and repr(self.given) == repr(other.given)
        )


class Value:
    """What a Python variable holds: a tree of leaves, each a `Tensor` or any other object."""

    __slots__ = ("name", "tree", "leaves")

    def __init__(self, name: str, value: Any, arrays: list[Any]):
        self.name = name
        self.tree: Any
        self.leaves, self.tree = jax.tree.flatten(value, is_leaf=lambda x: x is None or active_tapes.is_variable(x))
        for i, leaf in enumerate(self.leaves):
            array = _as_tensor(leaf)
            if array is not None:
                self.leaves[i] = Tensor(len(arrays), array, leaf)
                arrays.append(array)

    def lone(self) -> Any:
        """The leaf, where the value is but one that is no tensor."""
        return self.leaves[0] if len(self.leaves) == 1 and self.tree == _LEAF else _NOTHING

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        leaves = [arrays[leaf.place] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


_LEAF = jax.tree.structure(0)
_NOTHING = object()


def _as_tensor(leaf: Any) -> Any:
    """A number, an array or a variable as an array of a dtype of its own; None for anything else."""
    if active_tapes.is_variable(leaf):
        leaf = leaf.read_value()
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jnp.asarray(leaf)
    elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        leaf = array_conversion.as_array(leaf)
    if not isinstance(leaf, jax.Array):
        return None
    return lax.convert_element_type(leaf, leaf.dtype) if leaf.aval.weak_type else leaf


def flattened(names: Sequence[str], values: Sequence[Any]) -> tuple[list[Value], list[Any]]:
    arrays: list[Any] = []
    return [Value(name, value, arrays) for name, value in zip(names, values)], arrays


@jax.custom_jvp
def _share(x: Any) -> Any:
    """Zeros, with the gradient of `x`."""
    return jnp.zeros_like(x)


_share.defjvp(lambda primals, tangents: (_share(*primals), *tangents))


class _BlockFrame(frames.TraceFrame):
    """The level of a block.

    Under a tape around it, each read of a variable in it is a read of its own, as elsewhere: the gradient goes to the
    variable, not through what was assigned to it. So what is read has the value's gradient taken away, and that of a
    share added, which is an input of the block.
    """

    def __init__(self, outer: frames.Frame):
        super().__init__(outer.local, outer.mesh)
        self.shares: dict[int, list[int]] = {}  # slots, of each variable's leaves that have gradients
        self._tracers: dict[int, list[Any]] = {}
        self._before = {id(tape) for tape in active_tapes.entered()}

    def read(self, variable: Any) -> list[Any]:
        key, leaves = id(variable), super().read(variable)
        if not any(id(tape) in self._before for tape in active_tapes.followers(variable)):
            return leaves
        if key not in self.shares:
            inputs = [self.new_input(leaf) for leaf in leaves if _is_inexact(leaf)]
            self.shares[key] = [slot for slot, _ in inputs]
            self._tracers[key] = [tracer for _, tracer in inputs]
            self.variables[key] = variable
        shares = iter(self._tracers[key])
        with frames.jax_trace(self.trace):
            return [lax.stop_gradient(leaf) + next(shares) if _is_inexact(leaf) else leaf for leaf in leaves]

    def forget(self) -> None:
        """Lets go of what was traced."""
        self.values.clear()
        self.shared.clear()
        self._tracers.clear()


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


class Block:
    """Python code traced by itself: its jaxpr, what it returns, and the level that knows which variables it touched.

    Args:
        code: gets tracers, returns one value for each of the names.
        inputs: arrays of the tracers' types.
        pulled: what `next(iterator)` gives in the code, one after another: the iterators and their elements. It grows
            where more is asked for. None: there can be no `next(iterator)` in the code.
    """

    def __init__(
        self,
        names: Sequence[str],
        code: Callable[..., Sequence[Any]],
        inputs: Sequence[Any] = (),
        pulled: list[tuple[Any, Any]] | None = None,
    ):
        outer = frames.frame()
        self.level = level = _BlockFrame(outer)
        self.pulled = pulled
        self.slots: list[list[int]] = []  # of the leaves of each element
        outer_lift = dataset_reads.lifts.stack[-1] if dataset_reads.lifts.stack else None

        def lift(iterator: Any) -> Any:
            if frames.frame() is not level or outer_lift is None or level.local:
                return NotImplemented
            if pulled is None:
                raise dataset_reads.DrivenFromHost
            if len(self.slots) == len(pulled):
                with frames.entered(outer):
                    pulled.append((iterator, pulled_outside(outer_lift, iterator)))
            self.slots.append([])
            return dataset_reads.as_inputs(pulled[len(self.slots) - 1][1], level, self.slots[-1])

        def traced(*tracers: Any) -> list[Any]:
            level.trace = frames.untaped_trace()
            with frames.entered(level):
                self.values, arrays = flattened(names, code(*tracers))
                self.count = len(arrays)
                written = [strong(leaf) for key in level.written for leaf in level.values[key]]
            return [*arrays, *written]

        dataset_reads.lifts.push(lift)
        try:
            self.jaxpr = jax.make_jaxpr(traced)(*inputs)
        finally:
            dataset_reads.lifts.stack.pop()
        self.sizes = {key: len(level.values[key]) for key in level.written}
        level.forget()
        if isinstance(outer, frames.TraceFrame):
            outer.meshes += level.meshes

    def run(
        self,
        inputs: Sequence[Any],
        state: dict[int, list[Any]],
        elements: Sequence[Sequence[Any]] = (),
        consts: Sequence[Any] | None = None,
    ) -> tuple[list[Any], dict[int, list[Any]]]:
        """The arrays that it returns and the state after it, which is the leaves of variables by their id.

        `consts` stand for what the code closes over, where that is to be an operand as well.
        """
        supplied = {slot: state[key][i] for key, slots in self.level.inputs.items() for i, slot in enumerate(slots)}
        for key, slots in self.level.shares.items():
            supplied.update(zip(slots, state[_shares_of(key)]))
        for slots, arrays in zip(self.slots, elements):
            supplied.update(zip(slots, arrays))
        jaxpr = self.jaxpr if consts is None else jex.ClosedJaxpr(self.jaxpr.jaxpr, consts)
        results = self.level.replay(jaxpr, supplied, *inputs)
        rest = iter(results[self.count :])
        return results[: self.count], {**state, **{k: [next(rest) for _ in range(n)] for k, n in self.sizes.items()}}


def pulled_outside(lift: Callable[[Any], Any], iterator: Any) -> Any:
    element = lift(iterator)
    if element is NotImplemented:
        raise dataset_reads.DrivenFromHost
    return element


def strong(array: Any) -> Any:
    array = jnp.asarray(array)
    return lax.convert_element_type(array, array.dtype) if array.aval.weak_type else array


def _shares_of(key: int) -> int:
    """Where the shares of a variable stand among the leaves of variables."""
    return -key


def state_of(*blocks: Block) -> tuple[dict[int, list[Any]], dict[int, Any]]:
    """The current leaves of all variables that the blocks touch, and the variables that they assign."""
    state: dict[int, list[Any]] = {}
    written: dict[int, Any] = {}
    frame = frames.frame()
    for block in blocks:
        for key, variable in block.level.variables.items():
            leaves = frame.read(variable)
            # Tapes around see what is read inside as read here.
            seen = key in block.level.inputs or key in block.level.shares
            state[key] = active_tapes.on_read(variable, leaves) if seen else state.get(key, list(leaves))
            if key in block.level.shares:
                state[_shares_of(key)] = [_share(leaf) for leaf in state[key] if _is_inexact(leaf)]
        written.update(block.level.written)
    return {key: [strong(leaf) for leaf in leaves] for key, leaves in state.items()}, written


def write(written: dict[int, Any], state: dict[int, list[Any]]) -> None:
    for key, variable in written.items():
        frames.frame().write(variable, state[key])
