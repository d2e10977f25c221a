"""The arguments of a compiled function: what its program depends on, and what goes in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from replicax._base import array_conversion, jax_internals, nest, thread_state
from replicax._base import specs as _specs
from replicax._base.indexed_slices import IndexedSlices, dynamic_arrays, with_arrays
from replicax._base.jaxprs import Path
from replicax._base.thread_state import has_64_bit_types, optimizes_programs
from replicax._base.types import Leaf, Tree
from replicax._collectives import cross_process
from replicax._data.iterators import ElementIterator
from replicax._input.distributed_dataset import DistributedDataset
from replicax._tracing import context, frames
from replicax._tracing.dataset_reads import DatasetRead, array_of, like, shapes_of
from replicax._values import (
    Mirrored,
    PerReplica,
    ReplicaMesh,
    RowCounts,
    components_of,
    counted_form,
    is_differing,
    is_number,
    is_numeric,
    mesh_of,
)
from replicax._values.forms import Shape

# What the program depends on of one argument: its type first, and then its shape, its value or its identity.
ArgumentKey: TypeAlias = tuple[Any, ...]
# The structure of a call's arguments, and their keys.
CallKeys: TypeAlias = tuple[PyTreeDef, tuple[ArgumentKey, ...]]


class ProbedProgram(Protocol):
    """A program, as far as probes go."""

    reads: list[DatasetRead]

    @property
    def guard(self) -> object: ...

    @property
    def assigns(self) -> bool: ...

    @property
    def is_repeatable(self) -> bool: ...


class Probe(Protocol):
    """Measures a call."""

    def entered(self, program: ProbedProgram) -> None:
        """Notes that the call begins to run this program, its elements at hand."""

    def watched(self, program: Callable[..., Tree]) -> Callable[..., Tree]:
        """Returns the compiled program, measured."""


class CallSignature:
    """The arguments of one call: dynamic arrays, and a key for all that the program depends on.

    Attributes:
        args, kwargs: all of them, as they were given.
        dynamic: the arrays.
        keys: of each argument; `key` is that of the whole call.
        statics: the objects that are known by their identity.
        iterators: the iterators over datasets.
        has_dataset: whether there is a distributed dataset.
        ragged: whether there is a value that no program can take.
        uneven: the shapes of values whose components differ in shape, and of elements that are pulled.
        uneven_arguments: those of the arguments alone.
        probe: measures the call.
        counts: whether a function that is traced for it has yet to count it as a call that was.
    """

    __slots__ = (
        "_leaves",
        "_row_counts",
        "_tree",
        "args",
        "counts",
        "dynamic",
        "iterators",
        "has_dataset",
        "key",
        "keys",
        "kwargs",
        "probe",
        "ragged",
        "statics",
        "uneven",
        "uneven_arguments",
    )

    def __init__(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]):
        self.args, self.kwargs = args, kwargs
        self._leaves: Sequence[Leaf]
        self._tree: PyTreeDef
        if not kwargs and _LEAF_TYPES.issuperset(map(type, args)):
            self._leaves, self._tree = args, _tree_of(len(args))
        else:
            self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=_is_argument_leaf)
        self.dynamic: list[jax.Array] = []
        self.statics: list[Leaf] = []
        self._row_counts: dict[int, int] = {}  # of padded batches: by id, the place among those of other batches
        self.iterators: list[ElementIterator] = []
        self.ragged = self.has_dataset = False
        self.probe: Probe | None = None
        self.counts = False
        self.uneven: tuple[tuple[Shape, ...], ...] = ()
        self.keys = tuple([self._take(leaf) for leaf in self._leaves])
        self.uneven_arguments = self.uneven
        frame, (strategy, replica_context) = frames.frame(), context.current()
        replica = frame.replica if isinstance(frame, frames.ReplicaFrame) else None
        settings = has_64_bit_types(), optimizes_programs(), thread_state.current.for_one_device
        self.key: Hashable = (self._tree, self.keys, strategy, replica_context is None, replica, settings)

    def _take(self, leaf: Leaf) -> ArgumentKey:
        kind = type(leaf)
        if kind is PerReplica or kind is Mirrored:
            if _is_made(leaf):
                parts = leaf.values
                if len({part.sharding for part in parts if isinstance(part, jax.Array) and part.committed}) > 1:
                    parts = jax.device_get(parts)  # which only a program over the strategy's devices could take there
                parts = [array_conversion.as_array(part) for part in parts]
                self.dynamic += parts
                return (kind, *((part.shape, part.dtype, getattr(part, "weak_type", False)) for part in parts))
            if (counted := counted_form(leaf)) is not None:
                self.dynamic.append(counted.array)
                if id(counted.counts) not in self._row_counts:
                    self._row_counts[id(counted.counts)] = len(self._row_counts)
                    self.dynamic.append(counted.counts.array)
                place = self._row_counts[id(counted.counts)]
                return (kind, counted.array.shape, counted.array.dtype, (mesh_of(leaf), place))
            mesh = mesh_of(leaf)
            if kind is PerReplica and mesh and not mesh.all_local and components_of(leaf).needs_comparison():
                cross_process.compare(leaf)
            array = array_of(leaf)
            if array is None:
                self.ragged = True
                return (kind, id(leaf))
            self.dynamic.append(array)
            if shapes := shapes_of([leaf]):
                self.uneven += shapes
                return (kind, array.shape, array.dtype, mesh, *shapes)
            return (kind, array.shape, array.dtype, mesh)
        if isinstance(leaf, IndexedSlices):
            arrays = [jnp.asarray(array) for array in dynamic_arrays(leaf)]
            self.dynamic += arrays
            is_traced = len(arrays) > 2
            shape = None if leaf.dense_shape is None or is_traced else tuple(int(size) for size in leaf.dense_shape)
            return (IndexedSlices, *((x.shape, x.dtype) for x in arrays), shape)
        if is_numeric(leaf):
            array = leaf if isinstance(leaf, jax.Array) else array_conversion.as_array(leaf)
            self.ragged |= is_differing(leaf)
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

    def meshes(self) -> list[ReplicaMesh]:
        """Returns the meshes of the distributed values among the arguments."""
        values = [leaf for leaf in self._leaves if isinstance(leaf, (PerReplica, Mirrored))]
        return [mesh for leaf in values if (mesh := mesh_of(leaf)) is not None]

    def paths(self) -> list[Path]:
        """Returns where each of the dynamic arrays stands in `(args, kwargs)`."""
        places = jax.tree_util.tree_leaves_with_path(self._tree.unflatten(range(len(self._leaves))))
        found: list[Path] = []
        counted: set[int] = set()
        for (path, _), leaf in zip(places, self._leaves):
            if (form := counted_form(leaf)) is not None and id(form.counts) not in counted:
                counted.add(id(form.counts))
                found.append(path)
            if isinstance(leaf, IndexedSlices):
                names = ("values", "indices", "dense_shape")[: len(dynamic_arrays(leaf))]
                found += [(*path, jax.tree_util.GetAttrKey(name)) for name in names]
            elif isinstance(leaf, (PerReplica, Mirrored)) or is_numeric(leaf):
                found.append(path)
        return found

    @property
    def structure_and_keys(self) -> CallKeys:
        """The arguments' structure and keys, to be compared with those of another call (see `difference`)."""
        return self._tree, self.keys

    def rebuilt(self, arrays: Sequence[jax.Array]) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
        """Returns the arguments with these arrays for the dynamic ones."""
        queue = iter(arrays)
        counts: dict[int, RowCounts] = {}

        def remade(leaf: Leaf) -> Leaf:
            if _is_made(leaf):
                return PerReplica([next(queue) for _ in leaf.values])
            if isinstance(leaf, (PerReplica, Mirrored)):
                array, form = next(queue), counted_form(leaf)
                if form is not None and id(form.counts) not in counts:
                    counts[id(form.counts)] = RowCounts(next(queue))
                return like(leaf, array, None if form is None else counts[id(form.counts)])
            if isinstance(leaf, IndexedSlices):
                return with_arrays(leaf, [next(queue) for _ in dynamic_arrays(leaf)])
            return next(queue) if is_numeric(leaf) else leaf

        args, kwargs = jax.tree.unflatten(self._tree, [remade(leaf) for leaf in self._leaves])
        return args, kwargs


