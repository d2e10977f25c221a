"""`profile`: JAX's trace of the host and the devices, in which steps and replicas have names.

Calls of compiled functions and eager replicas look at `active`, which is None while no profile is on, and annotate
themselves with `step` and `replica`. Programs name the operations of replicas by themselves, with `jax.named_scope`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import jax

active: profile | None = None


def step(function: str, number: int) -> contextlib.AbstractContextManager[object]:
    """Returns a context that stands in the trace as a step, for one call of a compiled function."""
    return jax.profiler.StepTraceAnnotation(function, step_num=number)


def replica(number: int) -> contextlib.AbstractContextManager[object]:
    """Returns a context that stands in the trace as a replica, for an eager replica in its own thread."""
    return jax.profiler.TraceAnnotation(f"replica {number}")


class profile(contextlib.AbstractContextManager["profile", None]):
    """Traces what happens in the `with`, for XProf and Perfetto.

    Every call of a `replicax.function` in it is a step, with the function's name and the number of the call, counted
    from the function's first call on. Leaving waits for what the devices are still at.

    Args:
        directory: where the trace goes; XProf is started with the same. It is made where it is not there.
        run: a name for this trace in XProf, the time by default. Workers of a job that give the same one are shown
            together.
        python: whether calls of Python functions are in the trace. It is slower then, and far larger.

    Raises:
        RuntimeError: a profile is on already.
        OSError: the directory cannot be made or written.

    Attributes:
        files: the files that were written, once the `with` has ended: one for XProf, and one, `.trace.json.gz`, that
            https://ui.perfetto.dev opens. In a job of several workers their names have the worker's number.

    >>> import os, tempfile, jax.numpy as jnp, replicax as rx
    >>> train_step = rx.function(lambda x: x + 1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with rx.profile(directory, run="first") as profile:
    ...         x = train_step(jnp.ones(2))
    ...     print([path.relative_to(directory).parts[:3] for path in profile.files][0])
    ...     print(["".join(path.suffixes[-2:]) for path in profile.files])
    ('plugins', 'profile', 'first')
    ['.xplane.pb', '.json.gz']
    """

    def __init__(self, directory: str | os.PathLike[str], run: str | None = None, python: bool = False):
        if run is not None and (not run or Path(run).name != run):
            raise ValueError(f"`run` is the name of a folder, without a path; got {run!r}.")
        self._directory, self._run, self._python = Path(directory), run, python
        self.files: list[Path] = []

    def __enter__(self) -> profile:
        global active
        if active is not None:
            raise RuntimeError(
                f"A profile is on already, into {active._directory}. There is one at a time in a process: leave its "
                "`with` first."
            )
        self._folder = _writable_folder(self._directory)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._python)
        jax.block_until_ready(jax.live_arrays())  # operations of earlier calls are no part of it
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        active = self
        return self

    def __exit__(self, *error: object) -> None:
        global active
        active = None
        try:
            try:
                jax.block_until_ready(jax.live_arrays())  # of which one may be that of a failed computation
            finally:
                jax.profiler.stop_trace()
            self._keep()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> None:
        """Moves what JAX has written to where XProf looks for it, under names of its own for each worker."""
        worker = f".worker-{jax.process_index()}" if jax.process_count() > 1 else ""
        run = self._run or f"{time.strftime('%Y_%m_%d_%H_%M_%S')}_{time.time_ns() % 10**9:09}"
        target = self._directory / "plugins" / "profile" / run
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(self._folder).glob("plugins/profile/*/*"), reverse=True):
            kind = next((end for end in (".xplane.pb", ".trace.json.gz") if path.name.endswith(end)), path.suffix)
            name = f"{path.name.removesuffix(kind)}{worker}{kind}"
            self.files.append(Path(shutil.move(path, target / name)))


def _writable_folder(directory: Path) -> str:
    """Makes a new folder in the directory; `OSError` if there can be none."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".writing-", dir=directory)
    except OSError as error:
        raise type(error)(
            f"A profile cannot be written to {directory}: {error.strerror}. Give a directory that can be made or "
            "written to."
        ) from error
