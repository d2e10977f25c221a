"""The class `Dataset`, and datasets as values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Self

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from replicax._base.atomic_files import path_text
from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._base.specs import TensorSpec, as_dtype, spec_of
from replicax._base.types import Tree
from replicax._data import composites
from replicax._data.base import Base, Variant
from replicax._data.calls import call_user, fold
from replicax._data.element_files import SavedDataset, checked_compression
from replicax._data.elements import flatten, host_structure, num_rows, read_only, structure_of, tensors_of
from replicax._data.methods import batches, elements, groups, order, saving
from replicax._data.nodes.combine import Choose, Sample, Zip, alike, probabilities
from replicax._data.nodes.functions import node_returned_by
from replicax._data.nodes.node import Node, node_of
from replicax._data.nodes.sources import FileNames, Generated, Items, RandomNumbers, RowSource, count_from
from replicax._data.options import Options
from replicax._data.reading import Reading, Seeds
from replicax._data.rows import fetch_from, plain_rows
from replicax._data.sources import as_spec, matching_files, names_of
from replicax._data.specs import without_batch


class Dataset(Base):
    """Elements that are structures of arrays, and transformations of them: tf.data's, over data on the host.

    An element is an array, or a tuple, named tuple or dict of elements. As in tf.data a *list* is one array. Functions
    given to `map`, `filter` and others see tensors; an element that is a tuple comes as several arguments. The argument
    `name` of methods is accepted for compatibility.

    Make one by `from_tensor_slices` and the other static methods. Each `iter` starts anew, and yields tensors;
    `as_numpy_iterator` yields numpy arrays, which may be read-only views of the source.

    >>> import replicax as rx
    >>> dataset = rx.data.Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(6)})
    >>> dataset = dataset.shuffle(6, seed=0).batch(4)
    >>> [batch["x"].shape for batch in dataset]
    [(4,), (2,)]
    """

    def __init__(self, variant_tensor: Variant):
        if not isinstance(variant_tensor, Variant):
            raise TypeError(
                "`Dataset(variant_tensor)` takes what tf.data.experimental.to_variant returned, got "
                f"{received(variant_tensor)}. To make a dataset of data, use "
                "Dataset.from_tensor_slices or another one of its static methods."
            )
        self._begin(node_of(variant_tensor.dataset), variant_tensor.dataset.options())

    # Sources

    @classmethod
    def from_tensors(cls, tensors: Tree, name: str | None = None) -> Self:
        """Returns a dataset of one element.

        >>> from replicax.data import Dataset
        >>> [x.tolist() for x in Dataset.from_tensors([1, 2])]
        [[1, 2]]
        """
        element = jax.tree.map(read_only, host_structure(tensors))
        return cls._of(Items("from_tensors", [element], spec_of(element)))

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
        rows = plain_rows(fetch_from(arrays), count, composites.has_composites(arrays))
        return cls._of(RowSource("from_tensor_slices", rows, without_batch(spec_of(arrays)), count))

    @classmethod
    def range(cls, *args: int, output_type: DTypeLike = np.int64, name: str | None = None) -> Self:
        """Returns the numbers of Python's `range` with the same arguments, as int64.

        >>> from replicax.data import Dataset
        >>> list(Dataset.range(2, 8, 3).as_numpy_iterator())
        [np.int64(2), np.int64(5)]
        """
        numbers, name = range(*map(int, args)), f"range({', '.join(str(int(n)) for n in args)})"
        return cls._of(count_from(name, numbers.start, numbers.step, as_dtype(output_type), len(numbers)))

    @classmethod
    def counter(cls, start: int = 0, step: int = 1, dtype: DTypeLike = np.int64, name: str | None = None) -> Self:
        """Returns the numbers `start`, `start + step`, ... without end.

        >>> from replicax.data import Dataset
        >>> list(Dataset.counter(5, -2).take(2).as_numpy_iterator())
        [np.int64(5), np.int64(3)]
        """
        return cls._of(count_from(f"counter({start}, {step})", int(start), int(step), as_dtype(dtype)))

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
        again = seed is None if rerandomize_each_iteration is None else bool(rerandomize_each_iteration)
        return cls._of(RandomNumbers(Seeds(seed, again)))

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
        found = sorted({os.fsencode(name) for pattern in patterns for name in matching_files(os.fsdecode(pattern))})
        texts = ", ".join(map(os.fsdecode, patterns))
        if not found:
            raise InvalidArgumentError(f"No files matched pattern: {texts}")
        dataset = cls._of(FileNames(f"list_files({texts})", found))
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
        spec = jax.tree.map(as_spec, output_signature)
        if output_types is not None:
            structure = structure_of(output_types)
            shapes = [None] * structure.num_leaves if output_shapes is None else structure.flatten_up_to(output_shapes)
            spec = structure.unflatten(list(map(TensorSpec, shapes, jax.tree.leaves(output_types))))
        return cls._of(Generated(generator, tuple(args or ()), spec))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        element_spec: Tree = None,
        compression: str | None = None,
        reader_func: Callable[[Self], Self] | None = None,
        wait: bool = False,
    ) -> Self:
        """Returns the dataset that was saved at `path`.

        Args:
            path: the folder that `save` wrote.
            element_spec: what the elements are; by default as they were saved. Named tuples get their class from it.
            compression: accepted for compatibility: the files tell theirs.
            reader_func: takes a dataset of datasets, one for each part, and returns one of elements. By default the
                parts are read in turn, one element of each at a time.
            wait: accepted for compatibility: datasets are there whole, or not at all.

        Raises:
            FileNotFoundError: there is nothing saved there.
            InvalidArgumentError: the elements are others than `element_spec` says.
            DataLossError: files are damaged, missing, or of something else; at iteration too.

        >>> import tempfile
        >>> from replicax.data import Dataset
        >>> path = tempfile.mkdtemp() + "/saved"
        >>> Dataset.range(3).save(path)
        >>> [int(x) for x in Dataset.load(path)]
        [0, 1, 2]
        """
        checked_compression(compression, "AUTO")
        saved = SavedDataset(path_text(path, "saved dataset"))
        return cls._of(saving.loaded(cls._of, saved, saved.check(element_spec), reader_func))

    # Several datasets in one

    @classmethod
    def zip(cls, *args: Tree, datasets: Tree = None, name: str | None = None) -> Self:
        """Returns the elements of several datasets side by side, in the structure in which the datasets come.

        Raises:
            TypeError: something else than a dataset, or none at all.

        >>> from replicax.data import Dataset
        >>> a, b = Dataset.range(2), Dataset.range(5, 9)
        >>> list(Dataset.zip(a, b).as_numpy_iterator())
        [(np.int64(0), np.int64(5)), (np.int64(1), np.int64(6))]
        """
        tree = datasets if datasets is not None else args[0] if len(args) == 1 else args
        inputs, structure = flatten(tree)
        for dataset in inputs:
            if not isinstance(dataset, Base):
                raise TypeError(f"Dataset.zip takes datasets in tuples or dicts, got {type(dataset).__name__}.")
        if not inputs:
            raise TypeError("Dataset.zip needs at least one dataset.")
        return cls._of(Zip("zip", [node_of(d) for d in inputs], structure), inputs[0].options())

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Self], choice_dataset: Base, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Returns elements of several datasets, each of the one whose number comes next in `choice_dataset`.

        Args:
            datasets: datasets of elements of one kind.
            choice_dataset: scalars of int64, from 0 to the number of datasets less one.
            stop_on_empty_dataset: whether to end where the chosen dataset has no more elements, or to go on to the
                next choice.

        Raises:
            TypeError: the datasets' elements differ, or choices are no int64.
            ValueError: there are no datasets.
            InvalidArgumentError: at iteration, where there is no dataset of the chosen number.

        >>> from replicax.data import Dataset
        >>> pair = [Dataset.range(3), Dataset.range(10, 13)]
        >>> choices = Dataset.from_tensor_slices(np.array([1, 0, 1]))
        >>> [int(x) for x in Dataset.choose_from_datasets(pair, choices)]
        [10, 0, 11]
        """
        datasets, choices = [*datasets], node_of(choice_dataset)
        nodes, kind = alike(datasets), choices.spec(False)
        if kind is not None and kind != TensorSpec((), np.int64):
            raise TypeError(f"Elements of `choice_dataset` must be scalar int64 tensors, but are {kind}.")
        return cls._of(Choose(nodes, choices, stop_on_empty_dataset), datasets[0].options())

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Self],
        weights: ArrayLike | Base | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Self:
        """Returns elements of several datasets, each taken from one chosen at random.

        Args:
            datasets: datasets of elements of one kind.
            weights: how probable each is to be chosen, up to a factor, or a dataset of such vectors; all alike where
                it is None. Datasets of weight 0 are left out.
            seed: makes the choices the same in each program.
            stop_on_empty_dataset: whether to end where the chosen dataset has no more elements; else it is left out
                from there on.
            rerandomize_each_iteration: whether each pass makes other choices; by default where there is no seed.

        Raises:
            TypeError: the datasets' elements differ.
            ValueError: there are no datasets, or there is not one weight for each.

        >>> from replicax.data import Dataset
        >>> both = Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(2)], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 0, 1, 1]
        """
        datasets = [*datasets]
        nodes = alike(datasets)
        again = seed is None if rerandomize_each_iteration is None else bool(rerandomize_each_iteration)
        seeds = Seeds(seed, again)
        if isinstance(weights, Base):
            return cls._of(Sample(nodes, node_of(weights), seeds, stop_on_empty_dataset), datasets[0].options())
        chances = probabilities(np.ones(len(nodes)) if weights is None else weights)
        if len(chances) != len(nodes):
            raise ValueError(f"`weights` needs one for each of the {len(nodes)} datasets, got {len(chances)}.")
        if not chances.any():
            return datasets[0].take(0)
        (possible,) = chances.nonzero()
        node = Sample([nodes[i] for i in possible], chances[possible], seeds, stop_on_empty_dataset)
        return cls._of(node, datasets[possible[0]].options())

    concatenate, enumerate = order.concatenate, order.enumerate

    # The number and the order of elements

    shuffle, repeat = order.shuffle, order.repeat
    take, skip, shard = order.take, order.skip, order.shard
    cache, prefetch = order.cache, order.prefetch

    # Functions of elements

    map, filter, take_while, scan = elements.map, elements.filter, elements.take_while, elements.scan
    flat_map, interleave, ignore_errors = elements.flat_map, elements.interleave, elements.ignore_errors

    # Batches and groups

    batch, padded_batch = batches.batch, batches.padded_batch
    ragged_batch, sparse_batch = batches.ragged_batch, batches.sparse_batch
    unbatch, rebatch = batches.unbatch, batches.rebatch
    window, group_by_window = groups.window, groups.group_by_window
    bucket_by_sequence_length = groups.bucket_by_sequence_length
    unique, rejection_resample = groups.unique, groups.rejection_resample

    # Results

    save, snapshot = saving.save, saving.snapshot

    def reduce(self, initial_state: Tree, reduce_func: Callable[[Tree, Tree], Tree], name: str | None = None) -> Tree:
        """Returns the last of the states that `state = reduce_func(state, element)` goes through.

        >>> from replicax.data import Dataset
        >>> int(Dataset.range(4).reduce(np.int32(0), lambda total, x: total + x))
        6
        """
        return fold(self, initial_state, reduce_func)

    def apply(self, transformation_func: Callable[[Self], Self]) -> Self:
        """Returns `transformation_func` of this dataset.

        Raises:
            TypeError: `transformation_func` returns no dataset.

        >>> from replicax.data import Dataset
        >>> [int(x) for x in Dataset.range(5).apply(lambda dataset: dataset.skip(1).take(2))]
        [1, 2]
        """
        role = "`transformation_func` of `Dataset.apply`"
        dataset = call_user(role, transformation_func, self._then(self._node))
        node_returned_by("transformation_func", dataset)
        return dataset

    def get_single_element(self, name: str | None = None) -> Tree:
        """Returns the only element.

        Raises:
            InvalidArgumentError: there is none, or more than one.

        >>> from replicax.data import Dataset
        >>> int(Dataset.range(5).reduce(np.int64(0), lambda s, x: s + x)), int(Dataset.range(1).get_single_element())
        (10, 0)
        """
        elements = list(itertools.islice(self._node.iterate(Reading(self._node.memories)), 2))
        if len(elements) != 1:
            raise InvalidArgumentError(f"Dataset {'had more than one element' if elements else 'was empty'}.")
        return tensors_of(elements[0])

    def fingerprint(self) -> NoReturn:
        """Raises NotImplementedError: functions of datasets are Python functions, which no hash tells apart.

        >>> Dataset.range(3).fingerprint()
        Traceback (most recent call last):
        NotImplementedError: `Dataset.fingerprint` is not supported...
        """
        raise NotImplementedError(
            "`Dataset.fingerprint` is not supported: functions of datasets are Python functions, which no hash tells "
            "apart. Hash what identifies your data, such as file names and a version of the code, with hashlib."
        )


Base._dataset = Dataset
counter = Dataset.counter  # which is `tf.data.experimental.Counter` too


def dataset_of(node: Node, options: Options | None = None) -> Dataset:
    """Return the dataset of a node."""
    return Dataset._of(node, options)


def to_variant(dataset: Dataset) -> Variant:
    """Returns the dataset as one value."""
    if not isinstance(dataset, Base):
        raise TypeError(f"`to_variant` takes a dataset, got {received(dataset)}.")
    return Variant(dataset)


def from_variant(variant: Variant, structure: Tree) -> Dataset:
    """Returns the dataset of a value; `structure` is its elements' spec."""
    return Dataset(variant)
