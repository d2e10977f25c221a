"""The arguments and the results of a compiled function: what the program depends on, and what goes in and comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import array_conversion, array_text, jax_internals, nest
from replicax._base import specs as _specs
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.optimizing import optimizes_programs
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._collectives import cross_process
from replicax._control_flow.traced_block import DynamicRange
from replicax._data.elements import as_host, as_strings
from replicax._data.iterators import ElementIterator
from replicax._engine import compile_log
from replicax._input.distributed_dataset import DistributedDataset
from replicax._tracing import active_tapes, context, frames
from replicax._tracing.dataset_reads import array_of, like, shapes_of
from replicax._values import (
    Mirrored,
    PerReplica,
    as_copies,
    global_array,
    is_array,
    is_text,
    mesh_of,
    needs_comparison,
    of_array,
    of_padded,
)
from replicax._variables.variable import Variable


class Probe(Protocol):
    """Measures a call."""

    def entered(self, program: Any) -> None:
        """Notes that the call begins to run this `Program`, its elements at hand."""

    def watched(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the compiled program, measured."""


class Call:
    """The arguments of one call: dynamic arrays, and a key for all that the program depends on."""

    __slots__ = (
        "_leaves",
        "_tree",
        "counts",
        "dynamic",
        "iterators",
        "has_dataset",
        "key",
        "keys",
        "probe",
        "ragged",
        "statics",
        "uneven",
        "uneven_arguments",
    )

    def __init__(self, args: tuple, kwargs: dict):
        self._leaves: Sequence[Any]
        self._tree: Any
        if not kwargs and _LEAF_TYPES.issuperset(map(type, args)):
            self._leaves, self._tree = args, _tree_of(len(args))
        else:
            self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_argument_leaf)
        self.dynamic: list[Any] = []
        self.statics: list[Any] = []
        self.iterators: list[Any] = []
        self.ragged = self.has_dataset = False
        self.probe: Probe | None = None
        self.counts = False  # whether a function that is traced for it has yet to count it as a call that was
        self.uneven: tuple[Any, ...] = ()  # the shapes of values whose components differ in shape
        self.keys = tuple([self._take(leaf) for leaf in self._leaves])
        self.uneven_arguments = self.uneven  # and in `uneven` itself also those of elements that it pulls
        frame, (strategy, replica_context) = frames.frame(), context._current()
        replica = frame.replica if isinstance(frame, frames.ReplicaFrame) else None
        settings = _specs.has_64_bit_types(), optimizes_programs()
        self.key = (self._tree, self.keys, strategy, replica_context is None, replica, settings)

    def _take(self, leaf: Any) -> Any:
        kind = type(leaf)
        if kind is PerReplica or kind is Mirrored:
            if _is_made(leaf):
                parts = leaf.values
                if len({part.sharding for part in parts if isinstance(part, jax.Array) and part.committed}) > 1:
                    parts = jax.device_get(parts)  # which only a program over the strategy's devices could take there
                parts = [array_conversion.as_array(part) for part in parts]
                self.dynamic += parts
                return (kind, *((part.shape, part.dtype, getattr(part, "weak_type", False)) for part in parts))
            if kind is PerReplica and needs_comparison(leaf):
                cross_process.compare(leaf)
            array = array_of(leaf)
            if array is None:
                self.ragged = True
                return id(leaf)
            self.dynamic.append(array)
            if shapes := shapes_of([leaf]):
                self.uneven += shapes
                return (kind, array.shape, array.dtype, mesh_of(leaf), *shapes)
            return (kind, array.shape, array.dtype, mesh_of(leaf))
        if isinstance(leaf, IndexedSlices):
            self.dynamic += [jnp.asarray(leaf.values), jnp.asarray(leaf.indices)]
            shape = None if leaf.dense_shape is None else tuple(int(n) for n in leaf.dense_shape)
            return (IndexedSlices, *((x.shape, x.dtype) for x in self.dynamic[-2:]), shape)
        if _is_dynamic(leaf):
            array = leaf if isinstance(leaf, jax.Array) else array_conversion.as_array(leaf)
            self.dynamic.append(array)
            return (array.shape, array.dtype, getattr(array, "weak_type", False))  # keys of random numbers have none
        if isinstance(leaf, (float, complex)):
            return (kind, repr(leaf))  # tells 0.0 from -0.0, and knows nan again
        if isinstance(leaf, (bool, int, str, bytes)):
            return (kind, leaf)
        if isinstance(leaf, ElementIterator):  # each call pulls from the one it was given
            place = next((i for i, other in enumerate(self.iterators) if other is leaf), len(self.iterators))
            self.iterators.append(leaf)
            return (kind, place)  # its elements are looked at when they are there
        self.statics.append(leaf)
        self.has_dataset |= isinstance(leaf, DistributedDataset)
        return (kind, id(leaf))

    def meshes(self) -> list[Any]:
        """Returns the meshes of the distributed values among the arguments."""
        values = [leaf for leaf in self._leaves if isinstance(leaf, (PerReplica, Mirrored))]
        return [mesh for leaf in values if (mesh := mesh_of(leaf)) is not None]

    def paths(self) -> list[Any]:
        """Returns where each of the dynamic arrays stands in `(args, kwargs)`."""
        places = jax.tree_util.tree_leaves_with_path(self._tree.unflatten(range(len(self._leaves))))
        found = []
        for (path, _), leaf in zip(places, self._leaves):
            if isinstance(leaf, IndexedSlices):
                found += [(*path, jax.tree_util.GetAttrKey(name)) for name in ("values", "indices")]
            elif isinstance(leaf, (PerReplica, Mirrored)) or _is_dynamic(leaf):
                found.append(path)
        return found

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[tuple, dict]:
        """Returns the arguments with these arrays for the dynamic ones."""
        queue = iter(arrays)

        def remade(leaf: Any) -> Any:
            if _is_made(leaf):
                return PerReplica([next(queue) for _ in leaf.values])
            if isinstance(leaf, (PerReplica, Mirrored)):
                return like(leaf, next(queue))
            if isinstance(leaf, IndexedSlices):
                return IndexedSlices(next(queue), next(queue), leaf.dense_shape)
            return next(queue) if _is_dynamic(leaf) else leaf

        return jax.tree.unflatten(self._tree, [remade(leaf) for leaf in self._leaves])


