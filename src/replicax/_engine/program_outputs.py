"""The results of compiled functions and of replica functions: arrays that leave their programs, and the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from replicax._base import array_conversion, frontend, jax_internals, nest
from replicax._base.indexed_slices import IndexedSlices, dynamic_arrays, with_arrays
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._control_flow.traced_block import DynamicRange
from replicax._data.elements import as_host, as_strings
from replicax._engine.padded_batch import PaddedBatch
from replicax._engine.replica_trace import LeafKey, ReplicaTrace
from replicax._passes import uneven_replicas
from replicax._tracing import active_tapes
from replicax._tracing.dataset_reads import array_of, shapes_of
from replicax._tracing.protocols import State
from replicax._values import (
    Mirrored,
    PerReplica,
    ReplicaMesh,
    RowCounts,
    as_copies,
    constrained,
    counted_form,
    filled,
    global_array,
    is_array,
    is_number,
    largest_of,
    mesh_of,
    note_differing,
    of_array,
    of_counted,
    of_padded,
)


def _holds_tracer(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, jax.core.Tracer) for item in values)


def _refuse_tensors_of(leaf: Leaf) -> None:
    """Raise `TypeError` if an object that JAX does not take apart has traced tensors among its attributes."""
    slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(leaf, name) for name in slots if hasattr(leaf, name)} | getattr(leaf, "__dict__", {})
    if names := [name for name, value in attributes.items() if _holds_tracer(value)]:
        raise TypeError(
            f"Could not build a TypeSpec for a {type(leaf).__name__} of unsupported type {type(leaf)}. A compiled "
            f"function returns it with tensors that are known in the function alone, in {', '.join(names)}. Return "
            "the tensors in a tuple or dict, or register the class with `jax.tree_util.register_pytree_node`."
        )


class ProgramOutputs:
    """The results of a traced function: arrays that come out of its program, and what stays as it is.

    Args:
        result: what the function returned.
        given: the function's inputs, which come back in the form they had.

    Attributes:
        leaves: the arrays.
        shardings: for each of them, what the compiled program has to leave it in.
        stackable: whether the results of several steps are arrays as well.
    """

    def __init__(self, result: Tree, given: Sequence[jax.Array] = ()):
        self._given = {id(array) for array in given}
        self.leaves: list[jax.Array] = []
        self.shardings: list[NamedSharding | None] = []
        self._values: list[tuple[type[PerReplica] | type[Mirrored], ReplicaMesh] | None] = []
        self.stackable = True
        self._row_counts: dict[int, int] = {}  # by id, the places of numbers of rows
        self._skeleton = nest.map_structure(self._take, result)

    def _add(
        self,
        array: ArrayLike,
        sharding: NamedSharding | None = None,
        value: tuple[type[PerReplica] | type[Mirrored], ReplicaMesh] | None = None,
    ) -> int:
        self.shardings.append(sharding)
        self._values.append(value)
        self.leaves.append(jnp.asarray(array))
        return len(self.leaves) - 1

    def _take(self, leaf: Leaf) -> _OutputLeaf:
        if isinstance(leaf, DynamicRange):
            leaf = leaf.__jax_array__()
        elif not isinstance(leaf, jax.Array) and array_conversion.has_symbolic_sizes(leaf):
            leaf = array_conversion.of_sizes(leaf)
        if isinstance(leaf, (PerReplica, Mirrored)):
            return self._take_value(leaf)
        if isinstance(leaf, IndexedSlices):
            self.stackable = False
            copies = [_OwnCopy(self._add(array)) for array in dynamic_arrays(leaf)]
            return _OutputLeaf(lambda arrays: with_arrays(leaf, [copy(arrays) for copy in copies]))
        if is_number(leaf):
            place = self._add(leaf if isinstance(leaf, jax.Array) else array_conversion.as_array(leaf))
            return _OutputLeaf(_OwnCopy(place), place)
        if isinstance(leaf, (str, bytes)) and frontend.current.strings_are_tensors:  # a tensor, as numbers are
            return _OutputLeaf(lambda arrays: as_strings(as_host(leaf)))
        _refuse_tensors_of(leaf)
        return _OutputLeaf(lambda arrays: leaf)

    def _take_value(self, leaf: PerReplica | Mirrored) -> _OutputLeaf:
        kind, mesh, array = type(leaf), mesh_of(leaf), global_array(leaf)
        if (counted := counted_form(leaf)) is not None and mesh is not None:
            self.stackable = False
            place = self._add(counted.array, mesh.result_sharding(counted.array.ndim, True))
            if id(counted.counts) not in self._row_counts:
                self._row_counts[id(counted.counts)] = self._add(counted.counts.array, mesh.mirrored)
            at, bare = self._row_counts[id(counted.counts)], mesh.lone and id(counted.array) not in self._given

            def padded(arrays: Sequence[jax.Array]) -> Leaf:
                value = of_counted(arrays[place], RowCounts(arrays[at]), mesh)
                return note_differing(value.values[0]) if bare else value

            return _OutputLeaf(padded)
        if array is None and mesh is not None and (shapes := shapes_of([leaf])):
            stacked = array_of(leaf)
            place = self._add(stacked, mesh.result_sharding(stacked.ndim, True))
            if mesh.lone and id(stacked) not in self._given:  # bare, as `run` returns it eagerly
                return _OutputLeaf(lambda arrays: note_differing(of_padded(arrays[place], shapes[0], mesh).values[0]))
            return _OutputLeaf(lambda arrays: of_padded(arrays[place], shapes[0], mesh))
        if array is None or mesh is None:
            parts = [self._take(part) for part in leaf.values]
            if mesh is not None and len(parts) > len(mesh.local_ids):  # those of other processes are in the program
                parts = [parts[i] for i in mesh.local_ids]
            if mesh is not None and mesh.lone:
                return parts[0]
            return _OutputLeaf(lambda arrays: kind([part.make(arrays) for part in parts], mesh))
        if isinstance(leaf, PerReplica) and mesh.lone and id(array) not in self._given:
            own = self._add(as_copies(array, mesh), mesh.mirrored)  # bare, as `run` returns it eagerly
            component = jax_internals.FirstCopies()

            def made(arrays: Sequence[jax.Array]) -> jax.Array:
                value = component(arrays[own])
                active_tapes.lost(_BARE, [arrays[own]], [value])
                return value

            return _OutputLeaf(made, own)
        place = self._add(array, mesh.result_sharding(array.ndim, kind is PerReplica), (kind, mesh))
        stacked_over = mesh.size if kind is PerReplica else 0
        return _OutputLeaf(lambda arrays: of_array(kind, arrays[place], mesh), place, stacked_over)

    def over_steps(self, place: int, array: jax.Array) -> jax.Array:
        """Returns several steps' results for a leaf, stacked in front, with the sharding that the program leaves."""
        value = self._values[place]
        if value is None:
            return constrained(array, self.shardings[place])
        kind, mesh = value
        array = jnp.moveaxis(array, 0, 1) if kind is PerReplica else array
        return constrained(array, mesh.result_sharding(array.ndim, kind is PerReplica))

    def specs(self, kinds: Sequence[jax.core.ShapedArray]) -> Tree:
        """Returns the result's specs, for arrays of these shapes and dtypes."""
        return nest.map_structure(lambda leaf: leaf.spec(kinds), self._skeleton)

    def placed(self, place_of: Callable[[int], object]) -> Tree:
        """Returns the result with `place_of(place)` for the array at each place; what is no array as it is.

        Raises:
            TypeError: there are values in it that are made of several arrays, such as those of replicas.
        """
        return nest.map_structure(lambda leaf: leaf.placed(place_of), self._skeleton)

    def rebuilt(self, arrays: list[jax.Array]) -> Tree:
        """Returns the result with these arrays."""
        if type(self._skeleton) is _OutputLeaf:
            return self._skeleton.make(arrays)
        return nest.map_structure(lambda leaf: leaf.make(arrays), self._skeleton)


