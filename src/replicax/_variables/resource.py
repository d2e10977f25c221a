"""Variables of one copy: ordinary ones, and single components of distributed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax._collectives import arithmetic
from replicax._tracing import context, frames
from replicax._values import AXIS, DistributedValues
from replicax._variables.array_storage import ArrayStorage
from replicax._variables.scattering import SCATTER
from replicax._variables.storage import Storage
from replicax._variables.variable import Variable, register


class ResourceVariable(Variable):
    """A variable that has one copy: an ordinary one, or one component of a distributed one."""

    _parent: Variable | None = None
    _index = 0

    @classmethod
    def _component(cls, parent: Variable, index: int) -> ResourceVariable:
        self = cls.__new__(cls)
        for attribute in ("_synchronization", "_aggregation", "_trainable", "_constraint", "_treedef", "_types"):
            setattr(self, attribute, getattr(parent, attribute))
        self._parent, self._index = parent, index
        self._name = parent._name + (f"/replica_{index}" if index else "")
        return self

    def _new_storage(self, leaves: list[jax.Array], lent: bool) -> Storage:
        return ArrayStorage(self.name, self._types, leaves, lent)

    def __deepcopy__(self, memo: dict) -> Variable:
        if self._parent is None:
            return super().__deepcopy__(memo)
        clone = type(self)._component(self._parent, self._index)
        memo[id(self)] = clone
        return clone

    def _get(self) -> list[Any]:
        if self._parent is None:
            return super()._get()
        return frames.frame().read_component(self._parent, self._index)

    def _put(self, leaves: list[Any]) -> None:
        if self._parent is None:
            return super()._put(leaves)
        frames.frame().write_component(self._parent, self._index, leaves)

    def _read(self) -> list[Any]:
        if self._parent is None:
            frames.frame().lend(self)
        return self._get()

    def _device(self) -> Any:
        if self._parent is None or self._parent._mesh is None:
            return super()._device()
        return self._parent._mesh.local_devices[self._index]

    def _update(self, combine, value, read_value, method):
        leaves = self._convert(value)
        if any(isinstance(leaf, DistributedValues) for leaf in leaves):
            raise TypeError(f"{self.name} takes one value, got a {type(leaves[0]).__name__} value.")
        with frames.lock:
            level = self._level_of_sharing_replicas()
            leaves = self._in_turn(level, combine, leaves, method) if level else self._combined(combine, leaves)
            self._put(leaves)
        return self._of_leaves(leaves) if read_value else None

    def _level_of_sharing_replicas(self) -> frames.TraceFrame | None:
        """Returns the level of the compiled replicas that share this variable and assign to it, None elsewhere."""
        frame = frames.frame()
        if not isinstance(frame, frames.TraceFrame) or not frame.local or self._parent is not None:
            return None
        return None if context.in_cross_replica_context() else frame

    def _in_turn(
        self, level: frames.TraceFrame, combine: Callable[[Any, Any], Any], leaves: list[Any], method: str
    ) -> list[Any]:
        """In compiled code, what the process's replicas' assignments come to when they are made one after the other.

        Each would see what those before it have assigned, which replicas that compute side by side do not: where that
        makes a difference it is refused when all is traced (`_control_flow.check_shared`), but for branches and loops.
        """
        assert level.mesh is not None
        level.shared.append((self, method, leaves))
        old = self._get()
        zero = [jnp.zeros_like(leaf) for leaf in old]
        groups = level.mesh.groups
        if method == "assign":  # the last replica's value stays
            lasts = [group[-1] for group in groups] if groups else [lax.axis_size(AXIS) - 1]
            last = jnp.isin(lax.axis_index(AXIS), jnp.array(lasts))
            return [arithmetic.local_sum(jnp.where(last, leaf, z), groups) for leaf, z in zip(leaves, zero)]
        return [x + arithmetic.local_sum(combine(z, leaf), groups) for x, z, leaf in zip(old, zero, leaves)]

    def _update_slices(self, method, slices):
        indices, values = jnp.asarray(slices.indices), jnp.asarray(slices.values)
        if level := self._level_of_sharing_replicas():
            assert level.mesh is not None
            level.shared.append((self, method, [indices, values]))
            groups = level.mesh.groups
            indices, values = (arithmetic.local_gather(x, 0, groups) for x in (indices, values))
        with frames.lock:
            new = SCATTER[method](self._get()[0], indices, values)
            self._put([new])
        return new


register(ResourceVariable)
