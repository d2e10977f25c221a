"""Part of `Dataset`: sources."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base.errors import InvalidArgumentError
from replicax._base.host_memory import kept
from replicax._base.messages import received, shown
from replicax._base.specs import TensorShape, TensorSpec, as_dtype, dtype_name, spec_of
from replicax._base.tracebacks import origin
from replicax._base.types import Tree
from replicax._data import composites
from replicax._data.base import Base
from replicax._data.calls import call_user
from replicax._data.combine import Combined
from replicax._data.composite_rows import RaggedRow, RaggedRowSpec, host_spec_of
from replicax._data.elements import as_host, host_structure, num_rows, read_only, structure_of
from replicax._data.iterators import Unsure
from replicax._data.ragged import RaggedTensorSpec
from replicax._data.reading import Reading, Seeds, replayed, skipped
from replicax._data.rows import CHUNK, fetch_from, plain_rows
from replicax._data.sparse import SparseTensorSpec
from replicax._data.specs import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, first_spec, without_batch


class Sources(Combined):
    """Methods of `Dataset`."""

    @classmethod
    def from_tensors(cls, tensors: Tree, name: str | None = None) -> Self:
        """Returns a dataset of one element.

        >>> from replicax.data import Dataset
        >>> [x.tolist() for x in Dataset.from_tensors([1, 2])]
        [[1, 2]]
        """
        element = jax.tree.map(read_only, host_structure(tensors))
        spec = spec_of(element)
        return cls._of_list([element], spec)

    @classmethod
    def from_tensor_slices(cls, tensors: Tree, name: str | None = None) -> Self:
        """Returns a dataset of the rows of arrays: element i has row i of each.

        The arrays are not copied: do not change them while the dataset is in use.

        Raises:
            InvalidArgumentError: there is no array, or their first dimensions differ.

        >>> from replicax.data import Dataset
        >>> list(Dataset.from_tensor_slices(np.arange(3, dtype=np.int32)).as_numpy_iterator())
        [np.int32(0), np.int32(1), np.int32(2)]
        """
        arrays = jax.tree.map(read_only, host_structure(tensors))
        found_leaves = jax.tree_util.tree_leaves_with_path(arrays, is_leaf=composites.is_composite)
        shapes = {f"tensors{jax.tree_util.keystr(path)}": tuple(a.shape) for path, a in found_leaves}
        if not shapes:
            raise InvalidArgumentError(f"from_tensor_slices needs at least one array, got {tensors!r:.80}.")
        if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
            found = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
            raise InvalidArgumentError(
                f"from_tensor_slices needs arrays with one and the same first dimension, got {found}."
            )
        count = num_rows(arrays)
        spec = without_batch(spec_of(arrays))
        rows = plain_rows(fetch_from(arrays), count, composites.has_composites(arrays))
        return cls._made(rows.elements, lambda probe: spec, count, rows=rows)

    @classmethod
    def range(cls, *args: int, output_type: DTypeLike = np.int64, name: str | None = None) -> Self:
        """Returns the numbers of Python's `range` with the same arguments, as int64.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(2, 8, 3).as_numpy_iterator())
        [np.int64(2), np.int64(5)]
        """
        numbers = range(*map(int, args))
        return cls._numbers(numbers.start, numbers.step, as_dtype(output_type), len(numbers))

    @classmethod
    def counter(cls, start: int = 0, step: int = 1, dtype: DTypeLike = np.int64, name: str | None = None) -> Self:
        """Returns the numbers `start`, `start + step`, ... without end.

        >>> from replicax.data import Dataset
        >>> list(Dataset.counter(5, -2).take(2).as_numpy_iterator())
        [np.int64(5), np.int64(3)]
        """
        return cls._numbers(int(start), int(step), as_dtype(dtype))

    @classmethod
    def random(
        cls, seed: int | None = None, rerandomize_each_iteration: bool | None = None, name: str | None = None
    ) -> Self:
        """Returns random numbers from 0 to 2**32 - 1, as int64, without end.

        Args:
            seed: makes the numbers the same in each program. They are other ones than TensorFlow's.
            rerandomize_each_iteration: whether each pass has other numbers; by default where there is no seed.

        >>> from replicax.data import Dataset
        >>> first, second = (list(Dataset.random(seed=1).take(2).as_numpy_iterator()) for _ in range(2))
        >>> first == second
        True
        """
        seeds = Seeds(seed, seed is None if rerandomize_each_iteration is None else bool(rerandomize_each_iteration))

        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            generator = reading.generator(seeds)
            while True:
                yield from map(np.asarray, generator.integers(2**32, size=CHUNK, dtype=np.int64))

        return cls._made(make, lambda probe: TensorSpec((), np.int64), INFINITE_CARDINALITY, nodes=[seeds])

    @classmethod
    def list_files(
        cls, file_pattern: object, shuffle: bool | None = None, seed: int | None = None, name: str | None = None
    ) -> Self:
        """Returns the names of the files that match a pattern, or one of several, as strings.

        Args:
            file_pattern: such as `"data/*.txt"`, or a list of these, or a dataset. Where no folder stands before its
                first wildcard, the names begin with `./`.
            shuffle: whether the order is random, another one in each pass; otherwise it is that of the names.
                By default it is.
            seed: makes the orders the same in each program.

        Raises:
            InvalidArgumentError: no file matches.

        >>> import os, tempfile
        >>> from replicax.data import Dataset
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("b.txt", "a.txt"):
        ...     open(os.path.join(folder, name), "w").close()
        >>> files = Dataset.list_files(folder + "/*.txt", shuffle=False)
        >>> [os.path.basename(name) for name in files.as_numpy_iterator()]
        [b'a.txt', b'b.txt']
        """
        patterns = names_of(file_pattern)
        found = sorted({os.fsencode(name) for pattern in patterns for name in _matching(os.fsdecode(pattern))})
        if not found:
            raise InvalidArgumentError(f"No files matched pattern: {', '.join(map(os.fsdecode, patterns))}")

        @skipped
        def make(reading: Reading) -> Iterator[Tree]:
            own = found[reading.share[1] :: reading.share[0]]
            return iter([as_host(name) for name in own])

        spec = TensorSpec((), np.object_)
        dataset = cls._made(make, lambda probe: spec, len(found), files=len(found))
        return dataset if shuffle is not None and not shuffle else dataset.shuffle(len(found), seed)

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Tree]],
        output_types: Tree = None,
        output_shapes: Tree = None,
        args: Iterable[Tree] | None = None,
        output_signature: Tree = None,
        name: str | None = None,
    ) -> Self:
        """Returns the elements that `generator(*args)` yields; it is called anew for each pass.

        Args:
            generator: a function that returns something iterable.
            output_types: the elements' dtypes, in their structure.
            output_shapes: their shapes, in the same structure; None where not known.
            args: arguments for `generator`.
            output_signature: `TensorSpec`s (or `jax.ShapeDtypeStruct`s, or the specs of ragged and sparse tensors) in
                the structure of the elements, in place of the two. Without any of these, elements are taken as they
                come.

        Raises:
            TypeError: `generator` is not callable, or (at iteration) yielded something else than was declared.

        >>> import replicax as rx
        >>> def squares(count):
        ...     yield from (i * i for i in range(count))
        >>> dataset = rx.data.Dataset.from_generator(squares, args=(3,), output_signature=rx.TensorSpec((), "int32"))
        >>> [int(x) for x in dataset]
        [0, 1, 4]
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
        spec = jax.tree.map(_as_spec, output_signature)
        if output_types is not None:
            structure = structure_of(output_types)
            shapes = [None] * structure.num_leaves if output_shapes is None else structure.flatten_up_to(output_shapes)
            spec = structure.unflatten(list(map(TensorSpec, shapes, jax.tree.leaves(output_types))))
        arguments = tuple(args or ())

        def host(value: Tree) -> Tree:
            # It may be a buffer that the generator fills again for the next element.
            return jax.tree.map(kept, host_structure(value) if spec is None else _checked(value, spec))

        @replayed
        def make(reading: Reading) -> Iterator[Tree]:
            iterable = call_user("`generator` of `Dataset.from_generator`", generator, *arguments)
            values = (value for value in iterable)
            yield from reading.guarded(map(host, values))

        def find(probe: bool) -> Tree:
            return first_spec(make) if spec is None and probe else spec

        unsure = [Unsure(f"the generator {shown(generator)}", origin())]
        return cls._made(make, find, UNKNOWN_CARDINALITY, unsure=unsure)


