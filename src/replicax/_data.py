"""Datasets over host data, with tf.data's names.

A `Dataset` is a recipe: a function that makes an iterator over elements, together with what is known of the elements
beforehand (`element_spec`, `cardinality`, the batch size). Each transformation wraps that function in another one.
Elements are structures of numpy arrays throughout; only the user's functions and the user's loop see tensors.

Rows that lie in arrays are not moved one by one. Such a dataset also carries `_Rows`: the order of its rows as chunks
of row numbers, and a function from row numbers to rows. `shuffle`, `repeat`, `take` and their like act on the numbers
alone, and `batch` fetches the rows of a whole batch at once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import InvalidArgumentError, OutOfRangeError
from ._specs import PYTHON_DTYPES, TensorShape, TensorSpec, as_dtype, dtype_name, spec_of
from ._types import AutoShardPolicy

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
AUTOTUNE = -1

# How many row numbers are handled at once; large enough that Python's part does not count.
_CHUNK = 1 << 13
# How many inputs `interleave` reads at a time where it is not told: fixed, so that the order is the same everywhere.
_CYCLE_LENGTH = 8

Maker = Callable[[], Iterator[Any]]


# --- values ---------------------------------------------------------------------------------------------------------


def wide_dtypes() -> bool:
    """Whether JAX keeps an explicit 64-bit dtype."""
    config: Any = jax.config  # its options are not declared
    return bool(config.jax_enable_x64) or getattr(config.jax_explicit_x64_dtypes, "name", "") == "ALLOW"


def tensor_dtype(dtype: Any) -> Any:
    """The dtype that `as_tensor` gives to an array of `dtype`."""
    return dtype if dtype == np.dtype(object) or wide_dtypes() else jax.dtypes.canonicalize_dtype(dtype)


class Strings(np.ndarray):
    """Strings, which JAX has no arrays of: numpy's, with a tensor's `numpy()`."""

    def numpy(self) -> np.ndarray:
        """The array itself, as numpy's own."""
        return np.asarray(self)


def as_tensor(array: np.ndarray) -> Any:
    """A host array as users see it: a JAX array, 64 bits wide where JAX allows that. Strings stay numpy's."""
    if array.dtype == np.dtype(object):
        return array.view(Strings)
    return jnp.asarray(array, dtype=tensor_dtype(array.dtype))


def tensor_spec(spec: Any) -> Any:
    """The specs of what `as_tensor` makes of elements of `spec`."""
    return jax.tree.map(lambda s: TensorSpec(s.shape, tensor_dtype(s.dtype), s.name), spec)


def as_host(value: Any) -> np.ndarray:
    """One array, number, string, nested list of those, or another library's tensor, as a numpy array.

    Python's numbers get the dtypes of tensors (int32, float32), strings become bytes in an array of objects.
    """
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "detach"):  # PyTorch
        array = value.detach().cpu().numpy()
    elif callable(getattr(value, "numpy", None)):  # TensorFlow
        array = np.asarray(value.numpy())
    else:
        array = np.asarray(value)
        array = array.astype(_python_dtype(value, array), copy=False)
    if array.dtype.kind == "S":
        return array.astype(object)
    return _bytes(array) if array.dtype.kind in "OU" else array


def _python_dtype(value: Any, array: np.ndarray) -> Any:
    """The dtype for `value`, which became `array`: the tensors' if it is made of Python's own numbers."""
    while isinstance(value, (list, tuple)) and len(value):
        value = value[0]
    if isinstance(value, np.generic) or not isinstance(value, (list, tuple, *PYTHON_DTYPES)):
        return array.dtype
    narrow = {"i": np.int32, "f": np.float32, "c": np.complex64}.get(array.dtype.kind, array.dtype)
    # An integer that does not fit stays wide, rather than becoming another one.
    return narrow if narrow != np.int32 or (array.astype(np.int32) == array).all() else array.dtype


def _bytes(array: np.ndarray) -> np.ndarray:
    flat = [v.encode() if isinstance(v, str) else v for v in array.ravel()]
    for v in flat:
        if not isinstance(v, bytes):
            raise TypeError(
                f"Elements of a dataset are made of arrays, numbers and strings, got {type(v).__name__}: {v!r:.80}. "
                "Convert it to an array before."
            )
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(array.shape)


def host_structure(value: Any) -> Any:
    """`value` with every leaf on the host. As in tf.data a list is one tensor, not a structure."""
    return jax.tree.map(as_host, value, is_leaf=lambda v: isinstance(v, list))


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)


def num_rows(block: Any) -> int:
    """The first dimension of a structure of arrays."""
    return int(jax.tree.leaves(block)[0].shape[0])


