"""The workers' output: whole lines, each with its worker's name in front."""

from __future__ import annotations

import itertools
import operator
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from replicax._report.terminal import has_colours

# Bytes without the end of a line that are held before they are shown as a line.
LONGEST_LINE = 1 << 20
# The least time in seconds between two states of a progress bar, each of which becomes a line.
PROGRESS_INTERVAL = 2.0
# Bytes that wait to be written before the workers' output is left in their pipes.
_MOST_PENDING = 1 << 20

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


class Lines:
    """Cuts a stream into lines, and passes on each whole one.

    A carriage return begins a line anew, as on a terminal. Of what is written over in this way (by a progress bar) a
    state is passed on now and then, and the last one.

    >>> lines = Lines(print)
    >>> lines.feed(b"loss 0.")
    >>> lines.feed(b"5\\nstep 1\\rstep 2\\nthe e")
    b'loss 0.5'
    b'step 2'
    >>> lines.close()
    b'the e'

    Args:
        write: gets each line, without its end.
        clock: the time in seconds.
    """

    def __init__(self, write: Callable[[bytes], object], clock: Callable[[], float] = time.monotonic):
        self._write = write
        self._clock = clock
        self._rest = b""
        self._shown = clock()

    def feed(self, data: bytes) -> None:
        """Takes what has been read."""
        # Only new data can hold the end of a line: a long line is not searched again for each of its parts.
        head, end, data = data.rpartition(b"\n")
        if end:
            first, *others = (self._rest + head).split(b"\n")
            self._rest = b""
            for line in (first, *others):
                self._write(_last_state(line))
            self._shown = self._clock()
        self._rest += data
        states, drawn, rest = self._rest.rpartition(b"\r")
        if drawn and rest:  # a lone "\r" at the end may be the first half of "\r\n"
            self._rest = b"\r" + rest
            if (state := _last_state(states)) and self._clock() - self._shown >= PROGRESS_INTERVAL:
                self._write(state)
                self._shown = self._clock()
        if len(self._rest) > LONGEST_LINE:
            self.close()

    def close(self) -> None:
        """Passes on what is left: the stream has ended, perhaps within a line."""
        if line := _last_state(self._rest):
            self._write(line)
        self._rest = b""


def _last_state(line: bytes) -> bytes:
    """Returns what a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """Standard output and standard error of the launcher.

    A thread of its own does the writing, so that a reader who does not read holds up neither signals nor the messages
    of other launchers. What cannot be written is dropped: the workers go on.
    """

    def __init__(self) -> None:
        self._streams = {number: _Stream(descriptor) for number, descriptor in _standard_streams().items()}
        self.colour("auto")
        self._pending: list[tuple[int, bytes]] = []
        self._size = 0  # bytes that are not written yet
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="launch-output", daemon=True).start()

    def colour(self, choice: str) -> None:
        """Sets whether there are colours, as `--color` says."""
        self._colours = {number: has_colours(each.is_terminal, choice) for number, each in self._streams.items()}

    def writer(
        self, name: str, colour: int, width: int, stream: int, tail: deque[bytes] | None = None
    ) -> Callable[[bytes], None]:
        """Returns a function that writes a line of a process to standard output (1) or error (2), and to the tail.

        Args:
            name: stands in front of each line.
            colour: the number of one; further numbers begin with the first again.
            width: the number of characters of the longest name.
            stream: 1 or 2.
            tail: gets the lines as well.
        """
        prefix = f"[{name}]{' ' * (width - len(name))} ".encode()
        if self._colours[stream]:
            prefix = b"\x1b[%dm%b\x1b[0m" % (_COLOURS[colour % len(_COLOURS)], prefix)

        def write(line: bytes) -> None:
            if tail is not None:
                tail.append(line)
            # A colour that the worker left on would run on into the next worker's line.
            reset = b"\x1b[0m" if self._colours[stream] and b"\x1b[" in line else b""
            self._put(stream, b"%b%b%b\n" % (prefix, line, reset))

        return write

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Writes lines of the launcher's own to standard error; in red the first one of an alarm."""
        first, newline, others = f"replicax launch: {text}".partition("\n")
        if alarm and self._colours[2]:
            first = f"\x1b[1;31m{first}\x1b[0m"
        self._put(2, f"{first}{newline}{others}\n".encode(errors="backslashreplace"))

    @property
    def behind(self) -> bool:
        """True while so much is still to be written that nothing more should be read."""
        return self._size > _MOST_PENDING

    def close(self, timeout: float | None = None) -> None:
        """Waits until everything is written, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, timeout)

    def _put(self, stream: int, data: bytes) -> None:
        with self._changed:
            self._pending.append((stream, data))
            self._size += len(data)
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                batch, self._pending = self._pending, []
            for number, group in itertools.groupby(batch, key=operator.itemgetter(0)):
                problem = self._streams[number].write(b"".join(data for _, data in group))
                if problem and number == 1:
                    text = "what the workers print is lost until it can be written again; the workers go on."
                    self._streams[2].write(f"replicax launch: standard output: {problem}; {text}\n".encode())
            with self._changed:
                self._size -= sum(len(data) for _, data in batch)
                self._changed.notify_all()


class _Stream:
    """Whole lines to a file descriptor that may fail, and may work again later."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._problem = ""
        self._lost = 0  # lines that could not be written since the last one that could
        self._torn = False  # the last line that was written has no end
        self.is_terminal = os.isatty(descriptor)

    def write(self, lines: bytes) -> str:
        """Writes lines, or drops them and returns why, unless the ones before were dropped too; else an empty text."""
        note = f"replicax launch: {self._lost} lines are missing here: {self._problem}\n" if self._lost else ""
        data = (b"\n" if self._torn else b"") + note.encode() + lines
        while data:
            try:
                written = os.write(self._descriptor, data)
                self._torn, data = data[written - 1 : written] != b"\n", data[written:]
            except BlockingIOError:  # another program has made the terminal or pipe that it shares with us so
                select.select([], [self._descriptor], [])
            except OSError as error:
                new, self._problem = not self._problem, error.strerror or str(error)
                left, of_these = data.count(b"\n"), lines.count(b"\n")
                self._lost = left if left <= of_these else self._lost + of_these
                return self._problem if new else ""
        self._lost, self._problem = 0, ""
        return ""


def _standard_streams() -> dict[int, int]:
    """Returns the descriptors of standard output and error. Nothing else may get a number that the caller closed."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        nowhere = os.dup(nowhere)
    return {1: 1 if sys.__stdout__ is not None else nowhere, 2: 2 if sys.__stderr__ is not None else nowhere}
