"""What comes out of the traces of a replica function: arrays of the replicas, values for all, and other objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base import array_conversion, nest
from replicax._base.indexed_slices import IndexedSlices
from replicax._passes import uneven_replicas
from replicax._values import (
    Mirrored,
    PerReplica,
    ReplicaMesh,
    filled,
    is_array,
    is_text,
    largest_of,
    of_array,
    of_padded,
)


class Outputs:
    """The results of a traced replica function: arrays to bring out, and what stays as it is."""

    def __init__(self, result: Any, context: Any):
        self.result, self.context = result, context
        self.leaves: list[Any] = []
        self.common: list[bool] = []  # for each leaf, whether it is one value for all replicas
        self.places: dict[int, int] = {}  # id of a leaf -> its place among the leaves
        nest.map_structure(self._add, result)

    def _add(self, leaf: Any) -> None:
        if isinstance(leaf, (PerReplica, Mirrored)):
            raise TypeError(
                f"A compiled replica function returned a {type(leaf).__name__} value, which has a component for each "
                "replica already. Return the replica's own component, or make the value outside of `run`."
            )
        for array in (leaf.values, leaf.indices) if isinstance(leaf, IndexedSlices) else (leaf,):
            if isinstance(array, (np.ndarray, np.number)) and not is_text(array):
                array = array_conversion.as_array(array)
                array = lax.optimization_barrier(array)
                self._bring_out(id(leaf), array)
            elif id(array) not in self.places and (self.context._is_own(array) or self.context.is_common(array)):
                self._bring_out(id(array), array)

    def _bring_out(self, key: int, array: Any) -> None:
        self.places[key] = len(self.leaves)
        self.leaves.append(array)
        self.common.append(self.context.is_common(array))


class Results:
    """What comes out of all traces of a replica function: which of their arrays belong together.

    Args:
        traces: they have the same results, but for shapes.
        which: for each replica, which trace is its own.
        written: all variables that they assign, by id.
    """

    def __init__(self, traces: Sequence[Any], which: Sequence[int], written: dict[int, Any]):
        self._traces, self._which, self._written = traces, which, written
        self._places: dict[tuple[int, ...], int] = {}  # places of a leaf in each trace's outputs -> its place here
        nest.merge(self._of_traces(), self._take)
        self._leaves = [[t.outputs.leaves[i] for t, i in zip(traces, places)] for places in self._places]
        self.common = [all(t.outputs.common[i] for t, i in zip(traces, places)) for places in self._places]
        for leaves in self._leaves:
            if len({(leaf.ndim, leaf.dtype) for leaf in leaves}) > 1:
                raise uneven_replicas.NotAlike("what the replicas return differs in rank or dtype")

    def _of_traces(self) -> list[Any]:
        return [trace.outputs.result for trace in self._traces]

    def _take(self, leaves: Sequence[Any]) -> None:
        if all(isinstance(leaf, IndexedSlices) for leaf in leaves):
            self._take([leaf.values for leaf in leaves])
            self._take([leaf.indices for leaf in leaves])
        elif (places := self._places_of(leaves)) is not None:
            self._places.setdefault(places, len(self._places))

    def _places_of(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        places = [trace.outputs.places.get(id(leaf)) for trace, leaf in zip(self._traces, leaves)]
        known = [place for place in places if place is not None]
        if known and len(known) < len(places):
            raise uneven_replicas.NotAlike("what the replicas return is an array of their own on some of them only")
        return tuple(known) if known else None

    def of(self, trace: Any, reads: Sequence[tuple[int, int]], *args: Any) -> list[Any]:
        """Returns the outputs of one trace: arrays, those of other shapes padded, and the leaves of all variables."""
        known = dict(zip(reads, args))
        found, new_values = trace.replayed(known, args[len(reads) :])
        number = self._traces.index(trace)
        out = [found[places[number]] for places in self._places]
        if len(self._traces) > 1:
            out = [filled(x, largest_of([leaf.shape for leaf in leaves])) for x, leaves in zip(out, self._leaves)]
        for key, variable in self._written.items():
            out += new_values.get(key) or [known[key, i] for i in range(len(variable._storage.leaf_types(True)))]
        return [jnp.asarray(x) for x in out]

    def restored(self, stacked: Sequence[Any], mesh: ReplicaMesh) -> Any:
        """Returns the function's result, its arrays replaced by what came out of the mapped program."""

        def value_of(leaves: Sequence[Any]) -> Any:
            places = self._places_of(leaves)
            if places is None:
                alike = all(_is_same(leaf, leaves[0]) for leaf in leaves)
                return leaves[0] if alike else _of_replicas([leaves[i] for i in self._which], mesh)
            place = self._places[places]
            if self.common[place]:
                return stacked[place]
            shapes = [leaf.shape for leaf in self._leaves[place]]
            if len(set(shapes)) > 1:
                return of_padded(stacked[place], [shapes[i] for i in self._which], mesh)
            return of_array(PerReplica, stacked[place], mesh)

        def restore(leaves: Sequence[Any]) -> Any:
            if all(isinstance(leaf, IndexedSlices) for leaf in leaves):
                values, indices = value_of([x.values for x in leaves]), value_of([x.indices for x in leaves])
                parts = zip(_components(values, mesh), _components(indices, mesh))
                slices = [IndexedSlices(v, i, leaves[0].dense_shape) for v, i in parts]
                return slices[0] if mesh.size == 1 else PerReplica(slices, mesh)
            value = value_of(leaves)
            return value.values[0] if mesh.size == 1 and isinstance(value, PerReplica) else value

        return nest.merge(self._of_traces(), restore)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)


def _of_replicas(parts: Sequence[Any], mesh: ReplicaMesh) -> PerReplica:
    """Combines return values that are not traced arrays and differ between replicas."""
    if mesh.all_local:
        return PerReplica(parts, mesh)
    numbers = [isinstance(x, (bool, int, float, complex)) or (is_array(x) and not is_text(x)) for x in parts]
    if not any(numbers):
        return PerReplica([parts[i] for i in mesh.local_ids], mesh)
    # All processes have to make the same program, so that it holds everyone's.
    arrays = [array_conversion.as_array(x) if number else x for x, number in zip(parts, numbers)]
    if not all(numbers) or len({(type(x), a.shape, a.dtype) for x, a in zip(parts, arrays)}) > 1:
        raise uneven_replicas.NotAlike("what the replicas return differs in type")
    return of_array(PerReplica, lax.optimization_barrier(jnp.stack(arrays)), mesh)


def _components(value: Any, mesh: ReplicaMesh) -> Sequence[Any]:
    return value.values if isinstance(value, PerReplica) else [value] * mesh.size
