"""Calls of the users' functions, on elements and otherwise, and the exception that ends a dataset."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from replicax._base.host_memory import Pool, kept
from replicax._base.messages import shown
from replicax._base.thread_state import current
from replicax._base.types import Leaf, Tree
from replicax._data.elements import Nested, as_host, as_tensor

_R = TypeVar("_R")
_E = TypeVar("_E", bound=Exception)


def call_user(role: str, function: Callable[..., _R], *arguments: Any) -> _R:
    """Calls a user's function; `role` says which one it is, such as "`map_func` of `Dataset.map`".

    Raises:
        RuntimeError: the function raised StopIteration. Whoever iterates would take that for the end of the data, and
            so it becomes another exception, as in Python's generators (PEP 479).
    """
    try:
        return function(*arguments)
    except StopIteration as error:
        raise _stopped(role, function) from error


def refuse_stop(error: StopIteration, role: str, function: Callable[..., object]) -> None:
    """Raises what `call_user` does, but for the end of a dataset, to which `next(iterator)` in it may come."""
    if not ends_data(error):
        raise _stopped(role, function) from error


def ends_data(error: BaseException) -> bool:
    """Returns whether an exception is the end of a dataset, and not one that a user's function raised by itself."""
    return hasattr(error, "_replicax_ends_data")


def ending(error: _E) -> _E:
    """Marks an exception as the end of a dataset, which `ends_data` recognizes, and returns it."""
    error._replicax_ends_data = True  # type: ignore[attr-defined]
    return error


def _stopped(role: str, function: Callable[..., object]) -> RuntimeError:
    return RuntimeError(
        f"{role}, {shown(function)}, raised StopIteration, which would end the data without an error. "
        "Catch it in the function, or give `next` a default: `next(iterator, None)`."
    )


def call_on_element(role: str, function: Callable[..., object], element: Tree, pool: Pool | None = None) -> Tree:
    """Calls the user's function on an element: a tuple is passed as several arguments, anything else as one.

    Functions of datasets run on the CPU, whatever the default device: their results go back to the host. The pool has
    memory for the arguments; `role` is for errors, see `call_user`.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # a process may have been started without the CPU backend
        return _applied(role, function, jax.tree.map(as_tensor, element))
    pool = pool or Pool()

    def tensor(array: Leaf) -> Leaf:
        if isinstance(array, Nested) or array.dtype.hasobject:
            return as_tensor(array)
        return pool.on_device(array, device)

    with jax.default_device(device):
        return _applied(role, function, jax.tree.map(tensor, element))


def _applied(role: str, function: Callable[..., object], tensors: Tree) -> Tree:
    return call_user(role, function, *(tensors if type(tensors) is tuple else (tensors,)))


def hand_out(tensors: Sequence[Leaf], arrays: Sequence[np.ndarray]) -> None:
    """Notes that a function is given tensors on the host, each of which shows an array that does not change any more.

    What the function returns of them as they are goes on as the arrays, which takes a fraction of the time.
    """
    current.handed = tensors, arrays


def on_host(result: Tree) -> Tree:
    """Returns the result of a function of an element as numpy arrays that do not change any more."""
    tensors, arrays = current.handed
    if tensors:
        current.handed = (), ()
        if type(result) is dict and len(result) == len(tensors) and all(map(operator.is_, result.values(), tensors)):
            return dict(zip(result, arrays))
    known = dict(zip(map(id, tensors), arrays))

    def array_of(leaf: Leaf) -> Leaf:
        found = known.get(id(leaf))
        return kept(as_host(leaf)) if found is None else found

    if isinstance(result, np.ndarray):  # most results; to look for leaves takes longer than all the rest
        return array_of(result)
    if type(result) is dict and all(isinstance(leaf, np.ndarray) for leaf in result.values()):
        return {key: array_of(leaf) for key, leaf in result.items()}
    # As in tf.data, a list of results is several tensors, and deeper down a list is one.
    result = tuple(result) if isinstance(result, list) else result
    return jax.tree.map(array_of, result, is_leaf=lambda v: isinstance(v, list))


def as_bool(found: np.ndarray) -> bool:
    """Returns the result of a predicate; raises ValueError if it is not one bool."""
    if found.dtype != np.bool_ or found.ndim:
        raise ValueError(
            f"`predicate` must return a scalar of bool, but it returned one of dtype {found.dtype} and shape "
            f"{found.shape}. Compare it with something, or reduce it."
        )
    return bool(found)


def as_tensors(state: Tree) -> Tree:
    """Returns the state of a fold or scan, with tensors for leaves."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else as_tensor(as_host(leaf)), state)


def fold(elements: Iterable[Tree], initial_state: Tree, reduce_func: Callable[[Tree, Tree], Tree]) -> Tree:
    """Returns the last state of `state = reduce_func(state, element)` over the elements, with tensors for leaves."""
    state = as_tensors(initial_state)
    for element in elements:
        state = as_tensors(call_user("`reduce_func` of `reduce`", reduce_func, state, element))
    return state


def explain(error: Exception, name: str, number: int | None = None) -> None:
    """Add a note to an exception: the name of the node in which it was raised, and the number of the element."""
    if not any(" of the dataset" in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"In {name} of the dataset" + ("." if number is None else f", element {number}."))


def call_name(method: str, function: object) -> str:
    """Return the name of a node with a user's function, such as `map(parse)`.

    >>> call_name("map", len)
    'map(len)'
    """
    text = shown(function)
    return f"{method}({text.split('`')[1] if text.startswith('`') else text.removeprefix('the ').removeprefix('a ')})"
