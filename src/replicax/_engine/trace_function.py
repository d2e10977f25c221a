"""One trace of a function's Python code: what it reads, assigns and pulls become inputs and outputs of a program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import ShapedArray

from replicax._base import doc_pages, jax_internals, jaxprs, nest, tracebacks
from replicax._base.messages import shown
from replicax._base.thread_state import optimizes_programs
from replicax._base.types import Leaf, Tree
from replicax._collectives import cross_process
from replicax._data.iterators import ElementIterator
from replicax._engine.argument_layout import meshes_of
from replicax._engine.modes import PythonCode
from replicax._engine.program_outputs import ProgramOutputs
from replicax._engine.signature import CallKeys, CallSignature, difference, is_python_iterator
from replicax._passes.uneven_replicas import NotAlike
from replicax._tracing import frames
from replicax._tracing.dataset_reads import (
    DatasetRead,
    DrivenFromHost,
    RunEagerly,
    as_inputs,
    can_be_taken,
    element_arrays,
    pull_from,
    push_back,
    reading_by,
    shapes_of,
)
from replicax._values import ReplicaMesh, constrained


class Tracing:
    """A trace that is to be made for a call.

    Args:
        call: its arguments.
        queue: elements that were pulled for it already, and how; those that it does not take go back.
        runs_eagerly: whether calls with such parts as came are not to be compiled, asked at each element.
    """

    results: ProgramOutputs

    def __init__(self, call: CallSignature, queue: list[tuple[DatasetRead, Tree]], runs_eagerly: Callable[[], bool]):
        frame = frames.frame()
        self.level = frames.TraceFrame(local=frame.local, mesh=frame.mesh)
        self.reads: list[DatasetRead] = []
        self.elements: list[Tree] = []
        self.found_uneven = False  # whether it ended since the elements' components differ in shape
        self._call, self._queue, self._runs_eagerly = call, queue, runs_eagerly
        self._given: list[jax.Array] = []
        self.waited = 0.0  # seconds for elements

    def run(self, code: PythonCode) -> jex.ClosedJaxpr:
        """Returns the jaxpr of a function's Python code. If it raises, all elements go back."""
        try:
            flat = jaxprs.named(lambda *dynamic: self._traced(code, dynamic), code.function, self._call.paths())
            with reading_by(self._read):
                return jax.make_jaxpr(flat)(*map(_aval, self._call.dynamic))
        except BaseException:
            self._give_back()
            push_back(self.reads, self.elements, self._call.iterators)
            raise
        finally:
            self._give_back()  # what the program does not take

    def close(self) -> None:
        """Lets go of the tracers, and with them of all that was traced."""
        self.results.leaves = []
        self.level.values.clear()

    def _give_back(self) -> None:
        push_back([read for read, _ in self._queue], [element for _, element in self._queue], self._call.iterators)
        self._queue.clear()

    def _pulled(self, iterator: ElementIterator) -> Tree:
        began = time.monotonic()
        try:
            return pull_from(iterator)
        finally:
            self.waited += time.monotonic() - began

    def _read(self, iterator: ElementIterator) -> Tree:
        """Returns the iterator's next element, as inputs of the program."""
        call, queue = self._call, self._queue
        if frames.frame() is not self.level:
            return NotImplemented
        if queue and queue[0][0].source(call.iterators) is not iterator:  # other elements, taken in another order
            self._give_back()
        try:
            element = queue.pop(0)[1] if queue else self._pulled(iterator)
        except StopIteration:  # which the function may catch: the end is no part of a program
            raise DrivenFromHost(always=False) from None
        self.elements.append(element)
        read = DatasetRead(iterator, call.iterators, element)
        self.reads.append(read)
        call.uneven += shapes_of(nest.leaves(element))
        if not can_be_taken(element) or self._runs_eagerly():
            self.found_uneven = True
            raise RunEagerly(decided=True)
        inputs = as_inputs(element, self.level, read.slots)
        self._given.extend(element_arrays(inputs))
        return inputs

    def _traced(self, code: PythonCode, dynamic: tuple[jax.Array, ...]) -> list[jax.Array]:
        level, call = self.level, self._call
        level.trace = frames.untaped_trace()
        with frames.entered(level):
            result = code.call(*call.rebuilt(dynamic))
            self.results = ProgramOutputs(result, [*dynamic, *self._given])
        # JAX lets donated inputs and outputs of one shape share buffers in their order. In the same order, with the
        # results behind, each variable keeps its own, and nothing is copied.
        first = [key for key in level.inputs if key in level.written]
        level.written = {key: level.written[key] for key in dict.fromkeys([*first, *level.written])}
        state = [leaf for variable in level.written.values() for leaf in level.values[id(variable)]]
        known = {id(leaf) for leaves in level.values.values() for leaf in leaves}
        # A result that is a variable's array gets a buffer of its own, so that donating the one keeps the other.
        results = [jnp.copy(leaf) if id(leaf) in known else leaf for leaf in self.results.leaves]
        spanning = next((mesh for mesh in meshes_of(level, call, self.reads) if not mesh.all_local), None)
        if spanning is not None and spanning.lone:
            self._require_alike(spanning)
        common = None if spanning is None or level.local else spanning.mirrored
        self.results.shardings = [kind or common for kind in self.results.shardings]
        results = [constrained(leaf, kind) for leaf, kind in zip(results, self.results.shardings)]
        if not level.local:
            state = [leaf for v in level.written.values() for leaf in v._storage.home.leaving(level.values[id(v)])]
        return [*state, *results]

    def _require_alike(self, mesh: ReplicaMesh) -> None:
        """Has the call run eagerly, on all workers, if they were given plain arrays of different shapes.

        Each worker has one replica, whose component in a result of `run` is a plain array. What is computed of it may
        come in as well. All workers compare, also those that were given no array. Later calls are decided anew: one
        with the same shapes on this worker may have others elsewhere.
        """
        kinds = [key[:2] for key in self._call.keys if isinstance(key[0], tuple)]
        with jax_internals.untraced():
            if not cross_process.same_on_all_workers(mesh, f"the arrays of a traced call\n{kinds}", alike=True):
                raise RunEagerly(decided=True)


