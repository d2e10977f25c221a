"""One reading of a dataset, from its first element on: what it started from, so that another one can repeat it.

The elements of a dataset follow from the state of its *memories* when the reading came to them: the pass of a
shuffle, and the content of a cache. So the state of an iterator consists of these states and the number of elements
that it gave. To restore it, a new reading starts from there, and leaves out as many elements, without making them
where it can (see `skipping`).
"""

from __future__ import annotations

import copy
import itertools
import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._base.thread_state import current
from replicax._base.tracebacks import Living
from replicax._base.types import Tree

# The state of a memory or of a reading: what JSON can write.
State: TypeAlias = Any

_FORMAT = "replicax dataset iterator 3"


class Memory:
    """What a dataset keeps beyond a reading, such as a cache's elements; `first` is the state of a new memory."""

    first: State = None

    def state(self) -> State:
        """Returns the state, made of what JSON can write."""
        raise NotImplementedError

    def restore(self, state: State) -> None:
        """Sets the state."""
        raise NotImplementedError

    def fits(self, state: State) -> bool:
        """Returns whether `state` is one of such a memory."""
        raise NotImplementedError

    def draw(self, entropy: np.random.SeedSequence) -> None:
        """Draws what was left to chance."""


class _Numbers(np.random.Generator):
    """Random numbers of a reading, which its state says, unlike a user's."""


class Draws(Protocol):
    """The random numbers of a front end's functions in one reading; each has a number of its own."""

    number: int

    def words(self, tag: Any) -> np.ndarray:
        """Return the two random words with which the numbers of a tag begin."""


