"""The graph of objects that a checkpoint saves: objects, the names by which they have each other, and their values.

An object is a *node*; a name that leads from one to another is an edge. What has a value is a *leaf*: a variable, an
array or pytree of arrays in a checkpoint's attribute, or the position of an iterator. The arrays of a leaf are nodes
too, below it, under their keys in its pytree, so that a pytree of arrays, one variable that holds it, and a dict of
variables have the same graph.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from replicax._base import array_conversion, json_values
from replicax._base.host_memory import put
from replicax._base.positioned import Positioned
from replicax._base.types import Leaf, Tree
from replicax._tracing import frames
from replicax._tracing.protocols import storage_of, tree_of, types_of
from replicax._values import is_array, is_global
from replicax._variables import deferred_restore
from replicax._variables.storage import StackedStorage
from replicax._variables.variable import Variable

Names: TypeAlias = tuple[str, ...]
# The same for a leaf in each graph, for as long as the leaf is kept: an `id`, and where it stands in that object.
Identity: TypeAlias = tuple[int, Hashable]
_CONTAINERS = (dict, list, tuple)


def _keyed(tree: Tree) -> dict[Names, Leaf]:
    """Returns the leaves of a pytree by their keys."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    keyed = {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf for path, leaf in flat}
    if len(keyed) < len(flat):
        raise ValueError(f"Two keys of a pytree have the same name in a checkpoint: {[path for path, _ in flat]}.")
    return keyed


def _is_key(dtype: DTypeLike) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _stored_type(value: Leaf) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype under which a value is stored; a PRNG key is stored as its bits."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        value = value if is_array(value) else np.asarray(value)
        value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    stored: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, value) if _is_key(value.dtype) else value
    return stored


def _to_host(value: Leaf, copy: bool) -> np.ndarray:
    """Return a value as an array in the host's memory, one that nothing else can change if `copy`."""
    if isinstance(value, jax.Array):
        if _is_key(value.dtype):
            value = jax.random.key_data(value)
        copy = copy and value.is_fully_replicated and _is_on_host(value)  # or else `np.asarray` copies
        if is_global(value) and not value.is_fully_replicated:  # other processes have parts of it
            whole = jax.sharding.NamedSharding(value.sharding.mesh, jax.sharding.PartitionSpec())  # type: ignore[attr-defined]
            (value,) = put([value], whole)
    return np.array(value) if copy else np.asarray(value)


def _is_on_host(value: jax.Array) -> bool:
    """Return whether an array is in the host's memory, where `np.asarray` returns a view of it."""
    return "host" in (value.sharding.memory_kind or "") or all(d.platform == "cpu" for d in value.devices())


def _from_host(array: np.ndarray, like: Leaf) -> Leaf:
    """Returns a stored array as a value of the same type as `like`."""
    if isinstance(like, (bool, int, float, complex)):
        return type(like)(array[()])
    if isinstance(like, (np.ndarray, np.generic)):
        return array if isinstance(like, np.ndarray) else array[()]
    if _is_key(like.dtype):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if not like.committed:
        return array_conversion.as_array(array)
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])


class PytreeLeaf:
    """A leaf whose value is a pytree; the subclasses read and assign it.

    Args:
        owner: the object that the user knows.
        identity: of the leaf.
    """

    is_value = False  # True where a pytree of arrays may have it among its leaves

    def __init__(self, owner: Any, identity: Identity | None = None):
        self.owner, self.identity = owner, identity or (id(owner), None)

    def _get(self) -> Tree:
        raise NotImplementedError

    def _set(self, value: Tree) -> None:
        raise NotImplementedError

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        """Returns the arrays' shapes and dtypes as they are stored, by their keys (no keys for a single array)."""
        return {names: _stored_type(leaf) for names, leaf in _keyed(self._get()).items()}

    def read(self, copy: bool = False) -> dict[Names, np.ndarray]:
        """Return the arrays, as copies that later assignments and donations leave alone if `copy`."""
        return {names: _to_host(leaf, copy) for names, leaf in _keyed(self._get()).items()}

    def write(self, arrays: dict[Names, np.ndarray]) -> None:
        """Replaces the arrays by others of the same types."""
        old = self._get()
        new = [_from_host(arrays[names], like) for names, like in _keyed(old).items()]
        self._set(jax.tree.unflatten(jax.tree.structure(old), new))

    def _stacked(self) -> tuple[Variable, StackedStorage] | None:
        """Returns the variable of which each replica has a value of its own, and its storage; None for others."""
        held = self.owner if isinstance(self.owner, Variable) else getattr(self.owner, "__replicax_variable__", None)
        storage = storage_of(held) if isinstance(held, Variable) else None
        if not isinstance(held, Variable) or not isinstance(storage, StackedStorage):
            return None
        return (held, storage) if storage.home.mesh.size > 1 else None

    def read_replicas(self, copy: bool = False) -> dict[Names, np.ndarray]:
        """Return the arrays of all replicas, stacked, where these are not equal by nature; else nothing."""
        if (found := self._stacked()) is None:
            return {}
        variable, storage = found
        with frames.lock:
            leaves = storage.read()
        return {names: _to_host(leaf, copy) for names, leaf in _keyed(tree_of(variable).unflatten(leaves)).items()}

    def write_replicas(self, arrays: dict[Names, np.ndarray]) -> None:
        """Replaces the arrays of all replicas, if there are as many as those of `read_replicas` had."""
        if (found := self._stacked()) is None:
            return
        variable, storage = found
        with frames.lock:
            old = _keyed(tree_of(variable).unflatten(storage.read()))
            if all(names in arrays and arrays[names].shape == leaf.shape for names, leaf in old.items()):
                storage.write([_from_host(arrays[names], leaf) for names, leaf in old.items()])


