"""The programs of one function: which of them a call runs, and tracing where there is none."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax

from replicax._base import foreign_state, tracebacks
from replicax._base.types import Leaf, Tree
from replicax._engine import general_trace, modes, multi_step, turns
from replicax._engine.compile_log import CompileNote
from replicax._engine.modes import CreatesVariables, PythonCode
from replicax._engine.program import Program
from replicax._engine.signature import CallSignature, inputs_of
from replicax._engine.trace_function import Tracing
from replicax._engine.trace_log import TraceLog
from replicax._engine.uneven_policy import UnevenCalls
from replicax._passes import nan_checks
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
        if nan_checks.are_looked_for():
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
        return contextlib.nullcontext() if eager_replica else turns.turn(self)

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