class Reading:
    """One reading of a dataset.

    Args:
        memories: those of the dataset; others come up as functions make further datasets, always in the same order.
        share: how many there are to divide the files among, and which of them this is.
        probing: whether this only looks at the first element, which must not count as a pass.
        saved: the `state` of the reading to repeat.

    Attributes:
        ignored: gets each exception in place of who reads; None where they are raised.
    """

    def __init__(
        self,
        memories: Sequence[Memory] = (),
        share: tuple[int, int] = (1, 0),
        probing: bool = False,
        saved: State = None,
    ):
        self.share, self.probing = share, probing
        self.ignored: Callable[[Exception], None] | None = None
        self.memories = tuple(memories)
        # The state of each memory when this reading first came to it.
        self._begun: weakref.WeakKeyDictionary[Memory, State] = weakref.WeakKeyDictionary()
        # How many passes of each shuffle it has drawn, and the parts in one another in which it does so.
        self._passes: weakref.WeakKeyDictionary[Memory, int] = weakref.WeakKeyDictionary()
        self._parts: list[int] = []
        self._numbers = itertools.count()
        self._repeats = saved is not None
        if saved is None:
            saved = {"entropy": np.random.SeedSequence().entropy, "path": [], "met": {}}
        self._entropy, self._path, self._met = saved["entropy"], saved["path"], dict(saved["met"])
        self._restore_memories(saved.get("nodes", ()))

    def _restore_memories(self, states: Sequence[State]) -> None:
        for memory, state in zip(self.memories, states):
            memory.restore(state)
            self._begun[memory] = state

    def adopt(self, state: dict[str, State]) -> None:
        """Leaves to chance what another process does, whose reading of the same dataset begins in `state`."""
        self._entropy = state["entropy"]
        self._restore_memories(state["nodes"])

    def child(self, share: tuple[int, int] | None = None) -> Reading:
        """Returns a part of this reading: of a dataset that a function made, or one to fill a cache."""
        path = [*self._path, next(self._numbers)]
        return self._replace(share=share or self.share, _path=path, _numbers=itertools.count(), _parts=[])

    def part(self, number: int) -> Reading:
        """Returns the part of this reading that reads one of several datasets behind each other.

        The orders of shuffles follow from the part in which they stand, and not from what has been read before: a
        thread that reads ahead may or may not have begun the part before.
        """
        return self._replace(_parts=[*self._parts, number], _passes=weakref.WeakKeyDictionary())

    def with_errors(self, ignored: Callable[[Exception], None] | None) -> Reading:
        """Returns this reading, in which exceptions go to `ignored` or, for None, are raised."""
        return self._replace(ignored=ignored)

    def _replace(self, **attributes: Any) -> Reading:
        """Return a copy of this reading with other attributes; the copy shares the rest."""
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def guarded(self, elements: Iterator[Tree]) -> Iterator[Tree]:
        """Returns the elements; where exceptions are ignored, without those that raise one."""
        return elements if self.ignored is None else _without_errors(elements, self.ignored)

    def begin(self, memory: Memory) -> State:
        """Returns the state of `memory` when this reading first came to it, which may be now."""
        if memory not in self._begun:
            if memory in self.memories:
                place = [0, self.memories.index(memory)]
            else:
                place = [1, *self._path, next(self._numbers)]
                self._meet(memory, ".".join(map(str, place)))
            memory.draw(np.random.SeedSequence([self._entropy, *place]))
            self._begun[memory] = memory.state()
        return self._begun[memory]

    def _meet(self, memory: Memory, key: str) -> None:
        if self._repeats:
            memory.restore(self._met.get(key, memory.first))
        elif memory.state() != memory.first:  # not a new one: a function uses a dataset that was made before
            self._met[key] = memory.state()

    def generator(self, memory: Seeds) -> np.random.Generator:
        """Returns the random numbers of the next pass over a shuffle in this part of the reading."""
        seed, number = self.now(memory)
        if not self.probing:
            self._passes[memory] = self._passes.get(memory, 0) + 1
            memory.readings = max(memory.readings, self.begin(memory)[1] + 1)
        return _Numbers(np.random.PCG64([seed, number, *self._parts] if memory.reshuffle else [seed, 0]))

    def words(self, memory: FunctionSeeds, seed: Sequence[int] | None) -> np.ndarray:
        """Returns two random words for this part of the reading, by a seed or, for None, by that of the memory.

        A function that draws with seeds draws the same numbers in each reading, and other ones in each pass of a
        `repeat`.
        """
        own, number = self.begin(memory)
        if not self.probing:
            memory.readings = max(memory.readings, number + 1)
        given = [own, number] if memory.by_chance else [own]
        return np.random.SeedSequence([*(given if seed is None else seed), *self._parts]).generate_state(2)

    def now(self, memory: Memory) -> State:
        """Returns the state of `memory` as this part of the reading sees it now."""
        state = self.begin(memory)
        return [state[0], state[1] + self._passes.get(memory, 0)] if isinstance(memory, Seeds) else memory.state()

    def state(self) -> dict[str, State]:
        """Returns what another reading needs to repeat this one."""
        memories = [self.begin(memory) for memory in self.memories]
        return {"entropy": self._entropy, "path": self._path, "nodes": memories, "met": dict(self._met)}


def _without_errors(elements: Iterator[Tree], ignored: Callable[[Exception], None]) -> Iterator[Tree]:
    while True:
        try:
            element = next(elements)
        except StopIteration:
            return
        except Exception as e:
            ignored(e)
        else:
            yield element


def _default_seed() -> int | None:
    return None


def use_default_seed(seed: Callable[[], int | None]) -> None:
    """Has random choices without a seed take this one; where it is None, they are left to chance."""
    global _default_seed
    _default_seed = seed


living_seeds: Living[Seeds] = Living()


class Seeds(Memory):
    """The seeds of a dataset's orders: others in each reading and in each of its parts, unless `reshuffle` is False.

    Attributes:
        readings: how many have begun.
    """

    def __init__(self, seed: int | None, reshuffle: bool = True):
        seed = self._default() if seed is None else seed
        self._seed = None if seed is None else int(seed) % 2**64
        self.readings, self.reshuffle = 0, reshuffle
        self.by_chance = seed is None
        self.inner = bool(current.advancing)  # whether a function of a dataset makes it
        self.first = self.state()
        living_seeds.add(self)

    def _default(self) -> int | None:
        return _default_seed()

    def state(self) -> State:
        return [self._seed, self.readings]

    def fits(self, state: State) -> bool:
        return isinstance(state, list) and [type(part) for part in state] == [int, int]

    def restore(self, state: State) -> None:
        self._seed, self.readings = state

    def draw(self, entropy: np.random.SeedSequence) -> None:
        if self._seed is None:
            self._seed = int(entropy.generate_state(1, np.uint64)[0])


