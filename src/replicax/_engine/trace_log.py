"""Counts of a function's calls and traces, and warnings of retracing and of data that no call renews."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replicax._base import doc_pages, tracebacks
from replicax._base.messages import shown
from replicax._base.types import Tree
from replicax._engine.signature import CallKeys, CallSignature, difference, is_python_iterator
from replicax._tracing.dataset_reads import DatasetRead


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
