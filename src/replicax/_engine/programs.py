"""The programs of one function: which of them a call runs, and tracing a new one.

Calls with batches whose parts differ in shape, as the last one of an epoch, have programs of their own (see
`_passes.uneven_replicas`). If none can be made, because the replicas do not meet in the same way or for any other
reason, or if the shapes are others all the time, such calls run eagerly.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

import jax

from replicax._base import foreign_state, jax_internals, tracebacks
from replicax._base.messages import shown
from replicax._base.thread_state import current, looks_for_nans
from replicax._base.types import Leaf, Tree
from replicax._data import iterators
from replicax._engine import general_trace, modes, multi_step, step_hints
from replicax._engine.modes import CreatesVariables, PythonCode
from replicax._engine.program import CompileNote, Program
from replicax._engine.signature import CallSignature, inputs_of
from replicax._engine.trace_function import TraceLog, Tracing, UnevenCalls
from replicax._report import profiling
from replicax._report.terminal import progress
from replicax._tracing import autograph_switch, frames
from replicax._tracing.dataset_reads import (
    Abort,
    DatasetRead,
    DrivenFromHost,
    RunEagerly,
    pull_from,
    push_back,
    same_elements,
    same_sources,
)

# A program, and the elements of datasets that it is to take.
WithElements: TypeAlias = "tuple[Program, list[Tree]]"


class Programs:
    """The programs of one function.

    Args:
        code: the function's Python code.
        falls_back: whether calls that cannot be compiled may be driven from the host.
        steps: how many steps a call takes.
    """

    def __init__(self, code: PythonCode, falls_back: bool, steps: int):
        self.entries: dict[Hashable, list[Program]] = {}  # by what a call depends on
        self.host_driven: dict[Hashable, list[Leaf]] = {}  # calls that the host drives; objects that are known by id
        self.looked_at: set[Hashable] = set()  # calls for which a program was asked, though there may be none
        self.uneven = UnevenCalls(code.function)
        self.log = TraceLog(code.function, steps)
        # Programs of the same function that other processes run, by who hands them out.
        self.elsewhere = weakref.WeakKeyDictionary[object, Programs]()
        self._code, self._falls_back = code, falls_back

    def find(self, call: CallSignature, turn: contextlib.ExitStack) -> WithElements:
        """Returns the program of such calls and the elements for it, traced in this function's turn if need be.

        Raises:
            Abort: the call can have no program.
            StopIteration: a dataset has ended.
        """
        entries = self.entries.setdefault(call.key, [])
        known = len(entries)
        entry, pulled = _pulled(entries, call)
        if entry is None:
            turn.enter_context(self._turn())
            if len(entries) > known:  # another thread has traced one meanwhile
                push_back(entries[0].reads if known else [], pulled, call.iterators)
                entry, pulled = _pulled(entries, call)
        if entry is None:
            queue = list(zip(entries[0].reads, pulled)) if entries else []
            entry, pulled = self._new(call, queue)
        return entry, pulled

    def find_several(self, call: CallSignature, count: int) -> multi_step.Several | None:
        """Returns the program of so many steps and its elements; None where there is none for the elements to come."""
        if looks_for_nans():
            return None
        entries = self.entries.setdefault(call.key, [])
        several = multi_step.found(entries, count, call.iterators) if entries else multi_step.NOT_TRACED
        if several is not multi_step.NOT_TRACED:
            return several
        for iterator in call.iterators:
            iterators.ask_for(iterator, count)
        known = len(entries)
        with self._turn():
            if len(entries) == known and self._without_running(call, lambda: self._new(call)) is None:
                return None
        several = multi_step.found(entries, count, call.iterators)
        return None if several is multi_step.NOT_TRACED else several  # other elements come than were just pushed back

    def find_for(self, call: CallSignature) -> Program | None:
        """Returns the program for these arguments, without running it; None where none can be.

        It is traced, and its variables are made, if there is none.
        """
        self.looked_at.add(call.key)

        def find() -> WithElements:
            with contextlib.ExitStack() as turn:
                try:
                    return self.find(call, turn)
                except CreatesVariables:
                    self._code.rehearse(call.args, call.kwargs)
                    return self._new(call, creation=False)

        return self._without_running(call, find)

    def general_for(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> general_trace.GeneralTrace:
        """Returns a trace for arguments that are specs of tensors of any size. Its variables are made, if it makes any.

        Raises:
            Exception: that of the function, where it cannot be traced for all sizes.
        """
        with self._turn():
            try:
                found = general_trace.traced(self._code, args, kwargs)
            except CreatesVariables:
                self._code.rehearse(*jax.tree.map(lambda leaf: general_trace.stand_in(leaf, 8), (args, kwargs)))
                with modes.no_creation(True):
                    found = general_trace.traced(self._code, args, kwargs)
            self.log.traces += 1
            return found

    def make_after_creation(self, call: CallSignature) -> None:
        """Traces a function whose variables were made in a call that ran eagerly; none may be made any more."""
        self._without_running(call, lambda: self._new(call, creation=False))

    def fall_back(self, call: CallSignature, error: jax.errors.ConcretizationTypeError) -> None:
        """Has the host drive such calls, with a warning; raises the error again where that is not allowed."""
        if not self._falls_back:
            raise error
        tracebacks.warn_of(
            error,
            f"{self._code.name} needs the value of a tensor at {{line}}, which is not known while it is traced, so it "
            f"is driven from the host, with each `strategy.run` in it compiled: it is right, but slower than one "
            f"program. {autograph_switch.hint(error)} JAX says: {str(error).splitlines()[0]}",
        )
        self.host_driven[call.key] = call.statics

    def _without_running(self, call: CallSignature, find: Callable[[], WithElements]) -> Program | None:
        """Returns the program that `find` gives, whose elements are to come yet; None where there is none.

        Raises:
            jax.errors.ConcretizationTypeError: it needs the value of a tensor, and may not be driven from the host.
        """
        try:
            entry, elements = find()
        except (Abort, StopIteration):
            return None
        except jax.errors.ConcretizationTypeError:
            if not self._falls_back:
                raise
            return None
        push_back(entry.reads, elements, call.iterators)
        return entry

    def _turn(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which no other thread traces this function. Eager replicas run one at a time anyway."""
        eager_replica = isinstance(frames.frame(), frames.ReplicaFrame)
        return contextlib.nullcontext() if eager_replica else _turn(self)

    def _new(
        self,
        call: CallSignature,
        queue: Sequence[tuple[DatasetRead, Tree]] = (),
        creation: bool = True,
    ) -> WithElements:
        """Returns a new program for this call, which further calls find, and the elements that it pulled.

        Args:
            call: the call.
            queue: elements that were pulled before.
            creation: whether variables may be made.
        """
        call.uneven = call.uneven_arguments
        if self.uneven.run_eagerly(call):
            raise RunEagerly
        self.log.traces += 1
        foreign_state.join()
        tracing = Tracing(call, list(queue), lambda: self.uneven.run_eagerly(call))
        began = time.monotonic()
        try:
            with modes.no_creation(not creation), self._code.entered(), progress(f"tracing {self._code.name}"):
                jaxpr = tracing.run(self._code)
        except BaseException as error:
            self.log.traces -= tracing.found_uneven
            self.uneven.failed(call, error, pulled=bool(tracing.elements))
            raise
        self.log.warn_of_constants(call, tracing.reads)
        traced = time.monotonic() - began - tracing.waited
        inputs = inputs_of(call, tracing.elements)
        entries = self.entries.setdefault(call.key, [])
        cause = self.log.traced(call, inputs, bool(entries))
        entry = Program(self._code.name, tracing.level, jaxpr, call, tracing.reads, tracing.results)
        entry.compile_note = CompileNote(traced, inputs, cause)
        self.uneven.traced(call)
        tracing.close()
        entries.append(entry)
        return entry, tracing.elements


