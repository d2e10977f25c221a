"""The workers' output: whole lines, each with its worker's name in front."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping

# Bytes without the end of a line that are held before they are shown as a line.
LONGEST_LINE = 1 << 20
# The least time in seconds between two states of a progress bar, each of which becomes a line.
PROGRESS_INTERVAL = 2.0

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
    """What a terminal would show of a line in which carriage returns stand."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen:
    """Standard output and standard error of the launcher.

    Args:
        environment: the variables that say whether colours are wanted.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        plain = bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
        self._colours = {stream: not plain and os.isatty(stream) for stream in (1, 2)}

    def writer(self, worker: int, width: int, stream: int, tail: deque[bytes] | None = None) -> Callable[[bytes], None]:
        """A function that writes a line of a worker's.

        Args:
            worker: its number.
            width: the longest number's digits, so that the lines of all workers stand below each other.
            stream: 1 for standard output, 2 for standard error.
            tail: gets the lines too.
        """
        prefix = f"[worker {worker}]{' ' * (width - len(str(worker)))} ".encode()
        if self._colours[stream]:
            prefix = b"\x1b[%dm%b\x1b[0m" % (_COLOURS[worker % len(_COLOURS)], prefix)

        def write(line: bytes) -> None:
            if tail is not None:
                tail.append(line)
            # A colour that the worker left on would run on into the next worker's line.
            reset = b"\x1b[0m" if self._colours[stream] and b"\x1b[" in line else b""
            _write_all(stream, b"%b%b%b\n" % (prefix, line, reset))

        return write

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Writes lines of the launcher's own to standard error; in red the first one of an alarm."""
        first, newline, others = f"replicax launch: {text}".partition("\n")
        if alarm and self._colours[2]:
            first = f"\x1b[1;31m{first}\x1b[0m"
        _write_all(2, f"{first}{newline}{others}\n".encode(errors="backslashreplace"))


def _write_all(stream: int, data: bytes) -> None:
    """Writes everything. Where nobody reads any more the launcher ends, as if its terminal had been closed."""
    while data:
        try:
            data = data[os.write(stream, data) :]
        except BlockingIOError:  # another program has made the terminal or pipe that it shares with us so
            select.select([], [stream], [])
        except OSError:
            os.kill(os.getpid(), signal.SIGHUP)
            return
