"""Iterators over elements."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import thread_state, tracebacks
from replicax._base.errors import InvalidArgumentError, OutOfRangeError
from replicax._base.messages import received
from replicax._base.positioned import Positioned
from replicax._base.tracebacks import Living
from replicax._base.types import Leaf, Tree
from replicax._data import composites
from replicax._data.calls import ending
from replicax._data.elements import Nested, tensors_of
from replicax._data.multi_step import Block, stack_on_devices
from replicax._data.nodes.node import Node, NodeOwner, node_of
from replicax._data.prefetch import Lock
from replicax._data.ragged import RaggedTensor
from replicax._data.reading import Position, Reading, state_from_bytes, state_to_bytes
from replicax._data.sparse import SparseTensor
from replicax._data.specs import host_spec, tensor_spec

_P = ParamSpec("_P")
_R = TypeVar("_R")
_I = TypeVar("_I", bound="ElementIterator")


class Readable(Protocol):
    """A dataset, as far as its iterators need it."""

    @property
    def element_spec(self) -> Tree: ...


class Optional:
    """An element or none, as `get_next_as_optional` returns it.

    >>> import replicax as rx
    >>> iterator = iter(rx.data.Dataset.range(1))
    >>> [bool(iterator.get_next_as_optional().has_value()) for _ in range(2)]
    [True, False]
    """

    def __init__(self, *value: Tree, element_spec: Tree = None):
        self._value = value  # the element in a tuple of one, or nothing
        self._element_spec = element_spec

    @classmethod
    def from_value(cls, value: Tree) -> Optional:
        """Returns an optional that has `value`.

        >>> import replicax as rx
        >>> rx.data.Optional.from_value(3).get_value()
        3
        """
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Tree = None) -> Optional:
        """Returns an optional without a value; `element_spec` is the spec of the values that it could have.

        >>> import replicax as rx
        >>> bool(rx.data.Optional.empty(rx.TensorSpec(())).has_value())
        False
        """
        return cls(element_spec=element_spec)

    @property
    def element_spec(self) -> Tree:
        """The spec of the value; None where there is none and it was not told.

        >>> import replicax as rx
        >>> rx.data.Optional.empty(rx.TensorSpec(())).element_spec
        TensorSpec(shape=(), dtype=float32, name=None)
        """
        return tensor_spec(host_spec(self._value[0])) if self._value else self._element_spec

    def has_value(self, name: str | None = None) -> jax.Array:
        """Returns whether there is an element, as a scalar array of bool.

        >>> import replicax as rx
        >>> bool(rx.data.Optional.from_value(3).has_value())
        True
        """
        return jnp.asarray(bool(self._value))

    def get_value(self, name: str | None = None) -> Tree:
        """Returns the element; raises InvalidArgumentError where there is none.

        >>> import replicax as rx
        >>> int(iter(rx.data.Dataset.range(5, 7)).get_next_as_optional().get_value())
        5
        """
        if not self._value:
            raise InvalidArgumentError("The given optional does not have a value.")
        return self._value[0]


lift_element: Callable[[ElementIterator], Tree] | None = None
_on_iterate: Callable[[], None] | None = None


def set_hooks(lift: Callable[[ElementIterator], Tree], on_iterate: Callable[[], None]) -> None:
    """Plugs in compiled functions.

    Args:
        lift: may give an iterator's next element in its own way, or return NotImplemented.
        on_iterate: is called before a dataset is iterated over.
    """
    global lift_element, _on_iterate
    lift_element, _on_iterate = lift, on_iterate


def announce() -> None:
    """Tells compiled functions, if there are any, that a dataset is about to be iterated over."""
    if _on_iterate is not None:
        _on_iterate()


class _Failure:
    """An exception that the dataset raised in place of an element."""

    def __init__(self, error: Exception):
        self.error = error


def exclusive(method: Callable[Concatenate[_I, _P], _R]) -> Callable[Concatenate[_I, _P], _R]:
    """Decorates a method of an iterator that only one thread at a time may run.

    Raises:
        RuntimeError: the iterator is making an element, and this is asked by a function of its own dataset, here or in
            a thread that makes elements for it. Waiting for the element would never end.
    """

    @functools.wraps(method)
    def locked(self: _I, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._refuse_own_functions()
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


living: Living[ElementIterator] = Living()  # those that give elements in this process


class ElementIterator(Iterator[Tree]):
    """The base class of iterators over elements. A subclass says where they come from, in `_next_element`.

    Several threads may ask one iterator: each element goes to one of them.
    """

    _dataset: Readable
    _lock: Lock  # held while an element is taken
    _position: int  # the number of elements that it has given
    _ended = False
    _waiting: list[Tree | Block | _Failure]  # made but not taken yet; the next one is the last of the list

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        iterator = super().__new__(cls)
        iterator._lock = threading.RLock()
        return iterator

    def _behind(self) -> tuple[Sequence[Node], Sequence[Reading]]:
        """Return the nodes from which the elements come, and the readings of them."""
        return (), ()

    def _next_element(self) -> Tree | Block:
        """Makes the next element, or a block of the next ones."""
        raise NotImplementedError

    def _refuse_own_functions(self) -> None:
        if self._lock in thread_state.current.advancing:
            raise RuntimeError(
                "A function of a dataset asks for the next element of the very iterator for which it is making one. "
                "Use another iterator there: iter(dataset) makes one."
            )

    def _make_next(self) -> Tree | Block:
        """Calls `_next_element`, noting for this thread that it makes an element of this iterator."""
        with thread_state.entered(advancing=(*thread_state.current.advancing, self._lock)):
            return self._next_element()

    def _ask_for(self, count: int) -> None:
        """Tells the thread that makes elements that they are taken `count` at a time from now on."""

    @exclusive
    def _pull(self) -> Tree:
        """Returns the next element from the host, never from a compiled function; raises StopIteration at the end."""
        try:
            if not self._waiting:
                self._waiting.append(self._make_next())
        except StopIteration:
            self._ended = True
            raise ending(StopIteration()) from None
        if isinstance(block := self._waiting[-1], Block):
            self._waiting[-1:] = reversed(block.elements())  # a block that cannot be taken apart stays whole
        element = self._waiting.pop()
        if isinstance(element, _Failure):
            raise element.error
        self._position += 1
        return element

    @exclusive
    def _push_back(self, element: Tree | Block) -> None:
        """Makes `element` the next one, or those of a block: for a function that took it and did not use it."""
        self._waiting.append(element)
        self._ended = False
        self._position -= element.count if isinstance(element, Block) else 1

    @exclusive
    def _has_next(self, count: int) -> bool:
        """Returns whether there are `count` elements more; an exception in place of one counts as one."""
        taken, failed = self._pull_up_to(count)
        for element in reversed(taken):
            self._push_back(element)
        return len(taken) == count or failed

    @exclusive
    def _pull_block(self, count: int) -> Block | None:
        """Returns the next `count` elements as a block; None where they are fewer or differ, and then all come yet."""
        self._ask_for(count)
        if not self._waiting:
            try:
                self._waiting.append(self._make_next())
            except StopIteration:
                return None
            except Exception as error:
                self._waiting.append(_Failure(error))
        block = self._waiting[-1]
        if isinstance(block, Block) and block.count == count:
            self._waiting.pop()
            self._position += count
            return block
        taken, _ = self._pull_up_to(count)
        element = stack_on_devices(taken) if len(taken) == count else None
        if element is not None:
            return Block(element, count)
        for element in reversed(taken):
            self._push_back(element)
        return None

    def _pull_up_to(self, count: int) -> tuple[list[Tree], bool]:
        """Returns up to `count` elements, and whether an exception ended them, which then comes again in its place."""
        taken: list[Tree] = []
        try:
            while len(taken) < count:
                taken.append(self._pull())
        except StopIteration:
            pass
        except Exception as error:
            self._waiting.append(_Failure(error))
            return taken, True
        except BaseException:  # such as Ctrl-C
            for element in reversed(taken):
                self._push_back(element)
            raise
        return taken, False

    @tracebacks.boundary
    def __next__(self) -> Tree:
        element = NotImplemented if lift_element is None else lift_element(self)
        return self._pull() if element is NotImplemented else element

    @property
    def element_spec(self) -> Tree:
        """The dataset's `element_spec`.

        >>> import replicax as rx
        >>> iter(rx.data.Dataset.from_tensor_slices([1.0, 2.0])).element_spec
        TensorSpec(shape=(), dtype=float32, name=None)
        """
        return self._dataset.element_spec

    def get_next(self) -> Tree:
        """Returns the next element; raises OutOfRangeError where there are no more.

        >>> import replicax as rx
        >>> int(iter(rx.data.Dataset.range(5, 7)).get_next())
        5
        """
        try:
            return next(self)
        except StopIteration:
            raise ending(OutOfRangeError("End of sequence")) from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element in an `Optional`, which is without a value at the end.

        >>> import replicax as rx
        >>> iterator = iter(rx.data.Dataset.range(1))
        >>> [bool(iterator.get_next_as_optional().has_value()) for _ in range(2)]
        [True, False]
        """
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