def _pulled(entries: list[Program], call: CallSignature) -> tuple[Program | None, list[Tree]]:
    """Returns the next elements, and the program that takes such; None where it is to be traced yet."""
    pulled: list[Tree] = []
    if entries:
        try:
            for read in entries[0].reads:
                pulled.append(pull_from(read.source(call.iterators)))
        except StopIteration:
            push_back(entries[0].reads, pulled, call.iterators)
            raise
    alike = (e for e in entries if same_sources(e.reads, entries[0].reads))
    return next((e for e in alike if same_elements(e.reads, pulled)), None), pulled


class Calls:
    """The ways in which calls of one function run, see `_engine.function`.

    Args:
        code: the function's Python code.
        compiled_only: whether the host may drive what calls the function, and never the function.
        steps: how many steps a call takes.

    Attributes:
        code: the function's Python code.
        programs: the programs of the function.
        step_hint: counts and measures calls until it is decided whether to print the hint; None from then on.
    """

    def __init__(self, code: PythonCode, compiled_only: bool, steps: int):
        self.code, self.compiled_only, self.steps = code, compiled_only, steps
        self.programs = Programs(code, code.autograph and not compiled_only, steps)
        self.step_hint = step_hints.StepHint() if steps == 1 else None

    def run(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """Run a call."""
        taped = not jax_internals.is_eager(jax_internals.current_trace())  # by a tape, or traced by a `jax.jit`
        if modes.functions_run_eagerly():
            with self.code.entered(inside=True):
                return self._repeated(lambda: self.code.call_eagerly(args, kwargs))
        if taped and frames.is_tracing():
            return self._repeated(lambda: self.code.call(args, kwargs))
        self.programs.log.calls += 1
        call = CallSignature(args, kwargs)
        call.counts = True
        if self.steps == 1 and self._is_host_driven(call):
            return self.code.run(args, kwargs, host=True)
        run = self._run_step if self.steps == 1 else self._run_several
        hint = self.step_hint
        if hint is not None:
            hint.calls += 1
            if hint.calls > step_hints.FIRST and not taped and profiling.active is None:
                owner = current.driven or self.code
                try:
                    return hint.run(owner, owner is not self.code, call, lambda: run(call, taped))
                finally:
                    if hint.decided:
                        self.step_hint = None
        if profiling.active is not None:
            with profiling.step(self.code.name, self.programs.log.calls - 1):
                return run(call, taped)
        return run(call, taped)

    @contextlib.contextmanager
    def without_step_hint(self) -> Iterator[None]:
        """Return a context in which calls are neither counted nor measured for the hint of `step_hints`."""
        before, self.step_hint = self.step_hint, None
        try:
            yield
        finally:
            self.step_hint = before

    def _is_host_driven(self, call: CallSignature) -> bool:
        return (call.has_dataset and not self.compiled_only) or call.key in self.programs.host_driven

    def _repeated(self, step: Callable[[], Tree], more: Callable[[], bool] = lambda: True) -> Tree:
        """Run the steps of a call one by one, as long as there are `more`."""
        return step() if self.steps == 1 else multi_step.one_by_one(self.steps, step, more)

    def _run_step(self, call: CallSignature, taped: bool) -> Tree:
        """Run one step: its program, or eagerly."""
        if call.ragged:
            return self.code.run(call.args, call.kwargs, host=False)
        entries = self.programs.entries.get(call.key)
        if entries and not entries[0].reads:
            return entries[0].run(call, (), taped)
        return self._run_found(call)

    def _run_found(self, call: CallSignature) -> Tree:
        """Run the program of such calls, traced first where there is none; the Python code where none can be."""
        entry, host = None, True
        with contextlib.ExitStack() as turn:  # it ends with the tracing
            try:
                entry, pulled = self.programs.find(call, turn)
            except modes.CreatesVariables:  # in this function's turn, so that other threads find the variables
                result = self.code.run(call.args, call.kwargs, host=False)
                self.programs.make_after_creation(call)
                return result
            except StopIteration:
                pass  # The data end in the middle of the function: run it as it is, so that what it did stays.
            except DrivenFromHost as abort:
                if abort.always:
                    self.programs.host_driven[call.key] = call.statics
            except RunEagerly:
                host = False
            except jax.errors.ConcretizationTypeError as error:
                self.programs.fall_back(call, error)
        if entry is not None:
            return entry.run(call, pulled, not jax_internals.is_eager(jax_internals.current_trace()))
        if host:
            return self.code.run(call.args, call.kwargs, host=True)
        with self.programs.uneven.explained(call):
            return self.code.run(call.args, call.kwargs, host=False)

    def _run_several(self, call: CallSignature, taped: bool) -> Tree:
        """Run the steps of one call: in one program where it can be, and one by one elsewhere."""
        several = None
        if not (taped or call.ragged or self._is_host_driven(call)):
            several = self.programs.find_several(call, self.steps)
        if several is not None:
            return several.entry.run(call, several.elements, taped, several.steps)

        def step() -> Tree:
            if self._is_host_driven(call):
                return self.code.run(call.args, call.kwargs, host=True)
            return self._run_step(call, taped)

        return self._repeated(step, lambda: multi_step.has_more(self.programs.entries.get(call.key), call.iterators))

    def trace(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Program | None:
        """Return the program for these arguments, traced if there is none; None where none can be."""
        call = CallSignature(args, kwargs)
        if call.ragged or self._is_host_driven(call):
            return None
        return self.programs.find_for(call)

    def find(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> tuple[Program, CallSignature]:
        """Return the program for these arguments and the next elements of iterators, and the call; pulls nothing."""
        call = CallSignature(args, kwargs)
        try:
            if call.ragged:
                raise RunEagerly
            with contextlib.ExitStack() as turn:
                entry, elements = self.programs.find(call, turn)
        except StopIteration:  # at the end of the data, what there was
            entry, elements = self.programs.entries[call.key][0], []
        except Abort as abort:
            raise RuntimeError(
                f"{shown(self.code.function)} has no program of its own for these arguments: it makes variables on "
                "its first call (call it once before), loops over a distributed dataset, or takes a batch of "
                "uneven parts in a way that cannot be compiled."
            ) from abort
        push_back(entry.reads, elements, call.iterators)
        return entry, call


# One thread at a time traces a function. A thread that would wait for itself, directly or through what other threads
# wait for, traces on its own: so functions that call themselves or each other never deadlock.
_condition = threading.Condition()
_owners: dict[Hashable, int] = {}  # of each function that is being traced, the thread
_waits: dict[int, Hashable] = {}  # what a thread waits for


def _waits_for_itself(function: Hashable, thread: int) -> bool:
    awaited: Hashable | None = function
    while awaited is not None and awaited in _owners:
        if _owners[awaited] == thread:
            return True
        awaited = _waits.get(_owners[awaited])
    return False


@contextlib.contextmanager
def _turn(function: Hashable) -> Iterator[bool]:
    """Returns a context in which no other thread traces this function, and whether it had to wait for one."""
    thread, waited = threading.get_ident(), False
    with _condition:
        try:
            while function in _owners and not _waits_for_itself(function, thread):
                _waits[thread], waited = function, True
                _condition.wait()
        finally:
            _waits.pop(thread, None)
        mine = function not in _owners
        if mine:
            _owners[function] = thread
    try:
        yield waited
    finally:
        if mine:
            with _condition:
                del _owners[function]
                _condition.notify_all()
