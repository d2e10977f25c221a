"""The log of calls whose collectives span processes: which have been made, and which are not done."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
import zlib
from collections import deque
from typing import NamedTuple

import jax

_REMEMBERED = 1024  # calls that can be compared with another process's, after they were made
_HELD_BYTES = 1 << 16  # a larger output is watched without being kept alive


class Made(NamedTuple):
    """A call that was made, with a digest of the labels of all calls up to it."""

    number: int
    digest: int
    label: str


class CollectiveCall:
    """One call under way, or a wait, whose `number` is None and whose `order` counts the waits; 0 if uncounted."""

    __slots__ = ("compiling", "done", "label", "number", "order", "output", "since")

    def __init__(self, number: int | None, label: str, order: int = 0):
        self.number = number
        self.order = order
        self.label = label
        self.since = time.monotonic()
        self.output: jax.Array | weakref.ref[jax.Array] | None = None
        self.compiling = False  # it is being compiled, and not under way yet
        self.done = False

    def compiled(self) -> None:
        """Notes that it has been compiled: from now on it waits for others."""
        self.compiling, self.since = False, time.monotonic()

    def dispatched(self, output: jax.Array | None, small: bool | None = None) -> None:
        """Notes that it has been dispatched: it is done when this output is ready, or at once without one."""
        if output is None or isinstance(output, jax.core.Tracer):
            self.done = True
        else:
            self.output = output if small or (small is None and is_small(output)) else weakref.ref(output)

    def ended(self) -> None:
        """Notes that somebody has waited for the output."""
        self.done, self.output = True, None

    def check(self) -> bool:
        """Returns whether the call is done."""
        if not self.done and self.output is not None:
            output = self.output() if isinstance(self.output, weakref.ref) else self.output
            try:
                self.done = output is None or output.is_deleted() or output.is_ready()  # type: ignore[attr-defined]
            except RuntimeError:  # deleted just now
                self.done = True
            if self.done:
                self.output = None
        return self.done


def is_small(output: jax.Array) -> bool:
    """Returns whether an output may be kept alive just to see when it is ready."""
    return output.nbytes <= _HELD_BYTES


def _name(label: str) -> str:
    """Returns a label without the shapes in brackets behind it."""
    return label.partition("(")[0].rstrip()


class _Label:
    """The number of calls with one label, and the bytes of the label that go into the digest."""

    __slots__ = ("count", "line")

    def __init__(self, label: str):
        self.count, self.line = 0, b"\n" + label.encode()


class CallLog:
    """All calls of this process, in the order in which they were made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: deque[Made] = deque([Made(0, 0, "no call")], maxlen=_REMEMBERED)
        self._open: deque[CollectiveCall] = deque()
        self._waits: list[CollectiveCall] = []
        self._moved = 0.0  # when a call was last seen to be done
        self._held = 0.0  # when some process was last known to be compiling
        self.waits = 0
        self.threads: set[int] = set()  # those that have made calls or waited
        self._labels: dict[str, _Label] = {}

    @property
    def last(self) -> Made:
        """The call that was made last, whose number says how many there were."""
        return self._made[-1]

    def begin(self, label: str) -> CollectiveCall:
        """Counts a call that is about to be dispatched."""
        self.threads.add(threading.get_ident())
        with self._lock:
            number, digest, _ = self._made[-1]
            call = CollectiveCall(number + 1, label)
            known = self._labels.get(label) or self._labels.setdefault(label, _Label(label))
            # One step, so that a KeyboardInterrupt here leaves a number and the digest that belongs to it.
            self._made.append(Made(number + 1, zlib.crc32(known.line, digest), label))
            self._open.append(call)
            known.count += 1
        if len(self._open) > 64:
            self.oldest()
        return call

    def step(self) -> tuple[int, str] | None:
        """Returns the number of calls of what was called last, and its name: most often the step of a training loop."""
        number, _, last = self.last
        name = _name(last)
        count = sum(known.count for label, known in list(self._labels.items()) if _name(label) == name)
        return (count, name) if number else None

    def begin_wait(self, label: str, counted: bool = True) -> CollectiveCall:
        """Note that a thread begins to wait for other processes in some other way than a call; see `state.waiting`."""
        self.threads.add(threading.get_ident())
        with self._lock:
            self.waits += counted
            call = CollectiveCall(None, label, self.waits if counted else 0)
            self._waits.append(call)
        return call

    def end_wait(self, call: CollectiveCall) -> None:
        """Notes that a wait is over."""
        with self._lock, contextlib.suppress(ValueError):
            self._waits.remove(call)

    def oldest(self, waits: bool = True) -> CollectiveCall | None:
        """Returns the oldest call that is not done; if there is none and `waits`, the oldest wait."""
        with self._lock:
            while self._open and self._open[0].check():
                self._open.popleft()
                self._moved = time.monotonic()
            return self._open[0] if self._open else self._waits[0] if waits and self._waits else None

    def age(self, call: CollectiveCall) -> float:
        """Returns for how many seconds a call has been the oldest one while no process was compiling."""
        return time.monotonic() - max(call.since, self._held, self._moved if call.number is not None else 0.0)

    def hold(self) -> None:
        """Notes that some process is compiling, so that the time others wait for it does not count."""
        self._held = time.monotonic()

    def made(self) -> dict[int, Made]:
        """Returns the latest calls, by their numbers."""
        with self._lock:
            return {made.number: made for made in self._made}

    def digest_at(self, number: int) -> int | None:
        """Returns the digest after that many calls; None if it is not known, or no longer."""
        with self._lock:
            index = number - self._made[0].number
            return self._made[index].digest if 0 <= index < len(self._made) else None
