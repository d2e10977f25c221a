"""The processes of a job that `launch` starts: its launcher and, started by that, its workers.

    python _function_job.py launch FOLDER
    python _function_job.py work FOLDER

FOLDER holds `start.json` (Python's path, the launcher's options, and sources that are in no file) and `call` (the
function with its arguments, pickled). A worker writes `N.result` or `N.error`, and the launcher `outcome.json`.
"""

from __future__ import annotations

import io
import json
import linecache
import marshal
import os
import pickle
import sys
import time
import types
from pathlib import Path
from typing import Any


def pickle_by_value(value: object, label: str) -> bytes:
    """Return an object as bytes, functions and classes of `__main__` by value, and JAX arrays as NumPy arrays.

    A JAX array would start the devices of the process that loads it, and a worker has to join its job first.

    Args:
        value: the object.
        label: the name of the object in the error.

    Raises:
        ImportError: cloudpickle is not installed.
        TypeError: it cannot be pickled.
    """
    from replicax._base import doc_pages

    try:
        import cloudpickle
    except ImportError as error:
        command = doc_pages.install("ps")
        raise ImportError(f"`launch` sends functions with cloudpickle. Install it: {command}.") from error
    jax = sys.modules.get("jax")  # without it there are no arrays

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):  # cloudpickle drops the name of the file, which tracebacks show
                return marshal.loads, (marshal.dumps(obj),)
            if jax and isinstance(obj, jax.Array) and not jax.dtypes.issubdtype(obj.dtype, jax.dtypes.prng_key):
                return obj.__array__().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    out = io.BytesIO()
    try:
        Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        raise TypeError(
            f"{label} cannot be sent to another process: {error}. Create strategies, variables and datasets inside of "
            "the function, and return arrays and Python objects."
        ) from error
    return out.getvalue()


def _launch(folder: Path, options: list[str]) -> None:
    from replicax._base.errors import JobError
    from replicax._launch._cli import complete, parser
    from replicax._launch._environment import LaunchError
    from replicax._launch._launcher import Launcher, Plan
    from replicax._launch._output import Screen

    class ScreenWithoutAlarms(Screen):
        """A screen that shows no failure, since `launch` raises it."""

        alarm = ""

        def say(self, text: str, *, alarm: bool = False) -> None:
            if alarm:
                self.alarm = text
            else:
                super().say(text)

    screen = ScreenWithoutAlarms()
    try:
        if os.name != "posix":
            raise LaunchError("`launch` needs Linux or macOS.")
        plan = parser("replicax.launch").parse_args([*options, __file__, "work", str(folder)], Plan())
        screen.colour(plan.color)
        complete(plan)
        launcher = Launcher(plan, screen)
        status = launcher.run()
    except (LaunchError, JobError) as error:
        screen.alarm, status = str(error), 2
    _write(folder / "outcome.json", json.dumps({"status": status, "text": screen.alarm}).encode())
    screen.close(5.0)


def _work(folder: Path, sources: dict[str, list[str]]) -> None:
    from replicax._job.process_exit import caused_by_another
    from replicax._transport.errors import described

    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    # As in a notebook: the job compares no programs, and a process that this one starts does not run this file.
    del sys.modules["__main__"].__file__
    sys.argv[1:] = []
    linecache.cache.update({name: (sum(map(len, lines)), None, lines, name) for name, lines in sources.items()})
    fn, args, kwargs = pickle.loads((folder / "call").read_bytes())
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        if not caused_by_another(error):
            _write_error(folder, worker, *described(error, trusted=True))
        raise
    try:
        data = pickle_by_value(result, f"The result of worker {worker}")
    except TypeError as error:
        _write_error(folder, worker, *described(error, trusted=True))
        raise
    _write(folder / f"{worker}.result", data)


def _write_error(folder: Path, worker: int, head: dict[str, Any], arrays: list[Any]) -> None:
    error = {"worker": worker, "time": time.time(), "head": head, "arrays": arrays}
    _write(folder / f"{worker}.error", pickle.dumps(error))


def _write(path: Path, data: bytes) -> None:
    """Write a file in one piece."""
    new = path.with_name(f".{path.name}")
    new.write_bytes(data)
    new.replace(path)


if __name__ == "__main__":
    _role, _folder = sys.argv[1], Path(sys.argv[2])
    _start = json.loads((_folder / "start.json").read_text(encoding="utf-8"))
    sys.path[:] = _start["path"]
    if _role == "launch":
        _launch(_folder, _start["options"])
    else:
        _work(_folder, _start["sources"])