class VariableLeaf(PytreeLeaf):
    """A variable of any strategy, as its value seen from outside of the replicas."""

    owner: Variable

    def _get(self) -> Tree:
        return self.owner.value()

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        # Not from the value, for which the workers may have to come together.
        return {names: _stored_type(kind) for names, kind in self._keyed_types().items()}

    def _keyed_types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        return _keyed(tree_of(self.owner).unflatten(types_of(self.owner)))

    def write(self, arrays: dict[Names, np.ndarray]) -> None:
        types = self._keyed_types()
        if any(_is_key(kind.dtype) for kind in types.values()):
            super().write(arrays)
        else:
            self.owner._adopt([arrays[names] for names in types])

    def _set(self, value: Tree) -> None:
        self.owner.assign(value, read_value=False)


class KerasLeaf(PytreeLeaf):
    """A variable of Keras, or an object that behaves like one."""

    def _get(self) -> Leaf:
        value = self.owner.value
        return value() if callable(value) else value

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        return {(): _stored_type(jax.ShapeDtypeStruct(tuple(self.owner.shape), jnp.dtype(self.owner.dtype)))}

    def _set(self, value: Leaf) -> None:
        self.owner.assign(value)


class ArrayLeaf(PytreeLeaf):
    """An array, or a pytree of arrays, in an attribute of a checkpoint or in a dict or list there."""

    def __init__(self, holder: dict[Any, Tree] | list[Tree], key: Any, value: Tree):
        super().__init__(value, (id(holder), key))
        self._holder, self._key = holder, key

    def _get(self) -> Tree:
        return self._holder[self._key]

    def _set(self, value: Tree) -> None:
        self._holder[self._key] = value


class _Resumable(Protocol):
    def save_state(self) -> Any: ...

    def restore_state(self, state: Any) -> None: ...


class PositionLeaf:
    """An iterator that can tell where it stands and go there again: `save_state()` and `restore_state(state)`."""

    is_value = False

    def __init__(self, iterator: _Resumable):
        self.owner, self.identity = iterator, (id(iterator), None)

    def packed(self) -> str:
        """Returns the position as text."""
        return _packed(self.owner.save_state())

    def packed_at_beginning(self) -> str:
        """Returns the position where the iterator began, as text; that of another library's where it stands."""
        return _packed(self.owner._first_state()) if isinstance(self.owner, Positioned) else self.packed()

    def unpack(self, text: str) -> None:
        """Moves the iterator to a position of `packed`."""
        self.owner.restore_state(_unpacked(text))

    def carried_over(self, texts: Sequence[str]) -> str | None:
        """Returns which position of another number of processes holds here; None where none does."""
        if not isinstance(self.owner, Positioned):
            return None
        states = list(map(_unpacked, texts))
        state = self.owner._carried_over(states)
        return None if state is None else texts[states.index(state)]


def _packed(state: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(json_values.encoded(state)).encode())).decode()


def _unpacked(text: str) -> Any:
    return json_values.decoded(json.loads(zlib.decompress(base64.b64decode(text))))


CheckpointLeaf: TypeAlias = PytreeLeaf | PositionLeaf


def _has(value: object, *names: str) -> bool:
    """Returns True if a value's class has these attributes; no property is evaluated."""
    return not isinstance(value, type) and all(hasattr(type(value), name) for name in names)


def _leaf_of(value: Any) -> CheckpointLeaf | None:
    """Returns the leaf of an object that has a value; None for other objects and for arrays."""
    if isinstance(value, Variable):
        return VariableLeaf(value)
    if _has(value, "_checkpoint_leaf"):
        leaf: CheckpointLeaf | None = value._checkpoint_leaf()
        return leaf
    if _has(value, "save_state", "restore_state"):
        return PositionLeaf(value)
    return KerasLeaf(value) if _has(value, "value", "assign") and hasattr(value, "path") else None


