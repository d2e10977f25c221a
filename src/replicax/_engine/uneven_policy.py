"""Calls of a compiled function with batches whose parts differ in shape, as the last one of an epoch: compiled or not.

Such a call has a program of its own, see `uneven_replicas`. Where none can be made, because the replicas do not meet in
the same way or for any other reason, and where the shapes are others all the time, the call runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator

import jax

from replicax._base import doc_pages, tracebacks
from replicax._base.messages import shown
from replicax._base.optimizing import optimizes_programs
from replicax._base.types import Leaf, Tree
from replicax._engine.signature import CallSignature
from replicax._passes.uneven_replicas import NotAlike
from replicax._tracing.dataset_reads import RunEagerly

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