def difference(before: CallKeys, now: CallKeys) -> str:
    """Returns what changed from one call to another, in words."""
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


def inputs_of(call: CallSignature, elements: Sequence[Tree]) -> list[str]:
    """Returns dtypes and shapes of the arrays that a program takes: those of a call, and of elements that it takes."""
    texts = []
    for key in call.keys:
        kind = key[0]
        if isinstance(kind, tuple):
            texts.append(described(kind, key[1]))
        elif kind in (PerReplica, Mirrored) and (len(key) == 2 or isinstance(key[2], tuple)):  # of components
            texts.append(described(*key[1][:2]) + EACH)
        elif kind in (PerReplica, Mirrored):
            uneven = " at most" if kind is PerReplica and len(key) > 4 else ""
            texts.append(of_value(key[1], key[2], kind is PerReplica) + uneven)
    leaves = [leaf for element in elements for leaf in nest.values(element)]
    arrays = [(array_of(leaf), isinstance(leaf, PerReplica)) for leaf in leaves]
    return texts + [of_value(array.shape, array.dtype, stacked) for array, stacked in arrays]


def _is_object(key: ArgumentKey) -> bool:
    return _key_text(key).startswith("an object")


def _key_text(key: ArgumentKey) -> str:
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
def _tree_of(count: int) -> PyTreeDef:
    """Returns the structure of a call with so many leaves for its arguments."""
    return jax.tree.structure(((0,) * count, {}))


