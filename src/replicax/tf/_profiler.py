"""`tf.profiler.experimental` through `replicax.profile`."""

from __future__ import annotations

import contextlib
import os

import jax

from replicax.tf._core import profile

_started: list[profile] = []


def start(logdir: str | os.PathLike[str], options: object = None) -> None:
    """Begins a profile, which TensorBoard and Perfetto show."""
    _started.append(profile(logdir).__enter__())


def stop(save: bool = True) -> None:
    """Ends the profile and writes it."""
    if not _started:
        raise RuntimeError("There is no active profile: call `start` first.")
    _started.pop().__exit__()


def Profile(logdir: str | os.PathLike[str], options: object = None) -> profile:
    """Returns a context that is profiled."""
    return profile(logdir)


def Trace(name: str, **kwargs: object) -> contextlib.AbstractContextManager[object]:
    """Returns a context that the profile shows under a name; with `step_num` as a training step."""
    if "step_num" in kwargs:
        return jax.profiler.StepTraceAnnotation(name, **kwargs)
    return jax.profiler.TraceAnnotation(name, **kwargs)


PROFILER: dict[str, object] = {"Profile": Profile, "Trace": Trace, "start": start, "stop": stop}