_BARE = (
    "A gradient is asked for from one worker's component of what a compiled function returned, of a GradientTape that "
    "was entered outside of it. Reduce or gather the replicas' values in the function, or enter the tape in it."
)


class _OwnCopy:
    """A result that other processes may have as well, as an array of this one."""

    def __init__(self, place: int):
        self._place, self._single = place, jax_internals.FirstCopies()
        self._shared: bool | None = None

    def __call__(self, arrays: Sequence[jax.Array]) -> jax.Array:
        array = arrays[self._place]
        if self._shared is None:
            self._shared = not array.is_fully_addressable
        return active_tapes.renamed(array, self._single(array)) if self._shared else array


class _OutputLeaf:
    """A leaf of a result, as a function of the arrays that came out.

    Args:
        make: makes the leaf of the arrays.
        place: where its array stands among them, None for a leaf that is none.
        stacked: the number of replicas that its array has rows of, 0 where it has none.
    """

    def __init__(self, make: Callable[[Sequence[jax.Array]], Leaf], place: int | None = None, stacked: int = 0):
        self.make, self._place, self._stacked = make, place, stacked

    def placed(self, place_of: Callable[[int], object]) -> object:
        """Returns `place_of` the place of its array; a leaf that is no array as it is."""
        if self._place is not None and not self._stacked:
            return place_of(self._place)
        try:
            return self.make(())
        except IndexError:
            raise TypeError("A value of several arrays, such as a PerReplica value, is no tensor.") from None

    def spec(self, kinds: Sequence[jax.core.ShapedArray]) -> Leaf:
        """Returns the spec of the leaf, or of one component for each replica; what is no array as it is."""
        if self._place is None:
            leaf = self.make(())
            return TensorSpec(leaf.shape, leaf.dtype) if is_array(leaf) else leaf  # a string
        kind = kinds[self._place]
        spec = TensorSpec(kind.shape[1:] if self._stacked else kind.shape, kind.dtype)
        return PerReplicaSpec(*[spec] * self._stacked) if self._stacked else spec


