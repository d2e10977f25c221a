"""`profile`: a trace of what the host and the devices do, in which the steps and the replicas have their names.

Calls of compiled functions and eager replicas look at `active`, which is None while no profile is on. JAX writes the
trace for XProf; a second one for Perfetto is made of it, with the operations of each replica under its name.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from replicax import _devices

active: profile | None = None


def identifier(function: Any) -> str:
    """What a function is called in programs and traces."""
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "function"


class profile(contextlib.AbstractContextManager):
    """Traces what happens in the `with`, for XProf and Perfetto.

    Every call of a `replicax.function` in it is a step, with the function's name and the number of the call, counted
    from the function's first call on. Leaving waits for what the devices are still at.

    Args:
        directory: where the trace goes; XProf is started with the same. It is made where it is not there.
        run: a name for this trace in XProf, the time by default. Workers of a job that give the same one are shown
            together.
        perfetto: whether to write the file for https://ui.perfetto.dev as well.
        python: whether calls of Python functions are in the trace. It is slower then, and far larger.

    Raises:
        RuntimeError: a profile is on already.
        OSError: the directory cannot be made or written.

    Attributes:
        files: the files that were written, once the `with` has ended. In a job of several workers their names have the
            worker's number.

    >>> import os, tempfile, jax.numpy as jnp, replicax as rx
    >>> train_step = rx.function(lambda x: x + 1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with rx.profile(directory, run="first") as profile:
    ...         x = train_step(jnp.ones(2))
    ...     print([path.relative_to(directory).parts[:3] for path in profile.files][0])
    ...     print(["".join(path.suffixes[-2:]) for path in profile.files])
    ('plugins', 'profile', 'first')
    ['.xplane.pb', '.json.gz', '.json.gz']
    """

    def __init__(
        self, directory: str | os.PathLike[str], run: str | None = None, perfetto: bool = True, python: bool = False
    ):
        if run is not None and (not run or Path(run).name != run):
            raise ValueError(f"`run` is the name of a folder, without a path; got {run!r}.")
        self._directory, self._run, self._perfetto, self._python = Path(directory), run, perfetto, python
        self._replicas: dict[jax.Device, list[int]] = {}  # the numbers of those that ran on a device
        self._functions: dict[int, Any] = {}  # that were called, by id
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

    def step(self, function: Any, number: int) -> contextlib.AbstractContextManager[Any]:
        """A context for one call of a compiled function."""
        self._functions[id(function)] = function
        return jax.profiler.StepTraceAnnotation(function._name, step_num=number)

    def replica(self, mesh: Any, number: int) -> contextlib.AbstractContextManager[Any]:
        """A context for what a replica does eagerly, in a thread of its own."""
        self._saw(mesh)
        return jax.profiler.TraceAnnotation(f"replica {number}")

    def _saw(self, mesh: Any) -> None:
        for number, devices in enumerate(mesh.logical_devices):
            for device in devices:
                numbers = self._replicas.setdefault(device, [])
                if number not in numbers:
                    numbers.append(number)

    def _keep(self) -> None:
        """Moves what JAX has written to where XProf looks for it, under names of its own for each worker."""
        worker = f".worker-{jax.process_index()}" if jax.process_count() > 1 else ""
        written = {}
        for path in Path(self._folder).glob("plugins/profile/*/*"):
            kind = next((end for end in (".xplane.pb", ".trace.json.gz") if path.name.endswith(end)), path.suffix)
            written[path] = f"{path.name.removesuffix(kind)}{worker}{kind}"
        target = _run_folder(self._directory / "plugins" / "profile", self._run, written.values())
        target.mkdir(parents=True, exist_ok=True)
        for path, name in sorted(written.items(), reverse=True):
            self.files.append(Path(shutil.move(path, target / name)))
        for path in [path for path in self.files if path.name.endswith(".trace.json.gz") and self._perfetto]:
            self.files.append(path.with_name(path.name.replace(".trace.", ".perfetto.")))
            _rewrite(path, self.files[-1], *self._names())

    def _names(self) -> tuple[dict[int, str], dict[int, str]]:
        """What this process's devices are called, by the numbers that CPU devices and those that others have."""
        for function in self._functions.values():
            for mesh in function._meshes():
                self._saw(mesh)
        here = jax.process_index()
        names = {device: self._name(device) for device in self._replicas if device.process_index == here}
        cpus = {device.id: name for device, name in names.items() if device.platform == "cpu"}
        others = {device.local_hardware_id: name for device, name in names.items() if device.platform != "cpu"}
        return cpus, others

    def _name(self, device: jax.Device) -> str:
        numbers = self._replicas[device]
        return f"replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {_devices.short_name(device)}"


def _writable_folder(directory: Path) -> str:
    """A new folder in the directory; `OSError` where there can be none."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".writing-", dir=directory)
    except OSError as error:
        raise type(error)(
            f"A profile cannot be written to {directory}: {error.strerror}. Give a directory that can be made or "
            "written to."
        ) from error


def _run_folder(parent: Path, run: str | None, names: Iterable[str]) -> Path:
    """The folder of a run: of the name given, or of the time, and a number where files of these names are there."""
    if run is not None:
        return parent / run
    time_of_it = time.strftime("%Y_%m_%d_%H_%M_%S")
    folders = (parent / f"{time_of_it}{end}" for end in itertools.chain([""], (f"_{i}" for i in itertools.count(2))))
    return next(folder for folder in folders if not any((folder / name).exists() for name in names))


def _rewrite(source: Path, target: Path, cpus: dict[int, str], others: dict[int, str]) -> None:
    """A trace for Perfetto, in which the operations of each device stand under its name, with the steps above them."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    trace = {"traceEvents": named(events, cpus, others), "displayTimeUnit": "ns"}
    with gzip.open(target, "wb", compresslevel=1) as file:
        file.write(json.dumps(trace).encode())  # `json.dump` takes ten times as long


_FIRST, _STEPS = 1 << 20, 1  # numbers of processes for CPU devices, and of the thread that shows the steps


def named(events: list[dict[str, Any]], cpus: dict[int, str], others: dict[int, str]) -> list[dict[str, Any]]:
    """The events of a trace, those of each device under its name.

    CPU devices share a pool of threads, in which their operations are mixed: each gets a process of its own here, the
    steps above its operations. Other devices have processes, which get other names.

    Args:
        events: as JAX writes them.
        cpus: the names of CPU devices, by their ids.
        others: the names of other devices, by their numbers on the machine.
    """
    calls = _calls_of_steps(events)
    spans: dict[tuple[int, str], tuple[float, float]] = {}  # of each CPU device and call: when it began and ended
    shown: list[dict[str, Any]] = []
    for event in events:
        if not event:  # JAX ends its list with one
            continue
        args = event.get("args", {})
        if event.get("name") == "process_name" and (number := _ordinal(args.get("name", ""))) in others:
            event = {**event, "args": {"name": f"{others[number]} ({args['name']})"}}
        elif (device := int(args.get("device_ordinal", -1))) in cpus:
            event = {**event, "pid": _FIRST + device}
            if (run := args.get("run_id")) in calls:
                start, end = event["ts"], event["ts"] + event.get("dur", 0)
                before = spans.get((device, run), (start, end))
                spans[device, run] = min(start, before[0]), max(end, before[1])
        shown.append(event)
    for device in sorted({event["pid"] - _FIRST for event in shown} & set(cpus)):
        place = {"ph": "M", "pid": _FIRST + device}
        shown.append({**place, "name": "process_name", "args": {"name": cpus[device]}})
        shown.append({**place, "name": "process_sort_index", "args": {"sort_index": device}})
        shown.append({**place, "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}})
    for (device, run), (start, end) in spans.items():
        step = {"name": calls[run], "ts": start, "dur": end - start}
        shown.append({"ph": "X", "pid": _FIRST + device, "tid": _STEPS, **step})
    return shown


def _ordinal(process: str) -> int | None:
    """The number of the device whose events stand under this name, such as "/device:GPU:0"."""
    kind, _, number = process.rpartition(":")
    return int(number.split()[0]) if kind.startswith("/device:") and number[:1].isdigit() else None


def _calls_of_steps(events: list[dict[str, Any]]) -> dict[str, str]:
    """The name and number of the step in which each call of a program was made, by the call's number."""
    steps: dict[Any, list[dict[str, Any]]] = {}  # by threads, in their order
    for event in sorted((e for e in events if "step_num" in e.get("args", {})), key=_start):
        steps.setdefault((event["pid"], event["tid"]), []).append(event)
    found = {}
    for event in events:
        run = event.get("args", {}).get("run_id")
        own = steps.get((event.get("pid"), event.get("tid")), ())
        if run is None or run in found or not own:
            continue
        step = own[bisect.bisect(own, event["ts"], key=_start) - 1]
        if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]:
            found[run] = f"{step['name']} {step['args']['step_num']}"
    return found


def _start(event: dict[str, Any]) -> float:
    return event["ts"]
