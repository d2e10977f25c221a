"""Iterators over elements, and calls of the users' functions on them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import tracebacks
from replicax._base.errors import InvalidArgumentError, OutOfRangeError
from replicax._base.host_memory import Pool, kept
from replicax._data.elements import Nested, as_host, as_tensor, host_structure
from replicax._data.multi_step import Several, together
from replicax._data.prefetch import advancing
from replicax._data.reading import Node, Reading, packed, unpacked
from replicax._data.specs import host_spec, tensor_spec

_E = TypeVar("_E", bound=Exception)


class Readable(Protocol):
    """A dataset, as far as its iterators need it."""

    _nodes: tuple[Node, ...]

    def _make(self, reading: Reading, start: int = 0, /) -> Iterator[Any]: ...

    @property
    def element_spec(self) -> Any: ...


class Optional:
    """An element, or the news that there is none: what `get_next_as_optional` returns.

    >>> import replicax as rx
    >>> iterator = iter(rx.data.Dataset.range(1))
    >>> [bool(iterator.get_next_as_optional().has_value()) for _ in range(2)]
    [True, False]
    """

    def __init__(self, *value: Any, element_spec: Any = None):
        self._value = value  # the element in a tuple of one, or nothing
        self._element_spec = element_spec

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """Returns an optional that has `value`."""
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Any = None) -> Optional:
        """Returns an optional without a value; `element_spec` is the spec of the values that it could have."""
        return cls(element_spec=element_spec)

    @property
    def element_spec(self) -> Any:
        """The spec of the value; None where there is none and it was not told."""
        return tensor_spec(host_spec(self._value[0])) if self._value else self._element_spec

    def has_value(self, name: str | None = None) -> jax.Array:
        """Returns whether there is an element, as a scalar array of bool."""
        return jnp.asarray(bool(self._value))

    def get_value(self, name: str | None = None) -> Any:
        """Returns the element; raises InvalidArgumentError where there is none."""
        if not self._value:
            raise InvalidArgumentError("The given optional does not have a value.")
        return self._value[0]


_lift: Callable[[ElementIterator], Any] | None = None
_on_iterate: Callable[[], None] | None = None


def set_hooks(lift: Callable[[ElementIterator], Any], on_iterate: Callable[[], None]) -> None:
    """Plugs in compiled functions.

    Args:
        lift: may give an iterator's next element in its own way, or return NotImplemented.
        on_iterate: is called before a dataset is iterated over.
    """
    global _lift, _on_iterate
    _lift, _on_iterate = lift, on_iterate


def has_hooks() -> bool:
    """Returns whether compiled functions are plugged in."""
    return _lift is not None


def tell() -> None:
    """Tells compiled functions, if there are any, that a dataset is about to be iterated over."""
    if _on_iterate is not None:
        _on_iterate()


class _Failure:
    """Stands for an element in whose place the dataset raised an exception."""

    def __init__(self, error: Exception):
        self.error = error


def exclusive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method of an iterator that only one thread at a time may run.

    Raises:
        RuntimeError: the iterator is making an element, and this is asked by a function of its own dataset, here or in
            a thread that makes elements for it. Waiting for the element would never end.
    """

    @functools.wraps(method)
    def locked(self: ElementIterator, *args: Any) -> Any:
        self._refuse_own_functions()
        with self._lock:
            return method(self, *args)

    return locked


