"""The graph of objects that a checkpoint saves: objects, the names by which they have each other, and their values.

An object is a *node*; a name that leads from one to another is an edge. What has a value is a *leaf*: a variable, an
array or pytree of arrays in a checkpoint's attribute, or the position of an iterator. The arrays of a leaf are nodes
too, below it, under their keys in its pytree, so that a pytree of arrays, one variable that holds it, and a dict of
variables have the same graph.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import array_conversion
from replicax._values import is_array, is_global
from replicax._variables import deferred_restore
from replicax._variables.variable import Variable

Names = tuple[str, ...]
_CONTAINERS = (dict, list, tuple)


class Leaf(Protocol):
    """What has a value: arrays, each under its keys in a pytree (no keys for a single array)."""

    owner: Any  # what the user knows it by
    identity: Any  # the same in each graph, for as long as the leaf is kept

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        """The arrays' shapes and dtypes as they are stored."""

    def read(self) -> dict[Names, np.ndarray]:
        """The arrays."""

    def write(self, arrays: dict[Names, np.ndarray]) -> None:
        """Replaces them by others of these types."""


def _keyed(tree: Any) -> dict[Names, Any]:
    """The leaves of a pytree under their keys."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    keyed = {tuple(_name(key) for key in path): leaf for path, leaf in flat}
    if len(keyed) < len(flat):
        raise ValueError(f"Two keys of a pytree have the same name in a checkpoint: {[path for path, _ in flat]}.")
    return keyed


def _name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _stored_type(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype under which a value is stored; a PRNG key's bits stand for it."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        value = value if is_array(value) else np.asarray(value)
        value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.eval_shape(jax.random.key_data, value) if _is_key(value.dtype) else value


def _to_host(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array):
        if _is_key(value.dtype):
            value = jax.random.key_data(value)
        if is_global(value) and not value.is_fully_replicated:  # parts of it lie with other workers
            whole = jax.sharding.NamedSharding(value.sharding.mesh, jax.sharding.PartitionSpec())  # type: ignore[attr-defined]
            value = jax.device_put(value, whole)
    return np.asarray(value)


def _from_host(array: np.ndarray, like: Any) -> Any:
    """A stored array as a value of the same type as `like`."""
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
    """A leaf whose value is a pytree; the classes below say where it stands."""

    owner: Any

    def _get(self) -> Any:
        raise NotImplementedError

    def _set(self, value: Any) -> None:
        raise NotImplementedError

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        return {names: _stored_type(leaf) for names, leaf in _keyed(self._get()).items()}

    def read(self) -> dict[Names, np.ndarray]:
        return {names: _to_host(leaf) for names, leaf in _keyed(self._get()).items()}

    def write(self, arrays: dict[Names, np.ndarray]) -> None:
        old = self._get()
        new = [_from_host(arrays[names], like) for names, like in _keyed(old).items()]
        self._set(jax.tree.unflatten(jax.tree.structure(old), new))


class VariableLeaf(PytreeLeaf):
    """A variable of any strategy, as its value seen from outside of the replicas."""

    def __init__(self, variable: Variable):
        self.owner, self.identity = variable, (id(variable), None)

    def _get(self) -> Any:
        return self.owner.value()

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        # Not from the value, for which the workers may have to come together.
        return {names: _stored_type(kind) for names, kind in _keyed(self.owner._of_leaves(self.owner._types)).items()}

    def write(self, arrays: dict[Names, np.ndarray]) -> None:
        types = _keyed(self.owner._of_leaves(self.owner._types))
        if any(_is_key(kind.dtype) for kind in types.values()):
            super().write(arrays)
        else:
            self.owner._adopt([arrays[names] for names in types])

    def _set(self, value: Any) -> None:
        self.owner.assign(value, read_value=False)


class KerasLeaf(PytreeLeaf):
    """A variable of Keras, or what behaves like one."""

    def __init__(self, variable: Any):
        self.owner, self.identity = variable, (id(variable), None)

    def _get(self) -> Any:
        value = self.owner.value
        return value() if callable(value) else value

    def types(self) -> dict[Names, jax.ShapeDtypeStruct]:
        return {(): _stored_type(jax.ShapeDtypeStruct(tuple(self.owner.shape), jnp.dtype(self.owner.dtype)))}

    def _set(self, value: Any) -> None:
        self.owner.assign(value)


class SlotLeaf(PytreeLeaf):
    """An array, or a pytree of arrays, in an attribute of a checkpoint or in a dict or list there."""

    def __init__(self, holder: Any, key: Any, value: Any):
        self.owner, self._holder, self._key = value, holder, key
        self.identity = (id(holder), key)

    def _get(self) -> Any:
        return self._holder[self._key]

    def _set(self, value: Any) -> None:
        self._holder[self._key] = value


class PositionLeaf:
    """An iterator that can tell where it stands and go there again: `save_state()` and `restore_state(state)`."""

    def __init__(self, iterator: Any):
        self.owner, self.identity = iterator, (id(iterator), None)

    def packed(self) -> str:
        """Where it stands, as text."""
        return base64.b64encode(zlib.compress(json.dumps(_encoded(self.owner.save_state())).encode())).decode()

    def unpack(self, text: str) -> None:
        """Goes where `packed` told."""
        self.owner.restore_state(_decoded(json.loads(zlib.decompress(base64.b64decode(text)))))


def _encoded(state: Any) -> Any:
    """An iterator's state in what JSON has."""
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    if isinstance(state, dict):
        return {"dict": [[_encoded(key), _encoded(value)] for key, value in state.items()]}
    if isinstance(state, (list, tuple)):
        return {"list" if isinstance(state, list) else "tuple": [_encoded(item) for item in state]}
    if is_array(state):
        array = np.asarray(state)
        head = {"shape": list(array.shape), "scalar": isinstance(state, np.generic)}
        if array.dtype == object:
            return {"objects": [_encoded(item) for item in array.ravel()], **head}
        return {"array": base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.name, **head}
    raise TypeError(f"An iterator's state is made of arrays, numbers, strings and bytes; got {state!r} in it.")


