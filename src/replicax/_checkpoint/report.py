"""What of a program's state is not in a checkpoint, as far as it can be known."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._base import frontend
from replicax._base.errors import UnavailableError
from replicax._base.tracebacks import Origin
from replicax._checkpoint.object_graph import ObjectNode
from replicax._checkpoint.random_state import RandomState, same, states
from replicax._data import iterators, reading
from replicax._tracing import frames
from replicax._tracing.protocols import storage_of, types_of
from replicax._variables import variable as variables
from replicax._variables.variable import Variable

_NAMES = {"generator:0": "the state of a tf.random.Generator", "optimizer_state:0": "the state of an optimizer"}


class Uncovered(NamedTuple):
    """A part of a program's state that a checkpoint does not have.

    Attributes:
        kind: "variable", "iterator", "shuffle", "source", "random", "generator" or "key".
        what: what it is.
        place: the file and line where it was made, empty where that is not known.
        advice: what to do.

    >>> import replicax as rx
    >>> print(rx.train.Uncovered("variable", "the variable 'w:0'", "train.py:12", "Name it in the Checkpoint."))
    the variable 'w:0' (train.py:12). Name it in the Checkpoint.
    """

    kind: str
    what: str
    place: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.place})' if self.place else ''}. {self.advice}"


class Report(NamedTuple):
    """What of a program's state a checkpoint does not have; as a text, a line for each.

    Attributes:
        entries: the parts of the state.

    >>> import replicax as rx
    >>> missing = rx.train.Uncovered("variable", "the variable 'w:0'", "train.py:12", "Name it in the Checkpoint.")
    >>> print(rx.train.Report((missing,)))
    The checkpoint does not have, so that a restarted program may go on differently:
    - the variable 'w:0' (train.py:12). Name it in the Checkpoint.
    """

    entries: tuple[Uncovered, ...]

    @property
    def complete(self) -> bool:
        """True if nothing was found that the checkpoint does not have.

        >>> import replicax as rx
        >>> rx.train.Report(()).complete
        True
        """
        return not self.entries

    def __str__(self) -> str:
        if self.complete:
            return "The checkpoint has all state of the program that replicax knows of."
        lines = [f"- {entry}" for entry in self.entries]
        return "\n".join(["The checkpoint does not have, so that a restarted program may go on differently:", *lines])


class _Baseline(NamedTuple):
    """What there was when the first `Checkpoint` was made: until then, a program sets itself up."""

    random: dict[str, Any]
    generators: list[tuple[np.random.Generator, Any]]
    keys: weakref.WeakValueDictionary[int, Any]  # by their ids


_baseline: _Baseline | None = None


def begin() -> None:
    """Notes that the program has set itself up, as its first checkpoint is made; other calls do nothing."""
    global _baseline
    if _baseline is None:
        frames.note_changes()
        alive = gc.get_objects()
        generators = [(one, one.bit_generator.state) for one in alive if type(one) is np.random.Generator]
        keys = weakref.WeakValueDictionary({id(one): one for one in alive if _is_key(one)})
        _baseline = _Baseline(states(), generators, keys)


def report_on(nodes: Sequence[ObjectNode]) -> Report:
    """Returns what the checkpoint of a graph of objects does not have."""
    gc.collect()  # objects of which nobody knows any more are no state
    owners = [node.leaf.owner for node in nodes if node.leaf is not None]
    held = [getattr(owner, "__replicax_variable__", None) for owner in owners]
    covered = {id(one) for one in (*owners, *held) if one is not None}
    found = [*_variables(covered), *_iterators(covered), *_random_numbers(owners), *_keys(owners, held)]
    return Report(tuple(found))


def _variables(covered: set[int]) -> Iterator[Uncovered]:
    """Yields the variables, those that were made by one line together."""
    by_line: dict[Origin, list[Variable]] = {}
    for one, origin in variables.living:
        if one._changed_by_input and id(one) in covered:
            yield Uncovered(
                "variable",
                f"{_described([one])} is assigned by a function of a dataset, which runs ahead of the position that is "
                "saved",
                origin.place,
                "Use stateless functions there, with seeds that come with the elements.",
            )
        if id(one) in covered or not one._changed or variables.is_hidden(one) or one.name == "save_counter:0":
            continue
        if storage_of(one).is_gone:  # with its last value
            continue
        if not _is_zero(one):  # as a total that was reset, which has nothing to lose
            by_line.setdefault(origin, []).append(one)
    for origin, some in by_line.items():
        text = "Give it, or the object that has it, a name in the Checkpoint."
        yield Uncovered("variable", _described(some), origin.place, text)


def _described(some: Sequence[Variable]) -> str:
    if known := _NAMES.get(some[0].name):
        return known
    names = ", ".join(repr(one.name) for one in some[:3])
    return f"the variable {names}" if len(some) == 1 else f"{len(some)} variables, {names}" + ", ..." * (len(some) > 3)


def _is_zero(one: Variable) -> bool:
    """Returns whether the parts of a variable in this process are zero, without asking other processes.

    A variable whose parameter server cannot be reached counts as another one, since it may come back.
    """
    with frames.lock:
        try:
            leaves = storage_of(one).read()
        except UnavailableError:
            return False
    if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
        return False
    return not any(np.asarray(part.data).any() for leaf in leaves for part in leaf.addressable_shards)


def _iterators(covered: set[int]) -> Iterator[Uncovered]:
    """Yields iterators that are under way, shuffles whose passes no saved iterator counts, and unsure sources."""
    counted: set[int] = set()
    sources: dict[Any, Uncovered] = {}
    for one, origin in iterators.living:
        nodes, readings, position = iterators.standing(one)
        known = id(one) in covered
        under_way = position > 0
        if known or under_way:
            counted.update(id(memory) for of_one in readings for memory in of_one.memories)
        if under_way and not known:
            what = f"the position of an iterator, after {position} elements"
            yield Uncovered("iterator", what, origin.place, "Give the iterator a name in the Checkpoint.")
        for unsure in (unsure for node in nodes for unsure in node.unsure if known):
            advice = (
                "It is gone through again from its beginning when the iterator is restored, and has to give the same "
                "elements then. Use a source that replicax can position, or make sure that it does."
            )
            what = f"{unsure.what}, from which a dataset is made"
            sources[unsure] = Uncovered("source", what, unsure.origin.place, advice)
    yield from sources.values()
    for seeds, origin in reading.living_seeds:
        if seeds.readings and not seeds.inner and (seeds.reshuffle or seeds.by_chance) and id(seeds) not in counted:
            what = f"the number of passes over a shuffled dataset, {seeds.readings}, and its seed"
            advice = "Give the Checkpoint an iterator over the dataset; one over `dataset.repeat()` serves all epochs."
            yield Uncovered("shuffle", what, origin.place, advice)


def _random_numbers(owners: Sequence[object]) -> Iterator[Uncovered]:
    """Yields the random numbers that were drawn since the first checkpoint was made."""
    assert _baseline is not None
    numbers = frontend.current.random_numbers
    if numbers is not None and (origin := numbers.in_dataset()) is not None:
        text = "Use stateless functions there, with seeds that come with the elements (`Dataset.random`)."
        what = (
            f"random numbers that a function of a dataset draws with {numbers.functions}, ahead of the saved position"
        )
        yield Uncovered("random", what, origin.place, text)
    saved = [owner for owner in owners if isinstance(owner, RandomState)]
    if not saved:
        names = {
            "python": "the state of Python's `random`",
            "numpy": "the state of `numpy.random`",
        }
        if numbers is not None:
            names[numbers.name] = f"the counters of functions of {numbers.functions} that take no generator"
        for name, state in states().items():
            if name not in _baseline.random or not same(state, _baseline.random[name]):
                advice = "Give the Checkpoint an `rx.train.RandomState()`."
                yield Uncovered("random", f"{names[name]}, which was drawn from", "", advice)
    known = {id(generator) for state in saved for generator in state._generators}
    for generator, before in _baseline.generators:
        if id(generator) not in known and not same(generator.bit_generator.state, before):
            name = _name_of(generator)
            advice = f"Give the Checkpoint an `rx.train.RandomState({name or 'generator'})`."
            yield Uncovered("generator", f"the numpy.random.Generator {name}".rstrip(), "", advice)


def _name_of(value: object) -> str:
    """Returns the name that the main program has for a value, empty where it has none."""
    names = vars(sys.modules["__main__"])
    return next((name for name, one in names.items() if one is value), "")


def _is_key(value: object) -> bool:
    return type(value).__name__ == "PRNGKeyArray"  # asking for the dtype of each object would take long


def _keys(owners: Sequence[Any], held: Sequence[Variable | None]) -> Iterator[Uncovered]:
    """Yields keys of `jax.random` that Python holds and that do not follow from what is saved."""
    assert _baseline is not None
    leaves = [leaf for owner in owners if not isinstance(owner, Variable) for leaf in jax.tree.leaves(owner)]
    dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, jax.Array)]
    dtypes += [kind.dtype for one in (*owners, *held) if isinstance(one, Variable) for kind in types_of(one)]
    if any(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes):
        return  # the program saves one, from which others come
    alive = [one for one in gc.get_objects() if _is_key(one)]
    roots = [key for key in alive if id(key) in _baseline.keys or _is_root(key)]
    counts = [int(one.numpy()) for one in owners if isinstance(one, Variable) and _is_count(one)]
    steps = {count + d for count in counts for d in (-2, -1, 0, 1) if count + d >= 0}
    known = {_bits(key) for key in roots}
    known.update(_bits(key) for root in roots if not root.shape for step in steps for key in _derived(root, step))
    unknown = [key for key in alive if _bits(key) not in known]
    if unknown:
        names = ", ".join(filter(None, map(_name_of, unknown)))
        what = f"{len(unknown)} keys of jax.random that Python holds{f', {names}' if names else ''}"
        yield Uncovered(
            "key",
            what.replace("1 keys", "1 key") if len(unknown) == 1 else what,
            "",
            "Give the Checkpoint the key that others are split from, and split `checkpoint.key`; or fold a saved "
            "count of steps into one key: `jax.random.fold_in(key, step)`.",
        )


def _is_count(one: Variable) -> bool:
    return (
        len(types_of(one)) == 1
        and not types_of(one)[0].shape
        and jax.numpy.issubdtype(types_of(one)[0].dtype, np.integer)
    )


def _bits(key: jax.Array) -> bytes:
    return bytes(np.asarray(jax.random.key_data(key)))


def _is_root(key: jax.Array) -> bool:
    """Returns whether a key is that of a small seed, and so of no other key."""
    if key.shape:
        return False
    seed = int(np.asarray(jax.random.key_data(key)).ravel()[-1])
    return _bits(jax.random.key(seed, impl=str(jax.random.key_impl(key)))) == _bits(key)


def _derived(root: jax.Array, step: int) -> Iterator[jax.Array]:
    """Yields the keys that a program is likely to make of one for a step."""
    folded = jax.random.fold_in(root, step)
    yield folded
    for count in (2, 3, 4):
        several = jax.random.split(folded, count)
        yield several
        yield from several
