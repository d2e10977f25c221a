"""`tf.profiler.experimental` through `jax.profiler`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


def start(logdir: Any, options: Any = None) -> None:
    """Begins a profile, which TensorBoard and Perfetto show."""
    jax.profiler.start_trace(str(logdir))


def stop(save: bool = True) -> None:
    """Ends the profile and writes it."""
    jax.profiler.stop_trace()


@contextlib.contextmanager
def Profile(logdir: Any, options: Any = None) -> Iterator[None]:
    """A context of which a profile is made."""
    with jax.profiler.trace(str(logdir)):
        yield


def Trace(name: str, **kwargs: Any) -> contextlib.AbstractContextManager[Any]:
    """A context that stands in the profile under a name; with `step_num` as a step of training."""
    if "step_num" in kwargs:
        return jax.profiler.StepTraceAnnotation(name, **kwargs)
    return jax.profiler.TraceAnnotation(name, **kwargs)


PROFILER: dict[str, Any] = {"Profile": Profile, "Trace": Trace, "start": start, "stop": stop}
