"""Objects of Flax NNX in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax._base.types import Tree
from replicax._checkpoint.object_graph import PytreeLeaf, VariableLeaf
from replicax._values import holds_arrays
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from flax import nnx


class _NnxLeaf(PytreeLeaf):
    """A variable of NNX that no strategy has. In a pytree of arrays it is one more pytree."""

    is_value = True

    def _get(self) -> Tree:
        return self.owner.get_raw_value()

    def _set(self, value: Tree) -> None:
        self.owner.set_raw_value(value)


class _HeldLeaf(VariableLeaf):
    """A strategy's variable, assigned as NNX does."""

    def __init__(self, held: Variable, variable: nnx.Variable):
        super().__init__(held)
        self._variable = variable

    def _set(self, value: Tree) -> None:
        self._variable.set_raw_value(value)


def checkpoint_leaf(variable: nnx.Variable) -> PytreeLeaf | None:
    """Returns what a checkpoint saves of a variable of NNX; None where it holds no arrays."""
    held = variable.__replicax_variable__
    if held is not None:
        return _HeldLeaf(held, variable)
    return _NnxLeaf(variable) if holds_arrays(variable.get_raw_value()) else None


def nested_state(state: nnx.State) -> dict[str, Tree]:
    """Returns the variables of a state in nested dicts."""
    from flax import nnx
    from flax.traverse_util import unflatten_dict

    nested: dict[str, Tree] = unflatten_dict({tuple(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)})
    return nested
