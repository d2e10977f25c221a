"""`tf.summary` through tensorboardX, which is imported on first use; the extra `summary` installs it.

In a traced function a summary is written when the program runs. If there are several replicas, only the first writes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax.tf import _profiler
from replicax.tf._core import (
    Leaf,
    Variable,
    context,
    creators,
    doc_pages,
    frames,
    jax_internals,
    step_failures,
    thread_state,
    tracebacks,
)
from replicax.tf._host import jnp
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import TensorLike

_Condition: TypeAlias = "TensorLike | Callable[[], TensorLike]"
# Called with tensorboardX's writer, the tag, the value and the step.
_Write: TypeAlias = Callable[[Any, str, np.ndarray, int], None]


class _State:
    """The current writer, step and condition of the process (not of a thread, since eager replicas are threads)."""

    writer: SummaryWriter | None = None
    step: TensorLike = None
    condition: _Condition = True
    traces = False  # between `trace_on` and its end
    profiles = False  # whether the trace has started the profiler


_state = _State()


class _Pending:
    """Counts the events that wait for the thread of tensorboardX that writes them: its `flush` does not wait."""

    def __init__(self, event_writer: Any):
        self._changed, self._count = threading.Condition(), 0
        add, written = event_writer.add_event, event_writer._ev_writer.write_event

        def add_event(event: Any) -> None:
            self._counted(1)
            add(event)

        def write_event(event: Any) -> Any:
            try:
                return written(event)
            finally:
                self._counted(-1)

        event_writer.add_event, event_writer._ev_writer.write_event = add_event, write_event

    def _counted(self, more: int) -> None:
        with self._changed:
            self._count += more
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until all events are written, a minute at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._count <= 0, timeout=60)


class SummaryWriter:
    """Writes summaries to a folder. Make one with `create_file_writer`."""

    def __init__(self, logdir: str | None, **options: int | float | str):
        self._logdir, self._options = logdir, options
        self._writer: Any = None
        self._lock = threading.Lock()
        self._closed = False

    def _events(self) -> Any:
        if self._closed:
            raise RuntimeError(f"The summary writer of {self._logdir} is closed.")
        if self._writer is None and self._logdir is not None:
            try:
                from tensorboardX import SummaryWriter as Writer
            except ImportError as error:
                raise ImportError(f"tf.summary needs tensorboardX: {doc_pages.install('summary')}.") from error
            self._writer = Writer(self._logdir, **self._options)
            self._pending = _Pending(self._writer.file_writer.event_writer)
        return self._writer

    def _write(self, write: Callable[[Any], None]) -> None:
        with self._lock:
            if (events := self._events()) is not None:
                write(events)

    @contextlib.contextmanager
    def as_default(self, step: TensorLike = None) -> Iterator[SummaryWriter]:
        """Returns a context in which this is the current writer, with this default step."""
        before = _state.writer, _state.step
        _state.writer = self
        if step is not None:
            _state.step = step
        try:
            yield self
        finally:
            self.flush()
            _state.writer, _state.step = before

    def set_as_default(self, step: TensorLike = None) -> None:
        """Makes this the current writer from now on."""
        _state.writer = self
        if step is not None:
            _state.step = step

    def init(self) -> None:
        """Opens the file now."""
        self._write(lambda events: None)

    def flush(self) -> None:
        """Waits for summaries of compiled code, and writes them to the file."""
        if self._writer is not None and not self._closed:
            jax_internals.wait_for_effects()
            with self._lock:
                self._pending.wait()
                self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
        self._closed = True


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: float | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
    experimental_trackable: bool = False,
    experimental_mesh: object = None,
) -> SummaryWriter:
    """Returns a writer for an event file in a folder.

    Args:
        logdir: the folder.
        max_queue: the maximal number of summaries that are buffered, 10 by default.
        flush_millis: the number of milliseconds after which buffered summaries are written, 120 000 by default.
        filename_suffix: the end of the file's name, ".v2" by default.
        name, experimental_trackable, experimental_mesh: accepted for compatibility.
    """
    options = {"flush_secs": 120 if flush_millis is None else flush_millis / 1000}
    suffix = {"filename_suffix": ".v2" if filename_suffix is None else filename_suffix}
    return SummaryWriter(str(logdir), max_queue=10 if max_queue is None else int(max_queue), **options, **suffix)


def create_noop_writer() -> SummaryWriter:
    """Returns a writer that writes nothing."""
    return SummaryWriter(None)


def flush(writer: SummaryWriter | None = None, name: str | None = None) -> None:
    """Flushes a writer, by default the current one."""
    writer = writer or _state.writer
    if writer is not None:
        writer.flush()


@contextlib.contextmanager
def record_if(condition: _Condition) -> Iterator[None]:
    """Returns a context in which summaries are written if a condition is true: a bool, a tensor, or a function without
    arguments.
    """
    before = _state.condition
    _state.condition = condition
    try:
        yield
    finally:
        _state.condition = before


def _condition() -> jax.Array | bool:
    condition = _state.condition() if callable(_state.condition) else _state.condition
    return convert_to_tensor(condition) if isinstance(condition, (jax.Array, Variable)) else bool(condition)


def should_record_summaries() -> jax.Array | bool:
    """Returns whether a summary would be written now."""
    return _condition() if _state.writer is not None else False


def get_step() -> TensorLike:
    """Returns the default step, or None."""
    return _state.step


def set_step(step: TensorLike) -> None:
    """Sets the default step. In a traced function a Python number stays what it was then: use a variable."""
    _state.step = step


@contextlib.contextmanager
def summary_scope(name: str, default_name: str = "summary", values: object = None) -> Iterator[tuple[str, str]]:
    """Returns a context `(tag, scope)` that prefixes the names of summaries with `name/`."""
    with creators.name_scope(name or default_name) as scope:
        yield scope.rstrip("/"), scope


def _record(name: str, data: TensorLike, step: TensorLike, write: _Write) -> jax.Array | bool:
    """Calls `write(events, tag, data, step)` now or, in a traced function, when the program runs."""
    step = _state.step if step is None else step
    writer = _state.writer
    if writer is None or writer._logdir is None:  # no writer, or one that writes nothing
        return False
    if step is None:
        raise ValueError("No step set. Please specify one either through the `step` argument or through `set_step()`.")
    tag = "/".join([*thread_state.current.names, name])
    condition = _condition()
    replica = context.get_replica_context()
    if replica is not None:  # only the first replica writes
        condition = condition & (jnp.asarray(replica.replica_id_in_sync_group) == 0)
    if condition is False:
        return False
    operands = [_operand(value) for value in (condition, data, step)]

    def record(condition: Leaf, data: Leaf, step: Leaf) -> None:
        if bool(condition):
            writer._write(lambda events: write(events, tag, np.asarray(data), int(step)))

    if any(isinstance(x, jax.core.Tracer) for x in operands):
        writer.init()  # errors of the writer are raised here, not when the program runs
        jax.debug.callback(step_failures.only_shows(record), *operands)
        return convert_to_tensor(operands[0])
    record(*operands)
    return bool(operands[0])


def _operand(value: TensorLike) -> np.ndarray | jax.Array:
    """Returns a value as a tensor; eagerly a number as it is, which needs no device to be written to a file."""
    if isinstance(value, (bool, int, float, np.number, np.bool_)) and not frames.is_tracing():
        return np.asarray(value)
    return convert_to_tensor(value)


def scalar(name: str, data: TensorLike, step: TensorLike = None, description: str | None = None) -> jax.Array | bool:
    """Writes a number; returns whether it was written. Raises `ValueError` without a step, or for a non-scalar."""
    number = _operand(data)
    if np.ndim(number):
        raise ValueError(f"tf.summary.scalar takes a scalar, got shape {np.shape(number)} for {name!r}.")
    return _record(name, number, step, lambda events, tag, x, at: events.add_scalar(tag, float(x), at))


def histogram(
    name: str, data: TensorLike, step: TensorLike = None, buckets: int | None = None, description: str | None = None
) -> jax.Array | bool:
    """Writes a histogram of the elements of a tensor, with 30 buckets by default."""

    def write(events: Any, tag: str, x: np.ndarray, at: int) -> None:
        events.add_histogram(tag, x.astype(np.float64).reshape(-1), at, bins=30 if buckets is None else buckets)

    return _record(name, data, step, write)


def image(
    name: str, data: TensorLike, step: TensorLike = None, max_outputs: int = 3, description: str | None = None
) -> jax.Array | bool:
    """Writes the first images of `[n, height, width, channels]`: floats from 0 to 1, or uint8."""
    shape = convert_to_tensor(data).shape
    if len(shape) != 4:
        raise ValueError(f"tf.summary.image takes [n, height, width, channels], got shape {tuple(shape)} for {name!r}.")

    def write(events: Any, tag: str, x: np.ndarray, at: int) -> None:
        x = x if x.dtype == np.uint8 else np.clip(x.astype(np.float32), 0, 1)
        for i, picture in enumerate(x[:max_outputs]):
            picture = np.repeat(picture, 3, -1) if picture.shape[-1] == 1 else picture
            events.add_image(
                tag if i == 0 and len(x[:max_outputs]) == 1 else f"{tag}/{i}", picture, at, dataformats="HWC"
            )

    return _record(name, data, step, write)


def text(name: str, data: TensorLike, step: TensorLike = None, description: str | None = None) -> jax.Array | bool:
    """Writes text, which is known outside of compiled code: a string or a tensor of strings."""
    flat = np.asarray(convert_to_tensor(data), object).reshape(-1)
    joined = "\n\n".join(x.decode() if isinstance(x, bytes) else str(x) for x in flat)
    return _record(name, 0, step, lambda events, tag, x, at: events.add_text(tag, joined, at))


def trace_on(graph: bool = True, profiler: bool = False, profiler_outdir: str | None = None) -> None:
    """Begins a trace: with `profiler`, a profile in the folder `profiler_outdir`. `graph` records nothing here.

    As in TensorFlow, a warning says that a trace goes on already, or that the profile has no folder.
    """
    if _state.traces:
        tracebacks.warn("Trace already enabled")
        return
    _state.traces = True
    if profiler and profiler_outdir is None:
        tracebacks.warn("No `profiler_outdir` passed to trace_on(). Profiler won't be enabled.")
    elif profiler and profiler_outdir is not None:
        _profiler.start(profiler_outdir)
        _state.profiles = True


def trace_export(name: str, step: TensorLike = None, profiler_outdir: str | None = None) -> None:
    """Ends a trace. TensorFlow also writes a summary of the graph, which replicax does not have.

    Raises:
        ValueError: there is no trace, or neither `step` nor `set_step` says the step.
    """
    if not _state.traces:
        raise ValueError("Must enable trace before export through tf.summary.trace_on.")
    if step is None and _state.step is None:
        raise ValueError(
            "No step set. Please specify one either through the `step` argument or through "
            "tf.summary.experimental.set_step()"
        )
    trace_off()


def trace_off() -> None:
    """Ends a trace, if there is one, and its profile."""
    profiles = _state.profiles
    _state.traces = _state.profiles = False
    if profiles:
        _profiler.stop()


SUMMARY = """SummaryWriter create_file_writer create_noop_writer flush histogram image record_if scalar
should_record_summaries text trace_export trace_off trace_on"""