def difference(before: tuple[Any, Any], now: tuple[Any, Any]) -> str:
    """Returns what changed from one call, given by structure and keys, to another, in words."""
    (tree, keys), (other_tree, other_keys) = before, now
    if tree != other_tree:
        return "The arguments' structure changed. "
    paths = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))
    for (path, _), mine, theirs in zip(paths, keys, other_keys):
        if mine != theirs:
            position, name, *inside = path
            which = getattr(name, "idx", None) if position.idx == 0 else repr(name.key)
            argument = f"argument {which}{jax.tree_util.keystr(tuple(inside))}"
            if _is_object(mine) and _is_object(theirs):
                return f"The last time, {argument} was another object of type {theirs[0].__name__}. "
            return f"The last time, {argument} changed from {_key_text(mine)} to {_key_text(theirs)}. "
    return "The strategy, the context or the elements that it takes of a dataset changed. "


def inputs_of(call: Call, elements: Sequence[Any]) -> list[str]:
    """Dtypes and shapes of the arrays that a program takes: those of a call, and of elements that it pulls."""
    texts = []
    for key in call.keys:
        kind = key[0]
        if isinstance(kind, tuple):
            texts.append(compile_log.described(kind, key[1]))
        elif kind in (PerReplica, Mirrored) and (len(key) == 2 or isinstance(key[2], tuple)):  # of components
            texts.append(compile_log.described(*key[1][:2]) + compile_log.EACH)
        elif kind in (PerReplica, Mirrored):
            texts.append(compile_log.of_value(key[1], key[2], kind is PerReplica))
    leaves = [leaf for element in elements for leaf in nest.values(element)]
    arrays = [(array_of(leaf), isinstance(leaf, PerReplica)) for leaf in leaves]
    return texts + [compile_log.of_value(array.shape, array.dtype, stacked) for array, stacked in arrays]


def _is_object(key: Any) -> bool:
    return _key_text(key).startswith("an object")


