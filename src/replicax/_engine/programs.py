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

from replicax._base import doc_pages, foreign_state, tracebacks
from replicax._base.compile_settings import looks_for_nans, optimizes_programs
from replicax._base.messages import shown
from replicax._base.types import Leaf, Tree
from replicax._engine import general_trace, modes, multi_step
from replicax._engine.compile_log import CompileNote
from replicax._engine.modes import CreatesVariables, PythonCode
from replicax._engine.program import Program
from replicax._engine.signature import CallSignature, inputs_of
from replicax._engine.trace_function import TraceLog, Tracing
from replicax._passes.uneven_replicas import NotAlike
from replicax._report.progress import progress
from replicax._tracing import autograph_switch, frames
from replicax._tracing.dataset_reads import (
    Abort,
    DatasetRead,
    RunEagerly,
    pull_from,
    push_back,
    same_elements,
    same_sources,
)

_NEEDS_VALUES = (  # JAX's errors for programs that need the value of a tensor; eager replicas have it
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

PROGRAMS = 4  # a function has these for batches with parts of different shapes; for further ones it runs eagerly


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
            iterator._ask_for(count)
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


class UnevenCalls:
    """Decides which calls of one function with components that differ in shape are compiled."""

    def __init__(self, python_function: Callable[..., Tree]):
        self._python_function = python_function
        self._compiled: set[Hashable] = set()  # the shapes for which there are programs
        self._eager: dict[Hashable, list[Leaf]] = {}  # what has none, and the objects that are known by their id
        self._failures = 0  # as often as it could not be compiled for such batches
        self._reason = ""  # of the last of these
        self._warned = False

    def run_eagerly(self, call: CallSignature) -> bool:
        """Returns whether a call of which there is no program is to have none."""
        if (call.key, call.uneven) in self._eager or (call.uneven and not optimizes_programs()):
            return True
        if not call.uneven or call.uneven in self._compiled:
            return False
        if self._failures >= PROGRAMS:
            return True
        if len(self._compiled) < PROGRAMS:
            return False
        if not self._warned:
            self._warned = True
            tracebacks.warn(
                f"{shown(self._python_function)} is called with batches whose parts differ in shape between replicas "
                f"and between calls, the last time of shapes {', '.join(map(str, call.uneven[-1]))}. "
                f"{PROGRAMS} such kinds of batches have programs; with others it runs eagerly, which is slow. Choose a "
                "batch size that is a multiple of the number of replicas, drop the last batch with "
                "`batch(size, drop_remainder=True)`, or pad examples to few shapes with `padded_batch`. "
                f"See {doc_pages.page('explanation/uneven-batches')}.",
            )
        return True

    def traced(self, call: CallSignature) -> None:
        """Notes that a call was traced."""
        if call.uneven:
            self._compiled.add(call.uneven)

    def failed(self, call: CallSignature, error: BaseException, pulled: bool) -> None:
        """Notes that tracing a call failed; raises `RunEagerly` where it is to run so, now and later.

        It runs eagerly if no program can be made, or if the function needs the value of a tensor. Eager replicas would
        raise any other error of the function again.

        Args:
            call: the call.
            error: the exception that ended the tracing.
            pulled: whether the trace took elements of datasets, which may have other shapes in later calls.
        """
        if isinstance(error, RunEagerly) and error.decided:
            return
        if isinstance(error, RunEagerly):
            known = bool(call.uneven) or not pulled
        else:
            known = bool(call.uneven) and isinstance(error, _NEEDS_VALUES)
        if known:
            self._failures += bool(call.uneven)
            self._reason = str(error.__cause__) if isinstance(error.__cause__, NotAlike) else ""
            self._eager[call.key, call.uneven] = call.statics
            raise RunEagerly from error

    @contextlib.contextmanager
    def explained(self, call: CallSignature) -> Iterator[None]:
        """Returns a context in which a call runs eagerly; an exception says why it does."""
        try:
            yield
        except Exception as error:
            if call.uneven and self._reason:
                error.add_note(
                    "The call runs eagerly, as its batch has parts of different shapes, "
                    f"{', '.join(map(str, call.uneven[-1]))}, and cannot be compiled: {self._reason}. Choose a batch "
                    "size that the number of replicas divides, or leave out the rest of the data with "
                    "`batch(size, drop_remainder=True)`."
                )
            raise


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
