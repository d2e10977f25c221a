"""One line for a function whose short steps the host drives one by one: the gain of several steps in one call.

Some calls are measured, once for a function, after its first few hundred. The clock decides whether a line is printed,
and nothing else: the measured calls run the same program, and afterwards nothing is measured any more.

What is known of a call is how long the program takes from its start to its end, and how long an empty program takes
with the same arguments: JAX's own share of a call. The difference is taken for the time that the devices compute; it
remains in every step. Of the rest of a call, `steps_per_call=K` leaves one K-th part. What happens outside of the
call, such as reading the next batch, is taken to remain as it is; in a loop that the host drives it is a range, since
the rest of the loop's body would be part of the program as well.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._base import doc_pages, tracebacks
from replicax._base.thread_state import looks_for_nans
from replicax._base.types import Tree
from replicax._engine.modes import PythonCode
from replicax._engine.signature import CallSignature, ProbedProgram
from replicax._tracing import frames

FIRST = 300  # calls before those that are measured: short programs are left alone
FREE, WAITED = 32, 8  # calls that are measured: as they come, and then waiting for the end of each
STEPS = 32  # steps a call in the hint
LEAST = 1.25  # times as fast; less is not worth a line
SHORT = 0.003  # seconds of a step of which much may be the host's

_VARIABLE = "REPLICAX_HINT_SHORT_STEPS"
_on: bool | None = None  # None as long as nobody has asked


def hint_short_steps(on: bool = True) -> None:
    """Sets whether a function whose short steps are called one by one says, once, how much `steps_per_call` would gain.

    The line on the standard error stream comes after some hundred calls, and names the line of the program that makes
    them. Some calls are measured for it; what is computed is the same with and without it. In jobs of several processes
    there is no such line. `REPLICAX_HINT_SHORT_STEPS=off` in the environment turns it off, too.

    >>> import replicax as rx
    >>> rx.config.hint_short_steps(False)
    """
    global _on
    _on = bool(on)


def _are_on() -> bool:
    return os.environ.get(_VARIABLE, "").strip().lower() != "off" if _on is None else _on


class StepHint:
    """Counts the calls of one function and measures some of them, until it is decided whether to print the hint.

    Attributes:
        calls: how many there were.
        decided: whether it is.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.decided = False
        self._thread = 0
        self._begins: list[float] = []  # when each of the calls that are not waited for began, and one more
        self._inside: list[float] = []  # seconds from the beginning of its program's work to the end of the call
        self._computing: list[float] = []  # seconds that the program took, waited for
        self._empty: list[float] = []  # and the empty program with its arguments
        self._empty_program: Any = None
        self._program: ProbedProgram | None = None  # that the current call runs
        self._entered = 0.0
        self._ended = False

    def run(self, owner: PythonCode, driven: bool, call: CallSignature, run: Callable[[], Tree]) -> Tree:
        """Returns the result of a call, which is measured.

        Args:
            owner: the code that the hint names.
            driven: whether that is a loop which the host drives, with the call in its body.
            call: the call, which `run` carries out.
        """
        if not self._begins:
            self._thread = threading.get_ident()
        if self._is_impossible(owner):
            self.decided = True
            return run()
        call.probe = self
        begin = time.perf_counter()
        try:
            result = run()
        except BaseException:
            self.decided = True
            raise
        self._note(begin, time.perf_counter())
        program, self._program = self._program, None
        self.decided = self._ended or program is None or len(self._computing) == WAITED
        if self.decided and not self._ended and program is not None:
            self._tell(owner, driven, call, program)
        return result

    def _is_impossible(self, owner: PythonCode) -> bool:
        elsewhere = threading.get_ident() != self._thread or type(frames.frame()) is not frames.GlobalFrame
        return owner.hinted or elsewhere or looks_for_nans() or jax.process_count() > 1 or not _are_on()

    def entered(self, program: ProbedProgram) -> None:
        """Notes that a call begins to run `program`, its elements at hand."""
        self._ended = self._ended or not program.is_repeatable or program.guard is not None
        self._program, self._entered = program, time.perf_counter()

    def watched(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a compiled program, which is waited for and timed if this call's turn is that."""
        if self._ended or len(self._begins) <= FREE:
            return program

        def timed(*arguments: Any) -> Any:
            self._time_empty(arguments)
            begin = time.perf_counter()
            out = jax.block_until_ready(program(*arguments))
            self._computing.append(time.perf_counter() - begin)
            return out

        return timed

    def _time_empty(self, arguments: Sequence[Any]) -> None:
        try:
            jax.block_until_ready(arguments)
            if self._empty_program is None:
                self._empty_program = jax.jit(lambda *_: jnp.zeros((), jnp.int8), keep_unused=True)
                self._empty_program(*arguments).block_until_ready()  # compiles
            begin = time.perf_counter()
            self._empty_program(*arguments).block_until_ready()
            self._empty.append(time.perf_counter() - begin)
        except Exception:  # a hint is not worth an error
            self._ended = True

    def _note(self, begin: float, end: float) -> None:
        if len(self._begins) <= FREE:
            self._begins.append(begin)
            self._inside.append(end - self._entered)

    def _tell(self, owner: PythonCode, driven: bool, call: CallSignature, program: ProbedProgram) -> None:
        advice = _advice(owner, driven, call, program)
        periods = [after - before for before, after in zip(self._begins, self._begins[1:])]
        period, inside = _usual(periods), _usual(self._inside[:FREE])
        device = max(0.0, statistics.median(self._computing) - statistics.median(self._empty))
        calling = max(0.0, min(inside, period) - device)
        kept = 1 - 1 / STEPS
        least, most = (period / (period - kept * saved) for saved in (calling, max(calling, period - device)))
        # In a loop that the host drives the rest is the host's too, but how much of it reads the batch is not known.
        short = driven and period < SHORT and most >= LEAST
        if advice is None or not (short or least >= LEAST):
            return
        gain = f"between {least:.1f} and {most:.1f}" if driven else f"at least about {least:.1f}"
        owner.hinted = True
        line = (
            f"replicax: {_where(owner)}: `{owner.name}` takes one step a call, {self.calls} so far. A step takes "
            f"{_ms(period)} ms: the devices compute for {_ms(device)} ms, and the host takes {_ms(calling)} ms to call "
            f"the program. {advice} With {STEPS} steps a call a step would be {gain} times as fast; "
            f"see {doc_pages.page('how-to/input#several-steps-a-call')}. "
            "`rx.config.hint_short_steps(False)` turns this hint off.\n"
        )
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or none
            sys.stderr.write(line)


def _advice(owner: PythonCode, driven: bool, call: CallSignature, program: ProbedProgram) -> str | None:
    """Returns what to change; None where several steps in one call may not be what the program could do."""
    several = f"steps_per_call={STEPS}"
    if driven:
        return f"Make the body of the loop a function of its own that calls next(iterator), with `{several}`."
    if program.reads or not call.dynamic:
        return f"Declare {owner.name} with `{several}`."
    if call.meshes() or program.assigns:
        return f"Have {owner.name} call next(iterator) in place of taking its batch as an argument, with `{several}`."
    return None


def _where(owner: PythonCode) -> str:
    """Returns the user's line that runs now: of `owner` where the host drives it, and else the one that calls it."""
    frame = inner = tracebacks.users_frame()
    code = getattr(inspect.unwrap(owner.function), "__code__", None)
    lines = [line for _, _, line in code.co_lines() if line] if code is not None else []
    while code is not None and frame.f_back is not None:
        if frame.f_code.co_filename == code.co_filename and min(lines) <= frame.f_lineno <= max(lines):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{inner.f_code.co_filename}:{inner.f_lineno}"


def _usual(seconds: Sequence[float]) -> float:
    """Returns the mean without the longest eighth, in which something else may have happened, such as a new epoch."""
    return statistics.mean(sorted(seconds)[: -len(seconds) // 8])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
