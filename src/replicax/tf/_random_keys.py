"""Keys of random numbers: from a seed, from a generator's state, and from counters that users do not see.

Each function of `tf.random` that takes no generator draws with the next number of a counter. Code that runs eagerly has
one counter for all calls without a seed, and one for each op, dtype and seed. A `tf.function` has counters of its own,
which begin at 0: one for all calls without a seed, and one for each call in its code that names a seed. Two functions
of the same code therefore draw the same numbers. `tf.random.set_seed` resets all counters.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, SupportsInt, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.tf._core import (
    ResourceVariable,
    array_conversion,
    as_dtype,
    frames,
    hide,
    jax_internals,
    modes,
    scheduling,
    thread_state,
    tracebacks,
    use_default_seed,
)
from replicax.tf._core import context as _context
from replicax.tf._types import DTypeLike

# Named, so that the numbers do not depend on JAX's setting for its default generator.
_IMPLEMENTATION = "threefry2x32"
_MASK = 0xFFFFFFFF
# What distinguishes the counters of calls with a seed: op, dtype and seed. () is for all calls without one.
_Tag: TypeAlias = "tuple[()] | tuple[str, DTypeLike | None, int]"
_OF_OPS = 87654321  # the global seed where an op names a seed and `set_seed` was not called, as in TensorFlow


def wrapped(words: jax.Array | np.ndarray) -> jax.Array:
    """Returns the key of two words (integers) in the form that `jax.random` takes."""
    result: jax.Array = jax.random.wrap_key_data(words.astype(np.uint32), impl=_IMPLEMENTATION)  # type: ignore[arg-type]
    return result


@functools.partial(jax.jit, inline=True)
def of_state(state: jax.Array, replica: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the key's words for a generator in this state, different on each replica, and the next state."""
    # Keys only have to differ; the seeds that users choose for two generators are close to each other.
    words = state + jnp.stack([jnp.asarray(replica, np.uint32) * np.uint32(0x9E3779B9), np.uint32(0)])
    return words, state + np.asarray([0, 1], np.uint32)


def of_op(op: str, dtype: DTypeLike | None, seed: SupportsInt | None) -> jax.Array | np.ndarray:
    """Returns the key's words for the next call of an op without a generator, different on each replica.

    They are the random 64 bits with which the counter starts, plus the replica and the count.
    """
    words = next_words(op, dtype, seed)
    return np.asarray(words, np.uint32) if isinstance(words, tuple) else words


def next_words(op: str, dtype: DTypeLike | None, seed: SupportsInt | None) -> jax.Array | tuple[int, int]:
    """Returns what `of_op` returns, as two integers in eager code."""
    tag: _Tag = () if seed is None else (op, dtype, int(seed))
    running = modes.running()
    of_element = running is not None and isinstance(running.code.random_numbers, OfElements)
    is_input = thread_state.current.advancing and not of_element
    if is_input and frames.notes_changes and all_counters.drawn_by_input is None:
        all_counters.drawn_by_input = tracebacks.origin()
    eager = jax_internals.is_eager(frames.untaped_trace())
    if not eager and isinstance(frames.frame(), frames.TraceFrame):
        state = _of_function(running).state(tag, 0 if running is None or not tag else running.number(tag))
        value = state.value()
        state.assign_add(_NEXT, read_value=False)
        tracing = scheduling.tracing()  # for workers, which read the same state at the same time
        who = replica() if tracing is None else tracing.index()
        result: jax.Array | tuple[int, int] = value[:2] + jnp.stack([jnp.asarray(who).astype(np.uint32), value[2]])
        return result
    # An initial value that is computed outside of a compiled replica is the same for all replicas.
    who = 0 if isinstance(number := replica(), jax.core.Tracer) else int(number)
    start, count = (_eager if running is None else _of_function(running)).take(tag, who)
    if not eager:
        frames.refuse_tracers([jnp.asarray(count) + 0])  # inside of `jax.jit` it would be a constant
    return (start[0] + who) & _MASK, (start[1] + count) & _MASK


def replica() -> int | jax.Array:
    """Returns the number of the current replica, 0 outside of replicas."""
    context = _context.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


_seed: int | None = None
_lock = threading.RLock()
_NEXT = np.asarray([0, 0, 1], np.uint32)


def _start(tag: _Tag, chance: int, stream: int) -> list[int]:
    """Returns the two words with which a counter starts."""
    if tag:
        op, dtype, seed = tag
        numbers = [_OF_OPS if _seed is None else _seed, zlib.crc32(f"{op} {dtype}".encode()), seed]
    else:
        numbers = [chance if _seed is None else _seed, stream]
    result: list[int] = (
        np.random.SeedSequence([part for n in numbers for part in (abs(n), int(n < 0))]).generate_state(2).tolist()
    )
    return result