class ReplicaOutputs:
    """The outputs of all traces of a replica function, and which of their arrays belong together.

    Args:
        traces: they have the same results, but for shapes.
        which: for each replica, which trace is its own.
        written: all variables that they assign, by id.
    """

    def __init__(self, traces: Sequence[ReplicaTrace], which: Sequence[int], written: dict[int, State]):
        self._traces, self._which, self._written = traces, which, written
        self._places: dict[tuple[int, ...], int] = {}  # places of a leaf in each trace's outputs -> its place here
        self._results = [trace.outputs.result for trace in traces]
        nest.merge(self._results, self._take)
        self._leaves = [[t.outputs.leaves[i] for t, i in zip(traces, places)] for places in self._places]
        self.common = [all(t.outputs.common[i] for t, i in zip(traces, places)) for places in self._places]
        for leaves in self._leaves:
            if len({(leaf.ndim, leaf.dtype) for leaf in leaves}) > 1:
                raise uneven_replicas.NotAlike("what the replicas return differs in rank or dtype")

    def _take(self, leaves: Sequence[Leaf]) -> None:
        if all(isinstance(leaf, IndexedSlices) for leaf in leaves):
            for arrays in itertools.zip_longest(*map(dynamic_arrays, leaves)):
                self._take(arrays)
        elif (places := self._places_of(leaves)) is not None:
            self._places.setdefault(places, len(self._places))

    def _places_of(self, leaves: Sequence[Leaf]) -> tuple[int, ...] | None:
        places = [trace.outputs.places.get(id(leaf)) for trace, leaf in zip(self._traces, leaves)]
        known = [place for place in places if place is not None]
        if known and len(known) < len(places):
            raise uneven_replicas.NotAlike("what the replicas return is an array of their own on some of them only")
        return tuple(known) if known else None

    def of(
        self, trace: ReplicaTrace, reads: Sequence[LeafKey], cut: Mapping[LeafKey, int], *args: jax.Array
    ) -> list[jax.Array]:
        """Returns the outputs of one trace: arrays, those of other shapes padded, and the leaves of all variables.

        Of leaves in `cut` it is given and returns this replica's part.
        """
        known = dict(zip(reads, args))
        found, new_values = trace.replayed(known, args[len(reads) :], cut)
        number = self._traces.index(trace)
        out = [found[places[number]] for places in self._places]
        if len(self._traces) > 1:
            out = [filled(x, largest_of([leaf.shape for leaf in leaves])) for x, leaves in zip(out, self._leaves)]
        for key, variable in self._written.items():
            out += new_values.get(key) or [known[key, i] for i in range(leaf_count(variable))]
        return [jnp.asarray(x) for x in out]

    def restored(self, stacked: Sequence[jax.Array], mesh: ReplicaMesh, padded: PaddedBatch | None) -> Tree:
        """Returns the function's result, its arrays replaced by what came out of the mapped program."""

        def value_of(leaves: Sequence[Leaf]) -> Leaf:
            places = self._places_of(leaves)
            if places is None:
                alike = all(_is_same(leaf, leaves[0]) for leaf in leaves)
                return leaves[0] if alike else _of_replicas([leaves[i] for i in self._which], mesh)
            place = self._places[places]
            if self.common[place]:
                return stacked[place]
            if padded is not None and any(padded.rows[places[0]]):
                return of_counted(stacked[place], padded.counts, mesh)
            shapes = [leaf.shape for leaf in self._leaves[place]]
            if len(set(shapes)) > 1:
                return of_padded(stacked[place], [shapes[i] for i in self._which], mesh)
            return of_array(PerReplica, stacked[place], mesh)

        def restore(leaves: Sequence[Leaf]) -> Leaf:
            if all(isinstance(leaf, IndexedSlices) for leaf in leaves):
                values = [value_of(arrays) for arrays in zip(*map(dynamic_arrays, leaves))]
                if not any(isinstance(value, PerReplica) for value in values):
                    return with_arrays(leaves[0], values)
                by_replica = zip(*(_components(value, mesh) for value in values))
                slices = [with_arrays(leaves[i], arrays) for i, arrays in zip(self._which, by_replica)]
                return slices[0] if mesh.size == 1 else PerReplica(slices, mesh)
            value = value_of(leaves)
            bare = mesh.size == 1 and isinstance(value, PerReplica) and counted_form(value) is None
            return value.values[0] if bare else value

        return nest.merge(self._results, restore)


def _is_same(one: Leaf, other: Leaf) -> bool:
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)


def _of_replicas(parts: Sequence[Leaf], mesh: ReplicaMesh) -> PerReplica:
    """Combines return values that are not traced arrays and differ between replicas."""
    if mesh.all_local:
        return PerReplica(parts, mesh)
    numbers = [is_number(x) for x in parts]
    if not any(numbers):
        return PerReplica([parts[i] for i in mesh.local_ids], mesh)
    # All processes have to make the same program, so that it holds everyone's.
    arrays = [array_conversion.as_array(x) if number else x for x, number in zip(parts, numbers)]
    if not all(numbers) or len({(type(x), a.shape, a.dtype) for x, a in zip(parts, arrays)}) > 1:
        raise uneven_replicas.NotAlike("what the replicas return differs in type")
    return of_array(PerReplica, lax.optimization_barrier(jnp.stack(arrays)), mesh)


def _components(value: PerReplica | jax.Array, mesh: ReplicaMesh) -> Sequence[jax.Array]:
    return value.values if isinstance(value, PerReplica) else [value] * mesh.size


def leaf_count(variable: State) -> int:
    """Return the number of leaves of a variable."""
    return len(variable._storage.home.leaf_types(True))