class FunctionSeeds(Seeds):
    """The seed of what a function of elements draws without a seed of its own; None leaves it to chance."""

    def _default(self) -> None:
        return None


class CachedElements(Memory):
    """The items that the first complete pass over a dataset gave, kept for the later ones."""

    def __init__(self, memories: Sequence[Memory]):
        self._memories = tuple(memories)
        self._items: list[Tree] | None = None
        self._filled: State = None  # the state of the reading that gave the items, which may have to be read anew

    def state(self) -> State:
        return self._filled

    def fits(self, state: State) -> bool:
        return state is None or reading_fits(state, self._memories)

    def restore(self, state: State) -> None:
        if state is None or state != self._filled:
            self._items, self._filled = None, state

    def read(self, reading: Reading, make: Callable[[Reading], Iterator[Tree]], start: int = 0) -> Iterator[Tree]:
        """Yields the items from number `start` on."""
        reading.begin(self)
        if self._items is None and self._filled is not None:
            again = Reading(self._memories, reading.share, saved=self._filled)
            self._items = list(make(again.with_errors(reading.ignored)))
        if self._items is not None:
            yield from itertools.islice(self._items, start, None)
            return
        own, items = reading.child(), []
        before = {**own.state(), "nodes": [own.now(memory) for memory in self._memories]}
        for item in make(own):
            items.append(item)
            if len(items) > start:
                yield item
        self._items, self._filled = items, {**before, "met": dict(own.state()["met"])}


class Position(NamedTuple):
    """The place of an iterator in its dataset.

    Attributes:
        elements: how many it has given.
        each: how many elements of the dataset each of them was made of.
        of_all: whether the elements are those of all workers, of which each got its shares.
    """

    elements: int
    each: int = 1
    of_all: bool = False


def state_to_bytes(position: Position, readings: Sequence[Reading]) -> bytes:
    """Returns the state of an iterator as bytes."""
    state = {
        "format": _FORMAT,
        "position": position.elements,
        "each": position.each,
        "of_all": position.of_all,
        "readings": [reading.state() for reading in readings],
    }
    return json.dumps({"state": state, "checksum": _checksum(state)}, separators=(",", ":")).encode()


def _checksum(state: State) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def parsed(state: object) -> tuple[Position, list[State]]:
    """Returns the position and the readings' states that `state_to_bytes` wrote."""
    try:
        told = json.loads(state if isinstance(state, bytes | bytearray | str) else bytes(np.asarray(state)))
        found = told["state"]
        if told["checksum"] != _checksum(found):
            raise ValueError("the checksum does not fit")
        if found["format"] != _FORMAT:
            raise ValueError(found["format"])
        position = Position(int(found["position"]), int(found.get("each", 1)), bool(found.get("of_all")))
        return position, list(found["readings"])
    except (ValueError, TypeError, KeyError) as e:
        raise InvalidArgumentError(
            f"restore_state takes what save_state returned, got {received(state)}, which is "
            f"no such state, or is damaged ({e})."
        ) from e


def state_from_bytes(state: object, readings: Sequence[Reading]) -> tuple[Position, list[State]]:
    """Returns the position and the readings' states that `state_to_bytes` wrote, of readings of the same memories."""
    position, saved = parsed(state)
    own = [reading.memories for reading in readings]
    if len(saved) != len(own) or not all(map(reading_fits, saved, own)):
        kinds = [[type(memory).__name__ for memory in memories] for memories in own]
        raise InvalidArgumentError(
            "The state is of an iterator over another dataset: its shuffles and caches are not those of this one, "
            f"{kinds}. Build the dataset by the same code as when the state was saved."
        )
    return position, saved


def reading_fits(state: State, memories: Sequence[Memory]) -> bool:
    """Returns whether `state` is one of a reading of these memories."""
    if not isinstance(state, dict) or set(state) != {"entropy", "path", "nodes", "met"}:
        return False
    kinds = [("entropy", int), ("path", list), ("nodes", list), ("met", dict)]
    if not all(isinstance(state[key], kind) for key, kind in kinds) or len(state["nodes"]) != len(memories):
        return False
    return all(memory.fits(one) for memory, one in zip(memories, state["nodes"]))
