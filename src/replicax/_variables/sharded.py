"""Variables of which each replica keeps a part: the state of an optimizer that is sharded over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax._base import jax_internals, planning
from replicax._base.types import Tree
from replicax._collectives import in_flight, sharding
from replicax._collectives.all_reduce import packing_for
from replicax._tracing import frames
from replicax._values import constrained
from replicax._variables.distributed import OfReplicas
from replicax._variables.leaves import SCATTER, Signature
from replicax._variables.storage import Leaves, ShardedStorage, Types


class ShardedVariable(OfReplicas):
    """A variable that is one value for all replicas, of which each device keeps a part (see `ShardedStorage`)."""

    _storage: ShardedStorage

    @classmethod
    def of(
        cls, arrays: Sequence[jax.Array], types: Types, tree: jax.tree_util.PyTreeDef, **kwargs: Any
    ) -> ShardedVariable:
        """Returns a variable of arrays in global form that nobody else has; `types` are those of the whole leaves."""
        self = cls(0, **kwargs)  # which they replace
        self._signature = Signature(self.name, types, tree)
        self._storage = ShardedStorage(self.name, types, self._mesh, arrays, lent=False)
        if planning.are_abstract():
            self._storage = self._storage.abstract()
        return self

    def _new_storage(self, leaves: Leaves, lent: bool) -> ShardedStorage:
        frames.refuse_tracers(leaves)
        storage = ShardedStorage(self.name, self._types, self._mesh, [], lent)
        storage.arrays = storage.home.of_whole(storage.home.of_first(leaves, self.name))
        return storage

    def _take_from_host(self, arrays: list[np.ndarray]) -> None:
        self._storage.write(self._storage.home.of_whole(arrays))

    def parts(self) -> Leaves:
        """Returns the leaves in the form of the current frame: in compiled replicas what this replica has of them."""
        if self._late is not False:
            self.value()  # whatever a restored checkpoint has for it
        return self._get()

    def put_parts(self, leaves: Leaves) -> None:
        """Replaces the leaves, in the form of `parts`."""
        self._settle()
        self._put(leaves)

    def _is_local(self) -> bool:
        return frames.frame().is_local(self)

    def _read(self) -> Leaves:
        if self._is_local():
            leaves = self._get()
            cut = [i for i in range(len(leaves)) if self._storage.home.has_rows(i)]
            parts = [sharding.Part(leaves[i], self._types[i].shape) for i in cut]
            wholes = sharding.gathered(parts, packing_for(self._mesh))
            return [dict(zip(cut, wholes)).get(i, leaf) for i, leaf in enumerate(leaves)]
        if frames.is_tracing():
            pairs = enumerate(frames.frame().read(self))
            return [
                sharding.of_rows(x, self._types[i].shape) if self._storage.home.has_rows(i) else x for i, x in pairs
            ]
        mesh, self._storage.lent = self._mesh, True
        shapes = tuple(
            self._types[i].shape if self._storage.home.has_rows(i) else None for i in range(len(self._types))
        )
        with jax_internals.untraced(), in_flight.dispatching(mesh, f"reading {self._name}") as call:
            wholes = _gathered(self._storage.read(), shapes, mesh.mirrored)
            call.output = wholes[0] if wholes else None
            return [mesh.copies(leaf)[frames.frame().replica_on(mesh)] for leaf in wholes]

    def _update(self, method: str, value: Tree, read_value: bool) -> Tree:
        if method in SCATTER:
            raise NotImplementedError(f"{self.name}, of which each replica has a part, does not support {method}.")
        self._replicas.check_scope()
        if isinstance(frames.frame(), frames.ReplicaFrame):
            raise RuntimeError(
                f"{self.name} is one value for all replicas, of which each has a part, and is assigned by one eager "
                "replica. Assign it outside of `strategy.run`, or in a compiled function."
            )
        leaves = self._signature.convert_first(value)
        if self._is_local() or frames.is_tracing():
            cut = sharding.own_part if self._is_local() else sharding.as_rows
            leaves = [cut(x, self._mesh.size) if self._storage.home.has_rows(i) else x for i, x in enumerate(leaves)]
        else:
            leaves = self._storage.home.of_whole(leaves)
        self._write(method, leaves)
        return self.value() if read_value else None


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gathered(arrays: Leaves, shapes: tuple[tuple[int, ...] | None, ...], mirrored: NamedSharding) -> Leaves:
    """Returns the whole arrays, on every device; those without a shape are whole already."""
    wholes = [x if shape is None else sharding.of_rows(x, shape) for x, shape in zip(arrays, shapes)]
    return [constrained(leaf, mirrored) for leaf in wholes]
