"""Variables of which each replica keeps a part: the state of an optimizer that is sharded over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from replicax._base import jax_internals, nest
from replicax._collectives import in_flight, sharding
from replicax._collectives.arithmetic import first_component
from replicax._tracing import frames
from replicax._values import ReplicaMesh
from replicax._variables.distributed import OfReplicas
from replicax._variables.mesh_storage import ShardedStorage
from replicax._variables.variable import Variable, register


class ShardedVariable(OfReplicas):
    """A variable that is one value for all replicas, of which each device keeps a part (see `_collectives.sharding`).

    In global form a leaf that is cut is a stacked array `[replicas, length]`; a small one is mirrored.
    """

    _storage: ShardedStorage

    def __init__(self, *args: Any, strategy: Any, mesh: ReplicaMesh, **kwargs: Any):
        self._strategy, self._mesh = strategy, mesh
        super().__init__(*args, **kwargs)

    @classmethod
    def of(cls, arrays: Sequence[Any], kinds: Sequence[Any], tree: Any, **kwargs: Any) -> ShardedVariable:
        """A variable of arrays in global form that nobody else has; `kinds` are those of the whole leaves."""
        self = cls(0, **kwargs)  # which they replace
        self._types, self._treedef = list(kinds), tree
        self._storage = ShardedStorage(self.name, self._types, self._there, lent=False)
        self._storage.arrays = list(arrays)
        return self

    @property
    def _there(self) -> ReplicaMesh:
        assert self._mesh is not None
        return self._mesh

    def _new_storage(self, leaves: list[jax.Array], lent: bool) -> ShardedStorage:
        return ShardedStorage.of_leaves(self.name, self._types, self._there, leaves, lent)

    def _take_from_host(self, arrays: list[Any]) -> None:
        self._storage.write(self._storage.spread(arrays))

    def parts(self) -> list[Any]:
        """The leaves in the form of the current frame: in compiled replicas what this replica has of them."""
        if self._late is not False:
            self.value()  # whatever a restored checkpoint has for it
        return self._get()

    def put_parts(self, leaves: list[Any]) -> None:
        """Replaces them."""
        self._be_settled()
        self._put(leaves)

    def _is_local(self) -> bool:
        return frames.frame().is_local(self)

    def _read(self) -> list[Any]:
        if self._is_local():
            leaves = self._get()
            places = [i for i in range(len(leaves)) if self._storage.has_rows(i)]
            parts = [sharding.Part(leaves[i], self._types[i].shape) for i in places]
            return [dict(zip(places, sharding.gathered(parts))).get(i, leaf) for i, leaf in enumerate(leaves)]
        if frames.is_tracing():
            pairs = enumerate(frames.frame().read(self))
            return [sharding.of_rows(x, self._types[i].shape) if self._storage.has_rows(i) else x for i, x in pairs]
        mesh, self._storage.lent = self._there, True
        shapes = tuple(self._types[i].shape if self._storage.has_rows(i) else None for i in range(len(self._types)))
        with jax_internals.untraced(), in_flight.dispatching(mesh, f"reading {self._name}") as call:
            wholes = _gathered(self._storage.read(), shapes, mesh.mirrored)
            call.output = wholes[0] if wholes else None
            return [mesh.copies(leaf)[frames.frame().replica_on(mesh)] for leaf in wholes]

    def _update(self, combine, value, read_value, method):
        self._check_strategy()
        if isinstance(frames.frame(), frames.ReplicaFrame):
            raise RuntimeError(
                f"{self.name} is one value for all replicas, of which each has a part, and is assigned by one eager "
                "replica. Assign it outside of `strategy.run`, or in a compiled function."
            )
        leaves = self._convert(value if isinstance(value, Variable) else nest.map_structure(first_component, value))
        count = self._there.size
        if self._is_local():
            new = [
                sharding.own_part(leaf, count) if self._storage.has_rows(i) else leaf for i, leaf in enumerate(leaves)
            ]
        elif frames.is_tracing():
            new = [
                sharding.as_rows(leaf, count) if self._storage.has_rows(i) else leaf for i, leaf in enumerate(leaves)
            ]
        else:
            new = self._storage.spread(leaves)
        with frames.lock:
            self._put([combine(old, leaf) for old, leaf in zip(self._get(), new)])
        return self.value() if read_value else None

    def _update_slices(self, method, slices):
        raise NotImplementedError(f"{self.name}, of which each replica has a part, does not support {method}.")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gathered(arrays: list[jax.Array], shapes: tuple[Any, ...], mirrored: NamedSharding) -> list[jax.Array]:
    """The whole arrays, on every device; those without a shape are whole already."""
    wholes = [x if shape is None else sharding.of_rows(x, shape) for x, shape in zip(arrays, shapes)]
    return [lax.with_sharding_constraint(leaf, mirrored) for leaf in wholes]


register(ShardedVariable)
