"""The terminal: colours, and the progress of what takes long, as a bar or lines on standard error or in a notebook.

One function, `has_colours`, decides whether there are colours.

`with progress("saving ckpt-3", total=size) as bar` shows nothing for its first two seconds. A thread waits for them,
and ends with the context; where nothing would be shown there is no thread. A context inside another one of the same
thread is a part of it: its name and its total are shown as long as it lasts. Contexts of other threads show nothing
meanwhile.

What a program computes does not depend on any of this.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import io
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO

from replicax._report.notebooks import is_notebook

if TYPE_CHECKING:
    from rich.console import Console

CHOICES = ("auto", "always", "never")
THREAD = "replicax-progress"
VARIABLE = "REPLICAX_PROGRESS"
DELAY = 2.0  # seconds before anything is shown
_REDRAW = 0.2  # seconds between two states of a bar
_NOTEBOOK_WIDTH = 100  # characters
_NEXT_LINE = 30.0  # and between two lines, where there is no bar
_JOIN = 1.0  # the longest wait for the thread, whose terminal may be stopped

_choice: bool | None = None  # what the program has set
_is_quiet = False  # whether this process is not the one that shows progress
_lock = threading.Lock()
_shown: _Display | None = None  # the display under way


def has_colours(is_terminal: bool, choice: str = "auto", environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether a stream gets colours.

    Args:
        is_terminal: whether the stream is a terminal.
        choice: what the user asked for on the command line; `"auto"` leaves the decision to the environment.
        environment: the process's own by default. `NO_COLOR` turns colours off, `FORCE_COLOR` turns them on, and a
            terminal with `TERM=dumb` has none.

    >>> has_colours(True, environment={}), has_colours(False, environment={})
    (True, False)
    >>> has_colours(True, environment={"NO_COLOR": "1"}), has_colours(False, environment={"FORCE_COLOR": "1"})
    (False, True)
    >>> has_colours(False, "always", {"NO_COLOR": "1"})
    True
    """
    found = os.environ if environment is None else environment
    if choice != "auto":
        return choice == "always"
    if found.get("NO_COLOR"):
        return False
    if found.get("FORCE_COLOR"):
        return True
    return is_terminal and found.get("TERM") != "dumb"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--color` to the options of a command."""
    text = "colour the output: auto (the default) does so on a terminal, unless NO_COLOR is set"
    parser.add_argument("--color", choices=CHOICES, default="auto", metavar="WHEN", help=f"{text}; always; never")


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a stream is a terminal. One that is closed or missing is none."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


class Style:
    """Colours text, or leaves it as it is.

    Args:
        on: whether there are colours.

    >>> Style(False).bold("replicax")
    'replicax'
    """

    def __init__(self, on: bool):
        self.on = on

    def _in(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on and text else text

    def bold(self, text: str) -> str:
        """Returns the text in bold."""
        return self._in("1", text)

    def dim(self, text: str) -> str:
        """Returns the text in a fainter colour."""
        return self._in("2", text)

    def good(self, text: str) -> str:
        """Returns the text in green."""
        return self._in("32", text)

    def warning(self, text: str) -> str:
        """Returns the text in yellow."""
        return self._in("33", text)

    def alarm(self, text: str) -> str:
        """Returns the text in bold red."""
        return self._in("1;31", text)


def show_progress(on: bool | None = True) -> None:
    """Show the progress of what takes more than two seconds, on standard error or in a notebook; or do not.

    Compiling, saving and restoring, filling a shuffle buffer, gathering, planning and waiting for other workers are
    shown: as a bar if rich is installed (the extra `terminal`), else as lines. Only the first worker of a job shows
    progress. `REPLICAX_PROGRESS=0` or `1` in the environment does the same.

    Args:
        on: True shows progress, also where the stream is no terminal; False shows none; None restores the default,
            which shows it on terminals and in notebooks.

    >>> import replicax as rx
    >>> rx.config.show_progress(False)
    >>> rx.config.show_progress(None)
    """
    global _choice
    _choice = None if on is None else bool(on)


def keep_quiet() -> None:
    """Shows no progress in this process, whatever the user has set: another one of the job does."""
    global _is_quiet
    _is_quiet = True


def is_wanted() -> bool:
    """Returns whether progress is shown in this process."""
    if _is_quiet:
        return False
    if _choice is not None:
        return _choice
    setting = os.environ.get(VARIABLE, "").strip().lower()
    if setting in ("0", "off"):
        return False
    return setting in ("1", "on") or is_terminal(sys.stderr) or ("IPython" in sys.modules and is_notebook())


class progress:
    """A context in which something takes its time, which is shown if it takes long.

    Args:
        description: what is done, such as "compiling train_step".
        total: how many units there are to do; None if nobody knows.
        unit: "bytes", or the plural of what is counted.

    >>> with progress("reading", total=3, unit="files") as bar:
    ...     for _ in range(3):
    ...         bar.advance()
    """

    __slots__ = ("_display", "description", "done", "total", "unit")

    def __init__(self, description: str, total: int | None = None, unit: str = "steps"):
        self.description, self.total, self.unit = description, total, unit
        self.done = 0
        self._display: _Display | None = None

    def advance(self, count: int = 1) -> None:
        """Notes that so many more units are done."""
        self.done += count

    def __enter__(self) -> Self:
        global _shown
        if _shown is None and not is_wanted():
            return self
        with _lock:
            if _shown is None:
                _shown = self._display = _Display(self)
            elif _shown.owner == threading.get_ident():
                self._display = _shown
                _shown.parts.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        global _shown
        display, self._display = self._display, None
        if display is None:
            return
        display.parts.remove(self)
        if not display.parts:
            _shown = None
            display.close()


class _Display:
    """Shows the contexts of one thread, from the first one's beginning to its end."""

    def __init__(self, first: progress) -> None:
        self.owner = threading.get_ident()
        self.parts = [first]
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._show, name=THREAD, daemon=True)
        try:
            self._thread.start()
            atexit.register(self.close)  # a thread that the interpreter does not wait for may be in the context
        except RuntimeError:  # the interpreter ends, or the system has no thread left
            self._thread = None

    def close(self) -> None:
        """Ends the display, and clears its bar."""
        self._ended.set()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join(_JOIN)

    def _show(self) -> None:
        if self._ended.wait(DELAY):
            return
        # A display is never worth an error: not of a terminal that is gone, nor of a library that draws.
        with contextlib.suppress(Exception):
            stream = sys.stderr
            has_rich = importlib.util.find_spec("rich") is not None
            if has_rich and is_notebook():
                self._display()
            elif has_rich and is_terminal(stream) and os.environ.get("TERM") != "dumb":
                self._draw(stream.fileno())
            else:
                self._print()

    def _draw(self, terminal: int) -> None:
        """Draws a bar again and again, until the end."""
        bar = _Bar()
        try:
            while parts := list(self.parts):
                # The cursor goes back to the beginning of the line, where the program's own output begins.
                width = max(20, os.get_terminal_size(terminal).columns - 1)
                file = bar.render(parts, time.monotonic() - self._begin, width).file
                line = file.getvalue().split("\n")[0].rstrip()  # type: ignore[attr-defined]
                _write(terminal, f"\r\x1b[2K{line}\r")
                if self._ended.wait(_REDRAW):
                    break
        finally:
            _write(terminal, "\r\x1b[2K")

    def _display(self) -> None:
        """Display a bar below a notebook's cell, and replace it again and again, until the end."""
        from IPython import display

        bar, shown = _Bar(), display.display(display.HTML(""), display_id=True)
        try:
            while parts := list(self.parts):
                console = bar.render(parts, time.monotonic() - self._begin, _NOTEBOOK_WIDTH)
                shown.update(display.HTML(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")))
                if self._ended.wait(_REDRAW):
                    break
        finally:
            shown.update(display.HTML(""))

    def _print(self) -> None:
        """Prints a line now and then, until the end."""
        while parts := list(self.parts):
            seconds = time.monotonic() - self._begin
            sys.stderr.write(f"replicax: {_named(parts)} ...{_share(parts[-1])} {seconds:.0f} s\n")
            if self._ended.wait(_NEXT_LINE):
                break


def _named(parts: list[progress]) -> str:
    return ": ".join(part.description for part in parts)


def _share(part: progress) -> str:
    return f" {100 * min(1.0, part.done / part.total):.0f} %," if part.total else ""


def _write(terminal: int, text: str) -> None:
    # Not through `sys.stderr`, whose lock the thread might hold when the interpreter ends.
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(terminal, data) :]


class _Bar:
    """Makes one line of text by rich: a spinner, what is done, a bar and figures where the total is known, the time."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._kind: tuple[bool, str] | None = None

    def render(self, parts: list[progress], seconds: float, width: int) -> Console:
        """Return a console with the line for these parts."""
        from rich.console import Console

        top = parts[-1]
        kind = bool(top.total), top.unit
        console = Console(
            file=io.StringIO(), force_terminal=True, force_jupyter=False, width=width, no_color=not has_colours(True),
            record=True,
        )  # fmt: skip
        if kind != self._kind:
            self._progress, self._kind = _layout(*kind), kind
            self._progress.add_task("", total=None)
        (task,) = self._progress.tasks
        self._progress.update(task.id, description=_named(parts), total=top.total, completed=top.done)
        task.start_time, task.stop_time = task.get_time() - seconds, None
        console.print(self._progress.get_renderable())
        return console


def _layout(is_known: bool, unit: str) -> Any:
    """Returns rich's columns for a total that is known, or not."""
    from rich import progress as rich

    columns: list[Any] = [rich.SpinnerColumn(), rich.TextColumn("{task.description}", markup=False)]
    if is_known:
        counted = rich.TextColumn(f"{{task.completed}}/{{task.total}} {unit}")
        counts = rich.DownloadColumn() if unit == "bytes" else counted
        columns += [rich.BarColumn(), rich.TaskProgressColumn(), counts]
    return rich.Progress(*columns, rich.TimeElapsedColumn(), auto_refresh=False)
