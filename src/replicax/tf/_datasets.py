"""`tf.data`: datasets whose functions are traced once and compiled, as in TensorFlow.

A function of elements is compiled for the CPU, and computes many elements at once, if its arguments are arrays of
numbers of known shapes and nothing in it needs a value: no strings, no Python function, no shape that depends on data.
Any other function runs in Python for each element.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import itertools
import logging
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.tf import _host, _imports, _random_keys
from replicax.tf._block_functions import BlockFunction, signature
from replicax.tf._core import (
    Draws,
    ElementFunction,
    FunctionSeeds,
    Leaf,
    Nested,
    Pool,
    Reading,
    Signature,
    TensorSpec,
    Tree,
    Variant,
    as_array,
    call_user,
    data,
    equations,
    files,
    flatten,
    frames,
    jax_internals,
    modes,
)
from replicax.tf._ops import convert_to_tensor

# A function is compiled for so many signatures of elements, such as those of full and of last batches. Elements of
# further signatures, such as images of many sizes, are not worth a compilation each.
_SIGNATURES = 4
# The number of elements of a block: as many as have this many bytes, within limits.
_BLOCK_BYTES, _BLOCK = 1 << 20, 128

_log = logging.getLogger(data.__name__)


class NotTraceable(Exception):
    """The function cannot be compiled: it runs in Python instead."""


@functools.cache
def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which JAX computes on the CPU."""
    if jax.config.jax_default_device is None and jax.default_backend() == "cpu":  # type: ignore[attr-defined]
        return _here  # it does so already, and to say it again takes its time
    result: contextlib.AbstractContextManager[object] = jax.default_device(_cpu())
    return result


_here = contextlib.nullcontext()


def _arguments(element: Tree) -> tuple[Tree, ...]:
    return element if type(element) is tuple else (element,)


class _Draws:
    """The random numbers of one pass over a dataset: the words of each counter, without the element's number."""

    _numbers = itertools.count()

    def __init__(self, reading: Reading, seeds: FunctionSeeds):
        self.number = next(self._numbers)
        reading.begin(seeds)  # here and not in a thread of `map`, since readings come to their memories in order
        self._words = functools.cache(lambda tag: reading.words(seeds, _random_keys.start_of(tag) if tag else None))

    def words(self, tag: Any) -> np.ndarray:
        """Returns the words with which calls of this tag begin."""
        found: np.ndarray = self._words(tag)
        return found


class TracedFunction(BlockFunction):
    """A user's function of elements, compiled where it can be."""

    together = 8
    is_of_tensors = True

    def __init__(self, method: str, argument: str, function: Callable[..., Tree], with_element: bool = False):
        super().__init__(method, argument, function, with_element)
        self._seeds = FunctionSeeds(_random_keys.global_seed())
        self.memories = (self._seeds,)
        self._numbers = _random_keys.OfElements()
        self._code = modes.PythonCode(function, autograph=True)
        self._code.random_numbers = self._numbers
        self._programs: dict[Signature, _Program | None] = {}
        self._lock = threading.Lock()

    def preparation(self) -> Callable[[], object]:
        return functools.partial(_prepare_process, _imports.is_installed())

    def draws(self, reading: Reading) -> _Draws:
        return _Draws(reading, self._seeds)

    def called(self, element: Tree) -> Any:
        with _host.computing(), _on_cpu():
            return call_user(self.role, self.function, *_arguments(_host.as_hosted(element)))

    def __call__(self, element: Tree, number: int = 0, draws: Draws | None = None) -> Tree:
        words = (lambda tag: np.zeros(2, np.uint32)) if draws is None else draws.words
        with self._code.entered(), _random_keys.drawing_for(number, words):
            return super().__call__(element)

    def spec_of(self, element: Tree) -> Tree:
        kind = signature(element)
        if kind is not None and (traced := self._traced(kind)) is not None:
            return traced.structure.unflatten([TensorSpec(s.shape, s.dtype) for s in traced.jaxpr.out_avals])
        return super().spec_of(element)

    def program(self, kind: Signature) -> _Program | None:
        with self._lock:
            if kind not in self._programs:
                compiled = sum(program is not None for program in self._programs.values())
                traced = self._traced(kind) if compiled < _SIGNATURES else None
                self._programs[kind] = None if traced is None else _Program(traced, kind)
            return self._programs[kind]

    def _traced(self, kind: Signature) -> _Traced | None:
        try:
            return _Traced(self, self._code, self._numbers, kind)
        except (Exception, modes.CreatesVariables) as error:
            _log.debug("%s runs in Python: %s", self.role, error)
            return None


class _NoKeras(importlib.abc.MetaPathFinder):
    """Refuses Keras, whose settings and random numbers are those of the program's process."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raises ImportError for Keras; finds nothing."""
        if name == "keras":
            raise ImportError("Keras belongs to the program's own process", name=name)


