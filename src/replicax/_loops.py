"""Loops over distributed datasets whose steps are short: several iterations in one program.

Such a loop is driven from the host, and each `strategy.run` in it is a program of its own. Where an iteration takes
little time, most of it goes into calls. So, once the loop has run for a while, its body is traced as a whole, with the
loop's variables for arguments and results, and repeated in one program (see `_several`). That is for bodies that do
nothing but compute (see `_pure`); others, and the elements that do not fit, go on as before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax import (
    _blocks,
    _compiled_runs,
    _function,
    _levels,
    _operators,
    _private,
    _programs,
    _pure,
    _several,
    _tape,
)
from replicax._arguments import Call
from replicax._blocks import DynamicRange, Undefined, UndefinedReturnValue
from replicax._data import ElementIterator
from replicax._input import DistributedDataset, DistributedIterator
from replicax._pure import Counter, Impure

SHORT = 0.003  # seconds; a body that takes longer is not worth it
CALL = 0.01  # seconds that a call should take
MOST = 64  # iterations a call
BYTES = 1 << 26  # of elements a call
MEASURED = 5  # iterations that are waited for
PATIENCE = 0.5  # for how long a loop runs as it is before its body is compiled, as a part of what that may take
LEAST = 0.2  # seconds that it is taken to take at least
TRACES = 4  # of one body; where more would be needed, the loop goes on as it is

_END = object()
_WRITES = "it assigns attributes, items or globals, or has `with`, `yield` or `print`"


def for_stmt(
    iter_: Any, extra_test: Any, body: Any, get_state: Callable, set_state: Callable, names: Any, opts: Any
) -> None:
    """A `for` statement of converted code."""
    known = None
    if _function.host_driven() and type(_levels.frame()) is _levels.Frame and not isinstance(iter_, _NO_DATASETS):
        known = _body_of(body, names)
        known.apart = _apart(iter_, extra_test)
    if known is not None and not known.apart and not known.refused:
        _Loop(known, iter(iter_), body, get_state, set_state).run()
    else:
        _operators.for_stmt(iter_, extra_test, body, get_state, set_state, names, opts)


_NO_DATASETS = list, tuple, dict, set, range, str, np.ndarray, jax.Array, DynamicRange  # loops over these are left out


def _apart(iter_: Any, extra_test: Any) -> str:
    """Why a loop runs as it is now, whatever its body does; empty where nothing speaks against one program."""
    if not isinstance(iter_, (DistributedDataset, DistributedIterator)):
        return f"it goes over {type(iter_).__name__}, and not over a distributed dataset itself"
    if extra_test is not None:
        return "it has a break or a return"
    if not _function.short_steps_join():
        return "rx.config.join_short_steps(False) holds"
    if not _private.is_eager(_private.current_trace()):
        return "a gradient tape follows what it computes"
    if jax.process_count() > 1:  # workers that decide by the time would not decide alike
        return "the job has several workers"
    return ""


class _Body:
    """What is known of the body of a loop, from one time that it runs to the next."""

    def __init__(self, refused: str):
        self.where = _blocks.where()  # in the user's code
        self.refused = refused  # why it is to run as it is, whatever it goes over; empty where it need not
        self.apart = ""  # and why it does where it ran last
        self.first: float | None = None  # how long the first iteration took, which compiles
        self.times: list[float] = []
        self.spent = 0.0  # how long those took that were not measured
        self.count = 0  # iterations a call; 0 where that is not known yet
        self.programs: list[_Program] = []
        self.traces = 0
        self.lock = threading.RLock()  # held while it is traced

    def note(self, seconds: float, iterator: Any, element: Any) -> None:
        """An iteration took so long."""
        if self.first is None:
            self.first = seconds
        elif len(self.times) < MEASURED:
            self.times.append(seconds)
            if len(self.times) == MEASURED and min(self.times) > SHORT:
                self.refuse(f"an iteration takes {1e3 * min(self.times):.1f} ms, which is long beside its calls")
        else:
            self.spent += seconds
            # What one program takes to be compiled is about what the first iteration took.
            if self.spent >= PATIENCE * max(self.first, LEAST) and not self.count:
                self.count = self._count(iterator, element)
                if self.count < 2:
                    self.refuse("there are few iterations, or their elements are large")

    def program(self, loop: _Loop, state: _State) -> _Program | None:
        """One that computes what the loop does now."""
        return next((one for one in self.programs if one.takes(state) and one.fits(loop)), None)

    def refuse(self, why: str) -> None:
        """It is to run as it is from now on."""
        self.refused = why
        self.programs.clear()

    def __str__(self) -> str:
        if self.apart or self.refused:
            return f"{self.where}one iteration a call: {self.apart or self.refused}"
        if self.count:
            return f"{self.where}{self.count} iterations a call"
        return f"{self.where}one iteration a call, while it is found out how long they take"

    def _count(self, iterator: Any, element: Any) -> int:
        size = sum(x.nbytes for x in jax.tree.leaves(element) if isinstance(x, jax.Array))
        # Most of the time that an iteration takes now is that of its calls.
        most = int(min(MOST, CALL / min(self.times) * 4, BYTES / max(size, 1)))
        cardinality = int(iterator._dataset.cardinality)
        if cardinality < 0:
            return most
        # The first and the last iteration are apart from the others. Few calls are made where few are left over.
        rest = cardinality - 2
        return min(range(2, min(most, rest // 2) + 1), key=lambda count: rest // count + rest % count, default=0)


def _body_of(body: Any, names: Any) -> _Body:
    bodies = _function.loops()
    known = bodies.get(body.__code__)
    if known is None:
        plain = all(name.isidentifier() for name in names) and not _pure.writes(body.__code__, names)
        known = bodies[body.__code__] = _Body("" if plain else _WRITES)
    return known


class _Loop:
    """A loop as it runs."""

    def __init__(self, known: _Body, iterator: Any, body: Any, get_state: Callable, set_state: Callable):
        self.known, self.iterator, self.body = known, iterator, body
        self.get_state, self.set_state = get_state, set_state
        self._program: _Program | None = None  # which was seen to compute what this loop does

    def run(self) -> None:
        known, failures = self.known, 0
        if known.count and not known.refused:
            self.iterator._ask_for(known.count, 1)
        while (element := next(self.iterator, _END)) is not _END:
            self._single(element)  # the first one gives the variables their types
            while known.count and not known.refused and failures < 2:
                if not self._several():  # as at the end of the data
                    failures += 1
                    break
                failures = 0

    def _single(self, element: Any) -> None:
        known = self.known
        if known.refused or known.count:
            self.body(element)
            return
        measured = known.first is None or len(known.times) < MEASURED
        with _programs.observed() as outputs:
            begin = time.perf_counter()
            self.body(element)
            if measured:
                jax.block_until_ready([x for x in outputs if not x.is_deleted()])
        known.note(time.perf_counter() - begin, self.iterator, element)

    def _several(self) -> bool:
        """Whether the next iterations were one call."""
        known = self.known
        state = _flat(self.get_state())
        if state is None:
            return False
        with known.lock:
            program = self._program if self._program is not None and self._program.takes(state) else None
            program = program or known.program(self, state)
            if program is None:
                if known.traces >= TRACES:
                    known.refuse("what it reads, or the kinds of its variables, keep changing")
                    return False
                program = _Program(state, known)
            before = program.entered
            found = program.found(self, state, known.count)
            known.traces += program.entered - before
            if program.failed:
                known.refuse(program.why())
            if found is None:
                return False
            self._program = program
            if not known.refused and program not in known.programs:
                known.programs.append(program)
        self.set_state(program.run(found, state, known.count))
        return True


class _Feed(ElementIterator):
    """The iterator of the loop that runs, whichever it is."""

    def __init__(self) -> None:
        self._dataset = self
        self.current: Any = None

    def _itself(self) -> ElementIterator:
        return self.current

    def _pull(self) -> Any:
        return self.current._pull()

    def _push_back(self, element: Any) -> None:
        self.current._push_back(element)

    def _ask_for(self, count: int, after: int = 0) -> None:
        self.current._ask_for(count, after)

    def _pull_several(self, count: int) -> Any:
        return self.current._pull_several(count)

    def _push_several_back(self, several: Any) -> None:
        self.current._push_several_back(several)


class _State:
    """The loop's variables: arrays, integers, and what does not change."""

    def __init__(self, values: Any, leaves: list[Any], tree: Any):
        self.values, self.leaves, self.tree = values, leaves, tree
        self.kinds = [
            (x.shape, x.dtype) if isinstance(x, jax.Array) else (type(x), repr(x) if type(x) in _CONSTANT else None)
            for x in leaves
        ]

    @property
    def arrays(self) -> list[Any]:
        return [x for x in self.leaves if isinstance(x, jax.Array)]

    def rebuilt(self, arrays: Any, integer: Callable[[int, Any], Any]) -> Any:
        """The variables with these arrays, and `integer(i, value)` for the i-th leaf, which is one."""
        rest = iter(arrays)
        leaves = [
            next(rest) if isinstance(x, jax.Array) else integer(i, x) if type(x) is int else x
            for i, x in enumerate(self.leaves)
        ]
        return jax.tree.unflatten(self.tree, leaves)