# For other modules; in the class, users would see these names.


def pull(iterator: ElementIterator) -> Tree:
    """Return the next element from the host, never from a compiled function; raise StopIteration at the end."""
    return iterator._pull()


def push_back(iterator: ElementIterator, element: Tree | Block) -> None:
    """Make an element, or those of a block, the next of the iterator again."""
    iterator._push_back(element)


def pull_block(iterator: ElementIterator, count: int) -> Block | None:
    """Return the next `count` elements as a block; None if they are fewer or differ, and then all are still to come."""
    return iterator._pull_block(count)


def has_next(iterator: ElementIterator, count: int) -> bool:
    """Return whether there are `count` elements more; an exception in place of an element counts as one."""
    return iterator._has_next(count)


def ask_for(iterator: ElementIterator, count: int) -> None:
    """Tell the thread that makes elements that they are taken `count` at a time from now on."""
    iterator._ask_for(count)


def standing(iterator: ElementIterator) -> tuple[Sequence[Node], Sequence[Reading], int]:
    """Return an iterator's nodes and their readings, and the number of elements that it gave; 0 at its end."""
    return *iterator._behind(), 0 if iterator._ended else iterator._position


class DatasetIterator(ElementIterator, Positioned):
    """An iterator over the elements of a `Dataset`, as tensors.

    `save_state` tells where it stands, and `restore_state` of another iterator over the same dataset, built by the
    same code, goes on from there; also in another process.

    >>> import replicax as rx
    >>> dataset = rx.data.Dataset.range(6).shuffle(6, seed=1).batch(2)
    >>> iterator = iter(dataset)
    >>> _, state = next(iterator), iterator.save_state()
    >>> rest = [batch.tolist() for batch in iterator]
    >>> iterator.restore_state(state)
    >>> [batch.tolist() for batch in iterator] == rest
    True
    """

    def __init__(self, dataset: NodeOwner):
        if not isinstance(dataset, NodeOwner):
            raise TypeError(f"An iterator is made of a Dataset, got {received(dataset)}. Call `iter(dataset)`.")
        self._dataset, self._node = dataset, node_of(dataset)
        self._begin(Reading(self._node.memories), 0)
        living.add(self)

    @exclusive
    def _begin(self, reading: Reading, position: int) -> None:
        self._reading, self._start, self._position = reading, position, position
        self._waiting, self._ended = [], False
        self._elements = self._node.iterate(reading, position)

    def _behind(self) -> tuple[Sequence[Node], Sequence[Reading]]:
        return [self._node], [self._reading]

    def _next_element(self) -> Tree:
        return self._shown_element(next(self._elements))

    def _shown_element(self, element: Tree) -> Tree:
        return tensors_of(element)

    def save_state(self) -> bytes:
        """Returns the position of the iterator: some numbers, however large the dataset is.

        >>> import replicax as rx
        >>> iterator = iter(rx.data.Dataset.range(5))
        >>> _ = next(iterator), next(iterator)
        >>> state = iterator.save_state()
        >>> other = iter(rx.data.Dataset.range(5))
        >>> other.restore_state(state)
        >>> int(next(other))
        2
        """
        return state_to_bytes(Position(self._position), [self._reading])

    def _first_state(self) -> bytes:
        return state_to_bytes(Position(self._start), [self._reading])

    def restore_state(self, state: bytes) -> None:
        """Continues at the position of the iterator whose `save_state` returned `state`.

        Elements that were given before are left out: functions of `map` are not called for them, and records of files
        are not read. Generators, compressed files, and what has to see elements (`filter` and its like) are gone
        through once more up to that place; a warning says so after many elements. What only depends on when threads
        end, `map` with `deterministic=False`, is not repeated exactly; nor are random numbers that functions draw, nor
        the order of a shuffle that a function uses without making it, if it was used before and not come to yet.
        An exception in place of an element does not count: where the program caught one and went on, as many elements
        come again, or the exception does. `Dataset.ignore_errors` leaves out what fails, here too.

        Raises:
            InvalidArgumentError: `state` is no such state, or of another dataset; the iterator stays as it was.

        >>> import replicax as rx
        >>> iterator = iter(rx.data.Dataset.range(5))
        >>> state = iterator.save_state()
        >>> _ = next(iterator), next(iterator)
        >>> iterator.restore_state(state)
        >>> int(next(iterator))
        0
        """
        position, (reading,) = state_from_bytes(state, [self._reading])
        self._begin(Reading(self._node.memories, saved=reading), position.elements)


def _as_numpy(leaf: Leaf) -> Leaf:
    if isinstance(leaf, (Nested, SparseTensor)):
        return leaf
    if isinstance(leaf, RaggedTensor):
        return leaf.numpy()
    return leaf.view(np.ndarray) if leaf.ndim else leaf[()]


class NumpyIterator(DatasetIterator):
    """An iterator over the elements of a `Dataset`, as numpy arrays; scalars as numpy scalars.

    >>> import replicax as rx
    >>> iterator = rx.data.Dataset.range(2).as_numpy_iterator()
    >>> isinstance(iterator, rx.data.NumpyIterator), next(iterator)
    (True, np.int64(0))
    """

    def _shown_element(self, element: Tree) -> Tree:
        return composites.on_rows(_as_numpy, element)
