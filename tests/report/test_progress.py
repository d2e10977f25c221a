"""Progress of what takes long: shown on a terminal after a delay, silent and without a thread elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._report import terminal as module
from replicax._report.terminal import progress

pty = pytest.importorskip("pty")

NEVER = 1e6  # seconds


def threads():
    return [thread for thread in threading.enumerate() if thread.name == module.THREAD]


class Terminal:
    """A terminal that is the standard error stream."""

    def __init__(self):
        import termios

        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        self.stream = open(theirs, "w", encoding="utf-8")  # noqa: SIM115
        self.seen = ""

    def wait_for(self, text):
        """Reads until it shows this."""
        while text not in self.seen:
            assert select.select([self._ours], [], [], 60)[0], f"{text!r} does not come after {self.seen!r}"
            self.seen += os.read(self._ours, 1 << 16).decode(errors="replace")

    def rest(self):
        """Returns all that was written."""
        self.stream.write("THE END")
        self.stream.flush()
        self.wait_for("THE END")
        return self.seen.removesuffix("THE END")

    def close(self):
        self.stream.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in (module.VARIABLE, "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_is_quiet", False)
    found = Terminal()
    # Not `sys.stderr` itself, which pytest sets again between a fixture and its test.
    monkeypatch.setattr(module, "sys", types.SimpleNamespace(stderr=found.stream))
    yield found
    assert not threads()
    found.close()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "DELAY", 0.0)


def test_a_bar_shows_what_is_done_and_is_cleared(terminal, at_once):
    with progress("saving ckpt-3", total=4, unit="files") as bar:
        terminal.wait_for("saving ckpt-3")
        bar.advance()
        terminal.wait_for("25%")
        terminal.wait_for("1/4 files")
    assert terminal.rest().endswith("\r\x1b[2K")


def test_bytes_are_shown_in_units(terminal, at_once):
    with progress("reading", total=4_000_000, unit="bytes") as bar:
        bar.advance(1_000_000)
        terminal.wait_for("1.0/4.0 MB")


def test_a_part_is_shown_with_its_total_as_long_as_it_lasts(terminal, at_once):
    with progress("restoring ckpt-3"):
        terminal.wait_for("restoring ckpt-3 ")
        with progress("checking files", total=2):
            terminal.wait_for("restoring ckpt-3: checking files")
        terminal.seen = ""
        terminal.wait_for("restoring ckpt-3 ")


def test_nothing_is_written_before_the_delay(terminal, monkeypatch):
    monkeypatch.setattr(module, "DELAY", NEVER)
    with progress("compiling step"):
        assert len(threads()) == 1
    assert not threads() and terminal.rest() == ""


def test_colours_follow_no_color(terminal, at_once, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with progress("saving", total=2):
        terminal.wait_for("0/2 steps")
    assert "\x1b[3" not in terminal.rest() and "\x1b[9" not in terminal.seen


def test_a_notebook_shows_a_bar_below_the_cell(at_once, monkeypatch):
    shown, seen = [], threading.Event()

    def show(html):
        shown.append(html)
        if "1/4 files" in html:
            seen.set()

    handle = types.SimpleNamespace(update=show)
    display = types.SimpleNamespace(HTML=str, display=lambda html, display_id: handle)
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with progress("saving <ckpt>", total=4, unit="files") as bar:
        bar.advance()
        assert seen.wait(60)
    assert "saving &lt;ckpt&gt;" in shown[0] and shown[-1] == ""
    del shell.kernel  # IPython on a terminal
    with progress("saving"):
        assert not threads()


@pytest.mark.parametrize("why", ["no rich", "a dumb terminal"])
def test_without_a_bar_there_is_a_line(terminal, at_once, monkeypatch, why):
    if why == "no rich":
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with progress("planning step", total=4) as bar:
        bar.done = 1
        terminal.wait_for(" s\r\n")
    assert terminal.rest() in (f"replicax: planning step ...{share} 0 s\r\n" for share in (" 0 %,", " 25 %,"))


def test_elsewhere_it_is_silent_and_has_no_thread(at_once, monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("compiling step", total=3) as bar:
            assert not threads()
            bar.advance()
        assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize("off", ["the program", "the environment", "another worker shows it"])
def test_it_can_be_turned_off(terminal, at_once, monkeypatch, off):
    if off == "the program":
        monkeypatch.setattr(module, "_choice", None)
        rx.config.show_progress(False)
    elif off == "the environment":
        monkeypatch.setenv(module.VARIABLE, "0")
    else:
        module.keep_quiet()
    with progress("compiling step"):
        assert not threads()
    assert terminal.rest() == ""


def test_it_can_be_asked_for_where_there_is_no_terminal(at_once, monkeypatch):
    monkeypatch.setattr(module, "_is_quiet", False)
    monkeypatch.setenv(module.VARIABLE, "1")
    written = threading.Event()

    class Stream(io.StringIO):
        def write(self, text):
            super().write(text)
            written.set()
            return len(text)

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("compiling step"):
        assert written.wait(60)
    assert stream.getvalue() == "replicax: compiling step ... 0 s\n"


def test_an_exception_passes_and_ends_the_display(terminal, at_once):
    with pytest.raises(ZeroDivisionError):
        with progress("one"), progress("two"):
            terminal.wait_for("one: two")
            1 / 0  # noqa: B018
    assert not threads() and terminal.rest().endswith("\r\x1b[2K")


def test_a_stream_that_fails_is_no_error(at_once, monkeypatch):
    monkeypatch.setattr(module, "_is_quiet", False)
    monkeypatch.setenv(module.VARIABLE, "1")
    tried = threading.Event()

    class Broken(io.StringIO):
        def write(self, text):
            tried.set()
            raise OSError("the terminal is gone")

    monkeypatch.setattr(sys, "stderr", Broken())
    with progress("compiling step"):
        assert tried.wait(60)
    assert not threads()


def test_other_threads_show_nothing_meanwhile(terminal, at_once):
    def other():
        with progress("of another thread"):
            assert len(threads()) == 1

    with progress("of this thread"):
        terminal.wait_for("of this thread")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another" not in terminal.rest()


# Where it is used.


@contextlib.contextmanager
def descriptions(monkeypatch):
    """Notes the names of the contexts that are entered, each behind that of the one around it."""
    found, inside = [], []
    enter, leave = progress.__enter__, progress.__exit__

    def entered(self):
        inside.append(self)
        found.append(": ".join(part.description for part in inside))
        return enter(self)

    def left(self, *error):
        inside.remove(self)
        return leave(self, *error)

    with monkeypatch.context() as patch:
        patch.setattr(progress, "__enter__", entered)
        patch.setattr(progress, "__exit__", left)
        yield found


def test_the_first_call_of_a_function_is_shown_and_later_ones_are_not(monkeypatch):
    v = rx.Variable(1.0)

    @rx.function
    def step(x):
        v.assign_add(x)
        return v + x

    with descriptions(monkeypatch) as found:
        step(np.float32(1.0))
        assert found == ["tracing step", "compiling step"]
        found.clear()
        step(np.float32(2.0))
        assert not found


def test_what_follows_the_compilation_is_not_called_so(monkeypatch):
    described = []
    leave = progress.__exit__
    monkeypatch.setattr(progress, "__exit__", lambda self, *error: (described.append(self.description), leave(self))[1])
    rx.function(lambda x: x * 3 + 1)(np.float32(1.0))
    assert described[0].startswith("tracing ") and described[1].endswith(" for the first time")


def test_saving_and_restoring_are_shown_by_their_parts(tmp_path, monkeypatch):
    checkpoint = rx.train.Checkpoint(v=rx.Variable(np.zeros(1000, np.float32)))
    sizes = []
    advance = progress.advance

    def advanced(self, count=1):
        sizes.append((self.description, count))
        advance(self, count)

    monkeypatch.setattr(progress, "advance", advanced)
    with descriptions(monkeypatch) as found:
        path = checkpoint.save(str(tmp_path / "ckpt"))
        assert found == ["saving ckpt-1", "saving ckpt-1: writing arrays", "saving ckpt-1: computing checksums"]
        found.clear()
        checkpoint.restore(path)
        parts = ["", ": checking files", ": reading arrays", ": reading values"]
        assert found == [f"restoring ckpt-1{part}" for part in parts]
    written = sum(n for what, n in sizes if what == "computing checksums")
    assert 0 < written == sum(n for what, n in sizes if what == "checking files")


def test_filling_a_shuffle_buffer_is_shown(monkeypatch):
    def elements():
        yield from range(5)

    dataset = rx.data.Dataset.from_generator(elements, output_signature=rx.TensorSpec((), np.int32))
    with descriptions(monkeypatch) as found:
        assert sorted(map(int, dataset.shuffle(10, seed=1))) == [0, 1, 2, 3, 4]
    assert found == ["filling the buffer of shuffle"]


def test_a_large_gather_is_shown_on_a_terminal(terminal, monkeypatch):
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    small = strategy.experimental_distribute_values_from_function(lambda _: jnp.zeros(4))
    large = strategy.experimental_distribute_values_from_function(lambda _: jnp.zeros(1 << 23))
    with descriptions(monkeypatch) as found:
        strategy.gather(small, axis=0)
        assert not found
        strategy.gather(large, axis=0)
        assert found == ["gathering values"]


def test_the_interpreter_ends_while_a_thread_is_in_the_context(run_python):
    done = run_python(
        """
        import threading
        from replicax._report import terminal as module

        module.DELAY = 0.0
        entered = threading.Event()

        def for_ever():
            with module.progress("reading"):
                entered.set()
                threading.Event().wait()

        threading.Thread(target=for_ever, daemon=True).start()
        entered.wait()
        """,
        env={"REPLICAX_PROGRESS": "1"},
    )
    assert done.returncode == 0
    assert set(done.stderr.splitlines()) <= {"replicax: reading ... 0 s"}