def _by_chance() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


class _Eager:
    """The counters of code that runs eagerly outside of functions, for each replica."""

    def __init__(self, stream: int):
        self._stream = stream
        self.reset()

    def reset(self) -> None:
        self._chance = _by_chance()
        self._counters: dict[_Tag, tuple[list[int], dict[int, int]]] = {}

    def save(self) -> list[object]:
        counters = [[_told(tag), start, list(counts.items())] for tag, (start, counts) in self._counters.items()]
        return [self._chance, counters]

    def restore(self, saved: Sequence[Any]) -> None:
        self._chance = saved[0]
        self._counters = {_tag(tag): (list(start), dict(counts)) for tag, start, counts in saved[1]}

    def take(self, tag: _Tag, replica: int) -> tuple[list[int], int]:
        with _lock:
            counter = self._counters.get(tag)
            if counter is None:
                counter = self._counters[tag] = _start(tag, self._chance, self._stream), {}
            start, counts = counter
            counts[replica] = counts.get(replica, 0) + 1
            return start, counts[replica] - 1


class _OfFunction:
    """The counters of a function, in variables, since its programs have to advance them."""

    def __init__(self, name: str = ""):
        self.name = name
        self._restored: dict[tuple[_Tag, int], np.ndarray] = {}  # of states that are not there yet
        self._states: dict[tuple[_Tag, int], ResourceVariable] = {}
        self._served: dict[tuple[_Tag, int, int], ResourceVariable] = {}  # on parameter servers, by their strategy too
        self._taken: dict[_Tag, tuple[int, dict[int, int]]] = {}  # draws of eager replicas since the given count
        self._chance = _by_chance()

    def reset(self) -> None:
        """Starts again, with the current seed."""
        self._taken.clear()
        self._served.clear()
        self._chance = _by_chance()
        for (tag, _), state in self._states.items():
            self._write(state, self._first(tag))

    def state(self, tag: _Tag, number: int) -> ResourceVariable:
        """Returns the variable for the `number`th call with this seed, or the one for all calls without a seed."""
        if scheduling.tracing() is not None:
            return self._served_state(tag, number)
        with _lock:
            if (tag, number) not in self._states:
                if not isinstance(self, OfElements):
                    modes.check_state()
                with jax_internals.untraced():  # the function may be traced
                    first = self._restored.pop((tag, number), None)
                    state = ResourceVariable(self._first(tag) if first is None else first, trainable=False, name="seed")
                hide(state)
                self._states[tag, number] = state
            return self._states[tag, number]

    def _served_state(self, tag: _Tag, number: int) -> ResourceVariable:
        """Returns the same for functions that workers run, on a parameter server."""
        strategy = _context.get_strategy()
        key = tag, number, id(strategy)
        with _lock:
            if key not in self._served:
                with jax_internals.untraced():
                    state = strategy.extended._new_variable(
                        initial_value=self._first(tag), trainable=False, name="seed"
                    )
                hide(state)
                self._served[key] = state
            return self._served[key]

    def take(self, tag: _Tag, replica: int) -> tuple[list[int], int]:
        """Returns the next count while the function's Python code runs eagerly; each replica counts by itself."""
        state = self.state(tag, 0)
        with _lock:
            with frames.lock:
                value = np.asarray(state._storage.read()[0])
            begun, counts = self._taken.get(tag, (0, {}))
            if begun + max(counts.values(), default=0) != value[2]:  # a program has advanced it
                begun, counts = self._taken[tag] = int(value[2]), {}
            count = counts[replica] = counts.get(replica, 0) + 1
            if begun + count > value[2]:
                self._write(state, np.append(value[:2], np.uint32(begun + count)))
                self._taken[tag] = begun, counts
            return value[:2].tolist(), begun + count - 1

    def save(self) -> list[object]:
        states = [[_told(tag), n, np.asarray(state._storage.read()[0])] for (tag, n), state in self._states.items()]
        return [self.name, self._chance, states]

    def restore(self, saved: Sequence[Any]) -> None:
        self._taken.clear()
        self._served.clear()
        self._chance = saved[1]
        self._restored = {(_tag(tag), n): np.asarray(value, np.uint32) for tag, n, value in saved[2]}
        for key, state in self._states.items():
            value = self._restored.pop(key, None)
            self._write(state, self._first(key[0]) if value is None else value)

    def _first(self, tag: _Tag) -> np.ndarray:
        return np.asarray([*_start(tag, self._chance, 1), 0], np.uint32)

    def _write(self, state: ResourceVariable, value: np.ndarray) -> None:
        with jax_internals.untraced():
            frames.GlobalFrame().write(state, [array_conversion.as_array(value)])


