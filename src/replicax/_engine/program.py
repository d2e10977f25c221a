"""One compiled program of a `function`, and a call of it.

A program takes the arrays of variables, donates arrays that it replaces, and stores the new arrays. An array that
somebody outside may hold is copied before it would be donated.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from replicax._base import errors
from replicax._base.thread_state import current, looks_for_nans, optimizes_programs
from replicax._base.types import Tree
from replicax._collectives import cross_process, in_flight
from replicax._collectives.all_reduce import packing_for
from replicax._engine.argument_layout import Arrays, meshes_of, share_vectors
from replicax._engine.executable import Compiled, Executable, Returned
from replicax._engine.program_outputs import ProgramOutputs
from replicax._engine.signature import CallSignature
from replicax._job import state
from replicax._passes import nan_checks, pipeline
from replicax._passes.facts import Facts, Stage
from replicax._report.terminal import progress
from replicax._tracing import frames, lost_values, step_failures
from replicax._tracing.dataset_reads import DatasetRead, element_arrays

_nowhere = contextlib.nullcontext()


class Program:
    """One compiled program: of one signature, in one context.

    Attributes:
        name: the function's.
        label: the same, with the shapes of its input.
        level: the level of tracing, with the variables that it reads and writes.
        jaxpr: its jaxpr: the new leaves of variables, `state_count` of them, and behind them the results.
        reads: the elements of datasets that it takes.
        results: the results.
        guard: keeps the errors of functions that a call calls back; None if a call calls back no function.
        keeps: whether variables keep their arrays until a call has ended, instead of donating them.
        executable: the functions that JAX compiles of it.
        compile_note: the description in the line that tells of a compile.
        plan: how several tasks run it together, kept for the module that makes plans.
    """

    executable: Executable

    def __init__(
        self,
        name: str,
        level: frames.TraceFrame,
        jaxpr: jex.ClosedJaxpr,
        call: CallSignature,
        reads: list[DatasetRead],
        results: ProgramOutputs,
    ):
        self.name, self.level, self.reads, self.results = name, level, reads, results
        jaxpr, self.guard = step_failures.guarded(jaxpr)
        self.keeps = self.guard is not None and self.guard.keeps
        self._keep_alive = call.statics  # the objects whose identity is part of the key
        meshes = meshes_of(level, call, reads)
        # A program that no strategy has put elsewhere runs where the variables are that stay on a device.
        devices = {v._storage.home.device for v in level.variables.values()} - {None}
        if level.device is None and len(devices) == 1:
            (level.device,) = devices
        self._is_spread = any(mesh.mesh.size > 1 for mesh in meshes) or not devices <= {level.device}
        meshes = [] if level.local else meshes
        placed = meshes[0] if meshes else level.device
        platform = jax.default_backend() if placed is None else placed.platform
        optimizes = optimizes_programs()
        packing = packing_for(meshes[0] if meshes else None) if optimizes else None
        facts = Facts(Stage.FUNCTION, platform, optimizes, packing=packing)
        self.jaxpr = pipeline.rewrite(jaxpr, facts)
        level.passes.update(dict.fromkeys((facts.stage, one) for one in facts.applied))
        # Of replicas whose calls in flight are bounded, or watched by the workers of a job; these count first.
        meshes = sorted((mesh for mesh in meshes if mesh.needs_bound or not mesh.all_local), key=lambda m: m.all_local)
        self._mesh = meshes[0] if meshes else None
        self._facts = Facts(Stage.PROGRAM, platform, optimizes, mesh=self._mesh, packing=packing)
        self.state_count = sum(len(variable._types) for variable in level.written.values())
        self.compile_note = CompileNote()
        self._checks = False  # whether its results are looked at for NaN
        self._with_checks: Program | None = None  # the program that does so
        lost_values.programs.add(self)
        inputs = [*call.dynamic, *(leaf for read in reads for leaf in element_arrays(read.element))]
        self.label = f"{self.name}({in_flight.shapes((x.dtype, x.shape) for x in inputs)})"
        self.plan: object = None
        # Runs it, where variables lie in other processes.
        self.runner = next((run for v in level.variables.values() if (run := v._storage.runner) is not None), None)
        if optimizes and not self.jaxpr.effects and not level.local and self.runner is None:
            share_vectors(level, self.jaxpr, spares_arrays=platform == "cpu" and not self._is_spread)
        self._compile()

    def _compile(self) -> None:
        donates = not (self.level.local or self.keeps)
        self.executable = Executable(
            self.name, self.level, self.jaxpr, self.reads, self.results, self._facts, self._is_spread, donates
        )

    def computing(self, jaxpr: jex.ClosedJaxpr) -> Program:
        """Return the same program with another jaxpr, of the same inputs and outputs."""
        other = copy.copy(self)
        other.jaxpr = jaxpr
        other._compile()
        return other

    @property
    def is_compiled(self) -> bool:
        """Whether it has been called."""
        return self.executable.for_steps(1).is_compiled

    @property
    def assigns(self) -> bool:
        """Whether a call assigns variables."""
        return bool(self.level.written)

    @property
    def is_repeatable(self) -> bool:
        """Whether it can be part of a program of several steps."""
        # What it prints or asserts is to come out after each step.
        alone = self.level.local or self.runner is not None
        return not self.jaxpr.effects and not alone and self.results.stackable

    def result_specs(self) -> Tree:
        """Return the specs of what a call returns."""
        return self.results.specs(self.jaxpr.out_avals[self.state_count :])

    def pretty_printed_passes(self) -> str:
        """Return its label, and a line for each pass."""
        return f"{self.label}\n{pipeline.describe(self.level.passes, self.is_compiled)}"

    # A call.

    def run(self, call: CallSignature, pulled: Sequence[Tree], taped: bool, steps: int = 1) -> Tree:
        """Run it with the arguments of a call and the elements that it pulled; a gradient tape may look on.

        With more than one of `steps` it is the program of so many, and the elements are those of all of them (see
        `_engine.multi_step`).
        """
        if self.runner is not None and not taped:
            return self.runner(self, call, pulled)
        if looks_for_nans() and not self._checks and not taped:
            with jax.debug_nans(False):  # JAX would name neither the operation nor the line
                return self._checking().run(call, pulled, taped, steps)
        if self.guard is None:
            return self._run(call, pulled, taped, steps)
        awaited: set[int] = set()
        with self.guard:
            try:
                return self._run(call, pulled, taped, steps, awaited if self.keeps else None)
            finally:
                step_failures.free(awaited)

    def _run(
        self,
        call: CallSignature,
        pulled: Sequence[Tree],
        taped: bool,
        steps: int,
        awaited: set[int] | None = None,
    ) -> Tree:
        if call.probe is not None:
            call.probe.entered(self)
        frame, level, mesh, executable = frames.frame(), self.level, self._mesh, self.executable
        label = self.label if steps == 1 else f"{steps} steps of {self.label}"
        with (
            in_flight.dispatching(mesh, label, small=True) if mesh is not None else _nowhere as under_way,
            frames.lock,
        ):
            if step_failures.awaited and not step_failures.in_callback():
                step_failures.wait_until_free(self._assigned())
            if lost_values.any_lost:
                for key in level.inputs:
                    level.variables[key]._storage.refuse_lost()
            step_failures.note(level.written.values())
            compiled = executable.taped if taped else executable.for_steps(steps)
            elements = [leaf for element in pulled for leaf in element_arrays(element)] if pulled else []
            arguments = (*compiled.layout.take(frame), elements, call.dynamic)
            if awaited is not None:
                awaited.update(self._assigned() - step_failures.awaited)
                step_failures.awaited.update(awaited)
            function: Callable[..., Returned] = compiled.function
            compiles = not (compiled.is_compiled or taped)
            placed = _nowhere if level.device is None else jax.default_device(level.device)
            with placed, begin_compile(self.name) if compiles else _nowhere:
                if compiles:
                    if under_way is not None:
                        under_way.compile(compiled.function, *arguments)
                elif call.probe is not None:
                    function = call.probe.watched(function)
                if taped or self.keeps:
                    new, results = function(*arguments)
                else:
                    results = executable.call(compiled, function, arguments, frame)
            if compiles:
                compiled.is_compiled = True
                self._log_compile(steps)
            if taped and not self.keeps:
                executable.put(compiled, frame, new)
            if under_way is not None:
                under_way.output = results[compiled.token]
        if self.guard is not None:  # what it prints comes out before the call returns
            self._end(frame, compiled, new if self.keeps or taped else [], results, arguments)
        return self.results.rebuilt(results)

    def _log_compile(self, steps: int) -> None:
        name = self.name if steps == 1 else f"{self.name}, {steps} steps a call,"
        name = f"{name} with a look for NaN" if self._checks else name
        end_compile(name, self.compile_note)
        self.compile_note = self.compile_note._replace(traced=0.0, cause="It had been compiled for these before. ")

    def _checking(self) -> Program:
        """Return the same program, whose results are looked at for NaN before they replace anything."""
        if self._with_checks is None:
            other = copy.copy(self)
            other.guard, other.keeps, other._checks = self.guard or step_failures.Guard(), True, True
            other._compile()
            self._with_checks = other
        return self._with_checks

    def _end(
        self,
        frame: frames.Frame,
        compiled: Compiled,
        new: Arrays,
        results: Arrays,
        arguments: tuple[Arrays, Arrays, Arrays, Arrays],
    ) -> None:
        """Wait for the end of a call that may fail. Only if it did not, the variables that it keeps change."""
        assert self.guard is not None
        interrupt = step_failures.wait_for([new, results] if self.keeps else [])
        error = self.guard.error(self.name)
        if self.keeps and self._is_anywhere(error is not None, f"the end of {self.name}") and error is None:
            error = errors.FailedElsewhere(
                f"A function that the compiled {self.name} calls back raised an error on another worker, which "
                "tells it. The variables keep the values that they had before."
            )
        if error is None and self._checks:
            is_there = self._is_anywhere(nan_checks.are_in([*new, *results]), f"the look for NaN in {self.name}")
            if is_there:
                leaves = self.executable.leaves(compiled.layout, *arguments[:3])
                error = nan_checks.error(self.name, self.level, self.jaxpr, leaves, arguments[3])
        if error is None and self.keeps:
            with frames.lock:
                self.executable.put(compiled, frame, new)
        if error is not None or interrupt is not None:
            raise error or interrupt  # type: ignore[misc]

    def _is_anywhere(self, here: bool, what: str) -> bool:
        """Return whether something is so on this worker or, in a program of several, on any of them."""
        if self._mesh is None or self._mesh.all_local:
            return here
        with frames.lock:
            return cross_process.any_worker(self._mesh, here, what)

    def _assigned(self) -> set[int]:
        """Return the ids of the variables that it assigns, and of the shared stores that hold them."""
        written = self.level.written.values()
        stores = {id(slot.store) for variable in written for slot in variable._storage.slots.values()}
        return stores | {id(variable) for variable in written}

    def lower(self, call: CallSignature) -> jax.stages.Lowered:
        """Return what JAX makes of it for these arguments; nothing is run."""
        return self.executable.for_steps(1).function.lower(*self.arguments(call))

    def arguments(self, call: CallSignature) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Return what the compiled program takes in such a call: variables, elements as it was traced with, arrays."""
        elements = [leaf for read in self.reads for leaf in element_arrays(read.element)]
        return *self.state(), elements, call.dynamic

    def state(self) -> tuple[Arrays, Arrays]:
        """Return arrays that are there once the last call has ended: variables, as the next one would take them."""
        with frames.lock:
            return self.executable.for_steps(1).layout.take(frames.frame())