def _is_made(leaf: Leaf) -> bool:
    """Returns whether the user made this PerReplica value of numeric components, without a strategy."""
    made = type(leaf) is PerReplica and mesh_of(leaf) is None and len(leaf.values) > 0
    return made and all(map(is_number, leaf.values))


def _is_argument_leaf(value: Tree) -> bool:
    return nest.is_leaf(value) or isinstance(value, DistributedDataset) or hasattr(type(value), "__next__")


def argument_leaves(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> list[Leaf]:
    """Returns the leaves of a call's arguments, in the order of its arrays."""
    return jax.tree.leaves((args, kwargs), is_leaf=_is_argument_leaf)


def arguments_of(key: Any) -> tuple[tuple[Tree, ...], dict[str, Tree]] | None:
    """Returns the arguments of calls with such a `CallSignature.key`, specs in place of arrays.

    None stands for those that have an object among them.
    """
    tree, keys, *_ = key
    leaves: list[Leaf] = []
    for key in keys:
        if isinstance(key[0], tuple):
            leaves.append(_specs.TensorSpec(key[0], key[1]))
        elif key[0] in (bool, int, float, complex, str, bytes):
            leaves.append(key[0](key[1]))
        else:
            return None
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return args, kwargs


def is_python_iterator(value: Leaf) -> bool:
    """Returns whether `value` is an iterator of another kind than the datasets'."""
    return hasattr(type(value), "__next__") and not isinstance(value, ElementIterator)


def check_declared(signature: tuple[Tree, ...], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
    """Raises `TypeError` where arrays, specs or PerReplica values do not fit the input signature."""

    def fit(given: Leaf, declared: Leaf) -> bool:
        is_spec = isinstance(declared, (_specs.TensorSpec, _specs.PerReplicaSpec))
        return bool(declared.is_compatible_with(given) if is_spec else given == declared)

    given = jax.tree.leaves(args, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    declared = jax.tree.leaves(signature)
    if kwargs or len(given) != len(declared) or not all(map(fit, given, declared)):
        raise TypeError(
            f"Binding inputs to tf.function failed due to arguments that do not fit. Received args: {args} and "
            f"kwargs: {kwargs} for signature: {signature}."
        )


def bind_declared(
    signature: tuple[Tree, ...], args: tuple[Tree, ...], kwargs: dict[str, Tree], parameters: inspect.Signature
) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Returns arguments that fit the input signature; numbers and numpy arrays become arrays of its dtypes.

    Args:
        signature: the input signature.
        args, kwargs: the arguments.
        parameters: those of the Python function, by which arguments that are given by name are brought in order.

    Raises:
        TypeError: they do not fit.
    """

    def refusal(problem: object) -> TypeError:
        return TypeError(
            f"Binding inputs to tf.function failed due to `{problem}`. Received args: {args} and kwargs: {kwargs} for "
            f"signature: {signature}."
        )

    if kwargs or len(args) != len(signature):
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise refusal(error) from None
        if bound.kwargs or len(bound.args) != len(signature):
            raise refusal(f"{len(signature)} positional arguments expected by input_signature")
        args = bound.args
    try:
        return tuple(_specs.conform(arg, spec) for arg, spec in zip(args, signature)), {}
    except (TypeError, ValueError) as error:
        raise refusal(error) from error


EACH = " per replica"


def described(shape: Sequence[int], dtype: Any) -> str:
    """Return the words for an array in the line.

    >>> described((8, 3), "float32")
    'float32[8,3]'
    """
    return f"{dtype}[{','.join(map(str, shape))}]"


def of_value(shape: Sequence[int], dtype: Any, stacked: bool) -> str:
    """Return the words for an array that has, if `stacked`, the replicas along its first axis.

    >>> of_value((2, 8, 3), "float32", stacked=True)
    'float32[8,3] per replica'
    """
    return described(shape[1:], dtype) + EACH if stacked else described(shape, dtype)