def regroup(blocks: Iterable[Any], sizes: Iterable[int]) -> Iterator[Any]:
    """Blocks of rows cut anew: one piece for each of `sizes` (endless), in order, and the last one shorter.

    >>> [piece.tolist() for piece in regroup([np.arange(4), np.arange(4, 6)], itertools.cycle([3, 1]))]
    [[0, 1, 2], [3], [4, 5]]
    """
    sizes = iter(sizes)
    size, pending, count = next(sizes), [], 0
    for block in blocks:
        pending.append(block)
        count += num_rows(block)
        if count < size:
            continue
        whole, start = _concatenate(pending), 0
        while count - start >= size:
            yield _cut(whole, start, start + size)
            start += size
            size = next(sizes)
        count -= start
        pending = [_cut(whole, start, None)] if count else []
    if count:
        yield _concatenate(pending)


def _cut(block: Any, start: int, stop: int | None) -> Any:
    return jax.tree.map(lambda a: a[start:stop], block)


def _concatenate(blocks: list[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    try:
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *blocks)
    except ValueError as e:
        shapes = [jax.tree.map(np.shape, block) for block in blocks[:4]]
        raise InvalidArgumentError(f"Batches of shapes {shapes} cannot be joined and cut anew: {e}") from e


def _stack(elements: list[Any]) -> Any:
    leaves, structure = zip(*map(_flatten, elements))
    for number, arrays in enumerate(zip(*leaves)):
        for i, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise InvalidArgumentError(
                    f"Cannot batch tensors with different shapes in component {number}. First element had shape "
                    f"{list(arrays[0].shape)} and element {i} had shape {list(array.shape)}. Use `padded_batch`, or "
                    "`map` the elements to one shape."
                )
    return structure[0].unflatten([np.stack(arrays) for arrays in zip(*leaves)])


# --- what is known of elements ---------------------------------------------------------------------------------------


class _Probing(threading.local):
    """Whether this thread only looks at a dataset's first element, which must not count as one of its passes."""

    on = False


_probing = _Probing()


def shown_spec(element: Any) -> Any:
    """The spec that an element shows. Its first dimensions count as unknown: those of the next may differ."""
    return jax.tree.map(lambda a: TensorSpec((None, *a.shape[1:]) if a.ndim else (), a.dtype), element)


def first_spec(make: Maker) -> Any:
    """The spec that the first element shows."""
    _probing.on = True
    try:
        for element in make():
            return shown_spec(element)
    finally:
        _probing.on = False
    raise InvalidArgumentError(
        "element_spec cannot be told: it would be read off the first element, and there is none."
    )


def _result_spec(call: Callable[[Any], Any], spec: Any, make: Maker) -> Any:
    """The spec of `call`'s results, from calls on zeros: a dimension is unknown if it changes with an unknown one."""
    unknown = any(not s.shape.is_fully_defined() for s in jax.tree.leaves(spec))
    try:
        return jax.tree.map(
            _common_spec, *[spec_of(call(_zeros(spec, size))) for size in ((2, 3) if unknown else (2, 2))]
        )
    except Exception:  # whatever a function may raise that was not meant for zeros: see what it does on data
        return first_spec(make)


def _zeros(spec: Any, size: int) -> Any:
    def zeros(s: TensorSpec) -> np.ndarray:
        shape = [size if d is None else d for d in s.shape.as_list()]
        return np.full(shape, b"", object) if s.dtype == np.dtype(object) else np.zeros(shape, s.dtype)

    return jax.tree.map(zeros, spec)


def _common_spec(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    if a.shape.rank != b.shape.rank or None in (a.shape.rank, b.shape.rank):
        return TensorSpec(None, a.dtype)
    return TensorSpec([x if x == y else None for x, y in zip(a.shape, b.shape)], a.dtype)


def _with_batch(spec: Any, size: int | None) -> Any:
    def grow(s: TensorSpec) -> TensorSpec:
        return TensorSpec(None if s.shape.rank is None else (size, *s.shape), s.dtype)

    return jax.tree.map(grow, spec)


def _without_batch(spec: Any) -> Any:
    return jax.tree.map(lambda s: TensorSpec(s.shape[1:], s.dtype), spec)


# --- options ---------------------------------------------------------------------------------------------------------


class DistributeOptions:
    """How a dataset is divided among workers: `Options.experimental_distribute`."""

    __slots__ = ("_auto_shard_policy", "num_devices")

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None
        self.num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The policy, AUTO if not set."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        self._auto_shard_policy = AutoShardPolicy(policy)


class Options:
    """Options of a dataset. Only `experimental_distribute` takes effect; tf.data's others are accepted.

    >>> import replicax as rx
    >>> options = rx.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.OFF
    >>> dataset = rx.data.Dataset.range(4).batch(2).with_options(options)
    >>> dataset.options().experimental_distribute.auto_shard_policy.name
    'OFF'
    """

    _PLAIN = (
        "deterministic",
        "experimental_deterministic",
        "experimental_external_state_policy",
        "experimental_slack",
        "experimental_symbolic_checkpoint",
        "experimental_threading",
        "experimental_warm_start",
        "framework_type",
        "dataset_name",
    )
    __slots__ = ("experimental_distribute", "autotune", "threading", "experimental_optimization", *_PLAIN)

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()
        self.autotune = types.SimpleNamespace()
        self.threading = types.SimpleNamespace()
        self.experimental_optimization = types.SimpleNamespace()
        for name in self._PLAIN:
            setattr(self, name, None)

    def merge(self, options: Options) -> Options:
        """New options: these, with what is set in `options` in place of what is set here."""
        merged = copy.deepcopy(self)
        for name in self._PLAIN:
            if getattr(options, name) is not None:
                setattr(merged, name, getattr(options, name))
        for name in ("autotune", "threading", "experimental_optimization"):
            vars(getattr(merged, name)).update(vars(getattr(options, name)))
        for name in DistributeOptions.__slots__:
            if getattr(options.experimental_distribute, name) is not None:
                setattr(merged.experimental_distribute, name, getattr(options.experimental_distribute, name))
        return merged


# --- iterating -------------------------------------------------------------------------------------------------------


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

    def __init__(self, dataset: Dataset):
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


def _call(function: Callable[..., Any], element: Any) -> Any:
    """The user's function on an element: a tuple is passed as several arguments, anything else as one."""
    with _on_host():
        tensors = jax.tree.map(as_tensor, element)
        return function(*tensors) if type(tensors) is tuple else function(tensors)


def _call_to_host(function: Callable[..., Any], element: Any) -> Any:
    result = _call(function, element)
    # As in tf.data, a list of results is several tensors, and deeper down a list is one.
    return host_structure(tuple(result) if isinstance(result, list) else result)


# --- rows ------------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows that lie in arrays: their numbers in the order of the dataset, and how to fetch them."""

    fetch: Callable[[Any], Any]  # one number gives one element, an array of numbers gives a block
    order: Callable[[], Iterator[np.ndarray]]
    in_order: bool = False  # whether the order is still 0, 1, 2, ...

    def elements(self) -> Iterator[Any]:
        for numbers in self.order():
            for number in numbers.tolist():
                yield self.fetch(number)


def _plain_rows(fetch: Callable[[Any], Any], count: int) -> _Rows:
    def order() -> Iterator[np.ndarray]:
        for start in range(0, count, _CHUNK):
            yield np.arange(start, min(start + _CHUNK, count))

    return _Rows(fetch, order, in_order=True)


def _fetch_from(arrays: Any) -> Callable[[Any], Any]:
    """How to fetch rows of a structure of arrays. Rows in a row are a view, which costs nothing; others a copy."""
    leaves, structure = _flatten(arrays)

    def fetch(numbers: Any) -> Any:
        if isinstance(numbers, int):
            return structure.unflatten([a[numbers, ...] for a in leaves])
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
            return structure.unflatten([a[first : last + 1] for a in leaves])
        return structure.unflatten([a.take(numbers, axis=0) for a in leaves])

    return fetch


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: elements are views of the source, and must not be a way to change it."""
    view = array.view()
    view.flags.writeable = False
    return view


def _take_rows(order: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    for numbers in order if count > 0 else ():
        yield numbers[:count]
        count -= len(numbers)
        if count <= 0:
            return


def _skip_rows(order: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    for numbers in order:
        if count < len(numbers):
            yield numbers[count:]
        count = max(0, count - len(numbers))


def _shard_rows(order: Iterator[np.ndarray], num_shards: int, index: int) -> Iterator[np.ndarray]:
    seen = 0
    for numbers in order:
        mine = numbers[(index - seen) % num_shards :: num_shards]
        if len(mine):
            yield mine
        seen += len(numbers)


def _shuffle_rows(order: Iterator[np.ndarray], size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """`_shuffle` for chunks of row numbers: the same procedure, a whole chunk at a time."""
    chunks = regroup(order, itertools.chain([size], itertools.repeat(_CHUNK)))
    buffer = np.array(next(chunks, ()), np.int64)
    for incoming in chunks:
        slots = rng.integers(len(buffer), size=len(incoming))
        # What leaves at time t is what came into the same slot last before t, or else what was there at the start.
        by_slot = np.argsort(slots, kind="stable")
        from_start = np.diff(slots[by_slot], prepend=-1) != 0
        before = incoming[np.roll(by_slot, 1)]
        leaving = np.empty_like(incoming)
        leaving[by_slot] = np.where(from_start, buffer[slots[by_slot]], before)
        buffer[slots] = incoming  # where a slot comes twice, numpy keeps the last
        yield leaving
    if len(buffer):
        yield rng.permutation(buffer)


def _shuffle(elements: Iterator[Any], size: int, rng: np.random.Generator) -> Iterator[Any]:
    """Each element that comes in takes the place of a random one of the buffer, which goes out."""
    buffer = list(itertools.islice(elements, size))
    for element in elements:
        slot = rng.integers(len(buffer))
        leaving, buffer[slot] = buffer[slot], element
        yield leaving
    for slot in rng.permutation(len(buffer)):
        yield buffer[slot]


class _Passes:
    """The random numbers of each pass over a shuffled dataset: new ones, unless it shall not be reshuffled."""

    def __init__(self, seed: int | None, reshuffle: bool):
        entropy: Any = np.random.SeedSequence().entropy
        self._seed: int = entropy if seed is None else int(seed) % 2**64
        self._reshuffle = reshuffle
        self._passes = 0

    def __call__(self) -> np.random.Generator:
        number = self._passes if self._reshuffle else 0
        if not _probing.on:
            self._passes += 1
        return np.random.default_rng([self._seed, number])


def _repeated(make: Maker, count: int) -> Iterator[Any]:
    for _ in itertools.repeat(None) if count < 0 else range(count):
        empty = True
        for element in make():
            empty = False
            yield element
        if empty:
            return  # or else repeating nothing would never end


def _cached(make: Maker) -> Maker:
    """Keeps what the first complete pass yields."""
    kept: list[Any] | None = None

    def elements() -> Iterator[Any]:
        nonlocal kept
        if kept is not None:
            yield from kept
            return
        seen = []
        for element in make():
            seen.append(element)
            yield element
        kept = seen

    return elements


def _grouped(elements: Iterator[Any], size: int, drop_remainder: bool) -> Iterator[list[Any]]:
    while group := list(itertools.islice(elements, size)):
        if len(group) == size or not drop_remainder:
            yield group


def _positive(name: str, value: Any) -> int:
    if int(value) < 1:
        raise InvalidArgumentError(f"{name} must be greater than zero, got {value}.")
    return int(value)


# --- datasets --------------------------------------------------------------------------------------------------------


class Dataset:
    """Elements that are structures of arrays, and transformations of them: tf.data's, over data on the host.

    An element is an array, or a tuple, named tuple or dict of elements. As in tf.data a *list* is one array. Functions
    given to `map`, `filter` and others see tensors; an element that is a tuple comes as several arguments.

    Make one by `from_tensor_slices` and the other static methods. Each `iter` starts anew, and yields tensors;
    `as_numpy_iterator` yields numpy arrays, which may be read-only views of the source.

    >>> import replicax as rx
    >>> dataset = rx.data.Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(6)})
    >>> dataset = dataset.shuffle(6, seed=0).batch(4)
    >>> [batch["x"].shape for batch in dataset]
    [(4,), (2,)]
    """

    def __init__(
        self,
        make: Maker,
        spec: Callable[[bool], Any],
        cardinality: int,
        *,
        batch_size: int | None = None,
        rows: _Rows | None = None,
        options: Options | None = None,
        files: int = 0,
    ):
        # Private: the static methods below are the way in. `spec` gets one argument, whether it may run the users'
        # functions to find the spec out; where it may not and would have to, it returns None.
        self._make = make
        self._find_spec = spec
        self._cardinality = cardinality
        self._batch_size = batch_size  # tf.data's idea of it, where no spec shows it
        self._rows = rows
        self._options = options or Options()
        self._files = files  # how many files it reads, which may be divided among workers; see _files.py
        self._found_spec: Any = None

    def _spec(self, probe: bool) -> Any:
        """The spec of the host's elements, None where it is not known and `probe` is False."""
        if self._found_spec is None:
            self._found_spec = self._find_spec(probe)
        return self._found_spec

    def _derived(
        self, make: Maker, cardinality: int, spec: Callable[[Any], Any] | None = None, **known: Any
    ) -> Dataset:
        """A dataset made of this one; `spec` is a function of this one's."""

        def find(probe: bool) -> Any:
            found = self._spec(probe)
            return found if found is None or spec is None else spec(found)

        return Dataset(make, find, cardinality, options=self._options, files=self._files, **known)

    def _reordered(
        self, transform: Callable[[Maker], Maker], on_rows: Callable[[Maker], Maker], cardinality: int
    ) -> Dataset:
        """A dataset of the same elements in another number or order; `on_rows` does it to row numbers."""
        if self._rows is None:
            return self._derived(transform(self._make), cardinality, batch_size=self._batch_size)
        rows = _Rows(self._rows.fetch, on_rows(self._rows.order))
        return self._derived(rows.elements, cardinality, batch_size=self._batch_size, rows=rows)

    # Sources

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """A dataset of one element."""
        element = jax.tree.map(_read_only, host_structure(tensors))
        spec = spec_of(element)
        return Dataset(lambda: iter([element]), lambda probe: spec, 1)

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """A dataset of the rows of arrays: element i has row i of each.

        The arrays are not copied: do not change them while the dataset is in use.

        >>> list(Dataset.from_tensor_slices(np.arange(3, dtype=np.int32)).as_numpy_iterator())
        [np.int32(0), np.int32(1), np.int32(2)]
        """
        arrays = jax.tree.map(_read_only, host_structure(tensors))
        shapes = {
            f"tensors{jax.tree_util.keystr(path)}": a.shape for path, a in jax.tree_util.tree_leaves_with_path(arrays)
        }
        if not shapes:
            raise InvalidArgumentError(f"from_tensor_slices needs at least one array, got {tensors!r}.")
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            found = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
            raise InvalidArgumentError(
                f"from_tensor_slices needs arrays with one and the same first dimension, got {found}."
            )
        count = num_rows(arrays)
        spec = _without_batch(spec_of(arrays))
        rows = _plain_rows(_fetch_from(arrays), count)
        return Dataset(rows.elements, lambda probe: spec, count, rows=rows)

    @staticmethod
    def range(*args: int, output_type: Any = np.int64, name: str | None = None) -> Dataset:
        """The numbers of Python's `range` with the same arguments, as int64.

        >>> list(Dataset.range(2, 8, 3).as_numpy_iterator())
        [np.int64(2), np.int64(5)]
        """
        numbers, dtype = range(*map(int, args)), as_dtype(output_type)
        start, step = numbers.start, numbers.step
        rows = _plain_rows(lambda i: np.asarray(start + step * np.asarray(i, np.int64)).astype(dtype), len(numbers))
        return Dataset(rows.elements, lambda probe: TensorSpec((), dtype), len(numbers), rows=rows)

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Iterable[Any] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements that `generator(*args)` yields; it is called anew for each pass.

        Args:
            generator: a function that returns something iterable.
            output_types: the elements' dtypes, in their structure.
            output_shapes: their shapes, in the same structure; None where not known.
            args: arguments for `generator`.
            output_signature: `TensorSpec`s in the structure of the elements, in place of the two. Without any of
                these, elements are taken as they come.

        Raises:
            TypeError: `generator` is not callable, or (at iteration) yielded something else than was declared.
        """
        if not callable(generator):
            raise TypeError(
                f"`generator` must be callable, so that each pass can start anew; got {type(generator).__name__}. "
                "Pass the generator function itself, or `lambda: ...`."
            )
        if output_signature is not None and (output_types is not None or output_shapes is not None):
            raise TypeError(
                "The `output_types` and `output_shapes` arguments are ignored with `output_signature`: drop them."
            )
        spec = output_signature
        if output_types is not None:
            structure: Any = jax.tree.structure(output_types)
            shapes = [None] * structure.num_leaves if output_shapes is None else structure.flatten_up_to(output_shapes)
            spec = structure.unflatten(list(map(TensorSpec, shapes, jax.tree.leaves(output_types))))
        arguments = tuple(args or ())

        def make() -> Iterator[Any]:
            for value in generator(*arguments):
                yield host_structure(value) if spec is None else _checked(value, spec)

        def find(probe: bool) -> Any:
            return first_spec(make) if spec is None and probe else spec

        return Dataset(make, find, UNKNOWN_CARDINALITY)

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """The elements of several datasets side by side, in the structure in which the datasets come.

        >>> a, b = Dataset.range(2), Dataset.range(5, 9)
        >>> list(Dataset.zip(a, b).as_numpy_iterator())
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6))]
        """
        tree = datasets if datasets is not None else args[0] if len(args) == 1 else args
        inputs, structure = _flatten(tree)
        for dataset in inputs:
            if not isinstance(dataset, Dataset):
                raise TypeError(f"Dataset.zip takes datasets in tuples or dicts, got {type(dataset).__name__}.")
        if not inputs:
            raise TypeError("Dataset.zip needs at least one dataset.")
        sizes = [d._cardinality for d in inputs]
        cardinality = min((n for n in sizes if n != INFINITE_CARDINALITY), default=INFINITE_CARDINALITY)

        def find(probe: bool) -> Any:
            specs = [d._spec(probe) for d in inputs]
            return None if any(s is None for s in specs) else structure.unflatten(specs)

        batch_size = inputs[0]._batch_size if len({d._batch_size for d in inputs}) == 1 else None
        known: dict[str, Any] = {
            "batch_size": batch_size,
            "options": inputs[0]._options,
            "files": max(d._files for d in inputs),
        }
        sources = [d._rows for d in inputs if d._rows is not None and d._rows.in_order]
        if len(sources) == len(inputs):
            rows = _plain_rows(lambda i: structure.unflatten([s.fetch(i) for s in sources]), cardinality)
            return Dataset(rows.elements, find, cardinality, rows=rows, **known)

        def make() -> Iterator[Any]:
            return map(structure.unflatten, zip(*[d._make() for d in inputs]))

        return Dataset(make, find, cardinality, **known)

    # Batches

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """`batch_size` elements at a time, stacked; the last batch may be smaller, or is dropped.

        >>> list(Dataset.range(5).batch(3).as_numpy_iterator())
        [array([0, 1, 2]), array([3, 4])]
        """
        size = _positive("batch_size", batch_size)
        rows, source = self._rows, self._make

        def make() -> Iterator[Any]:
            if rows is None:
                yield from map(_stack, _grouped(source(), size, drop_remainder))
                return
            for numbers in regroup(rows.order(), itertools.repeat(size)):
                if len(numbers) == size or not drop_remainder:
                    yield rows.fetch(numbers)

        return self._batched(make, size, drop_remainder, lambda s: _with_batch(s, size if drop_remainder else None))

    def _batched(self, make: Maker, size: int, drop: bool, spec: Callable[[Any], Any]) -> Dataset:
        count = self._cardinality
        if count >= 0:
            count = count // size if drop else -(-count // size)
        return self._derived(make, count, spec, batch_size=size)

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Like `batch` for elements of different shapes: each is padded at its ends to the longest of the batch.

        Args:
            batch_size: how many elements a batch has.
            padded_shapes: the shapes to pad to, in the structure of the elements; None and -1 mean the longest.
            padding_values: what to pad with, one for all or in the structure of the elements; zeros by default.
            drop_remainder: whether to drop a last, smaller batch.
        """
        size = _positive("batch_size", batch_size)

        def make() -> Iterator[Any]:
            for group in _grouped(self._make(), size, drop_remainder):
                yield _pad_and_stack(group, padded_shapes, padding_values)

        def spec(found: Any) -> Any:
            leaves, structure = _flatten(found)
            if padded_shapes is None:
                shapes = [TensorShape([None] * s.shape.rank) if s.shape.rank is not None else s.shape for s in leaves]
            else:
                shapes = [_padded_shape(s) for s in structure.flatten_up_to(padded_shapes)]
            padded = [TensorSpec(shape, s.dtype) for shape, s in zip(shapes, leaves)]
            return _with_batch(structure.unflatten(padded), size if drop_remainder else None)

        return self._batched(make, size, drop_remainder, spec)

    def unbatch(self, name: str | None = None) -> Dataset:
        """The rows of each element, one by one."""

        def make() -> Iterator[Any]:
            for element in self._make():
                leaves, structure = _flatten(element)
                if len({a.shape[:1] for a in leaves}) != 1 or not leaves[0].ndim:
                    shapes = [a.shape for a in leaves]
                    raise InvalidArgumentError(
                        f"unbatch needs elements with one and the same first dimension, got shapes {shapes}."
                    )
                for i in range(leaves[0].shape[0]):
                    yield structure.unflatten([a[i, ...] for a in leaves])

        return self._derived(make, UNKNOWN_CARDINALITY, _without_batch)

    def rebatch(self, batch_size: Any, drop_remainder: bool = False, name: str | None = None) -> Dataset:
        """Batches cut anew, to `batch_size` or, where that is a list, to its numbers in turn.

        >>> list(Dataset.range(6).batch(4).rebatch([2, 1]).as_numpy_iterator())
        [array([0, 1]), array([2]), array([3, 4]), array([5])]
        """
        sizes = [_positive("batch_size", n) for n in np.ravel(batch_size)]

        def make() -> Iterator[Any]:
            for piece, size in zip(regroup(self._make(), itertools.cycle(sizes)), itertools.cycle(sizes)):
                if num_rows(piece) == size or not drop_remainder:
                    yield piece

        known = sizes[0] if len(set(sizes)) == 1 else None

        def spec(found: Any) -> Any:
            return _with_batch(_without_batch(found), known if drop_remainder else None)

        return self._derived(make, UNKNOWN_CARDINALITY, spec, batch_size=known)

    # Functions of elements

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        synchronous: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """`map_func` of each element, in turn. After `batch` it is called once a batch, which is much faster.

        >>> list(Dataset.range(3).map(lambda x: x * 2).as_numpy_iterator())[-1].item()
        4
        """
        call = functools.partial(_call_to_host, map_func)

        def make() -> Iterator[Any]:
            return map(call, self._make())

        def find(probe: bool) -> Any:
            return _result_spec(call, self._spec(True), make) if probe else None

        return Dataset(make, find, self._cardinality, options=self._options, files=self._files)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements for which `predicate` is true."""

        def make() -> Iterator[Any]:
            return (element for element in self._make() if bool(np.asarray(_call(predicate, element))))

        return self._derived(make, UNKNOWN_CARDINALITY, batch_size=self._batch_size)

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """The elements of the datasets that `map_func` makes of each element, one dataset after the other."""
        return self.interleave(map_func, cycle_length=1)

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements of the datasets that `map_func` makes, taken from `cycle_length` of them in turn."""
        cycle = _CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else _positive("cycle_length", cycle_length)
        block = 1 if block_length is None else _positive("block_length", block_length)

        def open_next(inputs: Iterator[Any]) -> Iterator[Any] | None:
            for element in inputs:
                dataset = _call(map_func, element)
                if not isinstance(dataset, Dataset):
                    raise TypeError(
                        f"`map_func` must return a Dataset here, got {type(dataset).__name__}. Use `map` for elements."
                    )
                return dataset._make()
            return None

        def make() -> Iterator[Any]:
            inputs = self._make()
            slots = [open_next(inputs) for _ in range(cycle)]
            while any(slot is not None for slot in slots):
                for i, slot in enumerate(slots):
                    if slot is None:
                        continue
                    taken = 0
                    for element in itertools.islice(slot, block):
                        taken += 1
                        yield element
                    if taken < block:
                        slots[i] = open_next(inputs)

        return Dataset(
            make, lambda probe: first_spec(make) if probe else None, UNKNOWN_CARDINALITY, options=self._options
        )

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any], name: str | None = None) -> Any:
        """The last of the states that `state = reduce_func(state, element)` goes through.

        >>> int(Dataset.range(4).reduce(np.int32(0), lambda total, x: total + x))
        6
        """
        return fold(self, initial_state, reduce_func)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """`transformation_func` of this dataset."""
        return transformation_func(self)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs of a number (int64, from `start`) and an element."""
        numbers = Dataset(
            lambda: (np.asarray(i, np.int64) for i in itertools.count(start)),
            lambda probe: TensorSpec((), np.int64),
            INFINITE_CARDINALITY,
        )
        return Dataset.zip(numbers, self)._with(self._options)

    # Number and order of elements

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Dataset:
        """The elements in random order, drawn from a buffer of `buffer_size`; one of the whole size shuffles fully.

        Args:
            buffer_size: how many elements wait in the buffer.
            seed: makes the orders the same in each program; without one they differ.
            reshuffle_each_iteration: whether each pass has an order of its own.
        """
        size = _positive("buffer_size", buffer_size)
        passes = _Passes(seed, reshuffle_each_iteration is None or bool(reshuffle_each_iteration))
        return self._reordered(
            lambda make: lambda: _drawn(_shuffle, make, size, passes),
            lambda order: lambda: _drawn(_shuffle_rows, order, size, passes),
            self._cardinality,
        )

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """`count` passes one after the other; without end if it is None or -1."""
        times = -1 if count is None else int(count)
        cardinality = self._cardinality
        if times == 0 or cardinality == 0:
            cardinality = 0
        elif times < 0:
            cardinality = INFINITE_CARDINALITY
        elif cardinality > 0:
            cardinality *= times
        again = lambda make: lambda: _repeated(make, times)  # noqa: E731
        return self._reordered(again, again, cardinality)

    def take(self, count: int, name: str | None = None) -> Dataset:
        """The first `count` elements; all if it is -1."""
        if count < 0:
            return self
        known = count if self._cardinality == INFINITE_CARDINALITY else min(count, self._cardinality)
        return self._reordered(
            lambda make: lambda: itertools.islice(make(), count),
            lambda order: lambda: _take_rows(order(), count),
            known,
        )

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """All but the first `count` elements; none if it is -1."""
        if count < 0:
            return self.take(0)
        return self._reordered(
            lambda make: lambda: itertools.islice(make(), count, None),
            lambda order: lambda: _skip_rows(order(), count),
            self._cardinality if self._cardinality < 0 else max(0, self._cardinality - count),
        )

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Every `num_shards`-th element, from number `index` on."""
        num_shards, index = _positive("num_shards", num_shards), int(index)
        if not 0 <= index < num_shards:
            raise InvalidArgumentError(f"index must be between 0 and {num_shards - 1} = num_shards - 1, got {index}.")
        known = self._cardinality
        return self._reordered(
            lambda make: lambda: itertools.islice(make(), index, None, num_shards),
            lambda order: lambda: _shard_rows(order(), num_shards, index),
            known if known < 0 else -((index - known) // num_shards),
        )

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Keeps the elements of the first complete pass in memory, for the later ones."""
        if filename:
            raise NotImplementedError(f"cache keeps elements in memory only, got the file {filename!r}. Leave it out.")
        return self._reordered(_cached, _cached, self._cardinality)

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """These elements and then those of `dataset`."""

        def make() -> Iterator[Any]:
            return itertools.chain.from_iterable(d._make() for d in (self, dataset))

        def find(probe: bool) -> Any:
            a, b = self._spec(probe), dataset._spec(probe)
            return None if a is None or b is None else jax.tree.map(_common_spec, a, b)

        sizes = (self._cardinality, dataset._cardinality)
        unknown = UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in sizes else sum(sizes)
        return Dataset(
            make,
            find,
            INFINITE_CARDINALITY if INFINITE_CARDINALITY in sizes else unknown,
            batch_size=self._batch_size if self._batch_size == dataset._batch_size else None,
            options=self._options.merge(dataset._options),
            files=self._files + dataset._files,
        )

    def prefetch(self, buffer_size: int | None = None, name: str | None = None) -> Dataset:
        """This dataset. Prefetching belongs to distributed datasets, which do it on their own."""
        return self

    # Facts

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """This dataset with `options` set, on top of those that it has."""
        return self._with(self._options.merge(options))

    def _with(self, options: Options) -> Dataset:
        dataset = copy.copy(self)
        dataset._options = options
        return dataset

    def options(self) -> Options:
        """The options set for this dataset."""
        return copy.deepcopy(self._options)

    @property
    def element_spec(self) -> Any:
        """The shape and dtype of an element's tensors, in the structure of the elements.

        After `map` and its like it is found by calls of the function on zeros, or from the first element.

        >>> Dataset.from_tensor_slices(np.ones((4, 3), np.float32)).batch(2).element_spec
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        """
        return tensor_spec(self._spec(True))

    def cardinality(self, name: str | None = None) -> np.int64:
        """How many elements there are; -1 for no end, -2 for not known."""
        return np.int64(self._cardinality)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """An iterator over the elements as numpy arrays; scalars as numpy scalars."""
        return (jax.tree.map(lambda a: a if a.ndim else a[()], element) for element in self._make())

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self)

    def __bool__(self) -> bool:
        return True  # a dataset is there even if its length is not known, or 0

    def __len__(self) -> int:
        if self._cardinality < 0:
            endless = self._cardinality == INFINITE_CARDINALITY
            raise TypeError("The dataset is infinite." if endless else "The dataset length is unknown.")
        return self._cardinality

    def __repr__(self) -> str:
        spec = self._spec(False)
        return f"<Dataset element_spec={'?' if spec is None else tensor_spec(spec)}>"


def _drawn(
    shuffle: Callable[..., Iterator[Any]], make: Maker, size: int, passes: Callable[[], np.random.Generator]
) -> Iterator[Any]:
    # A generator function, so that a pass counts from its first element: an iterator never used is none.
    yield from shuffle(make(), size, passes())


def fold(elements: Iterable[Any], initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
    """`reduce` of datasets: `reduce_func(state, element)` over the elements, with tensors for states."""

    def tensors(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else as_tensor(as_host(leaf)), state)

    state = tensors(initial_state)
    for element in elements:
        state = tensors(reduce_func(state, element))
    return state


def _checked(value: Any, spec: Any) -> Any:
    """What a generator yielded, as arrays of the declared dtypes and shapes."""
    structure: Any = jax.tree.structure(spec)
    try:
        leaves = structure.flatten_up_to(value)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that did not match the expected structure. "
            f"The expected structure was {spec}, but the yielded element was {value!r}."
        ) from e
    return structure.unflatten([_checked_leaf(leaf, s) for leaf, s in zip(leaves, jax.tree.leaves(spec))])


def _checked_leaf(value: Any, spec: TensorSpec) -> np.ndarray:
    try:
        array = as_host(value)
        array = array if array.dtype == spec.dtype else array.astype(spec.dtype)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that could not be converted to the expected type. "
            f"The expected type was {dtype_name(spec.dtype)}, but the yielded element was {value!r}."
        ) from e
    if not spec.shape.is_compatible_with(array.shape):
        raise TypeError(
            f"`generator` yielded an element of shape {array.shape} where an element of shape {spec.shape} was "
            "expected."
        )
    return array


def _padded_shape(shape: Any) -> TensorShape:
    return TensorShape([None if d is None or d == -1 else d for d in np.atleast_1d(np.array(shape, object))])


def _pad_and_stack(elements: list[Any], shapes: Any, values: Any) -> Any:
    leaves, structures = zip(*map(_flatten, elements))
    structure, count = structures[0], len(leaves[0])
    all_shapes = [None] * count if shapes is None else [_padded_shape(s) for s in structure.flatten_up_to(shapes)]
    one_value = values is None or jax.tree.structure(values) != structure
    all_values = [values] * count if one_value else jax.tree.leaves(values)
    columns = [list(column) for column in zip(*leaves)]
    return structure.unflatten(list(map(_pad_column, columns, all_shapes, all_values)))


def _pad_column(arrays: list[np.ndarray], shape: TensorShape | None, value: Any) -> np.ndarray:
    longest = [max(sizes) for sizes in zip(*(a.shape for a in arrays))]
    if shape is not None:
        longest = [n if wanted is None else wanted for n, wanted in zip(longest, shape, strict=True)]
    if value is None:
        value = b"" if arrays[0].dtype == np.dtype(object) else 0
    out = np.full((len(arrays), *longest), value, arrays[0].dtype)
    for row, array in zip(out, arrays) if longest else ():
        if any(n > room for n, room in zip(array.shape, row.shape)):
            raise InvalidArgumentError(
                f"Attempted to pad to a smaller size than the input element: shape {array.shape} to {row.shape}."
            )
        row[tuple(map(slice, array.shape))] = array
    return out if longest else np.stack(arrays)