def _aval(array: jax.Array) -> ShapedArray:
    # Of a `jax.ShapeDtypeStruct` JAX 0.10 takes int64 for int32, where types of 64 bits are allowed.
    return ShapedArray(array.shape, array.dtype, weak_type=getattr(array, "weak_type", False))


class TraceLog:
    """Counts the calls and the traces of one function, and warns of what makes it slow or wrong.

    Attributes:
        calls: how many calls there were.
        traces: how many times the Python code was traced.
        warns: whether it warns of functions that are traced often.
    """

    def __init__(self, python_function: Callable[..., Tree], steps: int):
        self._function, self._steps = python_function, steps
        self.calls = self.traces = 0
        self.warns = True
        self._retraced = 0  # the calls for which it was traced; a program may also be asked for without a call
        self._warned = 0
        self._last_call: CallKeys | None = None  # of the call that was traced last, and what its program takes
        self._last_inputs: list[str] = []

    def traced(self, call: CallSignature, inputs: list[str], known: bool) -> str:
        """Notes that the function was traced, and returns why it was traced anew; nothing the first time.

        Args:
            call: for which it was.
            inputs: what its program takes, in words.
            known: whether there is a program for such calls already, which takes other elements of datasets.
        """
        cause = self._cause(call, inputs, known)
        self._retraced += call.counts
        call.counts = False
        self._warn_of_retracing(cause)
        self._last_call, self._last_inputs = call.structure_and_keys, inputs
        return cause

    def _cause(self, call: CallSignature, inputs: list[str], known: bool) -> str:
        if self._last_call is None:
            return ""
        if not known:
            return difference(self._last_call, call.structure_and_keys)
        text = "The elements of a dataset differ from those of the last time in shape, dtype or structure"
        changed = [(was, now) for was, now in zip(self._last_inputs, inputs) if was != now]
        return f"{text}: there was {changed[0][0]} where {changed[0][1]} is now. " if changed else f"{text}. "

    def _warn_of_retracing(self, cause: str) -> None:
        if (
            not self.warns
            or self._retraced < 5
            or self._retraced * 2 <= self.calls
            or self._retraced < self._warned + 5
        ):
            return
        self._warned = self._retraced
        tracebacks.warn(
            f"{self._retraced} out of the last {self.calls} calls to {shown(self._function)} triggered retracing, "
            f"which is slow. {cause}Pass numbers that change as arrays, keep shapes the same, and define the function "
            "outside of loops. "
            f"See {doc_pages.page('explanation/two-ways-to-run#what-rxfunction-does')}.",
        )

    def warn_of_constants(self, call: CallSignature, reads: Sequence[DatasetRead]) -> None:
        """Warns of data that are the same in every step, which is hardly what was meant."""
        for leaf in call.statics:
            if is_python_iterator(leaf):
                tracebacks.warn(
                    f"{shown(self._function)} is given a Python iterator, {shown(leaf)}. It is a constant of the "
                    "compiled program: all calls use the elements that next() returned while tracing. Pass the "
                    "elements, or an iterator of `strategy.experimental_distribute_dataset(...)` or of an "
                    "`rx.data.Dataset`.",
                )
        if self._steps > 1 and not reads and call.meshes():
            tracebacks.warn(
                f"{shown(self._function)} takes {self._steps} steps a call, all of them with the batch that it was "
                "given. For a fresh batch in each step pass the dataset's iterator, and call next(iterator) in it.",
            )


_NEEDS_VALUES = (  # JAX's errors for programs that need the value of a tensor; eager replicas have it
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

PROGRAMS = 4  # a function has these for batches with parts of different shapes; for further ones it runs eagerly


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
