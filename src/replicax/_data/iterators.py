"""Iterators over elements, and calls of the users' functions on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._data.elements import as_host, as_tensor, host_structure
from replicax._errors import InvalidArgumentError, OutOfRangeError

if TYPE_CHECKING:
    from replicax._data.core import Base


class Optional:
    """An element, or the news that there is none: what `get_next_as_optional` returns.

    >>> import replicax as rx
    >>> iterator = iter(rx.data.Dataset.range(1))
    >>> [bool(iterator.get_next_as_optional().has_value()) for _ in range(2)]
    [True, False]
    """

    def __init__(self, *value: Any):
        self._value = value  # the element in a tuple of one, or nothing

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """An optional that has `value`."""
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Any = None) -> Optional:
        """An optional without a value."""
        return cls()

    def has_value(self) -> jax.Array:
        """Whether there is an element, as a scalar array of bool."""
        return jnp.asarray(bool(self._value))

    def get_value(self) -> Any:
        """The element; `InvalidArgumentError` where there is none."""
        if not self._value:
            raise InvalidArgumentError("The given optional does not have a value.")
        return self._value[0]


class ElementIterator(Iterator[Any]):
    """The three ways to ask for the next element. A subclass says where it comes from, in `_pull`."""

    def _pull(self) -> Any:
        """The next element; StopIteration at the end."""
        raise NotImplementedError

    def __next__(self) -> Any:
        return self._pull()

    def get_next(self) -> Any:
        """The next element; `OutOfRangeError` where there are no more."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("End of sequence") from None

    def get_next_as_optional(self) -> Optional:
        """The next element in an `Optional`, which is without a value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


class DatasetIterator(ElementIterator):
    """An iterator over the elements of a `Dataset`, as tensors."""

    def __init__(self, dataset: Base):
        self._dataset = dataset
        self._elements = dataset._make()

    def _pull(self) -> Any:
        return jax.tree.map(as_tensor, next(self._elements))

    @property
    def element_spec(self) -> Any:
        """The dataset's `element_spec`."""
        return self._dataset.element_spec


def _on_host() -> contextlib.AbstractContextManager[Any]:
    """Functions of datasets run on the CPU, whatever the default device: their results go back to the host."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # a process may have been started without the CPU backend
        return contextlib.nullcontext()


def call(function: Callable[..., Any], element: Any) -> Any:
    """The user's function on an element: a tuple is passed as several arguments, anything else as one."""
    with _on_host():
        tensors = jax.tree.map(as_tensor, element)
        return function(*tensors) if type(tensors) is tuple else function(tensors)


def call_to_host(function: Callable[..., Any], element: Any) -> Any:
    result = call(function, element)
    # As in tf.data, a list of results is several tensors, and deeper down a list is one.
    return host_structure(tuple(result) if isinstance(result, list) else result)


def fold(elements: Iterable[Any], initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
    """`reduce` of datasets: `reduce_func(state, element)` over the elements, with tensors for states."""

    def tensors(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else as_tensor(as_host(leaf)), state)

    state = tensors(initial_state)
    for element in elements:
        state = tensors(reduce_func(state, element))
    return state