def names_of(files: object) -> list[bytes]:
    """Returns the names in a name, a list or array of them, or a dataset."""
    if isinstance(files, Base):
        return [bytes(name) for name in files.as_numpy_iterator()]
    paths = [os.fspath(f) for f in files] if isinstance(files, list | tuple) else files
    return np.ravel(host_structure(os.fspath(paths) if isinstance(paths, os.PathLike) else paths)).tolist()


def folder_of(pattern: str) -> str | None:
    """Returns the folder before the first wildcard of a pattern, as TensorFlow writes it; None without a wildcard.

    >>> folder_of("data/*/a?.txt"), folder_of("a?.txt"), folder_of("data/a.txt")
    ('data/', './', None)
    """
    fixed = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    return None if fixed == pattern else fixed[: fixed.rfind("/") + 1] or "./"


def _matching(pattern: str) -> list[str]:
    """Returns the files that match a pattern. Their names begin as it does."""
    here = folder_of(pattern) == "./" and not pattern.startswith("./")
    return glob.glob(f"./{pattern}" if here else pattern)


def _as_spec(spec: Tree) -> Tree:
    """Returns a leaf of a signature as a spec; raises TypeError for what is none."""
    if isinstance(spec, (RaggedTensorSpec, SparseTensorSpec)):
        return host_spec_of(spec)
    if isinstance(getattr(spec, "shape", None), TensorShape):
        return spec
    if hasattr(spec, "shape") and hasattr(spec, "dtype"):
        return TensorSpec.from_spec(spec)
    raise TypeError(
        "`output_signature` is a TensorSpec, or a nest of them in the structure of the elements; it has a leaf "
        f"{received(spec)}."
    )


def _checked(value: Tree, spec: Tree) -> Tree:
    """Returns what a generator yielded, as arrays of the declared dtypes and shapes."""
    structure = structure_of(spec)
    try:
        leaves = structure.flatten_up_to(value)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that did not match the expected structure. "
            f"The expected structure was {spec}, but the yielded element was {value!r:.80}."
        ) from e
    return structure.unflatten([_checked_leaf(leaf, s) for leaf, s in zip(leaves, jax.tree.leaves(spec))])


def _checked_leaf(value: Tree, spec: TensorSpec) -> np.ndarray:
    try:
        array: np.ndarray = as_host(value)
        array = array if array.dtype == spec.dtype else array.astype(spec.dtype)
    except (ValueError, TypeError) as e:
        raise TypeError(
            "`generator` yielded an element that could not be converted to the expected type. "
            f"The expected type was {dtype_name(spec.dtype)}, but the yielded element was {value!r:.80}."
        ) from e
    if not spec.shape.is_compatible_with(array.shape):
        raise TypeError(
            f"`generator` yielded an element of shape {array.shape} where an element of shape {spec.shape} was "
            "expected."
        )
    return array.view(RaggedRow) if isinstance(spec, RaggedRowSpec) else array