class OfElements(_OfFunction):
    """The counters of a function of a dataset's elements, which begin anew for each element.

    The numbers of an element follow from the function's seed, from the number of the element, and from the pass: they
    are the same in whatever order or thread the elements are made, and one by one as well as in blocks.
    """

    def take(self, tag: _Tag, replica: int) -> tuple[list[int], int]:
        draws: drawing_for = thread_state.current.draws
        words, count = draws.words(tag), draws.counts.get(tag, 0)
        draws.counts[tag] = count + 1
        return [int(words[0]) + draws.number, int(words[1])], count

    def tag_of(self, variable: object) -> tuple[_Tag, int] | None:
        """Returns the calls whose counter a variable is: their tag, and which call of that tag; None for others."""
        return next((key for key, state in self._states.items() if state is variable), None)


class drawing_for:
    """A context in which a function of a dataset runs in Python for an element.

    Args:
        number: the number of the element.
        words: returns the words with which the calls of a tag begin.
    """

    def __init__(self, number: int, words: Callable[[_Tag], np.ndarray]):
        self.number, self.words = number, words
        self.counts: dict[_Tag, int] = {}  # how often each tag was drawn

    def __enter__(self) -> None:
        self._before, thread_state.current.draws = thread_state.current.draws, self

    def __exit__(self, *_: object) -> None:
        thread_state.current.draws = self._before


def start_of(tag: _Tag) -> list[int]:
    """Returns the words with which the calls of an op with a seed begin in a dataset's function."""
    return _start(tag, 0, 0)


_eager = _Eager(stream=0)
_datasets = _Eager(stream=2)
_functions: list[weakref.ref[_OfFunction]] = []  # in the order in which they were first called
_waiting: list[Sequence[Any]] = []  # restored counters of functions that were not called yet
_outside = _OfFunction()  # for code that is traced outside of functions, where no variable can be advanced


def _of_function(running: modes.Running | None) -> _OfFunction:
    if running is None:
        return _outside
    numbers: _OfFunction | None = running.code.random_numbers
    if numbers is not None:
        return numbers
    with _lock:
        numbers = running.code.random_numbers
        if numbers is None:
            numbers = running.code.random_numbers = _OfFunction(running.code.name)
            _functions.append(weakref.ref(numbers))
            for saved in list(_waiting):
                if saved[0] == numbers.name:  # the first of this name gets the first counters of this name
                    numbers.restore(saved)
                    _waiting.remove(saved)
                    break
    return numbers


def global_seed() -> int | None:
    """Returns the seed of the last call of `set_seed`."""
    return _seed


def set_seed(seed: int | None) -> None:
    """Sets the seed of the functions of this module, and of datasets that are shuffled without a seed.

    All counters start again, also those of functions. With None the numbers differ in each run of a program.
    """
    global _seed
    with _lock:
        _seed = None if seed is None else int(seed)
        _eager.reset()
        _datasets.reset()
        _waiting.clear()
        for numbers in _living():
            numbers.reset()


def _living() -> list[_OfFunction]:
    _functions[:] = [reference for reference in _functions if reference() is not None]
    return [numbers for reference in _functions if (numbers := reference()) is not None]


def _told(tag: _Tag) -> list[object]:
    return [tag[0], None if tag[1] is None else np.dtype(as_dtype(tag[1])).name, tag[2]] if tag else []


def _tag(told: Sequence[Any]) -> _Tag:
    return (told[0], None if told[1] is None else as_dtype(told[1]), told[2]) if told else ()


class AllCounters:
    """All counters, as checkpoints have them."""

    drawn_by_input: tracebacks.Origin | None = None

    def save(self) -> dict[str, object]:
        with _lock:
            own = {"seed": _seed, "eager": _eager.save(), "datasets": _datasets.save()}
            return {**own, "functions": [numbers.save() for numbers in _living()]}

    def restore(self, state: dict[str, Any]) -> None:
        global _seed
        with _lock:
            _seed = state["seed"]
            _eager.restore(state["eager"])
            _datasets.restore(state["datasets"])
            _waiting[:] = state["functions"]
            for numbers in _living():
                found = next((saved for saved in _waiting if saved[0] == numbers.name), None)
                if found is None:
                    numbers.reset()
                else:
                    numbers.restore(found)
                    _waiting.remove(found)


all_counters = AllCounters()


def _dataset_seed() -> int | None:
    """Returns a seed for a dataset that was given none, if `set_seed` was called."""
    modes.check_state()
    if _seed is None:
        return None
    start, count = _datasets.take((), 0)
    return int(np.random.SeedSequence([*start, count]).generate_state(1, np.uint64)[0])


use_default_seed(_dataset_seed)