# One line for each compile that takes long.

_VARIABLE = "REPLICAX_LOG_COMPILES"
_MOST = 8  # shapes that are listed


def _from_environment() -> float:
    text = os.environ.get(_VARIABLE, "").strip().lower()
    if text in ("off", "none"):
        return math.inf
    try:
        return float(text or 1.0)
    except ValueError:
        raise ValueError(f"{_VARIABLE} is a number of seconds, or 'off'; got {text!r}.") from None


_limit: float | None = None  # seconds; None as long as nobody has asked for it


def log_compiles(seconds: float | None = 1.0) -> None:
    """Says for how long a compile of a function has to take to be told in a line on the standard error stream.

    The line names the function, the shapes and dtypes of its inputs and, where it was traced before, what differs from
    the time before. Only the first worker of a job prints it. `REPLICAX_LOG_COMPILES` in the environment, a number of
    seconds or `off`, says the same.

    Args:
        seconds: 1 by default; 0 for all compiles, None for none.

    Raises:
        ValueError: a number below 0.

    >>> import replicax as rx
    >>> rx.config.log_compiles(None)
    """
    global _limit
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"`seconds` is a number that is not below 0, or None; got {seconds!r}.")
    _limit = math.inf if seconds is None else float(seconds)


class CompileNote(NamedTuple):
    """The parts of the line for a program that is compiled.

    Args:
        traced: how many seconds it took to trace it before.
        inputs: what it is for, such as "float32[8,3]".
        cause: what differs from the program before, a sentence.
    """

    traced: float = 0.0
    inputs: Sequence[str] = ()
    cause: str = ""