_CONSTANT = bool, float, complex, str, bytes
_FOLLOWED = *_CONSTANT, int, type(None), Undefined, UndefinedReturnValue


def _flat(values: Any) -> _State | None:
    """None where a variable is of a kind that cannot be followed."""
    leaves, tree = jax.tree.flatten(values, is_leaf=lambda x: x is None or _tape.is_variable(x))
    if all(type(x) in _FOLLOWED or (isinstance(x, jax.Array) and not x.aval.weak_type) for x in leaves):
        return _State(values, leaves, tree)
    return None


class _Program:
    """The body of a loop as a compiled function."""

    def __init__(self, state: _State, known: _Body):
        self._tree, self._kinds, self._known = state.tree, state.kinds, known
        self._watch = _pure.Watch()
        self._added: dict[int, int] | None = None  # by how much each integer grows in an iteration
        self.failed = False  # whether the body is not to be traced again
        self.entered = 0  # how many times the body was traced
        self._traced: tuple[_Loop, _State] | None = None  # while it is
        self._function = _function.Function(self._step, None, autograph=True, compiled_only=True)
        self._feed = _Feed()
        self._key: Any = None  # what it depends on
        self._objects: list[Any] = []  # that this knows by their id; without them it is of no use

    def why(self) -> str:
        """Why it failed, in so far as it is known."""
        return self._watch.refused or "it cannot be compiled as a whole: its variables change, or it reads too much"

    def takes(self, state: _State) -> bool:
        """Whether the loop's variables are of the kinds that it was made for."""
        return self._tree == state.tree and self._kinds == state.kinds

    def fits(self, loop: _Loop) -> bool:
        """Whether it computes what the loop does now."""
        try:
            return self._key == self._depends_on(loop, [])
        except Impure:
            return False

    def _depends_on(self, loop: _Loop, keep: list[Any]) -> Any:
        def key_of(value: Any) -> Any:
            return _compiled_runs.closure_key(value, keep)

        own = {"ag__", *loop.set_state.__code__.co_freevars}
        functions = [(loop.body, own), *((function, {"ag__"}) for function in self._watch.functions)]
        return _pure.depends_on(functions, key_of)

    def _end(self, *_: Any) -> None:
        """One of its objects is gone: nothing can call for it any more."""
        if self in self._known.programs:
            self._known.programs.remove(self)

    def _step(self, iterator: Any, arrays: list[Any]) -> list[Any]:
        """One iteration; Python runs this once, to trace it."""
        assert self._traced is not None
        loop, state = self._traced
        element = next(iterator)
        self.entered += 1
        self._depends_on(loop, [])  # if that can be told; what a body changes that cannot be would be changed twice
        loop.set_state(state.rebuilt(arrays, lambda i, value: Counter()))
        with _pure.watching(self._watch):
            loop.body(element)
        after, tree = jax.tree.flatten(loop.get_state(), is_leaf=lambda x: x is None or _tape.is_variable(x))
        if self._watch.refused or tree != state.tree:
            raise Impure
        added = {}
        for i, (old, new) in enumerate(zip(state.leaves, after)):
            if isinstance(old, jax.Array):
                if not isinstance(new, jax.Array) or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise Impure
                if new.aval.weak_type:
                    raise Impure
            elif type(old) is int:
                if type(new) is not Counter:
                    raise Impure
                added[i] = new.added
            elif type(new) is not type(old) or repr(new) != repr(old):
                raise Impure
        if self._added not in (None, added):
            raise Impure
        keep: list[Any] = []
        self._key, self._added = self._depends_on(loop, keep), added
        self._objects = [_compiled_runs.weakly(value, self._end) for value in keep]
        return [new for new in after if isinstance(new, jax.Array)]

    def found(self, loop: _Loop, state: _State, count: int) -> Any:
        """The call and the program for the next elements; None where they are not for so many iterations in one."""
        self._feed.current = loop.iterator
        arguments: tuple[tuple, dict] = (self._feed, state.arrays), {}
        call = Call(*arguments)
        self._traced, before = (loop, state), self.entered
        try:
            found = self._function._found_several(call, *arguments, count, carries=True)
        except Exception:  # it comes up again where the body runs as it is
            found, self._added = None, None
        finally:
            self._feed.current = self._traced = None
            if self.entered > before:
                loop.set_state(state.values)
        entries = [entry for entries in self._function._entries.values() for entry in entries]
        self.failed = self.entered > 0 and self._added is None
        self.failed |= not all(_several.repeatable(entry) for entry in entries)
        return None if found is None else (call, found)

    def run(self, found: Any, state: _State, count: int) -> Any:
        """The loop's variables after so many iterations in one program."""
        call, (entry, steps, elements) = found
        arrays = entry.run(call, elements, False, steps)
        assert self._added is not None
        added = self._added
        return state.rebuilt(arrays, lambda i, value: value + count * added[i])