class ElementIterator(Iterator[Any]):
    """The three ways to ask for the next element. A subclass says where it comes from, in `_next_element`.

    Several threads may ask one iterator: each element goes to one of them.
    """

    _dataset: Any
    _lock: Any  # held while an element is taken
    _position: int  # how many elements it has given
    _pushed_back: list[Any]
    _several: Several | None = None  # elements that were made as one, of which some are still to come

    def __new__(cls, *args: Any, **kwargs: Any) -> ElementIterator:
        iterator = super().__new__(cls)
        iterator._lock = threading.RLock()
        return iterator

    def _next_element(self) -> Any:
        """The next element, or `Several`."""
        raise NotImplementedError

    def _refuse_own_functions(self) -> None:
        if self._lock in advancing.locks:
            raise RuntimeError(
                "A function of a dataset asks for the next element of the very iterator for which it is making one. "
                "Use another iterator there: iter(dataset) makes one."
            )

    def _advanced(self) -> Any:
        """Calls `_next_element`, noting for this thread that it makes an element of this iterator."""
        before = advancing.locks
        advancing.locks = (*before, self._lock)
        try:
            return self._next_element()
        finally:
            advancing.locks = before

    def _ask_for(self, count: int) -> None:
        """Tells the thread that makes elements that they are taken `count` at a time from now on."""

    @exclusive
    def _pull(self) -> Any:
        """Returns the next element from the host, never from a compiled function; raises StopIteration at the end."""
        try:
            element = self._pushed_back.pop() if self._pushed_back else self._made_next()
        except StopIteration:
            raise ending(StopIteration()) from None
        if isinstance(element, _Failure):
            raise element.error
        self._position += 1
        return element

    def _made_next(self) -> Any:
        if self._several is None or self._several.given == self._several.count:
            self._several, element = None, self._advanced()
            if not isinstance(element, Several):
                return element
            self._several = element
        return self._several.take()

    @exclusive
    def _push_back(self, element: Any) -> None:
        """Makes `element` the next one: for a function that took it and then was to be run in another way."""
        if self._pushed_back or self._several is None or not self._several.take_back(element):
            self._pushed_back.append(element)
        self._position -= 1

    @exclusive
    def _has_next(self, count: int) -> bool:
        """Returns whether there are `count` elements more; an exception in place of one counts as one."""
        taken, failed = self._pull_up_to(count)
        for element in reversed(taken):
            self._push_back(element)
        return len(taken) == count or failed

    @exclusive
    def _pull_several(self, count: int) -> Several | None:
        """The next `count` elements as one; None where there are fewer or they differ, and then all are to come yet."""
        self._ask_for(count)
        if self._several is not None and self._several.given == self._several.count:
            self._several = None
        if not self._pushed_back and self._several is None:
            try:
                element = self._advanced()
            except StopIteration:
                return None
            except Exception as error:
                element = _Failure(error)
            if isinstance(element, Several):
                self._several = element
            else:
                self._pushed_back.append(element)
        whole = self._several
        if not self._pushed_back and whole is not None and (whole.given, whole.count) == (0, count):
            self._several = None
            self._position += count
            return whole
        return self._put_together(count)

    def _put_together(self, count: int) -> Several | None:
        taken, _ = self._pull_up_to(count)
        element = together(taken) if len(taken) == count else None
        if element is not None:
            return Several(element, count)
        for element in reversed(taken):
            self._push_back(element)
        return None

    def _pull_up_to(self, count: int) -> tuple[list[Any], bool]:
        """Returns up to `count` elements, and whether an exception ended them, which then comes again in its place."""
        taken: list[Any] = []
        try:
            while len(taken) < count:
                taken.append(self._pull())
        except StopIteration:
            pass
        except Exception as error:
            self._pushed_back.append(_Failure(error))  # to come up again in its place
            return taken, True
        except BaseException:  # such as Ctrl-C
            for element in reversed(taken):
                self._push_back(element)
            raise
        return taken, False

    @exclusive
    def _push_several_back(self, several: Several) -> None:
        """Makes what `_pull_several` gave the next elements."""
        if self._pushed_back or self._several is not None:  # which come after it
            self._pushed_back += reversed([several.take() for _ in range(several.count)])
        else:
            self._several = several
        self._position -= several.count

    @tracebacks.boundary
    def __next__(self) -> Any:
        element = NotImplemented if _lift is None else _lift(self)
        return self._pull() if element is NotImplemented else element

    def get_next(self) -> Any:
        """Returns the next element; raises OutOfRangeError where there are no more."""
        try:
            return next(self)
        except StopIteration:
            raise ending(OutOfRangeError("End of sequence")) from None

    def get_next_as_optional(self) -> Optional:
        """Returns the next element in an `Optional`, which is without a value at the end."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()


class DatasetIterator(ElementIterator):
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

    _shown: Callable[[Any], Any] = staticmethod(as_tensor)

    def __init__(self, dataset: Readable):
        if not hasattr(dataset, "_nodes"):
            raise TypeError(
                f"An iterator is made of a Dataset, got {dataset!r:.80} of type {type(dataset).__name__}. Call "
                "`iter(dataset)`."
            )
        self._dataset = dataset
        self._begin(Reading(dataset._nodes), 0)

    @exclusive
    def _begin(self, reading: Reading, position: int) -> None:
        self._reading, self._position, self._pushed_back, self._several = reading, position, [], None
        self._elements = self._dataset._make(reading, position)

    def _next_element(self) -> Any:
        return jax.tree.map(self._shown, next(self._elements))

    def save_state(self) -> bytes:
        """Returns the position of the iterator: some numbers, however large the dataset is."""
        return packed(self._position, [self._reading])

    def restore_state(self, state: bytes) -> None:
        """Continues at the position of the iterator whose `save_state` returned `state`.

        Elements of arrays are left out at no cost, and functions of `map` are not called for them. Generators, files,
        `filter` and its like are gone through once more up to that place. What only depends on when threads end,
        `map` with `deterministic=False`, is not repeated exactly; nor are random numbers that functions draw, nor the
        order of a shuffle that a function uses without making it, if it was used before and not come to yet.

        Raises:
            InvalidArgumentError: `state` is no such state, or of another dataset; the iterator stays as it was.
        """
        position, (reading,) = unpacked(state, [self._reading])
        self._begin(Reading(self._dataset._nodes, saved=reading), position)

    @property
    def element_spec(self) -> Any:
        """The dataset's `element_spec`."""
        return self._dataset.element_spec