def _key_text(key: Any) -> str:
    first = key[0]
    if first is PerReplica and isinstance(key[1][0], tuple):  # made of components
        shapes, dtypes = (", ".join(map(str, dict.fromkeys(part[i] for part in key[1:]))) for i in (0, 1))
        return f"a PerReplica value of shapes {shapes} and dtypes {dtypes}"
    if first is PerReplica and len(key) > 4:
        return f"a PerReplica value of shapes {', '.join(map(str, key[4]))} and dtype {key[2]}"
    if first in (PerReplica, Mirrored):
        return f"a {first.__name__} value of shape {key[1][first is PerReplica :]} and dtype {key[2]}"
    if isinstance(first, tuple):
        return f"an array of shape {first} and dtype {key[1]}"
    if first in (bool, int, float, complex, str, bytes):
        return key[1] if first in (float, complex) else repr(key[1])
    return f"an object of type {first.__name__}"


_LEAF_TYPES = {PerReplica, Mirrored, jax_internals.array_type(), np.ndarray, bool, int, float, str}


@functools.cache
def _tree_of(count: int) -> Any:
    """Returns the structure of a call with so many leaves for its arguments."""
    return jax.tree.structure(((0,) * count, {}))


def _is_made(leaf: Any) -> bool:
    """Returns whether the user made this PerReplica value of numeric components, without a strategy."""
    made = type(leaf) is PerReplica and mesh_of(leaf) is None and len(leaf.values) > 0
    return made and all(map(_is_dynamic_part, leaf.values))


def _is_dynamic_part(part: Any) -> bool:
    return isinstance(part, (bool, int, float, complex)) or _is_dynamic(part)


def _is_dynamic(leaf: Any) -> bool:
    return is_array(leaf) and not is_text(leaf)


def _is_argument_leaf(value: Any) -> bool:
    return nest.is_leaf(value) or isinstance(value, DistributedDataset) or hasattr(type(value), "__next__")


def is_python_iterator(value: Any) -> bool:
    """Returns whether `value` is an iterator of another kind than the datasets'."""
    return hasattr(type(value), "__next__") and not isinstance(value, ElementIterator)