def has_children(value: object) -> bool:
    """Returns True if `trackable_children` may find something."""
    return isinstance(value, _CONTAINERS) or _has(value, "_tracked") or is_keras_object(value)


def is_keras_object(value: object) -> bool:
    """Returns True for layers, models, optimizers, metrics and generators of seeds of Keras."""
    of_variables = _has(value, "variables") or _has(value, "weights") or _has(value, "next", "from_config")  # seeds
    return of_variables and hasattr(value, "__dict__")


def is_trackable(value: object) -> bool:
    """Returns True if a checkpoint can save an object, or what is in it; an empty container may be filled later."""
    if isinstance(value, _CONTAINERS) and value:
        return any(is_trackable(item) for item in trackable_children(value).values())
    return _leaf_of(value) is not None or has_children(value) or is_array_tree(value)


def is_array_tree(value: Tree) -> bool:
    """Returns True for an array, and for a pytree of arrays and numbers alone."""
    if is_array(value):
        return True

    def restored_in_place(x: Tree) -> bool:
        leaf = _leaf_of(x)
        return (leaf is not None and not leaf.is_value) or (_has(x, "_tracked") and not isinstance(x, Mapping))

    try:
        leaves = jax.tree.leaves(value, is_leaf=restored_in_place)
    except ValueError:  # a dict whose keys have no order
        return False
    plain = all(is_array(leaf) or isinstance(leaf, (bool, int, float, complex)) for leaf in leaves)
    return plain and any(is_array(leaf) for leaf in leaves)


def attached(value: object) -> None:
    """Restores an object that was attached to a tracked one, if a restored checkpoint has a value for it."""
    if deferred_restore.waiting and (_leaf_of(value) is not None or has_children(value)):
        deferred_restore.settle()


def trackable_children(obj: object) -> dict[str, Any]:
    """Returns the children of an object, by the names under which a checkpoint knows them.

    These are the items of a dict, list or tuple, the result of a method `_tracked`, or the attributes of an object of
    Keras (one with `variables`, or a generator of seeds). Children without values in them do no harm.
    """
    if isinstance(obj, dict):
        return {str(key): value for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return {str(index): value for index, value in enumerate(obj)}
    if _has(obj, "_tracked"):
        tracked: dict[str, Any] = obj._tracked()  # type: ignore[attr-defined]
        return tracked
    children = dict(vars(obj)) if is_keras_object(obj) else {}
    if _has(obj, "apply_gradients"):  # an optimizer, which has its model's variables too
        children.pop("_trainable_variables", None)
    return children


class ObjectNode:
    """An object of the graph: the numbers of its children by name, and its value if it has one."""

    def __init__(self, names: Names, leaf: CheckpointLeaf | None):
        self.names = names  # the shortest way here from the root
        self.children: dict[str, int] = {}
        self.leaf = leaf


def graph_of(
    roots: Sequence[object], children_of: Callable[[object], dict[str, Any]] = trackable_children
) -> list[ObjectNode]:
    """Returns the objects that can be reached, each once, nearest first. Node 0 stands for all of `roots` together.

    `children_of` returns an object's children; those of a dict, list or tuple are `trackable_children`'s.
    """
    nodes = [ObjectNode((), None)]
    numbers: dict[Identity, int] = {}
    # Objects still to visit, each with its node's number; in the attributes of other objects arrays are no children.
    waiting = [(0, root, isinstance(root, _CONTAINERS)) for root in roots]
    for number, obj, arrays in waiting:
        children = children_of(obj)
        if isinstance(obj, dict) and len(children) < len(obj):
            raise ValueError(f"Two keys of a dict have the same name in a checkpoint: {list(obj)}.")
        for key, (name, child) in zip(obj if isinstance(obj, dict) else itertools.count(), children.items()):
            leaf = _leaf_of(child)
            if leaf is None and arrays and isinstance(obj, (dict, list)) and is_array_tree(child):
                leaf = ArrayLeaf(obj, key, child)
            if leaf is None and not has_children(child):
                if arrays and isinstance(obj, tuple) and is_array(child):
                    raise ValueError(
                        f"{'.'.join(('(root)', *nodes[number].names))} is a tuple of arrays beside other objects, in "
                        "which `restore` cannot replace them. Use a list."
                    )
                continue
            identity = (id(child), None) if leaf is None else leaf.identity
            if identity not in numbers:
                numbers[identity] = len(nodes)
                nodes.append(ObjectNode((*nodes[number].names, name), leaf))
                if leaf is None:  # kept alive here, so that no other object has its id
                    inner = _has(child, "_roots")  # another checkpoint
                    for root in child._roots() if inner else [child]:
                        waiting.append((numbers[identity], root, (arrays or inner) and isinstance(root, _CONTAINERS)))
            nodes[number].children[name] = numbers[identity]
    return nodes