def _decoded(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    if "bytes" in told:
        return base64.b64decode(told["bytes"])
    if "dict" in told:
        return {_decoded(key): _decoded(value) for key, value in told["dict"]}
    if "list" in told:
        return [_decoded(item) for item in told["list"]]
    if "tuple" in told:
        return tuple(_decoded(item) for item in told["tuple"])
    if "objects" in told:
        array = np.empty(len(told["objects"]), object)
        array[:] = [_decoded(item) for item in told["objects"]]
    else:
        array = np.frombuffer(base64.b64decode(told["array"]), jnp.dtype(told["dtype"])).copy()
    array = array.reshape(told["shape"])
    return array[()] if told["scalar"] else array


def _has(value: Any, *names: str) -> bool:
    """Whether a value's class has these; properties are not asked for their value."""
    return not isinstance(value, type) and all(hasattr(type(value), name) for name in names)


def _leaf_of(value: Any) -> Any:
    if isinstance(value, Variable):
        return VariableLeaf(value)
    if _has(value, "_checkpoint_leaf"):
        return value._checkpoint_leaf()
    if _has(value, "save_state", "restore_state"):
        return PositionLeaf(value)
    return KerasLeaf(value) if _has(value, "value", "assign") and hasattr(value, "path") else None


def has_children(value: Any) -> bool:
    """Whether `trackable_children` may find something."""
    return isinstance(value, _CONTAINERS) or _has(value, "_tracked") or _is_keras_object(value)


def _is_keras_object(value: Any) -> bool:
    return (_has(value, "variables") or _has(value, "weights")) and hasattr(value, "__dict__")


def is_trackable(value: Any) -> bool:
    """Whether a checkpoint can save a value, or what is in it; what is empty may be filled later."""
    if isinstance(value, _CONTAINERS) and value:
        return any(is_trackable(item) for item in trackable_children(value).values())
    return _leaf_of(value) is not None or has_children(value) or is_array_tree(value)


def is_array_tree(value: Any) -> bool:
    """Whether a value is an array, or a pytree of arrays and numbers alone."""
    if is_array(value):
        return True

    def has_place(x: Any) -> bool:
        """Whether it is restored where it is."""
        leaf = _leaf_of(x)
        return (leaf is not None and not getattr(leaf, "is_value", False)) or (
            _has(x, "_tracked") and not isinstance(x, Mapping)
        )

    try:
        leaves = jax.tree.leaves(value, is_leaf=has_place)
    except ValueError:  # a dict whose keys have no order
        return False
    plain = all(is_array(leaf) or isinstance(leaf, (bool, int, float, complex)) for leaf in leaves)
    return plain and any(is_array(leaf) for leaf in leaves)


def attached(value: Any) -> None:
    """Something has become an attribute of an object that is tracked: a checkpoint may have a value for it."""
    if deferred_restore.is_late() and (_leaf_of(value) is not None or has_children(value)):
        deferred_restore.settle()


def trackable_children(obj: Any) -> dict[str, Any]:
    """The objects that an object has, by the names under which a checkpoint knows them.

    Of a dict its items, of a list or tuple its items by number, of an object with the method `_tracked` what that
    returns, of an object of Keras (one with `variables`) its attributes. What has no values in it does not matter.
    """
    if isinstance(obj, dict):
        return {str(key): value for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return {str(index): value for index, value in enumerate(obj)}
    if _has(obj, "_tracked"):
        return obj._tracked()
    children = dict(vars(obj)) if _is_keras_object(obj) else {}
    if _has(obj, "apply_gradients"):  # an optimizer, which has its model's variables too
        children.pop("_trainable_variables", None)
    return children


class Node:
    """An object of the graph: the numbers of its children by name, and its value if it has one."""

    def __init__(self, names: Names, leaf: Any):
        self.names = names  # the shortest way here from the root
        self.children: dict[str, int] = {}
        self.leaf = leaf


def graph_of(parts: Sequence[Any]) -> list[Node]:
    """The objects that can be reached, each once, nearest first. Number 0 stands for all of `parts` together."""
    nodes = [Node((), None)]
    numbers: dict[Any, int] = {}
    # What is still to be looked through: its node's number, and whether arrays in it count, or are someone's own.
    waiting = [(0, part, isinstance(part, _CONTAINERS)) for part in parts]
    for number, obj, arrays in waiting:
        children = trackable_children(obj)
        if isinstance(obj, dict) and len(children) < len(obj):
            raise ValueError(f"Two keys of a dict have the same name in a checkpoint: {list(obj)}.")
        keys: Any
        keys = list(obj) if isinstance(obj, dict) else range(len(obj)) if isinstance(obj, list) else None
        for index, (name, child) in enumerate(children.items()):
            leaf = _leaf_of(child)
            if leaf is None and arrays and keys is not None and is_array_tree(child):
                leaf = SlotLeaf(obj, keys[index], child)
            if leaf is None and not has_children(child):
                if arrays and keys is None and is_array(child):
                    raise ValueError(
                        f"{'.'.join(('(root)', *nodes[number].names))} is a tuple of arrays beside other objects, in "
                        "which `restore` cannot replace them. Use a list."
                    )
                continue
            identity = (id(child), None) if leaf is None else leaf.identity
            if identity not in numbers:
                numbers[identity] = len(nodes)
                nodes.append(Node((*nodes[number].names, name), leaf))
                if leaf is None:  # kept alive here, so that no other object has its id
                    inner = _has(child, "_parts")  # another checkpoint
                    for part in child._parts() if inner else [child]:
                        waiting.append((numbers[identity], part, (arrays or inner) and isinstance(part, _CONTAINERS)))
            nodes[number].children[name] = numbers[identity]
    return nodes