def _as_numpy(array: Any) -> Any:
    return array if isinstance(array, Nested) or array.ndim else array[()]


class NumpyIterator(DatasetIterator):
    """An iterator over the elements of a `Dataset`, as numpy arrays; scalars as numpy scalars."""

    _shown = staticmethod(_as_numpy)


def call_user(role: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function; `role` says which one it is, such as "`map_func` of `Dataset.map`".

    Raises:
        RuntimeError: the function raised StopIteration. Whoever iterates would take that for the end of the data, and
            so it becomes another exception, as in Python's generators (PEP 479).
    """
    try:
        return function(*arguments)
    except StopIteration as error:
        raise _stopped(role, function) from error


def refuse_stop(error: StopIteration, role: str, function: Callable[..., Any]) -> None:
    """Raises what `call_user` does, but for the end of a dataset, which `next(iterator)` in the function may come to.

    Args:
        error: what the function raised.
        role: which function it is, such as "The replica function".
        function: the function.
    """
    if not ends_data(error):
        raise _stopped(role, function) from error


def ends_data(error: BaseException) -> bool:
    """Returns whether an exception is the end of a dataset, and not one that a user's function raised by itself."""
    return getattr(error, "_replicax_ends_data", False)


def ending(error: _E) -> _E:
    """Marks an exception as the end of a dataset, which `ends_data` recognizes, and returns it."""
    error._replicax_ends_data = True  # type: ignore[attr-defined]
    return error


def _stopped(role: str, function: Callable[..., Any]) -> RuntimeError:
    return RuntimeError(
        f"{role}, {function!r}, raised StopIteration, which would end the data as if there were no more of them. "
        "Catch it in the function, or give `next` a default: `next(iterator, None)`."
    )


def call(role: str, function: Callable[..., Any], element: Any, pool: Pool | None = None) -> Any:
    """Calls the user's function on an element: a tuple is passed as several arguments, anything else as one.

    Functions of datasets run on the CPU, whatever the default device: their results go back to the host. The pool has
    memory for the arguments; `role` is for errors, see `call_user`.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # a process may have been started without the CPU backend
        return _applied(role, function, jax.tree.map(as_tensor, element))
    pool = pool or Pool()

    def tensor(array: Any) -> Any:
        if isinstance(array, Nested) or array.dtype.hasobject:
            return as_tensor(array)
        return pool.on_device(array, device)

    with jax.default_device(device):
        return _applied(role, function, jax.tree.map(tensor, element))


def _applied(role: str, function: Callable[..., Any], tensors: Any) -> Any:
    return call_user(role, function, *(tensors if type(tensors) is tuple else (tensors,)))


def call_to_host(role: str, function: Callable[..., Any], pool: Pool, element: Any) -> Any:
    """Calls the user's function on an element, and returns the result as numpy arrays."""
    result = call(role, function, element, pool)
    # As in tf.data, a list of results is several tensors, and deeper down a list is one.
    return jax.tree.map(kept, host_structure(tuple(result) if isinstance(result, list) else result))


def truth(method: str, predicate: Callable[..., Any], element: Any) -> bool:
    """Calls the user's predicate on an element; raises ValueError if the result is not one bool."""
    found = np.asarray(call(f"`predicate` of `Dataset.{method}`", predicate, element))
    if found.dtype != np.bool_ or found.ndim:
        raise ValueError(
            f"`predicate` must return a scalar of bool, but it returned one of dtype {found.dtype} and shape "
            f"{found.shape}. Compare it with something, or reduce it."
        )
    return bool(found)


def tensors(state: Any) -> Any:
    """Returns the state of a fold or scan, with tensors for leaves."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else as_tensor(as_host(leaf)), state)


def fold(elements: Iterable[Any], initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
    """Returns the last state of `state = reduce_func(state, element)` over the elements, with tensors for leaves."""
    state = tensors(initial_state)
    for element in elements:
        state = tensors(call_user("`reduce_func` of `reduce`", reduce_func, state, element))
    return state
