"""Keeps what libraries print to themselves out of the program's output."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_GREETING = re.compile(rb"\[Gloo\] Rank|peer ranks")  # several at once may come in pieces


@contextlib.contextmanager
def without_greetings() -> Iterator[None]:
    """Keeps out of stdout, which belongs to the program, that Gloo prints there whom it is connected to."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (AttributeError, OSError, ValueError):  # there is none, it is closed, or it is no file
        yield
        return
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 1)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # what C has in its buffer
            os.dup2(kept, 1)
            os.close(kept)
            aside.seek(0)
            os.write(1, b"".join(line for line in aside if not _GREETING.search(line)))


@contextlib.contextmanager
def without_logs(logger: str, *texts: str) -> Iterator[None]:
    """Keeps out of a library's log, for all threads, the messages that have one of these texts."""

    def wanted(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in texts)

    log = logging.getLogger(logger)
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)