def _prepare_process(installed: bool) -> None:
    """Prepares this process for functions of another one, whose state it does not have."""
    if installed:
        _imports.install()
    if not any(isinstance(finder, _NoKeras) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoKeras())
    modes.refuse_state("The state of a program is in its own process: another one would not see what changes.")


class _Traced:
    """A function of one element as a jaxpr, and the calls that draw random numbers in it."""

    def __init__(self, of: ElementFunction, code: modes.PythonCode, numbers: _random_keys.OfElements, kind: Signature):
        structure, leaves = kind
        level = frames.TraceFrame(local=False)

        def traced(*tracers: jax.Array) -> list[jax.Array]:
            level.trace = frames.untaped_trace()
            element = structure.unflatten(tracers)
            with frames.entered(level), code.entered():
                result = _tensors(call_user(of.role, lambda: code.call(_arguments(element), {})))
            arrays, self.structure = flatten((element, result) if of.with_element else result)
            return arrays

        with jax.default_device(_cpu()):
            # Arrays, since JAX narrows a `ShapeDtypeStruct` of a 64-bit dtype.
            self.jaxpr = jax.make_jaxpr(traced)(*[as_array(np.zeros(*leaf)) for leaf in leaves])
        self._level = level
        # The counters that are read, each with its input.
        self.counters = []
        for key, variable in level.variables.items():
            tag = numbers.tag_of(variable)
            if tag is None:
                raise NotTraceable("it uses a variable")
            self.counters.append((tag, level.inputs[key][0]))
        if any(jax_internals.callback_of(eqn) is not None for eqn in equations(self.jaxpr)):
            raise NotTraceable("it calls Python code")

    def run(self, words: jax.Array, number: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        """Computes the function of one element in a program; `words` are those of each counter."""
        states = [jax.numpy.stack([w[0] + number, w[1], np.uint32(0)]) for w in words]
        supplied = {slot: state for (_, slot), state in zip(self.counters, states)}
        return self._level.replay(self.jaxpr, supplied, *arrays)


def _tensors(result: Tree) -> Tree:
    """Returns what a function returned with tensors for leaves, as `calls.call_to_host` has them on the host."""

    def tensor(leaf: Leaf) -> jax.Array:
        if isinstance(leaf, Nested):
            raise NotTraceable("it returns a dataset")
        array = convert_to_tensor(leaf)
        if not isinstance(array, jax.Array):
            raise NotTraceable("it returns strings")
        return array

    result = tuple(result) if isinstance(result, list) else result
    return jax.tree.map(tensor, result, is_leaf=lambda v: isinstance(v, list))


class _Program:
    """A function compiled for blocks of elements of one signature."""

    def __init__(self, traced: _Traced, kind: Signature):
        self._traced, self._pool = traced, Pool()
        given = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kind[1])
        made = sum(math.prod(s.shape) * s.dtype.itemsize for s in traced.jaxpr.out_avals)
        self.size = min(_BLOCK, max(1, _BLOCK_BYTES // max(given, made, 1)))
        self._run = jax.jit(jax.vmap(traced.run, in_axes=(None, 0, *(0 for _ in kind[1]))))

    def __call__(self, block: Tree, first: int, draws: Draws | None) -> Tree:
        assert draws is not None
        words = np.array([draws.words(tag) for (tag, _), _ in self._traced.counters], np.uint32).reshape(-1, 2)
        numbers = (first + np.arange(self.size)).astype(np.uint32)
        arrays = [self._pool.on_device(np.asarray(leaf), _cpu()) for leaf in flatten(block)[0]]
        return self._traced.structure.unflatten([np.asarray(leaf) for leaf in self._run(words, numbers, *arrays)])


class Dataset(data.Dataset):
    """`replicax.data.Dataset`, except that functions are traced and compiled where they can be, as in TensorFlow."""

    _functions = TracedFunction

    def cardinality(self, name: str | None = None) -> jax.Array:  # type: ignore[override]
        """Returns the number of elements as a tensor; -1 for no end, -2 for not known."""
        with jax_internals.untraced():  # in a function too it is known
            return convert_to_tensor(super().cardinality())


Dataset._dataset = Dataset


class FixedLengthRecordDataset(files.FixedLengthRecordDataset, Dataset):
    """`replicax.data.FixedLengthRecordDataset` as a `tf.data.Dataset`."""


class TextLineDataset(files.TextLineDataset, Dataset):
    """`replicax.data.TextLineDataset` as a `tf.data.Dataset`."""


class TFRecordDataset(files.TFRecordDataset, Dataset):
    """`replicax.data.TFRecordDataset` as a `tf.data.Dataset`."""


Counter = Dataset.counter


def from_variant(variant: Variant, structure: Tree) -> Dataset:
    """Returns the dataset of a value; `structure` is its elements' spec."""
    return Dataset(variant)
