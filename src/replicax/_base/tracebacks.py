"""Errors and warnings as seen from the user's program: its frames and lines, without those of replicax and JAX.

Public functions that call a user's code are wrapped in `boundary`. An error that leaves one has the frames of the
user's code, and so have its causes. `JAX_TRACEBACK_FILTERING=off` in the environment, or
`jax.config.update("jax_traceback_filtering", "off")`, keeps all frames: it is the switch of JAX's own.

`Living` lists objects with the lines of the user's program that made them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
import sysconfig
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax

from replicax._base import jax_internals

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return os.path.dirname(spec.origin) + os.sep if spec is not None and spec.origin else os.devnull


_HIDDEN = (*map(_folder_of, ("replicax", "jax", "jaxlib", "malt")), contextlib.__file__, functools.__file__)
for _name in ("replicax", "malt"):
    jax_internals.hide_lines_of(_folder_of(_name))


_STANDARD = (sysconfig.get_path("stdlib") + os.sep, "<frozen")
_PACKAGES = {"site-packages", "dist-packages"}


@functools.lru_cache(maxsize=4096)
def is_hidden_file(filename: str) -> bool:
    """Returns whether a file is of replicax, JAX or AutoGraph."""
    return filename.startswith(_HIDDEN)


def is_users(code: types.CodeType) -> bool:
    """Returns whether a function with this code is the user's or of a library other than replicax and JAX."""
    return not is_hidden_file(code.co_filename)


def _of_the_user(tb: types.TracebackType | None) -> types.TracebackType | None:
    kept = None
    for frame, line in reversed(list(traceback.walk_tb(tb))):
        if is_users(frame.f_code):
            kept = types.TracebackType(kept, frame, frame.f_lasti, line)
    return kept


def filter_traceback(error: BaseException) -> None:
    """Leaves the user's frames in the tracebacks of an error, its causes and what was handled when it was raised."""
    if jax.config.jax_traceback_filtering == "off":  # type: ignore[attr-defined]
        return
    seen: list[BaseException] = []
    chain: list[BaseException | None] = [error]
    while chain:
        found = chain.pop()
        if found is not None and not any(found is other for other in seen):
            seen.append(found)
            found.__traceback__ = _of_the_user(found.__traceback__)
            chain += [found.__cause__, found.__context__]


def boundary(function: _F) -> _F:
    """Has errors that leave a public function show the frames of the user's code alone; a decorator."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _advise(error)
            filter_traceback(error)
            raise  # JAX_TRACEBACK_FILTERING=off shows the frames of replicax and JAX too

    return cast(_F, call)


def _no_advice(error: BaseException) -> None:
    pass


_advise: Callable[[BaseException], None] = _no_advice


def set_advice(advise: Callable[[BaseException], None]) -> None:
    """Plugs in the function that adds to an error that leaves replicax what the user can do."""
    global _advise
    _advise = advise


def users_frame() -> types.FrameType:
    """Returns the innermost frame of this thread that is the user's; the outermost of all where none is."""
    frame = sys._getframe(1)
    while not is_users(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Origin(NamedTuple):
    """The place in the user's code where something was made, and the function of replicax that it called."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"`{self.function}` ({self.place})"

    @property
    def place(self) -> str:
        """The name of the file, without its folder, and the line."""
        return f"{os.path.basename(self.file)}:{self.line}"


def origin() -> Origin:
    """Returns the place in the user's code from which this is called; that of a library where there is no other."""
    frame: types.FrameType | None = sys._getframe(1)
    function, found = "", None
    while frame is not None:
        code = frame.f_code
        if is_users(code):
            found = found or Origin(function, code.co_filename, frame.f_lineno)
            if not (code.co_filename.startswith(_STANDARD) or _PACKAGES.intersection(code.co_filename.split(os.sep))):
                return Origin(found.function, code.co_filename, frame.f_lineno)
        elif found is None and code.co_name != "__call__":  # of a metaclass
            function = code.co_name
        frame = frame.f_back
    return found or Origin(function, "", 0)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns of the line of the user's code that runs now."""
    frame = users_frame()
    _warn_at(frame, frame.f_lineno, message, category)


def warn_of(error: BaseException, message: str) -> None:
    """Warns of the line of the user's code that an error came from; `{line}` in the message stands for it."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_users(frame.f_code)]
    frame, line = frames[-1] if frames else (users_frame(), users_frame().f_lineno)
    place = f"{frame.f_code.co_filename}:{line}"
    _warn_at(frame, line, message.replace("{line}", place), UserWarning)


def _warn_at(frame: types.FrameType, line: int, message: str, category: type[Warning]) -> None:
    module, registry = (
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
    # Without the module's globals, whose loader fails to find the source of programs given to `python -c`.
    warnings.warn_explicit(message, category, frame.f_code.co_filename, line, module, registry)


class Living(Generic[_T]):
    """Objects for as long as they live, in the order in which they were made. They need not be hashable.

    Threads add objects while others go through them. There is no lock, which a finalizer that makes an object, or a
    forked child, would find held: an entry is complete when it is added, and a copy of the entries is gone through.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[_T], Origin]] = {}
        self._numbers = itertools.count()

    def add(self, made: _T) -> None:
        """Adds an object, once it is made."""
        number, entries = next(self._numbers), self._entries
        entries[number] = weakref.ref(made, lambda _: entries.pop(number, None)), origin()

    def __iter__(self) -> Iterator[tuple[_T, Origin]]:
        for reference, place in self._entries.copy().values():
            if (living := reference()) is not None:
                yield living, place