class _Compiling:
    """A program that is being compiled: the seconds so far, and what shows it."""

    def __init__(self, name: str):
        self.name, self.seconds, self.shown = name, 0.0, progress(f"compiling {name}")


_COMPILED = "/jax/core/compile/backend_compile_duration"
_EVENTS = {"/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration", _COMPILED}


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    compiling: _Compiling | None = current.compiling
    if compiling is not None and event in _EVENTS:
        compiling.seconds += duration_secs
        if event == _COMPILED:
            compiling.shown.description = f"running {compiling.name} for the first time"


jax.monitoring.register_event_duration_secs_listener(_listen)


def begin_compile(name: str) -> progress:
    """Notes that this thread is about to compile a program, and returns a context that shows it if it takes long."""
    current.compiling = compiling = _Compiling(name)
    return compiling.shown


def end_compile(name: str, note: CompileNote) -> None:
    """Tells of a program that was compiled, if it took long."""
    global _limit
    traced, inputs, cause = note
    compiling, current.compiling = current.compiling, None
    seconds = traced if compiling is None else traced + compiling.seconds
    if _limit is None:
        _limit = _from_environment()
    if seconds < _limit:
        return
    job = state.current()
    if job is not None and job.process_id != 0:
        return
    more = [f"{len(inputs) - _MOST} more"] if len(inputs) > _MOST else []
    listed = ", ".join([*inputs[:_MOST], *more])
    line = f"replicax: compiled {name} in {seconds:.1f} s for ({listed})"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or none
        sys.stderr.write(f"{line}. {cause.strip()}\n" if cause else f"{line}\n")