class Results:
    """What a traced function returned: arrays to bring out, and what stays as it is."""

    def __init__(self, result: Any, given: Sequence[Any] = ()):
        self._given = {id(array) for array in given}  # the function's inputs, which come back in the form they had
        self.leaves: list[Any] = []
        self.shardings: list[Any] = []  # for each leaf, what the compiled program has to leave it in
        self.values: list[Any] = []  # and the distributed value that it is the array of, by its class and mesh
        self.stackable = True  # whether the results of several steps are arrays as well
        self._skeleton = nest.map_structure(self._take, result)

    def _add(self, array: Any, sharding: Any = None, value: Any = None) -> int:
        self.shardings.append(sharding)
        self.values.append(None if value is None else (type(value), mesh_of(value)))
        self.leaves.append(jnp.asarray(array) if not isinstance(array, jax.Array) else array)
        return len(self.leaves) - 1

    def _take(self, leaf: Any) -> Any:
        if isinstance(leaf, DynamicRange):
            leaf = leaf.__jax_array__()
        if isinstance(leaf, Variable):
            return _Made(lambda arrays: leaf)
        if isinstance(leaf, (PerReplica, Mirrored)):
            kind, mesh, array = type(leaf), mesh_of(leaf), global_array(leaf)
            if array is None and mesh is not None and (shapes := shapes_of([leaf])):
                stacked = array_of(leaf)
                place = self._add(stacked, mesh.result_sharding(stacked.ndim, True))
                if mesh.lone and id(stacked) not in self._given:  # bare, as `run` returns it eagerly
                    return _Made(lambda arrays: of_padded(arrays[place], shapes[0], mesh).values[0])
                return _Made(lambda arrays: of_padded(arrays[place], shapes[0], mesh))
            if array is None:
                parts = [self._take(part) for part in leaf.values]
                if mesh is not None and len(parts) > len(mesh.local_ids):  # those of other processes are in the program
                    parts = [parts[i] for i in mesh.local_ids]
                if mesh is not None and mesh.lone:
                    return parts[0]
                return _Made(lambda arrays: kind([part.make(arrays) for part in parts], mesh))
            if isinstance(leaf, PerReplica) and mesh is not None and mesh.lone and id(array) not in self._given:
                own = self._add(as_copies(array, mesh), mesh.mirrored)  # bare, as `run` returns it eagerly
                component = jax_internals.FirstCopies()

                def made(arrays: Sequence[Any]) -> Any:
                    value = component(arrays[own])
                    active_tapes.lost(_BARE, [arrays[own]], [value])
                    return value

                return _Made(made, own)
            place = self._add(array, _sharding_of(leaf), leaf)
            stacked = mesh.size if mesh is not None and kind is PerReplica else 0
            return _Made(lambda arrays: of_array(kind, arrays[place], mesh), place, stacked)
        if isinstance(leaf, IndexedSlices):
            self.stackable = False
            values, indices, shape = (
                _OwnCopy(self._add(leaf.values)),
                _OwnCopy(self._add(leaf.indices)),
                leaf.dense_shape,
            )
            return _Made(lambda arrays: IndexedSlices(values(arrays), indices(arrays), shape))
        if isinstance(leaf, (bool, int, float, complex)) or (is_array(leaf) and not is_text(leaf)):
            place = self._add(array_conversion.as_array(leaf) if not isinstance(leaf, jax.Array) else leaf)
            return _Made(_OwnCopy(place), place)
        if isinstance(leaf, (str, bytes)) and array_text.style == "tensorflow":  # a tensor, as numbers are
            return _Made(lambda arrays: as_strings(as_host(leaf)))
        return _Made(lambda arrays: leaf)

    def over_steps(self, place: int, array: Any) -> Any:
        """Returns several steps' results for a leaf, stacked in front, with the sharding that the program leaves."""
        if self.values[place] is None:
            return constrained(array, self.shardings[place])
        kind, mesh = self.values[place]
        array = jnp.moveaxis(array, 0, 1) if kind is PerReplica else array
        return constrained(array, mesh.result_sharding(array.ndim, kind is PerReplica))

    def specs(self, kinds: Sequence[Any]) -> Any:
        """Returns the result's specs, for arrays of these shapes and dtypes."""
        return nest.map_structure(lambda made: made.spec(kinds), self._skeleton)

    def rebuilt(self, arrays: list[Any]) -> Any:
        """Returns the result with these arrays."""
        if type(self._skeleton) is _Made:
            return self._skeleton.make(arrays)
        return nest.map_structure(lambda made: made.make(arrays), self._skeleton)


_BARE = (
    "A gradient is asked for from one worker's component of what a compiled function returned, of a GradientTape that "
    "was entered outside of it. Reduce or gather the replicas' values in the function, or enter the tape in it."
)


class _OwnCopy:
    """A result that other processes may have as well, as an array of this one."""

    def __init__(self, place: int):
        self._place, self._single = place, jax_internals.FirstCopies()
        self._shared: bool | None = None

    def __call__(self, arrays: Sequence[Any]) -> Any:
        array = arrays[self._place]
        if self._shared is None:
            self._shared = not array.is_fully_addressable
        return active_tapes.renamed(array, self._single(array)) if self._shared else array


class _Made:
    """A leaf of a result, as a function of the arrays that came out; `place` is where its array stands among them."""

    def __init__(self, make: Callable[[Sequence[Any]], Any], place: int | None = None, stacked: int = 0):
        self.make, self._place, self._stacked = make, place, stacked

    def spec(self, kinds: Sequence[Any]) -> Any:
        """Returns the spec of the leaf, or of one component for each replica; what is no array as it is."""
        if self._place is None:
            leaf = self.make(())
            return TensorSpec(leaf.shape, leaf.dtype) if is_array(leaf) else leaf  # a string
        kind = kinds[self._place]
        spec = TensorSpec(kind.shape[1:] if self._stacked else kind.shape, kind.dtype)
        return PerReplicaSpec(*[spec] * self._stacked) if self._stacked else spec


def _sharding_of(value: Any) -> Any:
    mesh, array = mesh_of(value), global_array(value)
    assert mesh is not None and array is not None
    return mesh.result_sharding(array.ndim, isinstance(value, PerReplica))


def constrained(array: Any, sharding: Any) -> Any:
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)
